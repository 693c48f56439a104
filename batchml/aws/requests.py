"""Our nouns -> AWS request arguments. Pure."""

import hashlib
import json
from typing import Any

from msgspec import Struct

from batchml.errors import ConfigError
from batchml.model.job import DEFAULT_GRACE, MAX_OVERRIDES, JobSpec
from batchml.model.names import to_name
from batchml.model.reading import parse_size

_HASH = 10  # hex digits of a definition's content in its name


class Submission(Struct, frozen=True):
    """The two requests of a run. The first is sent only when AWS does not have the definition."""

    register: dict[str, Any]
    submit: dict[str, Any]


class Travel(Struct, frozen=True):
    """What a run takes along: where its code is, and variables of the place that it runs in."""

    code: str = ""
    env: dict[str, str] = {}
    tags: dict[str, str] = {}
    depends_on: tuple[str, ...] = ()


def submission(spec: JobSpec, *, image: str, queue: str, travel: Travel) -> Submission:
    """The requests that submit `spec` with the image that `image` refers to.

    The definition holds what SubmitJob cannot override and is named by its content, so that runs
    of a job share one. Raises ConfigError when the overrides exceed AWS Batch's limit.
    """
    name = to_name(spec.name)
    register = _definition(spec, name, image)
    overrides = {
        "command": spec.argv(),
        "environment": _environment(spec, travel),
        "resourceRequirements": _requirements(spec),
    }
    size = len(json.dumps(overrides))
    if size > MAX_OVERRIDES:
        raise ConfigError(
            spec.name,
            [
                f"command and env: {size} bytes as JSON; AWS Batch takes {MAX_OVERRIDES}. "
                f"Put long values into a file in the job's folder."
            ],
        )
    submit: dict[str, Any] = {
        "jobName": name,
        "jobQueue": queue,
        "jobDefinition": register["jobDefinitionName"],
        "containerOverrides": overrides,
        "retryStrategy": retry_strategy(spec),
    }
    if spec.timeout_seconds is not None:
        submit["timeout"] = {"attemptDurationSeconds": spec.timeout_seconds}
    if travel.tags:
        submit["tags"] = travel.tags
    if travel.depends_on:
        submit["dependsOn"] = [{"jobId": job_id} for job_id in travel.depends_on]
    return Submission(register, submit)


def _definition(spec: JobSpec, name: str, image: str) -> dict[str, Any]:
    linux: dict[str, Any] = {"initProcessEnabled": True}
    if spec.resources.shm is not None:
        linux["sharedMemorySize"] = (parse_size(spec.resources.shm) or 0) // 1024**2
    container = {
        "image": image,
        "command": list(spec.command),
        "resourceRequirements": [
            {"type": "VCPU", "value": "1"},
            {"type": "MEMORY", "value": "1024"},
        ],
        "linuxParameters": linux,
        "logConfiguration": {
            "logDriver": "awslogs",
            "options": {"awslogs-stream-prefix": name},
        },
    }
    content = json.dumps(container, sort_keys=True).encode()
    digest = hashlib.sha256(content).hexdigest()[:_HASH]
    return {
        "jobDefinitionName": f"{name[: 128 - _HASH - 1]}-{digest}",
        "type": "container",
        "containerProperties": container,
        "tags": {"batchml": name},
    }


def _environment(spec: JobSpec, travel: Travel) -> list[dict[str, str]]:
    params = json.dumps(spec.params, sort_keys=True)
    variables = {"BATCHML_PARAMS": params, **travel.env}
    if travel.code:
        variables["BATCHML_CODE"] = travel.code
    if spec.checkpoint.grace_seconds != DEFAULT_GRACE:
        variables["BATCHML_GRACE"] = str(spec.checkpoint.grace_seconds)
    variables |= {name: str(value) for name, value in spec.env.items()}
    return [{"name": name, "value": value} for name, value in variables.items()]


def _requirements(spec: JobSpec) -> list[dict[str, str]]:
    resources = spec.resources
    found = [
        {"type": "VCPU", "value": str(resources.vcpus)},
        {"type": "MEMORY", "value": str(resources.memory_mib)},
    ]
    if resources.gpus:
        found.append({"type": "GPU", "value": str(resources.gpus)})
    return found


def retry_strategy(spec: JobSpec) -> dict[str, Any]:
    """`[retry]` as AWS Batch's rules: the first that matches decides, and the last ends the job.

    Without a rule that matches AWS Batch retries, so the list ends with one that matches all.
    """
    on = spec.retry.on

    def action(outcome: str) -> str:
        return "RETRY" if outcome in on else "EXIT"

    rules = [
        {"onStatusReason": "Host EC2*", "action": action("host-lost")},
        {"onStatusReason": "Task failed to start", "action": action("image-error")},
        {"onReason": "OutOfMemoryError*", "action": action("out-of-memory")},
        {"onExitCode": "*", "action": action("app-error")},
        {"onReason": "*", "action": "EXIT"},
    ]
    return {"attempts": spec.retry.attempts, "evaluateOnExit": rules}
