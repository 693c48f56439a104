"""Run and Attempt: a submitted job as it is read back, and what its end means."""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE

# --- status ---------------------------------------------------------------------------------------
# The states of a Batch job, in the order in which it goes through them.
#
# Source: AWS Batch User Guide, "Job states".


# The status reason of jobs and compute environments begins with this while the embedded AWS Batch
# cannot start programs: its disk is read-only, or its installation is gone.
CANNOT_START = "Programs cannot be started on this machine now: "


class JobStatus(StrEnum):
    SUBMITTED = "SUBMITTED"
    PENDING = "PENDING"
    RUNNABLE = "RUNNABLE"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def is_terminal(self) -> bool:
        return self in (JobStatus.SUCCEEDED, JobStatus.FAILED)

    @property
    def holds_resources(self) -> bool:
        """True while an attempt occupies vCPUs, memory and GPUs."""
        return self in (JobStatus.STARTING, JobStatus.RUNNING)

    @property
    def order(self) -> int:
        return list(JobStatus).index(self)


# --- spent budgets --------------------------------------------------------------------------------
# What a run's budget of running seconds says when the run is read back (pure).


# What the runtime exits with when a budget is spent: batchml/runtime/telemetry/budget.py
STOPPED = 143


class Timed(Protocol):
    """An attempt: `batchml.model.run.Attempt`."""

    @property
    def started_at(self) -> int | None: ...

    @property
    def stopped_at(self) -> int | None: ...


def max_seconds(environment: Mapping[str, str]) -> int:
    """The running seconds that a run was given, all attempts together; 0 for no limit."""
    text = environment.get("BATCHML_MAX_SECONDS", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def ran_seconds(attempts: Iterable[Timed]) -> float:
    """How long finished attempts ran, together."""
    return sum(
        max(0, attempt.stopped_at - attempt.started_at) / 1000
        for attempt in attempts
        if attempt.started_at and attempt.stopped_at
    )


def is_spent(
    environment: Mapping[str, str], exit_code: int | None, attempts: Iterable[Timed]
) -> bool:
    """True for the times and the code of a run whose budget of --max-cost was spent.

    A container's own words do not reach AWS Batch. It is asked to stop at three quarters of its
    seconds at the earliest. Whether it ended by itself is for `batchml.model.run` to say.
    """
    limit = max_seconds(environment)
    return bool(limit) and exit_code == STOPPED and ran_seconds(attempts) >= limit * 3 / 4 - 1


# --- run ------------------------------------------------------------------------------------------


class Attempt(Struct, frozen=True):
    """One finished or current try. Times are milliseconds since the epoch."""

    started_at: int | None = None
    stopped_at: int | None = None
    exit_code: int | None = None
    reason: str = ""  # of the container: "OutOfMemoryError: ...", "CannotPullContainerError: ..."
    status_reason: str = ""
    log_stream: str = ""
    host: str = ""  # the EC2 id where AWS tells it, else the id of the ECS container instance


class Run(Struct, frozen=True):
    """One submission. `attempts` holds finished ones, and the current one last while it runs.

    ListJobs tells less than DescribeJobs; what it leaves out stays at its default.
    """

    job_id: str
    name: str  # what people see; `job_name` is the whole of AWS's
    queue: str
    status: JobStatus
    status_reason: str = ""
    created_at: int | None = None
    started_at: int | None = None
    stopped_at: int | None = None
    exit_code: int | None = None
    reason: str = ""
    attempts: tuple[Attempt, ...] = ()
    log_group: str = "/aws/batch/job"
    is_cancelled: bool = False
    is_terminated: bool = False
    image: str = ""
    command: tuple[str, ...] = ()
    vcpus: int = 0
    memory_mib: int = 0
    gpus: int = 0
    definition: str = ""
    children: dict[str, int] = {}  # of an array: status -> how many
    failures: dict[str, int] = {}  # of its failed children: class -> how many; {} while unknown
    job_name: str = ""
    key: str = ""  # of the submission; "" for a job that was not submitted by batchml
    tags: dict[str, str] = {}
    params: dict[str, Any] = {}
    environment: dict[str, str] = {}  # may hold what should not be shown: never print it whole
    array_size: int = 0  # 0: no array
    array_index: int | None = None  # of a child
    nodes: int = 0  # 0: not multi-node
    node_index: int | None = None  # of one node
    depends_on: tuple[str, ...] = ()  # job ids
    is_sequential: bool = False  # an array whose children run one after the other
    share: str = ""  # of a queue with fair share
    consumables: dict[str, int] = {}  # name -> quantity
    max_attempts: int = 1
    timeout: int | None = None  # seconds, of one attempt
    host: str = ""  # of the attempt that runs or ran last

    def __repr__(self) -> str:
        code = "" if self.exit_code is None else f", exit_code={self.exit_code}"
        return f"Run({self.name!r}, {self.job_id!r}, {self.status.value}{code})"


class OutcomeClass(StrEnum):
    """What a finished run came to. Scripts rely on the names."""

    SUCCEEDED = "succeeded"
    APP_ERROR = "app-error"
    OUT_OF_MEMORY = "out-of-memory"
    TIMED_OUT = "timed-out"
    CANCELLED = "cancelled"
    HOST_LOST = "host-lost"
    IMAGE_ERROR = "image-error"
    DEPENDENCY_FAILED = "dependency-failed"
    UNSCHEDULABLE = "unschedulable"
    UNKNOWN = "unknown"


EXIT_CODES = {
    OutcomeClass.SUCCEEDED: 0,
    OutcomeClass.OUT_OF_MEMORY: 137,
    OutcomeClass.TIMED_OUT: 124,
    OutcomeClass.CANCELLED: 143,
    OutcomeClass.HOST_LOST: 75,
    OutcomeClass.IMAGE_ERROR: 125,
    OutcomeClass.DEPENDENCY_FAILED: 76,
    OutcomeClass.UNSCHEDULABLE: 69,
    OutcomeClass.UNKNOWN: 74,
}


class Outcome(NamedTuple):
    outcome: OutcomeClass
    exit_code: int


# What AWS Batch writes into `statusReason`; a text stands for all that begin with it. Sources: AWS
# Batch User Guide, "Troubleshooting" and "Jobs stuck in RUNNABLE"; API Reference,
# JobStateTimeLimitAction. Anything else there is what a caller of CancelJob or TerminateJob said.
_STATUS_REASONS = (
    ("Dependent Job failed", OutcomeClass.DEPENDENCY_FAILED),
    ("Job attempt duration exceeded timeout", OutcomeClass.TIMED_OUT),
    ("Host EC2", OutcomeClass.HOST_LOST),
    ("JobQueue deleted", OutcomeClass.CANCELLED),
    ("Container Overrides length must be at most", OutcomeClass.UNSCHEDULABLE),
    ("CAPACITY:", OutcomeClass.UNSCHEDULABLE),
    ("MISCONFIGURATION:", OutcomeClass.UNSCHEDULABLE),
)
_DID_NOT_START = "Task failed to start"
_EXITED = "Essential container in task exited"
_CHILD_FAILED = "Array Child Job failed"
_MIXED = OutcomeClass.APP_ERROR  # of children that failed in several ways, or in unknown ones

# What ECS writes into a container's `reason`. Source: ECS Developer Guide, "Stopped tasks error
# messages". `Cannot...` is pulling, creating, starting, inspecting, and making volumes.
_CONTAINER_REASONS = (
    ("OutOfMemoryError", OutcomeClass.OUT_OF_MEMORY),
    ("Cannot", OutcomeClass.IMAGE_ERROR),
    ("DockerTimeoutError", OutcomeClass.IMAGE_ERROR),
    ("ContainerRuntimeError", OutcomeClass.IMAGE_ERROR),
    ("ContainerRuntimeTimeoutError", OutcomeClass.IMAGE_ERROR),
    ("ResourceInitializationError", OutcomeClass.IMAGE_ERROR),
    ("TaskFailedToStart", OutcomeClass.IMAGE_ERROR),
    ("SpotInterruptionError", OutcomeClass.HOST_LOST),
)


def classify(run: Run) -> Outcome:
    """Say what a finished run came to, and the code that `submit --wait` exits with.

    A run that has not finished is `unknown`. An array is what its failed children all came to; when
    they differ, or nobody has looked, `app-error`.
    """
    outcome = _class(run)
    if outcome is OutcomeClass.APP_ERROR:
        return Outcome(outcome, run.exit_code or 1)
    return Outcome(outcome, EXIT_CODES[outcome])


def _class(run: Run) -> OutcomeClass:
    if run.status is JobStatus.SUCCEEDED:
        return OutcomeClass.SUCCEEDED
    if run.status is not JobStatus.FAILED:
        return OutcomeClass.UNKNOWN
    # JobStateTimeLimit actions cancel too, so this comes before "cancelled".
    if run.status_reason.startswith("Canceled by JobStateTimeLimit"):
        return OutcomeClass.UNSCHEDULABLE
    if run.is_cancelled or run.is_terminated or is_out_of_budget(run):
        return OutcomeClass.CANCELLED
    if run.status_reason == _CHILD_FAILED:
        return OutcomeClass(next(iter(run.failures))) if len(run.failures) == 1 else _MIXED
    return class_of(run.status_reason, run.reason, run.exit_code, is_ours=bool(run.key))


def with_failures(array: Run, failed: Iterable[Run]) -> Run:
    """An array that knows how its children failed, if these are all that did. Else as it was."""
    counted = Counter(_class(child).value for child in failed if child.status is JobStatus.FAILED)
    if not counted or counted.total() != array.children.get(JobStatus.FAILED.value):
        return array
    return replace(array, failures=dict(counted.most_common()))


def is_out_of_budget(run: Run) -> bool:
    """True for a run with `--max-cost` that ended as our runtime ends one whose budget is spent.

    That is by itself: not by a caller, its timeout, or the loss of its host. Of a run that AWS
    Batch has forgotten no variable is known, but that it was stopped.
    """
    if not run.status_reason.startswith(_EXITED):
        return False
    was_kept = run.is_terminated and not run.environment
    return was_kept or is_spent(run.environment, run.exit_code, run.attempts)


def class_of(
    status_reason: str, reason: str, exit_code: int | None, *, is_ours: bool = False
) -> OutcomeClass:
    """What the end of one attempt was, by the texts of AWS Batch and ECS and the exit code.

    `is_ours`: batchml submitted it, so its runtime may have chosen the code. `app-error` for code
    0, too: whoever asks knows that the attempt failed.
    """
    for text, outcome in _STATUS_REASONS:
        if status_reason.startswith(text):
            return outcome
    for text, outcome in _CONTAINER_REASONS:
        if reason.startswith(text):
            return outcome
    if status_reason.startswith(_DID_NOT_START):
        return OutcomeClass.IMAGE_ERROR
    if is_ours and exit_code == TRY_ELSEWHERE:
        return OutcomeClass.HOST_LOST
    return OutcomeClass.UNKNOWN if exit_code is None else OutcomeClass.APP_ERROR


# --- arrays ---------------------------------------------------------------------------------------
# How far an array is: by its children, as every command says it.


MAX_ARRAY = 10_000  # children of one array; AWS Batch takes 2 or more

IN_QUEUE = ("SUBMITTED", "PENDING", "RUNNABLE")  # of `shown_state`: nothing of it has begun
_BEGUN = ("STARTING", "RUNNING", "SUCCEEDED", "FAILED")
_LIVE = ("RUNNING", "STARTING", "RUNNABLE")


def shown_state(run: Run) -> str:
    """AWS Batch calls an array PENDING while its children run; people would not."""
    if run.status is JobStatus.PENDING and run.children:
        if any(run.children.get(status) for status in _BEGUN):
            return JobStatus.RUNNING.value
        if run.children.get("RUNNABLE"):
            return JobStatus.RUNNABLE.value
    return run.status.value


def state_text(run: Run) -> str:
    """A run's state; of an array how far it is: `2 RUNNING, 4/6 done`, `FAILED, 2 of 6`."""
    if not run.children:
        return run.status.value
    failed, size = run.children.get("FAILED", 0), array_size(run)
    if run.status.is_terminal:
        return f"{run.status}, {failed or size} of {size}"
    live = next((each for each in _LIVE if run.children.get(each)), "RUNNING")
    words = f"{run.children.get(live, 0)} {live}, {done(run)}/{size} done"
    return f"{words}, {failed} FAILED" if failed else words


def done(run: Run) -> int:
    """How many children have ended."""
    return run.children.get("SUCCEEDED", 0) + run.children.get("FAILED", 0)


def array_size(run: Run) -> int:
    return run.array_size or sum(run.children.values())


def has_begun(run: Run) -> bool:
    """True for an array of which a child has started, or may have and is over."""
    return any(run.children.get(status) for status in _BEGUN)


def first_child(job_id: str) -> str:
    """The child that begins first: AWS tells of it, but not of the array, when it was started."""
    return f"{job_id}:0"


def began(child: Run | None) -> int | None:
    """When a child was started first, in ms; None while it was not, or is not known."""
    if child is None:
        return None
    known = [child.started_at, *(attempt.started_at for attempt in child.attempts)]
    return min(filter(None, known), default=None)
