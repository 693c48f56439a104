"""What the embedded AWS Batch knows, as one frozen value.

Records keep AWS's own JSON in `detail`, so that what was given is given back; what the rules need
is read from it through properties. `jobs` holds unfinished jobs only: finished ones live in the
store. The fields of `State` from `free` on are indexes, derived from the jobs when the server
starts (`engine.restore`).

A job is what changes, `Job`, and what was submitted, its `Spec`, which the children of an array
share: ten thousand of them cost one.
"""

from typing import Any, NamedTuple

from immutables import Map
from msgspec import Struct
from msgspec.structs import replace

from batchml.local.batch.fault_injection import Chaos
from batchml.local.batch.persistent_heap import Heap
from batchml.local.batch.records import (
    CONTROLLERS,
    RECORDS,
    Consumable,
    Definition,
    Environment,
    Policy,
    Queue,
    Record,
)
from batchml.model.run import JobStatus

REGION = "us-east-1"
ACCOUNT = "000000000000"
CLUSTER = "batchml-local"
DEFAULT_LOG_GROUP = "/aws/batch/job"

_FIELDS = {made.arn_kind: made.field for made in RECORDS}


def arn(kind: str, name: str) -> str:
    return f"arn:aws:batch:{REGION}:{ACCOUNT}:{kind}/{name}"


def instance_arn() -> str:
    """This machine, as ECS names a host."""
    return f"arn:aws:ecs:{REGION}:{ACCOUNT}:container-instance/{CLUSTER}/this-machine"


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

    def taking(self, needs: Needs, gpus: tuple[str, ...]) -> "Machine":
        """What is left once these GPUs, and vCPUs and memory, are given away."""
        left = tuple(gpu for gpu in self.gpus if gpu not in gpus) if gpus else self.gpus
        return Machine(self.vcpus - needs.vcpus, self.memory - needs.memory, left)

    def plus(self, needs: Needs, gpus: tuple[str, ...]) -> "Machine":
        return Machine(
            self.vcpus + needs.vcpus,
            self.memory + needs.memory,
            tuple(sorted((*self.gpus, *gpus))),
        )


class Nodes(Struct, frozen=True):
    """The shape of a multi-node parallel job."""

    count: int
    main: int


class Attempt(Struct, frozen=True, omit_defaults=True):
    """The current try of a job. Times in ms since the epoch.

    That of a multi-node parallel job holds what all of its nodes occupy, and has no log.

    A program is started at most once for each task id: `may_have_begun` is committed before that,
    and an attempt that is known not to have begun goes on under another task id.
    """

    number: int
    task_id: str
    environment: str
    gpus: tuple[str, ...]
    log_group: str = ""
    log_stream: str = ""
    started_at: int | None = None
    address: str = ""  # where the other nodes of its job reach it
    main_address: str = ""  # that of the main node
    # The failure that is rehearsed on it, in the words of `fault_injection.py`.
    doom: str = ""
    may_have_begun: bool = True  # unless it says otherwise: absence is no evidence
    task: int = 1  # which task id of this attempt it is

    @property
    def is_aside(self) -> bool:
        """True for a sweep's controller, which takes nothing of the machine."""
        return self.environment == CONTROLLERS

    @property
    def task_arn(self) -> str:
        return f"arn:aws:ecs:{REGION}:{ACCOUNT}:task/{CLUSTER}/{self.task_id}"


class Spec(Struct, frozen=True, omit_defaults=True):
    """What was submitted, worked out: definition and overrides merged. Never changes.

    `needs` is what one attempt occupies: of one child of an array, of all nodes together. Each
    range of nodes has a spec of its own beside the job's.
    """

    id: str
    name: str = ""
    queue: str = ""
    definition: str = ""
    container: dict[str, Any] = {}
    needs: Needs = Needs(0, 0)
    created_at: int = 0
    retry: dict[str, Any] = {}
    timeout: int | None = None  # seconds of one attempt
    parameters: dict[str, str] = {}
    depends_on: tuple[dict[str, Any], ...] = ()
    propagate_tags: bool = False
    share: str = ""
    priority: int = 0
    consumables: tuple[tuple[str, int], ...] = ()
    array_size: int | None = None
    nodes: Nodes | None = None
    node_properties: dict[str, Any] = {}
    # Why it cannot be dispatched, found out as it was submitted. It fails with this.
    flaw: str = ""


class Job(Struct, frozen=True, omit_defaults=True):
    """A job: one of its own, an array's parent or child, a multi-node job or one of its nodes.

    `attempts` holds AWS's AttemptDetail of each finished try, oldest first.
    """

    id: str
    spec: Spec
    sequence: int
    status: JobStatus = JobStatus.SUBMITTED
    status_reason: str = ""
    started_at: int | None = None
    stopped_at: int | None = None
    exit_code: int | None = None
    reason: str = ""
    waiting_for: tuple[str, ...] = ()  # jobs not finished yet
    dependency_failed: bool = False
    tags: dict[str, str] = {}
    attempts: tuple[dict[str, Any], ...] = ()
    attempt: Attempt | None = None
    index: int | None = None  # of an array's child
    node: int | None = None  # of a multi-node job's node
    summary: dict[str, int] = {}  # of an array that has ended: how many children ended how
    # Why a stop was asked for: the caller's reason, or the timeout. The job ends with it.
    stop_reason: str = ""
    cancelled: bool = False
    terminated: bool = False
    timed_out: bool = False

    @property
    def arn(self) -> str:
        return arn("job", self.id)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def queue(self) -> str:
        return self.spec.queue

    @property
    def definition(self) -> str:
        return self.spec.definition

    @property
    def container(self) -> dict[str, Any]:
        return self.spec.container

    @property
    def needs(self) -> Needs:
        return self.spec.needs

    @property
    def created_at(self) -> int:
        return self.spec.created_at

    @property
    def is_ending(self) -> bool:
        return self.cancelled or self.terminated or self.timed_out

    @property
    def parent(self) -> str:
        """The id of the array or multi-node job that it belongs to; empty for any other."""
        if self.index is None and self.node is None:
            return ""
        return parent_of(self.id)

    @property
    def is_array(self) -> bool:
        """True for an array's parent, which runs nothing itself."""
        return self.spec.array_size is not None and self.index is None

    @property
    def is_multinode(self) -> bool:
        """True for a multi-node job, whose nodes run and not it."""
        return self.spec.nodes is not None and self.node is None

    @property
    def is_main_node(self) -> bool:
        return self.spec.nodes is not None and self.node == self.spec.nodes.main

    def child_ids(self) -> list[str]:
        """The ids of an array's children or of a multi-node job's nodes."""
        if self.is_array:
            return [f"{self.id}:{index}" for index in range(self.spec.array_size or 0)]
        if self.is_multinode and self.spec.nodes is not None:
            return [f"{self.id}#{index}" for index in range(self.spec.nodes.count)]
        return []


def parent_of(job_id: str) -> str:
    """`j` for `j:3` and `j#0`."""
    return job_id.partition(":")[0].partition("#")[0]


class Blocked(Struct, frozen=True):
    """The job at the head of a queue that cannot start, and since when (ms) for which reason."""

    job_id: str
    since: int
    reason: str = ""


class Line(NamedTuple):
    """RUNNABLE jobs of one queue that wait for the same: for their turn in their share, or first
    for so much of a consumable resource.
    """

    share: str
    consumable: str = ""
    quantity: int = 0


class Usage(Struct, frozen=True):
    """What a share has used of late: vCPU-milliseconds that fade away, as of a time in ms."""

    faded: float = 0.0
    as_of: int = 0
    vcpus: int = 0  # running now


class State(Struct, frozen=True):
    machine: Machine
    free: Machine
    environments: Map[str, Environment] = Map()
    queues: Map[str, Queue] = Map()
    definitions: Map[str, Definition] = Map()
    revisions: Map[str, int] = Map()
    policies: Map[str, Policy] = Map()
    consumables: Map[str, Consumable] = Map()
    jobs: Map[str, Job] = Map()
    sequence: int = 0
    by_task: Map[str, str] = Map()
    lines: Map[str, Map[Line, Heap]] = Map()  # queue -> line -> RUNNABLE jobs in their order
    used: Map[str, int] = Map()  # environment -> vCPUs
    in_use: Map[str, int] = Map()  # consumable -> quantity that running jobs hold
    usage: Map[str, Map[str, Usage]] = Map()  # queue -> share
    blocked: Map[str, Blocked] = Map()  # queue -> its head
    dependents: Map[str, tuple[str, ...]] = Map()
    counts: Map[str, dict[str, int]] = Map()  # array -> status -> children
    deadlines: Heap = None
    faults: Heap = None  # failures that are to be rehearsed, by time
    chaos: Chaos | None = None  # what this server was started with
    no_capacity_until: int = 0  # ms; 0: there is capacity

    def record(self, arn_kind: str, key: str) -> Record | None:
        """What an ARN names, unless it is a job."""
        field = _FIELDS.get(arn_kind)
        found: Record | None = getattr(self, field).get(key) if field else None
        return found

    def policy_of(self, queue: str) -> dict[str, Any]:
        """The fair-share policy of a queue; empty when it has none."""
        record = self.queues.get(queue)
        policy = self.policies.get(record.policy) if record is not None else None
        return {} if policy is None else policy.fair_share


def empty(machine: Machine) -> State:
    return State(machine=machine, free=machine)


__all__ = [
    "ACCOUNT",
    "CLUSTER",
    "CONTROLLERS",
    "DEFAULT_LOG_GROUP",
    "RECORDS",
    "REGION",
    "Attempt",
    "Blocked",
    "Consumable",
    "Definition",
    "Environment",
    "Job",
    "Line",
    "Machine",
    "Needs",
    "Nodes",
    "Policy",
    "Queue",
    "Record",
    "Spec",
    "State",
    "Usage",
    "arn",
    "empty",
    "instance_arn",
    "parent_of",
    "replace",
]
