"""What happens to a job between its submission and its end. Each function changes a draft.

Source: AWS Batch User Guide, "Job states", "Job dependencies", "Job timeouts"; the texts are AWS's.
"""

from typing import Any

from msgspec.structs import replace

from batchml.local import heap
from batchml.local.draft import Draft
from batchml.local.messages import Exit, Stop
from batchml.local.retry import wants_retry
from batchml.local.state import CLUSTER, Attempt, Job, arn
from batchml.model.status import JobStatus

CONTAINER_EXITED = "Essential container in task exited"
DID_NOT_START = "Task failed to start"
TIMED_OUT = "Job attempt duration exceeded timeout"
DEPENDENCY_FAILED = "Dependent Job failed"
QUEUE_DELETED = "JobQueue deleted"
OUT_OF_MEMORY = "OutOfMemoryError: Container killed due to memory usage"


def admit(draft: Draft, job: Job) -> None:
    """A job that was just accepted: wait for its dependencies, or for its turn."""
    if not job.waiting_for or job.dependency_failed:
        _settle(draft, _released(job, job.created_at))
        return
    for waited_for in job.waiting_for:
        draft.depend(job.id, waited_for)
    draft.put_job(replace(job, status=JobStatus.PENDING))


def _released(job: Job, now: int) -> Job:
    """The job once nothing holds it back: RUNNABLE, or FAILED by a dependency or a cancel."""
    if job.is_ending:
        return _failed(job, job.stop_reason, now)
    if job.dependency_failed:
        return _failed(job, DEPENDENCY_FAILED, now)
    return replace(job, status=JobStatus.RUNNABLE)


def started(draft: Draft, task_id: str, now: int) -> None:
    job = _job_of(draft, task_id)
    if job is None or job.attempt is None or job.status is not JobStatus.STARTING:
        return
    job = replace(
        job,
        status=JobStatus.RUNNING,
        status_reason="",
        started_at=now,
        attempt=replace(job.attempt, started_at=now),
    )
    draft.put_job(job)
    set_deadline(draft, job)


def noted(draft: Draft, task_id: str, text: str) -> None:
    job = _job_of(draft, task_id)
    if job is not None and job.status is JobStatus.STARTING and job.status_reason != text:
        draft.put_job(replace(job, status_reason=text))


def ended(draft: Draft, task_id: str, exit_: Exit, now: int) -> None:
    job = _job_of(draft, task_id)
    if job is None or job.attempt is None:
        return
    attempt, status_reason, reason = job.attempt, *_reasons(exit_)
    draft.release(job, attempt)
    started = attempt.started_at if attempt.started_at is not None else exit_.started_at
    stopped = exit_.stopped_at or now
    detail = _attempt_detail(attempt, exit_, status_reason, reason, started, stopped)
    job = replace(
        job,
        attempt=None,
        attempts=(*job.attempts, detail),
        started_at=started if started is not None else job.started_at,
        stopped_at=stopped,
        exit_code=exit_.code,
        reason=reason,
        status_reason=status_reason,
    )
    if job.is_ending:
        _settle(draft, _failed(job, job.stop_reason, stopped))
    elif exit_.code == 0:
        _settle(draft, replace(job, status=JobStatus.SUCCEEDED))
    elif wants_retry(
        job.retry,
        attempts_made=len(job.attempts),
        status_reason=status_reason,
        reason=reason,
        exit_code=exit_.code,
    ):
        again = replace(job, status=JobStatus.RUNNABLE, stopped_at=None)
        draft.put_job(again)
        draft.enqueue(again, front=True)
    else:
        _settle(draft, _failed(job, status_reason, stopped))


def _reasons(exit_: Exit) -> tuple[str, str]:
    """AWS's texts for an end: (statusReason, container.reason)."""
    if exit_.lost:
        return exit_.lost, ""
    if exit_.start_failure:
        return DID_NOT_START, exit_.start_failure[:255]
    return CONTAINER_EXITED, OUT_OF_MEMORY if exit_.oom else ""


def _attempt_detail(
    attempt: Attempt,
    exit_: Exit,
    status_reason: str,
    reason: str,
    started: int | None,
    stopped: int,
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "taskArn": attempt.task_arn,
        "containerInstanceArn": instance_arn(),
        "logStreamName": attempt.log_stream,
        "networkInterfaces": [],
    }
    if exit_.code is not None:
        container["exitCode"] = exit_.code
    if reason:
        container["reason"] = reason
    detail = {"container": container, "stoppedAt": stopped, "statusReason": status_reason}
    return detail if started is None else {**detail, "startedAt": started}


def instance_arn() -> str:
    """This machine, as ECS names a host."""
    name = f"{CLUSTER}/this-machine"
    return arn("container-instance", name).replace(":batch:", ":ecs:")


def _failed(job: Job, reason: str, now: int) -> Job:
    stopped = job.stopped_at if job.stopped_at is not None else now
    return replace(job, status=JobStatus.FAILED, status_reason=reason, stopped_at=stopped)


def _settle(draft: Draft, job: Job) -> None:
    """Keep a job that is RUNNABLE or has ended, and settle all that its end releases.

    A worklist, not a recursion: chains of dependencies may be thousands long.
    """
    settled = [job]
    while settled:
        job = settled.pop()
        if job.status is JobStatus.RUNNABLE:
            draft.put_job(job)
            draft.enqueue(job)
            continue
        draft.put_job(replace(job, waiting_for=()))
        for dependent_id in draft.pop_dependents(job.id):
            dependent = draft.state.jobs.get(dependent_id)
            if dependent is None:
                continue
            left = tuple(other for other in dependent.waiting_for if other != job.id)
            failed = dependent.dependency_failed or job.status is JobStatus.FAILED
            dependent = replace(dependent, waiting_for=left, dependency_failed=failed)
            # A cancelled job waits for all of its dependencies; one that failed ends it at once.
            if left and (dependent.is_ending or not failed):
                draft.put_job(dependent)
            else:
                settled.append(_released(dependent, job.stopped_at or 0))


# --- stopping -------------------------------------------------------------------------------


def cancel(draft: Draft, job: Job, reason: str, now: int) -> None:
    """CancelJob: stops what has not started; has no effect on what has."""
    if job.status.holds_resources or job.is_ending:
        return
    _stop_waiting(draft, replace(job, cancelled=True, stop_reason=reason), now)


def terminate(draft: Draft, job: Job, reason: str, now: int) -> None:
    """TerminateJob: stops the job wherever it is; it is never retried."""
    if job.terminated or job.timed_out:
        return
    job = replace(job, terminated=True, stop_reason=reason)
    if job.attempt is None:
        _stop_waiting(draft, job, now)
    else:
        draft.put_job(job)
        draft.effects.append(Stop(job.attempt.task_id))


def _stop_waiting(draft: Draft, job: Job, now: int) -> None:
    if job.waiting_for:  # a PENDING job is marked, and fails once its dependencies have ended
        draft.put_job(job)
    else:
        _settle(draft, _failed(job, job.stop_reason, now))


def set_deadline(draft: Draft, job: Job) -> None:
    if job.timeout is not None and job.attempt is not None and job.attempt.started_at is not None:
        draft.watch_deadline(job.attempt.started_at + job.timeout * 1000, job.attempt.task_id)


def time_out(draft: Draft, now: int) -> None:
    while draft.state.deadlines is not None and draft.state.deadlines[1][0] <= now:
        task_id = draft.state.deadlines[2]
        draft.state = replace(draft.state, deadlines=heap.pop(draft.state.deadlines))
        job = _job_of(draft, task_id)
        if job is not None and not job.is_ending:
            draft.put_job(replace(job, timed_out=True, stop_reason=TIMED_OUT))
            draft.effects.append(Stop(task_id))


def _job_of(draft: Draft, task_id: str) -> Job | None:
    job_id = draft.state.by_task.get(task_id)
    return None if job_id is None else draft.state.jobs.get(job_id)
