"""What the ledger holds: one JSON line an event. The fold of all of them is the sweep."""

from typing import Any

from msgspec import Struct

from batchml.model.sweep import Limits, Params


class Planned(Struct, frozen=True, omit_defaults=True):
    """One trial of a wave. One that was in an earlier wave goes on, or is tried again."""

    number: int
    params: Params
    seed: int
    origin: str = ""
    confirms: int | None = None
    resumes: bool = False  # from its checkpoint; otherwise it begins anew


class Wave(Struct, frozen=True, tag="wave", omit_defaults=True):
    """The intent of one SubmitJob, written before it. `key` is that of the job's name."""

    number: int  # from 1
    at: float
    key: str
    trials: tuple[Planned, ...]  # by their index in the array
    target: int = 0  # the step at which the trials end; 0: their own end
    rung: int | None = None  # of `halving`: the trials of rungs above 0 are known only in time
    after: int = 0  # the wave that must have ended before this one starts


class Submitted(Struct, frozen=True, tag="submitted"):
    wave: int
    job_id: str
    at: float


class Told(Struct, frozen=True, tag="told"):
    """What a trial said of itself: a message of `runtime/protocol/messages.py`, as it is."""

    message: dict[str, Any]


class Seen(Struct, frozen=True, tag="seen", omit_defaults=True):
    """What AWS Batch says of a trial that does not say it itself. `state` is a TrialState."""

    trial: int
    wave: int
    state: str
    at: float
    job_id: str = ""
    exit_code: int | None = None
    why: str = ""
    started_at: float | None = None
    stopped_at: float | None = None


class Limited(Struct, frozen=True, tag="limited", omit_defaults=True):
    """The limits from now on: `top-up`. `for_now`: nobody asked for these; when it is asked to go
    on, those come back that were asked for last."""

    limits: Limits
    at: float
    for_now: bool = False


class Noticed(Struct, frozen=True, tag="noticed", omit_defaults=True):
    """Something that people should know, said once: `kind` names which notice it is. `trial`: the
    one that it is about, whose failure it tells."""

    kind: str
    words: str
    at: float
    trial: int | None = None


class Stopping(Struct, frozen=True, tag="stopping"):
    """Nothing new begins, and what runs is asked to save and end. `by`: limit, user, failures."""

    by: str
    why: str
    at: float


class Ended(Struct, frozen=True, tag="ended"):
    why: str
    at: float


class Reopened(Struct, frozen=True, tag="reopened", omit_defaults=True):
    """It goes on after its end: top-up, rerun of what failed, confirm.

    Whoever wants it to go on knows of the failures so far: they do not end it once more.
    """

    why: str
    at: float
    paused: float = 0.0  # seconds since its end
    failed: int = 0  # trials that had failed by then, and are not run again
    over: int = 0  # trials that had ended, those among them


Event = Wave | Submitted | Told | Seen | Limited | Noticed | Stopping | Ended | Reopened
