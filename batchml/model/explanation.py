"""The explanation of why a run waits or failed, and the AWS state that it is based on."""

from msgspec import Struct


class Explanation(Struct, frozen=True):
    """A verdict, its evidence, a fix in words, and a command that fixes the problem or shows more.

    `cause` is a word for scripts. `is_problem` is False if the user only has to wait. The texts
    contain texts of AWS and of the user's program: make them printable before you show them.
    """

    cause: str
    verdict: str
    evidence: tuple[str, ...] = ()
    fix: str = ""
    command: str = ""
    is_problem: bool = True

    def __repr__(self) -> str:
        command = f", command={self.command!r}" if self.command else ""
        return f"Explanation({self.cause!r}, {self.verdict!r}{command})"


class QueueState(Struct, frozen=True):
    """A job queue."""

    name: str
    is_enabled: bool = True
    status: str = "VALID"
    status_reason: str = ""
    environments: tuple[str, ...] = ()  # compute environments, in the queue's order
    policy: str = ""  # the scheduling policy of a queue with fair share
    priority: int = 0
    project: str = ""  # whose `setup` made it on `local`; "" for a queue of all projects


class ComputeState(Struct, frozen=True):
    """A compute environment. The numbers of vCPUs are 0 if AWS Batch does not manage it."""

    name: str
    is_enabled: bool = True
    status: str = "VALID"
    status_reason: str = ""
    max_vcpus: int = 0
    desired_vcpus: int = 0
    is_spot: bool = False
    is_managed: bool = True
    instance_types: tuple[str, ...] = ()
    cluster: str = ""  # ARN of the ECS cluster
    service_role: str = ""
    ami: str = ""  # the user's own AMI, or ""
    min_vcpus: int = 0


class WaitingJob(Struct, frozen=True):
    """A job at the front of a queue."""

    job_id: str
    since: int  # ms since the epoch: the earliest time at which it had its position


class QueueSnapshot(Struct, frozen=True):
    """The front of a queue (at most 100 runs), and the vCPUs that the queue's runs use."""

    front: tuple[WaitingJob, ...] = ()
    used_vcpus: float = 0.0
    active_shares: int = 0  # the number of share identifiers with jobs
    shares: dict[str, float] = {}  # the vCPUs in use by the largest shares

    def position_of(self, job_id: str) -> int | None:
        """The position of a run, from 0; None if it is not in `front`."""
        ids = [waiting.job_id for waiting in self.front]
        return ids.index(job_id) if job_id in ids else None


class ScalingActivity(Struct, frozen=True):
    """An attempt of an Auto Scaling group to start or end instances."""

    group: str
    status: str  # Successful, Failed, Cancelled, InProgress, ...
    message: str = ""
    description: str = ""
    at: int = 0  # ms since the epoch


class HostType(Struct, frozen=True):
    """An EC2 instance type."""

    name: str
    vcpus: int
    memory_mib: int
    gpus: int = 0
    architectures: tuple[str, ...] = ()


class ConsumableState(Struct, frozen=True):
    """A consumable resource."""

    name: str
    total: int
    in_use: int


class InstanceState(Struct, frozen=True):
    """An EC2 instance on which a run was. EC2 forgets it about an hour after its end."""

    instance_id: str
    is_spot: bool
    state: str
    reason: str = ""
