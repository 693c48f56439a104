"""A new attempt: its task id and where its output goes. Pure."""

from hashlib import sha256

from batchml.local.state import DEFAULT_LOG_GROUP, Attempt, Job


def attempt_of(job: Job, number: int, environment: str, gpus: tuple[str, ...]) -> Attempt:
    task_id = task_id_of(job.id, number)
    if job.is_multinode:
        return Attempt(number, task_id, environment, gpus)
    options = job.container.get("logConfiguration", {}).get("options", {})
    prefix = options.get("awslogs-stream-prefix") or job.definition.rpartition(":")[0][:200]
    return Attempt(
        number=number,
        task_id=task_id,
        environment=environment,
        gpus=gpus,
        log_group=options.get("awslogs-group") or DEFAULT_LOG_GROUP,
        log_stream=f"{prefix}/default/{task_id}",
    )


def task_id_of(job_id: str, number: int) -> str:
    """A task id as ECS makes them, 32 hexadecimal digits, one for each attempt and repeatable."""
    return sha256(f"{job_id}/{number}".encode()).hexdigest()[:32]
