"""A run, its attempts and its outcome, as AWS Batch reports them; its record in the history."""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from batchml.model.tables import parse_duration
from batchml.runtime.protocol.exit_codes import CRASH_LOOP, IDLE, STOPPED, TRY_ELSEWHERE
from batchml.runtime.protocol.launch import VARIABLE, LaunchPlan
from batchml.runtime.protocol.variables import IDLE_AFTER, read_data

# --- Status ---------------------------------------------------------------------------------------


# The status reason of waiting jobs and of compute environments begins with this text while the
# embedded AWS Batch cannot start programs: its disk is read-only, or its installation was deleted.
CANNOT_START = "Programs cannot be started on this machine now: "


class JobStatus(StrEnum):
    """The states of a job, in order. Source: AWS Batch User Guide, "Job states"."""

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
        """Whether an attempt occupies vCPUs, memory and GPUs in this state."""
        return self in (JobStatus.STARTING, JobStatus.RUNNING)

    @property
    def order(self) -> int:
        return list(JobStatus).index(self)


# --- Budgets (--max-cost) -------------------------------------------------------------------------


class TimedAttempt(Protocol):
    """The times of an attempt, in ms since the epoch."""

    @property
    def started_at(self) -> int | None: ...

    @property
    def stopped_at(self) -> int | None: ...


def max_seconds(environment: Mapping[str, str]) -> int:
    """The budget of a run in seconds, for all attempts together; 0 for no limit."""
    text = environment.get("BATCHML_MAX_SECONDS", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def ran_seconds(attempts: Iterable[TimedAttempt]) -> float:
    """The seconds that the finished attempts ran, together."""
    return sum(
        max(0, attempt.stopped_at - attempt.started_at) / 1000
        for attempt in attempts
        if attempt.started_at and attempt.stopped_at
    )


def is_spent(
    environment: Mapping[str, str], exit_code: int | None, attempts: Iterable[TimedAttempt]
) -> bool:
    """Whether a run's budget was spent, as its attempts' times and its exit code tell.

    AWS Batch reports nothing else about a budget. The runtime stops a run after three quarters of
    its budget at the earliest. See also `is_out_of_budget`.
    """
    limit = max_seconds(environment)
    return bool(limit) and exit_code == STOPPED and ran_seconds(attempts) >= limit * 3 / 4 - 1


# --- Run ------------------------------------------------------------------------------------------


SWEEP_TAG = "batchml:sweep"  # on the runs of a sweep: its key
PROJECT_TAG = "batchml:project"  # on every run: the identity of its project


class Attempt(Struct, frozen=True):
    """One execution of a run's container. Times are in ms since the epoch."""

    started_at: int | None = None
    stopped_at: int | None = None
    exit_code: int | None = None
    reason: str = ""  # of the container: "OutOfMemoryError: ...", "CannotPullContainerError: ..."
    status_reason: str = ""
    log_stream: str = ""
    host: str = ""  # EC2's id if AWS reports it, else the id of the ECS container instance


class Run(Struct, frozen=True):
    """A job of AWS Batch. The last of `attempts` may still run. Times are in ms since the epoch.

    Fields that ListJobs does not report have their defaults in its results.
    """

    job_id: str
    name: str  # without the key of the submission; `job_name` is the name in AWS, with the key
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
    neurons: int = 0  # Neuron chips
    definition: str = ""
    children: dict[str, int] = {}  # of an array: the number of children by status
    failures: dict[str, int] = {}  # of an array: the number of failed children by outcome class
    job_name: str = ""
    key: str = ""  # of the submission; "" for a job that batchml did not submit
    tags: dict[str, str] = {}
    params: dict[str, Any] = {}
    environment: dict[str, str] = {}  # may have secrets: never print all of it
    array_size: int = 0  # 0: not an array
    array_index: int | None = None  # the index of a child
    nodes: int = 0  # 0: not multi-node
    node_index: int | None = None  # the index of a node
    depends_on: tuple[str, ...] = ()  # job ids
    is_sequential: bool = False  # an array whose children run one after the other
    share: str = ""  # the share identifier, in a queue with fair share
    consumables: dict[str, int] = {}  # the quantity of each consumable resource
    max_attempts: int = 1
    timeout: int | None = None  # seconds, of one attempt
    host: str = ""  # of the last attempt

    @property
    def data(self) -> dict[str, str]:
        """The data sets of the run: name -> address."""
        try:
            return read_data(self.environment)
        except ValueError:
            return {}  # the runtime has refused them

    @property
    def project(self) -> str:
        """The identity of its project; "" for runs of other programs, and of earlier versions."""
        return self.tags.get(PROJECT_TAG, "")

    def __repr__(self) -> str:
        code = "" if self.exit_code is None else f", exit_code={self.exit_code}"
        return f"Run({self.name!r}, {self.job_id!r}, {self.status.value}{code})"


class OutcomeClass(StrEnum):
    """The class of a run's outcome. The values are for scripts, so they never change."""

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
    """An outcome class, and the exit code of `submit --wait` for it."""

    outcome: OutcomeClass
    exit_code: int


# The beginnings of AWS Batch's texts in `statusReason`. Sources: AWS Batch User Guide,
# "Troubleshooting" and "Jobs stuck in RUNNABLE"; API Reference, JobStateTimeLimitAction. Other
# texts are the reasons of callers of CancelJob and TerminateJob.
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
_MIXED = OutcomeClass.APP_ERROR  # if the children have several outcomes, or unknown outcomes

# The beginning of the server's text while it makes the environment of a process, and the steps that
# follow each other within seconds: a line that is redrawn shows them.
MAKING = "Making the environment "
_STEPS = ("finding ", "fetching ", "building ", "installing ", "made in ")

# The beginnings of ECS's texts in a container's `reason`. Source: ECS Developer Guide, "Stopped
# tasks error messages". Texts with `Cannot...` are about images, containers and volumes.
# Docker's text for a device of the definition that the host does not have.
NO_DEVICE = "CannotStartContainerError: Error response from daemon: error gathering device"

_CONTAINER_REASONS = (
    (NO_DEVICE, OutcomeClass.HOST_LOST),
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
    """The outcome of a finished run, and the exit code of `submit --wait`.

    A run that has not finished is `unknown`. An array has the outcome of its failed children; if
    they differ or are unknown, it is an `app-error`.
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
    """Return an array with the outcomes of its failed children, if `failed` has all of them."""
    counted = Counter(_class(child).value for child in failed if child.status is JobStatus.FAILED)
    if not counted or counted.total() != array.children.get(JobStatus.FAILED.value):
        return array
    return replace(array, failures=dict(counted.most_common()))


def is_out_of_budget(run: Run) -> bool:
    """Whether the runtime ended the run because its budget (`--max-cost`) was spent.

    False if a caller, a timeout or the loss of its host ended it. A run from the history has no
    environment: there `is_terminated` tells.
    """
    if not run.status_reason.startswith(_EXITED):
        return False
    is_from_history = run.is_terminated and not run.environment
    return is_from_history or is_spent(run.environment, run.exit_code, run.attempts)


def idle_limit(run: Run) -> int:
    """The seconds of idleness after which the runtime ended the run; 0 if it did not.

    A program may use the same exit code; only a run with `idle_after` is counted.
    """
    seconds = run.environment.get(IDLE_AFTER, "")
    is_idle_end = run.exit_code == IDLE and run.status_reason.startswith(_EXITED)
    return int(seconds) if is_idle_end and seconds.isdecimal() else 0


def class_of(
    status_reason: str, reason: str, exit_code: int | None, *, is_ours: bool = False
) -> OutcomeClass:
    """The outcome of a failed attempt, by the texts of AWS Batch and ECS and the exit code.

    `is_ours`: batchml submitted the run, so the runtime may have chosen the exit code.
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


def is_step(status_reason: str) -> bool:
    """Whether a reason is one of many quick steps, too many to print each."""
    making, _, step = status_reason.partition(": ")
    return making.startswith(MAKING) and step.startswith(_STEPS)


# --- Arrays ---------------------------------------------------------------------------------------


MAX_ARRAY = 10_000  # children of one array; AWS Batch requires at least 2

IN_QUEUE = ("SUBMITTED", "PENDING", "RUNNABLE")  # values of `effective_state` before any start
_BEGUN = ("STARTING", "RUNNING", "SUCCEEDED", "FAILED")
_LIVE = ("RUNNING", "STARTING", "RUNNABLE")


def effective_state(run: Run) -> str:
    """The state of a run, or of the children of an array, which AWS Batch reports as PENDING."""
    if run.status is JobStatus.PENDING and run.children:
        if has_begun(run):
            return JobStatus.RUNNING.value
        if run.children.get("RUNNABLE"):
            return JobStatus.RUNNABLE.value
    return run.status.value


def describe_state(run: Run) -> str:
    """A run's state, for an array with numbers: `2 RUNNING, 4/6 done`, `FAILED, 2 of 6`."""
    if not run.children:
        return run.status.value
    failed, size = run.children.get("FAILED", 0), array_size(run)
    if run.status.is_terminal:
        return f"{run.status}, {failed or size} of {size}"
    live = next((each for each in _LIVE if run.children.get(each)), "RUNNING")
    text = f"{run.children.get(live, 0)} {live}, {count_ended(run)}/{size} done"
    return f"{text}, {failed} FAILED" if failed else text


def count_ended(run: Run) -> int:
    """The number of children that have ended."""
    return run.children.get("SUCCEEDED", 0) + run.children.get("FAILED", 0)


def array_size(run: Run) -> int:
    return run.array_size or sum(run.children.values())


def has_begun(run: Run) -> bool:
    """Whether a child of the array has started or ended."""
    return any(run.children.get(status) for status in _BEGUN)


def first_child_id(job_id: str) -> str:
    """The job id of the child that starts first: AWS has no start time for the array itself."""
    return f"{job_id}:0"


# --- Times ----------------------------------------------------------------------------------------


class RunTimes(NamedTuple):
    """The times of a run: its time since its submission is `ran` and `waited` together.

    `started`: the start of its first attempt, in ms since the epoch. `ran`: the seconds of all
    attempts together; of an array, from the first start of a child to the last end. `waited`: the
    other seconds, in the queue before the first attempt and between attempts. None if unknown.
    """

    started: int | None
    ran: float | None
    waited: float | None


def first_start(run: Run | None) -> int | None:
    """The time of the first start in ms; None if the run has not started or is unknown."""
    if run is None:
        return None
    known = [run.started_at, *(attempt.started_at for attempt in run.attempts)]
    return min(filter(None, known), default=None)


def attempt_end(run: Run, attempt: TimedAttempt, now_ms: int) -> int:
    """The time until which an attempt has run, in ms since the epoch."""
    if attempt.stopped_at is not None:
        return attempt.stopped_at
    return (run.stopped_at or now_ms) if run.status.is_terminal else now_ms


def times_of(run: Run, now_ms: int, submitted: int | None = None) -> RunTimes:
    """The times of a run until its end, or until now.

    `submitted`: the time of submission in ms, if AWS Batch does not say. An array that has started
    needs `started_at`, which AWS Batch does not have: see `first_start`.
    """
    # AWS Batch's `startedAt` is the last attempt's. ListJobs has no attempts.
    attempts = run.attempts or (Attempt(run.started_at, run.stopped_at),)
    started = first_start(run)
    ran = sum(
        max(0, attempt_end(run, each, now_ms) - each.started_at)
        for each in attempts
        if each.started_at
    )
    begun = run.created_at or submitted
    end = (run.stopped_at if run.status.is_terminal else None) or now_ms
    is_unknown = not begun or (has_begun(run) and not started)
    waited = None if is_unknown else max(0, end - (begun or end) - ran) / 1000
    return RunTimes(started, ran / 1000 if started else None, waited)


# --- The record of a run in this machine's history ------------------------------------------------
# AWS Batch forgets a run some days after its end; the history keeps it.


# The state of a run that AWS Batch has forgotten and whose end is not in the history.
NOT_KNOWN = "not known to the server"
NOT_KNOWN_WORDS = f"It is {NOT_KNOWN}, and its end was not seen from this machine."

FUNCTION_TAG = "batchml:function"  # on a run that calls a Python function: its name
DATA_VARIABLE = "BATCHML_DATA_DIR"  # of the submitting shell, passed on to a run on this machine
RESUMES_TAG = "batchml:resumes"  # on a run that continues from checkpoints: the earlier job's id


class MetricRange(Struct, frozen=True, array_like=True):
    """The first, least and greatest value of a metric in a run, without NaN and infinity."""

    first: float
    least: float
    greatest: float


class RunName(Struct, frozen=True, omit_defaults=True, gc=False):
    """The part of a record by which commands find a run."""

    key: str = ""  # of the submission; "" in records of the first version
    job_id: str = ""  # "" while it is unknown
    name: str = ""
    job_name: str = ""
    refused: str = ""  # the reason why there is no job
    gang: str = ""  # for a worker: the key of its group run
    moved: str = ""  # the id of its earlier job, if it has moved to another queue
    fallback: str = ""  # the queue to which it may move: QUEUE:SECONDS
    project: str = ""  # its identity; "" in records of versions before projects
    tags: dict[str, str] = {}


class Record(RunName, frozen=True, omit_defaults=True, gc=False):
    """The submission of a run, and its end once batchml has read it.

    Unknown values have their defaults. Times are in ms since the epoch. A record has no variables
    and no secrets of the run, except for those in the job's file (`spec`).
    """

    # The submission.
    env: str = ""
    queue: str = ""
    at: int = 0  # the time of submission
    job: str = ""  # the job's folder
    folder: str = ""  # the folder of the code package
    command: tuple[str, ...] = ()
    params: dict[str, Any] = {}
    commit: str = ""
    dirty: bool | None = None  # whether the folder had uncommitted changes
    image: str = ""  # the reference in the request
    vcpus: int = 0
    memory_mib: int = 0
    gpus: int = 0
    neurons: int = 0  # Neuron chips
    array_size: int = 0
    groups: dict[str, str] = {}  # for the head of a group run: the key of each group's job
    patterns: dict[str, str] = {}  # `[metrics]` of the job
    directions: dict[str, str] = {}  # metric -> "max" or "min": which of its values is the best
    max_cost: float | None = None  # USD
    code: str = ""  # the address of the code package: a path or an s3:// URL
    files: int | None = None  # the number of its files; None: not known
    spec: dict[str, Any] = {}  # the submitted JobSpec as a table, for `rerun`
    other: bool = False  # whether the command line replaced the job's command

    # The end.
    status: str = ""
    outcome: str = ""
    exit_code: int | None = None
    reason: str = ""  # in AWS Batch's words
    container_reason: str = ""  # in ECS's words
    created_at: int | None = None
    started_at: int | None = None
    stopped_at: int | None = None
    attempts: tuple[Attempt, ...] = ()
    max_attempts: int = 1
    children: dict[str, int] = {}  # of an array: the number of children by status
    failures: dict[str, int] = {}  # of an array: the number of failed children by class
    log_group: str = ""
    metrics: dict[str, float] = {}  # the last values
    ranges: dict[str, MetricRange] = {}  # empty in records of versions before 0.2
    measured: bool = False  # whether the metrics were read from the whole log
    cost: float | None = None  # USD
    lost: bool = False  # whether AWS Batch has forgotten the run before its end was read

    @property
    def is_open(self) -> bool:
        """Whether the submission may or may not have reached AWS."""
        return bool(self.key) and not self.job_id and not self.refused

    @property
    def keys(self) -> tuple[str, ...]:
        """The key of the run, and for a worker also the key of its group run."""
        return (self.key, self.gang) if self.gang else (self.key,)

    @property
    def has_ended(self) -> bool:
        return self.status in ("SUCCEEDED", "FAILED")


def run_from_record(record: Record | None) -> Run | None:
    """The run as it was at its end; None if the record does not have its end."""
    if record is None or not record.has_ended:
        return None
    outcome = record.outcome
    return Run(
        job_id=record.job_id,
        name=record.name,
        job_name=record.job_name or record.name,
        key=record.key,
        queue=record.queue,
        status=JobStatus(record.status),
        status_reason=record.reason,
        created_at=record.created_at or record.at,
        started_at=record.started_at,
        stopped_at=record.stopped_at,
        exit_code=record.exit_code,
        reason=record.container_reason,
        attempts=record.attempts,
        log_group=record.log_group or "/aws/batch/job",
        is_terminated=outcome == OutcomeClass.CANCELLED,
        image=record.image,
        command=record.command,
        vcpus=record.vcpus,
        memory_mib=record.memory_mib,
        gpus=record.gpus,
        neurons=record.neurons,
        children=record.children,
        failures=record.failures,
        tags=record.tags,
        params=record.params,
        environment=_launch_environment(record),
        max_attempts=record.max_attempts,
        array_size=record.array_size,
        host=record.attempts[-1].host if record.attempts else "",
    )


def _launch_environment(record: Record) -> dict[str, str]:
    """The variable that explains the exit code of a crash loop, or of an idle run; else empty."""
    if record.exit_code == IDLE and record.spec.get("idle_after"):
        return {IDLE_AFTER: str(parse_duration(record.spec["idle_after"]) or "")}
    launch = record.spec.get("launch") or {}
    plan = LaunchPlan(str(launch.get("kind")))
    return {VARIABLE: plan.to_json()} if record.exit_code == CRASH_LOOP and plan.restarts else {}
