"""Causes that lie in hosts: that are not there, cannot be had, or never join. Pure.

An alarm needs time: a host takes minutes to boot, and AWS Batch says worrying things meanwhile.
"""

import re

from batchml.model.explanation import Activity, Explanation
from batchml.ops.explain.seen import BOOT, Look, Seen
from batchml.ops.explain.words import minutes

_DAY = 24 * 3600_000

# What Auto Scaling says when EC2 refuses; EC2 API Reference, "Error codes".
_QUOTA = re.compile(
    r"vCPU (?:capacity than your current vCPU )?limit(?: of (\d+))?|VcpuLimitExceeded|"
    r"MaxSpotInstanceCountExceeded|InstanceLimitExceeded",
    re.IGNORECASE,
)
_CAPACITY = re.compile(
    r"InsufficientInstanceCapacity|InsufficientCapacity|do not have sufficient|"
    r"UnfulfillableCapacity|no Spot capacity",
    re.IGNORECASE,
)


def service_role(seen: Seen) -> Explanation | None:
    """MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS"""
    said = seen.text.startswith("MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS")
    if not said or Look.ENVIRONMENTS not in seen.asked:
        return None
    evidence = [f"AWS Batch says: {seen.text}"]
    for each in seen.environments:
        evidence.append(f"{each.name}: {each.service_role or 'the service-linked role'}")
        if each.status_reason and each.status_reason != "ComputeEnvironment Healthy":
            evidence.append(f"{each.name} says: {each.status_reason}")
    return Explanation(
        "service-role", "The role by which AWS Batch starts hosts may not do what it needs.",
        tuple(evidence), "Let setup put the roles right.", seen.words.batchml("setup", "--plan"),
    )  # fmt: skip


def configuration(seen: Seen) -> Explanation | None:
    """MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION_UNSUPPORTED: types, AMI and region must agree."""
    if not seen.text.startswith("MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION"):
        return None
    if Look.AGAIN not in seen.asked and not seen.words.is_local:
        return None
    evidence = [f"AWS Batch says: {seen.text}"]
    verdict = "AWS cannot start the hosts of its queue as they are described"
    asked = sorted({name for each in seen.usable for name in each.instance_types})
    if seen.types is not None:
        there = {each.name for each in seen.types} | {e.name.partition(".")[0] for e in seen.types}
        absent = [name for name in asked if name not in there]
        known = sorted({a for each in seen.types for a in each.architectures})
        if absent:
            verdict = f"the region has no {', '.join(absent)}"
            evidence.append(f"asked for: {', '.join(asked)}")
        elif seen.architecture is not None and seen.architecture not in known:
            image = seen.architecture or "not there"
            verdict = f"the AMI is {image}, and the instance types are {', '.join(known)}"
    return Explanation(
        "instance-configuration", f"{verdict[0].upper()}{verdict[1:]}.", tuple(evidence),
        "Change instance_types or ami in batchml.toml, and run setup.",
        seen.words.batchml("compute", "list"),
    )  # fmt: skip


def quota(seen: Seen) -> Explanation | None:
    """The account's quota of vCPUs is reached, or 0 as in every new account for GPUs."""
    found = _failed(seen, _QUOTA)
    if found is None:
        return None
    matched = _QUOTA.search(found.message)
    limit = matched[1] if matched else None
    known = f" of {limit} vCPUs" if limit else ""
    return Explanation(
        "quota", f"The account's quota{known} for such instances does not let a host start.",
        (_said(found, seen.now),), "Ask AWS for a higher quota; doctor names it.",
        seen.words.batchml("doctor"),
    )  # fmt: skip


def no_capacity(seen: Seen) -> Explanation | None:
    """CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY, or Auto Scaling says it."""
    found = _failed(seen, _CAPACITY)
    if not seen.text.startswith("CAPACITY") and found is None:
        return None
    evidence = [f"AWS Batch says: {seen.text}"] if seen.text else []
    evidence += [_said(found, seen.now)] if found else []
    evidence.append(f"waits for {minutes(seen.waited)}; AWS Batch goes on trying")
    types = sorted({name for each in seen.usable for name in each.instance_types})
    if seen.words.is_local:
        return Explanation(
            "no-capacity", "The server was started with --chaos no-capacity: no run is placed.",
            tuple(evidence), "It ends by itself.", "batchml local status", is_problem=False,
        )  # fmt: skip
    several = "more instance types, or one that is not spot" if _is_spot(seen) else "more types"
    return Explanation(
        "no-capacity", f"AWS has no {' or '.join(types) or 'such'} instance free at the moment.",
        tuple(evidence), f"Wait, or give the compute environment {several}.",
        seen.words.batchml("compute", "list"),
        is_problem=not seen.is_early,
    )  # fmt: skip


def launch_failed(seen: Seen) -> Explanation | None:
    """EC2 refuses a host for a reason that is none of the above: AWS's words have to do."""
    found = _failed(seen, re.compile(""))
    if found is None or _QUOTA.search(found.message) or _CAPACITY.search(found.message):
        return None
    return Explanation(
        "launch-failed", "EC2 refuses to start a host for it.", (_said(found, seen.now),),
        "Change what AWS names in batchml.toml, and run setup.",
        seen.words.batchml("setup", "--plan"),
    )  # fmt: skip


def not_joining(seen: Seen) -> Explanation | None:
    """Instances are there, and none has joined the cluster: long enough after their start."""
    if seen.hosts != 0 or seen.is_early or not _desired(seen):
        return None
    began = [each.at for each in _launches(seen) if each.status == "Successful"]
    if not began or seen.now - max(began) < BOOT:
        return None
    return Explanation(
        "hosts-not-joining", "Hosts were started for it, and none has joined the cluster.",
        (
            f"vCPUs that AWS Batch has asked for: {_desired(seen)}",
            "hosts in the cluster: 0",
            f"the newest host was launched {minutes(seen.now - max(began))} ago",
        ),
        "Hosts need a way out (NAT or VPC endpoints for ecs, ecr, s3, logs), the ECS policy on "
        "their role, and an AMI with the ECS agent.",
        seen.words.batchml("setup", "--plan"),
    )  # fmt: skip


def starting(seen: Seen) -> Explanation | None:
    """Nothing is wrong so far: a host is on its way."""
    if seen.words.is_local or not seen.environments:
        return None
    launched = [
        each for each in _launches(seen) if seen.now - each.at < BOOT and each.status != "Failed"
    ]
    if not seen.is_early and not launched:
        return None
    evidence = [f"waits for {minutes(seen.waited)}; a host takes up to {minutes(BOOT)} to start"]
    evidence += [f"vCPUs that AWS Batch has asked for: {_desired(seen)}"] if _desired(seen) else []
    evidence += [f"hosts in the cluster: {seen.hosts}"] if seen.hosts is not None else []
    if launched:
        evidence.append(f"a host was launched {minutes(seen.now - launched[0].at)} ago")
    if seen.text:
        evidence.append(f"AWS Batch says so while hosts start, too: {seen.text}")
    return Explanation(
        "host-starting", "It is next, and a host is being started for it.", tuple(evidence),
        "Wait; ask again when that time is over.",
        seen.words.batchml("explain", seen.run.job_id), is_problem=False,
    )  # fmt: skip


def none_asked_for(seen: Seen) -> Explanation | None:
    """AWS Batch has not even asked for a host, long after it should have."""
    managed = [each for each in seen.usable if each.is_managed]
    if seen.words.is_local or not managed or _desired(seen) or seen.hosts or seen.is_early:
        return None
    listed = tuple(f"{each.name}: {each.status}, 0 vCPUs asked for" for each in managed)
    text = (f"AWS Batch says: {seen.text}",) if seen.text else ()
    return Explanation(
        "no-hosts", f"AWS Batch has asked for no host in {minutes(seen.waited)}, and says no "
        "reason.", (*listed, *text),
        "The service role, the launch template or the subnets may be at fault.",
        seen.words.batchml("doctor"),
    )  # fmt: skip


def undetermined(seen: Seen) -> Explanation:
    """Said when nothing that can be asked explains it."""
    evidence = [f"AWS Batch says: {seen.text}"] if seen.text else ["AWS Batch says no reason"]
    evidence.append(f"waits for {minutes(seen.waited)}")
    evidence += [f"vCPUs that AWS Batch has asked for: {_desired(seen)}"] if _desired(seen) else []
    if seen.hosts is not None:
        evidence.append(f"hosts in the cluster: {seen.hosts}")
    return Explanation(
        "undetermined", "Nothing that AWS tells explains why it waits.", tuple(evidence),
        "See what its queue and compute environments say.",
        seen.words.batchml("compute", "list"),
        # Where its place is not known it may simply wait for its turn.
        is_problem=not seen.is_early and (bool(seen.text) or seen.place == 0),
    )  # fmt: skip


def _desired(seen: Seen) -> int:
    return sum(each.desired_vcpus for each in seen.usable)


def _is_spot(seen: Seen) -> bool:
    return any(each.is_spot for each in seen.usable)


def _failed(seen: Seen, pattern: re.Pattern[str]) -> Activity | None:
    """The newest launch of today, if it failed so: a host that came afterwards settles what was."""
    for each in _launches(seen):
        if each.status == "Failed" and seen.now - each.at < _DAY:
            return each if pattern.search(each.message) else None
        if each.status == "Successful":
            return None
    return None


def _launches(seen: Seen) -> list[Activity]:
    """What Auto Scaling did to start hosts, the newest first; what it ended is no matter here."""
    return [each for each in seen.activities or () if each.description.startswith("Launching")]


def _said(activity: Activity, now: int) -> str:
    return f"Auto Scaling said {minutes(now - activity.at)} ago: {activity.message}"
