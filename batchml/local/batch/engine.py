"""The rules of AWS Batch: `step(state, event) -> (state, effects)`. Pure.

Sources: AWS Batch User Guide, "Job states", "Job scheduling", "Job dependencies", "Job timeouts".
The states of a job:

    SUBMITTED -> PENDING -> RUNNABLE -> STARTING -> RUNNING -> SUCCEEDED | FAILED
                               ^____________|__________|    (an attempt failed, and may be retried)
"""

from immutables import Map
from msgspec.structs import replace

from batchml.local.batch import faults, lifecycle, multinode
from batchml.local.batch.events import (
    NO_LINES,
    NO_PROOF,
    AnswerCall,
    AttemptEnded,
    AttemptExit,
    AttemptNeverBegan,
    AttemptPrepared,
    AttemptProgressed,
    AttemptStarted,
    CallReceived,
    ClockTicked,
    Effect,
    Event,
    LogEnd,
    RefuseCall,
    SaveLogEnd,
)
from batchml.local.batch.operations import HANDLERS
from batchml.local.batch.operations.resources import continue_deletions
from batchml.local.batch.scheduling import next_time_limit, schedule
from batchml.local.batch.state import BatchState, Job, parent_of
from batchml.local.batch.transaction import Transaction
from batchml.local.server.protocol import ApiError
from batchml.model.run import JobStatus


def step(state: BatchState, event: Event) -> tuple[BatchState, list[Effect]]:
    """Apply one event. A refused call changes nothing."""
    tx = Transaction(state, event.now)
    match event:
        case CallReceived():
            try:
                tx.effects.append(AnswerCall(HANDLERS[event.operation](tx, event)))
            except ApiError as error:
                return state, [RefuseCall(error.code, error.message, error.status)]
        case ClockTicked():
            lifecycle.time_out(tx)
            faults.inject_due(tx)
        case AttemptPrepared():
            for task_id in event.task_ids:
                job = lifecycle.job_of(tx, task_id)
                if job is not None:
                    lifecycle.begin_attempt(tx, job)
            return tx.state, tx.effects  # no resources have become free
        case AttemptNeverBegan() | AttemptStarted() | AttemptProgressed() | AttemptEnded():
            _apply_to_attempt(tx, event)
    continue_deletions(tx)
    schedule(tx)
    return tx.state, tx.effects


def _apply_to_attempt(
    tx: Transaction, event: AttemptNeverBegan | AttemptStarted | AttemptProgressed | AttemptEnded
) -> None:
    job = lifecycle.job_of(tx, event.task_id)
    if job is None:
        return  # an earlier attempt: the event came twice
    match event:
        case AttemptNeverBegan() if job.attempt is not None:
            if job.is_ending or job.stop_reason:
                exit_ = AttemptExit(start_failure=lifecycle.STOPPED_EARLY, log=NO_LINES)
                _end(tx, job, event.task_id, exit_, exit_)
            else:
                lifecycle.prepare_again(tx, job, job.attempt)
        case AttemptProgressed():
            lifecycle.note_progress(tx, job, event.text)
        case AttemptStarted() if job.status is JobStatus.STARTING:
            if job.node is not None:
                multinode.note_started(tx, job, event.now, event.address)
            else:
                lifecycle.note_started(tx, job, event.now)
            faults.schedule_fault(tx, tx.state.jobs[job.id])
        case AttemptEnded():
            _end(tx, job, event.task_id, faults.apply_fault(job.attempt, event.exit), event.exit)


def _end(tx: Transaction, job: Job, task_id: str, exit_: AttemptExit, real: AttemptExit) -> None:
    """End an attempt with `exit_`. `real` is its actual exit, which differs if a fault was
    injected.
    """
    end = lifecycle.end_attempt if job.node is None else multinode.end_node
    end(tx, job, exit_)
    tx.effects.append(SaveLogEnd(task_id, _log_end(real)))


def _log_end(exit_: AttemptExit) -> LogEnd:
    """The proof of a log, or why it is missing. A lost runner or engine may have lost output."""
    if exit_.log is None and not exit_.lost:
        return LogEnd(doubt=NO_PROOF)
    return LogEnd(exit_.log, exit_.lost)


def next_deadline(state: BatchState) -> int | None:
    """The next time, in ms since the epoch, at which time alone changes something."""
    timeout = None if state.deadlines is None else int(state.deadlines[1][0])
    limit = next_time_limit(state) if state.blocked else None
    fault = None if state.faults is None else int(state.faults[1][0])
    capacity = state.no_capacity_until or None
    deletion = 0 if any(queue.is_deleting for queue in state.queues.values()) else None
    known = (timeout, limit, fault, capacity, deletion)
    return min((at for at in known if at is not None), default=None)


def tasks_to_stop(state: BatchState) -> list[str]:
    """The running tasks that must stop, for a server that follows one that was killed."""
    task_ids = []
    for job in state.jobs_with_attempt():
        if job.attempt is None or job.is_multinode:
            continue
        if job.is_ending or (job.node is not None and job.stop_reason):
            task_ids.append(job.attempt.task_id)
    return task_ids


def restore(state: BatchState, now: int = 0) -> BatchState:
    """Derive the indexes from the unfinished jobs, in the order of their submission.

    `state.counts` holds the children that have ended; the live ones are added.
    """
    tx = Transaction(state, now)
    counts: dict[str, dict[str, int]] = {}
    waiting: list[tuple[Job, bool]] = []
    for job in sorted(state.jobs.values(), key=lambda job: job.sequence):
        if job.is_array:
            counts.setdefault(job.id, dict(state.counts.get(job.id, {})))
        elif job.index is not None:
            of_parent = counts[parent_of(job.id)]  # a parent comes before its children
            of_parent[job.status.value] = of_parent.get(job.status.value, 0) + 1
        if job.attempt is not None:
            if job.node is None:
                tx.occupy(job, job.attempt)
                lifecycle.set_deadline(tx, job)
            else:
                tx.add_task(job.attempt.task_id, job.id)
            faults.schedule_fault(tx, job)
        elif job.status is JobStatus.RUNNABLE:
            waiting.append((job, bool(job.attempts)))
        for waited_for in job.waiting_for:
            tx.add_dependency(job.id, waited_for)
    tx.enqueue_all(waiting)
    return replace(tx.state, counts=Map(counts))
