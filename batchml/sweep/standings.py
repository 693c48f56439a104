"""Which trials are best. Pure."""

from collections.abc import Iterable, Sequence
from math import fsum, isfinite, sqrt
from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.model.sweep import Goal, SweepSpec, Trial, TrialState

if TYPE_CHECKING:
    from batchml.sweep.state import SweepState

_OUT = frozenset((TrialState.FAILED, TrialState.LOST, TrialState.DIVERGED))

Rank = tuple[bool, int, float, int]


def losses(trial: Trial, spec: SweepSpec) -> tuple[float, ...] | None:
    """Its goals at its deepest step, less being better; None without finite values."""
    if trial.values is None or not all(map(isfinite, trial.values)):
        return None
    return tuple(goal.loss(value) for goal, value in zip(spec.goals, trial.values, strict=False))


def rank(trial: Trial, spec: SweepSpec) -> Rank | None:
    """What trials are sorted by, the best first; None for one that does not take part.

    Those that are DONE stand before others, then the deepest step, then the first goal. One that
    failed has no model to show, and one that runs another again is no candidate of its own.
    """
    if trial.state in _OUT or trial.confirms is not None:
        return None
    found = losses(trial, spec)
    if not found:
        return None
    return (trial.state is not TrialState.DONE, -trial.step, found[0], trial.number)


def ranked(state: "SweepState", spec: SweepSpec) -> list[Trial]:
    """All trials with a result, best first. O(n log n): for the best alone see `Leader`."""
    keyed = ((rank(trial, spec), trial) for trial in state.trials.values())
    return [trial for key, trial in sorted((key, trial) for key, trial in keyed if key is not None)]


def best(state: "SweepState", spec: SweepSpec) -> Trial | None:
    keyed = ((rank(trial, spec), trial) for trial in state.trials.values())
    return min(((key, trial) for key, trial in keyed if key is not None), default=(None, None))[1]


class Leader:
    """The best trial, kept up to date by those that changed."""

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._key: Rank | None = None
        self.trial: Trial | None = None

    def note(self, trial: Trial) -> bool:
        """A trial has changed; False when all have to be looked at, for the best fell back."""
        key = rank(trial, self._spec)
        if self.trial is not None and trial.number == self.trial.number:
            if key is None or (self._key is not None and key > self._key):
                return False
            self._key, self.trial = key, trial
        elif key is not None and (self._key is None or key < self._key):
            self._key, self.trial = key, trial
        return True

    def restart(self, trials: Iterable[Trial]) -> None:
        """Look at all trials anew."""
        self._key = self.trial = None
        for trial in trials:
            self.note(trial)


def pareto(state: "SweepState", spec: SweepSpec) -> list[Trial]:
    """The trials that no other beats or equals in every goal, the best in the first one first.

    Only the deepest results are compared: of DONE trials, while there are any.
    """
    top = ranked(state, spec)
    if not top:
        return []
    first = top[0]
    alike = [
        trial
        for trial in top
        if (trial.state is TrialState.DONE) == (first.state is TrialState.DONE)
        and (first.state is TrialState.DONE or trial.step == first.step)
    ]
    points = [(losses(trial, spec) or (), trial) for trial in alike]
    points.sort(key=lambda point: (point[0], point[1].number))
    front: list[tuple[tuple[float, ...], Trial]] = []
    for point, trial in points:  # by rising first goal: only an earlier one can beat it
        if not any(_covers(other, point) for other, _ in front):
            front.append((point, trial))
    return [trial for _, trial in front]


def _covers(one: Sequence[float], other: Sequence[float]) -> bool:
    """True when `one` is at least as good in every goal."""
    return all(a <= b for a, b in zip(one, other, strict=False))


class Confirmed(Struct, frozen=True):
    """A trial that was run again: the first goal over all its runs, its own included."""

    trial: Trial
    values: tuple[float, ...]
    mean: float
    deviation: float  # standard deviation of a sample; 0 for a single value


def confirmed(state: "SweepState", spec: SweepSpec) -> list[Confirmed]:
    """The trials that were run again, the best mean first. Runs that did not end are left out."""
    again: dict[int, list[float]] = {}
    for trial in state.trials.values():
        if trial.confirms is not None:
            values = again.setdefault(trial.confirms, [])
            if trial.state is TrialState.DONE and trial.values and isfinite(trial.values[0]):
                values.append(trial.values[0])
    found = [
        _confirmed(state.trials[number], values)
        for number, values in again.items()
        if values and number in state.trials
    ]
    return sorted(found, key=lambda each: _order(each, spec.goal))


def _order(each: Confirmed, goal: Goal) -> tuple[float, int]:
    return goal.loss(each.mean), each.trial.number


def _confirmed(trial: Trial, values: Sequence[float]) -> Confirmed:
    every = (*(trial.values or ())[:1], *values)
    mean = fsum(every) / len(every)
    spread = fsum((value - mean) ** 2 for value in every) / max(1, len(every) - 1)
    return Confirmed(trial, tuple(every), mean, sqrt(spread))
