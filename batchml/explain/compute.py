"""Why a run waits: causes in hosts and in compute environments. Pure.

A public function is named after the cause that it looks for. It returns the explanation, or None
if this is not the cause. Most causes count only after some time: a host takes minutes to boot, and
meanwhile AWS Batch reports problems that pass.
"""

import re
from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from batchml.aws.bootstrap import BootstrapFailure
from batchml.explain.suggest import (
    CommandWriter,
    describe_memory,
    describe_request,
    describe_time,
)
from batchml.model.explanation import (
    ComputeState,
    ConsumableState,
    Explanation,
    HostType,
    QueueSnapshot,
    QueueState,
    ScalingActivity,
)
from batchml.model.run import CANNOT_START, Run

# --- a waiting run ---------------------------------------------------------------------------

# The time from the start of a host to its first job: minutes on a GPU host with a large image.
# During this time no problem is reported, because AWS Batch says "no host is large enough" while a
# host boots.
BOOT = 10 * 60_000  # ms
SOON = 60_000  # ms within which AWS Batch examines a new job


class AwsQuestion(StrEnum):
    """A question, which is one call to AWS; two for BOOTSTRAP."""

    DEPENDENCIES = "dependencies"
    FAILED = "failed"
    CHILD = "child"
    QUEUE = "queue"
    ENVIRONMENTS = "environments"
    STOCK = "stock"
    SNAPSHOT = "snapshot"
    HEAD = "head"
    TYPES = "types"
    IMAGE = "image"
    BOOTSTRAP = "bootstrap"
    ACTIVITIES = "activities"
    HOSTS = "hosts"
    AGAIN = "again"


class WaitingRun(Struct, frozen=True):
    """A run that has not ended, and AWS's answers about it so far.

    A value that was not asked for, or not answered, is None or empty. For a waiting array, `run` is
    a waiting child, and `array` the array itself.
    """

    run: Run
    now: int  # ms
    commands: CommandWriter = CommandWriter()
    asked: frozenset[AwsQuestion] = frozenset()
    array: Run | None = None
    failed: tuple[Run, ...] = ()  # failed children of the array
    dependencies: tuple[Run, ...] = ()
    queue: QueueState | None = None
    environments: tuple[ComputeState, ...] = ()  # the queue's compute environments
    stock: ConsumableState | None = None  # of the consumable resource that the run requests
    snapshot: QueueSnapshot | None = None
    head: Run | None = None  # the first run in the queue
    types: tuple[HostType, ...] | None = None  # the sizes of the queue's instance types
    architecture: str | None = None  # of the user's own AMI; "" if the AMI does not exist
    activities: tuple[ScalingActivity, ...] | None = None
    hosts: int | None = None  # hosts in the cluster of the largest compute environment
    scripts: Mapping[str, str] = {}  # bootstrap scripts by compute environments of batchml.toml
    bootstrap: BootstrapFailure | None = None

    @property
    def reason(self) -> str:
        """AWS Batch's status reason, which only the head of a queue has."""
        return self.run.status_reason

    @property
    def runs_before(self) -> int | None:
        """The number of runs before it in the queue; None if unknown."""
        return self.snapshot.position_of(self.run.job_id) if self.snapshot else None

    @property
    def since(self) -> int:
        """The earliest time, in ms, since which it waits at its present position in the queue."""
        ends = [attempt.stopped_at or 0 for attempt in self.run.attempts]
        since = max([self.run.created_at or self.now, *ends])
        if self.snapshot is not None and self.runs_before is not None:
            since = max(since, self.snapshot.front[self.runs_before].since)
        return since

    @property
    def waited(self) -> int:
        """The time, in ms, for which it has waited at its present position."""
        return max(0, self.now - self.since)

    @property
    def is_early(self) -> bool:
        """Whether a host may still be booting. `local` starts no hosts."""
        return not self.commands.is_local and self.waited < BOOT

    @property
    def usable(self) -> tuple[ComputeState, ...]:
        """The queue's compute environments that can take runs."""
        return tuple(each for each in self.environments if each.is_enabled and is_usable(each))

    @property
    def scripted(self) -> tuple[str, ...]:
        """The compute environments, by their names in batchml.toml, whose script may have failed.

        AWS Batch wants hosts there, or has given up.
        """
        wanted = [
            re.sub(r"-r[0-9]+$", "", self.commands.bare(each.name))
            for each in self.environments
            if each.is_enabled and (each.desired_vcpus or not is_usable(each))
        ]
        return tuple(name for name in wanted if name in self.scripts)

    @property
    def vcpus(self) -> int:
        """vCPUs that all nodes of the run need at once."""
        return self.run.vcpus * max(1, self.run.nodes)

    @property
    def desired_vcpus(self) -> int:
        """vCPUs of the hosts that AWS Batch wants to have now."""
        return sum(each.desired_vcpus for each in self.usable)

    @property
    def queue_name(self) -> str:
        """The queue's name in batchml.toml."""
        return self.commands.bare(self.run.queue)

    @property
    def reported(self) -> list[str]:
        """AWS Batch's status reason as evidence; empty without one."""
        return [f"AWS Batch says: {self.reason}"] if self.reason else []

    @property
    def scaling(self) -> list[str]:
        """The desired vCPUs and the hosts as evidence, as far as they are known."""
        desired = self.desired_vcpus
        evidence = [f"vCPUs that AWS Batch has asked for: {desired}"] if desired else []
        return evidence + ([] if self.hosts is None else [f"hosts in the cluster: {self.hosts}"])


def is_usable(environment: ComputeState) -> bool:
    return environment.status in ("VALID", "UPDATING", "CREATING")


# --- hosts ----------------------------------------------------------------------------------

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


def service_role(waiting: WaitingRun) -> Explanation | None:
    """MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS"""
    is_reported = waiting.reason.startswith("MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS")
    if not is_reported or AwsQuestion.ENVIRONMENTS not in waiting.asked:
        return None
    evidence = waiting.reported
    for each in waiting.environments:
        evidence.append(f"{each.name}: {each.service_role or 'the service-linked role'}")
        if each.status_reason and each.status_reason != "ComputeEnvironment Healthy":
            evidence.append(f"{each.name} says: {each.status_reason}")
    return Explanation(
        "service-role", "AWS Batch's service role lacks permissions that it needs to start hosts.",
        tuple(evidence), "Let setup repair the roles.", waiting.commands.batchml("setup"),
    )  # fmt: skip


def instance_configuration(waiting: WaitingRun) -> Explanation | None:
    """MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION_UNSUPPORTED: types, AMI and region must agree."""
    if not waiting.reason.startswith("MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION"):
        return None
    if AwsQuestion.AGAIN not in waiting.asked and not waiting.commands.is_local:
        return None
    evidence = waiting.reported
    verdict = "AWS cannot start hosts of its queue with their present configuration"
    asked = sorted({name for each in waiting.usable for name in each.instance_types})
    if waiting.types is not None:
        types = {each.name for each in waiting.types}
        names = types | {name.partition(".")[0] for name in types}  # with their families
        absent = [name for name in asked if name not in names]
        known = sorted({a for each in waiting.types for a in each.architectures})
        if absent:
            verdict = f"The region has no {', '.join(absent)}"
            evidence.append(f"asked for: {', '.join(asked)}")
        elif waiting.architecture == "":
            verdict = "The AMI does not exist"
        elif waiting.architecture is not None and waiting.architecture not in known:
            verdict = (
                f"The AMI is for {waiting.architecture}, the instance types {', '.join(known)}"
            )
    return Explanation(
        "instance-configuration", f"{verdict}.", tuple(evidence),
        "Change instance_types or ami in batchml.toml, and run setup.",
        waiting.commands.batchml("setup"),
    )  # fmt: skip


def quota(waiting: WaitingRun) -> Explanation | None:
    """The account's quota of vCPUs is reached, or 0 as in every new account for GPUs."""
    found = _failed_launch(waiting, _QUOTA)
    if found is None:
        return None
    matched = _QUOTA.search(found.message)
    limit = f" of {matched[1]} vCPUs" if matched and matched[1] else ""
    return Explanation(
        "quota", f"The account's quota{limit} for such instances does not let a host start.",
        (_describe_activity(found, waiting.now),), "Ask AWS for a higher quota; doctor names it.",
        waiting.commands.batchml("doctor"),
    )  # fmt: skip


def no_capacity(waiting: WaitingRun) -> Explanation | None:
    """CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY, or the same from Auto Scaling."""
    found = _failed_launch(waiting, _CAPACITY)
    if not waiting.reason.startswith("CAPACITY") and found is None:
        return None
    evidence = waiting.reported
    evidence += [_describe_activity(found, waiting.now)] if found else []
    evidence.append(f"waiting for {describe_time(waiting.waited)}; AWS Batch keeps trying")
    types = sorted({name for each in waiting.usable for name in each.instance_types})
    if waiting.commands.is_local:
        return Explanation(
            "no-capacity", "The server was started with --chaos no-capacity: no run is placed.",
            tuple(evidence), "It ends by itself.", is_problem=False,
        )  # fmt: skip
    several = "more instance types"
    if any(each.is_spot for each in waiting.usable):
        several = "more instance types, or add an on-demand compute environment"
    return Explanation(
        "no-capacity", f"AWS has no {' or '.join(types) or 'such'} instance free at the moment.",
        tuple(evidence), f"Wait, or give the compute environment {several}.",
        is_problem=not waiting.is_early,
    )  # fmt: skip


# EC2 API Reference, "Error codes": `Unsupported`, `InsufficientFreeAddressesInSubnet`.
_NOT_OFFERED = re.compile(
    r"instance type \(([^)]+)\) is not supported in your requested Availability Zone \(([^)]+)\)"
)
_NO_ADDRESSES = re.compile(r"not enough free addresses|InsufficientFreeAddresses", re.IGNORECASE)


def launch_failed(waiting: WaitingRun) -> Explanation | None:
    """EC2 refuses a host for another reason than quota or capacity."""
    found = _failed_launch(waiting, re.compile(""))
    if found is None or _QUOTA.search(found.message) or _CAPACITY.search(found.message):
        return None
    verdict = "EC2 refuses to start a host for it."
    fix = "Change what AWS names in batchml.toml, and run setup."
    offered = _NOT_OFFERED.search(found.message)
    if offered:
        verdict = f"EC2 does not offer {offered[1]} in {offered[2]}."
        fix = (
            "Run setup: it gives compute environments subnets in the zones that offer their types."
        )
    elif _NO_ADDRESSES.search(found.message):
        verdict = "The subnet for its host has no free address."
        fix = "Wait for running runs to end, or use a larger network.cidr in a new environment."
    return Explanation(
        "launch-failed", verdict, (_describe_activity(found, waiting.now),), fix,
        waiting.commands.batchml("setup"),
    )  # fmt: skip


def bootstrap_failed(waiting: WaitingRun) -> Explanation | None:
    """The bootstrap script, which hosts run before they join, failed on the newest host."""
    found = waiting.bootstrap
    if found is None:
        return None
    ended = f"host {found.host}, launched {describe_time(waiting.now - found.at)} ago: {found.why}"
    evidence = [ended, f"hosts that have ended within about an hour: {found.ended}"]
    if found.starting:
        evidence.append(
            f"hosts that are starting: {found.starting}; if you corrected the script, wait"
        )
    disable = waiting.commands.batchml("compute", "update", found.compute, "--disable")
    return Explanation(
        "bootstrap-failed",
        f"Hosts of {found.compute} start and power off: their bootstrap script "
        f"{waiting.scripts.get(found.compute, '')} fails, so they never join.",
        (*evidence, *(f"  {line}" for line in found.lines)),
        "Correct the script and run setup. Until then AWS Batch starts one host after another, and "
        f"you pay for each. To stop that: {disable}",
        waiting.commands.batchml("setup"),
    )  # fmt: skip


def hosts_not_joining(waiting: WaitingRun) -> Explanation | None:
    """Hosts were started long ago, and none has joined the cluster."""
    if waiting.hosts != 0 or waiting.is_early or not waiting.desired_vcpus:
        return None
    began = [each.at for each in _launches(waiting) if each.status == "Successful"]
    if not began or waiting.now - max(began) < BOOT:
        return None
    return Explanation(
        "hosts-not-joining", "Hosts were started for it, and none has joined the cluster.",
        (
            *waiting.scaling,
            f"the newest host was launched {describe_time(waiting.now - max(began))} ago",
        ),
        _HOST_NEEDS,
        waiting.commands.batchml("setup"),
    )  # fmt: skip


def host_starting(waiting: WaitingRun) -> Explanation | None:
    """No problem so far: a host is starting."""
    if waiting.commands.is_local or not waiting.environments:
        return None
    now = waiting.now
    launched = [a for a in _launches(waiting) if now - a.at < BOOT and a.status != "Failed"]
    if not waiting.is_early and not launched:
        return None
    evidence = [
        f"waiting for {describe_time(waiting.waited)}; "
        f"a host takes up to {describe_time(BOOT)} to start"
    ]
    evidence += waiting.scaling
    if launched:
        evidence.append(f"a host was launched {describe_time(now - launched[0].at)} ago")
    if waiting.reason.startswith("MISCONFIGURATION") and not waiting.types:
        # AWS's sizes do not confirm that any host fits it.
        return Explanation(
            "placement-refused",
            "AWS Batch says that no host of its queue fits it. That is certain only after "
            f"{describe_time(BOOT)}: AWS Batch also says so while a first host boots.",
            (f"it needs {describe_request(waiting.run)}", *waiting.reported, *evidence),
            "If it does not start by then, request less, or name larger instance types in "
            "batchml.toml and run setup.", is_problem=False,
        )  # fmt: skip
    if waiting.reason:
        evidence.append(f"AWS Batch may say this while hosts start: {waiting.reason}")
    return Explanation(
        "host-starting", "It is next, and a host is being started for it.", tuple(evidence),
        "Wait; explain again after that time.", is_problem=False,
    )  # fmt: skip


def no_hosts(waiting: WaitingRun) -> Explanation | None:
    """AWS Batch has asked for no host, although it should have long ago."""
    managed = [each for each in waiting.usable if each.is_managed]
    if (
        waiting.commands.is_local
        or not managed
        or waiting.desired_vcpus
        or waiting.hosts
        or waiting.is_early
    ):
        return None
    listed = tuple(f"{each.name}: {each.status}, 0 vCPUs asked for" for each in managed)
    return Explanation(
        "no-hosts",
        f"AWS Batch has asked for no host in {describe_time(waiting.waited)}, and gives no reason.",
        (*listed, *waiting.reported),
        "The service role, the launch template or the subnets may be at fault.",
        waiting.commands.batchml("doctor"),
    )  # fmt: skip


def undetermined(waiting: WaitingRun) -> Explanation:
    """No cause fits the answers of AWS."""
    evidence = waiting.reported or ["AWS Batch gives no reason"]
    evidence += [f"waiting for {describe_time(waiting.waited)}", *waiting.scaling]
    return Explanation(
        "undetermined", "No answer of AWS explains why it waits.", tuple(evidence),
        "Let doctor check the environment.", waiting.commands.batchml("doctor"),
        # If its position is unknown, it may simply wait for its turn.
        is_problem=not waiting.is_early and (bool(waiting.reason) or waiting.runs_before == 0),
    )  # fmt: skip


def _failed_launch(waiting: WaitingRun, pattern: re.Pattern[str]) -> ScalingActivity | None:
    """The newest launch of the last day, if it failed with a message that matches."""
    for each in _launches(waiting):
        if each.status == "Failed" and waiting.now - each.at < _DAY:
            return each if pattern.search(each.message) else None
        if each.status == "Successful":
            return None
    return None


def _launches(waiting: WaitingRun) -> list[ScalingActivity]:
    """The launches of Auto Scaling, the newest first."""
    return [each for each in waiting.activities or () if each.description.startswith("Launching")]


def _describe_activity(activity: ScalingActivity, now: int) -> str:
    return f"Auto Scaling said {describe_time(now - activity.at)} ago: {activity.message}"


# --- its compute environments ---------------------------------------------------------------


# In the status reason of an INVALID compute environment; AWS Batch User Guide, "INVALID compute
# environment".
_NO_HOST_JOINED = "none of the instances joined"


def no_compute(waiting: WaitingRun) -> Explanation | None:
    if waiting.queue is None or waiting.queue.environments:
        return None
    return Explanation(
        "no-compute", f"Its queue {waiting.queue_name} has no compute environment.", (),
        "Give the queue a compute environment.", waiting.commands.batchml("setup"),
    )  # fmt: skip


def machine_cannot_start(reason: str) -> Explanation:
    """The embedded AWS Batch cannot start programs, so its queues wait."""
    return Explanation(
        "machine-cannot-start", "This machine cannot start programs now, so its queues wait.",
        (reason,), "Remove the cause. Waiting jobs then start by themselves.",
    )  # fmt: skip


def environment_invalid(waiting: WaitingRun) -> Explanation | None:
    """ACTION_REQUIRED: no compute environment of the queue is usable."""
    enabled = [each for each in waiting.environments if each.is_enabled]
    bad = [each for each in enabled if not is_usable(each)]
    if not bad or len(bad) < len(enabled):
        return None
    reason = bad[0].status_reason
    evidence = [f"{each.name} is {each.status}: {each.status_reason}" for each in bad]
    if reason.startswith(CANNOT_START):
        return machine_cannot_start(reason)
    if _NO_HOST_JOINED in reason:
        if waiting.scripted and AwsQuestion.BOOTSTRAP not in waiting.asked:
            return None
        return Explanation(
            "hosts-not-joining",
            f"Hosts of {waiting.commands.bare(bad[0].name)} started and never joined its cluster, "
            "so AWS Batch made it INVALID.",
            tuple(evidence),
            _HOST_NEEDS,
            waiting.commands.batchml("setup"),
        )  # fmt: skip
    return Explanation(
        "environment-invalid",
        f"No compute environment of queue {waiting.queue_name} can be used: "
        f"{waiting.commands.bare(bad[0].name)} is {bad[0].status}.",
        tuple(evidence), "Let setup repair it.", waiting.commands.batchml("setup"),
    )  # fmt: skip


def environment_disabled(waiting: WaitingRun) -> Explanation | None:
    if not waiting.environments or any(each.is_enabled for each in waiting.environments):
        return None
    names = [waiting.commands.bare(each.name) for each in waiting.environments]
    return Explanation(
        "environment-disabled",
        f"Every compute environment of queue {waiting.queue_name} is DISABLED.",
        tuple(f"state of {name}: DISABLED" for name in names),
        "Enable a compute environment.",
        waiting.commands.batchml("compute", "update", names[0], "--enable"),
    )


def too_large_for_compute(waiting: WaitingRun) -> Explanation | None:
    """MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE, or the run needs more than maxvCpus."""
    managed = [each for each in waiting.usable if each.is_managed and each.max_vcpus]
    most = max((each.max_vcpus for each in managed), default=0)
    is_reported = waiting.reason.startswith("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE")
    if not is_reported and (
        not managed or waiting.vcpus <= most or len(managed) < len(waiting.usable)
    ):
        return None
    if not managed:
        return None
    largest = max(managed, key=lambda each: each.max_vcpus)
    name, needed = waiting.commands.bare(largest.name), str(max(waiting.vcpus, most + 1))
    evidence = [f"it needs {describe_request(waiting.run)}: {waiting.vcpus} vCPUs"]
    evidence += [f"{waiting.commands.bare(e.name)}: at most {e.max_vcpus} vCPUs" for e in managed]
    evidence += waiting.reported
    return Explanation(
        "too-large-for-compute",
        f"It needs {waiting.vcpus} vCPUs, and no compute environment of its queue may have more "
        f"than {most}.",
        tuple(evidence), "Let the compute environment grow, or request less.",
        waiting.commands.batchml("compute", "update", name, "--max-vcpus", needed)
        if not waiting.commands.is_local
        else waiting.commands.submit(waiting.run, "--vcpus", str(most)),
    )  # fmt: skip


def too_large_for_hosts(waiting: WaitingRun) -> Explanation | None:
    """MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT: no host is large enough.

    AWS Batch also gives this reason while a first host boots. So the reason counts only if the
    sizes of the instance types confirm it, on `local`, or if a second question has found it again.
    """
    run = waiting.run
    is_reported = waiting.reason.startswith("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT")
    evidence = [f"it needs {describe_request(run)}"]
    evidence += waiting.reported if is_reported else []
    if waiting.types:
        fits = [
            each for each in waiting.types
            if each.vcpus >= run.vcpus and each.gpus >= run.gpus
            and each.memory_mib > run.memory_mib
        ]  # fmt: skip
        largest = max(waiting.types, key=lambda each: (each.gpus, each.vcpus, each.memory_mib))
        evidence.append(
            f"the largest host, {largest.name}, has {largest.vcpus} vCPU, "
            f"{describe_memory(largest.memory_mib)}, {largest.gpus} GPU, "
            "less the share of the system and the ECS agent"
        )
        if fits:
            return None
        lacking = _lacking(waiting, largest.gpus)
    elif is_reported and (waiting.commands.is_local or AwsQuestion.AGAIN in waiting.asked):
        lacking = "no host of its queue is large enough"
    else:
        return None
    if waiting.commands.is_local:
        fix = "Submit it again: submit requests no more than this machine has."
        command = waiting.commands.submit(run)
    else:
        fix = "Request less, or name larger instance types in batchml.toml and run setup."
        command = waiting.commands.batchml("setup")
    return Explanation(
        "too-large-for-hosts", f"It can never be placed: {lacking}.", tuple(evidence), fix, command
    )


def _lacking(waiting: WaitingRun, gpus: int) -> str:
    if waiting.run.gpus > gpus:
        return f"it needs {waiting.run.gpus} GPU, and no host of its queue has more than {gpus}"
    return "no host of its queue is large enough (runs get less than a host's whole memory)"


def full(waiting: WaitingRun) -> Explanation | None:
    """It is at the head, and running runs use the resources that it needs."""
    if (
        waiting.snapshot is None
        or not waiting.usable
        or waiting.runs_before not in (0, None)
        or waiting.reason
    ):
        return None
    total = sum(each.max_vcpus for each in waiting.usable)
    grown = sum(each.desired_vcpus for each in waiting.usable) + waiting.vcpus > total
    is_full = waiting.snapshot.used_vcpus + waiting.vcpus > total
    if not (is_full or waiting.commands.is_local or (grown and waiting.hosts)):
        return None
    listing = ("ls", "--queue", waiting.queue_name, "--status", "RUNNING")
    return Explanation(
        "full", "It waits for running runs to end: they use what it needs. It is next.",
        (
            f"it needs {describe_request(waiting.run)}", describe_use(waiting),
            f"next for {describe_time(waiting.waited)}",
        ),
        is_problem=False,
        command=waiting.commands.batchml(*listing),
    )  # fmt: skip


def describe_use(waiting: WaitingRun) -> str:
    total = sum(each.max_vcpus for each in waiting.usable)
    used = waiting.snapshot.used_vcpus if waiting.snapshot else 0
    return f"in use by runs of the queue: {used:g} of at most {total} vCPUs"
