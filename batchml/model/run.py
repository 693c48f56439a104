"""Run and Attempt: a submitted job as it is read back, and what its end means."""

from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from batchml.model.status import JobStatus


class Attempt(Struct, frozen=True):
    """One finished or current try. Times are milliseconds since the epoch."""

    started_at: int | None = None
    stopped_at: int | None = None
    exit_code: int | None = None
    reason: str = ""  # of the container: "OutOfMemoryError: ...", "CannotPullContainerError: ..."
    status_reason: str = ""
    log_stream: str = ""


class Run(Struct, frozen=True):
    """One submission. `attempts` holds finished ones, and the current one last while it runs."""

    job_id: str
    name: str
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


_START_FAILURES = (
    "CannotPull",
    "CannotStart",
    "CannotCreate",
    "CannotInspect",
    "DockerTimeoutError",
    "ResourceInitializationError",
)


class Outcome(NamedTuple):
    outcome: OutcomeClass
    exit_code: int


def classify(run: Run) -> Outcome:
    """Say what a finished run came to, and the code that `submit --wait` exits with.

    The texts are AWS Batch's own (User Guide, "Job states" and "Troubleshooting"). A run that has
    not finished is `unknown`.
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
    because = run.status_reason
    # JobStateTimeLimit actions cancel too, so this comes before "cancelled".
    if because.startswith("Canceled by JobStateTimeLimit"):
        return OutcomeClass.UNSCHEDULABLE
    if run.is_cancelled or run.is_terminated:
        return OutcomeClass.CANCELLED
    if because == "Dependent Job failed":
        return OutcomeClass.DEPENDENCY_FAILED
    if because == "Job attempt duration exceeded timeout":
        return OutcomeClass.TIMED_OUT
    if because.startswith("Host EC2"):
        return OutcomeClass.HOST_LOST
    if run.reason.startswith("OutOfMemoryError"):
        return OutcomeClass.OUT_OF_MEMORY
    if because == "Task failed to start" or run.reason.startswith(_START_FAILURES):
        return OutcomeClass.IMAGE_ERROR
    if run.exit_code is None and because != "Array Child Job failed":
        return OutcomeClass.UNKNOWN
    return OutcomeClass.APP_ERROR
