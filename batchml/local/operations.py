"""The API calls that change something: `(draft, request) -> answer`. They raise Refused.

Each checks what AWS checks on the server, beyond the shapes: names, references, limits.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from batchml.local import engine
from batchml.local.draft import Draft
from batchml.local.messages import Requested
from batchml.local.state import Definition, Environment, Job, Needs, Queue, arn
from batchml.local.wire import Refused, client_error
from batchml.model.names import bare_name, is_valid_name

MAX_DEPENDENCIES = 20
MAX_SUBMIT = 30 * 1024  # bytes of a SubmitJob request
MAX_DEFINITION = 24 * 1024  # bytes of a job definition
MAX_ENVIRONMENTS = 3  # of one queue
MAX_TAGS = 50

# Parts of SubmitJob and RegisterJobDefinition that AWS has and this version does not run.
_NOT_YET = (
    "arrayProperties", "nodeProperties", "nodeOverrides", "eksProperties", "eksPropertiesOverride",
    "ecsProperties", "ecsPropertiesOverride", "shareIdentifier", "consumableResourceProperties",
    "consumableResourcePropertiesOverride", "schedulingPolicyArn", "serviceEnvironmentOrder",
    "jobStateTimeLimitActions",
)  # fmt: skip


# As long as 32 bits allow: what is kept must fit the journal and the client's integers.
_WHOLE = re.compile(r"-?[0-9]{1,9}")


def _refuse(text: str, request: Requested) -> Refused:
    return client_error(
        f"Error executing request, Exception : {text}, RequestId: {request.request_id}"
    )


def _refuse_not_yet(request: Requested) -> None:
    asked = [name for name in _NOT_YET if request.params.get(name)]
    if asked:
        text = f"{', '.join(asked)}: not served by this version of the embedded AWS Batch"
        raise _refuse(text, request)


def _check_name(name: str, what: str, request: Requested) -> None:
    if not is_valid_name(name):
        raise _refuse(
            f"{what} should match valid pattern: 1-128 letters, digits, hyphens and underscores",
            request,
        )


def _check_tags(request: Requested) -> None:
    if len(request.params.get("tags", {})) > MAX_TAGS:
        raise _refuse(f"Tags limit exceeded: at most {MAX_TAGS}", request)


# --- compute environments -------------------------------------------------------------------


def create_compute_environment(draft: Draft, request: Requested) -> dict[str, Any]:
    params = request.params
    name = params["computeEnvironmentName"]
    _check_name(name, "Compute environment name", request)
    _check_tags(request)
    if name in draft.state.environments:
        raise _refuse(f"Object already exists: {name}", request)
    resources = params.get("computeResources")
    if params["type"] == "MANAGED" and not resources:
        raise _refuse("computeResources must be provided for a MANAGED environment", request)
    if resources and str(resources.get("type", "")).startswith("FARGATE"):
        raise _refuse("Fargate is not served by the embedded AWS Batch", request)
    if not resources:
        resources = {"maxvCpus": params.get("unmanagedvCpus", draft.state.machine.vcpus)}
    detail = {
        "computeEnvironmentName": name,
        "computeEnvironmentArn": arn("compute-environment", name),
        "ecsClusterArn": f"arn:aws:ecs:us-east-1:000000000000:cluster/{name}",
        "type": params["type"],
        "state": params.get("state", "ENABLED"),
        "status": "VALID",
        "statusReason": "ComputeEnvironment Healthy",
        "tags": params.get("tags", {}),
        "uuid": request.new_id,
        "containerOrchestrationType": "ECS",
    }
    if params["type"] == "MANAGED":
        detail["computeResources"] = {"minvCpus": 0, "desiredvCpus": 0, **resources}
    else:
        detail["unmanagedvCpus"] = resources["maxvCpus"]
    if "serviceRole" in params:
        detail["serviceRole"] = params["serviceRole"]
    draft.put_environment(Environment(name, detail))
    return {
        "computeEnvironmentName": name,
        "computeEnvironmentArn": detail["computeEnvironmentArn"],
    }


def update_compute_environment(draft: Draft, request: Requested) -> dict[str, Any]:
    record = _environment(draft, request.params["computeEnvironment"], request)
    detail = dict(record.detail)
    for key in ("state", "serviceRole", "unmanagedvCpus", "updatePolicy"):
        if key in request.params:
            detail[key] = request.params[key]
    if "computeResources" in request.params:
        changed = dict(request.params["computeResources"])
        changed.pop("updateToLatestImageVersion", None)
        detail["computeResources"] = {**detail.get("computeResources", {}), **changed}
    draft.put_environment(replace(record, detail=detail))
    return {
        "computeEnvironmentName": record.name,
        "computeEnvironmentArn": detail["computeEnvironmentArn"],
    }


def delete_compute_environment(draft: Draft, request: Requested) -> dict[str, Any]:
    name = bare_name(request.params["computeEnvironment"])
    record = draft.state.environments.get(name)
    if record is None:
        return {}
    if record.enabled:
        raise _refuse("Cannot delete, compute environment must be DISABLED first", request)
    if any(name in queue.environments for queue in draft.state.queues.values()):
        raise _refuse("Cannot delete, found existing JobQueue relationship", request)
    draft.drop_environment(name)
    return {}


def _environment(draft: Draft, name_or_arn: str, request: Requested) -> Environment:
    record = draft.state.environments.get(bare_name(name_or_arn))
    if record is None:
        raise _refuse(f"{name_or_arn} does not exist", request)
    return record


# --- job queues -----------------------------------------------------------------------------


def create_job_queue(draft: Draft, request: Requested) -> dict[str, Any]:
    params = request.params
    name = params["jobQueueName"]
    _check_name(name, "Job queue name", request)
    _check_tags(request)
    _refuse_not_yet(request)
    if params.get("jobQueueType", "ECS") != "ECS":
        raise _refuse(f"{params['jobQueueType']} queues are not served here, only ECS", request)
    if name in draft.state.queues:
        raise _refuse(f"Object already exists: {name}", request)
    detail = {
        "jobQueueName": name,
        "jobQueueArn": arn("job-queue", name),
        "state": params.get("state", "ENABLED"),
        "status": "VALID",
        "statusReason": "JobQueue Healthy",
        "priority": params["priority"],
        "computeEnvironmentOrder": _environment_order(draft, request),
        "jobQueueType": "ECS",
        "tags": params.get("tags", {}),
    }
    draft.put_queue(Queue(name, detail))
    return {"jobQueueName": name, "jobQueueArn": detail["jobQueueArn"]}


def update_job_queue(draft: Draft, request: Requested) -> dict[str, Any]:
    _refuse_not_yet(request)
    record = _queue(draft, request.params["jobQueue"], request)
    detail = dict(record.detail)
    for key in ("state", "priority"):
        if key in request.params:
            detail[key] = request.params[key]
    if "computeEnvironmentOrder" in request.params:
        detail["computeEnvironmentOrder"] = _environment_order(draft, request)
    draft.put_queue(replace(record, detail=detail))
    return {"jobQueueName": record.name, "jobQueueArn": detail["jobQueueArn"]}


def _environment_order(draft: Draft, request: Requested) -> list[dict[str, Any]]:
    given = request.params.get("computeEnvironmentOrder", [])
    if not 1 <= len(given) <= MAX_ENVIRONMENTS:
        raise _refuse(f"A job queue needs 1 to {MAX_ENVIRONMENTS} compute environments", request)
    return [
        {
            "order": entry["order"],
            "computeEnvironment": _environment(draft, entry["computeEnvironment"], request).detail[
                "computeEnvironmentArn"
            ],
        }
        for entry in given
    ]


def delete_job_queue(draft: Draft, request: Requested) -> dict[str, Any]:
    name = bare_name(request.params["jobQueue"])
    record = draft.state.queues.get(name)
    if record is None:
        return {}
    if record.enabled:
        raise _refuse("Cannot delete, job queue must be DISABLED first", request)
    for job in sorted(draft.state.jobs.values(), key=lambda job: job.sequence):
        if job.queue == name:
            # The end of a job before it may have ended this one, which depended on it.
            left = draft.state.jobs.get(job.id)
            if left is not None:
                engine.terminate(draft, left, engine.QUEUE_DELETED, request.now)
    draft.drop_queue(name)
    return {}


def _queue(draft: Draft, name_or_arn: str, request: Requested) -> Queue:
    record = draft.state.queues.get(bare_name(name_or_arn))
    if record is None:
        raise _refuse(f"JobQueue {name_or_arn} not found", request)
    return record


# --- job definitions ------------------------------------------------------------------------


def register_job_definition(draft: Draft, request: Requested) -> dict[str, Any]:
    params = request.params
    name = params["jobDefinitionName"]
    _check_name(name, "Job definition name", request)
    _check_tags(request)
    _refuse_not_yet(request)
    if params["type"] != "container" or "containerProperties" not in params:
        raise _refuse("Only container job definitions with containerProperties", request)
    if len(msgspec.json.encode(params)) > MAX_DEFINITION:
        raise _refuse(f"Job definition must be at most {MAX_DEFINITION} bytes", request)
    container = params["containerProperties"]
    if not container.get("image"):
        raise _refuse("Container properties image must be provided", request)
    _check_retry(params.get("retryStrategy", {}), request)
    _check_timeout(params.get("timeout", {}), request)
    _check_environment(container, request)
    _needs(container, request)
    revision = draft.state.revisions.get(name, 0) + 1
    detail = {
        **params,
        "jobDefinitionArn": arn("job-definition", f"{name}:{revision}"),
        "revision": revision,
        "status": "ACTIVE",
        "platformCapabilities": params.get("platformCapabilities", ["EC2"]),
        "containerOrchestrationType": "ECS",
        "parameters": params.get("parameters", {}),
        "tags": params.get("tags", {}),
    }
    draft.put_definition(Definition(name, revision, detail))
    return {
        "jobDefinitionName": name,
        "jobDefinitionArn": detail["jobDefinitionArn"],
        "revision": revision,
    }


def deregister_job_definition(draft: Draft, request: Requested) -> dict[str, Any]:
    asked = bare_name(request.params["jobDefinition"])
    record = draft.state.definitions.get(asked)
    if record is None:
        raise _refuse(f"Job definition {asked} does not exist", request)
    draft.put_definition(replace(record, detail={**record.detail, "status": "INACTIVE"}))
    return {}


def _definition(draft: Draft, asked: str, request: Requested) -> Definition:
    """`name` is its newest active revision; `name:revision` that one, if active."""
    name = bare_name(asked)
    if ":" in name:
        record = draft.state.definitions.get(name)
        if record is not None and record.active:
            return record
    else:
        for revision in range(draft.state.revisions.get(name, 0), 0, -1):
            record = draft.state.definitions.get(f"{name}:{revision}")
            if record is not None and record.active:
                return record
    raise _refuse(f"JobDefinition {asked} not found or not ACTIVE", request)


def _check_retry(strategy: dict[str, Any], request: Requested) -> None:
    if strategy.get("evaluateOnExit") and "attempts" not in strategy:
        raise _refuse("RetryAttempts must be provided with retry strategy", request)
    if not 1 <= strategy.get("attempts", 1) <= 10:
        raise _refuse("RetryAttempts must be between 1 and 10", request)
    if len(strategy.get("evaluateOnExit", ())) > 5:
        raise _refuse("At most 5 evaluateOnExit entries", request)
    for rule in strategy.get("evaluateOnExit", ()):
        if str(rule["action"]).upper() not in ("RETRY", "EXIT"):
            raise _refuse("evaluateOnExit action must be RETRY or EXIT", request)


def _check_timeout(timeout: dict[str, Any], request: Requested) -> None:
    seconds = timeout.get("attemptDurationSeconds")
    if seconds is not None and seconds < 60:
        raise _refuse("attemptDurationSeconds must be at least 60", request)


def _needs(container: dict[str, Any], request: Requested) -> Needs:
    """vCPUs, memory (MiB) and GPUs; resourceRequirements win over the deprecated members."""
    found: dict[str, str] = {}
    for requirement in container.get("resourceRequirements", ()):
        found[requirement["type"]] = requirement["value"]
    vcpus = found.get("VCPU", container.get("vcpus"))
    memory = found.get("MEMORY", container.get("memory"))
    if vcpus is None or memory is None:
        raise _refuse("Resource requirements VCPU and MEMORY must be provided", request)
    given = [str(value) for value in (vcpus, memory, found.get("GPU", 0))]
    if not all(_WHOLE.fullmatch(value) for value in given):
        raise _refuse("Resource requirement values must be whole numbers", request)
    needs = Needs(*map(int, given))
    if needs.vcpus < 1 or needs.memory < 4 or needs.gpus < 0 or found.get("GPU") == "0":
        raise _refuse("VCPU must be at least 1, MEMORY at least 4 MiB, GPU at least 1", request)
    return needs


# --- jobs -----------------------------------------------------------------------------------


def submit_job(draft: Draft, request: Requested) -> dict[str, Any]:
    params = request.params
    name = params["jobName"]
    _check_name(name, "Job name", request)
    _check_tags(request)
    _refuse_not_yet(request)
    if len(msgspec.json.encode(params)) > MAX_SUBMIT:
        raise _refuse(f"SubmitJob request must be at most {MAX_SUBMIT} bytes", request)
    queue = _queue(draft, params["jobQueue"], request)
    if not queue.enabled:
        raise _refuse(f"JobQueue {queue.name} is DISABLED and does not accept jobs", request)
    definition = _definition(draft, params["jobDefinition"], request)
    retry = params.get("retryStrategy", definition.detail.get("retryStrategy", {}))
    timeout = params.get("timeout", definition.detail.get("timeout", {}))
    _check_retry(retry, request)
    _check_timeout(timeout, request)
    parameters = {**definition.detail.get("parameters", {}), **params.get("parameters", {})}
    overrides = params.get("containerOverrides", {})
    _check_environment(overrides, request)
    container = _container(definition, overrides, parameters)
    waiting_for, dependency_failed = _dependencies(draft, request)
    job = Job(
        id=request.new_id,
        name=name,
        queue=queue.name,
        definition=definition.key,
        container=container,
        needs=_needs(container, request),
        created_at=request.now,
        sequence=draft.next_sequence(),
        retry=retry,
        timeout=timeout.get("attemptDurationSeconds"),
        parameters=parameters,
        depends_on=tuple(params.get("dependsOn", ())),
        waiting_for=waiting_for,
        dependency_failed=dependency_failed,
        tags=params.get("tags", {}),
        propagate_tags=params.get("propagateTags", False),
    )
    engine.admit(draft, job)
    return {"jobArn": job.arn, "jobName": name, "jobId": job.id}


def _container(
    definition: Definition, overrides: dict[str, Any], parameters: dict[str, str]
) -> dict[str, Any]:
    """The container as it will run: overrides applied, `Ref::name` replaced in the command.

    Environments merge by name. A command is a list of elements before and after: nothing is split.
    """
    container = dict(definition.detail["containerProperties"])
    environment = _variables(container) | _variables(overrides)
    container["environment"] = [{"name": k, "value": v} for k, v in environment.items()]
    command = overrides.get("command") or container.get("command", [])
    container["command"] = [
        parameters.get(part.removeprefix("Ref::"), part) if part.startswith("Ref::") else part
        for part in command
    ]
    requirements = {entry["type"]: entry for entry in container.get("resourceRequirements", ())}
    requirements |= {entry["type"]: entry for entry in overrides.get("resourceRequirements", ())}
    container["resourceRequirements"] = list(requirements.values())
    for key in ("vcpus", "memory", "instanceType"):
        if key in overrides:
            container[key] = overrides[key]
    return container


def _variables(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container.get("environment", ())}


def _check_environment(container: dict[str, Any], request: Requested) -> None:
    """AWS's model requires neither name nor value; a variable without a name can not be set."""
    if not all(entry.get("name") for entry in container.get("environment", ())):
        raise _refuse("Environment variable name must be provided", request)


def _dependencies(draft: Draft, request: Requested) -> tuple[tuple[str, ...], bool]:
    given = request.params.get("dependsOn", ())
    if len(given) > MAX_DEPENDENCIES:
        raise _refuse(f"At most {MAX_DEPENDENCIES} dependencies", request)
    waiting: list[str] = []
    failed = False
    for entry in given:
        if entry.get("type"):
            raise _refuse(f"Dependency type {entry['type']} needs an array job", request)
        job_id = bare_name(entry.get("jobId", ""))
        if job_id in draft.state.jobs:
            waiting.append(job_id)
        elif job_id in request.ended:
            failed = failed or request.ended[job_id] == "FAILED"
        else:
            raise _refuse(f"Dependency job {job_id!r} does not exist", request)
    return tuple(dict.fromkeys(waiting)), failed


def cancel_job(draft: Draft, request: Requested) -> dict[str, Any]:
    job = draft.state.jobs.get(bare_name(request.params["jobId"]))
    if job is not None:
        engine.cancel(draft, job, request.params["reason"], request.now)
    return {}


def terminate_job(draft: Draft, request: Requested) -> dict[str, Any]:
    job = draft.state.jobs.get(bare_name(request.params["jobId"]))
    if job is not None:
        engine.terminate(draft, job, request.params["reason"], request.now)
    return {}


HANDLERS: dict[str, Callable[[Draft, Requested], dict[str, Any]]] = {
    "CreateComputeEnvironment": create_compute_environment,
    "UpdateComputeEnvironment": update_compute_environment,
    "DeleteComputeEnvironment": delete_compute_environment,
    "CreateJobQueue": create_job_queue,
    "UpdateJobQueue": update_job_queue,
    "DeleteJobQueue": delete_job_queue,
    "RegisterJobDefinition": register_job_definition,
    "DeregisterJobDefinition": deregister_job_definition,
    "SubmitJob": submit_job,
    "CancelJob": cancel_job,
    "TerminateJob": terminate_job,
}
