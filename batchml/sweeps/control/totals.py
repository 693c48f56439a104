"""Sums over the trials of a sweep, kept up to date by events: no round reads all trials."""

from collections.abc import Iterable, Mapping
from math import inf, isfinite
from typing import Any

from msgspec import Struct

from batchml.model.sweep import SweepSpec, Trial, TrialState
from batchml.sweeps.control.events import (
    Event,
    MessageReceived,
    SweepEnded,
    SweepReopened,
    TrialBatch,
    TrialObserved,
)
from batchml.sweeps.control.pruning import RungResults
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.results import BestTrial

_IN_FLIGHT = (TrialState.WAITING, TrialState.RUNNING)


class TrialShare(Struct):
    """What one trial adds to the sums, so that it can be subtracted again."""

    seconds: float = 0.0  # of containers that have ended
    step: int = 0
    saved: int = 0
    wave: int = 0  # number of the batch in which it waits or runs; 0: none
    is_point: bool = False  # not a run that confirms another trial


_NOTHING = TrialShare()


class Tally:
    """Sums over all trials, kept up to date by the trials that change."""

    def __init__(self, spec: SweepSpec, trials: Iterable[Trial] = ()) -> None:
        self._spec = spec
        self._shares: dict[int, TrialShare] = {}
        self._running: dict[int, Trial] = {}
        self._seconds = 0.0
        self.planned = 0
        self.steps = 0
        self.saved = 0
        self.in_flight: dict[int, int] = {}  # number of a batch -> its trials that wait or run
        self.longest = 0.0  # seconds that the longest completed trial ran
        self.has_begun = False  # whether a container of any trial has started
        self.highest = -1  # the greatest number of a trial
        self.best_loss: float | None = None  # at any step
        self._failures: dict[int, Trial] = {}
        for trial in trials:
            self.note(trial)

    def note(self, trial: Trial) -> None:
        """A trial has changed."""
        old, new = self._shares.get(trial.number, _NOTHING), self._share(trial)
        self._shares[trial.number] = new
        self._seconds += new.seconds - old.seconds
        self.steps += new.step - old.step
        self.saved += new.saved - old.saved
        self.planned += new.is_point - old.is_point
        self.highest = max(self.highest, trial.number)
        if old.wave != new.wave:
            self._move(old.wave, new.wave)
        if trial.resumed_at is not None:
            self._running[trial.number] = trial
        else:
            self._running.pop(trial.number, None)
        self._remember(trial)

    @property
    def first_failure(self) -> Trial | None:
        """Of the trials that are failed now, the one that ended first."""
        return min(self._failures.values(), key=_stopped, default=None)

    def ran(self, now: float) -> float:
        """Seconds that containers of all trials have run."""
        return self._seconds + sum(
            trial.ran(now) - trial.seconds for trial in self._running.values()
        )

    def expected(self, now: float, timeout: float | None) -> float:
        """Seconds that another trial may take: as long as the longest so far."""
        running = (trial.ran(now) for trial in self._running.values())
        longest = self.longest or max(running, default=0.0)
        return min(longest, timeout) if timeout is not None else longest

    def committed(self, now: float, waiting: int, timeout: float | None) -> float:
        """An estimate of the seconds that running and waiting trials will still take."""
        each = self.expected(now, timeout)
        left = sum(max(0.0, each - trial.ran(now)) for trial in self._running.values())
        return left + waiting * each

    def _share(self, trial: Trial) -> TrialShare:
        full = self._spec.early_stop.max
        is_cut = trial.state in (TrialState.PRUNED, TrialState.PAUSED)
        return TrialShare(
            trial.seconds,
            trial.step,
            max(0, full - trial.step) if full and is_cut else 0,
            trial.wave if trial.state in _IN_FLIGHT else 0,
            trial.confirms is None,
        )

    def _move(self, old: int, new: int) -> None:
        if old:
            self.in_flight[old] -= 1
            if not self.in_flight[old]:
                del self.in_flight[old]
        if new:
            self.in_flight[new] = self.in_flight.get(new, 0) + 1

    def _remember(self, trial: Trial) -> None:
        self.has_begun = self.has_begun or trial.started_at is not None
        if trial.state is TrialState.DONE:
            self.longest = max(self.longest, trial.seconds)
        if trial.state.is_failure:
            self._failures[trial.number] = trial
        else:
            self._failures.pop(trial.number, None)
        if trial.values and isfinite(trial.values[0]):
            loss = self._spec.goal.loss(trial.values[0])
            self.best_loss = loss if self.best_loss is None else min(self.best_loss, loss)


def _stopped(trial: Trial) -> tuple[float, int]:
    return (trial.stopped_at if trial.stopped_at is not None else inf, trial.number)


class SweepTotals:
    """A sweep's state with its sums, rung results and best trial. `apply` updates all of them."""

    def __init__(self, spec: SweepSpec, state: SweepState) -> None:
        self.spec = spec
        self.state = state
        self.tally = Tally(spec, state.trials.values())
        self.rungs = RungResults(spec)
        self.best = BestTrial(spec)
        for trial in state.trials.values():
            self.rungs.note(trial)
            self.best.note(trial)

    def apply(self, event: Event) -> None:
        """Apply an event to the state, and its changes to the rest."""
        self.state.apply(event)
        for number in self._changed(event):
            trial = self.state.trials.get(number)
            if trial is None:
                continue
            self.tally.note(trial)
            self.rungs.note(trial)
            if not self.best.note(trial):
                self.best.restart(self.state.trials.values())

    def _changed(self, event: Event) -> Iterable[int]:
        if isinstance(event, SweepEnded | SweepReopened):  # affects all that wait at rungs
            return self.state.trials
        return trials_of_event(event, self.state)


def trials_of_event(event: Event, state: SweepState) -> tuple[int, ...]:
    """The numbers of the trials that an event changes."""
    match event:
        case MessageReceived():
            return (_sender_of(event.message, state),)
        case TrialObserved():
            return (event.trial,)
        case TrialBatch():
            return tuple(planned.number for planned in event.trials)
    return ()


def _sender_of(message: Mapping[str, Any], state: SweepState) -> int:
    """The trial that sent a message; a child that could not learn its trial sends its index."""
    number: int = message["trial"]
    wave, index = state.batches.get(message["wave"]), message.get("index", -1)
    if number >= 0 or wave is None or not 0 <= index < len(wave.trials):
        return number
    return int(wave.trials[index].number)
