"""Which job starts where, and why one cannot. Each function changes a draft.

Source: AWS Batch User Guide, "Job scheduling" and "Jobs stuck in RUNNABLE".
"""

from hashlib import sha256

from msgspec.structs import replace

from batchml.local import heap
from batchml.local.draft import Draft
from batchml.local.messages import Launch
from batchml.local.state import DEFAULT_LOG_GROUP, Attempt, Job, Queue, State
from batchml.model.status import JobStatus

NEVER_FITS_MACHINE = (
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job resource requirement (vCPU/memory/GPU) "
    "is higher than that can be met by the CE(s) attached to the job queue."
)
NEVER_FITS_ENVIRONMENT = (
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE - CE(s) associated with the job queue "
    "cannot meet the CPU requirement of the job."
)
_NEVER_FITS = (NEVER_FITS_MACHINE, NEVER_FITS_ENVIRONMENT)


def schedule(draft: Draft) -> None:
    """Start what can start: queues by descending priority, first in first out within a queue.

    The job at the head of a queue blocks those behind it until it fits; other queues that share
    the environment go on meanwhile, as in AWS.
    """
    for queue in sorted(draft.state.queues.values(), key=lambda q: (-q.priority, q.name)):
        while (job := _head(draft, queue.name)) is not None:
            where = environment_for(draft.state, queue, job)
            if where is None:
                _explain_head(draft, queue, job)
                break
            draft.set_line(queue.name, heap.pop(draft.state.waiting[queue.name]))
            _launch(draft, job, where)


def _head(draft: Draft, queue: str) -> Job | None:
    """The first RUNNABLE job in line; those that were cancelled meanwhile are dropped."""
    while (line := draft.state.waiting.get(queue)) is not None:
        job = draft.state.jobs.get(line[2])
        if job is not None and job.status is JobStatus.RUNNABLE:
            return job
        draft.set_line(queue, heap.pop(line))
    return None


def environment_for(state: State, queue: Queue, job: Job) -> str | None:
    if not state.free.fits(job.needs):
        return None
    for name in queue.environments:
        environment = state.environments.get(name)
        if environment is None or not environment.enabled:
            continue
        if state.used.get(name, 0) + job.needs.vcpus <= environment.max_vcpus:
            return name
    return None


def _explain_head(draft: Draft, queue: Queue, job: Job) -> None:
    """AWS says why the job at the head of a queue is stuck when it can never be placed."""
    state = draft.state
    known = [state.environments[name] for name in queue.environments if name in state.environments]
    largest = max((environment.max_vcpus for environment in known), default=0)
    reason = ""
    if not state.machine.fits(job.needs):
        reason = NEVER_FITS_MACHINE
    elif job.needs.vcpus > largest:
        reason = NEVER_FITS_ENVIRONMENT
    # A reason that has ceased, for example with a larger maxvCpus, goes; another text stays.
    if job.status_reason != reason and (reason or job.status_reason in _NEVER_FITS):
        draft.put_job(replace(job, status_reason=reason))


def _launch(draft: Draft, job: Job, environment: str) -> None:
    number = len(job.attempts) + 1
    task_id = task_id_of(job.id, number)
    options = job.container.get("logConfiguration", {}).get("options", {})
    prefix = options.get("awslogs-stream-prefix") or job.definition.rpartition(":")[0][:200]
    attempt = Attempt(
        number=number,
        task_id=task_id,
        environment=environment,
        gpus=draft.state.free.gpus[: job.needs.gpus],
        log_group=options.get("awslogs-group") or DEFAULT_LOG_GROUP,
        log_stream=f"{prefix}/default/{task_id}",
    )
    started = replace(
        job,
        status=JobStatus.STARTING,
        status_reason="",
        attempt=attempt,
        exit_code=None,
        reason="",
    )
    draft.occupy(started, attempt)
    draft.put_job(started)
    draft.effects.append(Launch(started, attempt))


def task_id_of(job_id: str, number: int) -> str:
    """A task id as ECS makes them, 32 hexadecimal digits, one for each attempt and repeatable."""
    return sha256(f"{job_id}/{number}".encode()).hexdigest()[:32]
