"""The request of a rerun, from the history's record of the run or from what AWS Batch returns.
Pure.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.errors import UsageError
from batchml.model.group import GROUP_TAG, HEALTH, is_worker
from batchml.model.job import Group, Health, JobSpec, Launch, Resources, Retry
from batchml.model.names import to_name
from batchml.model.run import Record, Run
from batchml.runs.search import FoundRun
from batchml.runs.watch.events import RunEvent, RunMessage
from batchml.runs.watch.logs import AttemptOutput
from batchml.runtime.protocol.launch import LaunchPlan

if TYPE_CHECKING:
    from batchml.context import Context

# --- Runs of several nodes, and group runs --------------------------------------------------------


PLAIN = Launch()


def check_runs_alone(run: Run | None, tags: Mapping[str, str], job_id: str, head: str = "") -> None:
    """Raise UsageError for a part that cannot run by itself: one node, or the workers of a group
    run.

    `head` names the run of these workers.
    """
    if run is not None and run.node_index is not None:
        whole = job_id.partition("#")[0]
        raise UsageError(
            f"{job_id}: one node does not run alone. All of them again: batchml rerun {whole}"
        )
    if is_worker(tags):
        whole = head or tags["batchml:gang"]
        raise UsageError(
            f"{job_id}: workers do not run without their head. All again: batchml rerun {whole}"
        )


def launch_of(run: Run) -> dict[str, Any]:
    """The JobSpec fields `nodes`, `launch` and `health` of a run that AWS describes, by name.

    Raises UsageError where its variables are of another version, and for nodes that may differ, as
    other clients can submit them.
    """
    if run.nodes and not run.key:
        raise UsageError(
            f"{run.job_id}: batchml did not submit it, and its nodes may not all be alike. "
            f"Submit its job: batchml submit JOB."
        )
    try:
        plan = LaunchPlan.read(run.environment)
        told = json.loads(run.environment.get(HEALTH) or "{}")
        health = {name: value for name, value in told.items() if value or name != "bandwidth"}
        if "bandwidth" in health:
            health["bandwidth"] = f"{health['bandwidth']} B"
        checks = msgspec.convert(health, Health)
    except (AttributeError, ValueError) as error:
        raise UsageError(f"{run.job_id}: how its nodes start cannot be read: {error}") from None
    launch = PLAIN if plan is None else _launch(plan)
    return {"nodes": run.nodes or 1, "launch": launch, "health": checks}


def _launch(plan: LaunchPlan) -> Launch:
    table = {
        "kind": plan.kind,
        "processes_per_node": plan.processes or "auto",
        "logs": plan.logs,
        "hang_after": f"{plan.hang_after:g}s" if plan.hang_after else None,
        "start_within": f"{plan.start_within:g}s",
    }
    return msgspec.convert(table, Launch)


def groups_of(head: Run, workers: Mapping[str, Run]) -> tuple[Group, ...]:
    """The groups of a group run, from its head and the jobs of its workers; none for another run.

    Raises UsageError for workers that AWS Batch has forgotten.
    """
    plan = LaunchPlan.read(head.environment)
    if plan is None or not plan.groups:
        return ()
    own = Group(head.tags.get(GROUP_TAG, "head"), queue=head.queue, resources=_resources(head))
    found = [own]
    for group in plan.groups:
        run = workers.get(group.name)
        if run is None:
            raise UsageError(
                f"{head.job_id}: AWS Batch has forgotten its workers {group.name}, and what they "
                f"were is not known here. Submit its job again: batchml submit JOB."
            )
        found.append(
            Group(
                group.name,
                count=group.size,
                min=group.least,
                queue=run.queue,
                resources=_resources(run),
            )
        )
    return tuple(found)


def _resources(run: Run) -> Resources:
    return Resources(vcpus=run.vcpus or 1, memory=f"{run.memory_mib or 2048} MiB", gpus=run.gpus)


def with_nodes_of(spec: JobSpec, run: Run, groups: Sequence[Group]) -> JobSpec:
    """The job with the nodes and groups that the run had."""
    return replace(spec, **launch_of(run), groups=tuple(groups))


# --- All runs -------------------------------------------------------------------------------------


# Variables that are new for each run.
_PER_RUN_PREFIXES = ("BATCHML_", "AWS_BATCH", "AWS_CONTAINER_", "ECS_")

MAP = "BATCHML_ARRAY_MAP"  # "3 17-19 40": the children that are run again
SIZE = "BATCHML_ARRAY_SIZE"

# `sh -c MAPPING sh COMMAND...`: child 1 of the new array takes the number of the second of those.
# The shell does it, so that it works in images without our runtime, too.
MAPPING = (
    "i=${AWS_BATCH_JOB_ARRAY_INDEX:-0}; for r in $" + MAP + "; do a=${r%-*}; n=$((${r#*-}-a+1)); "
    'if [ "$i" -lt "$n" ]; then export AWS_BATCH_JOB_ARRAY_INDEX=$((a+i)); break; fi; '
    'i=$((i-n)); done; exec "$@"'
)


_REFERENCE_MARKS = re.compile("[/:@.]")  # of a reference to a registry
_WRAPPER = ("sh", "-c", MAPPING, "sh")


class RerunSpec(Struct, frozen=True):
    """What a rerun submits.

    `code` is where the archive lies; empty for none. `size` is the size of the run's array, `array`
    that of the new one. `children` are the numbers, in the array, of the children that run again;
    empty for all.
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


def make_rerun(
    run: Run | None,
    record: Record | None,
    changes_params: bool = False,
    groups: Sequence[Group] = (),
) -> RerunSpec:
    """The request for the same run.

    `run` is None for a run that AWS has forgotten. `groups` are those of a group run that another
    machine submitted. Raises UsageError for changed parameters where nobody here knows how the
    command uses them, for a run of a sweep, and for a run of which nothing is known.
    """
    if sweep := FoundRun(run, record).sweep:
        raise UsageError(
            f"The run belongs to a sweep. Its failed trials again: batchml sweeps rerun {sweep} "
            f"--failed. One of them: --trial N. To go on with it: batchml sweeps resume {sweep}."
        )
    check_runs_alone(run, FoundRun(run, record).tags, FoundRun(run, record).job_id)
    environment = run.environment if run else {}
    notices = []
    if record is not None and record.spec:
        spec, code = _spec_from_record(record), record.code
        if not environment:
            notices.append("Variables that --set-env gave are not remembered: give them again.")
    elif changes_params:
        raise UsageError(
            "-p: the run was not submitted from here, so that its command is known but not how its "
            "parameters go into it. Submit its job: batchml submit JOB -p ..."
        )
    elif run is not None:
        spec = with_nodes_of(_spec_from_run(run), run, groups)
        code = environment.get("BATCHML_CODE", "")
        notices.append(
            "It was not submitted from here: secrets, shared memory and which failures are worth "
            "another attempt are not known and not repeated."
        )
    else:
        raise UsageError("AWS Batch has forgotten the run, and its job is not remembered here.")
    env = {
        **spec.env,
        **{k: v for k, v in environment.items() if not k.startswith(_PER_RUN_PREFIXES)},
    }
    mapped = str(env.pop(MAP, "") or environment.get(MAP, ""))
    size = str(env.pop(SIZE, "") or environment.get(SIZE, "")) if mapped else ""
    array = (run.array_size if run else 0) or (record.array_size if record else 0)
    wanted = RerunSpec(
        spec=replace(spec, env=env, code=bool(code), command=plain_command(spec.command)),
        code=code,
        share=run.share if run else "",
        tags=_tags(run, record),
        size=int(size) if size.isdecimal() else array,
        array=array or None,
        max_cost=record.max_cost if record else None,
        notices=tuple(notices),
    )
    return _with_children(wanted, parse_ranges(mapped)) if mapped else wanted


def limit_to_children(wanted: RerunSpec, places: Sequence[int]) -> RerunSpec:
    """The request for some children: a smaller array, or a single run for one child.

    `places` are indices in the array that `wanted` runs again. The program finds the number that
    the child had in the first array.
    """
    known = wanted.children
    return _with_children(wanted, [known[place] if known else place for place in places])


def _with_children(wanted: RerunSpec, children: Sequence[int]) -> RerunSpec:
    env = {**wanted.spec.env, MAP: format_ranges(children), SIZE: str(wanted.size)}
    command = (*_WRAPPER, *plain_command(wanted.spec.command))
    return replace(
        wanted,
        spec=replace(wanted.spec, env=env, command=command),
        array=len(children) if len(children) > 1 else None,
        children=tuple(children),
    )


def original_numbers(run: Run | None, record: Record | None) -> tuple[int, ...]:
    """The numbers that the children of a run had in the first array, in their own order.

    One number for a single run that stands for a child. Empty where every child has its own number.
    """
    kept: Any = record.spec.get("env", {}) if record else {}
    mapped = (run.environment.get(MAP, "") if run else "") or str(kept.get(MAP, ""))
    try:
        return tuple(parse_ranges(mapped))
    except UsageError:  # somebody else's variable
        return ()


def original_id(job_id: str, first: Sequence[int]) -> str:
    """`"id:4"` for `"id:1"`, where the second child was number 4."""
    whole, _, index = job_id.partition(":")
    known = index.isdecimal() and int(index) < len(first)
    return f"{whole}:{first[int(index)]}" if known else job_id


def rerun_id(job_id: str, first: Sequence[int]) -> str | None:
    """`"id:1"` for `"id:4"`; the run itself where it stands for that one child; None for no such
    child.
    """
    whole, colon, number = job_id.partition(":")
    if not (first and colon):
        return job_id
    if not number.isdecimal() or int(number) not in first:
        return None
    return whole if len(first) == 1 else f"{whole}:{first.index(int(number))}"


def plain_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """The program's own command, without the wrapper that gives children their first numbers."""
    return command[len(_WRAPPER) :] if command[: len(_WRAPPER)] == _WRAPPER else command


def _tags(run: Run | None, record: Record | None) -> dict[str, str]:
    """The user's own tags."""
    tags = {**(record.tags if record else {}), **(run.tags if run else {})}
    return {name: value for name, value in tags.items() if not name.startswith("batchml")}


def _spec_from_record(record: Record) -> JobSpec:
    """The job as it was sent, with the image that was sent."""
    try:
        spec = msgspec.convert(record.spec, JobSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"The record of {record.job_id} cannot be read: {error}") from error
    return replace(spec, image=record.image or spec.image, name=spec.name or record.name)


def _spec_from_run(run: Run) -> JobSpec:
    """A job that leads to the same requests, as far as AWS describes them."""
    return JobSpec(
        # A bare name is a folder here; for AWS Batch it is an official image of Docker Hub.
        image=run.image if _REFERENCE_MARKS.search(run.image) else f"docker.io/library/{run.image}",
        command=run.command,
        name=to_name(run.name),
        queue=run.queue,
        resources=Resources(
            vcpus=run.vcpus or 1, memory=f"{run.memory_mib or 2048} MiB", gpus=run.gpus
        ),
        retry=Retry(attempts=run.max_attempts),
        timeout=run.timeout,
    )


def record_spec(spec: JobSpec, before: Record | None) -> dict[str, Any]:
    """The job as the new run's record keeps it.

    Variables of the command line may be secrets: only variables that the job's file had, and
    batchml's own, are kept.
    """
    table: dict[str, Any] = msgspec.to_builtins(spec)
    known = {*(before.spec.get("env", {}) if before else {}), MAP, SIZE}
    table["env"] = {name: value for name, value in spec.env.items() if name in known}
    if before is not None and before.spec:
        table["code"] = before.spec.get("code", table["code"])
    return table


def format_ranges(chosen: Sequence[int]) -> str:
    """`"3 17-19 40"` for 3, 17, 18, 19 and 40: rising numbers, each once."""
    found: list[list[int]] = []
    for number in chosen:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def parse_ranges(text: str) -> list[int]:
    """The numbers that `ranges` wrote. Raises UsageError for another text."""
    found: list[int] = []
    for word in text.split():
        first, _, last = word.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise UsageError(f"{MAP} is {text!r}, which says no children.")
        found += range(int(first), min(int(last or first), int(first) + 10_000) + 1)
    return found


# --- numbering ------------------------------------------------------------------------------------
# The numbers of the children of a partial rerun of an array.
#
# AWS Batch numbers the children of each array from 0. After a partial rerun people go on to use
# the numbers of the first array; only this module converts between the two.


_CHILD_PREFIX = re.compile(r"^(Child |\[)(\d+)\b")  # how a message about a child begins


class Numbering:
    """The numbers of one run's children, from the history or from what AWS Batch returns."""

    def __init__(self, first: Sequence[int] = ()) -> None:
        self._first = tuple(first)

    def learn(self, run: Run | None) -> None:
        if run is not None and not self._first:
            self._first = original_numbers(run, None)

    def named(self, child: str) -> str:
        """`"4"` for `"1"`, and `"4/2"` for `"1/2"`, where the second child was number 4."""
        index, slash, attempt = child.partition("/")
        return f"{self._number(index)}{slash}{attempt}" if index else ""

    def renumber(self, happenings: Iterable[RunEvent]) -> Iterator[RunEvent]:
        """The same events, each child under its first number."""
        for each in happenings:
            if not self._first:
                yield each
            elif isinstance(each, RunMessage):
                text = _CHILD_PREFIX.sub(lambda it: it[1] + self._number(it[2]), each.text)
                yield replace(each, text=text)
            else:
                yield self._renamed(each)

    def printed(self, parts: Iterable[AttemptOutput]) -> Iterator[AttemptOutput]:
        """The same output, each child under its first number."""
        for part in parts:
            yield self._renamed(part) if self._first else part

    def _renamed(self, what: Any) -> Any:
        child = getattr(what, "child", "")
        return replace(what, child=self.named(child)) if child else what

    def _number(self, index: str) -> str:
        at = int(index)
        return str(self._first[at]) if at < len(self._first) else index


def numbering(context: "Context", job_id: str, run: Run | None = None) -> Numbering:
    """The numbering of a run of this machine, or of `run`; for others AWS Batch is asked."""
    known = context.history.recent(context.env)
    record = next((each for each in known if each.job_id == job_id), None)
    return Numbering(original_numbers(run, record))


def display_id(context: "Context", job_id: str) -> str:
    """The id of a child as `select` takes it: with its first number, if it has one."""
    record = context.history.records(context.env).get(job_id.partition(":")[0])
    return original_id(job_id, original_numbers(None, record))
