"""What happens to a job between its submission and its end. Each function changes a draft.

Sources: AWS Batch User Guide, "Job states", "Array jobs", "Job dependencies", "Job timeouts"; the
texts are AWS's. `multinode.py` has what is different for multi-node parallel jobs.
"""

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from msgspec.structs import replace

from batchml.local.batch.events import Begin, Exit, Launch, SaveSpec, Stop
from batchml.local.batch.state import DEFAULT_LOG_GROUP, Attempt, Job, instance_arn
from batchml.local.batch.transaction import Draft
from batchml.model.run import JobStatus

# --- retry rules ----------------------------------------------------------------------------------
# Whether a failed attempt is tried again.
#
# Source: AWS Batch API, RetryStrategy and EvaluateOnExit; User Guide, "Automated job retries".


def wants_retry(
    strategy: Mapping[str, Any],
    *,
    attempts_made: int,
    status_reason: str,
    reason: str,
    exit_code: int | None,
) -> bool:
    """True when the strategy asks for another attempt.

    The first entry of evaluateOnExit whose conditions all match decides; when none matches the job
    is retried, as AWS documents.
    """
    if attempts_made >= int(strategy.get("attempts", 1)):
        return False
    code = None if exit_code is None else str(exit_code)
    for rule in strategy.get("evaluateOnExit", ()):
        conditions = (
            (rule.get("onStatusReason"), status_reason or None),
            (rule.get("onReason"), reason or None),
            (rule.get("onExitCode"), code),
        )
        if all(pattern is None or matches(pattern, text) for pattern, text in conditions):
            return str(rule["action"]).upper() == "RETRY"
    return True


def matches(pattern: str, text: str | None) -> bool:
    """Exact, or by prefix when the pattern ends with `*`.

    AWS does not say whether `*` matches what is absent; it does here, since rule lists that people
    use end with it as a catch-all (docs/decisions/002-absent-reason.md).
    """
    if pattern == "*":
        return True
    if text is None:
        return False
    if pattern.endswith("*"):
        return text.startswith(pattern[:-1])
    return text == pattern


# --- attempts -------------------------------------------------------------------------------------
# A new attempt: its task id and where its output goes. Pure.


def attempt_of(
    job: Job, number: int, environment: str, gpus: tuple[str, ...], task: int = 1
) -> Attempt:
    task_id = task_id_of(job.id, number, task)
    if job.is_multinode:
        return Attempt(number, task_id, environment, gpus, may_have_begun=False)
    options = job.container.get("logConfiguration", {}).get("options", {})
    prefix = options.get("awslogs-stream-prefix") or job.definition.rpartition(":")[0][:200]
    return Attempt(
        number=number,
        task_id=task_id,
        environment=environment,
        gpus=gpus,
        task=task,
        may_have_begun=False,
        log_group=options.get("awslogs-group") or DEFAULT_LOG_GROUP,
        log_stream=f"{prefix}/default/{task_id}",
    )


def next_task(job: Job, attempt: Attempt) -> Attempt:
    """The same attempt under another task id, for one whose program was never started."""
    again = attempt_of(job, attempt.number, attempt.environment, attempt.gpus, attempt.task + 1)
    return replace(again, main_address=attempt.main_address)


def task_id_of(job_id: str, number: int, task: int = 1) -> str:
    """A task id as ECS makes them: 32 hexadecimal digits, the same each time it is worked out."""
    name = f"{job_id}/{number}" if task == 1 else f"{job_id}/{number}/{task}"
    return sha256(name.encode()).hexdigest()[:32]


# --- lifecycle ------------------------------------------------------------------------------------


CONTAINER_EXITED = "Essential container in task exited"
DID_NOT_START = "Task failed to start"
TIMED_OUT = "Job attempt duration exceeded timeout"
DEPENDENCY_FAILED = "Dependent Job failed"
CHILD_FAILED = "Array Child Job failed"
QUEUE_DELETED = "JobQueue deleted"
STOPPED_EARLY = "CannotStartContainerError: stopped before the program started"
OUT_OF_MEMORY = "OutOfMemoryError: Container killed due to memory usage"


def admit(draft: Draft, job: Job, children: list[Job]) -> None:
    """A job that was just accepted, with its children or nodes: it waits for its dependencies, or
    for its turn.
    """
    specs = {one.spec.id: one.spec for one in (job, *children)}
    draft.effects += [SaveSpec(spec) for spec in specs.values()]
    if children:
        draft.add_children(job, children)
        for child in children:
            for waited_for in child.waiting_for:
                draft.depend(child.id, waited_for)
    if not job.waiting_for or job.dependency_failed:
        _settle(draft, [_released(job, job.created_at)])
    else:
        for waited_for in job.waiting_for:
            draft.depend(job.id, waited_for)
        draft.put_job(replace(job, status=JobStatus.PENDING))
    lost = [child for child in children if child.dependency_failed and child.id in draft.state.jobs]
    _settle(draft, [_released(child, job.created_at) for child in lost])


def _released(job: Job, now: int) -> Job:
    """The job once nothing holds it back: RUNNABLE, or FAILED by a dependency or a cancel."""
    if job.is_ending:
        return failed(job, job.stop_reason, now)
    if job.dependency_failed:
        return failed(job, DEPENDENCY_FAILED, now)
    if job.spec.flaw:
        return failed(job, job.spec.flaw, now)
    return replace(job, status=JobStatus.RUNNABLE)


# --- attempts -------------------------------------------------------------------------------


def prepared(draft: Draft, job: Job) -> None:
    """Everything is there for the program of an attempt: note that it may begin, then start it."""
    attempt = job.attempt
    if attempt is None or attempt.may_have_begun or job.is_ending or job.stop_reason:
        return
    draft.put_job(replace(job, attempt=replace(attempt, may_have_begun=True)))
    draft.effects.append(Begin(attempt.task_id))


def never_began(draft: Draft, job: Job, attempt: Attempt) -> None:
    """Prepare an attempt once more in the place that it holds, under another task id."""
    again = next_task(job, attempt)
    job = replace(job, status_reason="", attempt=again)
    draft.forget_task(attempt.task_id)
    draft.know_task(again.task_id, job.id)
    draft.put_job(job)
    draft.effects.append(Launch(job, again))


def started(draft: Draft, job: Job, now: int) -> None:
    if job.attempt is None or job.status is not JobStatus.STARTING:
        return
    job = running(job, job.attempt, now)
    draft.put_job(job)
    set_deadline(draft, job)


def running(job: Job, attempt: Attempt, now: int) -> Job:
    return replace(
        job,
        status=JobStatus.RUNNING,
        status_reason="",
        started_at=now,
        attempt=replace(attempt, started_at=now),
    )


def noted(draft: Draft, job: Job, text: str) -> None:
    if job.status is JobStatus.STARTING and job.status_reason != text:
        draft.put_job(replace(job, status_reason=text))


def ended(draft: Draft, job: Job, exit_: Exit) -> None:
    """An attempt is over: the job has ended, or goes to the front of its queue for another."""
    if job.attempt is None:
        return
    draft.release(job, job.attempt)
    settle_attempt(draft, judged(recorded(job, job.attempt, exit_, draft.now)))


def recorded(job: Job, attempt: Attempt, exit_: Exit, now: int) -> Job:
    """The job with the record of an attempt that has ended."""
    status_reason, reason = _reasons(exit_)
    started = attempt.started_at if attempt.started_at is not None else exit_.started_at
    stopped = exit_.stopped_at or now
    detail = _attempt_detail(attempt, exit_, status_reason, reason, started, stopped)
    return replace(
        job,
        attempt=None,
        attempts=(*job.attempts, detail),
        started_at=started if started is not None else job.started_at,
        stopped_at=stopped,
        exit_code=exit_.code,
        reason=reason,
        status_reason=status_reason,
    )


def judged(job: Job) -> Job:
    """What the attempt recorded last makes of its job: SUCCEEDED, FAILED, or RUNNABLE once more."""
    stopped = job.stopped_at or 0
    if job.is_ending:
        return failed(job, job.stop_reason, stopped)
    if job.exit_code == 0:
        return replace(job, status=JobStatus.SUCCEEDED)
    if wants_retry(
        job.spec.retry,
        attempts_made=len(job.attempts),
        status_reason=job.status_reason,
        reason=job.reason,
        exit_code=job.exit_code,
    ):
        return replace(job, status=JobStatus.RUNNABLE, stopped_at=None)
    return failed(job, job.status_reason, stopped)


def settle_attempt(draft: Draft, job: Job) -> None:
    if job.status is JobStatus.RUNNABLE:
        draft.put_job(job)
        draft.enqueue(job, front=True)
    else:
        _settle(draft, [job])


def _reasons(exit_: Exit) -> tuple[str, str]:
    """AWS's texts for an end: (statusReason, container.reason)."""
    if exit_.lost:
        return exit_.lost, ""
    if exit_.start_failure:
        return DID_NOT_START, exit_.start_failure[:255]
    return CONTAINER_EXITED, OUT_OF_MEMORY if exit_.oom else exit_.reason


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
        "networkInterfaces": network_interfaces(attempt),
    }
    if exit_.code is not None:
        container["exitCode"] = exit_.code
    if reason:
        container["reason"] = reason
    detail = {"container": container, "stoppedAt": stopped, "statusReason": status_reason}
    return detail if started is None else {**detail, "startedAt": started}


def network_interfaces(attempt: Attempt) -> list[dict[str, str]]:
    """A node has an address of its own, as in AWS; other jobs share the host's."""
    return [{"privateIpv4Address": attempt.address}] if attempt.address else []


# --- ends -----------------------------------------------------------------------------------


def failed(job: Job, reason: str, now: int) -> Job:
    stopped = job.stopped_at if job.stopped_at is not None else now
    return replace(job, status=JobStatus.FAILED, status_reason=reason, stopped_at=stopped)


def _settle(draft: Draft, jobs: list[Job]) -> None:
    """Keep jobs that are RUNNABLE or have ended, and settle all that their ends release.

    A worklist, not a recursion: chains of dependencies may be thousands long.
    """
    todo = jobs
    over: set[str] = set()  # a job may be released by several that end together
    while todo:
        job = todo.pop()
        if job.id in over:
            continue
        if job.is_array and (live := _live_children(draft, job)):
            todo += _open_array(draft, job, live)
            continue
        if job.status is JobStatus.RUNNABLE:
            draft.put_job(job)
            draft.enqueue(job)
            continue
        over.add(job.id)
        if job.is_array:
            job = replace(job, summary=draft.forget_counts(job.id))
        for node in _nodes(draft, job):
            node = _with_its_job(node, job)
            draft.put_job(node, live=False)
            todo += _dependents_of(draft, node)
        draft.put_job(replace(job, waiting_for=()))
        todo += _dependents_of(draft, job)
        if job.index is not None:
            todo += _parent_if_over(draft, job)


def _dependents_of(draft: Draft, job: Job) -> list[Job]:
    """Those that waited for a job that has ended: now released, or still waiting and kept."""
    found = []
    for dependent_id in draft.pop_dependents(job.id):
        dependent = draft.state.jobs.get(dependent_id)
        if dependent is None:
            continue
        left = tuple(other for other in dependent.waiting_for if other != job.id)
        failure = dependent.dependency_failed or job.status is JobStatus.FAILED
        dependent = replace(dependent, waiting_for=left, dependency_failed=failure)
        # A cancelled job waits for all of its dependencies; one that failed ends any other at once.
        if _waits(draft, dependent) and (dependent.is_ending or not failure):
            draft.put_job(dependent)
        else:
            found.append(_released(dependent, job.stopped_at or 0))
    return found


# --- arrays ---------------------------------------------------------------------------------


def _live_children(draft: Draft, parent: Job) -> list[Job]:
    jobs = draft.state.jobs
    return [jobs[child_id] for child_id in parent.child_ids() if child_id in jobs]


def _waits(draft: Draft, job: Job) -> bool:
    """True while a job waits for others itself, or is the child of an array that does."""
    if job.waiting_for:
        return True
    parent = draft.state.jobs.get(job.parent) if job.index is not None else None
    return parent is not None and bool(parent.waiting_for)


def _open_array(draft: Draft, parent: Job, children: list[Job]) -> list[Job]:
    """An array that was released, or failed as a whole: what becomes of its children.

    The array itself stays PENDING until the last of them has ended, as AWS shows it.
    """
    now = parent.stopped_at or draft.now
    draft.put_job(
        replace(parent, status=JobStatus.PENDING, status_reason="", stopped_at=None, waiting_for=())
    )
    if parent.status is JobStatus.FAILED:
        return [_failed_with(child, parent, now) for child in children]
    return [_released(child, now) for child in children if not child.waiting_for]


def _failed_with(child: Job, parent: Job, now: int) -> Job:
    """A child whose array fails as a whole; one that was stopped by itself keeps its reason."""
    if child.is_ending:
        return failed(child, child.stop_reason, now)
    marks = {"cancelled": parent.cancelled, "terminated": parent.terminated}
    return failed(replace(child, **marks), parent.status_reason, now)


def _parent_if_over(draft: Draft, child: Job) -> list[Job]:
    """The array of a child that has ended, if it was the last one."""
    counts = draft.state.counts[child.parent]
    if any(count and not JobStatus(status).is_terminal for status, count in counts.items()):
        return []
    parent = draft.state.jobs[child.parent]
    stopped = child.stopped_at or draft.now
    if parent.is_ending:
        return [failed(parent, parent.stop_reason, stopped)]
    if parent.dependency_failed:
        return [failed(parent, DEPENDENCY_FAILED, stopped)]
    if parent.spec.flaw:
        return [failed(parent, parent.spec.flaw, stopped)]
    if counts.get("FAILED"):
        return [failed(parent, CHILD_FAILED, stopped)]
    return [replace(parent, status=JobStatus.SUCCEEDED, stopped_at=stopped)]


# --- nodes ----------------------------------------------------------------------------------


def _nodes(draft: Draft, job: Job) -> list[Job]:
    return _live_children(draft, job) if job.is_multinode else []


def _with_its_job(node: Job, job: Job) -> Job:
    """A node once its whole job has ended: as it ended itself, or else like the job."""
    if node.status.is_terminal:
        return node
    return replace(
        node, status=job.status, status_reason=job.status_reason, stopped_at=job.stopped_at
    )


# --- stopping -------------------------------------------------------------------------------


def cancel(draft: Draft, job: Job, reason: str) -> None:
    """CancelJob: stops what has not started; has no effect on what has."""
    if job.status.holds_resources or job.is_ending:
        return
    _stop(draft, replace(job, cancelled=True, stop_reason=reason), cancel)


def terminate(draft: Draft, job: Job, reason: str) -> None:
    """TerminateJob: stops the job wherever it is; it is never retried."""
    if job.terminated or job.timed_out:
        return
    _stop(draft, replace(job, terminated=True, stop_reason=reason), terminate)


def _stop(draft: Draft, job: Job, each: Callable[[Draft, Job, str], None]) -> None:
    """Stop a job that is marked: at once, or with its attempt, its dependencies, its children."""
    if job.attempt is not None:
        draft.put_job(job)
        stop_attempt(draft, job, job.attempt)
    elif _waits(draft, job):  # it is marked, and fails once its dependencies have ended
        draft.put_job(job)
    elif job.is_array:
        draft.put_job(job)
        # The last first: those that wait for a child before them are marked when it ends.
        for child in reversed(_live_children(draft, job)):
            each(draft, child, job.stop_reason)
    else:
        _settle(draft, [failed(job, job.stop_reason, draft.now)])


def stop_attempt(draft: Draft, job: Job, attempt: Attempt) -> None:
    """TERM, and KILL after the grace, for what a job runs: for each of its nodes, if it has any."""
    if not job.is_multinode:
        draft.effects.append(Stop(attempt.task_id))
        return
    stop_nodes(draft, _nodes(draft, job), job.stop_reason)


def stop_nodes(draft: Draft, nodes: list[Job], reason: str) -> None:
    """Stop those of the nodes that run. They end as their job does."""
    for node in nodes:
        if node.attempt is not None:
            draft.put_job(replace(node, stop_reason=reason))
            draft.effects.append(Stop(node.attempt.task_id))


def set_deadline(draft: Draft, job: Job) -> None:
    attempt, timeout = job.attempt, job.spec.timeout
    if timeout is not None and attempt is not None and attempt.started_at is not None:
        draft.watch_deadline(attempt.started_at + timeout * 1000, attempt.task_id)


def time_out(draft: Draft) -> None:
    while draft.state.deadlines is not None and draft.state.deadlines[1][0] <= draft.now:
        job = job_of(draft, draft.pop_deadline())
        if job is not None and job.attempt is not None and not job.is_ending:
            draft.put_job(replace(job, timed_out=True, stop_reason=TIMED_OUT))
            stop_attempt(draft, job, job.attempt)


def job_of(draft: Draft, task_id: str) -> Job | None:
    """The job whose attempt a task is."""
    job_id = draft.state.by_task.get(task_id)
    return None if job_id is None else draft.state.jobs.get(job_id)
