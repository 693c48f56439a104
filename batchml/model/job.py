"""The content of a `job.toml` (JobSpec), and its rules: nodes, groups, parameters, resources."""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from batchml.errors import ConfigError
from batchml.model.data import data_mistakes
from batchml.model.fallback import Fallback, fallback_mistakes
from batchml.model.names import is_valid_name
from batchml.model.secrets import ENV_NAME, EXAMPLES, secret_mistakes
from batchml.model.tables import parse_duration, parse_size, read_struct
from batchml.runtime.protocol.launch import KINDS
from batchml.runtime.protocol.variables import (
    FOLDERS,
    KEBAB,
    fill_command,
    fill_words,
    folder_placeholders,
    params_placeholders,
    placeholders,
    switches,
    unknown_data,
    with_kebab_flags,
)

# --- Rules for `nodes`, `[launch]`, `[health]` and `[[groups]]` -----------------------------------


ResourceMistakes = Callable[["Resources", str], Iterable[str]]  # called with the key of the table

_DURATION = 'Write a duration such as "10m", "90s" or "1h30m".'


def node_mistakes(
    spec: "JobSpec", table: Mapping[str, Any], of_resources: ResourceMistakes
) -> Iterator[str]:
    """The mistakes in these keys that types cannot find.

    `of_resources` finds the mistakes in the resources of a group. `table` is the file's table:
    mistakes that follow from a refused key are not reported.
    """
    is_known = _is_kind_known(spec, table.get("launch"))
    yield from _launch_mistakes(spec, is_known)
    yield from _health_mistakes(spec, is_known)
    yield from _groups_mistakes(spec, table.get("groups"), is_known, of_resources)


def _is_kind_known(spec: "JobSpec", given: Any) -> bool:
    """False if the file's launch kind was refused, so that `spec` has the default kind."""
    if isinstance(given, Mapping):
        return bool(given.get("kind", spec.launch.kind) == spec.launch.kind)
    return given is None or given == spec.launch


def _launch_mistakes(spec: "JobSpec", is_known: bool) -> Iterator[str]:
    launch, kind = spec.launch, spec.launch.kind
    for key, text in (("hang_after", launch.hang_after), ("start_within", launch.start_within)):
        if text is not None and not parse_duration(text):
            yield f"launch.{key}: found {text!r}. {_DURATION}"
    processes = launch.processes_per_node
    if processes != "auto" and processes < 1:
        yield f'launch.processes_per_node: found {processes}. Expected at least 1, or "auto".'
    if not is_known:
        return
    for key, is_set in (
        ("processes_per_node", processes != "auto"),
        ("logs", launch.logs != "all"),
        ("hang_after", launch.hang_after is not None),
        ("start_within", launch.start_within != type(launch)().start_within),
    ):
        kinds = [name for name, row in KINDS.items() if key in row.settings]
        if is_set and kind not in kinds:
            yield f"launch.{key}: needs kind = {_listed(kinds)}, found {kind!r}."


def _listed(kinds: Sequence[str]) -> str:
    return " or ".join(f'"{kind}"' for kind in kinds)


def _health_mistakes(spec: "JobSpec", is_known: bool) -> Iterator[str]:
    floor = spec.health.bandwidth
    if floor is None:
        return
    if not parse_size(floor):
        yield (
            f"health.bandwidth: found {floor!r}. Write the least amount that nodes must send each "
            f'other in a second, such as "100 MiB".'
        )
        return
    kinds = [name for name, row in KINDS.items() if row.is_supervised]
    if is_known and spec.launch.kind not in kinds:
        yield (
            f"health.bandwidth: is measured between the nodes of launch.kind = {_listed(kinds)}, "
            f"found {spec.launch.kind!r}."
        )


def _groups_mistakes(
    spec: "JobSpec", given: Any, is_known: bool, of_resources: ResourceMistakes
) -> Iterator[str]:
    groups, is_ray = spec.groups, spec.launch.kind == "ray"
    if groups and is_known and not is_ray:
        yield f'groups: need launch.kind = "ray", found {spec.launch.kind!r}.'
    if is_ray and not given:
        yield (
            'launch.kind: "ray" needs [[groups]] in a job.toml, the head first, for example: '
            '[[groups]] name = "head", then [[groups]] name = "workers", count = 4, queue = "cpu".'
        )
    if groups and spec.nodes > 1:
        yield f"nodes: found {spec.nodes} with groups. Set the count of each group instead."
    for index, group in enumerate(groups):
        where, before = f"groups[{index}]", [each.name for each in groups[:index]]
        yield from _group_mistakes(where, group, index == 0, before)
        if _is_count_known(group, given, index):
            yield from _count_mistakes(where, group, index == 0)
        if group.resources is not None:
            yield from of_resources(group.resources, f"{where}.resources")


def _is_count_known(group: "Group", given: Any, index: int) -> bool:
    """False if the file's count was refused, so that `group` has the default count."""
    table = given[index] if isinstance(given, Sequence) and index < len(given) else None
    return not isinstance(table, Mapping) or table.get("count", group.count) == group.count


def _group_mistakes(
    where: str, group: "Group", is_head: bool, before: Sequence[str]
) -> Iterator[str]:
    if not group.name:
        yield f'{where}.name: missing. For example name = "{"head" if is_head else "workers"}".'
    elif not is_valid_name(group.name):
        yield (
            f"{where}.name: found {group.name!r}. Allowed: 1-128 letters, digits, - and _, "
            f"starting with a letter or digit."
        )
    elif group.name in before:
        yield f"{where}.name: {group.name!r} is the name of another group, too."


def _count_mistakes(where: str, group: "Group", is_head: bool) -> Iterator[str]:
    if is_head and group.count != 1:
        yield f"{where}.count: found {group.count}. The first group is the head, which is one job."
    if is_head and group.min is not None:
        yield f"{where}.min: the first group is the head, which is always needed."
    elif group.min is not None and group.min > group.count:
        yield f"{where}.min: found {group.min}, more than its count, {group.count}."


# --- Job ------------------------------------------------------------------------------------------


Scalar = str | int | float | bool

MAX_OVERRIDES = 8192  # bytes of containerOverrides as JSON; AWS Batch fails jobs with more
DEFAULT_GRACE = 30  # seconds from the stop signal to the kill, as in runtime/protocol/variables.py
MIN_TIMEOUT = 60  # seconds; AWS Batch, JobTimeout
MIN_IDLE = 60  # seconds; the runtime measures use every 30 s
MAX_IDLE = 10 * 86_400
MAX_MEMORY = 100 * 1024**4  # bytes; the largest host of EC2 has 32 TiB
MIN_MEMORY = 4 * 1024**2  # bytes; AWS Batch, ResourceRequirement
MAX_NEURONS = 64  # of one container; hosts have at most 16
MIN_SHM_MIB = 64  # Docker's default
MIN_UNITLESS = 1024  # MiB; a smaller number without a unit is probably meant as GiB
PATTERN_EXAMPLE = "Under [metrics], for example: loss = 'loss=([0-9.]+)'"

# Variables that batchml/model/group.py sets for the nodes of a run.
_LAUNCH_VARIABLES = frozenset(
    f"BATCHML_{name}" for name in ("LAUNCH", "GANG_TOKEN", "GANG", "GANG_KEY", "HEALTH")
)


# The GPUs of one container. "auto": one where the hosts have GPUs, else none; `runs/gpus` decides.
AUTO: Final = "auto"
Gpus = Annotated[int, Meta(ge=0, le=1_000)] | Literal["auto"]


class Resources(Struct, frozen=True, forbid_unknown_fields=True):
    """`[resources]`: the needs of one container."""

    vcpus: Annotated[int, Meta(ge=1, le=10_000)] = 1  # more than any host has: 1,920
    memory: str | int = "2 GiB"
    gpus: Gpus = 0
    neurons: Annotated[int, Meta(ge=0, le=MAX_NEURONS)] = 0  # chips: Trainium or Inferentia
    shm: str | int | None = None  # the size of /dev/shm; None: half of the memory

    @property
    def gpu_count(self) -> int:
        """The number of GPUs. Raises ValueError for "auto", which no request may contain."""
        return int(self.gpus)

    @property
    def memory_mib(self) -> int:
        return (parse_size(self.memory) or 0) // 1024**2

    @property
    def shm_mib(self) -> int:
        """The size of /dev/shm in MiB: by default half of the memory, as on any Linux machine.

        Pages of /dev/shm count as memory of the container, and only once they are written, so a
        large size costs nothing. With half, a full /dev/shm is an error that the program sees, and
        does not use up the container's memory. Docker's default, 64 MiB, is too small for a
        DataLoader with workers. Source: tmpfs(5), `size`; Docker reference, `--shm-size`.
        """
        if self.shm is not None:
            return (parse_size(self.shm) or 0) // 1024**2
        return max(MIN_SHM_MIB, self.memory_mib // 2)


class Retry(Struct, frozen=True, forbid_unknown_fields=True):
    """`[retry]`: the most attempts, and the outcomes after which a new attempt is started."""

    attempts: Annotated[int, Meta(ge=1, le=10)] = 1
    on: tuple[Literal["host-lost", "image-error", "app-error", "out-of-memory"], ...] = (
        "host-lost",
    )


class Launch(Struct, frozen=True, forbid_unknown_fields=True):
    """`[launch]`: how the command is started on the nodes."""

    kind: Literal["plain", "torchrun", "mpi", "ray"] = "plain"
    processes_per_node: int | Literal["auto"] = "auto"
    logs: Literal["all", "main"] = "all"
    hang_after: str | int | None = None
    start_within: str | int = "20m"


class Health(Struct, frozen=True, forbid_unknown_fields=True):
    """`[health]`: the checks of hosts before the command starts, and the rules for unfit hosts."""

    checks: Literal["off", "quick", "deep"] = "quick"
    bandwidth: str | int | None = None  # the least amount that nodes send each other in a second
    tries: Annotated[int, Meta(ge=1, le=9)] = 3  # how many hosts may be unfit before the run fails
    quarantine: bool = False  # whether to drain an unfit host


class CheckpointSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[checkpoint]`: the time for a last checkpoint."""

    grace: str | int = DEFAULT_GRACE  # the time between the stop signal and the kill

    @property
    def grace_seconds(self) -> int:
        return parse_duration(self.grace) or 0


class MetricSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """A metric under `[metrics]` as a table: how it is read, and which value is the best."""

    pattern: str = ""  # "" for a metric that the program reports
    best: Literal["max", "min"] | None = None


class Group(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[groups]]`: jobs of the same shape in a group run. The first group is the head."""

    name: str = ""
    count: Annotated[int, Meta(ge=1, le=10_000)] = 1
    min: Annotated[int, Meta(ge=0)] | None = None  # the number to start with; None: all
    queue: str = ""
    resources: Resources | None = None  # None: the resources of the job


class JobSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A job, as `read_job` reads it from a `job.toml`. The fields have the limits of AWS Batch."""

    image: str = ""
    command: tuple[str, ...] = ()
    name: str = ""
    queue: str = ""
    flags: Literal["as-is", "kebab"] = "as-is"  # the spelling of `{params}`
    code: str | bool = "."
    nodes: Annotated[int, Meta(ge=1, le=1000)] = 1
    params: dict[str, Scalar] = {}
    resources: Resources = Resources()
    env: dict[str, Scalar] = {}
    secrets: dict[str, str] = {}
    data: dict[str, str] = {}  # name -> s3:// address, or folder
    retry: Retry = Retry()
    timeout: str | int | None = None
    idle_after: str | int | None = None  # the time of idleness after which the run ends
    launch: Launch = Launch()
    checkpoint: CheckpointSettings = CheckpointSettings()
    health: Health = Health()
    metrics: dict[str, str | MetricSettings] = {}
    groups: tuple[Group, ...] = ()
    fallback: Fallback = Fallback()
    keep: bool | tuple[str, ...] = True

    @property
    def timeout_seconds(self) -> int | None:
        return None if self.timeout is None else parse_duration(self.timeout)

    @property
    def idle_seconds(self) -> int:
        """The seconds of idleness after which the run ends; 0: never."""
        return 0 if self.idle_after is None else parse_duration(self.idle_after) or 0

    @property
    def patterns(self) -> dict[str, str]:
        """The patterns under `[metrics]`: name -> regular expression."""
        found = {name: _pattern(each) for name, each in self.metrics.items()}
        return {name: pattern for name, pattern in found.items() if pattern}

    @property
    def directions(self) -> dict[str, str]:
        """The metrics whose best value is known to be the greatest ("max") or least ("min")."""
        tables = {n: e for n, e in self.metrics.items() if isinstance(e, MetricSettings)}
        return {name: each.best for name, each in tables.items() if each.best}

    @property
    def template(self) -> tuple[str, ...]:
        """The command, whose `{params}` says how it spells flags."""
        is_kebab = self.flags == KEBAB
        return tuple(with_kebab_flags(self.command, self.params)) if is_kebab else self.command

    def argv(self) -> list[str]:
        """The command with the values of its `{placeholders}`; `{params}` becomes several words."""
        return fill_command(self.template, self.params)

    def empty_words(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the index of each empty word of the command, with the parameters that cause it."""
        named = {n for part in self.command for n in placeholders(part, self.params)}
        rest = [name for name, value in self.params.items() if value == "" and name not in named]
        for index, words in enumerate(fill_words(self.command, self.params)):
            if "" in words:
                own = placeholders(self.command[index], self.params)
                yield index, list(dict.fromkeys(own)) or rest


def read_job(
    table: Mapping[str, Any],
    where: str,
    check: Callable[[JobSpec], Iterable[str]] = lambda _: (),
    provided_params: Collection[str] = (),
) -> JobSpec:
    """Read the job of a parsed `job.toml`. Raises ConfigError with every mistake at once.

    `check` finds mistakes that depend on other files. `provided_params` names parameters that need
    no default, because the caller sets them.
    """
    spec, mistakes = read_struct(table, JobSpec)
    mistakes = [_with_example(mistake) for mistake in mistakes]
    mistakes += _mistakes(spec, table, provided_params)
    mistakes += check(spec)
    if mistakes:
        raise ConfigError(where, mistakes)
    return spec


def change_job(spec: JobSpec, changes: Mapping[str, Any], where: str) -> JobSpec:
    """Return `spec` with fields replaced. Values of None are ignored, and tables are merged.

    `where` names the source of the changes. Raises ConfigError if the result breaks a rule: flags
    have the same rules as files.
    """
    table = msgspec.to_builtins(spec)
    changed: dict[str, Any] = {}
    for key, value in changes.items():
        if isinstance(value, Mapping):
            inner = {name: each for name, each in value.items() if each is not None}
            if inner:
                changed[key] = {**table[key], **inner}
        elif value is not None:
            changed[key] = value
    return read_job({**table, **changed}, where) if changed else spec


def _mistakes(
    spec: JobSpec, table: Mapping[str, Any], provided_params: Collection[str]
) -> Iterator[str]:
    """The mistakes that types cannot find, without keys that types have refused already."""
    if not spec.image and "image" not in table:
        yield (
            'image: missing. Name a folder under images/, for example image = "pytorch", or put a '
            "requirements.txt beside the file."
        )
    if not spec.command and "command" not in table:
        yield 'command: missing. For example command = ["python", "train.py"].'
    elif spec.command == () and table.get("command") == []:
        yield "command: is empty."
    elif spec.command and not spec.argv():
        yield "command: is only {params}, and the job has no params. Write a program before it."
    for index, part in enumerate(spec.command):
        if not part:
            yield f"command[{index}]: is an empty text, which AWS Batch refuses."
    known = {**dict.fromkeys(provided_params, ""), **spec.params}
    folders = folder_placeholders(spec.command)
    for name in sorted({n for part in spec.command for n in placeholders(part, known)}):
        if name not in known and name not in folders:
            yield f"command: {{{name}}} has no default under [params]."
    for name in unknown_data([*folders, *params_placeholders(spec.params)], spec.data):
        yield f"command: {{{name}}} is no data set under [data]."
    for name in sorted({n for part in spec.command for n in switches(part, known)}):
        if name in spec.params and not isinstance(spec.params[name], bool):
            yield f"params.{name}: decides on a flag of the command. Expected true or false."
    yield from command_mistakes(spec.command)
    if spec.name and not is_valid_name(spec.name):
        yield (
            f"name: found {spec.name!r}. Allowed: 1-128 letters, digits, - and _, "
            f"starting with a letter or digit."
        )
    yield from _resource_mistakes(spec.resources)
    yield from _time_mistakes(spec)
    yield from node_mistakes(spec, table, _resource_mistakes)
    yield from fallback_mistakes(spec.fallback, spec.queue, spec.groups)
    yield from _keep_mistakes(spec.keep)
    for name in spec.env:
        if not re.fullmatch(ENV_NAME, name):
            yield f"env.{name}: is not a name for an environment variable."
        elif name.startswith("AWS_BATCH"):
            yield f"env.{name}: names that start with AWS_BATCH are reserved for AWS Batch."
        elif name in _LAUNCH_VARIABLES:
            yield f"env.{name}: batchml sets it, from [launch], [health] and [[groups]]."
    yield from secret_mistakes(spec.secrets, list(spec.env))
    yield from data_mistakes(spec.data)
    for name, metric in spec.metrics.items():
        yield from _metric_mistakes(name, metric)


_SHELL = r"(?:.*/)?(?:(?:ba|da|z|k|a)?sh|fish)"
_VARIABLE = r"\$\{?((?:BATCHML|AWS_BATCH)_[A-Z0-9_]+)\}?"


def command_mistakes(command: Sequence[str]) -> Iterator[str]:
    """The mistakes of a command without a shell that is written as if a shell read it."""
    if len(command) == 1 and " " in command[0].strip() and command[0][0] not in "./":
        yield f"command: is one word. Did you mean: sh -c {shlex.quote(command[0])}"
        return
    if any(re.fullmatch(_SHELL, word) for word in command):
        return
    names = {placeholder: name for name, placeholder in FOLDERS.items()}
    for found in dict.fromkeys(name for word in command for name in re.findall(_VARIABLE, word)):
        instead = f"Write {{{names[found]}}}." if found in names else "Write: sh -c '...'"
        yield f"command: no shell expands ${found}. {instead}"


MAX_PATTERNS = 50  # of `keep`: AWS Batch limits the variables of a run
MAX_PATTERN = 200  # characters


def _keep_mistakes(keep: bool | tuple[str, ...]) -> Iterator[str]:
    """The mistakes in `keep`: true, false, or patterns of files in the working folder."""
    if isinstance(keep, bool):
        return
    if not keep:
        yield "keep: is an empty list. Write false to keep nothing, true to keep all new files."
    if len(keep) > MAX_PATTERNS:
        yield f"keep: has {len(keep)} patterns; at most {MAX_PATTERNS}."
    for index, pattern in enumerate(keep[:MAX_PATTERNS]):
        parts = pattern.removeprefix("!").split("/")
        if not pattern.strip("!/") or ".." in parts or parts[0] == "" or len(pattern) > MAX_PATTERN:
            yield (
                f"keep[{index}]: found {pattern[:80]!r}. Write a pattern of files in the working "
                f'folder, of at most {MAX_PATTERN} characters: "*.pt" or "out/**".'
            )


def _resource_mistakes(resources: Resources, where: str = "resources") -> Iterator[str]:
    for key in ("memory", "shm"):
        value = getattr(resources, key)
        if value is not None and parse_size(value) is None:
            yield f'{where}.{key}: found {value!r}. Write a size such as "15 GiB" or "512 MiB".'
        elif value is not None and _lacks_unit(value):
            meant = f'"{value} GiB" or "{value} MiB"'
            yield f"{where}.{key}: found {value!r} without a unit. Write {meant}."
    if resources.neurons and resources.gpus not in (0, AUTO):
        yield (
            f"{where}.neurons: found {resources.neurons} with {resources.gpus} GPUs. A host has "
            "GPUs or Neuron chips, not both: remove gpus or neurons."
        )
    memory = parse_size(resources.memory)
    if memory is not None and memory < MIN_MEMORY and not _lacks_unit(resources.memory):
        yield f"{where}.memory: found {resources.memory!r}. At least 4 MiB."
    if memory is not None and memory > MAX_MEMORY:
        yield f"{where}.memory: found {resources.memory!r}. At most 100 TiB."


def _lacks_unit(size: str | int) -> bool:
    """Whether a size is a small number without a unit: it would mean MiB, as in AWS Batch."""
    number = str(size).strip()
    return number.isdecimal() and len(number) <= 4 and 0 < int(number) < MIN_UNITLESS


def _time_mistakes(spec: JobSpec) -> Iterator[str]:
    for key, value in (
        ("timeout", spec.timeout),
        ("checkpoint.grace", spec.checkpoint.grace),
        ("idle_after", spec.idle_after),
    ):
        if value is not None and parse_duration(value) is None:
            yield f'{key}: found {value!r}. Write a duration such as "4h", "90s" or "1h30m".'
    seconds = spec.timeout_seconds
    if seconds is not None and seconds < MIN_TIMEOUT:
        yield f"timeout: found {spec.timeout!r}. AWS Batch requires 60 seconds or more."
    if spec.idle_after is not None and parse_duration(spec.idle_after) is not None:
        if not MIN_IDLE <= spec.idle_seconds <= MAX_IDLE:
            yield f"idle_after: found {spec.idle_after!r}. Give a time from 1 minute to 10 days."
        elif spec.groups:
            yield (
                "idle_after: is not for [[groups]], whose jobs do not know of each other. Set "
                "timeout instead."
            )


def _with_example(mistake: str) -> str:
    """Add an example to a mistake in the types of `[metrics]` or `[secrets]`.

    The value under `[secrets]` is not shown, because it may be the secret itself.
    """
    if re.match(r"secrets\b", mistake):
        return f"{mistake.partition(':')[0]}: expected texts such as {EXAMPLES}."
    return f"{mistake} {PATTERN_EXAMPLE}" if re.match(r"metrics\b", mistake) else mistake


def _pattern(metric: str | MetricSettings) -> str:
    return metric if isinstance(metric, str) else metric.pattern


def _metric_mistakes(name: str, metric: str | MetricSettings) -> Iterator[str]:
    pattern = _pattern(metric)
    if not pattern and isinstance(metric, MetricSettings):
        if metric.best is None:
            yield f'metrics.{name}: is empty. Give a pattern, best = "max" or "min", or both.'
        elif name == "step":
            yield "metrics.step: is no metric and has no best value. Give its pattern."
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield f"metrics.{name}: not a regular expression: {error}. {PATTERN_EXAMPLE}"
    else:
        if groups != 1:
            need = f"needs exactly one (group) around the value, has {groups}"
            yield f"metrics.{name}: {need}. {PATTERN_EXAMPLE}"
