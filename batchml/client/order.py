"""An order for a run: what the user asked for, and the job that it comes to."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from batchml.client.naming import name_of
from batchml.errors import ConfigError, UsageError
from batchml.model.job import JobSpec, change_job, read_job, with_params
from batchml.model.names import to_name
from batchml.model.run import MAX_ARRAY
from batchml.model.tables import is_text
from batchml.ops.jobs import find_job, load_job
from batchml.ops.submit import Capacity, fit, refuse_cuts

if TYPE_CHECKING:
    from batchml.client.place import Place

DEFAULT_IMAGE = "python"  # for `submit -- COMMAND` without a job
MAX_AFTER = 20  # jobs that one waits for; AWS Batch, SubmitJob
RESERVED_TAG = "batchml:"
REHEARSAL_TAG = "batchml:chaos"  # for the user to give: batchml/local/batch/fault_injection.py
WHERE = "The command line"


class Order(Struct, frozen=True, kw_only=True):
    """What the user asked for. `changes` are fields of the job that are replaced, as in job.toml.

    `spec` stands for a job that is in no file; `array` is a number of children, `max_cost` in USD.
    `lent` names parameters that each of its runs is given later, and that need no default.
    `own_tags` are batchml's own, of the command that ordered it: not for users to give.
    `folder` is the one whose files travel with a command; the current one unless given.
    `queue_at` is the line of a script that names the queue.
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
    strict: bool = False
    include_secrets: bool = False
    lent: frozenset[str] = frozenset()
    queue_at: str = ""


class Ordered(Struct, frozen=True):
    """The job of an order. `job` is the name of its folder; empty for a command without one.

    `said` is what the job's own file says: without variables of the command line, which may be
    secrets, and before anything was fitted to this machine. `is_other`: its command is not the
    job's own.
    """

    spec: JobSpec
    folder: Path
    job: str = ""
    said: JobSpec = JobSpec()
    is_other: bool = False


def read_order(place: "Place", order: Order) -> Ordered:
    """The job that an order is for, with what the order changes.

    Raises ConfigError, NotFound or UsageError, each with all the mistakes of its input.
    """
    _check_texts(WHERE, order)
    _check(order)
    spec, folder, job = _job(place, order)
    if job and not is_text(str(folder)):  # it is kept with the run, as text
        raise ConfigError(WHERE, [f"job: the folder's path, {str(folder)!r}, is not UTF-8."])
    if order.command:
        # After the check of the file: here braces may be the shell's or awk's as well, and only
        # those of a known parameter are filled in.
        if "" in order.command:
            raise UsageError("The command has an empty word, which AWS Batch refuses.")
        spec = msgspec.structs.replace(spec, command=order.command)
    env = spec.env
    spec = with_params(change_job(spec, order.changes, WHERE), order.params, spec.name)
    mistakes = [*_empty_words(spec, order.params), *_alone(spec, order)]
    if mistakes:
        raise ConfigError(spec.name, mistakes)
    _check_texts(spec.name, spec)
    said = msgspec.structs.replace(spec, env=env)
    return Ordered(spec, folder, job, said, is_other=bool(order.command))


def _empty_words(spec: JobSpec, given: Mapping[str, str]) -> Iterator[str]:
    """AWS Batch refuses a command with an empty word, which an empty parameter may leave."""
    for place, names in spec.empty_words():
        which = ", ".join(f"-p {name}=" if name in given else f"params.{name}" for name in names)
        yield (
            f"{which}: is empty, and with it the word {spec.command[place]} of the command: "
            "AWS Batch refuses empty words."
        )


def _alone(spec: JobSpec, order: Order) -> Iterator[str]:
    """Each child of an array is one container; AWS Batch has no arrays of anything else."""
    if order.array is not None and spec.nodes > 1:
        yield (
            f"--array {order.array}: with nodes = {spec.nodes}. AWS Batch has no arrays of "
            "multi-node jobs: submit each run by itself, or give --nodes 1."
        )
    if order.array is not None and spec.groups:
        yield f"--array {order.array}: with [[groups]]. Submit each gang by itself."


def _job(place: "Place", order: Order) -> tuple[JobSpec, Path, str]:
    if order.spec is not None:
        # Flags, files and programs obey the same rules.
        spec = read_job(msgspec.to_builtins(order.spec), "The job", lent=order.lent)
        name = spec.name or name_of(spec.command)
        return msgspec.structs.replace(spec, name=name), place.here, ""
    job = order.job
    if job is None and not order.command and (place.here / "job.toml").is_file():
        job = "."
    if job is not None:
        folder = find_job(job, place.job_folders, place.here)
        images = None if order.changes.get("image") else place.image_folders
        return load_job(folder, images, order.lent), folder, to_name(folder.resolve().name)
    if not order.command:
        raise UsageError("Name a job (`batchml submit lenet`) or give a command after --.")
    name = name_of(order.command)
    table = {"image": DEFAULT_IMAGE, "command": ["-"], "name": name, "params": order.params}
    return read_job(table, WHERE), Path(order.folder or place.here), ""


def _check_texts(where: str, what: Struct) -> None:
    """Raises ConfigError for texts that no request, and no program's arguments, can carry."""
    mistakes = []
    for found, text in _texts("", what):
        place = found.removeprefix("changes.")
        if not is_text(text):
            mistakes.append(f"{place}: {text[:80]!r} is not UTF-8.")
        elif "\0" in text and not place.removeprefix("spec.").startswith("metrics."):
            mistakes.append(f"{place}: {text[:80]!r} has a NUL, which no argument can carry.")
    if mistakes:
        raise ConfigError(where, mistakes)


def _texts(place: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every text in a struct, with its place: `params.lr`, `command[2]`."""
    if isinstance(value, Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for name, each in value.items():
            below = f"{place}.{name}" if place else name
            if not is_text(name) or "\0" in name:
                yield place, name
            else:
                yield from _texts(below, each)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _texts(f"{place}[{number}]", each)


def _check(order: Order) -> None:
    mistakes = [
        f"--tag {name}: names that begin with {RESERVED_TAG} are batchml's own."
        for name in order.tags
        if name.startswith(RESERVED_TAG) and name != REHEARSAL_TAG
    ]
    if order.array is not None and not 2 <= order.array <= MAX_ARRAY:
        mistakes.append(f"--array {order.array}: AWS Batch takes 2 to {MAX_ARRAY:,}.")
    if order.max_cost is not None and not 0 < order.max_cost < float("inf"):
        mistakes.append(f"--max-cost {order.max_cost:g}: give US dollars, more than 0.")
    if len(order.after) > MAX_AFTER:
        mistakes.append(f"--after: {len(order.after)} runs; AWS Batch takes {MAX_AFTER}.")
    if mistakes:
        raise ConfigError(WHERE, mistakes)


def fit_here(place: "Place", spec: JobSpec, strict: bool, notices: list[str]) -> JobSpec:
    """The job cut down to this machine, which a notice says. With `strict`, raise ConfigError.

    Raises ConfigError for more nodes, or groups, than fit here at once, too.
    """
    from batchml.local import ecs as machine

    wanted = [spec.resources, *(group.resources for group in spec.groups)]
    gpus = len(machine.find_gpus()) if any(each and each.gpus for each in wanted) else 0
    here = Capacity(machine.believed_vcpus(place.home), machine.memory_mib(), gpus)
    if spec.groups:
        from batchml.ops.gang import fit_groups

        fitted = fit_groups(spec, here)
    else:
        fitted = fit(spec, here)
    if strict:
        refuse_cuts(fitted)
    if fitted.cuts:
        notices.append(f"Fitted to this machine: {', '.join(fitted.cuts)}.")
    return fitted.spec
