"""The rules of AWS Batch: `step(state, event) -> (state, effects)`. Pure.

Sources: AWS Batch User Guide, "Job states", "Job scheduling", "Job dependencies", "Job timeouts".
The states a job goes through:

    SUBMITTED -> PENDING -> RUNNABLE -> STARTING -> RUNNING -> SUCCEEDED | FAILED
                               ^____________|__________|    (an attempt failed, and may be retried)
"""

from immutables import Map
from msgspec.structs import replace

from batchml.local.batch import faults, lifecycle
from batchml.local.batch import multinode as nodes
from batchml.local.batch.events import (
    NO_LINES,
    NO_PROOF,
    Answer,
    Effect,
    Ended,
    Event,
    Exit,
    LogEnd,
    NeverBegan,
    Noted,
    Prepared,
    Refusal,
    Requested,
    SaveLogEnd,
    Started,
    Ticked,
)
from batchml.local.batch.operations import HANDLERS
from batchml.local.batch.scheduling import next_time_limit, schedule
from batchml.local.batch.state import Job, State
from batchml.local.batch.transaction import Draft
from batchml.local.server.protocol import Refused
from batchml.model.run import JobStatus


def step(state: State, event: Event) -> tuple[State, list[Effect]]:
    """Apply one event. A refused request changes nothing."""
    draft = Draft(state, event.now)
    match event:
        case Requested():
            try:
                draft.effects.append(Answer(HANDLERS[event.operation](draft, event)))
            except Refused as error:
                return state, [Refusal(error.code, error.message, error.status)]
        case Ticked():
            lifecycle.time_out(draft)
            faults.strike(draft)
        case Prepared():
            for task_id in event.task_ids:
                job = lifecycle.job_of(draft, task_id)
                if job is not None:
                    lifecycle.prepared(draft, job)
            return draft.state, draft.effects  # nothing has become free
        case NeverBegan() | Started() | Noted() | Ended():
            _of_an_attempt(draft, event)
    schedule(draft)
    return draft.state, draft.effects


def _of_an_attempt(draft: Draft, event: NeverBegan | Started | Noted | Ended) -> None:
    job = lifecycle.job_of(draft, event.task_id)
    if job is None:
        return  # an old one, told twice
    match event:
        case NeverBegan() if job.attempt is not None:
            if job.is_ending or job.stop_reason:
                exit_ = Exit(start_failure=lifecycle.STOPPED_EARLY, log=NO_LINES)
                _end(draft, job, event.task_id, exit_, exit_)
            else:
                lifecycle.never_began(draft, job, job.attempt)
        case Noted():
            lifecycle.noted(draft, job, event.text)
        case Started() if job.status is JobStatus.STARTING:
            if job.node is not None:
                nodes.started(draft, job, event.now, event.address)
            else:
                lifecycle.started(draft, job, event.now)
            faults.arm(draft, draft.state.jobs[job.id])
        case Ended():
            _end(draft, job, event.task_id, faults.verdict(job.attempt, event.exit), event.exit)


def _end(draft: Draft, job: Job, task_id: str, exit_: Exit, real: Exit) -> None:
    """`real` is how it ended, where the rules make something else of it."""
    end = lifecycle.ended if job.node is None else nodes.ended
    end(draft, job, exit_)
    draft.effects.append(SaveLogEnd(task_id, _log_end(real)))


def _log_end(exit_: Exit) -> LogEnd:
    """What is known of a log. When a runner or an engine is lost, output may be lost with it."""
    if exit_.log is None and not exit_.lost:
        return LogEnd(doubt=NO_PROOF)
    return LogEnd(exit_.log, exit_.lost)


def next_deadline(state: State) -> int | None:
    """When something falls due that time alone brings, in ms since the epoch."""
    timeout = None if state.deadlines is None else int(state.deadlines[1][0])
    limit = next_time_limit(state) if state.blocked else None
    fault = None if state.faults is None else int(state.faults[1][0])
    capacity = state.no_capacity_until or None
    return min((at for at in (timeout, limit, fault, capacity) if at is not None), default=None)


def unwanted(state: State) -> list[str]:
    """The tasks that are to be stopped, for a server that was killed before it could say so."""
    found = []
    for job in state.jobs.values():
        if job.attempt is None or job.is_multinode:
            continue
        if job.is_ending or (job.node is not None and job.stop_reason):
            found.append(job.attempt.task_id)
    return found


def restore(state: State, now: int = 0) -> State:
    """Derive the indexes from the unfinished jobs, in the order in which they were submitted.

    `state.counts` comes with the children that have ended; the live ones are added.
    """
    draft = Draft(state, now)
    counts: dict[str, dict[str, int]] = {}
    for job in sorted(state.jobs.values(), key=lambda job: job.sequence):
        if job.is_array:
            counts.setdefault(job.id, dict(state.counts.get(job.id, {})))
        elif job.index is not None:
            of_parent = counts[job.parent]  # a parent comes before its children
            of_parent[job.status.value] = of_parent.get(job.status.value, 0) + 1
        if job.attempt is not None:
            if job.node is None:
                draft.occupy(job, job.attempt)
                lifecycle.set_deadline(draft, job)
            else:
                draft.know_task(job.attempt.task_id, job.id)
            faults.arm(draft, job)
        elif job.status is JobStatus.RUNNABLE:
            draft.enqueue(job, front=bool(job.attempts))
        for waited_for in job.waiting_for:
            draft.depend(job.id, waited_for)
    return replace(draft.state, counts=Map(counts))
