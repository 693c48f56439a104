"""Create, update and delete compute environments, job queues, consumable resources and scheduling
policies; tag and untag every resource.
"""

import heapq
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

from msgspec.structs import replace

from batchml.local.batch import lifecycle
from batchml.local.batch.events import CallReceived
from batchml.local.batch.operations.checks import (
    check_between,
    check_chaos,
    check_name,
    check_served,
    check_tag_count,
    check_tags,
    find_record,
    look_up,
    request_error,
)
from batchml.local.batch.state import (
    ACCOUNT,
    CLUSTER,
    CONTROLLERS,
    REGION,
    ComputeEnvironment,
    ConsumableResource,
    Job,
    JobQueue,
    ResourceRecord,
    SchedulingPolicy,
    arn,
)
from batchml.local.batch.transaction import Transaction
from batchml.model.names import Arn, parse_arn

MAX_ENVIRONMENTS = 3  # of one queue
MAX_PRIORITY = 1000  # of a queue; AWS::Batch::JobQueue
MAX_DECAY = 604_800  # seconds
MAX_SHARE_NAME = 255
RESOURCE_TYPES = ("REPLENISHABLE", "NON_REPLENISHABLE")
REMEMBER_TOKENS = 8 * 3600 * 1000  # ms

# AWS has a list of instance types and families for each Region. Types that are newer than this
# code must pass, so only texts that cannot name an instance type are refused.
_INSTANCE_TYPE = re.compile(
    r"optimal|default[_-](x86_64|arm64)|(?=[a-z-]*[0-9])[a-z][a-z0-9-]*(\.[a-z0-9-]+)?"
)

# Source: AWS Batch User Guide, "Jobs stuck in RUNNABLE".
TIME_LIMIT_REASONS = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
)

_ENDED_AT_ONCE = 1000  # jobs of a deleted queue that one event ends at least

R = TypeVar("R", bound=ResourceRecord)

# --- Rules for every kind of resource -------------------------------------------------------------


def _new_detail(
    tx: Transaction, kind: type[ResourceRecord], request: CallReceived
) -> dict[str, Any]:
    """The name, the ARN and the tags of a new resource. Raises ApiError."""
    params = request.params
    name = params[kind.name_key]
    check_name(name, f"{_title(kind).capitalize()} name", request)
    check_tags(request)
    check_served(params, request)
    if name in getattr(tx.state, kind.field):
        raise request_error(f"Object already exists: {name}", request)
    tags = params.get("tags", {})
    return {kind.name_key: name, kind.arn_key: arn(kind.arn_kind, name), "tags": tags}


def _title(kind: type[ResourceRecord]) -> str:
    return kind.arn_kind.replace("-", " ")


def _put(tx: Transaction, record: ResourceRecord) -> dict[str, Any]:
    tx.put(record)
    return record.identifiers()


def _merge_members(record: R, request: CallReceived, *keys: str) -> dict[str, Any]:
    """The detail of a resource with those members that the request has."""
    return record.detail | {key: request.params[key] for key in keys if key in request.params}


def _check_disabled(record: ComputeEnvironment | JobQueue, request: CallReceived) -> None:
    if record.enabled:
        text = f"Cannot delete, {_title(type(record))} must be DISABLED first"
        raise request_error(text, request)


_HAS_QUEUES = "Cannot delete, found existing JobQueue relationship"

# --- Compute environments -------------------------------------------------------------------------


def create_compute_environment(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    params, detail = request.params, _new_detail(tx, ComputeEnvironment, request)
    name = params["computeEnvironmentName"]
    resources = params.get("computeResources")
    if name == CONTROLLERS and params["type"] != "UNMANAGED":
        text = f"{name} is the environment for controllers of sweeps and must be UNMANAGED"
        raise request_error(text, request)
    if params["type"] == "MANAGED" and not resources:
        text = "computeResources must be provided for a MANAGED environment"
        raise request_error(text, request)
    if resources:
        _refuse_instances(resources, request)
        _require_instances(resources, request)
    else:
        resources = {"maxvCpus": params.get("unmanagedvCpus", tx.state.machine.vcpus)}
    detail |= {
        "ecsClusterArn": f"arn:aws:ecs:{REGION}:{ACCOUNT}:cluster/{CLUSTER}",
        "type": params["type"],
        "state": params.get("state", "ENABLED"),
        "status": "VALID",
        "statusReason": "ComputeEnvironment Healthy",
        "uuid": request.new_id,
        "containerOrchestrationType": "ECS",
    }
    if params["type"] == "MANAGED":
        detail["computeResources"] = {"desiredvCpus": 0, **resources}
    else:
        detail["unmanagedvCpus"] = resources["maxvCpus"]
    if "serviceRole" in params:
        detail["serviceRole"] = params["serviceRole"]
    return _put(tx, ComputeEnvironment(name, detail))


def update_compute_environment(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    record = find_record(tx, ComputeEnvironment, request.params["computeEnvironment"], request)
    keys = ("state", "serviceRole", "unmanagedvCpus", "updatePolicy")
    detail = _merge_members(record, request, *keys)
    if "computeResources" in request.params:
        changed = dict(request.params["computeResources"])
        changed.pop("updateToLatestImageVersion", None)
        _refuse_instances(changed, request)
        detail["computeResources"] = {**detail.get("computeResources", {}), **changed}
    return _put(tx, replace(record, detail=detail))


def delete_compute_environment(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    record = look_up(tx, ComputeEnvironment, request.params["computeEnvironment"])
    if record is not None:
        _check_disabled(record, request)
        if any(record.name in queue.environments for queue in tx.state.queues.values()):
            raise request_error(_HAS_QUEUES, request)
        tx.drop(record)
    return {}


def _refuse_instances(resources: dict[str, Any], request: CallReceived) -> None:
    kind = str(resources.get("type", ""))
    if kind.startswith("FARGATE"):
        raise request_error("Fargate is not served by the embedded AWS Batch", request)
    if "MANAGED_INSTANCES" in kind or "managedInstancesProvider" in resources:
        text = "ECS Managed Instances are not served by the embedded AWS Batch"
        raise request_error(text, request)
    for name in resources.get("instanceTypes", ()):
        if not _INSTANCE_TYPE.fullmatch(name):
            raise request_error(
                f"Instance type can only be one of [optimal, default_x86_64, default_arm64, or an "
                f"instance family or type of Amazon EC2 such as c7i and c7i.large], not '{name}'",
                request,
            )


def _require_instances(resources: dict[str, Any], request: CallReceived) -> None:
    """Refuse EC2 resources without the members that AWS requires, in AWS's words."""
    if not resources.get("instanceRole"):
        raise request_error("Instance role is required.", request)
    if "minvCpus" not in resources:
        raise request_error("Resource minvCpus is required.", request)


# --- Job queues -----------------------------------------------------------------------------------


def create_job_queue(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    params, detail = request.params, _new_detail(tx, JobQueue, request)
    check_between(params["priority"], 0, MAX_PRIORITY, "priority", request)
    if params.get("jobQueueType", "ECS") != "ECS":
        kind = params["jobQueueType"]
        text = f"{kind} queues are not served by the embedded AWS Batch, only ECS queues"
        raise request_error(text, request)
    detail |= {
        "state": params.get("state", "ENABLED"),
        "status": "VALID",
        "statusReason": "JobQueue Healthy",
        "priority": params["priority"],
        "computeEnvironmentOrder": _environment_order(tx, request),
        "jobQueueType": "ECS",
        **_time_limits(request),
        **_policy(tx, request),
    }
    return _put(tx, JobQueue(params["jobQueueName"], detail))


def update_job_queue(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    check_served(request.params, request)
    record = find_record(tx, JobQueue, request.params["jobQueue"], request)
    if record.is_deleting:
        raise request_error("Cannot update, resource is being modified", request)
    detail = _merge_members(record, request, "state", "priority")
    check_between(detail["priority"], 0, MAX_PRIORITY, "priority", request)
    detail |= _time_limits(request)
    if "schedulingPolicyArn" in request.params and not record.policy:
        raise request_error("A scheduling policy can not be added to a FIFO job queue", request)
    detail |= _policy(tx, request)
    if "computeEnvironmentOrder" in request.params:
        detail["computeEnvironmentOrder"] = _environment_order(tx, request)
    return _put(tx, replace(record, detail=detail))


def delete_job_queue(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    record = look_up(tx, JobQueue, request.params["jobQueue"])
    if record is None:
        return {}
    _check_disabled(record, request)
    reason = "JobQueue is being deleted"
    detail = {**record.detail, "status": "DELETING", "statusReason": reason}
    tx.put(replace(record, detail=detail))
    return {}  # `continue_deletions` comes next


def continue_deletions(tx: Transaction) -> None:
    """End jobs of deleted queues: some with each event, so that calls are answered meanwhile. A
    queue is gone once all of its jobs have been told to stop.

    Source: API reference, DeleteJobQueue: the jobs of the queue are terminated gradually.
    """
    for record in [queue for queue in tx.state.queues.values() if queue.is_deleting]:
        most = max(_ENDED_AT_ONCE, len(tx.state.jobs) // 50)
        left = (
            job for job in tx.state.jobs.values()
            if job.queue == record.name and job.node is None  # nodes are stopped with their job
            and not (job.terminated or job.timed_out)
        )  # fmt: skip
        found = heapq.nsmallest(most + 1, left, key=lambda job: job.sequence)
        for job in found[:most]:
            # The end of an earlier job may have ended this one, which depended on it.
            there = tx.state.jobs.get(job.id)
            if there is not None:
                lifecycle.terminate(tx, there, lifecycle.QUEUE_DELETED)
        if len(found) <= most:
            tx.drop_queue(record)


def _time_limits(request: CallReceived) -> dict[str, Any]:
    """The jobStateTimeLimitActions of a request, checked."""
    actions = request.params.get("jobStateTimeLimitActions")
    if actions is None:
        return {}
    for action in actions:
        check_between(action["maxTimeSeconds"], 600, 86_400, "maxTimeSeconds", request)
        if action["action"] != "CANCEL":
            raise request_error("jobStateTimeLimitActions action must be CANCEL", request)
        if action["reason"] not in TIME_LIMIT_REASONS:
            reasons = ", ".join(TIME_LIMIT_REASONS)
            text = f"jobStateTimeLimitActions reason must be one of {reasons}"
            raise request_error(text, request)
    return {"jobStateTimeLimitActions": actions}


def _policy(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    """The ARN of the request's scheduling policy, which must exist. Raises ApiError."""
    policy_arn = request.params.get("schedulingPolicyArn")
    if policy_arn is None:
        return {}
    policy = find_record(tx, SchedulingPolicy, policy_arn, request)
    return {"schedulingPolicyArn": policy.detail["arn"]}


def _environment_order(tx: Transaction, request: CallReceived) -> list[dict[str, Any]]:
    entries = request.params.get("computeEnvironmentOrder", [])
    if not 1 <= len(entries) <= MAX_ENVIRONMENTS:
        text = f"A job queue needs 1 to {MAX_ENVIRONMENTS} compute environments"
        raise request_error(text, request)
    for entry in entries:
        named = parse_arn(entry["computeEnvironment"])
        if named is not None and named.account != ACCOUNT:
            raise request_error(
                f"ComputeEnvironment {named} not found: it belongs to an account other than "
                f"{ACCOUNT}, that of the embedded AWS Batch",
                request,
            )
    records = [
        find_record(tx, ComputeEnvironment, entry["computeEnvironment"], request)
        for entry in entries
    ]
    return [
        {"order": entry["order"], "computeEnvironment": record.detail["computeEnvironmentArn"]}
        for entry, record in zip(entries, records, strict=True)
    ]


# --- Consumable resources -------------------------------------------------------------------------
# Source: AWS Batch User Guide, "Resource-aware scheduling".


def create_consumable_resource(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    params, detail = request.params, _new_detail(tx, ConsumableResource, request)
    kind = params.get("resourceType", RESOURCE_TYPES[0])
    if kind not in RESOURCE_TYPES:
        raise request_error(f"resourceType must be one of {', '.join(RESOURCE_TYPES)}", request)
    total = params.get("totalQuantity", 0)
    if total < 0:
        raise request_error("totalQuantity must be 0 or more", request)
    detail |= {"resourceType": kind, "createdAt": request.now}
    return _put(tx, ConsumableResource(params["consumableResourceName"], detail, total))


def update_consumable_resource(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    """SET, ADD or REMOVE a quantity. Jobs keep what they hold already, even above the total."""
    params = request.params
    record = find_record(tx, ConsumableResource, params["consumableResource"], request)
    quantity, operation = params.get("quantity", 0), params.get("operation", "SET")
    if quantity < 0:
        raise request_error("quantity must be 0 or more", request)
    totals = {"SET": quantity, "ADD": record.total + quantity, "REMOVE": record.total - quantity}
    if operation not in totals:
        raise request_error("operation must be SET, ADD or REMOVE", request)
    token = params.get("clientToken", "")
    oldest = request.now - REMEMBER_TOKENS
    updates = {key: update for key, update in record.updates.items() if update[0] > oldest}
    if token in updates and tuple(updates[token][1:]) == (operation, quantity):
        return record.identifiers() | {"totalQuantity": record.total}
    if token:
        updates[token] = (request.now, operation, quantity)
    total = totals[operation]
    if not 0 <= total < 2**63:
        text = f"The total quantity would be {total}, which is not from 0 to {2**63 - 1}"
        raise request_error(text, request)
    return _put(tx, replace(record, total=total, updates=updates)) | {"totalQuantity": total}


def delete_consumable_resource(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    record = look_up(tx, ConsumableResource, request.params["consumableResource"])
    if record is not None:
        name = record.name
        users = [job for job in tx.state.jobs.values() if name in dict(job.spec.consumables)]
        if users:
            text = f"Cannot delete, {len(users)} unfinished jobs request {name}"
            raise request_error(f"{text}, such as {users[0].id}", request)
        tx.drop(record)
    return {}


# --- Scheduling policies --------------------------------------------------------------------------


def create_scheduling_policy(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    detail = _new_detail(tx, SchedulingPolicy, request)
    detail["fairsharePolicy"] = _fair_share(request)
    return _put(tx, SchedulingPolicy(detail["name"], detail))


def update_scheduling_policy(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    check_served(request.params, request)
    record = find_record(tx, SchedulingPolicy, request.params["arn"], request)
    if "fairsharePolicy" in request.params:
        detail = {**record.detail, "fairsharePolicy": _fair_share(request)}
        tx.put(replace(record, detail=detail))
    return {}


def delete_scheduling_policy(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    record = look_up(tx, SchedulingPolicy, request.params["arn"])
    if record is not None:
        if any(queue.policy == record.name for queue in tx.state.queues.values()):
            raise request_error(_HAS_QUEUES, request)
        tx.drop(record)
    return {}


def _fair_share(request: CallReceived) -> dict[str, Any]:
    policy: dict[str, Any] = request.params.get("fairsharePolicy", {})
    check_between(policy.get("shareDecaySeconds", 0), 0, MAX_DECAY, "shareDecaySeconds", request)
    check_between(policy.get("computeReservation", 0), 0, 99, "computeReservation", request)
    names = [entry["shareIdentifier"] for entry in policy.get("shareDistribution", ())]
    for name in names:
        check_share_name(name, request)
    for one, other in pairwise(sorted(names)):  # `a*` sorts right before names that start with `a`
        same = one.removesuffix("*") == other.removesuffix("*")
        if same or (one.endswith("*") and other.startswith(one[:-1])):
            text = f"shareIdentifiers must not overlap: '{one}', '{other}'"
            raise request_error(text, request)
    for entry in policy.get("shareDistribution", ()):
        weight = entry.get("weightFactor", 1.0)
        check_between(weight, 0.0001, 999.9999, "weightFactor", request)
    return policy


def check_share_name(name: str, request: CallReceived) -> None:
    plain = name.removesuffix("*")
    if not (plain.isascii() and plain.isalnum()) or len(plain) > MAX_SHARE_NAME:
        raise request_error(
            f"shareIdentifier must have 1-{MAX_SHARE_NAME} letters and digits, "
            f"and may end with *: '{name}'",
            request,
        )


# --- Tags -----------------------------------------------------------------------------------------
# Source: AWS Batch API reference, TagResource. Everything with an ARN can be tagged, except array
# children and nodes.

TagChange = Callable[[dict[str, str]], dict[str, str]]


def tag_resource(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    check_tags(request)
    new_tags: dict[str, str] = request.params["tags"]
    check_chaos(new_tags, request)
    return _change_tags(tx, request, lambda tags: {**tags, **new_tags})


def untag_resource(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    gone = {*request.params["tagKeys"]}
    return _change_tags(tx, request, lambda tags: {k: v for k, v in tags.items() if k not in gone})


def _change_tags(tx: Transaction, request: CallReceived, change: TagChange) -> dict[str, Any]:
    resource_arn = request.params["resourceArn"]
    arn = parse_arn(resource_arn)
    if arn is None:
        raise request_error(f"Invalid resource ARN: {resource_arn}", request)
    if arn.kind == "job":
        job = _find_job(tx, arn, request)
        tags = change(job.tags)
        check_tag_count(tags, request)
        tx.put_job(replace(job, tags=tags))
        return {}
    record = tx.state.record(arn.kind, arn.name)
    if record is None:
        raise request_error(f"Resource not found: {arn}", request)
    tags = change(record.detail.get("tags", {}))
    check_tag_count(tags, request)
    tx.put(replace(record, detail={**record.detail, "tags": tags}))
    return {}


def _find_job(tx: Transaction, arn: Arn, request: CallReceived) -> Job:
    """The job to tag: from the state, or from `request.found` if it has finished."""
    if set(arn.name) & set(":#"):
        raise request_error("Array children and nodes can not be tagged", request)
    job = tx.state.jobs.get(arn.name) or request.found.get(arn.name)
    if job is None:
        raise request_error(f"Resource not found: {arn}", request)
    return job
