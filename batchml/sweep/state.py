"""SweepState: a sweep as its ledger tells it, event by event.

What trials say of themselves may come twice, late, or in any order: the state is the same. For each
thing that two messages say differently there is a rule that does not ask which came first:

- a (trial, step) has the values that were reported earliest, by the trial's own time;
- of a trial's waves the last counts; of its attempts the first that came to a good end, otherwise
  the last; what it says itself counts more than what AWS Batch says of it; but the end of an
  attempt after which another may come counts once AWS Batch says that the job has ended;
- a wave in which it begins anew takes the place of all that was reported before.

A notice stands while it holds: that of a failure until the trial is run again or said better, that
of trials that wait until one begins, that of the best that were not run again until it goes on.

A trial that waits at a rung when the sweep comes to its own end was stopped early, PRUNED; it waits
again if the sweep is reopened.
"""

from collections.abc import Mapping
from typing import Any

from batchml.model.sweep import Limits, Trial, TrialState
from batchml.sweep.events import (
    Ended,
    Event,
    Limited,
    Noticed,
    Reopened,
    Seen,
    Stopping,
    Submitted,
    Told,
    Wave,
)
from batchml.sweep.fold import Past, fold_seen, fold_told, leave_behind, name_jobs, plan, take_back

WAITING, CONFIRM = "waiting", "confirm"  # notices: no trial begins; the best were not run again
_GOES_ON = ("user", "failures")  # what stopped a sweep that may go on as it is

_NEVER = Reopened("", 0.0)


class SweepState:
    """Everything of a sweep but what its file says. Only `fold` changes it."""

    def __init__(self) -> None:
        self.trials: dict[int, Trial] = {}
        self.waves: dict[int, Wave] = {}
        self.jobs: dict[int, str] = {}  # wave -> job id, once it is known
        self.limits: Limits | None = None  # those of a top-up; None: the file's
        self.asked_limits: Limits | None = None  # the same, those aside that hold for now only
        self.notices: dict[str, Noticed] = {}  # by kind, those that hold
        self.stopping: Stopping | None = None
        self.ended: Ended | None = None
        self.reopened: dict[float, Reopened] = {}  # by when
        self.counts: dict[TrialState, int] = dict.fromkeys(TrialState, 0)
        self.segment = 0  # the last of the ledger that is in it
        self._past: dict[int, Past] = {}

    def fold(self, event: Event) -> None:
        """Take up one event. One that was taken up before changes nothing."""
        # Tens of thousands of these stand in a large ledger beside some hundreds of all others.
        if type(event) is Told:
            self._fold_told(event)
            return
        match event:
            case Seen():
                self._fold_seen(event)
            case Wave():
                self._fold_wave(event)
            case Submitted():
                self.jobs[event.wave] = event.job_id
                name_jobs(self.trials, self.waves.get(event.wave), event.job_id)
            case Limited():
                self.limits = event.limits
                if not event.for_now:
                    self.asked_limits = event.limits
            case Noticed():
                if self._holds(event):
                    self.notices.setdefault(event.kind, event)
            case Stopping():  # the first stands, whoever stops it next: the grace began then
                self.stopping = self.stopping or event
            case Ended():
                self.ended = self.ended or event
                self._leave_behind()
            case Reopened():
                self.stopping = self.ended = None
                self.reopened[event.at] = event
                self.notices.pop(CONFIRM, None)
                self._take_back()

    @property
    def paused(self) -> float:
        """Seconds for which it was over before it went on."""
        return sum(each.paused for each in self.reopened.values())

    @property
    def forgiven(self) -> Reopened:
        """The failures that no longer count: those from before it went on last."""
        return max(self.reopened.values(), key=lambda each: each.at, default=_NEVER)

    @property
    def open_waves(self) -> list[Wave]:
        """Those that were intended and whose job id is not known: they may have been submitted."""
        return [wave for number, wave in self.waves.items() if number not in self.jobs]

    def __eq__(self, other: object) -> bool:
        """Equal where they show the same; how far each has read its ledger does not matter."""
        return isinstance(other, SweepState) and self._shown() == other._shown()

    __hash__ = None  # type: ignore[assignment]

    def _shown(self) -> tuple[object, ...]:
        return (
            self.trials, self.waves, self.jobs, self.limits, self.asked_limits, self.notices,
            self.stopping, self.ended, self.reopened, self.counts,
        )  # fmt: skip

    def _fold_wave(self, wave: Wave) -> None:
        if wave.number in self.waves:
            return
        self.waves[wave.number] = wave
        for index, planned in enumerate(wave.trials):
            trial = self.trials.get(planned.number)
            before = trial.state if trial else None
            if trial is None:
                trial = self.trials[planned.number] = Trial(
                    planned.number, planned.params, planned.seed, planned.origin, planned.confirms,
                    planned_at=wave.at,
                )  # fmt: skip
                self._past[planned.number] = Past()
            plan(trial, self._past[planned.number], wave, index)
            self._changed(trial, before)
        if wave.number in self.jobs:
            name_jobs(self.trials, wave, self.jobs[wave.number])

    def _fold_told(self, event: Told) -> None:
        message = event.message
        trial = self.trials.get(message["trial"]) or self._in_place(message)
        if trial is None or message["wave"] not in self.waves:  # nobody sent it
            return
        before = trial.state
        fold_told(trial, self._past[trial.number], message, self.waves)
        if trial.state is not before:
            self._changed(trial, before)

    def _in_place(self, message: Mapping[str, Any]) -> Trial | None:
        """The trial of a child that could not learn which one it is: it says its place alone."""
        wave, index = self.waves.get(message["wave"]), message["index"]
        if message["trial"] >= 0 or wave is None or not 0 <= index < len(wave.trials):
            return None
        return self.trials[wave.trials[index].number]

    def _fold_seen(self, event: Seen) -> None:
        trial = self.trials.get(event.trial)
        if trial is None:
            return
        before = trial.state
        fold_seen(trial, self._past[trial.number], event, self.waves)
        self._changed(trial, before)

    def _changed(self, trial: Trial, before: TrialState | None) -> None:
        """A trial is in another state, perhaps, or in a later wave."""
        if trial.state is TrialState.PAUSED and self._is_at_its_end:
            leave_behind(trial)
        self._count(before, trial.state)
        if self.notices and trial.state is not before:
            for notice in list(self.notices.values()):
                if not _holds(notice, trial):
                    del self.notices[notice.kind]

    def _holds(self, notice: Noticed) -> bool:
        return all(_holds(notice, trial) for trial in self.trials.values())

    @property
    def _is_at_its_end(self) -> bool:
        """True where no trial that waits at a rung will go on, unless more is asked of it."""
        by = self.stopping.by if self.stopping else ""
        return self.ended is not None and by not in _GOES_ON

    def _leave_behind(self) -> None:
        if self._is_at_its_end and self.counts[TrialState.PAUSED]:
            for trial in self.trials.values():
                if trial.state is TrialState.PAUSED:
                    leave_behind(trial)
                    self._count(TrialState.PAUSED, trial.state)

    def _take_back(self) -> None:
        for trial in self.trials.values() if self.counts[TrialState.PRUNED] else ():
            if trial.state is TrialState.PRUNED and take_back(trial, self._past[trial.number]):
                self._count(TrialState.PRUNED, trial.state)

    def _count(self, before: TrialState | None, now: TrialState) -> None:
        if before is not None:
            self.counts[before] -= 1
        self.counts[now] += 1


def _holds(notice: Noticed, trial: Trial) -> bool:
    """Whether a notice still holds, as far as one trial goes."""
    if notice.kind == WAITING:
        return trial.started_at is None
    return notice.trial != trial.number or trial.state.is_failure
