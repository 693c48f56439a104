"""Compute environments and job queues: create, update, delete."""

import re
from typing import Any

from msgspec.structs import replace

from batchml.local import lifecycle
from batchml.local.draft import Draft
from batchml.local.messages import Requested
from batchml.local.operations.checks import (
    check_between,
    check_name,
    check_tags,
    existing,
    refuse,
    refuse_not_served,
)
from batchml.local.state import ACCOUNT, CLUSTER, CONTROLLERS, REGION, Environment, Queue, arn
from batchml.model.names import bare_name, parse_arn

MAX_ENVIRONMENTS = 3  # of one queue
MAX_PRIORITY = 1000  # of a queue; AWS::Batch::JobQueue

# AWS has a list of instance types and families for each Region. Types that are newer than this
# code must pass, so only texts that cannot name one are refused.
_INSTANCE_TYPE = re.compile(
    r"optimal|default[_-](x86_64|arm64)|(?=[a-z-]*[0-9])[a-z][a-z0-9-]*(\.[a-z0-9-]+)?"
)

# Source: AWS Batch User Guide, "Jobs stuck in RUNNABLE".
TIME_LIMIT_REASONS = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
)


def create_compute_environment(draft: Draft, request: Requested) -> dict[str, Any]:
    params = request.params
    name = params["computeEnvironmentName"]
    check_name(name, "Compute environment name", request)
    check_tags(request)
    if name in draft.state.environments:
        raise refuse(f"Object already exists: {name}", request)
    resources = params.get("computeResources")
    if name == CONTROLLERS and params["type"] != "UNMANAGED":
        raise refuse(f"{name} is the environment of sweeps' controllers: UNMANAGED", request)
    if params["type"] == "MANAGED" and not resources:
        raise refuse("computeResources must be provided for a MANAGED environment", request)
    if resources:
        _refuse_instances(resources, request)
        _require_instances(resources, request)
    if not resources:
        resources = {"maxvCpus": params.get("unmanagedvCpus", draft.state.machine.vcpus)}
    detail = {
        "computeEnvironmentName": name,
        "computeEnvironmentArn": arn("compute-environment", name),
        "ecsClusterArn": f"arn:aws:ecs:{REGION}:{ACCOUNT}:cluster/{CLUSTER}",
        "type": params["type"],
        "state": params.get("state", "ENABLED"),
        "status": "VALID",
        "statusReason": "ComputeEnvironment Healthy",
        "tags": params.get("tags", {}),
        "uuid": request.new_id,
        "containerOrchestrationType": "ECS",
    }
    if params["type"] == "MANAGED":
        detail["computeResources"] = {"desiredvCpus": 0, **resources}
    else:
        detail["unmanagedvCpus"] = resources["maxvCpus"]
    if "serviceRole" in params:
        detail["serviceRole"] = params["serviceRole"]
    draft.put(Environment(name, detail))
    return {
        "computeEnvironmentName": name,
        "computeEnvironmentArn": detail["computeEnvironmentArn"],
    }


def update_compute_environment(draft: Draft, request: Requested) -> dict[str, Any]:
    record = environment_of(draft, request.params["computeEnvironment"], request)
    detail = dict(record.detail)
    for key in ("state", "serviceRole", "unmanagedvCpus", "updatePolicy"):
        if key in request.params:
            detail[key] = request.params[key]
    if "computeResources" in request.params:
        changed = dict(request.params["computeResources"])
        changed.pop("updateToLatestImageVersion", None)
        _refuse_instances(changed, request)
        detail["computeResources"] = {**detail.get("computeResources", {}), **changed}
    draft.put(replace(record, detail=detail))
    return {
        "computeEnvironmentName": record.name,
        "computeEnvironmentArn": detail["computeEnvironmentArn"],
    }


def _refuse_instances(resources: dict[str, Any], request: Requested) -> None:
    kind = str(resources.get("type", ""))
    if kind.startswith("FARGATE"):
        raise refuse("Fargate is not served by the embedded AWS Batch", request)
    if "MANAGED_INSTANCES" in kind or "managedInstancesProvider" in resources:
        raise refuse("ECS Managed Instances are not served by the embedded AWS Batch", request)
    for name in resources.get("instanceTypes", ()):
        if not _INSTANCE_TYPE.fullmatch(name):
            raise refuse(
                f"Instance type can only be one of [optimal, default_x86_64, default_arm64, or an "
                f"instance family or type of Amazon EC2 such as c7i and c7i.large], not '{name}'",
                request,
            )


def _require_instances(resources: dict[str, Any], request: Requested) -> None:
    """Refuse EC2 resources without the members that AWS requires, in AWS's words."""
    if not resources.get("instanceRole"):
        raise refuse("Instance role is required.", request)
    if "minvCpus" not in resources:
        raise refuse("Resource minvCpus is required.", request)


def delete_compute_environment(draft: Draft, request: Requested) -> dict[str, Any]:
    name = bare_name(request.params["computeEnvironment"])
    record = draft.state.environments.get(name)
    if record is None:
        return {}
    if record.enabled:
        raise refuse("Cannot delete, compute environment must be DISABLED first", request)
    if any(name in queue.environments for queue in draft.state.queues.values()):
        raise refuse("Cannot delete, found existing JobQueue relationship", request)
    draft.drop(record)
    return {}


def environment_of(draft: Draft, name_or_arn: str, request: Requested) -> Environment:
    return existing(draft.state.environments, name_or_arn, "ComputeEnvironment", request)


def create_job_queue(draft: Draft, request: Requested) -> dict[str, Any]:
    params = request.params
    name = params["jobQueueName"]
    check_name(name, "Job queue name", request)
    check_tags(request)
    refuse_not_served(params, request)
    check_between(params["priority"], 0, MAX_PRIORITY, "priority", request)
    if params.get("jobQueueType", "ECS") != "ECS":
        raise refuse(f"{params['jobQueueType']} queues are not served here, only ECS", request)
    if name in draft.state.queues:
        raise refuse(f"Object already exists: {name}", request)
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
        **_limits(request),
    }
    if "schedulingPolicyArn" in params:
        detail["schedulingPolicyArn"] = policy_arn(draft, params["schedulingPolicyArn"], request)
    draft.put(Queue(name, detail))
    return {"jobQueueName": name, "jobQueueArn": detail["jobQueueArn"]}


def update_job_queue(draft: Draft, request: Requested) -> dict[str, Any]:
    refuse_not_served(request.params, request)
    record = queue_of(draft, request.params["jobQueue"], request)
    detail = dict(record.detail)
    for key in ("state", "priority"):
        if key in request.params:
            detail[key] = request.params[key]
    check_between(detail["priority"], 0, MAX_PRIORITY, "priority", request)
    detail |= _limits(request)
    if "schedulingPolicyArn" in request.params:
        if not record.policy:
            raise refuse("A scheduling policy can not be added to a FIFO job queue", request)
        asked = request.params["schedulingPolicyArn"]
        detail["schedulingPolicyArn"] = policy_arn(draft, asked, request)
    if "computeEnvironmentOrder" in request.params:
        detail["computeEnvironmentOrder"] = _environment_order(draft, request)
    draft.put(replace(record, detail=detail))
    return {"jobQueueName": record.name, "jobQueueArn": detail["jobQueueArn"]}


def _limits(request: Requested) -> dict[str, Any]:
    """The jobStateTimeLimitActions of a request, checked."""
    given = request.params.get("jobStateTimeLimitActions")
    if given is None:
        return {}
    for action in given:
        check_between(action["maxTimeSeconds"], 600, 86_400, "maxTimeSeconds", request)
        if action["action"] != "CANCEL":
            raise refuse("jobStateTimeLimitActions action must be CANCEL", request)
        if action["reason"] not in TIME_LIMIT_REASONS:
            known = ", ".join(TIME_LIMIT_REASONS)
            raise refuse(f"jobStateTimeLimitActions reason must be one of {known}", request)
    return {"jobStateTimeLimitActions": given}


def policy_arn(draft: Draft, asked: str, request: Requested) -> str:
    """The ARN of a scheduling policy that exists. Raises Refused."""
    return str(existing(draft.state.policies, asked, "SchedulingPolicy", request).detail["arn"])


def _environment_order(draft: Draft, request: Requested) -> list[dict[str, Any]]:
    given = request.params.get("computeEnvironmentOrder", [])
    if not 1 <= len(given) <= MAX_ENVIRONMENTS:
        raise refuse(f"A job queue needs 1 to {MAX_ENVIRONMENTS} compute environments", request)
    for entry in given:
        named = parse_arn(entry["computeEnvironment"])
        if named is not None and named.account != ACCOUNT:
            raise refuse(
                f"ComputeEnvironment {named} not found: it belongs to another account than "
                f"{ACCOUNT}, that of the embedded AWS Batch",
                request,
            )
    found = [environment_of(draft, entry["computeEnvironment"], request) for entry in given]
    return [
        {"order": entry["order"], "computeEnvironment": record.detail["computeEnvironmentArn"]}
        for entry, record in zip(given, found, strict=True)
    ]


def delete_job_queue(draft: Draft, request: Requested) -> dict[str, Any]:
    name = bare_name(request.params["jobQueue"])
    record = draft.state.queues.get(name)
    if record is None:
        return {}
    if record.enabled:
        raise refuse("Cannot delete, job queue must be DISABLED first", request)
    for job in sorted(draft.state.jobs.values(), key=lambda job: job.sequence):
        if job.queue == name and job.node is None:  # nodes are stopped with their job
            # The end of a job before it may have ended this one, which depended on it.
            left = draft.state.jobs.get(job.id)
            if left is not None:
                lifecycle.terminate(draft, left, lifecycle.QUEUE_DELETED)
    draft.drop_queue(record)
    return {}


def queue_of(draft: Draft, name_or_arn: str, request: Requested) -> Queue:
    return existing(draft.state.queues, name_or_arn, "JobQueue", request)
