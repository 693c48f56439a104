"""Make the request of a rerun, from the record in the history or from the job in AWS Batch. Pure.

A partial rerun of an array is a smaller array, whose children have the numbers that they had in the
first array. AWS Batch numbers them from 0; `model/numbering` converts between the two.
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.requests import BY_DOCUMENT
from batchml.errors import UsageError
from batchml.model.group import GROUP_TAG, HEALTH, is_worker
from batchml.model.job import Group, Health, JobSpec, Launch, Resources, Retry
from batchml.model.names import to_name
from batchml.model.numbering import (
    format_ranges,
    mapped_command,
    original_numbers,
    parse_ranges,
    plain_command,
)
from batchml.model.run import DATA_VARIABLE, FUNCTION_TAG, Record, Run
from batchml.runs.search import FoundRun
from batchml.runs.watch.events import RunEvent, RunMessage
from batchml.runs.watch.logs import AttemptOutput
from batchml.runtime.protocol.launch import LaunchPlan
from batchml.runtime.protocol.variables import ARRAY_MAP, IDLE_AFTER, takes

if TYPE_CHECKING:
    from batchml.context import Context

# --- Runs of several nodes, and group runs --------------------------------------------------------


PLAIN = Launch()


def check_runs_alone(run: Run | None, tags: Mapping[str, str], job_id: str, head: str = "") -> None:
    """Raise UsageError for a job that cannot run alone: a node, or the workers of a group run.

    `head` is the id or key of the workers' head, for the message.
    """
    if run is not None and run.node_index is not None:
        whole = job_id.partition("#")[0]
        raise UsageError(
            f"{job_id}: a node does not run alone. To run all nodes again: batchml rerun {whole}"
        )
    if is_worker(tags):
        whole = head or tags["batchml:gang"]
        raise UsageError(
            f"{job_id}: workers do not run without their head. To run both again: batchml rerun "
            f"{whole}"
        )


def launch_of(run: Run) -> dict[str, Any]:
    """The JobSpec fields `nodes`, `launch`, `health` and `idle_after` of a run, by name.

    Raises UsageError if its environment variables are of another version of batchml, and for nodes
    that may differ, because another client submitted them.
    """
    if run.nodes and not run.key:
        raise UsageError(
            f"{run.job_id}: batchml did not submit it, and its nodes may not all be alike. "
            f"Submit its job: batchml submit JOB."
        )
    try:
        plan = LaunchPlan.read(run.environment)
        checks = json.loads(run.environment.get(HEALTH) or "{}")
        health = {name: value for name, value in checks.items() if value or name != "bandwidth"}
        if "bandwidth" in health:
            health["bandwidth"] = f"{health['bandwidth']} B"
        converted = msgspec.convert(health, Health)
    except (AttributeError, ValueError) as error:
        raise UsageError(f"{run.job_id}: how its nodes start cannot be read: {error}") from None
    launch = PLAIN if plan is None else _launch(plan)
    idle = run.environment.get(IDLE_AFTER, "")
    return {
        "nodes": run.nodes or 1,
        "launch": launch,
        "health": converted,
        "idle_after": int(idle) if idle.isdecimal() else None,
    }


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
    """The groups of a group run, from its head and the jobs of its workers; () for another run.

    Raises UsageError for workers that AWS Batch has forgotten.
    """
    plan = LaunchPlan.read(head.environment)
    if plan is None or not plan.groups:
        return ()
    head_group = Group(
        head.tags.get(GROUP_TAG, "head"), queue=head.queue, resources=_resources(head)
    )
    found = [head_group]
    for group in plan.groups:
        run = workers.get(group.name)
        if run is None:
            raise UsageError(
                f"{head.job_id}: AWS Batch has forgotten its workers {group.name}, and the history "
                f"does not have them. Submit its job again: batchml submit JOB."
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
    return Resources(
        vcpus=run.vcpus or 1, memory=f"{run.memory_mib or 2048} MiB", gpus=run.gpus,
        neurons=run.neurons,
    )  # fmt: skip


def with_nodes_of(spec: JobSpec, run: Run, groups: Sequence[Group]) -> JobSpec:
    """The job with the nodes and groups that the run had."""
    return replace(spec, **launch_of(run), groups=tuple(groups))


# --- All runs -------------------------------------------------------------------------------------


# The options that may replace values of the run.
CHANGEABLE = (
    "params", "name", "queue", "image", "vcpus", "memory", "gpus", "neurons", "launch", "attempts",
    "retry_on", "auto_resume", "timeout", "idle_after", "max_cost", "tags", "include_secrets",
    "command",
)  # fmt: skip

# Prefixes of environment variables that every run gets anew.
PER_RUN = ("BATCHML_", "AWS_BATCH", "AWS_CONTAINER_", "ECS_")

SIZE = "BATCHML_ARRAY_SIZE"  # variable: the size of the first array

_REFERENCE_MARKS = "/:@."  # in a reference, and not in the name of a folder


class RerunSpec(Struct, frozen=True):
    """What a rerun submits.

    `code` is the address of the archive, "" for none. `size` is the size of the first array,
    `array` the size of the new array. `children` are the numbers in the first array of the
    children that run again; () for all.
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
    own_tags: dict[str, str] = {}  # tags that batchml sets


def make_rerun(
    run: Run | None,
    record: Record | None,
    params: Mapping[str, str] = {},
    groups: Sequence[Group] = (),
    command: Sequence[str] = (),
) -> RerunSpec:
    """The request for the same run, with another `command` if there is one.

    `run` is None for a run that AWS Batch has forgotten. `groups` are the groups of a group run
    that another machine submitted. Raises UsageError for changed `params` if the history does not
    have the job that uses them or if the command has their flags itself, for a run of a sweep, and
    if neither `run` nor `record` exists.
    """
    if sweep := FoundRun(run, record).sweep:
        raise UsageError(
            f"The run belongs to a sweep. To run its failed trials again: batchml sweeps rerun "
            f"{sweep} --failed; one trial: --trial N. To continue the sweep: batchml sweeps resume "
            f"{sweep}."
        )
    check_runs_alone(run, FoundRun(run, record).tags, FoundRun(run, record).job_id)
    environment = run.environment if run else {}
    notices = []
    if record is not None and record.spec:
        spec, code = _spec_from_record(record), record.code
        spec = replace(spec, command=tuple(command)) if command else spec
        _check_flags(spec, record, params)
        if not environment:
            notices.append("The history does not have the variables of --set-env: set them again.")
    elif params:
        raise UsageError(
            "-p: the run was not submitted from this machine, so it is not known how its command "
            "uses parameters. Submit its job: batchml submit JOB -p ..."
        )
    elif run is not None:
        spec = with_nodes_of(_spec_from_run(run), run, groups)
        spec = replace(spec, command=tuple(command)) if command else spec
        code = environment.get("BATCHML_CODE", "")
        notices.append(
            "The run was not submitted from this machine: its secrets, shared memory and rules for "
            "another attempt are not known, and the new run has none."
        )
    else:
        raise UsageError("AWS Batch has forgotten the run, and the history does not have its job.")
    env = {
        **spec.env,
        **{k: v for k, v in environment.items() if not k.startswith(PER_RUN)},
    }
    if data := FoundRun(run, record).data_dir:
        env[DATA_VARIABLE] = data
    mapped = str(env.pop(ARRAY_MAP, "") or environment.get(ARRAY_MAP, ""))
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


def _check_flags(spec: JobSpec, record: Record, params: Mapping[str, str]) -> None:
    """Raise UsageError for a parameter that the command does not use, but has as a flag itself."""
    command, own = plain_command(spec.command), []
    for name, value in params.items():
        if not takes(spec.command, name, spec.params):
            changed, flag = _with_flag(command, name, value)
            own += [flag] if flag else []
            command = changed
    if own:
        where = shlex.quote(record.job) if record.job else f"--image {record.spec.get('image')}"
        raise UsageError(
            f"-p: the command of the run has {' and '.join(own)} itself, and takes no parameter of "
            f"that name. With the new value: batchml submit {where} -- "
            f"{shlex.join(command)}"
        )


def _with_flag(command: Sequence[str], name: str, value: str) -> tuple[tuple[str, ...], str]:
    """The command with another value of its own flag `--NAME`, and the flag as it was; "" if the
    command has no such flag.
    """
    like = name.replace("_", "-")
    for at, word in enumerate(command):
        flag, equals, _ = word.partition("=")
        if not flag.startswith("-") or flag.lstrip("-").replace("_", "-") != like:
            continue
        if equals:
            return (*command[:at], f"{flag}={value}", *command[at + 1 :]), word
        if at + 1 < len(command):
            return (*command[: at + 1], value, *command[at + 2 :]), f"{word} {command[at + 1]}"
    return tuple(command), ""


def changeable_command(found: FoundRun) -> tuple[str, ...]:
    """The command of a run, with `{lr}` for its parameters; () if a rerun takes no other one."""
    run, spec = found.run, found.record.spec if found.record else {}
    command = tuple(map(str, spec.get("command") or (run.command if run else ())))
    is_document = command[:1] == (BY_DOCUMENT,)
    return () if FUNCTION_TAG in found.tags or is_document else plain_command(command)


def limit_to_children(wanted: RerunSpec, indices: Sequence[int]) -> RerunSpec:
    """The request for some children: a smaller array, or a single run for one child.

    `indices` are those of the array that `wanted` runs again. AWS_BATCH_JOB_ARRAY_INDEX is the
    number that the child had in the first array.
    """
    known = wanted.children
    return _with_children(wanted, [known[index] if known else index for index in indices])


def _with_children(wanted: RerunSpec, children: Sequence[int]) -> RerunSpec:
    env = {**wanted.spec.env, ARRAY_MAP: format_ranges(children), SIZE: str(wanted.size)}
    return replace(
        wanted,
        spec=replace(wanted.spec, env=env, command=mapped_command(wanted.spec.command)),
        array=len(children) if len(children) > 1 else None,
        children=tuple(children),
    )


def _tags(run: Run | None, record: Record | None) -> dict[str, str]:
    """The tags that the user set."""
    tags = {**(record.tags if record else {}), **(run.tags if run else {})}
    return {name: value for name, value in tags.items() if not name.startswith("batchml")}


def _spec_from_record(record: Record) -> JobSpec:
    """The job as it was submitted, with its image."""
    try:
        spec = msgspec.convert(record.spec, JobSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"The record of {record.job_id} cannot be read: {error}") from error
    return replace(spec, image=record.image or spec.image, name=spec.name or record.name)


def _spec_from_run(run: Run) -> JobSpec:
    """A job that leads to the same requests, as far as AWS Batch returns them."""
    return JobSpec(
        # In a JobSpec, a bare name is a folder; in AWS Batch, an official image of Docker Hub.
        image=run.image if {*run.image} & {*_REFERENCE_MARKS} else f"docker.io/library/{run.image}",
        command=run.command,
        name=to_name(run.name),
        queue=run.queue,
        resources=_resources(run),
        data=run.data,
        retry=Retry(attempts=run.max_attempts),
        timeout=run.timeout,
    )


def record_spec(spec: JobSpec, before: Record | None) -> dict[str, Any]:
    """The job for the record of the new run.

    Environment variables of the command line may be secrets: only those of the job's file, and
    batchml's own, are kept.
    """
    table: dict[str, Any] = msgspec.to_builtins(spec)
    known = {*(before.spec.get("env", {}) if before else {}), ARRAY_MAP, SIZE, DATA_VARIABLE}
    table["env"] = {name: value for name, value in spec.env.items() if name in known}
    if before is not None and before.spec:
        table["code"] = before.spec.get("code", table["code"])
    return table


# --- Renumbering the events and the output of a partial rerun -------------------------------------


_CHILD_PREFIX = r"^(Child |\[)(\d+)\b"  # the start of a message about a child


class Numbering:
    """Gives the children of a partial rerun the numbers that they had in the first array."""

    def __init__(self, first: Sequence[int] = ()) -> None:
        self._first = tuple(first)

    def learn(self, run: Run | None) -> None:
        if run is not None and not self._first:
            self._first = original_numbers(run, None)

    def to_original(self, child: str) -> str:
        """`4` for `1`, and `4/2` for `1/2`, if child 1 was number 4 of the first array."""
        index, slash, attempt = child.partition("/")
        return f"{self._number(index)}{slash}{attempt}" if index else ""

    def renumber(self, events: Iterable[RunEvent]) -> Iterator[RunEvent]:
        """The same events, with the numbers of the first array."""
        for each in events:
            if not self._first:
                yield each
            elif isinstance(each, RunMessage):
                text = re.sub(_CHILD_PREFIX, lambda it: it[1] + self._number(it[2]), each.text)
                yield replace(each, text=text)
            else:
                yield self._with_number(each)

    def renumber_output(self, parts: Iterable[AttemptOutput]) -> Iterator[AttemptOutput]:
        """The same output, with the numbers of the first array."""
        for part in parts:
            yield self._with_number(part) if self._first else part

    def _with_number(self, item: Any) -> Any:
        child = getattr(item, "child", "")
        return replace(item, child=self.to_original(child)) if child else item

    def _number(self, index: str) -> str:
        at = int(index)
        return str(self._first[at]) if at < len(self._first) else index


def numbering(context: "Context", job_id: str, run: Run | None = None) -> Numbering:
    """The numbering of a run, from `run` or the history; later `learn` may complete it."""
    return Numbering(original_numbers(run, context.history.find(context.env, job_id)))
