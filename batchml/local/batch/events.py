"""Events, the input of `engine.step`, and effects, its output. Times are in ms."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from msgspec import Struct

from batchml.local.batch.state import Job, JobAttempt, SubmittedSpec


class LogProof(Struct, frozen=True, omit_defaults=True):
    """The content of an attempt's log at its end, as counts and digests
    (executors/runner/files.py).
    """

    lines: int
    shown: int  # lines without batchml's marks, which users do not see
    size: int  # bytes
    sha256: str
    stride: int  # lines between two checkpoints
    checkpoints: str  # the first bytes of the digest at each checkpoint, in hex
    text: str = ""  # the log itself, if it is short and has only marks: its file is not synced


NO_LINES = LogProof(0, 0, 0, sha256(b"").hexdigest(), 1, "")  # the log of a program that never ran
NO_PROOF = "the attempt ended under an older batchml, which kept no proof of its log."


class LogEnd(Struct, frozen=True, omit_defaults=True):
    """The proof of an ended attempt's log; `doubt` is the reason if the log may be incomplete."""

    proof: LogProof | None = None
    doubt: str = ""


class AttemptExit(Struct, frozen=True):
    """How an attempt ended, as its runner recorded it.

    `code` is None when no program of the job ran to an end: it could not be started
    (`start_failure` gives the reason in AWS's words), or its host or runner was lost (`lost` gives
    the reason). `reason` explains a stop that nobody requested.
    """

    code: int | None = None
    oom: bool = False
    start_failure: str = ""
    lost: str = ""
    reason: str = ""
    started_at: int | None = None
    stopped_at: int | None = None
    log: LogProof | None = None


class CallReceived(Struct, frozen=True):
    """A validated API call that changes something.

    `ended` has the final status, SUCCEEDED or FAILED, of jobs and array children that have left the
    state: job id -> status. `found` has finished jobs themselves, where the call changes one.
    """

    operation: str
    params: dict[str, Any]
    now: int
    new_id: str
    request_id: str = ""
    ended: Mapping[str, str] = {}
    found: Mapping[str, Job] = {}


class AttemptPrepared(Struct, frozen=True):
    """Runners have everything that the programs of these attempts need, and wait for the start."""

    task_ids: tuple[str, ...]
    now: int


class AttemptNeverBegan(Struct, frozen=True):
    """The program of an attempt was not started, and no process is left that could start it."""

    task_id: str
    now: int


class AttemptStarted(Struct, frozen=True):
    """The program of an attempt runs. `address` is its address for other nodes of the job."""

    task_id: str
    now: int
    address: str = ""


class AttemptProgressed(Struct, frozen=True):
    """The current step of an attempt's preparation: `installing torch==2.13.0`."""

    task_id: str
    text: str
    now: int


class AttemptEnded(Struct, frozen=True):
    task_id: str
    exit: AttemptExit
    now: int


class ClockTicked(Struct, frozen=True):
    """Time has passed, or something outside the rules has changed."""

    now: int


Event = (
    CallReceived
    | AttemptPrepared
    | AttemptNeverBegan
    | AttemptStarted
    | AttemptProgressed
    | AttemptEnded
    | ClockTicked
)


class SaveJob(Struct, frozen=True):
    """Store a job. A live job is part of the state at the next start."""

    job: Job
    live: bool


class SaveSpec(Struct, frozen=True):
    """Store a job's specification. It is written once and never changes."""

    spec: SubmittedSpec


class SaveRecord(Struct, frozen=True):
    """Store a compute environment, job queue, definition, scheduling policy or consumable
    resource.
    """

    kind: str
    key: str
    record: Struct


class SaveLogEnd(Struct, frozen=True):
    """Store the proof of an attempt's log, or why there is none."""

    task_id: str
    end: LogEnd


class DropRecord(Struct, frozen=True):
    kind: str
    key: str


class PrepareAttempt(Struct, frozen=True):
    """Prepare an attempt: its program may not be started yet."""

    job: Job
    attempt: JobAttempt


class BeginAttempt(Struct, frozen=True):
    """Start the program of an attempt. The journal has recorded that it may have begun."""

    task_id: str


class StopAttempt(Struct, frozen=True):
    """Send TERM to the attempt's first process, and KILL after the grace period."""

    task_id: str


class LoseHost(Struct, frozen=True):
    """Simulate the loss of an attempt's host: kill the attempt at once or, if it is `warned`, stop
    it with its grace period.

    `fault` is the injected fault, for the log: `host-lost@60s`.
    """

    task_id: str
    fault: str
    warned: bool = False


class AnswerCall(Struct, frozen=True):
    body: dict[str, Any]


class RefuseCall(Struct, frozen=True):
    code: str
    message: str
    status: int


Effect = (
    SaveSpec
    | SaveJob
    | SaveRecord
    | SaveLogEnd
    | DropRecord
    | PrepareAttempt
    | BeginAttempt
    | StopAttempt
    | LoseHost
    | AnswerCall
    | RefuseCall
)
