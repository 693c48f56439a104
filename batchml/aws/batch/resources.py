"""Compute environments, queues and scheduling policies -> AWS request arguments. Pure.

On `local` the same requests are made without what refers to other services of AWS.

Source: AWS Batch API reference, ComputeResource, CreateJobQueue, FairsharePolicy.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from batchml.aws.ec2 import Template
from batchml.aws.errors import translated
from batchml.aws.naming import Site
from batchml.aws.session import Session
from batchml.errors import ConfigError, ServiceError
from batchml.model.environment import Compute, FairShare, Queue
from batchml.model.run import JobStatus

CLUSTER_GROUP = "cluster"  # batchml.toml: a placement group of the environment's own

_LOCAL_ROLE = "ecsInstanceRole"  # AWS requires one; `local` has no instances that would use it
_WEIGHTS = (0.0001, 999.9999)  # of weightFactor


def compute_environment(
    site: Site, name: str, compute: Compute, template: Template | None
) -> dict[str, Any]:
    """The CreateComputeEnvironment arguments. `template` is None on `local` alone.

    Without a service role AWS Batch takes its service-linked one, which updates of instances need.
    """
    return {
        "computeEnvironmentName": site.named(name),
        "type": "MANAGED",
        "state": "ENABLED",
        "computeResources": _compute_resources(site, name, compute, template),
        "tags": site.tagged(name, compute.tags),
    }


def _compute_resources(
    site: Site, name: str, compute: Compute, template: Template | None
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "SPOT" if compute.spot else "EC2",
        "allocationStrategy": compute.strategy,
        "minvCpus": compute.min_vcpus,
        "maxvCpus": compute.max_vcpus,
        "instanceTypes": list(compute.instance_types),
        "subnets": list(site.subnets),
        "scalingPolicy": {"minScaleDownDelayMinutes": compute.scale_down_minutes},
    }
    if compute.spot:  # AWS's default is said, so that it comes back when another one is taken out
        found["bidPercentage"] = compute.bid_percentage or 100
    if site.is_local:
        return found | {"instanceRole": _LOCAL_ROLE}
    found |= {
        "securityGroupIds": list(site.security_groups),
        "instanceRole": site.instance_profile,
        "ec2Configuration": [image_of(site, compute)],
    }
    if template is not None:
        # Pinned: what instances start with changes when `setup` says so. Tags are in there, too.
        found["launchTemplate"] = {
            "launchTemplateName": template.name,
            "version": str(template.version),
        }
    group = placement_group_name(site, name, compute)
    if group:
        found["placementGroup"] = group
    return found


def placement_group_name(site: Site, name: str, compute: Compute) -> str:
    """The placement group of a compute environment; empty for none."""
    given = compute.placement_group
    return site.named(name) if given == CLUSTER_GROUP else given


def image_of(site: Site, compute: Compute) -> dict[str, str]:
    """The machine image, as an Ec2Configuration: the one place where it is said.

    The image that we build has the NVIDIA driver and is for x86: of the environment's choice it is
    that of compute environments with GPUs, while a compute environment's own is always followed.
    Raises ConfigError for the image of ours before it is built.
    """
    kind = "ECS_AL2023_NVIDIA" if compute.has_gpus else "ECS_AL2023"
    asked = compute.ami or site.ami
    if asked == "build" and not compute.ami and (compute.is_arm or not compute.has_gpus):
        asked = "ecs-gpu"
    if asked == "ecs-gpu":
        return {"imageType": kind}
    if asked == "build" and not site.built_image:
        raise ConfigError(site.env, ["ami: the image is not built yet. Run batchml setup."])
    return {"imageType": kind, "imageIdOverride": site.built_image if asked == "build" else asked}


def queue(site: Site, name: str, described: Queue, policy_arn: str = "") -> dict[str, Any]:
    """The CreateJobQueue arguments. `policy_arn` is that of its fair-share policy."""
    request: dict[str, Any] = {
        "jobQueueName": site.named(name),
        "state": "ENABLED",
        "priority": described.priority,
        "computeEnvironmentOrder": [
            {"order": order, "computeEnvironment": site.named(each)}
            for order, each in enumerate(described.compute, 1)
        ],
        "jobStateTimeLimitActions": [
            {"reason": reason, "state": "RUNNABLE", "maxTimeSeconds": seconds, "action": "CANCEL"}
            for reason, seconds in sorted(described.limits_seconds.items())
        ],
        "tags": site.tagged(name),
    }
    if policy_arn:
        request["schedulingPolicyArn"] = policy_arn
    return request


def scheduling_policy(site: Site, name: str, share: FairShare) -> dict[str, Any]:
    """The CreateSchedulingPolicy arguments for the queue `name`."""
    return {
        "name": site.named(name),
        "fairsharePolicy": {
            "shareDecaySeconds": share.decay_seconds,
            "computeReservation": share.reservation,
            "shareDistribution": [
                {"shareIdentifier": each, "weightFactor": weight_factor(weight)}
                for each, weight in sorted(share.shares.items())
            ],
        },
        "tags": site.tagged(name),
    }


def weight_factor(weight: float) -> float:
    """AWS's factor for a weight of ours: its inverse, of at most four decimals."""
    low, high = _WEIGHTS
    return min(high, max(low, round(1 / weight, 4)))


# --- compute --------------------------------------------------------------------------------------
# Compute environments, queues and scheduling policies of AWS Batch: read, make, change, delete.
#
# All of these calls are answered before they are carried out; the caller reads again until a status
# has settled. The requests are made in `resources.py`.


Detail = dict[str, Any]  # as AWS gives it

_UNFINISHED = tuple(status.value for status in JobStatus if not status.is_terminal)
_MAX_ARNS = 100  # of one DescribeSchedulingPolicies


class ComputeApi:
    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def _client(self) -> Any:
        return self._session.client("batch")

    # --- reading: by name -------------------------------------------------------------------

    def environments(self) -> dict[str, Detail]:
        return self._all(
            "describe_compute_environments", "computeEnvironments", "computeEnvironmentName"
        )

    def environment(self, name: str) -> Detail | None:
        with translated("DescribeComputeEnvironments"):
            found = self._client.describe_compute_environments(computeEnvironments=[name])
            return _living(found["computeEnvironments"])

    def queues(self) -> dict[str, Detail]:
        return self._all("describe_job_queues", "jobQueues", "jobQueueName")

    def queue(self, name: str) -> Detail | None:
        with translated("DescribeJobQueues"):
            return _living(self._client.describe_job_queues(jobQueues=[name])["jobQueues"])

    def unfinished(self, queue: str) -> int:
        """How many jobs of a queue have not ended: at least so many, for it reads one page each."""
        count = 0
        for status in _UNFINISHED:
            with translated("ListJobs"):
                found = self._client.list_jobs(jobQueue=queue, jobStatus=status)
                count += len(found["jobSummaryList"])
        return count

    def policies(self) -> dict[str, Detail]:
        with translated("ListSchedulingPolicies"):
            pages = self._client.get_paginator("list_scheduling_policies").paginate()
            arns = [found["arn"] for page in pages for found in page["schedulingPolicies"]]
        return {detail["name"]: detail for detail in self._described(arns)}

    def _described(self, arns: list[str]) -> Iterable[Detail]:
        for start in range(0, len(arns), _MAX_ARNS):
            with translated("DescribeSchedulingPolicies"):
                asked = arns[start : start + _MAX_ARNS]
                yield from self._client.describe_scheduling_policies(arns=asked)[
                    "schedulingPolicies"
                ]

    def _all(self, operation: str, member: str, key: str) -> dict[str, Detail]:
        name = "".join(word.capitalize() for word in operation.split("_"))
        with translated(name):
            pages = self._client.get_paginator(operation).paginate()
            found = [detail for page in pages for detail in page[member]]
        return {detail[key]: detail for detail in found if detail.get("status") != "DELETED"}

    # --- changing ---------------------------------------------------------------------------

    def create_environment(self, request: Mapping[str, Any]) -> None:
        with translated("CreateComputeEnvironment"):
            self._client.create_compute_environment(**request)

    def update_environment(self, request: Mapping[str, Any]) -> None:
        with translated("UpdateComputeEnvironment"):
            self._client.update_compute_environment(**request)

    def delete_environment(self, name: str) -> None:
        with translated("DeleteComputeEnvironment"):
            self._client.delete_compute_environment(computeEnvironment=name)

    def create_queue(self, request: Mapping[str, Any]) -> None:
        with translated("CreateJobQueue"):
            self._client.create_job_queue(**request)

    def update_queue(self, request: Mapping[str, Any]) -> None:
        with translated("UpdateJobQueue"):
            self._client.update_job_queue(**request)

    def delete_queue(self, name: str) -> None:
        with translated("DeleteJobQueue"):
            self._client.delete_job_queue(jobQueue=name)

    def create_policy(self, request: Mapping[str, Any]) -> None:
        with translated("CreateSchedulingPolicy"):
            self._client.create_scheduling_policy(**request)

    def update_policy(self, arn: str, fairshare: Mapping[str, Any]) -> None:
        with translated("UpdateSchedulingPolicy"):
            self._client.update_scheduling_policy(arn=arn, fairsharePolicy=dict(fairshare))

    def delete_policy(self, arn: str) -> None:
        with translated("DeleteSchedulingPolicy"):
            self._client.delete_scheduling_policy(arn=arn)

    def tag(self, arn: str, tags: Mapping[str, str]) -> None:
        with translated("TagResource"):
            self._client.tag_resource(resourceArn=arn, tags=dict(tags))

    def is_still_related(self, error: ServiceError) -> bool:
        """True when AWS refused a deletion because what came before it has not settled yet."""
        return error.code == "ClientException" and any(
            text in error.message for text in ("existing JobQueue relationship", "being modified")
        )


def _living(details: list[Detail]) -> Detail | None:
    return details[0] if details and details[0].get("status") != "DELETED" else None


# --- consumables ----------------------------------------------------------------------------------
# Consumable resources: what holds the width of an array, which has no such limit of its own.
#
# Source: AWS Batch User Guide, "Resource-aware scheduling".


_EXISTS = "already exists"
_TOO_OLD = "boto3 here is too old for consumable resources: pip install -U 'boto3>=1.37'"


class Consumables:
    """Each method is one call, `hold` sometimes two. All raise what `translated` makes of them."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def hold(self, name: str, quantity: int, tags: dict[str, str]) -> None:
        """Have `quantity` of the resource `name` from now on, of which ended jobs give theirs back.

        What jobs hold already they keep, even above the total.
        """
        client = self._client
        try:
            with translated("CreateConsumableResource"):
                client.create_consumable_resource(
                    consumableResourceName=name,
                    totalQuantity=quantity,
                    resourceType="REPLENISHABLE",
                    tags=tags,
                )
        except ServiceError as error:
            if _EXISTS not in error.message.lower():
                raise
            with translated("UpdateConsumableResource"):
                client.update_consumable_resource(
                    consumableResource=name, operation="SET", quantity=quantity
                )

    def release(self, name: str) -> None:
        """Delete it. Refused while a job that has not ended asks for it."""
        with translated("DeleteConsumableResource"):
            self._client.delete_consumable_resource(consumableResource=name)

    @property
    def _client(self) -> Any:
        client = self._session.client("batch")
        if not hasattr(client, "create_consumable_resource"):
            raise ServiceError("CreateConsumableResource", "SDK", _TOO_OLD, 0)
        return client
