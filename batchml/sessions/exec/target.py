"""Find the attempt in which a command is to run: a job, a child of an array, or a node."""

from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.aws.batch.responses import to_run
from batchml.errors import ExecUnavailable, NotFound, NotRunning, UsageError
from batchml.model.run import NOT_KNOWN_WORDS, JobStatus, Run, classify
from batchml.runs.find import describe_runs, load_runs, select
from batchml.runs.groups.members import find_worker_groups
from batchml.runs.metrics.usage import find_nodes

if TYPE_CHECKING:
    from batchml.context import Context


class ExecTarget(Struct, frozen=True):
    """A running attempt. `run` is the job, child or node whose container it is; `node` its number
    in a run of several nodes."""

    run: Run
    node: int | None = None


class ExecResult(Struct, frozen=True):
    """The exit code and the output of a command."""

    code: int
    out: bytes


def find_target(context: "Context", word: str, node: int | None = None) -> ExecTarget:
    """Find the running attempt of the run that `word` names; by default its main node.

    Raises UsageError, NotFound, NotRunning.
    """
    (job_id,) = select(context, [word])
    run = describe_runs(context, [job_id])[job_id]
    if run.array_size:
        raise UsageError(
            f"{run.name} is an array of {run.array_size} runs: name one of them, such as {word}:0."
        )
    if run.nodes and run.node_index is None:
        return _target_of(context, word, _node_of(context, run, node or 0), node or 0)
    if node is not None:
        return _target_of(context, word, _member_of(context, run, node), node)
    return _target_of(context, word, run, run.node_index)


def _node_of(context: "Context", run: Run, node: int) -> Run:
    if not 0 <= node < run.nodes:
        raise UsageError(f"--node {node}: the nodes of {run.name} are 0 to {run.nodes - 1}.")
    part = f"{run.job_id}#{node}"
    return describe_runs(context, [part])[part]


def _member_of(context: "Context", run: Run, node: int) -> Run:
    """Return a job of a group run: the head is node 0, its workers follow in order."""
    if run.node_index is not None:
        raise UsageError(f"{run.job_id} is one node already: leave out --node.")
    (found,) = load_runs(context, [run.job_id])
    members = find_nodes(context, found, find_worker_groups(context, found))
    if not members:
        if node == 0:
            return run
        raise UsageError(f"--node {node}: {run.name} has one node. Leave out --node.")
    if node >= len(members) or node < 0:
        known = ", ".join(f"{number} ({each.name})" for number, each in enumerate(members))
        raise UsageError(f"--node {node}: the running nodes of {run.name} are {known}.")
    return members[node].run


def _target_of(context: "Context", word: str, run: Run, node: int | None) -> ExecTarget:
    if run.status is JobStatus.RUNNING:
        return ExecTarget(run, node)
    raise not_running(context, run, word)


def not_running(context: "Context", run: Run, word: str = "") -> NotRunning:
    """Make the error for a run that waits or has ended."""
    option, word = context.env_option, word or run.job_id
    if run.status.is_terminal:
        return NotRunning(
            f"{run.name} has ended: {describe_end(run)}. For its log and files: "
            f"batchml logs {word}{option}, batchml get {word}{option}",
            over=True,
        )
    return NotRunning(
        f"{run.name} is {run.status.value}: its program has not started yet. To see why: "
        f"batchml explain {word}{option}. To wait for it: --wait"
    )


def describe_end(run: Run) -> str:
    """Say how a run ended: `succeeded`, or `app-error, exit code 3`."""
    outcome = classify(run).outcome.value
    if run.exit_code in (None, 0):
        return outcome
    return f"{outcome}, exit code {run.exit_code}"


def describe_attempt_end(run: Run) -> str:
    """Say how an attempt ended. `run` was read after that: it has ended, or is retried."""
    if run.status.is_terminal:
        return f"{run.name} has ended: {describe_end(run)}."
    return (
        f"This attempt of {run.name} has ended, and the run is {run.status.value}: it will be "
        "retried."
    )


def find_task(context: "Context", run: Run) -> str:
    """Return the ARN of the run's ECS task. Raises NotRunning, ExecUnavailable, NotFound."""
    for detail in context.batch.describe_raw([run.job_id]):
        if detail["status"] != JobStatus.RUNNING.value:
            raise not_running(context, to_run(detail))
        task = (detail.get("container") or {}).get("taskArn", "")
        if task:
            return str(task)
        text = f"{run.name} is RUNNING, but AWS Batch does not name its task yet."
        raise ExecUnavailable(text, is_early=True)
    raise NotFound("Run", run.job_id, [], NOT_KNOWN_WORDS)
