"""Compute environments and job queues: create, update, delete."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from batchml.local.batch import lifecycle
from batchml.local.batch.events import Requested
from batchml.local.batch.operations.checks import (
    MAX_TAGS,
    check_between,
    check_chaos,
    check_name,
    check_tags,
    existing,
    refuse,
    refuse_not_served,
)
from batchml.local.batch.state import (
    ACCOUNT,
    CLUSTER,
    CONTROLLERS,
    REGION,
    Consumable,
    Environment,
    Job,
    Policy,
    Queue,
    arn,
)
from batchml.local.batch.transaction import Draft
from batchml.model.names import Arn, bare_name, parse_arn

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


# --- consumables ----------------------------------------------------------------------------------
# Consumable resources: create, update, delete.
#
# Source: AWS Batch User Guide, "Resource-aware scheduling".


TOKENS = 8 * 3600 * 1000  # ms that a clientToken is known
KINDS = ("REPLENISHABLE", "NON_REPLENISHABLE")


def create_consumable_resource(draft: Draft, request: Requested) -> dict[str, Any]:
    params = request.params
    name = params["consumableResourceName"]
    check_name(name, "Consumable resource name", request)
    check_tags(request)
    if name in draft.state.consumables:
        raise refuse(f"Object already exists: {name}", request)
    kind = params.get("resourceType", KINDS[0])
    if kind not in KINDS:
        raise refuse(f"resourceType must be one of {', '.join(KINDS)}", request)
    total = params.get("totalQuantity", 0)
    if total < 0:
        raise refuse("totalQuantity must be 0 or more", request)
    detail = {
        "consumableResourceName": name,
        "consumableResourceArn": arn("consumable-resource", name),
        "resourceType": kind,
        "createdAt": request.now,
        "tags": params.get("tags", {}),
    }
    draft.put(Consumable(name, detail, total))
    return {
        "consumableResourceName": name,
        "consumableResourceArn": detail["consumableResourceArn"],
    }


def update_consumable_resource(draft: Draft, request: Requested) -> dict[str, Any]:
    """SET, ADD or REMOVE a quantity. What jobs hold already they keep, even above the total."""
    params = request.params
    record = consumable_of(draft, params["consumableResource"], request)
    quantity, operation = params.get("quantity", 0), params.get("operation", "SET")
    if quantity < 0:
        raise refuse("quantity must be 0 or more", request)
    totals = {"SET": quantity, "ADD": record.total + quantity, "REMOVE": record.total - quantity}
    if operation not in totals:
        raise refuse("operation must be SET, ADD or REMOVE", request)
    answer = {
        "consumableResourceName": record.name,
        "consumableResourceArn": record.detail["consumableResourceArn"],
        "totalQuantity": record.total,
    }
    token = params.get("clientToken", "")
    updates = {key: made for key, made in record.updates.items() if made[0] > request.now - TOKENS}
    if token in updates and tuple(updates[token][1:]) == (operation, quantity):
        return answer
    if token:
        updates[token] = (request.now, operation, quantity)
    total = totals[operation]
    if not 0 <= total < 2**63:
        raise refuse(f"The total quantity would be {total}", request)
    draft.put(replace(record, total=total, updates=updates))
    return {**answer, "totalQuantity": total}


def delete_consumable_resource(draft: Draft, request: Requested) -> dict[str, Any]:
    name = bare_name(request.params["consumableResource"])
    record = draft.state.consumables.get(name)
    if record is None:
        return {}
    users = [job for job in draft.state.jobs.values() if name in dict(job.spec.consumables)]
    if users:
        raise refuse(
            f"Cannot delete, {len(users)} unfinished jobs ask for {name}, one is {users[0].id}",
            request,
        )
    draft.drop(record)
    return {}


def consumable_of(draft: Draft, name_or_arn: str, request: Requested) -> Consumable:
    return existing(draft.state.consumables, name_or_arn, "ConsumableResource", request)


# --- policies -------------------------------------------------------------------------------------
# Scheduling policies: create, update, delete.


MAX_DECAY = 604_800  # seconds
MAX_SHARE_NAME = 255


def create_scheduling_policy(draft: Draft, request: Requested) -> dict[str, Any]:
    params = request.params
    name = params["name"]
    check_name(name, "Scheduling policy name", request)
    check_tags(request)
    refuse_not_served(params, request)
    if name in draft.state.policies:
        raise refuse(f"Object already exists: {name}", request)
    made = arn("scheduling-policy", name)
    detail = {
        "name": name,
        "arn": made,
        "fairsharePolicy": _fair_share(request),
        "tags": params.get("tags", {}),
    }
    draft.put(Policy(name, detail))
    return {"name": name, "arn": made}


def update_scheduling_policy(draft: Draft, request: Requested) -> dict[str, Any]:
    refuse_not_served(request.params, request)
    asked = request.params["arn"]
    record = existing(draft.state.policies, asked, "SchedulingPolicy", request)
    if "fairsharePolicy" in request.params:
        detail = {**record.detail, "fairsharePolicy": _fair_share(request)}
        draft.put(replace(record, detail=detail))
    return {}


def delete_scheduling_policy(draft: Draft, request: Requested) -> dict[str, Any]:
    name = bare_name(request.params["arn"])
    if any(queue.policy == name for queue in draft.state.queues.values()):
        raise refuse("Cannot delete, found existing JobQueue relationship", request)
    record = draft.state.policies.get(name)
    if record is not None:
        draft.drop(record)
    return {}


def _fair_share(request: Requested) -> dict[str, Any]:
    policy: dict[str, Any] = request.params.get("fairsharePolicy", {})
    check_between(policy.get("shareDecaySeconds", 0), 0, MAX_DECAY, "shareDecaySeconds", request)
    check_between(policy.get("computeReservation", 0), 0, 99, "computeReservation", request)
    names = [entry["shareIdentifier"] for entry in policy.get("shareDistribution", ())]
    for name in names:
        check_share_name(name, request)
    for one, other in pairwise(sorted(names)):  # `a*` comes right before what starts with `a`
        same = one.removesuffix("*") == other.removesuffix("*")
        if same or (one.endswith("*") and other.startswith(one[:-1])):
            raise refuse(f"shareIdentifiers must not overlap: '{one}', '{other}'", request)
    for entry in policy.get("shareDistribution", ()):
        weight = entry.get("weightFactor", 1.0)
        check_between(weight, 0.0001, 999.9999, "weightFactor", request)
    return policy


def check_share_name(name: str, request: Requested) -> None:
    plain = name.removesuffix("*")
    if not (plain.isascii() and plain.isalnum()) or len(plain) > MAX_SHARE_NAME:
        raise refuse(
            f"shareIdentifier must have 1-{MAX_SHARE_NAME} letters and digits, "
            f"and may end with *: '{name}'",
            request,
        )


# --- tags -----------------------------------------------------------------------------------------
# TagResource and UntagResource: on everything that has an ARN here.
#
# Source: AWS Batch API reference, TagResource; array children and nodes can not be tagged.


Change = Callable[[dict[str, str]], dict[str, str]]


def tag_resource(draft: Draft, request: Requested) -> dict[str, Any]:
    check_tags(request)
    given: dict[str, str] = request.params["tags"]
    check_chaos(given, request)
    return _change(draft, request, lambda tags: {**tags, **given})


def untag_resource(draft: Draft, request: Requested) -> dict[str, Any]:
    gone = {*request.params["tagKeys"]}
    return _change(draft, request, lambda tags: {k: v for k, v in tags.items() if k not in gone})


def _change(draft: Draft, request: Requested, change: Change) -> dict[str, Any]:
    asked = request.params["resourceArn"]
    arn = parse_arn(asked)
    if arn is None:
        raise refuse(f"Invalid resource ARN: {asked}", request)
    if arn.kind == "job":
        job = _job(draft, arn, request)
        draft.put_job(replace(job, tags=_changed(job.tags, change, request)))
        return {}
    record = draft.state.record(arn.kind, arn.name)
    if record is None:
        raise refuse(f"Resource not found: {arn}", request)
    tags = _changed(record.detail.get("tags", {}), change, request)
    draft.put(replace(record, detail={**record.detail, "tags": tags}))
    return {}


def _job(draft: Draft, arn: Arn, request: Requested) -> Job:
    """`request.found` has it if it is finished."""
    if set(arn.name) & set(":#"):
        raise refuse("Array children and nodes can not be tagged", request)
    job = draft.state.jobs.get(arn.name) or request.found.get(arn.name)
    if job is None:
        raise refuse(f"Resource not found: {arn}", request)
    return job


def _changed(tags: dict[str, str], change: Change, request: Requested) -> dict[str, str]:
    tags = change(tags)
    if len(tags) > MAX_TAGS:
        raise refuse(f"Tags limit exceeded: at most {MAX_TAGS}", request)
    return tags
