"""SweepState: the state of a sweep that follows from the events of its ledger.

Messages of trials may come twice, late, or in any order: the state is the same. For everything that
two messages may contradict there is a rule that does not depend on which came first:

- a step of a trial has the values that were reported earliest, by the trial's own clock;
- of a trial's batches the last counts; of its attempts the first with a good end, otherwise the
  last. Its own messages count more than the observations of AWS Batch; but the end of an attempt
  that may be followed by another counts only when AWS Batch reports that the job has ended;
- a batch in which a trial begins anew replaces all that the trial reported before.

A notice is kept while it is true: about a failure until the trial is run again or has reported a
better end; about waiting trials until one begins; about the best that were not run again until the
sweep continues.

A trial that is paused at a rung when the sweep ends by itself counts as PRUNED; it is paused again
if the sweep is reopened.
"""

from collections.abc import Mapping
from typing import Any

from batchml.model.sweep import SweepLimits, Trial, TrialState
from batchml.sweeps.control.events import (
    BatchSubmitted,
    Event,
    LimitsChanged,
    MessageReceived,
    NoticeGiven,
    SweepEnded,
    SweepReopened,
    SweepStopping,
    TrialBatch,
    TrialObserved,
)
from batchml.sweeps.control.reduce import (
    TrialHistory,
    apply_batch,
    apply_message,
    apply_observation,
    mark_left_behind,
    name_jobs,
    restore_paused,
)

WAITING, CONFIRM = (
    "waiting",
    "confirm",
)  # kinds of notices: no trial begins; the best were not run again
_RESUMABLE = ("user", "failures")  # what stopped a sweep that can be resumed as it is

_NEVER = SweepReopened("", 0.0)


class SweepState:
    """The state of a sweep, without its file. Only `apply` changes it."""

    def __init__(self) -> None:
        self.trials: dict[int, Trial] = {}
        self.batches: dict[int, TrialBatch] = {}  # by number
        self.jobs: dict[int, str] = {}  # number of a batch -> job id, once it is known
        self.limits: SweepLimits | None = None  # of the last top-up; None: the file's
        self.requested_limits: SweepLimits | None = None  # the same, without limits for now only
        self.notices: dict[str, NoticeGiven] = {}  # by kind; those that are still true
        self.stopping: SweepStopping | None = None
        self.ended: SweepEnded | None = None
        self.reopened: dict[float, SweepReopened] = {}  # by time
        self.counts: dict[TrialState, int] = dict.fromkeys(TrialState, 0)
        self.segment = 0  # the last segment of the ledger that was applied
        self._histories: dict[int, TrialHistory] = {}

    def apply(self, event: Event) -> None:
        """Apply one event. An event that was applied before changes nothing."""
        # A large ledger has tens of thousands of messages, and some hundreds of other events.
        if type(event) is MessageReceived:
            self._apply_message(event)
            return
        match event:
            case TrialObserved():
                self._apply_observation(event)
            case TrialBatch():
                self._apply_batch(event)
            case BatchSubmitted():
                self.jobs[event.wave] = event.job_id
                name_jobs(self.trials, self.batches.get(event.wave), event.job_id)
            case LimitsChanged():
                self.limits = event.limits
                if not event.for_now:
                    self.requested_limits = event.limits
            case NoticeGiven():
                if self._is_true(event):
                    self.notices.setdefault(event.kind, event)
            case SweepStopping():  # the first counts: its grace has begun
                self.stopping = self.stopping or event
            case SweepEnded():
                self.ended = self.ended or event
                self._prune_paused()
            case SweepReopened():
                self.stopping = self.ended = None
                self.reopened[event.at] = event
                self.notices.pop(CONFIRM, None)
                self._restore_paused()

    @property
    def paused(self) -> float:
        """Seconds between ends of the sweep and its reopenings."""
        return sum(each.paused for each in self.reopened.values())

    @property
    def last_reopening(self) -> SweepReopened:
        """The last reopening; failures from before it no longer count."""
        return max(self.reopened.values(), key=lambda each: each.at, default=_NEVER)

    @property
    def open_batches(self) -> list[TrialBatch]:
        """The batches whose job id is unknown: they were intended, and may have been submitted."""
        return [batch for number, batch in self.batches.items() if number not in self.jobs]

    def __eq__(self, other: object) -> bool:
        """Whether both describe the same sweep, however far each has read the ledger."""
        return isinstance(other, SweepState) and self._content() == other._content()

    __hash__ = None  # type: ignore[assignment]

    def _content(self) -> tuple[object, ...]:
        return (
            self.trials, self.batches, self.jobs, self.limits, self.requested_limits, self.notices,
            self.stopping, self.ended, self.reopened, self.counts,
        )  # fmt: skip

    def _apply_batch(self, batch: TrialBatch) -> None:
        if batch.number in self.batches:
            return
        self.batches[batch.number] = batch
        for index, planned in enumerate(batch.trials):
            trial = self.trials.get(planned.number)
            before = trial.state if trial else None
            if trial is None:
                trial = self.trials[planned.number] = Trial(
                    planned.number, planned.params, planned.seed, planned.origin, planned.confirms,
                    planned_at=batch.at,
                )  # fmt: skip
                self._histories[planned.number] = TrialHistory()
            apply_batch(trial, self._histories[planned.number], batch, index)
            self._update(trial, before)
        if batch.number in self.jobs:
            name_jobs(self.trials, batch, self.jobs[batch.number])

    def _apply_message(self, event: MessageReceived) -> None:
        message = event.message
        trial = self.trials.get(message["trial"]) or self._trial_at_index(message)
        if trial is None or message["wave"] not in self.batches:  # not of this sweep
            return
        before = trial.state
        apply_message(trial, self._histories[trial.number], message, self.batches)
        if trial.state is not before:
            self._update(trial, before)

    def _trial_at_index(self, message: Mapping[str, Any]) -> Trial | None:
        """The trial of a child that could not learn its trial, and so sends only its index."""
        batch, index = self.batches.get(message["wave"]), message["index"]
        if message["trial"] >= 0 or batch is None or not 0 <= index < len(batch.trials):
            return None
        return self.trials[batch.trials[index].number]

    def _apply_observation(self, event: TrialObserved) -> None:
        trial = self.trials.get(event.trial)
        if trial is None:
            return
        before = trial.state
        apply_observation(trial, self._histories[trial.number], event, self.batches)
        self._update(trial, before)

    def _update(self, trial: Trial, before: TrialState | None) -> None:
        """Update counts and notices: a trial may be in another state, or in a later batch."""
        if trial.state is TrialState.PAUSED and self._has_ended_by_itself:
            mark_left_behind(trial)
        self._count(before, trial.state)
        if self.notices and trial.state is not before:
            for notice in list(self.notices.values()):
                if not _is_true(notice, trial):
                    del self.notices[notice.kind]

    def _is_true(self, notice: NoticeGiven) -> bool:
        return all(_is_true(notice, trial) for trial in self.trials.values())

    @property
    def _has_ended_by_itself(self) -> bool:
        """Whether no paused trial will continue, unless somebody requests more of the sweep."""
        by = self.stopping.by if self.stopping else ""
        return self.ended is not None and by not in _RESUMABLE

    def _prune_paused(self) -> None:
        if self._has_ended_by_itself and self.counts[TrialState.PAUSED]:
            for trial in self.trials.values():
                if trial.state is TrialState.PAUSED:
                    mark_left_behind(trial)
                    self._count(TrialState.PAUSED, trial.state)

    def _restore_paused(self) -> None:
        for trial in self.trials.values() if self.counts[TrialState.PRUNED] else ():
            if trial.state is TrialState.PRUNED and restore_paused(
                trial, self._histories[trial.number]
            ):
                self._count(TrialState.PRUNED, trial.state)

    def _count(self, before: TrialState | None, now: TrialState) -> None:
        if before is not None:
            self.counts[before] -= 1
        self.counts[now] += 1


def _is_true(notice: NoticeGiven, trial: Trial) -> bool:
    """Whether a notice is still true, as far as this trial is concerned."""
    if notice.kind == WAITING:
        return trial.started_at is None
    return notice.trial != trial.number or trial.state.is_failure
