"""The state of the embedded AWS Batch, as one frozen value.

Resources keep AWS's own JSON in `detail`, so that a caller reads back what it has sent; properties
read from it what the rules need. `jobs` holds unfinished jobs only: finished ones are in the
journal. `free` and the fields of `BatchState` from `by_task` to `faults` are indexes, derived from
the jobs when the server starts (`engine.restore`).

A job consists of `Job`, which changes, and `SubmittedSpec`, which does not. The children of an
array share one spec.
"""

from typing import Any, ClassVar, NamedTuple

from immutables import Map
from msgspec import Struct

from batchml.local.batch.fault_injection import Chaos
from batchml.local.batch.persistent_heap import Heap
from batchml.local.machine import MachineCapacity, Needs
from batchml.model.names import bare_name
from batchml.model.run import JobStatus

# --- Resources that users set up ------------------------------------------------------------------

# The compute environment, and the queue, of controllers of sweeps and fallbacks. They take no
# resources of the machine: a controller must be able to run while its jobs take all of them.
# Nothing else runs there.
CONTROLLERS = "controllers"


class ResourceRecord(Struct, frozen=True):
    """A resource that exists until it is deleted: its name, and AWS's own JSON.

    `kind` is its type in the journal, `arn_kind` in an ARN; `field` its attribute of `BatchState`.
    `name_key` and `arn_key` are AWS's members for its name and its ARN.
    """

    kind: ClassVar[str]
    field: ClassVar[str]
    arn_kind: ClassVar[str]
    name_key: ClassVar[str]
    arn_key: ClassVar[str]

    name: str
    detail: dict[str, Any]

    @property
    def key(self) -> str:
        return self.name

    def identifiers(self) -> dict[str, Any]:
        """Its name and its ARN, as AWS answers a call that creates or updates it."""
        return {self.name_key: self.name, self.arn_key: self.detail[self.arn_key]}


class ComputeEnvironment(ResourceRecord, frozen=True):
    """A compute environment."""

    kind = "environment"
    field = "environments"
    arn_kind = "compute-environment"
    name_key, arn_key = "computeEnvironmentName", "computeEnvironmentArn"

    @property
    def enabled(self) -> bool:
        return bool(self.detail["state"] == "ENABLED")

    @property
    def max_vcpus(self) -> int:
        if self.detail["type"] == "UNMANAGED":
            return int(self.detail["unmanagedvCpus"])
        return int(self.detail["computeResources"].get("maxvCpus", 0))

    @property
    def takes_nodes(self) -> bool:
        """Whether multi-node jobs can run here: AWS refuses spot instances and unmanaged
        environments.
        """
        if self.detail["type"] == "UNMANAGED":
            return False
        return bool(self.detail["computeResources"].get("type") == "EC2")


class JobQueue(ResourceRecord, frozen=True):
    """A job queue."""

    kind = "queue"
    field = "queues"
    arn_kind = "job-queue"
    name_key, arn_key = "jobQueueName", "jobQueueArn"

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

    @property
    def is_deleting(self) -> bool:
        """True while the jobs of a deleted queue are ended."""
        return bool(self.detail.get("status") == "DELETING")

    @property
    def policy(self) -> str:
        """The name of its scheduling policy; empty for a first-in-first-out queue."""
        return bare_name(self.detail.get("schedulingPolicyArn", ""))


class JobDefinition(ResourceRecord, frozen=True):
    """One revision of a job definition."""

    kind = "definition"
    field = "definitions"
    arn_kind = "job-definition"
    name_key, arn_key = "jobDefinitionName", "jobDefinitionArn"

    revision: int

    @property
    def key(self) -> str:
        return f"{self.name}:{self.revision}"

    @property
    def active(self) -> bool:
        return bool(self.detail["status"] == "ACTIVE")


class SchedulingPolicy(ResourceRecord, frozen=True):
    """A scheduling policy: how the shares of a queue divide the capacity."""

    kind = "policy"
    field = "policies"
    arn_kind = "scheduling-policy"
    name_key, arn_key = "name", "arn"

    @property
    def fair_share(self) -> dict[str, Any]:
        return dict(self.detail.get("fairsharePolicy", {}))


class ConsumableResource(ResourceRecord, frozen=True):
    """A consumable resource. `spent` is the quantity that jobs have used up, if it is not
    replenishable.
    """

    kind = "consumable"
    field = "consumables"
    arn_kind = "consumable-resource"
    name_key, arn_key = "consumableResourceName", "consumableResourceArn"

    total: int
    spent: int = 0
    updates: dict[str, tuple[int, str, int]] = {}  # token -> when (ms), operation, quantity

    @property
    def replenishable(self) -> bool:
        return bool(self.detail["resourceType"] == "REPLENISHABLE")


RECORDS: tuple[type[ResourceRecord], ...] = (
    ComputeEnvironment,
    JobQueue,
    JobDefinition,
    SchedulingPolicy,
    ConsumableResource,
)


# --- Jobs and the state ---------------------------------------------------------------------------

REGION = "us-east-1"
ACCOUNT = "000000000000"
CLUSTER = "batchml-local"
DEFAULT_LOG_GROUP = "/aws/batch/job"

_FIELDS = {kind.arn_kind: kind.field for kind in RECORDS}


def arn(kind: str, name: str) -> str:
    return f"arn:aws:batch:{REGION}:{ACCOUNT}:{kind}/{name}"


def instance_arn() -> str:
    """This machine's ARN as a container instance of ECS."""
    return f"arn:aws:ecs:{REGION}:{ACCOUNT}:container-instance/{CLUSTER}/this-machine"


class Nodes(Struct, frozen=True):
    """The number of nodes of a multi-node parallel job, and the index of the main node."""

    count: int
    main: int


class JobAttempt(Struct, frozen=True, omit_defaults=True):
    """The current attempt of a job. Times in ms since the epoch.

    The attempt of a multi-node parallel job holds the resources of all nodes, and has no log.

    A program is started at most once for each task id: `may_have_begun` is committed before the
    start, and an attempt whose program certainly never began continues under another task id.
    """

    number: int
    task_id: str
    environment: str
    gpus: tuple[str, ...]
    log_group: str = ""
    log_stream: str = ""
    started_at: int | None = None
    address: str = ""  # its address for the other nodes of its job
    main_address: str = ""  # the main node's address
    # The injected fault, in the syntax of `fault_injection.py`; empty for none.
    doom: str = ""
    may_have_begun: bool = True  # without evidence that it did not begin
    task: int = 1  # the number of the task id within this attempt

    @property
    def is_controller(self) -> bool:
        """True for a controller of a sweep or fallback, which takes no resources of the machine."""
        return self.environment == CONTROLLERS

    @property
    def task_arn(self) -> str:
        return f"arn:aws:ecs:{REGION}:{ACCOUNT}:task/{CLUSTER}/{self.task_id}"


class SubmittedSpec(Struct, frozen=True, omit_defaults=True):
    """The submitted job: its definition merged with the overrides. Never changes.

    `needs` is what one attempt occupies: one child of an array, or all nodes together. Each range
    of nodes has a spec of its own besides the job's.
    """

    id: str
    name: str = ""
    queue: str = ""
    definition: str = ""
    container: dict[str, Any] = {}
    needs: Needs = Needs(0, 0)
    created_at: int = 0
    retry: dict[str, Any] = {}
    timeout: int | None = None  # seconds for one attempt
    parameters: dict[str, str] = {}
    depends_on: tuple[dict[str, Any], ...] = ()
    propagate_tags: bool = False
    share: str = ""
    priority: int = 0
    consumables: tuple[tuple[str, int], ...] = ()
    array_size: int | None = None
    nodes: Nodes | None = None
    node_properties: dict[str, Any] = {}
    # Why the job cannot be dispatched, found at submission. The job fails with this reason.
    flaw: str = ""


class Job(Struct, frozen=True, omit_defaults=True):
    """A single job, an array's parent or child, a multi-node job, or one of its nodes.

    `attempts` holds AWS's AttemptDetail of each ended attempt, oldest first.
    """

    id: str
    spec: SubmittedSpec
    sequence: int
    status: JobStatus = JobStatus.SUBMITTED
    status_reason: str = ""
    started_at: int | None = None
    stopped_at: int | None = None
    exit_code: int | None = None
    reason: str = ""
    waiting_for: tuple[str, ...] = ()  # jobs that have not finished yet
    dependency_failed: bool = False
    tags: dict[str, str] = {}
    attempts: tuple[dict[str, Any], ...] = ()
    attempt: JobAttempt | None = None
    index: int | None = None  # the index of an array's child
    node: int | None = None  # the index of a multi-node job's node
    summary: dict[str, int] = {}  # of an ended array: status -> number of children
    # Why a stop was requested: the caller's reason, or the timeout. It becomes the status reason.
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
        """The id of the array or multi-node job that it belongs to; empty for other jobs."""
        if self.index is None and self.node is None:
            return ""
        return parent_of(self.id)

    @property
    def is_array(self) -> bool:
        """True for an array's parent, which runs nothing itself."""
        return self.spec.array_size is not None and self.index is None

    @property
    def is_multinode(self) -> bool:
        """True for a multi-node job, whose nodes run instead of itself."""
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
    """The id of the parent: `j` for `j:3` and `j#0`."""
    return job_id.partition(":")[0].partition("#")[0]


class BlockedHead(Struct, frozen=True):
    """The first job of a queue when it cannot start: since when (ms), and why."""

    job_id: str
    since: int
    reason: str = ""


class QueueLine(NamedTuple):
    """RUNNABLE jobs of one queue that wait for the same thing: for their share's turn or, before
    that, for a quantity of a consumable resource.
    """

    share: str
    consumable: str = ""
    quantity: int = 0


class ShareUsage(Struct, frozen=True):
    """The recent usage of a share: vCPU-milliseconds that decay with time, as of a time in ms."""

    decayed: float = 0.0
    as_of: int = 0
    vcpus: int = 0  # vCPUs in use now


# The newest job that waits for a job, and the others before it: a job that is added copies none.
Dependents = tuple[str, Any] | None


class BatchState(Struct, frozen=True):
    """The resources of users, the unfinished jobs, and the indexes. Times in ms."""

    machine: MachineCapacity
    free: MachineCapacity
    environments: Map[str, ComputeEnvironment] = Map()
    queues: Map[str, JobQueue] = Map()
    definitions: Map[str, JobDefinition] = Map()
    revisions: Map[str, int] = Map()  # name of a definition -> its newest revision
    policies: Map[str, SchedulingPolicy] = Map()
    consumables: Map[str, ConsumableResource] = Map()
    jobs: Map[str, Job] = Map()
    sequence: int = 0  # of the newest job
    by_task: Map[str, str] = Map()  # task id -> job id
    lines: Map[str, Map[QueueLine, Heap]] = Map()  # queue -> line -> RUNNABLE jobs in their order
    used: Map[str, int] = Map()  # compute environment -> vCPUs in use
    in_use: Map[str, int] = Map()  # consumable resource -> quantity in use
    usage: Map[str, Map[str, ShareUsage]] = Map()  # queue -> share -> its recent usage
    blocked: Map[str, BlockedHead] = Map()  # queue -> its first job, if that cannot start
    dependents: Map[str, Dependents] = Map()  # job -> the jobs that wait for it
    counts: Map[str, dict[str, int]] = Map()  # array -> status -> number of children
    deadlines: Heap = None  # ends of attempts' timeouts, by time
    faults: Heap = None  # faults to inject, by time
    chaos: Chaos | None = None  # the faults that this server was started to inject
    no_capacity_until: int = 0  # 0: there is capacity

    def record(self, arn_kind: str, key: str) -> ResourceRecord | None:
        """The resource that an ARN names, except jobs."""
        field = _FIELDS.get(arn_kind)
        found: ResourceRecord | None = getattr(self, field).get(key) if field else None
        return found

    def jobs_with_attempt(self) -> list[Job]:
        """The jobs and nodes that have an attempt, in the order of their submission."""
        jobs = [self.jobs[job_id] for job_id in self.by_task.values()]
        return sorted(jobs, key=lambda job: job.sequence)

    def quantity_in_use(self, record: ConsumableResource) -> int:
        """The quantity of a consumable resource that jobs hold or have used up."""
        return record.spent + self.in_use.get(record.name, 0)

    def policy_of(self, queue: str) -> dict[str, Any]:
        """The fair-share policy of a queue; empty when it has none."""
        record = self.queues.get(queue)
        policy = self.policies.get(record.policy) if record is not None else None
        return {} if policy is None else policy.fair_share


def empty_state(machine: MachineCapacity) -> BatchState:
    return BatchState(machine=machine, free=machine)
