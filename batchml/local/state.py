"""What the embedded AWS Batch knows, as one frozen value.

Records keep AWS's own JSON in `detail`, so that what was given is given back; what the rules need
is read from it through properties. `jobs` holds unfinished jobs only: finished ones live in the
store. `waiting`, `free`, `used`, `by_task`, `dependents` and `deadlines` are indexes, derived from
the jobs when the server starts (`engine.restore`).
"""

from typing import Any

from immutables import Map
from msgspec import Struct
from msgspec.structs import replace

from batchml.local.heap import Heap
from batchml.model.names import bare_name
from batchml.model.status import JobStatus

REGION = "us-east-1"
ACCOUNT = "000000000000"
CLUSTER = "batchml-local"
DEFAULT_LOG_GROUP = "/aws/batch/job"


def arn(kind: str, name: str) -> str:
    return f"arn:aws:batch:{REGION}:{ACCOUNT}:{kind}/{name}"


class Needs(Struct, frozen=True):
    """What one attempt occupies. Memory in MiB."""

    vcpus: int
    memory: int
    gpus: int = 0


class Machine(Struct, frozen=True):
    """What there is to give, or what is left of it. Memory in MiB; GPUs by name."""

    vcpus: int
    memory: int
    gpus: tuple[str, ...] = ()

    def fits(self, needs: Needs) -> bool:
        return (
            needs.vcpus <= self.vcpus
            and needs.memory <= self.memory
            and needs.gpus <= len(self.gpus)
        )

    def without(self, needs: Needs) -> "Machine":
        return Machine(
            self.vcpus - needs.vcpus, self.memory - needs.memory, self.gpus[needs.gpus :]
        )

    def plus(self, needs: Needs, gpus: tuple[str, ...]) -> "Machine":
        return Machine(
            self.vcpus + needs.vcpus,
            self.memory + needs.memory,
            tuple(sorted((*self.gpus, *gpus))),
        )


class Environment(Struct, frozen=True):
    """A compute environment."""

    name: str
    detail: dict[str, Any]

    @property
    def enabled(self) -> bool:
        return bool(self.detail["state"] == "ENABLED")

    @property
    def max_vcpus(self) -> int:
        if self.detail["type"] == "UNMANAGED":
            return int(self.detail["unmanagedvCpus"])
        return int(self.detail["computeResources"].get("maxvCpus", 0))


class Queue(Struct, frozen=True):
    """A job queue."""

    name: str
    detail: dict[str, Any]

    @property
    def enabled(self) -> bool:
        return bool(self.detail["state"] == "ENABLED")

    @property
    def priority(self) -> int:
        return int(self.detail["priority"])

    @property
    def environments(self) -> list[str]:
        order = sorted(self.detail["computeEnvironmentOrder"], key=lambda entry: entry["order"])
        return [bare_name(entry["computeEnvironment"]) for entry in order]


class Definition(Struct, frozen=True):
    """One revision of a job definition."""

    name: str
    revision: int
    detail: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.name}:{self.revision}"

    @property
    def active(self) -> bool:
        return bool(self.detail["status"] == "ACTIVE")


class Attempt(Struct, frozen=True):
    """The current try of a job. Times in ms since the epoch."""

    number: int
    task_id: str
    environment: str
    gpus: tuple[str, ...]
    log_group: str
    log_stream: str
    started_at: int | None = None

    @property
    def task_arn(self) -> str:
        return f"arn:aws:ecs:{REGION}:{ACCOUNT}:task/{CLUSTER}/{self.task_id}"


class Job(Struct, frozen=True):
    """A job. `attempts` holds AWS's AttemptDetail of each finished try, oldest first."""

    id: str
    name: str
    queue: str
    definition: str
    container: dict[str, Any]
    needs: Needs
    created_at: int
    sequence: int
    status: JobStatus = JobStatus.SUBMITTED
    status_reason: str = ""
    started_at: int | None = None
    stopped_at: int | None = None
    exit_code: int | None = None
    reason: str = ""
    retry: dict[str, Any] = {}
    timeout: int | None = None  # seconds of one attempt
    parameters: dict[str, str] = {}
    depends_on: tuple[dict[str, Any], ...] = ()
    waiting_for: tuple[str, ...] = ()  # jobs not finished yet
    dependency_failed: bool = False
    tags: dict[str, str] = {}
    propagate_tags: bool = False
    attempts: tuple[dict[str, Any], ...] = ()
    attempt: Attempt | None = None
    # Why a stop was asked for: the caller's reason, or the timeout. The job ends with it.
    stop_reason: str = ""
    cancelled: bool = False
    terminated: bool = False
    timed_out: bool = False

    @property
    def arn(self) -> str:
        return arn("job", self.id)

    @property
    def is_ending(self) -> bool:
        return self.cancelled or self.terminated or self.timed_out


class State(Struct, frozen=True):
    machine: Machine
    free: Machine
    environments: Map[str, Environment] = Map()
    queues: Map[str, Queue] = Map()
    definitions: Map[str, Definition] = Map()
    revisions: Map[str, int] = Map()
    jobs: Map[str, Job] = Map()
    by_task: Map[str, str] = Map()
    waiting: Map[str, Heap] = Map()
    used: Map[str, int] = Map()
    dependents: Map[str, tuple[str, ...]] = Map()
    deadlines: Heap = None
    sequence: int = 0


def empty(machine: Machine) -> State:
    return State(machine=machine, free=machine)


__all__ = [
    "ACCOUNT",
    "CLUSTER",
    "DEFAULT_LOG_GROUP",
    "REGION",
    "Attempt",
    "Definition",
    "Environment",
    "Job",
    "Machine",
    "Needs",
    "Queue",
    "State",
    "arn",
    "empty",
    "replace",
]
