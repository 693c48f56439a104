"""Environment: a named place that runs jobs, as `batchml.toml` says it."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from batchml.errors import did_you_mean
from batchml.model.tables import parse_duration, parse_size

LOCAL = "local"
MAX_ENVIRONMENTS = 3  # compute environments of one queue; AWS Batch quotas
MAX_TAGS = 45  # of the 50 that AWS takes; the others are ours
SPOT_STRATEGIES = ("SPOT_CAPACITY_OPTIMIZED", "SPOT_PRICE_CAPACITY_OPTIMIZED")


# What jobStateTimeLimitActions may say, in words: AWS Batch User Guide, "Jobs stuck in RUNNABLE".
TIME_LIMITS = {
    "no-capacity": "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
    "too-large-for-compute": "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
    "too-large-for-instances": "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
}


# Families with NVIDIA GPUs: AWS Batch User Guide, "GPU workload AMI". g4ad has AMD's.
_GPU_FAMILY = re.compile(r"(p[3-9]|gr?[3-9])[a-z0-9-]*")
_ARM_FAMILY = re.compile(r"(g5g|p6e|a1|[a-z]+[0-9]+g[a-z0-9-]*)")


class Network(Struct, frozen=True, forbid_unknown_fields=True):
    """Where instances are: a network of the environment's own, or subnets that exist."""

    cidr: str = "10.42.0.0/16"
    zones: Annotated[int, Meta(ge=1, le=3)] = 2
    egress: Literal["nat", "endpoints"] = "nat"
    vpc: str = ""
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()

    @property
    def is_given(self) -> bool:
        return bool(self.subnets)


class Storage(Struct, frozen=True, forbid_unknown_fields=True):
    workspace: Literal["efs", "fsx-lustre", "none"] = "efs"
    size: str | int = "1200 GiB"  # of fsx-lustre
    throughput: Literal[125, 250, 500, 1000] = 125  # of fsx-lustre: MB/s for each TiB
    shared_with: str = ""  # the environment whose workspace it is; `workspace` is "none" then

    @property
    def size_gib(self) -> int:
        return (parse_size(self.size) or 0) // 1024**3


class Compute(Struct, frozen=True, forbid_unknown_fields=True):
    """One managed compute environment. Names and words are AWS Batch's."""

    instance_types: tuple[str, ...] = ()
    max_vcpus: Annotated[int, Meta(ge=1, le=100_000)] = 0
    min_vcpus: Annotated[int, Meta(ge=0)] = 0
    spot: bool = False
    allocation_strategy: Literal[
        "", "BEST_FIT", "BEST_FIT_PROGRESSIVE", "SPOT_CAPACITY_OPTIMIZED",
        "SPOT_PRICE_CAPACITY_OPTIMIZED",
    ] = ""  # fmt: skip
    bid_percentage: Annotated[int, Meta(ge=1, le=100)] | None = None
    ami: str = ""  # that of the environment unless given
    disk: str | int = "100 GiB"
    placement_group: str = ""  # "cluster": one is made; else the name of one that exists
    capacity_reservation: str = ""
    capacity_block: str = ""  # hosts that were paid for a span of time, by their reservation's id
    scale_down_delay: str | int = 0
    stop_timeout: str | int = "110s"
    tags: dict[str, str] = {}

    @property
    def strategy(self) -> str:
        """The allocation strategy, AWS's recommended one unless given.

        A capacity block has hosts of one type in one zone: AWS's samples take BEST_FIT for it.
        """
        usual = "SPOT_PRICE_CAPACITY_OPTIMIZED" if self.spot else "BEST_FIT_PROGRESSIVE"
        return self.allocation_strategy or ("BEST_FIT" if self.capacity_block else usual)

    @property
    def reservation(self) -> str:
        """The id of the reservation that its hosts are in; empty where it names none."""
        named = self.capacity_block or self.capacity_reservation
        return named if named.startswith("cr-") else ""

    @property
    def has_gpus(self) -> bool:
        return any(is_gpu_type(name) for name in self.instance_types)

    @property
    def is_arm(self) -> bool:
        return any(is_arm_type(name) for name in self.instance_types)

    @property
    def disk_gib(self) -> int:
        return (parse_size(self.disk) or 0) // 1024**3

    @property
    def scale_down_minutes(self) -> int:
        return (parse_duration(self.scale_down_delay) or 0) // 60

    @property
    def stop_seconds(self) -> int:
        return parse_duration(self.stop_timeout) or 0


class FairShare(Struct, frozen=True, forbid_unknown_fields=True):
    """A fair-share policy. A share of weight 2 gets twice that of one of weight 1.

    AWS's weightFactor is the inverse: there, a lower one means more.
    """

    shares: dict[str, Annotated[float, Meta(gt=0)]] = {}
    decay: str | int = 3600
    reservation: Annotated[int, Meta(ge=0, le=99)] = 0

    @property
    def decay_seconds(self) -> int:
        return parse_duration(self.decay) or 0


class Queue(Struct, frozen=True, forbid_unknown_fields=True):
    priority: Annotated[int, Meta(ge=0, le=1000)] = 1
    compute: tuple[str, ...] = ()
    fair_share: FairShare | None = None
    # How long a run may be stuck before it is cancelled. Not `no-capacity`: GPUs are worth a wait.
    time_limits: dict[str, str | int] = field(
        default_factory=lambda: {"too-large-for-compute": "30m", "too-large-for-instances": "30m"}
    )

    @property
    def limits_seconds(self) -> dict[str, int]:
        """AWS's reason -> seconds."""
        found = {TIME_LIMITS[key]: parse_duration(text) for key, text in self.time_limits.items()}
        return {reason: seconds for reason, seconds in found.items() if seconds}


class Logs(Struct, frozen=True, forbid_unknown_fields=True):
    retention_days: Literal[
        1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557,
        2922, 3288, 3653,
    ] = 90  # fmt: skip


class Budget(Struct, frozen=True, forbid_unknown_fields=True):
    """Mail when a month's cost of this environment passes a limit."""

    usd: Annotated[int, Meta(ge=1)] = 0
    email: str = ""


class Environment(Struct, frozen=True, forbid_unknown_fields=True):
    """A place that runs jobs. `local` is built in and needs no entry."""

    region: str = ""
    profile: str = ""
    ami: str = "ecs-gpu"  # build | ecs-gpu | ami-0123...
    gpu_access: Literal["", "driver-mount", "toolkit"] = ""
    controller_queue: str = ""  # of detached sweeps' controllers; that of the sweep unless given
    jobs: tuple[str, ...] = ()  # whose definitions `setup` registers
    secrets: tuple[str, ...] = ()  # ARNs that jobs may be given: SSM parameters, Secrets Manager
    quarantine: bool = False  # runs may take unfit hosts out of service
    network: Network = Network()
    storage: Storage = Storage()
    logs: Logs = Logs()
    budget: Budget | None = None
    usd_per_hour: Annotated[float, Meta(ge=0, le=100_000)] = 0.0  # of `local`: this machine
    endpoints: dict[str, str] = {}  # of `local`: services beside the embedded server
    tags: dict[str, str] = {}
    compute: dict[str, Compute] = {}
    queues: dict[str, Queue] = {}

    @property
    def gpu_mode(self) -> str:
        """How containers reach GPUs: the driver folder is there only on an AMI of ours."""
        return self.gpu_access or ("driver-mount" if self.ami == "build" else "toolkit")


def is_gpu_type(instance_type: str) -> bool:
    """True for instance types and families with NVIDIA GPUs."""
    family = instance_type.partition(".")[0]
    return bool(_GPU_FAMILY.fullmatch(family)) and not family.startswith("g4ad")


def is_arm_type(instance_type: str) -> bool:
    """True for instance types and families with Arm processors."""
    return instance_type == "default_arm64" or bool(
        _ARM_FAMILY.fullmatch(instance_type.partition(".")[0])
    )


# --- shared workspaces ----------------------------------------------------------------------------
# Environments that share one workspace: `[env.X.storage] shared_with = "dev"`.
#
# X works in the file system and the network of `dev`, and has a bucket, roles and queues of its own
# (`docs/decisions/032-sharing.md`). Once read, X makes neither a network nor a file system.


_OWN_KEYS = ("workspace", "size", "throughput")  # of `storage`: they are those of the other


class Borrowed(Network, frozen=True):
    """The network of the environment that a workspace is shared with: nothing of it is made here.

    Its subnets and groups are in the outputs of that environment's stacks.
    """

    @property
    def is_given(self) -> bool:
        return True


def sharing_mistakes(
    name: str, table: Mapping[str, Any], environments: Mapping[str, Environment]
) -> Iterator[str]:
    """What is wrong with an environment's `shared_with`, each as `key: text`."""
    env = environments[name]
    where, other = "storage.shared_with", env.storage.shared_with
    if not other:
        return
    if name == LOCAL:
        yield f"{where}: local has one workspace for all that is on this machine: take it out."
        return
    if other not in environments or other in (LOCAL, name):
        known = sorted(set(environments) - {LOCAL, name})
        yield (
            f"{where}: found {other!r}. Expected another environment of this file: "
            f"{', '.join(known) or 'there is none'}.{did_you_mean(other, known)}"
        )
        return
    yield from _unlike(env, environments[other], other)
    given = table.get("storage")
    for key in _OWN_KEYS:
        if isinstance(given, Mapping) and key in given:
            yield f"storage.{key}: the workspace is that of {other}, which says it: take it out."
    if table.get("network"):
        yield f"network: a shared workspace is in the network of {other}: take it out."


def _unlike(env: Environment, owner: Environment, other: str) -> Iterator[str]:
    where = "storage.shared_with"
    if owner.storage.shared_with:
        yield f"{where}: {other} has no workspace of its own: name {owner.storage.shared_with!r}."
    elif owner.storage.workspace == "none":
        yield f'{where}: {other} has no workspace (workspace = "none").'
    if env.region != owner.region:
        yield (
            f"{where}: {other} is in {owner.region}, this one in {env.region}. A file system is "
            "shared within one region."
        )
    if env.profile != owner.profile:
        yield (
            f"{where}: profile is {env.profile!r} here and {owner.profile!r} in {other}. A file "
            "system is shared within one account."
        )


def with_sharing(environments: Mapping[str, Environment]) -> dict[str, Environment]:
    """The environments, those that share a workspace as what they make themselves."""
    return {name: _resolved(env, environments) for name, env in environments.items()}


def _resolved(env: Environment, environments: Mapping[str, Environment]) -> Environment:
    owner = environments.get(env.storage.shared_with)
    if owner is None or not env.storage.shared_with:
        return env
    network = owner.network if owner.network.is_given else Borrowed()
    return replace(env, storage=replace(env.storage, workspace="none"), network=network)


def sharers(owner: str, environments: Mapping[str, Environment]) -> tuple[str, ...]:
    """The environments of a file that work in the workspace of `owner`."""
    return tuple(name for name, env in environments.items() if env.storage.shared_with == owner)
