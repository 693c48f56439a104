"""The same run again: what it was asked for, from what is kept of it or from AWS. Pure."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.errors import UsageError
from batchml.model.job import Group, JobSpec, Resources, Retry
from batchml.model.names import to_name
from batchml.model.record import Record
from batchml.model.run import Run
from batchml.ops.rerun_nodes import on_nodes, refuse_parts
from batchml.ops.search import Found

# Variables that are made for each run anew.
_OURS = ("BATCHML_", "AWS_BATCH", "AWS_CONTAINER_", "ECS_")

MAP = "BATCHML_ARRAY_MAP"  # "3 17-19 40": the children that are run again
SIZE = "BATCHML_ARRAY_SIZE"

# `sh -c MAPPING sh COMMAND...`: child 1 of the new array takes the number of the second of those.
# It is the shell's work, so that images without our runtime do it, too.
MAPPING = (
    "i=${AWS_BATCH_JOB_ARRAY_INDEX:-0}; for r in $" + MAP + "; do a=${r%-*}; n=$((${r#*-}-a+1)); "
    'if [ "$i" -lt "$n" ]; then export AWS_BATCH_JOB_ARRAY_INDEX=$((a+i)); break; fi; '
    'i=$((i-n)); done; exec "$@"'
)


_MARKS = re.compile("[/:@.]")  # of a reference to a registry
_WRAPPING = ("sh", "-c", MAPPING, "sh")


class Again(Struct, frozen=True):
    """What is to be submitted. `code` is where the archive lies; empty for none.

    `size` is that of the array, `array` that of the new one. `children` are the numbers, in the
    array, of those that are run again; empty for all.
    """

    spec: JobSpec
    code: str = ""
    share: str = ""
    tags: dict[str, str] = {}
    size: int = 0
    array: int | None = None
    max_cost: float | None = None
    children: tuple[int, ...] = ()
    notices: tuple[str, ...] = ()
    own_tags: dict[str, str] = {}  # of ours


def again(
    run: Run | None,
    record: Record | None,
    changes_params: bool = False,
    groups: Sequence[Group] = (),
) -> Again:
    """The same once more. `run` is None for one that AWS has forgotten. `groups`: of a gang that
    was not submitted from here.

    Raises UsageError where parameters are to be changed and nobody here knows how the command is
    made of them, for a run of a sweep, and for one of which nothing is known.
    """
    if sweep := Found(run, record).sweep:
        raise UsageError(
            f"The run belongs to a sweep. Its failed trials again: batchml sweeps rerun {sweep} "
            f"--failed. One of them: --trial N. To go on with it: batchml sweeps resume {sweep}."
        )
    refuse_parts(run, Found(run, record).tags, Found(run, record).job_id)
    environment = run.environment if run else {}
    notices = []
    if record is not None and record.spec:
        spec, code = _spec_of(record), record.code
        if not environment:
            notices.append("Variables that --set-env gave are not remembered: give them again.")
    elif changes_params:
        raise UsageError(
            "-p: the run was not submitted from here, so that its command is known but not how its "
            "parameters go into it. Submit its job: batchml submit JOB -p ..."
        )
    elif run is not None:
        spec = on_nodes(_spec_from(run), run, groups)
        code = environment.get("BATCHML_CODE", "")
        notices.append(
            "It was not submitted from here: secrets, shared memory and which failures are worth "
            "another attempt are not known and not repeated."
        )
    else:
        raise UsageError("AWS Batch has forgotten the run, and its job is not remembered here.")
    env = {**spec.env, **{k: v for k, v in environment.items() if not k.startswith(_OURS)}}
    mapped = str(env.pop(MAP, "") or environment.get(MAP, ""))
    size = str(env.pop(SIZE, "") or environment.get(SIZE, "")) if mapped else ""
    array = (run.array_size if run else 0) or (record.array_size if record else 0)
    wanted = Again(
        spec=replace(spec, env=env, code=bool(code), command=plain_command(spec.command)),
        code=code,
        share=run.share if run else "",
        tags=_tags(run, record),
        size=int(size) if size.isdecimal() else array,
        array=array or None,
        max_cost=record.max_cost if record else None,
        notices=tuple(notices),
    )
    return _of_children(wanted, numbers(mapped)) if mapped else wanted


def only(wanted: Again, places: Sequence[int]) -> Again:
    """The same for some children: a smaller array, or one run for one child.

    `places` are their indices in the array that `wanted` runs again. The program finds the number
    that the child had in the first array.
    """
    known = wanted.children
    return _of_children(wanted, [known[place] if known else place for place in places])


def _of_children(wanted: Again, children: Sequence[int]) -> Again:
    env = {**wanted.spec.env, MAP: ranges(children), SIZE: str(wanted.size)}
    command = (*_WRAPPING, *plain_command(wanted.spec.command))
    return replace(
        wanted,
        spec=replace(wanted.spec, env=env, command=command),
        array=len(children) if len(children) > 1 else None,
        children=tuple(children),
    )


def first_numbers(run: Run | None, record: Record | None) -> tuple[int, ...]:
    """The numbers that the children of a run had in the first array, in the order of their own.

    One for a single run that stands for a child. Empty where every child has its own number.
    """
    kept: Any = record.spec.get("env", {}) if record else {}
    mapped = (run.environment.get(MAP, "") if run else "") or str(kept.get(MAP, ""))
    try:
        return tuple(numbers(mapped))
    except UsageError:  # somebody else's variable
        return ()


def first_id(job_id: str, first: Sequence[int]) -> str:
    """`"id:4"` for `"id:1"`, where the second child was number 4."""
    whole, _, index = job_id.partition(":")
    known = index.isdecimal() and int(index) < len(first)
    return f"{whole}:{first[int(index)]}" if known else job_id


def own_id(job_id: str, first: Sequence[int]) -> str | None:
    """`"id:1"` for `"id:4"`; the run itself where it stands for that one child; None for none."""
    whole, colon, number = job_id.partition(":")
    if not (first and colon):
        return job_id
    if not number.isdecimal() or int(number) not in first:
        return None
    return whole if len(first) == 1 else f"{whole}:{first.index(int(number))}"


def plain_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """The program's own, without what gives children of an array their old numbers."""
    return command[len(_WRAPPING) :] if command[: len(_WRAPPING)] == _WRAPPING else command


def _tags(run: Run | None, record: Record | None) -> dict[str, str]:
    """The user's own."""
    tags = {**(record.tags if record else {}), **(run.tags if run else {})}
    return {name: value for name, value in tags.items() if not name.startswith("batchml")}


def _spec_of(record: Record) -> JobSpec:
    """The job as it was sent, with the very image that was sent."""
    try:
        spec = msgspec.convert(record.spec, JobSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"The record of {record.job_id} cannot be read: {error}") from error
    return replace(spec, image=record.image or spec.image, name=spec.name or record.name)


def _spec_from(run: Run) -> JobSpec:
    """A job that comes to the same requests, as far as AWS tells."""
    return JobSpec(
        # Here a bare name is a folder; there it is one of Docker Hub's own images.
        image=run.image if _MARKS.search(run.image) else f"docker.io/library/{run.image}",
        command=run.command,
        name=to_name(run.name),
        queue=run.queue,
        resources=Resources(
            vcpus=run.vcpus or 1, memory=f"{run.memory_mib or 2048} MiB", gpus=run.gpus
        ),
        retry=Retry(attempts=run.max_attempts),
        timeout=run.timeout,
    )


def remembered(spec: JobSpec, before: Record | None) -> dict[str, Any]:
    """What the record of the new run keeps of its job.

    Variables of the command line may be secrets: of those that the job has now, only those are kept
    that its file had, and ours.
    """
    table: dict[str, Any] = msgspec.to_builtins(spec)
    known = {*(before.spec.get("env", {}) if before else {}), MAP, SIZE}
    table["env"] = {name: value for name, value in spec.env.items() if name in known}
    if before is not None and before.spec:
        table["code"] = before.spec.get("code", table["code"])
    return table


def ranges(chosen: Sequence[int]) -> str:
    """`"3 17-19 40"` for 3, 17, 18, 19 and 40: rising numbers, each once."""
    found: list[list[int]] = []
    for number in chosen:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def numbers(text: str) -> list[int]:
    """The numbers that `ranges` wrote. Raises UsageError for another text."""
    found: list[int] = []
    for word in text.split():
        first, _, last = word.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise UsageError(f"{MAP} is {text!r}, which says no children.")
        found += range(int(first), min(int(last or first), int(first) + 10_000) + 1)
    return found
