"""Our nouns -> AWS request arguments. Pure."""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from batchml.aws.site import WORKSPACE, Platform
from batchml.errors import ConfigError
from batchml.model.job import DEFAULT_GRACE, MAX_OVERRIDES, JobSpec
from batchml.model.names import to_name
from batchml.model.reading import parse_size

_HASH = 10  # hex digits of a definition's content in its name

# Where the NVIDIA driver's user space is on instances of our image (cfn/ami.yaml), and in jobs.
DRIVER_ON_HOST = "/opt/nvidia"
DRIVER = "/usr/local/nvidia"
REGISTERED = "batchml:registered"  # the tag with the date; AWS Batch keeps none

_REFERENCE_MARKS = "/:@."  # a name without any is a folder below images/


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
    share: str = ""  # of a queue with fair share


_LOCAL = Platform()


def submission(
    spec: JobSpec, *, image: str, queue: str, travel: Travel, platform: Platform = _LOCAL
) -> Submission:
    """The requests that submit `spec` with the image that `image` refers to.

    The definition holds what SubmitJob cannot override and is named by its content, so that runs
    of a job share one. Raises ConfigError when the overrides exceed AWS Batch's limit.
    """
    name = to_name(spec.name)
    register = definition(spec, image, platform)
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
    if travel.share:
        submit["shareIdentifier"] = travel.share
    if travel.tags:
        submit["tags"] = travel.tags
    if travel.depends_on:
        submit["dependsOn"] = [{"jobId": job_id} for job_id in travel.depends_on]
    return Submission(register, submit)


def definition(spec: JobSpec, image: str, platform: Platform = _LOCAL) -> dict[str, Any]:
    """The RegisterJobDefinition arguments of a job, named by what the container is.

    Who asks for the same again, from wherever, comes to the same name.
    """
    name = to_name(spec.name)
    container = _container(spec, name, image) | _placed(spec, name, platform)
    content = json.dumps(container, sort_keys=True).encode()
    digest = hashlib.sha256(content).hexdigest()[:_HASH]
    return {
        "jobDefinitionName": f"{name[: 128 - _HASH - 1]}-{digest}",
        "type": "container",
        "containerProperties": container,
        "tags": {**platform.tags, "batchml": name},
    }


def registration(request: Mapping[str, Any], now: float) -> dict[str, Any]:
    """A RegisterJobDefinition request as it is sent at `now`, seconds since the epoch."""
    day = datetime.fromtimestamp(now, UTC).date().isoformat()
    return {**request, "tags": {**request.get("tags", {}), REGISTERED: day}}


def _container(spec: JobSpec, name: str, image: str) -> dict[str, Any]:
    linux: dict[str, Any] = {"initProcessEnabled": True}
    if spec.resources.shm is not None:
        linux["sharedMemorySize"] = (parse_size(spec.resources.shm) or 0) // 1024**2
    return {
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


def _placed(spec: JobSpec, name: str, platform: Platform) -> dict[str, Any]:
    """What the place adds to a container's properties, or says instead; nothing on `local`."""
    found: dict[str, Any] = {}
    mounts: list[tuple[str, str, str, bool]] = []  # name, on the host, in the container, read-only
    if platform.workspace:
        mounts.append(("workspace", platform.workspace, WORKSPACE, False))
        found["environment"] = [{"name": "BATCHML_WORKSPACE", "value": WORKSPACE}]
    if platform.gpu == "driver-mount" and spec.resources.gpus:
        # Privileged, so that the devices are there. Where to look for programs and libraries is
        # the image's to say (PATH, LD_LIBRARY_PATH): a value here would replace the image's.
        found["privileged"] = True
        mounts.append(("nvidia", DRIVER_ON_HOST, DRIVER, True))
    for key, value in (
        ("jobRoleArn", platform.job_role),
        ("executionRoleArn", platform.execution_role),
        # Said again, though images of ours say it, so that rules about requests can see it.
        ("user", "" if set(spec.image) & set(_REFERENCE_MARKS) else platform.user),
    ):
        if value:
            found[key] = value
    if platform.log_group:
        options = {"awslogs-stream-prefix": name, "awslogs-group": platform.log_group}
        found["logConfiguration"] = {"logDriver": "awslogs", "options": options}
    if mounts:
        found["volumes"] = [{"name": n, "host": {"sourcePath": host}} for n, host, _, _ in mounts]
        found["mountPoints"] = [
            {"sourceVolume": n, "containerPath": inside, "readOnly": read_only}
            for n, _, inside, read_only in mounts
        ]
    return found


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
