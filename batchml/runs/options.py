"""The options of a submission, in one table, and the job that results from them.

`SubmitOptions` is the table. The flags of `submit`, `rerun`, `alloc` and `notebook`, the arguments
of `Client.submit` and the lines `#BATCHML` of scripts are views of it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from os import PathLike, fspath
from pathlib import Path, PurePath
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypedDict,
    get_args,
    get_type_hints,
)

import msgspec
from msgspec import Struct

from batchml.context import Context
from batchml.errors import ConfigError, EmptyOption, UsageError
from batchml.jobs.find import find_job, load_job
from batchml.jobs.source import ProgramFlags, read_flags
from batchml.model.data import misspelt_data
from batchml.model.fallback import parse_fallback_flag
from batchml.model.job import (
    JobSpec,
    Scalar,
    change_job,
    command_mistakes,
    read_job,
)
from batchml.model.names import to_name
from batchml.model.params import with_params
from batchml.model.run import MAX_ARRAY
from batchml.model.tables import is_text
from batchml.runtime.protocol.launch import PLAIN, BadCommand, choose_kind
from batchml.runtime.protocol.variables import format_value as param_text
from batchml.runtime.protocol.variables import placeholders, takes_all

DEFAULT_IMAGE = "python"  # for `submit -- COMMAND` without a job
MAX_AFTER = 20  # dependencies of one job. Source: AWS Batch API Reference, SubmitJob
RESERVED_TAG = "batchml:"
FAULT_TAG = "batchml:chaos"  # users may set it: local/batch/fault_injection.py
COMMAND_LINE = "The command line"


class Option(NamedTuple):
    """One option. `key` is the key of job.toml whose value it replaces: `resources.gpus`.

    An option without a `key` is a field of `RunRequest`. `words` may stand in place of a number.
    """

    help: str
    flag: str = ""  # "": the option's name, with hyphens
    short: str = ""
    metavar: str | None = None
    key: str = ""
    words: tuple[str, ...] = ()


class HasJobId(Protocol):
    """The attribute of `batchml.RunHandle` that is read here."""

    job_id: str


class SubmitOptions(TypedDict, total=False):
    """The options of a run. Without an option, or with None, the value of the job's file counts.

    command: the words of the command, in place of the job's.
    memory: a size such as "8 GiB". timeout: of one attempt, such as "4h", or in seconds.
    launch: "torchrun" or "mpi" starts ranks that find each other; "plain" starts the command once
        on each node.
    idle_after: a time such as "30m", or seconds; a run that does nothing for so long is to save and
        ends.
    array: the number of copies of the command, 2 to 10,000; each finds its own number, from 0, in
        AWS_BATCH_JOB_ARRAY_INDEX. It is no search: that is `batchml sweep`.
    after: runs that have to succeed before this one starts.
    retry_on: outcomes after which AWS Batch starts another attempt.
    auto_resume: make up to 5 attempts, unless the job has more than one already, after a host is
        lost or unfit; each goes on from what the run has saved.
    data: name -> "s3://BUCKET/PREFIX" or folder; a host copies it once for all its runs, and the
        program finds the copy in BATCHML_DATA_NAME.
    max_cost: in USD; the run gets a signal to save and is stopped before it costs more.
    share: the share identifier, for a queue with fair-share scheduling.
    fallback: "QUEUE:30m"; the run moves to QUEUE when it finds no host for that time.
    strict_resources: fail when this machine has less than the job requests; otherwise the job gets
        less.
    include_secrets: also send files whose names look like secrets (`.env`, `*.pem`).
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
        int | Literal["auto"] | None,
        Option(
            "Request this number of GPUs; auto: 1 where hosts have some.",
            metavar="N",
            key="resources.gpus",
            words=("auto",),
        ),
    ]
    neurons: Annotated[
        int | None,
        Option(
            "Request this number of Neuron chips: Trainium, Inferentia.",
            metavar="N",
            key="resources.neurons",
        ),
    ]
    nodes: Annotated[int | None, Option("Run on this number of nodes.", metavar="N", key="nodes")]
    launch: Annotated[
        str | None,
        Option(
            "Start the command so on each node: plain, torchrun, mpi or ray.",
            metavar="KIND",
            key="launch.kind",
        ),
    ]
    array: Annotated[
        int | None, Option("Run N copies; `-p seed={index}` gives each its number.", metavar="N")
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
    auto_resume: Annotated[bool, Option("Resume after a lost host: 5 attempts, on checked hosts.")]
    timeout: Annotated[
        str | int | None,
        Option('Limit the time of an attempt: "4h".', metavar="DURATION", key="timeout"),
    ]
    idle_after: Annotated[
        str | int | None,
        Option(
            'End the run when it does nothing for this time: "30m".',
            metavar="DURATION",
            key="idle_after",
        ),
    ]
    max_cost: Annotated[
        float | None, Option("Save and stop before the run costs more.", metavar="USD")
    ]
    set_env: Annotated[
        Mapping[str, str] | None, Option("Set an environment variable.", metavar="K=V", key="env")
    ]
    data: Annotated[
        Mapping[str, str] | None,
        Option("Copy this data set to the host first.", metavar="NAME=URL", key="data"),
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

    @property
    def expected(self) -> str:
        """The values of an option that takes a number, for messages."""
        return " or ".join(["a number", *self.option.words])

    def read_number(self, text: str) -> int | float | str | None:
        """The number in a text, or a word that stands for a number; None for any other text."""
        if text in self.option.words:
            return text
        try:
            number: int | float = self.type(text)
        except ValueError:
            return None
        return number if text.isascii() and "_" not in text else None


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
    """A submission as the user requests it.

    `job` is a name, a folder or a script; `spec` is a job that is in no file. `changes` replace
    fields of the job, with the keys of job.toml. `array` is a number of children, `max_cost` is in
    USD. `provided_params` are the names of parameters that get their values later, so that they
    need no default. `own_tags` are tags that batchml sets; users cannot. `folder` is the folder
    whose files are sent with a command, and from which an image is made; "" is the current
    folder. `files` are sent besides: path in the code -> content. `queue_at` names the line of a
    script that names the queue, for messages.
    """

    job: str | None = None
    spec: JobSpec | None = None
    command: tuple[str, ...] | None = None
    params: dict[str, str] = {}
    changes: dict[str, Any] = {}
    tags: dict[str, str] = {}
    own_tags: dict[str, str] = {}
    files: dict[str, bytes] = {}
    folder: str = ""
    after: tuple[str, ...] = ()
    share: str = ""
    array: int | None = None
    max_cost: float | None = None
    auto_resume: bool = False
    strict_resources: bool = False
    include_secrets: bool = False
    provided_params: frozenset[str] = frozenset()
    queue_at: str = ""


def to_request(
    job: str | PathLike[str] | JobSpec | None = None, options: SubmitOptions | None = None
) -> RunRequest:
    """The request of a job (a name, a folder, a script or a JobSpec) with these options.

    Raises UsageError for a fallback that cannot be read, for an empty name or text, and for a text
    where a list of texts belongs.
    """
    if isinstance(job, str) and not job.strip():
        raise UsageError(
            "The name of the job is empty. Is a variable of the shell not set? "
            "For the job of the current folder: batchml submit ."
        )
    fields: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if value is None:
            continue
        row = option_rows().get(name)
        _check_value(name, row, value)
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


def _check_value(name: str, row: OptionRow | None, value: Any) -> None:
    """Raise UsageError for values whose meaning would be another one than the user's."""
    if name == "command" and isinstance(value, str):
        words = ", ".join(f'"{word}"' for word in value.split()) or '"python", "train.py"'
        raise UsageError(f"command: is a text. Give a list of words: [{words}].")
    if row is not None and row.type is list and isinstance(value, str):
        raise UsageError(f'{name}: is a text. Give a list: ["{value}"].')
    if row is not None and isinstance(value, str) and not value.strip():
        raise EmptyOption(row.flag)


_CONVERT: dict[str, Any] = {
    "command": lambda words: tuple(words) or None,
    "params": lambda given: {key: param_text(value) for key, value in given.items()},
    "tags": dict,
    "set_env": dict,
    "data": dict,
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
    """The job of a request. `job` is the name of its folder; "" for a command without a job.

    `original` is the job as requested, before it was fitted to this machine, and without
    environment variables of the command line, which may be secrets. `has_other_command`: the
    request replaces the job's command. `launcher`: the first word of a command that chose the
    launch kind, such as torchrun.
    """

    spec: JobSpec
    folder: Path
    job: str = ""
    original: JobSpec = JobSpec()
    has_other_command: bool = False
    launcher: str = ""


def resolve_job(context: Context, request: RunRequest) -> ResolvedJob:
    """Load the job of a request, and apply the changes of the request.

    Raises ConfigError, NotFound or UsageError, each with all the mistakes of its input.
    """
    _check_texts(COMMAND_LINE, request)
    _check(request)
    spec, folder, job = _load_job(context, request)
    if job and not is_text(str(folder)):  # the history keeps it as text
        raise ConfigError(COMMAND_LINE, [f"job: the folder's path, {str(folder)!r}, is not UTF-8."])
    is_typed = bool(request.command) and not job and request.spec is None
    env, own = spec.env, () if is_typed else tuple(spec.params)  # a typed command has no [params]
    data_sets = tuple(spec.data)
    spec = change_job(spec, request.changes, COMMAND_LINE)
    where = folder / spec.code if isinstance(spec.code, str) else folder
    new = request.params.keys() - spec.params.keys()
    program = (
        read_flags(_template(spec, request), where) if request.params.keys() - {*own} else None
    )
    spec = with_params(
        spec, request.params, spec.name, request.command or (), keep_whole=bool(job),
        of_program=program.known(new) if program else (),
        is_rerun=request.spec is not None,
    )  # fmt: skip
    mistakes = _flag_mistakes(spec, request.params, program, own) if program else []
    mistakes += misspelt_data(request.changes.get("data") or {}, data_sets)
    spec, wrong = with_auto_resume(spec, request)
    mistakes += wrong
    if request.command:
        # After the checks of a file: braces of a command line may belong to the shell or to awk, so
        # only the names of the job's parameters, and of folders, are replaced.
        if "" in request.command:
            raise UsageError("The command has an empty word, which AWS Batch refuses.")
        spec = msgspec.structs.replace(spec, command=request.command)
        mistakes += command_mistakes(spec.command)
    launched, wrong = _with_launcher(spec, request)
    mistakes += wrong
    mistakes += [*_empty_word_mistakes(spec, request.params), *_shape_mistakes(spec, request)]
    if mistakes:
        raise ConfigError(spec.name, mistakes)
    _check_texts(spec.name, spec)
    original = msgspec.structs.replace(launched, env=env)
    return ResolvedJob(
        launched, folder, job, original, has_other_command=bool(request.command),
        launcher="" if launched is spec else PurePath(spec.command[0]).name,
    )  # fmt: skip


AUTO_RESUME_ATTEMPTS = 5


def with_auto_resume(spec: JobSpec, request: RunRequest) -> tuple[JobSpec, list[str]]:
    """The job with what `--auto-resume` means, and its mistakes: attempts, and checks of hosts.

    The attempts of the job or of --attempts stay, if they are more than one. SageMaker HyperPod has
    the flag for `srun`: after a node was replaced, it starts the step again, which goes on from its
    checkpoint. Source: SageMaker AI Developer Guide, "Job auto-resume".
    """
    if not request.auto_resume:
        return spec, []
    if (request.changes.get("retry") or {}).get("attempts") == 1:
        return spec, [
            "--auto-resume: with --attempts 1 nothing is resumed. Give at least 2 attempts, or "
            "leave one of the flags out."
        ]
    retry = msgspec.structs.replace(
        spec.retry,
        attempts=spec.retry.attempts if spec.retry.attempts > 1 else AUTO_RESUME_ATTEMPTS,
        on=tuple(dict.fromkeys(("host-lost", *spec.retry.on))),
    )
    checks = "quick" if spec.health.checks == "off" else spec.health.checks
    health = msgspec.structs.replace(spec.health, checks=checks)
    return msgspec.structs.replace(spec, retry=retry, health=health), []


def _with_launcher(spec: JobSpec, request: RunRequest) -> tuple[JobSpec, list[str]]:
    """The job with the launch kind of the launcher that its command calls; mistakes in that line.

    `--launch` and a run that is submitted again keep the kind that they have.
    """
    is_again = request.spec is not None and request.command is not None
    is_named = (request.changes.get("launch") or {}).get("kind") is not None
    if is_again or is_named or spec.launch.kind != PLAIN or not spec.command or spec.groups:
        return spec, []
    try:
        kind = choose_kind(spec.argv(), spec.nodes)
    except BadCommand as error:
        return spec, [f"command: {error}."]
    if kind == PLAIN:
        return spec, []
    launch = msgspec.structs.replace(spec.launch, kind=kind)
    return msgspec.structs.replace(spec, launch=launch), []


def _template(spec: JobSpec, request: RunRequest) -> Sequence[str]:
    """The command with its placeholders, which write flags as `flags` of the job says."""
    if request.command:
        spec = msgspec.structs.replace(spec, command=request.command)
    return spec.template


def _flag_mistakes(
    spec: JobSpec, params: Iterable[str], program: ProgramFlags, own: Sequence[str]
) -> list[str]:
    """The mistakes in parameters that are not the job's `own`, by its program."""
    named = {name for word in program.command for name in placeholders(word, spec.params)}
    new = [name for name in params if name not in own and name not in named]
    return program.mistakes(new, spec.params) if new else []


def _empty_word_mistakes(spec: JobSpec, params: Mapping[str, str]) -> Iterator[str]:
    """Mistakes for empty words of the command, which AWS Batch refuses: from empty parameters."""
    for number, names in spec.empty_words():
        which = ", ".join(f"-p {name}=" if name in params else f"params.{name}" for name in names)
        if takes_all([spec.command[number]], spec.params):
            yield (
                f"{which}: is empty, and AWS Batch refuses empty words. For a flag without a value "
                'write "{--NAME}" into the command of job.toml, and give true or false.'
            )
            continue
        yield (
            f"{which}: is empty, and with it the word {spec.command[number]} of the command: "
            "AWS Batch refuses empty words."
        )


def _shape_mistakes(spec: JobSpec, request: RunRequest) -> Iterator[str]:
    """Options that do not suit a job of several nodes or groups: AWS Batch has no such arrays."""
    if request.array is not None and spec.nodes > 1:
        yield (
            f"--array {request.array}: with nodes = {spec.nodes}. AWS Batch has no arrays of "
            "multi-node jobs: submit each run by itself, or give --nodes 1."
        )
    if request.array is not None and spec.groups:
        yield f"--array {request.array}: with [[groups]]. Submit each group run by itself."
    if spec.groups and all(group.resources for group in spec.groups):
        for name in request.changes.get("resources", ()):
            yield f"--{name}: each of the [[groups]] has its own. Set {name} in job.toml."


def _load_job(context: Context, request: RunRequest) -> tuple[JobSpec, Path, str]:
    """The job as its file has it, its folder, and the folder's name."""
    if request.spec is not None:
        # A JobSpec of a program is checked as a file is.
        spec = read_job(
            msgspec.to_builtins(request.spec), "The job", provided_params=request.provided_params
        )
        name = spec.name or name_of(spec.command)
        return msgspec.structs.replace(spec, name=name), Path(request.folder or context.folder), ""
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
    """Raise ConfigError for texts that a request, or the arguments of a program, cannot hold."""
    with suppress(TypeError, ValueError):  # of a value that is not JSON, or not UTF-8
        if b"\\u0000" not in msgspec.json.encode(checked):
            return
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


# --- The name of a command ------------------------------------------------------------------------


# Programs that run a script or module: the run gets the name of the script or module.
_INTERPRETERS = (
    r"python[0-9.]*|pypy[0-9.]*|(ba|da|z|k)?sh|fish|perl|ruby|node|deno|Rscript|julia|lua|php"
    r"|torchrun|accelerate|deepspeed|uv|poetry|env|time|nice|nohup|exec"
)
_SUFFIXES = r"\.(py|sh|bash|zsh|pl|rb|js|mjs|ts|R|r|jl|lua|php)$"


def name_of(command: Sequence[str]) -> str:
    """The name of a run without a job: `train` for `python -u data/train.py --lr 1`, `python` for
    `python -c ...`."""
    first = PurePath(command[0]).name
    script = _script_of(command) if re.fullmatch(_INTERPRETERS, first) else ""
    return to_name(re.sub(_SUFFIXES, "", PurePath(script or first).name))


def _script_of(command: Sequence[str]) -> str:
    """The script or module among the arguments of an interpreter; "" if none can be recognised."""
    words = iter(command[1:])
    for word in words:
        if word == "-m":
            return next(words, "").rpartition(".")[2]
        if word in ("-c", "-e", "-lc", "-ec", "-"):
            return ""
        if re.search(_SUFFIXES, word):
            return word
    return ""
