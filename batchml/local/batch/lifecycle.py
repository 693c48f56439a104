"""The life of a job from its submission to its end. Each function changes a transaction.

Sources: AWS Batch User Guide, "Job states", "Array jobs", "Job dependencies", "Job timeouts"; the
texts are AWS's. `multinode.py` has the differences for multi-node parallel jobs.
"""

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from msgspec.structs import replace

from batchml.local.batch.events import (
    AttemptExit,
    BeginAttempt,
    PrepareAttempt,
    SaveSpec,
    StopAttempt,
)
from batchml.local.batch.state import DEFAULT_LOG_GROUP, Job, JobAttempt, instance_arn
from batchml.local.batch.transaction import Transaction
from batchml.model.run import JobStatus

CONTAINER_EXITED = "Essential container in task exited"
DID_NOT_START = "Task failed to start"
TIMED_OUT = "Job attempt duration exceeded timeout"
DEPENDENCY_FAILED = "Dependent Job failed"
CHILD_FAILED = "Array Child Job failed"
QUEUE_DELETED = "JobQueue deleted"
STOPPED_EARLY = "CannotStartContainerError: stopped before the program started"
OUT_OF_MEMORY = "OutOfMemoryError: Container killed due to memory usage"

# --- Retry rules ----------------------------------------------------------------------------------
# Source: AWS Batch API, RetryStrategy and EvaluateOnExit; User Guide, "Automated job retries".


def wants_retry(
    strategy: Mapping[str, Any],
    *,
    attempts_made: int,
    status_reason: str,
    reason: str,
    exit_code: int | None,
) -> bool:
    """True when the retry strategy asks for another attempt.

    The first entry of evaluateOnExit whose conditions all match decides; without a match the job is
    retried, as AWS documents.
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
    """Match exactly, or by prefix when the pattern ends with `*`.

    AWS does not document whether `*` matches an absent value. It does here, because users end rule
    lists with it as a catch-all (docs/decisions/002-absent-reason.md).
    """
    if pattern == "*":
        return True
    if text is None:
        return False
    if pattern.endswith("*"):
        return text.startswith(pattern[:-1])
    return text == pattern


# --- New attempts ---------------------------------------------------------------------------------


def new_attempt(
    job: Job, number: int, environment: str, gpus: tuple[str, ...], task: int = 1
) -> JobAttempt:
    task_id = task_id_of(job.id, number, task)
    if job.is_multinode:
        return JobAttempt(number, task_id, environment, gpus, may_have_begun=False)
    options = job.container.get("logConfiguration", {}).get("options", {})
    prefix = options.get("awslogs-stream-prefix") or job.definition.rpartition(":")[0][:200]
    return JobAttempt(
        number=number,
        task_id=task_id,
        environment=environment,
        gpus=gpus,
        task=task,
        may_have_begun=False,
        log_group=options.get("awslogs-group") or DEFAULT_LOG_GROUP,
        log_stream=f"{prefix}/default/{task_id}",
    )


def next_task(job: Job, attempt: JobAttempt) -> JobAttempt:
    """The same attempt under another task id, for an attempt whose program was never started."""
    again = new_attempt(job, attempt.number, attempt.environment, attempt.gpus, attempt.task + 1)
    return replace(again, main_address=attempt.main_address)


def task_id_of(job_id: str, number: int, task: int = 1) -> str:
    """A task id in ECS's form: 32 hexadecimal digits, always the same for the same task."""
    name = f"{job_id}/{number}" if task == 1 else f"{job_id}/{number}/{task}"
    return sha256(name.encode()).hexdigest()[:32]


# --- Submission -----------------------------------------------------------------------------------


def admit(tx: Transaction, job: Job, children: list[Job]) -> None:
    """Add an accepted job with its children or nodes. It waits for its dependencies, or is RUNNABLE
    at once.
    """
    specs = {one.spec.id: one.spec for one in (job, *children)}
    tx.effects += [SaveSpec(spec) for spec in specs.values()]
    if children:
        tx.add_children(job, children)
        for child in children:
            for waited_for in child.waiting_for:
                tx.add_dependency(child.id, waited_for)
    if not job.waiting_for or job.dependency_failed:
        _settle(tx, [_release(job, job.created_at)])
    else:
        for waited_for in job.waiting_for:
            tx.add_dependency(job.id, waited_for)
        tx.put_job(replace(job, status=JobStatus.PENDING))
    failed = [child for child in children if child.dependency_failed and child.id in tx.state.jobs]
    _settle(tx, [_release(child, job.created_at) for child in failed])


def _release(job: Job, now: int) -> Job:
    """The job once it waits for nothing: RUNNABLE, or FAILED because of a stop, a dependency or a
    flaw of its spec.
    """
    if job.is_ending:
        return to_failed(job, job.stop_reason, now)
    if job.dependency_failed:
        return to_failed(job, DEPENDENCY_FAILED, now)
    if job.spec.flaw:
        return to_failed(job, job.spec.flaw, now)
    return replace(job, status=JobStatus.RUNNABLE)


# --- Attempts -------------------------------------------------------------------------------------


def begin_attempt(tx: Transaction, job: Job) -> None:
    """Everything is ready: record that the program may begin, then start it."""
    attempt = job.attempt
    if attempt is None or attempt.may_have_begun or job.is_ending or job.stop_reason:
        return
    tx.put_job(replace(job, attempt=replace(attempt, may_have_begun=True)))
    tx.effects.append(BeginAttempt(attempt.task_id))


def prepare_again(tx: Transaction, job: Job, attempt: JobAttempt) -> None:
    """Prepare an attempt again with the resources that it holds, under another task id."""
    again = next_task(job, attempt)
    job = replace(job, status_reason="", attempt=again)
    tx.forget_task(attempt.task_id)
    tx.add_task(again.task_id, job.id)
    tx.put_job(job)
    tx.effects.append(PrepareAttempt(job, again))


def note_started(tx: Transaction, job: Job, now: int) -> None:
    if job.attempt is None or job.status is not JobStatus.STARTING:
        return
    job = to_running(job, job.attempt, now)
    tx.put_job(job)
    set_deadline(tx, job)


def to_running(job: Job, attempt: JobAttempt, now: int) -> Job:
    return replace(
        job,
        status=JobStatus.RUNNING,
        status_reason="",
        started_at=now,
        attempt=replace(attempt, started_at=now),
    )


def note_progress(tx: Transaction, job: Job, text: str) -> None:
    if job.status is JobStatus.STARTING and job.status_reason != text:
        tx.put_job(replace(job, status_reason=text))


def end_attempt(tx: Transaction, job: Job, exit_: AttemptExit) -> None:
    """An attempt has ended: the job ends, or goes to the front of its queue for another attempt."""
    if job.attempt is None:
        return
    tx.release(job, job.attempt)
    settle_attempt(tx, decide_status(add_attempt_record(job, job.attempt, exit_, tx.now)))


def add_attempt_record(job: Job, attempt: JobAttempt, exit_: AttemptExit, now: int) -> Job:
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


def decide_status(job: Job) -> Job:
    """The job after its last attempt: SUCCEEDED, FAILED, or RUNNABLE for a retry."""
    stopped = job.stopped_at or 0
    if job.is_ending:
        return to_failed(job, job.stop_reason, stopped)
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
    return to_failed(job, job.status_reason, stopped)


def settle_attempt(tx: Transaction, job: Job) -> None:
    if job.status is JobStatus.RUNNABLE:
        tx.put_job(job)
        tx.enqueue(job, front=True)
    else:
        _settle(tx, [job])


def _reasons(exit_: AttemptExit) -> tuple[str, str]:
    """AWS's texts for an exit: (statusReason, container.reason)."""
    if exit_.lost:
        return exit_.lost, ""
    if exit_.start_failure:
        return DID_NOT_START, exit_.start_failure[:255]
    return CONTAINER_EXITED, OUT_OF_MEMORY if exit_.oom else exit_.reason


def _attempt_detail(
    attempt: JobAttempt,
    exit_: AttemptExit,
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


def network_interfaces(attempt: JobAttempt) -> list[dict[str, str]]:
    """The address of a node, as in AWS; empty for other jobs, which share the host's address."""
    return [{"privateIpv4Address": attempt.address}] if attempt.address else []


# --- Ends -----------------------------------------------------------------------------------------


def to_failed(job: Job, reason: str, now: int) -> Job:
    stopped = job.stopped_at if job.stopped_at is not None else now
    return replace(job, status=JobStatus.FAILED, status_reason=reason, stopped_at=stopped)


def _settle(tx: Transaction, jobs: list[Job]) -> None:
    """Store jobs that are RUNNABLE or have ended, and settle all jobs that their ends release.

    A worklist instead of a recursion: chains of dependencies may be thousands of jobs long.
    """
    todo = jobs
    ended: set[str] = set()  # jobs that end together may release the same job
    while todo:
        job = todo.pop()
        if job.id in ended:
            continue
        if job.is_array and (live := live_children(tx, job)):
            todo += _open_array(tx, job, live)
            continue
        if job.status is JobStatus.RUNNABLE:
            tx.put_job(job)
            tx.enqueue(job)
            continue
        ended.add(job.id)
        if job.is_array:
            job = replace(job, summary=tx.forget_counts(job.id))
        for node in live_children(tx, job) if job.is_multinode else ():
            node = _finish_node(node, job)
            tx.put_job(node, live=False)
            todo += _dependents_of(tx, node)
        tx.put_job(replace(job, waiting_for=()))
        todo += _dependents_of(tx, job)
        if job.index is not None:
            todo += _parent_if_over(tx, job)


def _dependents_of(tx: Transaction, job: Job) -> list[Job]:
    """The jobs that an ended job releases. Jobs that still wait for others are stored."""
    released = []
    for dependent_id in tx.pop_dependents(job.id):
        dependent = tx.state.jobs.get(dependent_id)
        if dependent is None:
            continue
        left = tuple(other for other in dependent.waiting_for if other != job.id)
        failure = dependent.dependency_failed or job.status is JobStatus.FAILED
        dependent = replace(dependent, waiting_for=left, dependency_failed=failure)
        # A cancelled job waits for all of its dependencies; any other fails with the first failure.
        if _waits(tx, dependent) and (dependent.is_ending or not failure):
            tx.put_job(dependent)
        else:
            released.append(_release(dependent, job.stopped_at or 0))
    return released


# --- Arrays ---------------------------------------------------------------------------------------


def live_children(tx: Transaction, parent: Job) -> list[Job]:
    """The unfinished children of an array, or the nodes of an unfinished multi-node job."""
    jobs = tx.state.jobs
    return [jobs[child_id] for child_id in parent.child_ids() if child_id in jobs]


def _waits(tx: Transaction, job: Job) -> bool:
    """True while a job, or the array that it is a child of, waits for other jobs."""
    if job.waiting_for:
        return True
    parent = tx.state.jobs.get(job.parent) if job.index is not None else None
    return parent is not None and bool(parent.waiting_for)


def _open_array(tx: Transaction, parent: Job, children: list[Job]) -> list[Job]:
    """The children of an array that was released, or that failed as a whole.

    The array itself stays PENDING until its last child has ended, as AWS shows it.
    """
    now = parent.stopped_at or tx.now
    tx.put_job(
        replace(parent, status=JobStatus.PENDING, status_reason="", stopped_at=None, waiting_for=())
    )
    if parent.status is JobStatus.FAILED:
        return [_fail_with_array(child, parent, now) for child in children]
    return [_release(child, now) for child in children if not child.waiting_for]


def _fail_with_array(child: Job, parent: Job, now: int) -> Job:
    """Fail a child with its array; a child that was stopped by itself keeps its reason."""
    if child.is_ending:
        return to_failed(child, child.stop_reason, now)
    marks = {"cancelled": parent.cancelled, "terminated": parent.terminated}
    return to_failed(replace(child, **marks), parent.status_reason, now)


def _parent_if_over(tx: Transaction, child: Job) -> list[Job]:
    """The array of an ended child, if it was the last one."""
    counts = tx.state.counts[child.parent]
    if any(count and not JobStatus(status).is_terminal for status, count in counts.items()):
        return []
    parent = tx.state.jobs[child.parent]
    stopped = child.stopped_at or tx.now
    if parent.is_ending:
        return [to_failed(parent, parent.stop_reason, stopped)]
    if parent.dependency_failed:
        return [to_failed(parent, DEPENDENCY_FAILED, stopped)]
    if parent.spec.flaw:
        return [to_failed(parent, parent.spec.flaw, stopped)]
    if counts.get("FAILED"):
        return [to_failed(parent, CHILD_FAILED, stopped)]
    return [replace(parent, status=JobStatus.SUCCEEDED, stopped_at=stopped)]


# --- Nodes ----------------------------------------------------------------------------------------


def _finish_node(node: Job, job: Job) -> Job:
    """A node once its whole job has ended: with its own end, or else with the job's."""
    if node.status.is_terminal:
        return node
    return replace(
        node, status=job.status, status_reason=job.status_reason, stopped_at=job.stopped_at
    )


# --- Stopping -------------------------------------------------------------------------------------


def cancel(tx: Transaction, job: Job, reason: str) -> None:
    """CancelJob: stop a job that has not started; others are not affected."""
    if job.status.holds_resources or job.is_ending:
        return
    _stop(tx, replace(job, cancelled=True, stop_reason=reason), cancel)


def terminate(tx: Transaction, job: Job, reason: str) -> None:
    """TerminateJob: stop a job in any state; it is never retried."""
    if job.terminated or job.timed_out:
        return
    _stop(tx, replace(job, terminated=True, stop_reason=reason), terminate)


def _stop(tx: Transaction, job: Job, stop_child: Callable[[Transaction, Job, str], None]) -> None:
    """Stop a job that is marked as stopped: it fails at once, or when its attempt, its dependencies
    or its children have ended.
    """
    if job.attempt is not None:
        tx.put_job(job)
        stop_attempt(tx, job, job.attempt)
    elif _waits(tx, job):  # it is marked, and fails once its dependencies have ended
        tx.put_job(job)
    elif job.is_array:
        tx.put_job(job)
        # The last child first: a child that waits for an earlier child is marked before that ends.
        for child in reversed(live_children(tx, job)):
            stop_child(tx, child, job.stop_reason)
    else:
        _settle(tx, [to_failed(job, job.stop_reason, tx.now)])


def stop_attempt(tx: Transaction, job: Job, attempt: JobAttempt) -> None:
    """Send TERM, and KILL after the grace period, to a job's program or to each of its nodes."""
    if job.is_multinode:
        stop_nodes(tx, live_children(tx, job), job.stop_reason)
    else:
        tx.effects.append(StopAttempt(attempt.task_id))


def stop_nodes(tx: Transaction, nodes: list[Job], reason: str) -> None:
    """Stop the nodes that run."""
    for node in nodes:
        if node.attempt is not None:
            tx.put_job(replace(node, stop_reason=reason))
            tx.effects.append(StopAttempt(node.attempt.task_id))


def set_deadline(tx: Transaction, job: Job) -> None:
    """Note when the timeout of a running attempt ends."""
    attempt, timeout = job.attempt, job.spec.timeout
    if timeout is not None and attempt is not None and attempt.started_at is not None:
        tx.add_deadline(attempt.started_at + timeout * 1000, attempt.task_id)


def time_out(tx: Transaction) -> None:
    """Stop the attempts whose timeouts have ended."""
    while tx.state.deadlines is not None and tx.state.deadlines[1][0] <= tx.now:
        job = job_of(tx, tx.pop_deadline())
        if job is not None and job.attempt is not None and not job.is_ending:
            tx.put_job(replace(job, timed_out=True, stop_reason=TIMED_OUT))
            stop_attempt(tx, job, job.attempt)


def job_of(tx: Transaction, task_id: str) -> Job | None:
    """The job of a task."""
    job_id = tx.state.by_task.get(task_id)
    return None if job_id is None else tx.state.jobs.get(job_id)
