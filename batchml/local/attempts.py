"""A new attempt: its task id and where its output goes. Pure."""

from hashlib import sha256

from msgspec.structs import replace

from batchml.local.state import DEFAULT_LOG_GROUP, Attempt, Job


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
