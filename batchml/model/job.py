"""JobSpec: a job as `job.toml` says it."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from batchml.errors import ConfigError, did_you_mean
from batchml.model.fallback import Fallback, fallback_mistakes
from batchml.model.names import is_valid_name
from batchml.model.noderules import node_mistakes
from batchml.model.reading import parse_duration, parse_size, read_struct
from batchml.model.secret import EXAMPLES, secret_mistakes
from batchml.runtime.protocol.variables import fill, filled, placeholders

Scalar = str | int | float | bool

MAX_OVERRIDES = 8192  # bytes of containerOverrides as JSON; AWS Batch refuses more at dispatch
DEFAULT_GRACE = 30  # seconds from the stop signal to the kill, as in runtime/protocol/variables.py
MIN_TIMEOUT = 60  # seconds; AWS Batch, JobTimeout
MIN_MEMORY = 4 * 1024**2  # bytes; AWS Batch, ResourceRequirement
MIN_BARE = 1024  # MiB; a smaller number without a unit is more likely meant as GiB
PATTERN_EXAMPLE = "Under [metrics], for example: loss = 'loss=([0-9.]+)'"

# Variables that say to the nodes of a run what they are together: batchml/model/launching.py.
_OF_LAUNCH = frozenset(
    f"BATCHML_{name}" for name in ("LAUNCH", "GANG_TOKEN", "GANG", "GANG_KEY", "HEALTH")
)

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Resources(Struct, frozen=True, forbid_unknown_fields=True):
    vcpus: Annotated[int, Meta(ge=1)] = 1
    memory: str | int = "2 GiB"
    gpus: Annotated[int, Meta(ge=0)] = 0
    shm: str | int | None = None

    @property
    def memory_mib(self) -> int:
        return (parse_size(self.memory) or 0) // 1024**2


class Retry(Struct, frozen=True, forbid_unknown_fields=True):
    attempts: Annotated[int, Meta(ge=1, le=10)] = 1
    on: tuple[Literal["host-lost", "image-error", "app-error", "out-of-memory"], ...] = (
        "host-lost",
    )


class Launch(Struct, frozen=True, forbid_unknown_fields=True):
    """How the command is started on the nodes."""

    kind: Literal["plain", "torchrun", "ray"] = "plain"
    processes_per_node: int | Literal["auto"] = "auto"
    logs: Literal["all", "main"] = "all"
    hang_after: str | int | None = None
    start_within: str | int = "20m"


class Health(Struct, frozen=True, forbid_unknown_fields=True):
    """What a host is asked before the command starts on it, and what becomes of an unfit one."""

    checks: Literal["off", "quick", "deep"] = "quick"
    bandwidth: str | int | None = None  # a second between nodes, at least
    tries: Annotated[int, Meta(ge=1, le=9)] = 3  # hosts
    quarantine: bool = False


class Checkpoint(Struct, frozen=True, forbid_unknown_fields=True):
    grace: str | int = DEFAULT_GRACE

    @property
    def grace_seconds(self) -> int:
        return parse_duration(self.grace) or 0


class Group(Struct, frozen=True, forbid_unknown_fields=True):
    name: str = ""
    count: Annotated[int, Meta(ge=1, le=10_000)] = 1
    min: Annotated[int, Meta(ge=0)] | None = None  # enough to start with; all, unless given
    queue: str = ""
    resources: Resources | None = None  # the job's own, unless given


class JobSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One job. Made by `read_job`, which reports mistakes; every field has AWS Batch's limits."""

    image: str = ""
    command: tuple[str, ...] = ()
    name: str = ""
    queue: str = ""
    code: str | bool = "."
    nodes: Annotated[int, Meta(ge=1, le=1000)] = 1
    params: dict[str, Scalar] = {}
    resources: Resources = Resources()
    env: dict[str, Scalar] = {}
    secrets: dict[str, str] = {}
    retry: Retry = Retry()
    timeout: str | int | None = None
    launch: Launch = Launch()
    checkpoint: Checkpoint = Checkpoint()
    health: Health = Health()
    metrics: dict[str, str] = {}
    groups: tuple[Group, ...] = ()
    fallback: Fallback = Fallback()

    @property
    def timeout_seconds(self) -> int | None:
        return None if self.timeout is None else parse_duration(self.timeout)

    def argv(self) -> list[str]:
        """The command with its `{placeholders}` filled in; `{params}` becomes several words."""
        return fill(self.command, self.params)

    def empty_words(self) -> Iterator[tuple[int, list[str]]]:
        """Where the command has an empty word: its place, and the parameters that leave it so."""
        named = {n for part in self.command for n in placeholders(part, self.params)}
        rest = [name for name, value in self.params.items() if value == "" and name not in named]
        for place, words in enumerate(filled(self.command, self.params)):
            if "" in words:
                own = placeholders(self.command[place], self.params)
                yield place, list(dict.fromkeys(own)) or rest


def read_job(
    table: Mapping[str, Any],
    where: str,
    check: Callable[[JobSpec], Iterable[str]] = lambda _: (),
    lent: Collection[str] = (),
) -> JobSpec:
    """Return the job of a parsed `job.toml`. `check` finds the mistakes that need more than it.
    `lent`: parameters that whoever runs it gives, and that need no default.

    Raises ConfigError with every mistake of the file at once.
    """
    spec, mistakes = read_struct(table, JobSpec)
    mistakes = [_with_example(mistake) for mistake in mistakes]
    mistakes += _mistakes(spec, table, lent)
    mistakes += check(spec)
    if mistakes:
        raise ConfigError(where, mistakes)
    return spec


def change_job(spec: JobSpec, changes: Mapping[str, Any], where: str) -> JobSpec:
    """Return `spec` with fields replaced; a change of None is none, and tables merge.

    Raises ConfigError when the outcome breaks a rule: flags and files obey the same ones.
    """
    table = msgspec.to_builtins(spec)
    given: dict[str, Any] = {}
    for key, value in changes.items():
        if isinstance(value, Mapping):
            inner = {name: each for name, each in value.items() if each is not None}
            if inner:
                given[key] = {**table[key], **inner}
        elif value is not None:
            given[key] = value
    return read_job({**table, **given}, where) if given else spec


def with_params(spec: JobSpec, given: Mapping[str, str], where: str) -> JobSpec:
    """Return `spec` with parameters replaced by `-p K=V`, keeping each default's type.

    Raises ConfigError for a parameter that the job does not have.
    """
    known = sorted(spec.params)
    mistakes = [
        f"-p {name}=...: the job has no such parameter."
        f"{did_you_mean(name, known)} Parameters: {', '.join(known) or 'none'}."
        for name in given
        if name not in spec.params
    ]
    if mistakes:
        raise ConfigError(where, mistakes)
    values = {name: _like(spec.params[name], text) for name, text in given.items()}
    mistakes = [
        f"-p {name}={given[name]}: the default is {spec.params[name]!r}, so give "
        f"{'true or false' if isinstance(spec.params[name], bool) else 'a number'}."
        for name, value in values.items()
        if value is None
    ]
    if mistakes:
        raise ConfigError(where, mistakes)
    params = {**spec.params, **{name: value for name, value in values.items() if value is not None}}
    return msgspec.structs.replace(spec, params=params)


def _like(default: Scalar, text: str) -> Scalar | None:
    """Read `text` as what the default is: a text, true or false, or a number; None if it is not.

    A default of 1 may well be a default for 0.5, but not for nan, which JSON cannot carry.
    """
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower())
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else None
    return None


def _mistakes(spec: JobSpec, table: Mapping[str, Any], lent: Collection[str]) -> Iterator[str]:
    """What types alone cannot say. A key that was refused already is not complained about again."""
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
        yield "command: is only {params}, and there are none; name a program before it."
    for place, part in enumerate(spec.command):
        if not part:
            yield f"command[{place}]: is an empty text, which AWS Batch refuses."
    known = {**dict.fromkeys(lent, ""), **spec.params}
    for name in sorted({n for part in spec.command for n in placeholders(part, known)}):
        if name not in known:
            yield f"command: {{{name}}} has no default under [params]."
    if spec.name and not is_valid_name(spec.name):
        yield (
            f"name: found {spec.name!r}. Allowed: 1-128 letters, digits, - and _, "
            f"starting with a letter or digit."
        )
    yield from _resource_mistakes(spec.resources)
    yield from _time_mistakes(spec)
    yield from node_mistakes(spec, table, _resource_mistakes)
    yield from fallback_mistakes(spec.fallback, spec.queue, spec.groups)
    for name in spec.env:
        if not _ENV_NAME.fullmatch(name):
            yield f"env.{name}: not a name of an environment variable."
        elif name.startswith("AWS_BATCH"):
            yield f"env.{name}: AWS Batch keeps names that start with AWS_BATCH for itself."
        elif name in _OF_LAUNCH:
            yield f"env.{name}: batchml sets it, from [launch], [health] and [[groups]]."
    yield from secret_mistakes(spec.secrets, list(spec.env))
    for name, pattern in spec.metrics.items():
        yield from _pattern_mistakes(name, pattern)


def _resource_mistakes(resources: Resources, where: str = "resources") -> Iterator[str]:
    for key in ("memory", "shm"):
        value = getattr(resources, key)
        if value is not None and parse_size(value) is None:
            yield f'{where}.{key}: found {value!r}. Write a size such as "15 GiB" or "512 MiB".'
        elif value is not None and _is_slip(value):
            meant = f'"{value} GiB" or "{value} MiB"'
            yield f"{where}.{key}: found {value!r}, which has no unit. Write {meant}."
    memory = parse_size(resources.memory)
    if memory is not None and memory < MIN_MEMORY and not _is_slip(resources.memory):
        yield f"{where}.memory: found {resources.memory!r}. At least 4 MiB."


def _is_slip(size: str | int) -> bool:
    """A bare number is MiB, as in AWS Batch; a small one was hardly meant so."""
    number = str(size).strip()
    return number.isdecimal() and len(number) <= 4 and 0 < int(number) < MIN_BARE


def _time_mistakes(spec: JobSpec) -> Iterator[str]:
    times = (("timeout", spec.timeout), ("checkpoint.grace", spec.checkpoint.grace))
    for key, value in times:
        if value is not None and parse_duration(value) is None:
            yield f'{key}: found {value!r}. Write a duration such as "4h", "90s" or "1h30m".'
    seconds = spec.timeout_seconds
    if seconds is not None and seconds < MIN_TIMEOUT:
        yield f"timeout: found {spec.timeout!r}. AWS Batch takes 60 seconds or more."


def _with_example(mistake: str) -> str:
    """How `[metrics]` and `[secrets]` are written, for who wrote no table of texts.

    What was found under `[secrets]` is not said: it may be the secret itself.
    """
    if re.match(r"secrets\b", mistake):
        return f"{mistake.partition(':')[0]}: expected texts such as {EXAMPLES}."
    return f"{mistake} {PATTERN_EXAMPLE}" if re.match(r"metrics\b", mistake) else mistake


def _pattern_mistakes(name: str, pattern: str) -> Iterator[str]:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield f"metrics.{name}: not a regular expression: {error}. {PATTERN_EXAMPLE}"
    else:
        if groups != 1:
            need = f"needs exactly one (group) around the value, has {groups}"
            yield f"metrics.{name}: {need}. {PATTERN_EXAMPLE}"
