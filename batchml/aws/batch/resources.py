"""AWS Batch's compute environments, queues, scheduling policies and consumable resources.

On `local`, the requests are the same, but without references to other AWS services.

Source: AWS Batch API reference, ComputeResource, CreateJobQueue, FairsharePolicy; AWS Batch User
Guide, "Resource-aware scheduling".
"""

from collections.abc import Iterable, Mapping
from typing import Any

from batchml.aws.ec2 import LaunchTemplate
from batchml.aws.errors import call, read_entries
from batchml.aws.naming import NEURON_IMAGE, Site, unknown_output
from batchml.aws.session import Session
from batchml.errors import ConfigError, ServiceError
from batchml.model.environment import Compute, FairShare, Queue
from batchml.model.fabric import fabric_layout
from batchml.model.run import JobStatus

CLUSTER_GROUP = "cluster"  # in batchml.toml: the placement group that `setup` creates

_LOCAL_ROLE = "ecsInstanceRole"  # the API requires a role; `local` has no instances that use it
_WEIGHTS = (0.0001, 999.9999)  # the limits of weightFactor


def compute_environment_request(
    site: Site, name: str, compute: Compute, template: LaunchTemplate | None
) -> dict[str, Any]:
    """The CreateComputeEnvironment request. `template` is None on `local` only.

    Without a service role, AWS Batch uses its service-linked role. Updates that replace instances
    need that role.
    """
    tags = site.tagged(name, compute.tags)
    if has_neuron_image(site, compute):
        tags[NEURON_IMAGE] = machine_image(site, compute)["imageIdOverride"]
    return {
        "computeEnvironmentName": site.named(name),
        "type": "MANAGED",
        "state": "ENABLED",
        "computeResources": _compute_resources(site, name, compute, template),
        "tags": tags,
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
    if compute.spot:  # always set, so that AWS's default returns when the user's value is removed
        found["bidPercentage"] = compute.bid_percentage or 100
    if site.is_local:
        return found | {"instanceRole": _LOCAL_ROLE}
    found |= {
        "securityGroupIds": list(site.security_groups),
        "instanceRole": site.instance_profile,
        "ec2Configuration": [machine_image(site, compute)],
    }
    if template is not None:
        # A fixed version, which only `setup` changes. The template also has the tags.
        found["launchTemplate"] = {
            "launchTemplateName": template.name,
            "version": str(template.version),
        }
    group = placement_group_name(site, name, compute)
    if group:
        found["placementGroup"] = group
    return found


def placement_group_name(site: Site, name: str, compute: Compute) -> str:
    """The placement group of a compute environment; "" for none."""
    given = compute.placement_group or default_group(site, compute)
    return site.named(name) if given == CLUSTER_GROUP else given


def default_group(site: Site, compute: Compute) -> str:
    """`placement_group` of a compute environment that names none: hosts with EFA are together.

    Reserved hosts have the placement of their reservation: EC2 starts no host of a placement group
    in a reservation that was made without it, and the hosts of a capacity block are together
    anyway. Source: EC2 User Guide, "Capacity Reservations in cluster placement groups".
    """
    has_efa = fabric_layout(compute, site.ami) is not None
    return CLUSTER_GROUP if has_efa and not compute.is_reserved else ""


def machine_image(site: Site, compute: Compute) -> dict[str, str]:
    """The AMI of a compute environment, as an Ec2Configuration.

    The AMI that we build has the NVIDIA driver and is for x86. So `ami = "build"` of an environment
    applies only to its compute environments with x86 and GPUs or EFA; `ami` of a compute
    environment always applies. AWS Batch has no image type for Neuron chips, so AWS's AMI for them
    is named by its id. Raises ConfigError if the AMI is not built yet.
    """
    kind = "ECS_AL2023_NVIDIA" if compute.has_gpus else "ECS_AL2023"
    chosen = compute.ami or site.ami
    needs_ours = compute.has_gpus or fabric_layout(compute, site.ami) is not None
    if chosen == "build" and not compute.ami and (compute.is_arm or not needs_ours):
        chosen = "ecs-gpu"
    if has_neuron_image(site, compute):
        image = site.neuron_image or unknown_output("ssm", "NeuronImageId")
        return {"imageType": kind, "imageIdOverride": image}
    if chosen == "ecs-gpu":
        return {"imageType": kind}
    if chosen == "build" and not site.built_image:
        raise ConfigError(site.env, ["ami: the image is not built yet. Run batchml setup."])
    image_id = site.built_image if chosen == "build" else chosen
    return {"imageType": kind, "imageIdOverride": image_id}


def has_neuron_image(site: Site, compute: Compute) -> bool:
    """Whether hosts start from AWS's AMI for Neuron chips, and not from the user's own."""
    chosen = compute.ami or site.ami
    return compute.has_neurons and not site.is_local and chosen in ("ecs-gpu", "build")


def neuron_image_of(detail: Mapping[str, Any]) -> str:
    """AWS's AMI for Neuron chips from which hosts of a compute environment start; "" for none.

    `detail`: the compute environment by DescribeComputeEnvironments. The user's own AMI is none.
    """
    chosen = (detail.get("tags") or {}).get(NEURON_IMAGE, "")
    entries = (detail.get("computeResources") or {}).get("ec2Configuration") or ()
    return chosen if chosen in [each.get("imageIdOverride") for each in entries] else ""


def queue_request(site: Site, name: str, queue: Queue, policy_arn: str = "") -> dict[str, Any]:
    """The CreateJobQueue request. `policy_arn` is the ARN of its fair-share policy."""
    request: dict[str, Any] = {
        "jobQueueName": site.named(name),
        "state": "ENABLED",
        "priority": queue.priority,
        "computeEnvironmentOrder": [
            {"order": order, "computeEnvironment": site.named_compute(each)}
            for order, each in enumerate(queue.compute, 1)
        ],
        "jobStateTimeLimitActions": [
            {"reason": reason, "state": "RUNNABLE", "maxTimeSeconds": seconds, "action": "CANCEL"}
            for reason, seconds in sorted(queue.limits_seconds.items())
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
    """AWS's weightFactor for a weight of batchml.toml: the inverse, with four decimals."""
    low, high = _WEIGHTS
    return min(high, max(low, round(1 / weight, 4)))


# --- Calls ----------------------------------------------------------------------------------------
# AWS answers before it has carried out a change, so callers poll until the status is final.


Detail = dict[str, Any]  # AWS's JSON for a resource

_UNFINISHED = tuple(status.value for status in JobStatus if not status.is_terminal)
_MAX_ARNS = 100  # in one DescribeSchedulingPolicies


class ComputeApi:
    """Reads, creates, changes and deletes compute environments, queues and scheduling policies."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def _client(self) -> Any:
        return self._session.client("batch")

    # --- Read, by name ----------------------------------------------------------------------

    def environments(self) -> dict[str, Detail]:
        return self._all(
            "DescribeComputeEnvironments", "computeEnvironments", "computeEnvironmentName"
        )

    def environment(self, name: str) -> Detail | None:
        request = {"computeEnvironments": [name]}
        answer = call(self._client, "DescribeComputeEnvironments", **request)
        return _existing(answer["computeEnvironments"])

    def queues(self) -> dict[str, Detail]:
        return self._all("DescribeJobQueues", "jobQueues", "jobQueueName")

    def queue(self, name: str) -> Detail | None:
        return _existing(call(self._client, "DescribeJobQueues", jobQueues=[name])["jobQueues"])

    def unfinished(self, queue: str) -> int:
        """The number of a queue's jobs that have not ended, from the first page of each state.

        A job may change its state between two pages and be in both: it counts once.
        """
        found = set()
        for status in _UNFINISHED:
            answer = call(self._client, "ListJobs", jobQueue=queue, jobStatus=status)
            found |= {job["jobId"] for job in answer["jobSummaryList"]}
        return len(found)

    def policies(self) -> dict[str, Detail]:
        entries = read_entries(self._client, "ListSchedulingPolicies", "schedulingPolicies")
        arns = [entry["arn"] for entry in entries]
        return {detail["name"]: detail for detail in self._described(arns)}

    def _described(self, arns: list[str]) -> Iterable[Detail]:
        for start in range(0, len(arns), _MAX_ARNS):
            some = arns[start : start + _MAX_ARNS]
            answer = call(self._client, "DescribeSchedulingPolicies", arns=some)
            yield from answer["schedulingPolicies"]

    def _all(self, operation: str, member: str, key: str) -> dict[str, Detail]:
        found = read_entries(self._client, operation, member)
        return {detail[key]: detail for detail in found if detail.get("status") != "DELETED"}

    # --- Change -----------------------------------------------------------------------------

    def create_environment(self, request: Mapping[str, Any]) -> None:
        call(self._client, "CreateComputeEnvironment", **request)

    def update_environment(self, request: Mapping[str, Any]) -> None:
        call(self._client, "UpdateComputeEnvironment", **request)

    def delete_environment(self, name: str) -> None:
        call(self._client, "DeleteComputeEnvironment", computeEnvironment=name)

    def create_queue(self, request: Mapping[str, Any]) -> None:
        call(self._client, "CreateJobQueue", **request)

    def update_queue(self, request: Mapping[str, Any]) -> None:
        call(self._client, "UpdateJobQueue", **request)

    def delete_queue(self, name: str) -> None:
        call(self._client, "DeleteJobQueue", jobQueue=name)

    def create_policy(self, request: Mapping[str, Any]) -> None:
        call(self._client, "CreateSchedulingPolicy", **request)

    def update_policy(self, arn: str, fairshare: Mapping[str, Any]) -> None:
        call(self._client, "UpdateSchedulingPolicy", arn=arn, fairsharePolicy=dict(fairshare))

    def delete_policy(self, arn: str) -> None:
        call(self._client, "DeleteSchedulingPolicy", arn=arn)

    def tag(self, arn: str, tags: Mapping[str, str]) -> None:
        call(self._client, "TagResource", resourceArn=arn, tags=dict(tags))

    def is_still_related(self, error: ServiceError) -> bool:
        """Whether AWS refused a deletion only because an earlier change has not finished yet."""
        return error.code == "ClientException" and any(
            text in error.message for text in ("existing JobQueue relationship", "being modified")
        )


def _existing(details: list[Detail]) -> Detail | None:
    return details[0] if details and details[0].get("status") != "DELETED" else None


# --- Consumable resources -------------------------------------------------------------------------
# They limit how many children of an array run at the same time.


_EXISTS = "already exists"
_TOO_OLD = "This boto3 is too old for consumable resources: pip install -U 'boto3>=1.37'"


class ConsumableApi:
    """Consumable resources: each method is one or two calls. They raise what `call` does."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def set_total(self, name: str, quantity: int, tags: dict[str, str]) -> None:
        """Create the resource `name`, or set its total. Jobs return their quantity at their end.

        Running jobs keep their quantity, even if it exceeds the new total.
        """
        client = self._client
        try:
            call(
                client,
                "CreateConsumableResource",
                consumableResourceName=name,
                totalQuantity=quantity,
                resourceType="REPLENISHABLE",
                tags=tags,
            )
        except ServiceError as error:
            if _EXISTS not in error.message.lower():
                raise
            request = {"consumableResource": name, "operation": "SET", "quantity": quantity}
            call(client, "UpdateConsumableResource", **request)

    def delete(self, name: str) -> None:
        """Delete the resource. AWS refuses while a job that has not ended needs it."""
        call(self._client, "DeleteConsumableResource", consumableResource=name)

    @property
    def _client(self) -> Any:
        client = self._session.client("batch")
        if not hasattr(client, "create_consumable_resource"):
            raise ServiceError("CreateConsumableResource", "SDK", _TOO_OLD, 0)
        return client
