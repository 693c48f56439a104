"""The events of a sweep's ledger, one JSON line each. The `SweepState` follows from all of them.

The trials of a sweep are submitted in batches: a `TrialBatch` is one SubmitJob. The number of a
batch is called `wave` in stored files, in messages and in this folder. Times are seconds since the
epoch.
"""

from typing import Any

from msgspec import Struct

from batchml.model.sweep import Params, SweepLimits

# The causes of a sweep's end: `by` of `SweepStopping`.
USER, LIMIT, TARGET, FAILURES, DONE = "user", "limit", "target", "failures", "done"


class PlannedTrial(Struct, frozen=True, omit_defaults=True):
    """One trial of a batch. A trial that was in an earlier batch continues, or is run again."""

    number: int
    params: Params
    seed: int
    origin: str = ""  # the sampler, as in `Trial`
    confirms: int | None = None  # the trial whose parameters this one runs again
    resumes: bool = False  # continues from its checkpoint; otherwise it begins anew


class TrialBatch(Struct, frozen=True, tag="wave", omit_defaults=True):
    """The intent of one SubmitJob, written before the call. `key` is part of the job's name."""

    number: int  # from 1
    at: float
    key: str
    trials: tuple[PlannedTrial, ...]  # by their index in the array
    target: int = 0  # the step at which the trials end; 0: when their programs end
    rung: int | None = None  # of `halving`, from 0; the trials of rungs above 0 are known later
    after: int = 0  # the batch that must have ended before this one starts; 0: none


class BatchSubmitted(Struct, frozen=True, tag="submitted"):
    """The job of a batch was submitted: AWS Batch has returned its id."""

    wave: int
    job_id: str
    at: float


class MessageReceived(Struct, frozen=True, tag="told"):
    """A message that a trial has sent (`runtime/protocol/sweep.py`), unchanged."""

    message: dict[str, Any]


class TrialObserved(Struct, frozen=True, tag="seen", omit_defaults=True):
    """How AWS Batch describes a trial that sends no messages. `state` is a TrialState."""

    trial: int
    wave: int
    state: str
    at: float
    job_id: str = ""
    exit_code: int | None = None
    why: str = ""
    started_at: float | None = None
    stopped_at: float | None = None


class LimitsChanged(Struct, frozen=True, tag="limited", omit_defaults=True):
    """The limits from now on, after `top-up`. `for_now`: nobody requested these limits; when the
    sweep is resumed, the limits that were requested last are valid again."""

    limits: SweepLimits
    at: float
    for_now: bool = False


class NoticeGiven(Struct, frozen=True, tag="noticed", omit_defaults=True):
    """A notice for people, given once. `kind` identifies it; `trial` is the failed trial that it is
    about."""

    kind: str
    words: str
    at: float
    trial: int | None = None


class SweepStopping(Struct, frozen=True, tag="stopping"):
    """No trial begins any more, and running trials save and end."""

    by: str
    why: str
    at: float


class SweepEnded(Struct, frozen=True, tag="ended"):
    """All trials have ended, and no other begins unless the sweep is reopened."""

    why: str
    at: float


class SweepReopened(Struct, frozen=True, tag="reopened", omit_defaults=True):
    """The sweep continues after its end, by top-up, rerun, confirm or resume.

    The user who reopens it knows its failures so far: they do not end it a second time.
    """

    why: str
    at: float
    paused: float = 0.0  # seconds since its end
    failed: int = 0  # trials that had failed before, and are not run again
    over: int = 0  # trials that had ended before, failed ones included


Event = (
    TrialBatch
    | BatchSubmitted
    | MessageReceived
    | TrialObserved
    | LimitsChanged
    | NoticeGiven
    | SweepStopping
    | SweepEnded
    | SweepReopened
)
