"""The scheduler: which job starts in which compute environment, and why a job cannot start.

Functions that change something take a transaction.

Sources: AWS Batch User Guide, "Job scheduling", "Fair-share scheduling", "Jobs stuck in RUNNABLE";
API reference, JobStateTimeLimitAction.
"""

from typing import Any

from immutables import Map
from msgspec.structs import replace

from batchml.local.batch import fair_share, lifecycle
from batchml.local.batch.events import PrepareAttempt
from batchml.local.batch.lifecycle import new_attempt
from batchml.local.batch.multinode import launch_main
from batchml.local.batch.state import (
    CONTROLLERS,
    BatchState,
    BlockedHead,
    ComputeEnvironment,
    Job,
    JobQueue,
    QueueLine,
)
from batchml.local.batch.transaction import Transaction
from batchml.model.run import JobStatus

NEVER_FITS_MACHINE = (
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job resource requirement (vCPU/memory/GPU) "
    "is higher than that can be met by the CE(s) attached to the job queue."
)
NEVER_FITS_ENVIRONMENT = (
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE - CE(s) associated with the job queue "
    "cannot meet the CPU requirement of the job."
)
NO_CAPACITY = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Service cannot fulfill the capacity requested for "
    "instance type "
)
_STUCK = (NEVER_FITS_MACHINE, NEVER_FITS_ENVIRONMENT, NO_CAPACITY)
TIME_LIMIT = "Canceled by JobStateTimeLimit action due to reason: "


def schedule(tx: Transaction) -> None:
    """Start all jobs that can start: queues by descending priority, first in first out in a queue.

    The first job of a queue blocks the jobs behind it until it fits. Other queues that share the
    environment continue meanwhile, as in AWS. A queue with a scheduling policy takes its first job
    from the share with the least usage.
    """
    if 0 < tx.state.no_capacity_until <= tx.now:
        tx.state = replace(tx.state, no_capacity_until=0)
    state = tx.state
    if not state.lines:
        return
    found = [state.queues[name] for name in state.lines if name in state.queues]
    queues = [queue for queue in found if not queue.is_deleting]
    for queue in sorted(queues, key=lambda queue: (-queue.priority, queue.name)):
        while (head := _head(tx, queue)) is not None:
            line, job = head
            environment = environment_for(tx.state, queue, job)
            if environment is not None:
                tx.pop_line(queue.name, line)
                _unblock(tx, queue.name)
                launch(tx, job, environment)
            elif not _cancel_if_overdue(tx, queue, _note_blocked(tx, queue, job)):
                break


def _head(tx: Transaction, queue: JobQueue) -> tuple[QueueLine, Job] | None:
    """The RUNNABLE job whose turn it is, and its line.

    Jobs that have ended meanwhile are dropped. Jobs that lack a consumable resource move to a line
    of their own, so that jobs behind them can pass.
    """
    while lines := tx.state.lines.get(queue.name):
        line = _next_line(tx, queue, lines)
        if line is None:
            break
        first = lines[line]
        assert first is not None  # an empty line is removed
        job = tx.state.jobs.get(first[2])
        if job is None or job.status is not JobStatus.RUNNABLE:
            tx.pop_line(queue.name, line)
            continue
        lacking = _missing_consumable(tx, job)
        if lacking is None:
            return line, job
        tx.move_first(queue.name, line, lacking)
    _unblock(tx, queue.name)
    return None


def _next_line(tx: Transaction, queue: JobQueue, lines: Map[QueueLine, Any]) -> QueueLine | None:
    """The line whose first job is next; None when all wait for consumable resources."""
    if len(lines) == 1:
        only = next(iter(lines))
        return only if _is_open(tx, only) else None
    first: dict[str, tuple[Any, QueueLine]] = {}  # share -> key of its first job, and line
    for line, jobs in lines.items():
        if _is_open(tx, line) and (line.share not in first or jobs[1] < first[line.share][0]):
            first[line.share] = (jobs[1], line)
    if len(first) < 2:
        return next((line for _, line in first.values()), None)
    usage = tx.state.usage.get(queue.name, Map())
    keys = [(share, key) for share, (key, _) in first.items()]
    share = fair_share.next_share(keys, usage, tx.now, tx.state.policy_of(queue.name))
    return first[share][1]


def _is_open(tx: Transaction, line: QueueLine) -> bool:
    return not line.consumable or tx.has_consumable(line.consumable, line.quantity)


def _missing_consumable(tx: Transaction, job: Job) -> QueueLine | None:
    """The line of jobs that wait for a consumable resource, if there is too little for this job."""
    for name, quantity in job.spec.consumables:
        if not tx.has_consumable(name, quantity):
            return QueueLine(job.spec.share, name, quantity)
    return None


def environment_for(state: BatchState, queue: JobQueue, job: Job) -> str | None:
    """The first environment of the queue, in its order, that has room for a job now."""
    fits = not state.no_capacity_until and state.free.fits(job.needs)
    reserved = _reserved_fraction(state, queue, job)
    for name in queue.environments:
        environment = state.environments.get(name)
        if environment is None or not environment.enabled:
            continue
        if job.is_multinode and not environment.takes_nodes:
            continue
        if not fits and name != CONTROLLERS:
            continue
        room = environment.max_vcpus - state.used.get(name, 0)
        room -= int(environment.max_vcpus * reserved)
        if job.needs.vcpus <= room:
            return name
    return None


def _reserved_fraction(state: BatchState, queue: JobQueue, job: Job) -> float:
    """The fraction of an environment that the policy reserves for shares without running jobs. Jobs
    of those shares may use it.
    """
    if not queue.policy:
        return 0.0
    running = {share for share, use in state.usage.get(queue.name, Map()).items() if use.vcpus}
    if job.spec.share not in running:
        return 0.0
    active = running | {line.share for line in state.lines.get(queue.name, ())}
    return fair_share.reserved_fraction(state.policy_of(queue.name), len(active))


def front_of_queue(
    state: BatchState, queue: JobQueue, now: int, limit: int
) -> list[tuple[Job, int]]:
    """The first RUNNABLE jobs in their starting order, each with the earliest time (ms) at which it
    can have been at its position.
    """
    tx = Transaction(state, now)
    blocked = state.blocked.get(queue.name)
    front: list[tuple[Job, int]] = []
    while len(front) < limit and (head := _head(tx, queue)) is not None:
        line, job = head
        tx.pop_line(queue.name, line)
        since = max([job.created_at, *(attempt["stoppedAt"] for attempt in job.attempts)])
        if blocked is not None and blocked.job_id == job.id:
            since = max(since, blocked.since)
        front.append((job, since))
    return front


# --- The first job of a queue that cannot start ---------------------------------------------------


def _note_blocked(tx: Transaction, queue: JobQueue, job: Job) -> BlockedHead:
    """Record the first job of a queue, which cannot start, and AWS's reason if there is one."""
    reason = _why_stuck(tx.state, queue, job)
    # A reason that no longer applies, for example after a larger maxvCpus, is removed; other texts
    # stay.
    if job.status_reason != reason and (reason or job.status_reason.startswith(_STUCK)):
        tx.put_job(replace(job, status_reason=reason))
    before = tx.state.blocked.get(queue.name)
    if before is not None and (before.job_id, before.reason) == (job.id, reason):
        return before
    blocked = BlockedHead(job.id, tx.now, reason)
    tx.state = replace(tx.state, blocked=tx.state.blocked.set(queue.name, blocked))
    return blocked


def _why_stuck(state: BatchState, queue: JobQueue, job: Job) -> str:
    """AWS's reason why a job can never be placed, or not without capacity; else empty."""
    names = [name for name in queue.environments if name in state.environments]
    usable = [state.environments[name] for name in names]
    if job.is_multinode:
        usable = [environment for environment in usable if environment.takes_nodes]
    largest = max((environment.max_vcpus for environment in usable), default=0)
    if not state.machine.fits(job.needs) or (job.is_multinode and not usable):
        return NEVER_FITS_MACHINE
    if job.needs.vcpus > largest:
        return NEVER_FITS_ENVIRONMENT
    return f"{NO_CAPACITY}[{_instance_types(usable)}]" if state.no_capacity_until else ""


def _instance_types(environments: list[ComputeEnvironment]) -> str:
    for environment in environments:
        types = environment.detail.get("computeResources", {}).get("instanceTypes")
        if types and environment.enabled:
            return ", ".join(types)
    return "this-machine"


def _unblock(tx: Transaction, queue: str) -> None:
    if queue in tx.state.blocked:
        tx.state = replace(tx.state, blocked=tx.state.blocked.delete(queue))


def _cancel_if_overdue(tx: Transaction, queue: JobQueue, blocked: BlockedHead) -> bool:
    """Cancel a blocked job if its queue's time limit has passed. True when it was cancelled."""
    limit = _limit(queue, blocked)
    job = tx.state.jobs.get(blocked.job_id)
    if limit is None or job is None or tx.now < blocked.since + limit:
        return False
    lifecycle.cancel(tx, job, TIME_LIMIT + blocked.reason.partition(" - ")[0])
    return True


def _limit(queue: JobQueue, blocked: BlockedHead) -> int | None:
    """How long a job may block its queue for this reason, in ms."""
    for action in queue.detail.get("jobStateTimeLimitActions", ()):
        if blocked.reason.partition(" - ")[0] == action["reason"]:
            return int(action["maxTimeSeconds"]) * 1000
    return None


def next_time_limit(state: BatchState) -> int | None:
    """When the first blocked job will reach its queue's time limit, in ms since the epoch."""
    ends = [
        blocked.since + limit
        for name, blocked in state.blocked.items()
        if name in state.queues and (limit := _limit(state.queues[name], blocked)) is not None
    ]
    return min(ends, default=None)


# --- Starting -------------------------------------------------------------------------------------


def launch(tx: Transaction, job: Job, environment: str) -> None:
    """Give a job its resources and start it: a multi-node job by its main node."""
    number = len(job.attempts) + 1
    gpus = () if environment == CONTROLLERS else tx.state.free.gpus[: job.needs.gpus]
    attempt = new_attempt(job, number, environment, gpus)
    job = replace(
        job, status=JobStatus.STARTING, status_reason="", attempt=attempt, exit_code=None, reason=""
    )
    tx.occupy(job, attempt)
    tx.spend(job)
    tx.put_job(job)
    if job.is_multinode:
        launch_main(tx, job, attempt)
    else:
        tx.effects.append(PrepareAttempt(job, attempt))
