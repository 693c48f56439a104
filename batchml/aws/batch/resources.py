"""AWS Batch's compute environments, queues, scheduling policies and consumable resources.

On `local`, the requests are the same without references to other AWS services.

Source: AWS Batch API reference, ComputeResource, CreateJobQueue, FairsharePolicy; AWS Batch User
Guide, "Resource-aware scheduling".
"""

from collections.abc import Iterable, Mapping
from typing import Any

from batchml.aws.ec2 import LaunchTemplate
from batchml.aws.errors import translate_errors
from batchml.aws.naming import Site
from batchml.aws.session import Session
from batchml.errors import ConfigError, ServiceError
from batchml.model.environment import Compute, FairShare, Queue
from batchml.model.run import JobStatus

CLUSTER_GROUP = "cluster"  # in batchml.toml: a placement group of the environment's own

_LOCAL_ROLE = "ecsInstanceRole"  # required by the API; `local` has no instances that use it
_WEIGHTS = (0.0001, 999.9999)  # of weightFactor


def compute_environment_request(
    site: Site, name: str, compute: Compute, template: LaunchTemplate | None
) -> dict[str, Any]:
    """The CreateComputeEnvironment request. `template` is None on `local` only.

    Without a service role, AWS Batch uses its service-linked role, which updates of instances need.
    """
    return {
        "computeEnvironmentName": site.named(name),
        "type": "MANAGED",
        "state": "ENABLED",
        "computeResources": _compute_resources(site, name, compute, template),
        "tags": site.tagged(name, compute.tags),
    }


def _compute_resources(
    site: Site, name: str, compute: Compute, template: LaunchTemplate | None
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
    if compute.spot:  # AWS's default is explicit, so that removing another value restores it
        found["bidPercentage"] = compute.bid_percentage or 100
    if site.is_local:
        return found | {"instanceRole": _LOCAL_ROLE}
    found |= {
        "securityGroupIds": list(site.security_groups),
        "instanceRole": site.instance_profile,
        "ec2Configuration": [machine_image(site, compute)],
    }
    if template is not None:
        # A fixed version: only `setup` changes it. The template has the tags, too.
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


def machine_image(site: Site, compute: Compute) -> dict[str, str]:
    """The machine image, as an Ec2Configuration.

    The AMI that we build has the NVIDIA driver and is for x86. So the environment's choice of it
    counts for compute environments with x86 and GPUs only; a compute environment's own choice
    always counts. Raises ConfigError before the AMI is built.
    """
    kind = "ECS_AL2023_NVIDIA" if compute.has_gpus else "ECS_AL2023"
    chosen = compute.ami or site.ami
    if chosen == "build" and not compute.ami and (compute.is_arm or not compute.has_gpus):
        chosen = "ecs-gpu"
    if chosen == "ecs-gpu":
        return {"imageType": kind}
    if chosen == "build" and not site.built_image:
        raise ConfigError(site.env, ["ami: the image is not built yet. Run batchml setup."])
    image_id = site.built_image if chosen == "build" else chosen
    return {"imageType": kind, "imageIdOverride": image_id}


def queue_request(site: Site, name: str, described: Queue, policy_arn: str = "") -> dict[str, Any]:
    """The CreateJobQueue request. `policy_arn`: its fair-share policy."""
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


def scheduling_policy_request(site: Site, name: str, share: FairShare) -> dict[str, Any]:
    """The CreateSchedulingPolicy request for the queue `name`."""
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
    """AWS's factor for a weight of batchml.toml: its inverse, with four decimals."""
    low, high = _WEIGHTS
    return min(high, max(low, round(1 / weight, 4)))


# --- Calls ----------------------------------------------------------------------------------------
# AWS answers before it has carried out a change: the caller reads again until the status is final.


Detail = dict[str, Any]  # in AWS's form

_UNFINISHED = tuple(status.value for status in JobStatus if not status.is_terminal)
_MAX_ARNS = 100  # of one DescribeSchedulingPolicies


class ComputeApi:
    """Reads, creates, changes and deletes compute environments, queues and scheduling policies."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def _client(self) -> Any:
        return self._session.client("batch")

    # --- Read: by name ----------------------------------------------------------------------

    def environments(self) -> dict[str, Detail]:
        return self._all(
            "describe_compute_environments", "computeEnvironments", "computeEnvironmentName"
        )

    def environment(self, name: str) -> Detail | None:
        with translate_errors("DescribeComputeEnvironments"):
            found = self._client.describe_compute_environments(computeEnvironments=[name])
            return _living(found["computeEnvironments"])

    def queues(self) -> dict[str, Detail]:
        return self._all("describe_job_queues", "jobQueues", "jobQueueName")

    def queue(self, name: str) -> Detail | None:
        with translate_errors("DescribeJobQueues"):
            return _living(self._client.describe_job_queues(jobQueues=[name])["jobQueues"])

    def unfinished(self, queue: str) -> int:
        """The number of a queue's jobs that have not ended. It reads one page for each state."""
        count = 0
        for status in _UNFINISHED:
            with translate_errors("ListJobs"):
                found = self._client.list_jobs(jobQueue=queue, jobStatus=status)
                count += len(found["jobSummaryList"])
        return count

    def policies(self) -> dict[str, Detail]:
        with translate_errors("ListSchedulingPolicies"):
            pages = self._client.get_paginator("list_scheduling_policies").paginate()
            arns = [found["arn"] for page in pages for found in page["schedulingPolicies"]]
        return {detail["name"]: detail for detail in self._described(arns)}

    def _described(self, arns: list[str]) -> Iterable[Detail]:
        for start in range(0, len(arns), _MAX_ARNS):
            with translate_errors("DescribeSchedulingPolicies"):
                asked = arns[start : start + _MAX_ARNS]
                yield from self._client.describe_scheduling_policies(arns=asked)[
                    "schedulingPolicies"
                ]

    def _all(self, operation: str, member: str, key: str) -> dict[str, Detail]:
        name = "".join(word.capitalize() for word in operation.split("_"))
        with translate_errors(name):
            pages = self._client.get_paginator(operation).paginate()
            found = [detail for page in pages for detail in page[member]]
        return {detail[key]: detail for detail in found if detail.get("status") != "DELETED"}

    # --- Change -----------------------------------------------------------------------------

    def create_environment(self, request: Mapping[str, Any]) -> None:
        with translate_errors("CreateComputeEnvironment"):
            self._client.create_compute_environment(**request)

    def update_environment(self, request: Mapping[str, Any]) -> None:
        with translate_errors("UpdateComputeEnvironment"):
            self._client.update_compute_environment(**request)

    def delete_environment(self, name: str) -> None:
        with translate_errors("DeleteComputeEnvironment"):
            self._client.delete_compute_environment(computeEnvironment=name)

    def create_queue(self, request: Mapping[str, Any]) -> None:
        with translate_errors("CreateJobQueue"):
            self._client.create_job_queue(**request)

    def update_queue(self, request: Mapping[str, Any]) -> None:
        with translate_errors("UpdateJobQueue"):
            self._client.update_job_queue(**request)

    def delete_queue(self, name: str) -> None:
        with translate_errors("DeleteJobQueue"):
            self._client.delete_job_queue(jobQueue=name)

    def create_policy(self, request: Mapping[str, Any]) -> None:
        with translate_errors("CreateSchedulingPolicy"):
            self._client.create_scheduling_policy(**request)

    def update_policy(self, arn: str, fairshare: Mapping[str, Any]) -> None:
        with translate_errors("UpdateSchedulingPolicy"):
            self._client.update_scheduling_policy(arn=arn, fairsharePolicy=dict(fairshare))

    def delete_policy(self, arn: str) -> None:
        with translate_errors("DeleteSchedulingPolicy"):
            self._client.delete_scheduling_policy(arn=arn)

    def tag(self, arn: str, tags: Mapping[str, str]) -> None:
        with translate_errors("TagResource"):
            self._client.tag_resource(resourceArn=arn, tags=dict(tags))

    def is_still_related(self, error: ServiceError) -> bool:
        """Whether AWS refused a deletion because an earlier change has not finished yet."""
        return error.code == "ClientException" and any(
            text in error.message for text in ("existing JobQueue relationship", "being modified")
        )


def _living(details: list[Detail]) -> Detail | None:
    return details[0] if details and details[0].get("status") != "DELETED" else None


# --- Consumable resources -------------------------------------------------------------------------
# They limit the number of an array's children that run at the same time.


_EXISTS = "already exists"
_TOO_OLD = "This boto3 is too old for consumable resources: pip install -U 'boto3>=1.37'"


class ConsumableApi:
    """Each method is one call, `hold` at most two. They raise what `translate_errors` does."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def set_total(self, name: str, quantity: int, tags: dict[str, str]) -> None:
        """Create the resource `name`, or set its quantity. Jobs return their part at their end.

        Running jobs keep their part, even above the new total.
        """
        client = self._client
        try:
            with translate_errors("CreateConsumableResource"):
                client.create_consumable_resource(
                    consumableResourceName=name,
                    totalQuantity=quantity,
                    resourceType="REPLENISHABLE",
                    tags=tags,
                )
        except ServiceError as error:
            if _EXISTS not in error.message.lower():
                raise
            with translate_errors("UpdateConsumableResource"):
                client.update_consumable_resource(
                    consumableResource=name, operation="SET", quantity=quantity
                )

    def delete(self, name: str) -> None:
        """Delete the resource. AWS refuses while a job that has not ended needs it."""
        with translate_errors("DeleteConsumableResource"):
            self._client.delete_consumable_resource(consumableResource=name)

    @property
    def _client(self) -> Any:
        client = self._session.client("batch")
        if not hasattr(client, "create_consumable_resource"):
            raise ServiceError("CreateConsumableResource", "SDK", _TOO_OLD, 0)
        return client
