"""Which job starts where, and why one cannot. Each function changes a draft.

Sources: AWS Batch User Guide, "Job scheduling", "Fair-share scheduling", "Jobs stuck in RUNNABLE";
API reference, JobStateTimeLimitAction.
"""

from typing import Any

from immutables import Map
from msgspec.structs import replace

from batchml.local.batch import fair_share as shares
from batchml.local.batch import lifecycle
from batchml.local.batch.events import Launch
from batchml.local.batch.lifecycle import attempt_of
from batchml.local.batch.multinode import launch_main
from batchml.local.batch.state import CONTROLLERS, Blocked, Environment, Job, Line, Queue, State
from batchml.local.batch.transaction import Draft
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


def schedule(draft: Draft) -> None:
    """Start what can start: queues by descending priority, first in first out within a queue.

    The job at the head of a queue blocks those behind it until it fits; other queues that share
    the environment go on meanwhile, as in AWS. A queue with a scheduling policy takes its head from
    the share that has used least.
    """
    if 0 < draft.state.no_capacity_until <= draft.now:
        draft.state = replace(draft.state, no_capacity_until=0)
    state = draft.state
    if not state.lines:
        return
    queues = [state.queues[name] for name in state.lines if name in state.queues]
    for queue in sorted(queues, key=lambda queue: (-queue.priority, queue.name)):
        while (head := _head(draft, queue)) is not None:
            line, job = head
            where = environment_for(draft.state, queue, job)
            if where is not None:
                draft.pop_line(queue.name, line)
                _unblock(draft, queue.name)
                launch(draft, job, where)
            elif not _is_over(draft, queue, _blocked(draft, queue, job)):
                break


def _head(draft: Draft, queue: Queue) -> tuple[Line, Job] | None:
    """The RUNNABLE job whose turn it is, and its line.

    Those that have ended meanwhile are dropped, and those that lack a consumable resource wait for
    it in a line of their own, which lets those behind them pass.
    """
    while lines := draft.state.lines.get(queue.name):
        line = _next_line(draft, queue, lines)
        if line is None:
            break
        first = lines[line]
        assert first is not None  # a line without jobs is dropped
        job = draft.state.jobs.get(first[2])
        if job is None or job.status is not JobStatus.RUNNABLE:
            draft.pop_line(queue.name, line)
            continue
        lacking = _lacking(draft, job)
        if lacking is None:
            return line, job
        draft.move(queue.name, line, lacking)
    _unblock(draft, queue.name)
    return None


def _next_line(draft: Draft, queue: Queue, lines: Map[Line, Any]) -> Line | None:
    """The line whose first job is next; None when all wait for consumable resources."""
    if len(lines) == 1:
        only = next(iter(lines))
        return only if _is_open(draft, only) else None
    first: dict[str, tuple[Any, Line]] = {}  # share -> its first job's key, and line
    for line, jobs in lines.items():
        if _is_open(draft, line) and (line.share not in first or jobs[1] < first[line.share][0]):
            first[line.share] = (jobs[1], line)
    if len(first) < 2:
        return next((line for _, line in first.values()), None)
    usage = draft.state.usage.get(queue.name, Map())
    keys = [(share, key) for share, (key, _) in first.items()]
    share = shares.next_share(keys, usage, draft.now, draft.state.policy_of(queue.name))
    return first[share][1]


def _is_open(draft: Draft, line: Line) -> bool:
    return not line.consumable or draft.has(line.consumable, line.quantity)


def _lacking(draft: Draft, job: Job) -> Line | None:
    """The line of those that wait for a consumable resource, if there is not enough for a job."""
    for name, quantity in job.spec.consumables:
        if not draft.has(name, quantity):
            return Line(job.spec.share, name, quantity)
    return None


def environment_for(state: State, queue: Queue, job: Job) -> str | None:
    """The first environment of the queue, in its order, that has room for a job now."""
    fits = not state.no_capacity_until and state.free.fits(job.needs)
    kept = _kept_back(state, queue, job)
    for name in queue.environments:
        environment = state.environments.get(name)
        if environment is None or not environment.enabled:
            continue
        if job.is_multinode and not environment.takes_nodes:
            continue
        if not fits and name != CONTROLLERS:
            continue
        room = environment.max_vcpus - state.used.get(name, 0)
        room -= int(environment.max_vcpus * kept)
        if job.needs.vcpus <= room:
            return name
    return None


def _kept_back(state: State, queue: Queue, job: Job) -> float:
    """The part of an environment that the policy keeps for shares of which nothing runs yet. A job
    of such a share may have it: it is what the part is kept for.
    """
    if not queue.policy:
        return 0.0
    running = {share for share, use in state.usage.get(queue.name, Map()).items() if use.vcpus}
    if job.spec.share not in running:
        return 0.0
    active = running | {line.share for line in state.lines.get(queue.name, ())}
    return shares.reserved(state.policy_of(queue.name), len(active))


def front_of_queue(state: State, queue: Queue, now: int, limit: int) -> list[tuple[Job, int]]:
    """The first RUNNABLE jobs in the order in which they would start, each with the time (ms)
    since when it may have been at its place.
    """
    draft = Draft(state, now)
    blocked = state.blocked.get(queue.name)
    found: list[tuple[Job, int]] = []
    while len(found) < limit and (head := _head(draft, queue)) is not None:
        line, job = head
        draft.pop_line(queue.name, line)
        since = max([job.created_at, *(attempt["stoppedAt"] for attempt in job.attempts)])
        if blocked is not None and blocked.job_id == job.id:
            since = max(since, blocked.since)
        found.append((job, since))
    return found


# --- the head of a queue that cannot start ---------------------------------------------------


def _blocked(draft: Draft, queue: Queue, job: Job) -> Blocked:
    """AWS says why the job at the head of a queue is stuck when it can never be placed."""
    reason = _why_stuck(draft.state, queue, job)
    # A reason that has ceased, for example with a larger maxvCpus, goes; another text stays.
    if job.status_reason != reason and (reason or job.status_reason.startswith(_STUCK)):
        draft.put_job(replace(job, status_reason=reason))
    known = draft.state.blocked.get(queue.name)
    if known is not None and (known.job_id, known.reason) == (job.id, reason):
        return known
    now = Blocked(job.id, draft.now, reason)
    draft.state = replace(draft.state, blocked=draft.state.blocked.set(queue.name, now))
    return now


def _why_stuck(state: State, queue: Queue, job: Job) -> str:
    known = [state.environments[name] for name in queue.environments if name in state.environments]
    if job.is_multinode:
        known = [environment for environment in known if environment.takes_nodes]
    largest = max((environment.max_vcpus for environment in known), default=0)
    if not state.machine.fits(job.needs) or (job.is_multinode and not known):
        return NEVER_FITS_MACHINE
    if job.needs.vcpus > largest:
        return NEVER_FITS_ENVIRONMENT
    return f"{NO_CAPACITY}[{_instance_types(known)}]" if state.no_capacity_until else ""


def _instance_types(environments: list[Environment]) -> str:
    for environment in environments:
        types = environment.detail.get("computeResources", {}).get("instanceTypes")
        if types and environment.enabled:
            return ", ".join(types)
    return "this-machine"


def _unblock(draft: Draft, queue: str) -> None:
    if queue in draft.state.blocked:
        draft.state = replace(draft.state, blocked=draft.state.blocked.delete(queue))


def _is_over(draft: Draft, queue: Queue, blocked: Blocked) -> bool:
    """True when the queue's time limit for such a job was up, and it is cancelled now."""
    limit = _limit(queue, blocked)
    job = draft.state.jobs.get(blocked.job_id)
    if limit is None or job is None or draft.now < blocked.since + limit:
        return False
    lifecycle.cancel(draft, job, TIME_LIMIT + blocked.reason.partition(" - ")[0])
    return True


def _limit(queue: Queue, blocked: Blocked) -> int | None:
    """How long a job may be the blocked head of its queue for this reason, in ms."""
    for action in queue.detail.get("jobStateTimeLimitActions", ()):
        if blocked.reason.partition(" - ")[0] == action["reason"]:
            return int(action["maxTimeSeconds"]) * 1000
    return None


def next_time_limit(state: State) -> int | None:
    """When the first head of a queue will have been stuck for too long, in ms since the epoch."""
    ends = [
        blocked.since + limit
        for name, blocked in state.blocked.items()
        if name in state.queues and (limit := _limit(state.queues[name], blocked)) is not None
    ]
    return min(ends, default=None)


# --- starting -------------------------------------------------------------------------------


def launch(draft: Draft, job: Job, environment: str) -> None:
    """Give a job its place, and start it: a multi-node job by its main node."""
    number = len(job.attempts) + 1
    gpus = () if environment == CONTROLLERS else draft.state.free.gpus[: job.needs.gpus]
    attempt = attempt_of(job, number, environment, gpus)
    job = replace(
        job, status=JobStatus.STARTING, status_reason="", attempt=attempt, exit_code=None, reason=""
    )
    draft.occupy(job, attempt)
    draft.spend(job)
    draft.put_job(job)
    if job.is_multinode:
        launch_main(draft, job, attempt)
    else:
        draft.effects.append(Launch(job, attempt))
