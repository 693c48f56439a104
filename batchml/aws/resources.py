"""Compute environments, queues and scheduling policies -> AWS request arguments. Pure.

On `local` the same requests are made without what refers to other services of AWS.

Source: AWS Batch API reference, ComputeResource, CreateJobQueue, FairsharePolicy.
"""

from typing import Any

from batchml.aws.launch import Template
from batchml.aws.site import Site
from batchml.errors import ConfigError
from batchml.model.environment import Compute, FairShare, Queue

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
