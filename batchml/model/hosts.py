"""Hosts, as people who look at a cluster know them: what they have, and what of it is taken."""

from enum import StrEnum

from msgspec import Struct


class HostState(StrEnum):
    """Slurm's words. All but STARTING and DOWN are of hosts that have joined their cluster."""

    ALLOCATED = "allocated"  # every vCPU, or every GPU, is taken
    MIXED = "mixed"
    IDLE = "idle"
    DRAINING = "draining"  # what runs there goes on, and nothing new is placed
    STARTING = "starting"
    DOWN = "down"  # its agent is not heard: nothing is placed there


class Room(Struct, frozen=True):
    """What there is, and what of it is taken. Memory in MiB."""

    vcpus: float = 0
    memory_mib: int = 0
    gpus: int = 0
    used_vcpus: float = 0
    used_memory_mib: int = 0
    used_gpus: int = 0

    def plus(self, other: "Room") -> "Room":
        return Room(
            self.vcpus + other.vcpus,
            self.memory_mib + other.memory_mib,
            self.gpus + other.gpus,
            self.used_vcpus + other.used_vcpus,
            self.used_memory_mib + other.used_memory_mib,
            self.used_gpus + other.used_gpus,
        )

    def holds(self, vcpus: int, memory_mib: int, gpus: int) -> bool:
        """Whether so much is free."""
        return (
            vcpus <= self.vcpus - self.used_vcpus
            and memory_mib <= self.memory_mib - self.used_memory_mib
            and gpus <= self.gpus - self.used_gpus
        )


class ClusterHost(Struct, frozen=True):
    """A host of a compute environment. Members that AWS does not tell are empty.

    `status` is that of ECS; `is_heard` whether its agent answers. `since` in ms: when it joined, or
    when EC2 started it.
    """

    id: str  # of the container instance, as runs name it; of EC2 before it has joined
    cluster: str = ""  # ARN; empty before it has joined
    compute: str = ""  # the compute environment, where no cluster says it
    instance: str = ""  # EC2's id
    type: str = ""
    zone: str = ""
    status: str = "ACTIVE"
    is_heard: bool = True
    tasks: int = 0
    since: int = 0
    room: Room = Room()

    @property
    def name(self) -> str:
        """What it is called: as EC2 does, where that is known."""
        return self.instance or self.id

    @property
    def state(self) -> HostState:
        room = self.room
        if self.status == "REGISTERING":
            return HostState.STARTING
        if self.status in ("DRAINING", "DEREGISTERING"):
            return HostState.DRAINING
        if self.status != "ACTIVE" or not self.is_heard:
            return HostState.DOWN
        if not self.tasks and not room.used_vcpus and not room.used_gpus:
            return HostState.IDLE
        is_full = room.used_vcpus >= room.vcpus or 0 < room.gpus <= room.used_gpus
        return HostState.ALLOCATED if is_full else HostState.MIXED

    @property
    def takes_runs(self) -> bool:
        return self.state in (HostState.ALLOCATED, HostState.MIXED, HostState.IDLE)
