"""Multi-node parallel jobs: one job with many nodes, which are all placed at once.

Source: AWS Batch User Guide, "Multi-node parallel jobs". The main node starts first. The others
start once it runs, and receive its address. The end of the main node ends the job and stops the
others; the end of another node stops nothing. The job gets the exit code and the reason of the main
node. A retry runs all nodes again.

The job's attempt holds the resources of all nodes, from before the first start to the last end.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from batchml.local.batch.events import AttemptExit, PrepareAttempt
from batchml.local.batch.lifecycle import (
    add_attempt_record,
    decide_status,
    live_children,
    new_attempt,
    set_deadline,
    settle_attempt,
    stop_nodes,
    to_running,
)
from batchml.local.batch.state import Job, JobAttempt
from batchml.local.batch.transaction import Transaction
from batchml.model.run import JobStatus

MAIN_ENDED = "The main node has ended"  # the reason for which the others are stopped


def note_started(tx: Transaction, node: Job, now: int, address: str) -> None:
    """A node runs. The main node makes the job RUNNING and lets the other nodes start."""
    job = tx.state.jobs.get(node.parent)
    if node.attempt is None or node.status is not JobStatus.STARTING or job is None:
        return
    node = to_running(node, replace(node.attempt, address=address), now)
    tx.put_job(node)
    if not node.is_main_node or job.attempt is None:
        return
    job_attempt = job.attempt
    job = to_running(job, job_attempt, now)
    tx.put_job(job)
    set_deadline(tx, job)
    if not job.is_ending:
        for other, gpus in _with_gpus(tx, job, job_attempt):
            if other.attempt is None and not other.is_main_node:
                _launch(tx, job_attempt, other, gpus, address)


def launch_main(tx: Transaction, job: Job, job_attempt: JobAttempt) -> None:
    """Start the main node, before all others."""
    main, gpus = next(pair for pair in _with_gpus(tx, job, job_attempt) if pair[0].is_main_node)
    _launch(tx, job_attempt, main, gpus)


def _launch(
    tx: Transaction,
    job_attempt: JobAttempt,
    node: Job,
    gpus: tuple[str, ...],
    main_address: str = "",
) -> None:
    """Start a node with the resources that its job's attempt holds."""
    attempt = new_attempt(node, job_attempt.number, job_attempt.environment, gpus)
    attempt = replace(attempt, main_address=main_address)
    node = replace(node, status=JobStatus.STARTING, status_reason="", attempt=attempt,
                   exit_code=None, reason="", stopped_at=None)  # fmt: skip
    tx.add_task(attempt.task_id, node.id)
    tx.put_job(node)
    tx.effects.append(PrepareAttempt(node, attempt))


def _with_gpus(
    tx: Transaction, job: Job, job_attempt: JobAttempt
) -> Iterator[tuple[Job, tuple[str, ...]]]:
    """The nodes of a job, each with its share of the GPUs of the job's attempt."""
    first = 0
    for node in live_children(tx, job):
        yield node, job_attempt.gpus[first : first + node.needs.gpus]
        first += node.needs.gpus


def end_node(tx: Transaction, node: Job, exit_: AttemptExit) -> None:
    """A node has ended. The job continues until the main node, and then all others, have ended."""
    job = tx.state.jobs.get(node.parent)
    if node.attempt is None or job is None or job.attempt is None:
        return
    tx.forget_task(node.attempt.task_id)
    status = JobStatus.SUCCEEDED if exit_.code == 0 else JobStatus.FAILED
    node = replace(add_attempt_record(node, node.attempt, exit_, tx.now), status=status)
    tx.put_job(node, live=True)
    nodes = live_children(tx, job)
    main = next(other for other in nodes if other.is_main_node)
    if node.is_main_node:
        stop_nodes(tx, nodes, MAIN_ENDED)
    if all(other.attempt is None for other in nodes):
        _end_job_attempt(tx, job, job.attempt, main, nodes)


def _end_job_attempt(
    tx: Transaction, job: Job, attempt: JobAttempt, main: Job, nodes: list[Job]
) -> None:
    """All nodes have ended: the main node decides the job's status."""
    tx.release(job, attempt)
    job = decide_status(
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
    if job.status is JobStatus.RUNNABLE:
        for node in nodes:
            node = replace(node, status=JobStatus.PENDING, status_reason="", stop_reason="")
            tx.put_job(replace(node, stopped_at=None))
    else:
        for node in nodes:
            if node.is_main_node or node.stop_reason:
                tx.put_job(replace(node, status=job.status), live=True)
    settle_attempt(tx, job)
