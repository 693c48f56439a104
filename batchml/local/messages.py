"""Events that go into `engine.step`, and effects that come out of it. Times in ms."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from batchml.local.state import Attempt, Job, Spec


class Exit(Struct, frozen=True):
    """How an attempt ended, as its runner recorded it.

    `code` is None when no program of the job ever ran to an end: it could not be started
    (`start_failure` says why, in AWS's words) or its host or runner was lost (`lost` says how).
    """

    code: int | None = None
    oom: bool = False
    start_failure: str = ""
    lost: str = ""
    started_at: int | None = None
    stopped_at: int | None = None


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


Event = Requested | Started | Noted | Ended | Ticked


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


class DropRecord(Struct, frozen=True):
    kind: str
    key: str


class Launch(Struct, frozen=True):
    job: Job
    attempt: Attempt


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


Effect = SaveSpec | SaveJob | SaveRecord | DropRecord | Launch | Stop | Lose | Answer | Refusal
