"""Multi-node parallel jobs: one job, many nodes, all placed at once.

Source: AWS Batch User Guide, "Multi-node parallel jobs". The main node starts first; the others
once it runs, with its address. Its end ends the job and stops the others; the end of another node
stops nothing. The job's record follows the main node; a retry runs all nodes again.

The job's attempt holds what all nodes occupy, from before the first starts until the last is gone.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from batchml.local.batch.events import Exit, Launch
from batchml.local.batch.lifecycle import (
    attempt_of,
    judged,
    recorded,
    running,
    set_deadline,
    settle_attempt,
    stop_nodes,
)
from batchml.local.batch.state import Attempt, Job
from batchml.local.batch.transaction import Draft
from batchml.model.run import JobStatus

MAIN_ENDED = "The main node has ended"  # why the others are stopped


def started(draft: Draft, node: Job, now: int, address: str) -> None:
    """A node runs: the main one takes the job with it and lets the others start."""
    job = draft.state.jobs.get(node.parent)
    if node.attempt is None or node.status is not JobStatus.STARTING or job is None:
        return
    node = running(node, replace(node.attempt, address=address), now)
    draft.put_job(node)
    if not node.is_main_node or job.attempt is None:
        return
    whole = job.attempt
    job = running(job, whole, now)
    draft.put_job(job)
    set_deadline(draft, job)
    if not job.is_ending:
        for other, gpus in _with_gpus(draft, job, whole):
            if other.attempt is None and not other.is_main_node:
                _launch(draft, whole, other, gpus, address)


def launch_main(draft: Draft, job: Job, whole: Attempt) -> None:
    """Start the main node, before all others."""
    main, gpus = next(found for found in _with_gpus(draft, job, whole) if found[0].is_main_node)
    _launch(draft, whole, main, gpus)


def _launch(
    draft: Draft, whole: Attempt, node: Job, gpus: tuple[str, ...], main_address: str = ""
) -> None:
    """Start a node in the place that its job's attempt holds."""
    attempt = replace(
        attempt_of(node, whole.number, whole.environment, gpus), main_address=main_address
    )
    node = replace(node, status=JobStatus.STARTING, status_reason="", attempt=attempt,
                   exit_code=None, reason="", stopped_at=None)  # fmt: skip
    draft.know_task(attempt.task_id, node.id)
    draft.put_job(node)
    draft.effects.append(Launch(node, attempt))


def _with_gpus(draft: Draft, job: Job, whole: Attempt) -> Iterator[tuple[Job, tuple[str, ...]]]:
    """The nodes of a job, each with its part of the GPUs that the job's attempt holds."""
    given = 0
    for node in _nodes_of(draft, job):
        yield node, whole.gpus[given : given + node.needs.gpus]
        given += node.needs.gpus


def ended(draft: Draft, node: Job, exit_: Exit) -> None:
    """A node is gone. The job goes on until the main node is, and all others after it."""
    job = draft.state.jobs.get(node.parent)
    if node.attempt is None or job is None or job.attempt is None:
        return
    draft.forget_task(node.attempt.task_id)
    status = JobStatus.SUCCEEDED if exit_.code == 0 else JobStatus.FAILED
    node = replace(recorded(node, node.attempt, exit_, draft.now), status=status)
    draft.put_job(node, live=True)
    nodes = _nodes_of(draft, job)
    main = next(other for other in nodes if other.is_main_node)
    if node.is_main_node:
        stop_nodes(draft, nodes, MAIN_ENDED)
    if all(other.attempt is None for other in nodes):
        _attempt_over(draft, job, job.attempt, main, nodes)


def _attempt_over(draft: Draft, job: Job, attempt: Attempt, main: Job, nodes: list[Job]) -> None:
    """No node is left: the job is judged by its main node's end."""
    draft.release(job, attempt)
    over = judged(
        replace(
            job,
            attempt=None,
            attempts=main.attempts,
            exit_code=main.exit_code,
            reason=main.reason,
            status_reason=main.status_reason,
            started_at=main.started_at,
            stopped_at=main.stopped_at,
        )
    )
    if over.status is JobStatus.RUNNABLE:
        for node in nodes:
            node = replace(node, status=JobStatus.PENDING, status_reason="", stop_reason="")
            draft.put_job(replace(node, stopped_at=None))
    else:
        for node in nodes:
            if node.is_main_node or node.stop_reason:
                draft.put_job(replace(node, status=over.status), live=True)
    settle_attempt(draft, over)


def _nodes_of(draft: Draft, job: Job) -> list[Job]:
    return [draft.state.jobs[node_id] for node_id in job.child_ids()]
