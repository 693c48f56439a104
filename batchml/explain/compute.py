"""Why a run waits: causes in hosts, in the queue and in its compute environments. Pure.

Each function returns its explanation, or None if it is not the cause. A cause counts only after
some time: a host takes minutes to boot, and meanwhile AWS Batch reports problems that pass.
"""

import re

from batchml.explain.clues import BOOT, AwsQuestion, RunObservations, is_usable
from batchml.explain.suggest import (
    CommandWriter,
    count,
    describe_memory,
    describe_request,
    describe_time,
    name_and_id,
)
from batchml.model.explanation import Explanation, ScalingActivity
from batchml.model.run import CANNOT_START, JobStatus

_DAY = 24 * 3600_000

_HOST_NEEDS = (
    "Hosts need network access (NAT or VPC endpoints for ecs, ecr, s3, logs), the ECS policy on "
    "their role, and an AMI with the ECS agent."
)

# Auto Scaling's messages when EC2 refuses a launch; EC2 API Reference, "Error codes".
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


def service_role(seen: RunObservations) -> Explanation | None:
    """MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS"""
    is_reported = seen.text.startswith("MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS")
    if not is_reported or AwsQuestion.ENVIRONMENTS not in seen.asked:
        return None
    evidence = [f"AWS Batch says: {seen.text}"]
    for each in seen.environments:
        evidence.append(f"{each.name}: {each.service_role or 'the service-linked role'}")
        if each.status_reason and each.status_reason != "ComputeEnvironment Healthy":
            evidence.append(f"{each.name} says: {each.status_reason}")
    return Explanation(
        "service-role", "AWS Batch's service role lacks permissions that it needs to start hosts.",
        tuple(evidence), "Let setup repair the roles.", seen.words.batchml("setup", "--plan"),
    )  # fmt: skip


def configuration(seen: RunObservations) -> Explanation | None:
    """MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION_UNSUPPORTED: types, AMI and region must agree."""
    if not seen.text.startswith("MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION"):
        return None
    if AwsQuestion.AGAIN not in seen.asked and not seen.words.is_local:
        return None
    evidence = [f"AWS Batch says: {seen.text}"]
    verdict = "AWS cannot start hosts of its queue with their present configuration"
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


def quota(seen: RunObservations) -> Explanation | None:
    """The account's quota of vCPUs is reached, or 0 as in every new account for GPUs."""
    found = _failed(seen, _QUOTA)
    if found is None:
        return None
    matched = _QUOTA.search(found.message)
    limit = matched[1] if matched else None
    known = f" of {limit} vCPUs" if limit else ""
    return Explanation(
        "quota", f"The account's quota{known} for such instances does not let a host start.",
        (_describe_activity(found, seen.now),), "Ask AWS for a higher quota; doctor names it.",
        seen.words.batchml("doctor"),
    )  # fmt: skip


def no_capacity(seen: RunObservations) -> Explanation | None:
    """CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY, or the same from Auto Scaling."""
    found = _failed(seen, _CAPACITY)
    if not seen.text.startswith("CAPACITY") and found is None:
        return None
    evidence = [f"AWS Batch says: {seen.text}"] if seen.text else []
    evidence += [_describe_activity(found, seen.now)] if found else []
    evidence.append(f"waits for {describe_time(seen.waited)}; AWS Batch keeps trying")
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


def launch_failed(seen: RunObservations) -> Explanation | None:
    """EC2 refuses a host for another reason than quota or capacity."""
    found = _failed(seen, re.compile(""))
    if found is None or _QUOTA.search(found.message) or _CAPACITY.search(found.message):
        return None
    return Explanation(
        "launch-failed", "EC2 refuses to start a host for it.",
        (_describe_activity(found, seen.now),),
        "Change what AWS names in batchml.toml, and run setup.",
        seen.words.batchml("setup", "--plan"),
    )  # fmt: skip


def not_joining(seen: RunObservations) -> Explanation | None:
    """Hosts were started long ago, and none has joined the cluster."""
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
            f"the newest host was launched {describe_time(seen.now - max(began))} ago",
        ),
        _HOST_NEEDS,
        seen.words.batchml("setup", "--plan"),
    )  # fmt: skip


def starting(seen: RunObservations) -> Explanation | None:
    """No problem so far: a host is starting."""
    if seen.words.is_local or not seen.environments:
        return None
    launched = [
        each for each in _launches(seen) if seen.now - each.at < BOOT and each.status != "Failed"
    ]
    if not seen.is_early and not launched:
        return None
    evidence = [
        f"waits for {describe_time(seen.waited)}; a host takes up to {describe_time(BOOT)} to start"
    ]
    evidence += [f"vCPUs that AWS Batch has asked for: {_desired(seen)}"] if _desired(seen) else []
    evidence += [f"hosts in the cluster: {seen.hosts}"] if seen.hosts is not None else []
    if launched:
        evidence.append(f"a host was launched {describe_time(seen.now - launched[0].at)} ago")
    if seen.text:
        evidence.append(f"AWS Batch may say this while hosts start: {seen.text}")
    return Explanation(
        "host-starting", "It is next, and a host is being started for it.", tuple(evidence),
        "Wait; explain again after that time.",
        seen.words.batchml("explain", seen.run.job_id), is_problem=False,
    )  # fmt: skip


def none_asked_for(seen: RunObservations) -> Explanation | None:
    """AWS Batch has not even asked for a host, long after it should have."""
    managed = [each for each in seen.usable if each.is_managed]
    if seen.words.is_local or not managed or _desired(seen) or seen.hosts or seen.is_early:
        return None
    listed = tuple(f"{each.name}: {each.status}, 0 vCPUs asked for" for each in managed)
    text = (f"AWS Batch says: {seen.text}",) if seen.text else ()
    return Explanation(
        "no-hosts",
        f"AWS Batch has asked for no host in {describe_time(seen.waited)}, and gives no reason.",
        (*listed, *text),
        "The service role, the launch template or the subnets may be at fault.",
        seen.words.batchml("doctor"),
    )  # fmt: skip


def undetermined(seen: RunObservations) -> Explanation:
    """No cause fits the answers of AWS."""
    evidence = [f"AWS Batch says: {seen.text}"] if seen.text else ["AWS Batch gives no reason"]
    evidence.append(f"waits for {describe_time(seen.waited)}")
    evidence += [f"vCPUs that AWS Batch has asked for: {_desired(seen)}"] if _desired(seen) else []
    if seen.hosts is not None:
        evidence.append(f"hosts in the cluster: {seen.hosts}")
    return Explanation(
        "undetermined", "No answer of AWS explains why it waits.", tuple(evidence),
        "See the state of its queue and compute environments.",
        seen.words.batchml("compute", "list"),
        # If its place is unknown, it may simply wait for its turn.
        is_problem=not seen.is_early and (bool(seen.text) or seen.place == 0),
    )  # fmt: skip


def _desired(seen: RunObservations) -> int:
    return sum(each.desired_vcpus for each in seen.usable)


def _is_spot(seen: RunObservations) -> bool:
    return any(each.is_spot for each in seen.usable)


def _failed(seen: RunObservations, pattern: re.Pattern[str]) -> ScalingActivity | None:
    """The newest launch of the last day, if it failed with such a message."""
    for each in _launches(seen):
        if each.status == "Failed" and seen.now - each.at < _DAY:
            return each if pattern.search(each.message) else None
        if each.status == "Successful":
            return None
    return None


def _launches(seen: RunObservations) -> list[ScalingActivity]:
    """The launches of Auto Scaling, the newest first."""
    return [each for each in seen.activities or () if each.description.startswith("Launching")]


def _describe_activity(activity: ScalingActivity, now: int) -> str:
    return f"Auto Scaling said {describe_time(now - activity.at)} ago: {activity.message}"


# --- the queue ------------------------------------------------------------------------------

_MOST_SHARES = 500  # active shares of a queue; AWS Batch User Guide, "Service quotas"
_FRONT = 100  # runs in a snapshot of a queue

# In the status reason of an INVALID compute environment; AWS Batch User Guide, "INVALID compute
# environment".
_NO_HOST_JOINED = "none of the instances joined"


def gone(seen: RunObservations) -> Explanation | None:
    """The queue was deleted, or cannot be used."""
    words = seen.words
    if seen.queue is None:
        return None
    if seen.queue.status in ("DELETING", "DELETED"):
        return Explanation(
            "queue-gone", f"Its queue {seen.queue.name} does not exist any more.",
            (), "Submit it again to another queue.", words.batchml("queue", "list"),
        )  # fmt: skip
    if seen.queue.status == "INVALID":
        return Explanation(
            "queue-invalid", f"Its queue {seen.queue.name} is INVALID.",
            (f"AWS Batch says: {seen.queue.status_reason or 'nothing'}",),
            "Let setup repair it.", words.batchml("setup", "--plan"),
        )  # fmt: skip
    return None


def disabled(seen: RunObservations) -> Explanation | None:
    """The queue is DISABLED. A late cause: AWS may still start runs that are in the queue."""
    if seen.queue is None or seen.queue.is_enabled:
        return None
    name = seen.words.bare(seen.queue.name)
    return Explanation(
        "queue-disabled", f"Its queue {name} is DISABLED.", (f"state of {name}: DISABLED",),
        "Enable the queue.", seen.words.batchml("queue", "update", name, "--enable"),
    )  # fmt: skip


def stuck_head(seen: RunObservations) -> Explanation | None:
    """Queues are first in, first out: a head that cannot start blocks all other runs."""
    head = seen.head
    if head is None or not head.status_reason or head.status is not JobStatus.RUNNABLE:
        return None
    if head.status_reason.startswith("CAPACITY") or (
        seen.is_early and "JOB_RESOURCE" in head.status_reason
    ):
        return None
    return Explanation(
        "behind-stuck-run", f"The run at the head of its queue cannot start: {name_and_id(head)}.",
        (f"AWS Batch says of that run: {head.status_reason}", _place(seen)),
        "See what that run needs, or cancel it.", seen.words.batchml("explain", head.job_id),
    )  # fmt: skip


def not_its_turn(seen: RunObservations) -> Explanation | None:
    """Other runs are before it."""
    snapshot = seen.snapshot
    if snapshot is None or seen.text:
        return None
    far = len(snapshot.front) >= _FRONT and seen.place is None
    if not far and not seen.place:
        return None
    if seen.place and AwsQuestion.HEAD not in seen.asked:
        return None
    evidence = [_place(seen)]
    if seen.head is not None:
        evidence.append(f"at the head: {name_and_id(seen.head)}, {seen.head.status}")
    evidence += [_use(seen)] if seen.usable else []
    if seen.run.share:
        used = snapshot.shares.get(seen.run.share)
        had = f"{used:g} vCPUs in use" if used is not None else "not among the largest shares"
        evidence.append(f"its share {seen.run.share}: {had}; {snapshot.active_shares} are active")
    share = bool(seen.queue and seen.queue.policy)
    verdict = (
        "It waits for its share's turn: shares that have used less go first."
        if share
        else f"It waits for its turn: {_before(seen)} before it in queue {_queue(seen)}."
    )
    return Explanation(
        "share-waits" if share else "queue-position", verdict, tuple(evidence), is_problem=False,
        command=seen.words.batchml("ls", "--queue", _queue(seen)),
    )  # fmt: skip


def too_many_shares(seen: RunObservations) -> Explanation | None:
    """A queue serves 500 shares at a time; other shares wait until one of them has no runs."""
    snapshot = seen.snapshot
    if snapshot is None or not seen.run.share or snapshot.active_shares < _MOST_SHARES:
        return None
    if seen.place is not None or seen.run.share in snapshot.shares:
        return None
    return Explanation(
        "share-limit",
        f"Its queue serves {_MOST_SHARES} shares at a time, but {seen.run.share} is not active.",
        (f"active shares: {snapshot.active_shares}",), "Submit it under an active share.",
        seen.words.batchml("ls", "--queue", _queue(seen)),
    )  # fmt: skip


def stock_exhausted(seen: RunObservations) -> Explanation | None:
    """A consumable resource, such as a licence, is used up. AWS's count may lag half a minute."""
    stock = seen.stock
    if stock is None:
        return None
    wanted = seen.run.consumables.get(stock.name, 1)
    free = stock.total - stock.in_use
    if free >= wanted:
        return None
    never = stock.total < wanted
    end = "there are too few in all" if never else "runs that hold it have to end first"
    return Explanation(
        "consumable",
        f"It needs {wanted} of the consumable resource {stock.name}; free: {max(0, free)}.",
        (f"{stock.name}: {stock.in_use} of {stock.total} in use",), f"Wait, or add to it: {end}.",
        seen.words.batchml("ls", "--queue", _queue(seen), "--status", "RUNNING")
        if seen.words.is_local
        else f"aws batch list-jobs-by-consumable-resource --consumable-resource {stock.name}",
        is_problem=never,
    )  # fmt: skip


# --- its compute environments ---------------------------------------------------------------


def environments_gone(seen: RunObservations) -> Explanation | None:
    if seen.queue is None or seen.queue.environments:
        return None
    return Explanation(
        "no-compute", f"Its queue {_queue(seen)} has no compute environment.", (),
        "Give it one.", seen.words.batchml("setup", "--plan"),
    )  # fmt: skip


def machine_cannot_start(words: CommandWriter, reason: str) -> Explanation:
    """The embedded AWS Batch cannot start programs, so its queues wait."""
    return Explanation(
        "machine-cannot-start", "This machine cannot start programs now, so its queues wait.",
        (reason,), "Remove this cause. Waiting jobs then start by themselves.",
        words.batchml("local", "status"),
    )  # fmt: skip


def environments_invalid(seen: RunObservations) -> Explanation | None:
    """ACTION_REQUIRED: no compute environment of the queue is usable."""
    enabled = [each for each in seen.environments if each.is_enabled]
    bad = [each for each in enabled if not is_usable(each)]
    if not bad or len(bad) < len(enabled):
        return None
    reason = bad[0].status_reason
    evidence = [f"{each.name} is {each.status}: {each.status_reason}" for each in bad]
    if reason.startswith(CANNOT_START):
        return machine_cannot_start(seen.words, reason)
    if _NO_HOST_JOINED in reason:
        return Explanation(
            "hosts-not-joining",
            f"Hosts of {seen.words.bare(bad[0].name)} started and never joined its cluster, so "
            "AWS Batch made it INVALID.",
            tuple(evidence),
            _HOST_NEEDS,
            seen.words.batchml("setup", "--plan"),
        )  # fmt: skip
    return Explanation(
        "environment-invalid",
        f"No compute environment of queue {_queue(seen)} can be used: "
        f"{seen.words.bare(bad[0].name)} is {bad[0].status}.",
        tuple(evidence), "Let setup repair it.", seen.words.batchml("setup", "--plan"),
    )  # fmt: skip


def environments_disabled(seen: RunObservations) -> Explanation | None:
    if not seen.environments or any(each.is_enabled for each in seen.environments):
        return None
    name = seen.words.bare(seen.environments[0].name)
    listed = tuple(f"state of {seen.words.bare(e.name)}: DISABLED" for e in seen.environments)
    return Explanation(
        "environment-disabled", f"Every compute environment of queue {_queue(seen)} is DISABLED.",
        listed, "Enable it.", seen.words.batchml("compute", "update", name, "--enable"),
    )  # fmt: skip


def too_large_for_environments(seen: RunObservations) -> Explanation | None:
    """MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE, or the run needs more than maxvCpus."""
    managed = [each for each in seen.usable if each.is_managed and each.max_vcpus]
    most = max((each.max_vcpus for each in managed), default=0)
    is_reported = seen.text.startswith("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE")
    if not is_reported and (not managed or seen.vcpus <= most or len(managed) < len(seen.usable)):
        return None
    if not managed:
        return None
    largest = max(managed, key=lambda each: each.max_vcpus)
    name = seen.words.bare(largest.name)
    evidence = [f"it needs {describe_request(seen.run)}: {seen.vcpus} vCPUs"]
    evidence += [f"{seen.words.bare(e.name)}: at most {e.max_vcpus} vCPUs" for e in managed]
    evidence += [f"AWS Batch says: {seen.text}"] if seen.text else []
    return Explanation(
        "too-large-for-compute",
        f"It needs {seen.vcpus} vCPUs, and no compute environment of its queue may have more than "
        f"{most}.",
        tuple(evidence), "Let the compute environment grow, or request less.",
        seen.words.batchml("compute", "update", name, "--max-vcpus", str(max(seen.vcpus, most + 1)))
        if not seen.words.is_local
        else seen.words.submit(seen.run, "--vcpus", str(most)),
    )  # fmt: skip


def too_large_for_hosts(seen: RunObservations) -> Explanation | None:
    """MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT: no host is large enough.

    AWS Batch says so also while a first host boots. So it counts only if the sizes of the instance
    types confirm it, on this machine, or if it stayed for long and was seen twice.
    """
    run = seen.run
    is_reported = seen.text.startswith("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT")
    evidence = [f"it needs {describe_request(run)}"]
    evidence += [f"AWS Batch says: {seen.text}"] if is_reported else []
    if seen.types:
        fits = [
            each for each in seen.types
            if each.vcpus >= run.vcpus and each.gpus >= run.gpus
            and each.memory_mib > run.memory_mib
        ]  # fmt: skip
        big = max(seen.types, key=lambda each: (each.gpus, each.vcpus, each.memory_mib))
        evidence.append(
            f"the largest host, {big.name}, has {big.vcpus} vCPU, "
            f"{describe_memory(big.memory_mib)}, {big.gpus} GPU, "
            "less the share of the system and the ECS agent"
        )
        if fits:
            return None
        lacking = _lacking(seen, big.gpus)
    elif is_reported and (seen.words.is_local or AwsQuestion.AGAIN in seen.asked):
        lacking = "no host of its queue is large enough"
    else:
        return None
    if seen.words.is_local:
        fix, command = "Request less than this machine has.", seen.words.batchml("doctor")
    else:
        fix = "Request less, or name larger instance types in batchml.toml and run setup."
        command = seen.words.batchml("compute", "list")
    return Explanation(
        "too-large-for-hosts", f"It can never be placed: {lacking}.", tuple(evidence), fix, command
    )


def _lacking(seen: RunObservations, gpus: int) -> str:
    if seen.run.gpus > gpus:
        return f"it needs {seen.run.gpus} GPU, and no host of its queue has more than {gpus}"
    return "no host of its queue is large enough (runs get less than a host's whole memory)"


def full(seen: RunObservations) -> Explanation | None:
    """It is at the head, and running runs use the resources that it needs."""
    if seen.snapshot is None or not seen.usable or seen.place not in (0, None) or seen.text:
        return None
    total = sum(each.max_vcpus for each in seen.usable)
    grown = sum(each.desired_vcpus for each in seen.usable) + seen.vcpus > total
    is_full = seen.snapshot.used_vcpus + seen.vcpus > total
    if not (is_full or seen.words.is_local or (grown and seen.hosts)):
        return None
    return Explanation(
        "full", "It is next. Running runs use what it needs.",
        (
            f"it needs {describe_request(seen.run)}", _use(seen),
            f"next for {describe_time(seen.waited)}",
        ),
        is_problem=False,
        command=seen.words.batchml("ls", "--queue", _queue(seen), "--status", "RUNNING"),
    )  # fmt: skip


def _use(seen: RunObservations) -> str:
    total = sum(each.max_vcpus for each in seen.usable)
    used = seen.snapshot.used_vcpus if seen.snapshot else 0
    return f"in use by runs of the queue: {used:g} of at most {total} vCPUs"


def _before(seen: RunObservations) -> str:
    place = seen.place
    return "at least 100 runs are" if place is None else f"{count(place, 'run is', 'runs are')}"


def _place(seen: RunObservations) -> str:
    if seen.place is None:
        return f"not among the first {_FRONT} of queue {_queue(seen)}"
    return f"place {seen.place + 1} in queue {_queue(seen)}, for {describe_time(seen.waited)}"


def _queue(seen: RunObservations) -> str:
    return seen.words.bare(seen.run.queue)
