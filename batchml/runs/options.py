"""What a run is submitted with: one table of options, and the job that they come to.

`SubmitOptions` is the table. The flags of `submit`, `rerun`, `alloc` and `notebook`, the arguments
of `Client.submit` and the lines `#BATCHML` of scripts are views of it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from os import PathLike, fspath
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple, Protocol, TypedDict, get_args, get_type_hints

import msgspec
from msgspec import Struct

from batchml.context import Context
from batchml.errors import ConfigError, UsageError
from batchml.jobs.find import find_job, load_job
from batchml.model.fallback import parse_fallback_flag
from batchml.model.job import JobSpec, Scalar, change_job, read_job, with_params
from batchml.model.names import to_name
from batchml.model.run import MAX_ARRAY
from batchml.model.tables import is_text
from batchml.runs.fit import Capacity, check_uncut, fit_groups, fit_job
from batchml.runtime.protocol.variables import format_value as param_text

DEFAULT_IMAGE = "python"  # for `submit -- COMMAND` without a job
DEFAULT_QUEUE = "default"
MAX_AFTER = 20  # jobs that one waits for; AWS Batch, SubmitJob
RESERVED_TAG = "batchml:"
FAULT_TAG = "batchml:chaos"  # for the user to give: batchml/local/batch/fault_injection.py
COMMAND_LINE = "The command line"


class Option(NamedTuple):
    """One option. `key` is the key of job.toml that it replaces, `resources.gpus` for example.

    An option without a `key` is a field of `RunRequest`.
    """

    help: str
    flag: str = ""  # unless given, the option's name with hyphens
    short: str = ""
    metavar: str | None = None
    key: str = ""


class HasJobId(Protocol):
    """A run as `batchml.Client` gives it."""

    job_id: str


class SubmitOptions(TypedDict, total=False):
    """The options of a run. What is not given, or None, stays as the job's file has it.

    command: words of the program, in place of the job's.
    memory: a size such as "8 GiB". timeout: of one attempt, such as "4h", or in seconds.
    array: the number of children, 2 to 10,000; each finds its own number in
        AWS_BATCH_JOB_ARRAY_INDEX.
    after: runs that have to succeed before this one starts.
    retry_on: outcomes after which AWS Batch tries again.
    max_cost: in USD; the run gets a signal to save and is stopped before it costs more.
    share: the share identifier, for a queue with fair-share scheduling.
    fallback: "QUEUE:30m"; the run moves to QUEUE when it finds no host for that time.
    strict_resources: fail when this machine has less than the job asks for, instead of fitting it.
    include_secrets: send files whose names look like secrets (`.env`, `*.pem`), too.
    """

    params: Annotated[
        Mapping[str, Scalar] | None,
        Option("Set a parameter.", flag="--param", short="-p", metavar="K=V"),
    ]
    name: Annotated[str | None, Option("Name the run.", metavar="NAME", key="name")]
    queue: Annotated[str | None, Option("Use this job queue.", metavar="NAME", key="queue")]
    image: Annotated[
        str | None, Option("Use this image, not the job's.", metavar="IMAGE", key="image")
    ]
    vcpus: Annotated[
        int | None, Option("Request this number of vCPUs.", metavar="N", key="resources.vcpus")
    ]
    memory: Annotated[
        str | None, Option('Request this memory: "8 GiB".', metavar="SIZE", key="resources.memory")
    ]
    gpus: Annotated[
        int | None, Option("Request this number of GPUs.", metavar="N", key="resources.gpus")
    ]
    nodes: Annotated[int | None, Option("Run on this number of nodes.", metavar="N", key="nodes")]
    array: Annotated[
        int | None, Option("Submit an array with this number of children.", metavar="N")
    ]
    after: Annotated[
        Sequence[str | HasJobId] | None,
        Option("Start when this run has succeeded. May be repeated.", metavar="RUN"),
    ]
    attempts: Annotated[
        int | None,
        Option("Make at most this number of attempts.", metavar="N", key="retry.attempts"),
    ]
    retry_on: Annotated[
        Sequence[str] | None,
        Option(
            "Retry after this outcome: host-lost. May be repeated.", metavar="CLASS", key="retry.on"
        ),
    ]
    timeout: Annotated[
        str | int | None,
        Option('Limit the time of an attempt: "4h".', metavar="DURATION", key="timeout"),
    ]
    max_cost: Annotated[
        float | None, Option("Save and stop before the run costs more.", metavar="USD")
    ]
    set_env: Annotated[
        Mapping[str, str] | None, Option("Set an environment variable.", metavar="K=V", key="env")
    ]
    tags: Annotated[Mapping[str, str] | None, Option("Tag the run.", flag="--tag", metavar="K=V")]
    share: Annotated[
        str | None, Option("Use this share identifier; default: your user name.", metavar="NAME")
    ]
    fallback: Annotated[
        str | None,
        Option("Move to QUEUE if no host is found in time.", metavar="QUEUE[:30m]", key="fallback"),
    ]
    strict_resources: Annotated[bool, Option("Fail if the job does not fit this machine.")]
    include_secrets: Annotated[bool, Option("Also send files that look like secrets.")]
    command: Sequence[str] | None


class OptionRow(NamedTuple):
    """An option with its name in Python and the type of its values: int, float, str, bool; `dict`
    for NAME=VALUE pairs and `list` for words, which may both be given several times."""

    name: str
    flag: str
    type: type
    option: Option


@cache
def option_rows() -> dict[str, OptionRow]:
    """Name -> row of the options that have a flag, in the order of `--help`."""
    found = {}
    for name, hint in get_type_hints(SubmitOptions, include_extras=True).items():
        options = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Option)]
        if options:
            flag = options[0].flag or f"--{name.replace('_', '-')}"
            found[name] = OptionRow(name, flag, _kind(get_args(hint)[0]), options[0])
    return found


def _kind(hint: Any) -> type:
    first = (get_args(hint) or (hint,))[0]
    origin = getattr(first, "__origin__", first)
    if origin in (bool, int, float, str):
        return origin  # type: ignore[no-any-return]
    return dict if issubclass(origin, Mapping) else list


# --- The request ----------------------------------------------------------------------------------


class RunRequest(Struct, frozen=True, kw_only=True):
    """What the user asked for. `changes` are fields of the job that are replaced, as in job.toml.

    `spec` stands for a job that is in no file; `array` is a number of children, `max_cost` in USD.
    `provided_params` names parameters that each of its runs gets later, and that need no default.
    `own_tags` are batchml's own: not for users to give. `folder` is the one whose files are sent
    with a command; the current one unless given. `queue_at` is the line of a script that names the
    queue.
    """

    job: str | None = None
    spec: JobSpec | None = None
    command: tuple[str, ...] | None = None
    params: dict[str, str] = {}
    changes: dict[str, Any] = {}
    tags: dict[str, str] = {}
    own_tags: dict[str, str] = {}
    folder: str = ""
    after: tuple[str, ...] = ()
    share: str = ""
    array: int | None = None
    max_cost: float | None = None
    strict_resources: bool = False
    include_secrets: bool = False
    provided_params: frozenset[str] = frozenset()
    queue_at: str = ""


def to_request(
    job: str | PathLike[str] | JobSpec | None = None, options: SubmitOptions | None = None
) -> RunRequest:
    """The request of a job (a name, a folder, a script or a JobSpec) with these options.

    Raises UsageError for a fallback that cannot be read.
    """
    fields: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if value is None:
            continue
        row = option_rows().get(name)
        if row is not None and row.option.key:
            _set_key(changes, row.option.key.split("."), _CONVERT.get(name, lambda it: it)(value))
        else:
            fields[name] = _CONVERT.get(name, lambda it: it)(value)
    is_spec = isinstance(job, JobSpec)
    return RunRequest(
        job=None if job is None or is_spec else fspath(job),  # type: ignore[arg-type]
        spec=job if is_spec else None,  # type: ignore[arg-type]
        changes=changes,
        **fields,
    )


_CONVERT: dict[str, Any] = {
    "command": lambda words: tuple(words) or None,
    "params": lambda given: {key: param_text(value) for key, value in given.items()},
    "tags": dict,
    "set_env": dict,
    "retry_on": list,
    "fallback": parse_fallback_flag,
    "after": lambda runs: tuple(run if isinstance(run, str) else run.job_id for run in runs),
}


def _set_key(table: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        table = table.setdefault(key, {})
    table[keys[-1]] = value


# --- The job of a request -------------------------------------------------------------------------


class ResolvedJob(Struct, frozen=True):
    """The job of a request. `job` is the name of its folder; empty for a command without one.

    `original` is the job as its file has it: without variables of the command line, which may be
    secrets, and before anything was fitted to this machine. `has_other_command`: the command is
    not the job's own.
    """

    spec: JobSpec
    folder: Path
    job: str = ""
    original: JobSpec = JobSpec()
    has_other_command: bool = False


def resolve_job(context: Context, request: RunRequest) -> ResolvedJob:
    """The job of a request, with what the request changes.

    Raises ConfigError, NotFound or UsageError, each with all the mistakes of its input.
    """
    _check_texts(COMMAND_LINE, request)
    _check(request)
    spec, folder, job = _load_job(context, request)
    if job and not is_text(str(folder)):  # it is kept with the run, as text
        raise ConfigError(COMMAND_LINE, [f"job: the folder's path, {str(folder)!r}, is not UTF-8."])
    if request.command:
        # After the check of the file: braces of a command line may be the shell's or awk's, so
        # only names of known parameters are filled in.
        if "" in request.command:
            raise UsageError("The command has an empty word, which AWS Batch refuses.")
        spec = msgspec.structs.replace(spec, command=request.command)
    env = spec.env
    spec = with_params(change_job(spec, request.changes, COMMAND_LINE), request.params, spec.name)
    mistakes = [*_empty_word_mistakes(spec, request.params), *_array_mistakes(spec, request)]
    if mistakes:
        raise ConfigError(spec.name, mistakes)
    _check_texts(spec.name, spec)
    original = msgspec.structs.replace(spec, env=env)
    return ResolvedJob(spec, folder, job, original, has_other_command=bool(request.command))


def _empty_word_mistakes(spec: JobSpec, given: Mapping[str, str]) -> Iterator[str]:
    """AWS Batch refuses a command with an empty word, which an empty parameter may leave."""
    for number, names in spec.empty_words():
        which = ", ".join(f"-p {name}=" if name in given else f"params.{name}" for name in names)
        yield (
            f"{which}: is empty, and with it the word {spec.command[number]} of the command: "
            "AWS Batch refuses empty words."
        )


def _array_mistakes(spec: JobSpec, request: RunRequest) -> Iterator[str]:
    """Each child of an array is one container; AWS Batch has no arrays of anything else."""
    if request.array is not None and spec.nodes > 1:
        yield (
            f"--array {request.array}: with nodes = {spec.nodes}. AWS Batch has no arrays of "
            "multi-node jobs: submit each run by itself, or give --nodes 1."
        )
    if request.array is not None and spec.groups:
        yield f"--array {request.array}: with [[groups]]. Submit each group run by itself."


def _load_job(context: Context, request: RunRequest) -> tuple[JobSpec, Path, str]:
    """The job as its file has it, its folder, and the folder's name."""
    if request.spec is not None:
        # Flags, files and programs obey the same rules.
        spec = read_job(
            msgspec.to_builtins(request.spec), "The job", provided_params=request.provided_params
        )
        name = spec.name or name_of(spec.command)
        return msgspec.structs.replace(spec, name=name), context.folder, ""
    job = request.job
    if job is None and not request.command and (context.folder / "job.toml").is_file():
        job = "."
    if job is not None:
        folder = find_job(job, context.job_folders, context.folder)
        images = None if request.changes.get("image") else context.image_folders
        return (
            load_job(folder, images, request.provided_params),
            folder,
            to_name(folder.resolve().name),
        )
    if not request.command:
        raise UsageError("Name a job (`batchml submit lenet`) or give a command after --.")
    name = name_of(request.command)
    table = {"image": DEFAULT_IMAGE, "command": ["-"], "name": name, "params": request.params}
    return read_job(table, COMMAND_LINE), Path(request.folder or context.folder), ""


def _check_texts(where: str, checked: Struct) -> None:
    """Raises ConfigError for texts that no request, and no program's arguments, can hold."""
    mistakes = []
    for found, text in _texts("", checked):
        key = found.removeprefix("changes.")
        if not is_text(text):
            mistakes.append(f"{key}: {text[:80]!r} is not UTF-8.")
        elif "\0" in text and not key.removeprefix("spec.").startswith("metrics."):
            mistakes.append(f"{key}: {text[:80]!r} has a NUL, which no argument can hold.")
    if mistakes:
        raise ConfigError(where, mistakes)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every text in a struct, with its key: `params.lr`, `command[2]`."""
    if isinstance(value, Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, each in value.items():
            below = f"{key}.{name}" if key else name
            if not is_text(name) or "\0" in name:
                yield key, name
            else:
                yield from _texts(below, each)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _texts(f"{key}[{number}]", each)


def _check(request: RunRequest) -> None:
    mistakes = [
        f"--tag {name}: names that begin with {RESERVED_TAG} are batchml's own."
        for name in request.tags
        if name.startswith(RESERVED_TAG) and name != FAULT_TAG
    ]
    if request.array is not None and not 2 <= request.array <= MAX_ARRAY:
        mistakes.append(f"--array {request.array}: AWS Batch takes 2 to {MAX_ARRAY:,}.")
    if request.max_cost is not None and not 0 < request.max_cost < float("inf"):
        mistakes.append(f"--max-cost {request.max_cost:g}: give US dollars, more than 0.")
    if len(request.after) > MAX_AFTER:
        mistakes.append(f"--after: {len(request.after)} runs; AWS Batch takes {MAX_AFTER}.")
    if mistakes:
        raise ConfigError(COMMAND_LINE, mistakes)


def fit_to_machine(context: Context, spec: JobSpec, strict: bool, notices: list[str]) -> JobSpec:
    """The job with no more resources than this machine has; a notice says what was cut.

    Raises ConfigError for more nodes, or groups, than fit at once, and with `strict` for any cut.
    """
    from batchml.local import machine

    wanted = [spec.resources, *(group.resources for group in spec.groups)]
    gpus = len(machine.find_gpus()) if any(each and each.gpus for each in wanted) else 0
    here = Capacity(machine.server_vcpus(context.home), machine.memory_mib(), gpus)
    fitted = fit_groups(spec, here) if spec.groups else fit_job(spec, here)
    if strict:
        check_uncut(fitted)
    if fitted.cuts:
        notices.append(f"Fitted to this machine: {', '.join(fitted.cuts)}.")
    return fitted.spec


# --- The name of a command ------------------------------------------------------------------------


# Programs that run another: the name of the run is that of their script or module.
_INTERPRETERS = re.compile(
    r"python[0-9.]*|pypy[0-9.]*|(ba|da|z|k)?sh|fish|perl|ruby|node|deno|Rscript|julia|lua|php"
    r"|torchrun|accelerate|deepspeed|uv|poetry|env|time|nice|nohup|exec"
)
_SUFFIXES = re.compile(r"\.(py|sh|bash|zsh|pl|rb|js|mjs|ts|R|r|jl|lua|php)$")


def name_of(command: Sequence[str]) -> str:
    """`train` for `python -u data/train.py --lr 1`; `python` for `python -c ...`."""
    first = PurePath(command[0]).name
    script = _script_word(command) if _INTERPRETERS.fullmatch(first) else ""
    return to_name(_SUFFIXES.sub("", PurePath(script or first).name))


def _script_word(command: Sequence[str]) -> str:
    """The script or module that a runner gets; empty where the words do not show one."""
    words = iter(command[1:])
    for word in words:
        if word == "-m":
            return next(words, "").rpartition(".")[2]
        if word in ("-c", "-e", "-lc", "-ec", "-"):
            return ""
        if _SUFFIXES.search(word):
            return word
    return ""
