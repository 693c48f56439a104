"""The hosts of a cluster: their state, with the names of Slurm's node states, and resources."""

from enum import StrEnum

from msgspec import Struct


class HostState(StrEnum):
    """The states of Slurm's nodes."""

    ALLOCATED = "allocated"  # every vCPU, or every GPU, is in use
    MIXED = "mixed"
    IDLE = "idle"
    DRAINING = "draining"  # its runs continue, and no new runs start there
    STARTING = "starting"  # it has not joined its cluster yet
    DOWN = "down"  # its ECS agent does not answer: no runs start there


class HostResources(Struct, frozen=True):
    """The resources of one or several hosts, and the part of them that is in use."""

    vcpus: float = 0
    memory_mib: int = 0
    gpus: int = 0
    used_vcpus: float = 0
    used_memory_mib: int = 0
    used_gpus: int = 0

    def plus(self, other: "HostResources") -> "HostResources":
        """The sum, for several hosts."""
        return HostResources(
            self.vcpus + other.vcpus,
            self.memory_mib + other.memory_mib,
            self.gpus + other.gpus,
            self.used_vcpus + other.used_vcpus,
            self.used_memory_mib + other.used_memory_mib,
            self.used_gpus + other.used_gpus,
        )

    def holds(self, vcpus: int, memory_mib: int, gpus: int) -> bool:
        """Whether these resources are free."""
        return (
            vcpus <= self.vcpus - self.used_vcpus
            and memory_mib <= self.memory_mib - self.used_memory_mib
            and gpus <= self.gpus - self.used_gpus
        )


class ClusterHost(Struct, frozen=True):
    """A host of a compute environment, in an ECS cluster or not yet. Unknown fields are empty."""

    id: str  # of the ECS container instance; before the host has joined its cluster, EC2's id
    cluster: str = ""  # ARN; "" before it has joined
    compute: str = ""  # its compute environment, for a host without a cluster
    instance: str = ""  # EC2's id
    type: str = ""
    zone: str = ""
    status: str = "ACTIVE"  # in ECS's words
    is_connected: bool = True  # whether its ECS agent answers
    tasks: int = 0
    since: int = 0  # ms since the epoch: when it joined its cluster, or EC2 started it
    resources: HostResources = HostResources()

    @property
    def name(self) -> str:
        """EC2's id, if it is known."""
        return self.instance or self.id

    @property
    def state(self) -> HostState:
        resources = self.resources
        if self.status == "REGISTERING":
            return HostState.STARTING
        if self.status in ("DRAINING", "DEREGISTERING"):
            return HostState.DRAINING
        if self.status != "ACTIVE" or not self.is_connected:
            return HostState.DOWN
        if not self.tasks and not resources.used_vcpus and not resources.used_gpus:
            return HostState.IDLE
        is_full = (
            resources.used_vcpus >= resources.vcpus or 0 < resources.gpus <= resources.used_gpus
        )
        return HostState.ALLOCATED if is_full else HostState.MIXED

    @property
    def takes_runs(self) -> bool:
        """Whether runs are placed on it as soon as enough of its resources are free."""
        return self.state in (HostState.ALLOCATED, HostState.MIXED, HostState.IDLE)
