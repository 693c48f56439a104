"""The rules of AWS Batch: `step(state, event) -> (state, effects)`. Pure.

Sources: AWS Batch User Guide, "Job states", "Job scheduling", "Job dependencies", "Job timeouts".
The states a job goes through:

    SUBMITTED -> PENDING -> RUNNABLE -> STARTING -> RUNNING -> SUCCEEDED | FAILED
                               ^____________|__________|    (an attempt failed, and may be retried)
"""

from msgspec.structs import replace

from batchml.local import lifecycle
from batchml.local.draft import Draft
from batchml.local.messages import (
    Answer,
    Effect,
    Ended,
    Event,
    Noted,
    Refusal,
    Requested,
    Started,
    Ticked,
)
from batchml.local.operations import HANDLERS
from batchml.local.scheduling import schedule
from batchml.local.state import State
from batchml.local.wire import Refused
from batchml.model.status import JobStatus


def step(state: State, event: Event) -> tuple[State, list[Effect]]:
    """Apply one event. A refused request changes nothing."""
    draft = Draft(state)
    match event:
        case Requested():
            try:
                draft.effects.append(Answer(HANDLERS[event.operation](draft, event)))
            except Refused as error:
                return state, [Refusal(error.code, error.message, error.status)]
        case Started(task_id, now):
            lifecycle.started(draft, task_id, now)
        case Noted(task_id, text):
            lifecycle.noted(draft, task_id, text)
        case Ended(task_id, exit_, now):
            lifecycle.ended(draft, task_id, exit_, now)
        case Ticked(now):
            lifecycle.time_out(draft, now)
    schedule(draft)
    return draft.state, draft.effects


def next_deadline(state: State) -> int | None:
    """When the next timeout falls due, in ms since the epoch."""
    return None if state.deadlines is None else int(state.deadlines[1][0])


def restore(state: State) -> State:
    """Derive the indexes from the unfinished jobs, in the order in which they were submitted."""
    draft = Draft(state)
    for job in sorted(state.jobs.values(), key=lambda job: job.sequence):
        if job.attempt is not None:
            draft.occupy(job, job.attempt)
            # `occupy` takes any GPUs; these are the ones that the attempt has.
            taken = {gpu for j in state.jobs.values() if j.attempt for gpu in j.attempt.gpus}
            left = tuple(gpu for gpu in state.machine.gpus if gpu not in taken)
            draft.state = replace(draft.state, free=replace(draft.state.free, gpus=left))
            lifecycle.set_deadline(draft, job)
        elif job.status is JobStatus.RUNNABLE:
            draft.enqueue(job, front=bool(job.attempts))
        for waited_for in job.waiting_for:
            draft.depend(job.id, waited_for)
    return draft.state
