"""Events that go into `engine.step`, and effects that come out of it. Times in ms."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from msgspec import Struct

from batchml.local.batch.state import Attempt, Job, Spec


class LogProof(Struct, frozen=True):
    """What an attempt's log held when it ended (executors/logproof.py)."""

    lines: int
    shown: int  # lines, less the marks that users are not shown
    size: int  # bytes
    sha256: str
    stride: int  # lines between two checkpoints
    checkpoints: str  # the first bytes of the digests up to each checkpoint, in hex


NO_LINES = LogProof(0, 0, 0, sha256(b"").hexdigest(), 1, "")  # of a program that never ran
NO_PROOF = "the attempt ended under an older batchml, which kept no proof of its log."


class LogEnd(Struct, frozen=True, omit_defaults=True):
    """What is known of the log of an attempt that has ended; `doubt` is why that is not all."""

    proof: LogProof | None = None
    doubt: str = ""


class Exit(Struct, frozen=True):
    """How an attempt ended, as its runner recorded it.

    `code` is None when no program of the job ever ran to an end: it could not be started
    (`start_failure` says why, in AWS's words) or its host or runner was lost (`lost` says how).
    `reason` says why a program was stopped that nobody had asked to stop.
    """

    code: int | None = None
    oom: bool = False
    start_failure: str = ""
    lost: str = ""
    reason: str = ""
    started_at: int | None = None
    stopped_at: int | None = None
    log: LogProof | None = None


class Requested(Struct, frozen=True):
    """A checked API call that changes something.

    `ended` answers for jobs that are not in the state any more, array children included: job id ->
    SUCCEEDED or FAILED. `found` has such jobs themselves, where the call changes one.
    """

    operation: str
    params: dict[str, Any]
    now: int
    new_id: str
    request_id: str = ""
    ended: Mapping[str, str] = {}
    found: Mapping[str, Job] = {}


class Prepared(Struct, frozen=True):
    """Runners hold these attempts with everything that their programs need, and wait."""

    task_ids: tuple[str, ...]
    now: int


class NeverBegan(Struct, frozen=True):
    """The program of an attempt was not started, and nobody is left who could start it."""

    task_id: str
    now: int


class Started(Struct, frozen=True):
    """The program of an attempt runs. `address` is where other nodes of its job reach it."""

    task_id: str
    now: int
    address: str = ""


class Noted(Struct, frozen=True):
    """What an attempt does before its program runs: `installing torch==2.13.0`."""

    task_id: str
    text: str
    now: int


class Ended(Struct, frozen=True):
    task_id: str
    exit: Exit
    now: int


class Ticked(Struct, frozen=True):
    """Time has passed, or something outside the rules has changed."""

    now: int


Event = Requested | Prepared | NeverBegan | Started | Noted | Ended | Ticked


class SaveJob(Struct, frozen=True):
    """Keep a job. A live one is part of the state at the next start."""

    job: Job
    live: bool


class SaveSpec(Struct, frozen=True):
    """Keep what was submitted. Written once: it never changes."""

    spec: Spec


class SaveRecord(Struct, frozen=True):
    """Keep an environment, a queue, a definition, a policy or a consumable resource."""

    kind: str
    key: str
    record: Struct


class SaveLogEnd(Struct, frozen=True):
    """Keep the proof of an attempt's log, or why there is none."""

    task_id: str
    end: LogEnd


class DropRecord(Struct, frozen=True):
    kind: str
    key: str


class Launch(Struct, frozen=True):
    """Prepare an attempt: its program may not be started yet."""

    job: Job
    attempt: Attempt


class Begin(Struct, frozen=True):
    """Start the program of an attempt. The journal says by now that it may have begun."""

    task_id: str


class Stop(Struct, frozen=True):
    """TERM to every process of the attempt, KILL after its grace."""

    task_id: str


class Lose(Struct, frozen=True):
    """Rehearse the loss of the attempt's host: KILL at once, or as `Stop` when it is `warned`.

    `why` is what the user asked for.
    """

    task_id: str
    why: str
    warned: bool = False


class Answer(Struct, frozen=True):
    body: dict[str, Any]


class Refusal(Struct, frozen=True):
    code: str
    message: str
    status: int


Effect = (
    SaveSpec
    | SaveJob
    | SaveRecord
    | SaveLogEnd
    | DropRecord
    | Launch
    | Begin
    | Stop
    | Lose
    | Answer
    | Refusal
)
