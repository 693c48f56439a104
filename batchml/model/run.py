"""Run and Attempt: a submitted job as it is read back, and what its end means."""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from batchml.model.budget import is_spent
from batchml.model.status import JobStatus
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE


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
