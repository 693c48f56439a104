"""What a sampler knows of a sweep's trials: which did well, which have no result yet.

Built once and then kept up: of 10,000 trials only those that have changed are looked at again.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import msgspec

from batchml.model.sweep import Report, SweepSpec, Trial, TrialState, is_discrete
from batchml.runtime.protocol.rungs import rung_steps
from batchml.sweep.kernels import Axis, Places, axes, places
from batchml.sweep.points import key

END = math.inf  # the depth of a trial that was trained to its end


class Result(NamedTuple):
    """What a trial had at one depth: at a rung, or at its end. Sorts the best first."""

    depth: float
    behind: float  # others that got further, where there are no rungs
    loss: float


_FAILED = (TrialState.FAILED, TrialState.DIVERGED)
_STOPPING = ("asha", "halving")
_KEPT = 4  # sweeps


class _Seen(NamedTuple):
    """A trial as it was when it was last looked at."""

    trial: Trial
    state: TrialState
    last: Report | None
    places: Places | None
    results: tuple[Result, ...] | None


class Known:
    """The trials of one sweep: those with results, and those that have none yet."""

    def __init__(self, spec: SweepSpec) -> None:
        self.axes: tuple[Axis, ...] = axes(spec.space)
        self.judged: set[int] = set()  # with results, failures too; by the place in the ledger
        self.waiting: dict[int, Places] = {}
        self.points: set[Hashable] = set()  # that were tried; only of a discrete space
        self.is_discrete = is_discrete(spec.space)
        self._spec = spec
        self._rungs = _rungs(spec)
        self._results: dict[float, list[tuple[Result, int]]] = {}  # by depth, the best first
        self._seen: list[_Seen] = []

    def places(self, index: int) -> Places:
        found = self._seen[index].places
        assert found is not None
        return found

    def best(self, count: int) -> list[int]:
        """The best, by how many did better at the depth that each has come to.

        So one that runs and leads at its rung is not behind all that have ended.
        """
        standing: list[tuple[int, float, int]] = []
        for depth, found in self._results.items():
            for place, (_, index) in enumerate(found[:count]):
                results = self._seen[index].results
                if results and results[-1].depth == depth:
                    standing.append((place, -depth, index))
        return [index for _, _, index in sorted(standing)[:count]]

    def follow(self, trials: Sequence[Trial]) -> bool:
        """Take in what has changed. False: these are not the trials that it knows."""
        if len(trials) < len(self._seen):
            return False
        for index, (trial, seen) in enumerate(zip(trials, self._seen, strict=False)):
            if trial is not seen.trial:
                return False
            last = trial.reports[-1] if trial.reports else None
            if trial.state is not seen.state or last is not seen.last:
                self._forget(index, seen)
                self._seen[index] = self._look(index, trial, seen.places)
        for index in range(len(self._seen), len(trials)):
            trial = trials[index]
            if self.is_discrete:
                self.points.add(key(trial.params))
            where = places(self._spec.space, self.axes, trial.params)
            self._seen.append(self._look(index, trial, where))
        return True

    def _look(self, index: int, trial: Trial, where: Places | None) -> _Seen:
        found: tuple[Result, ...] | None = None
        if where is not None and trial.confirms is None:
            found = results(self._spec, self._rungs, trial)
            if found is not None:
                self.judged.add(index)
            elif not trial.state.is_ended:
                self.waiting[index] = where
        for result in found or ():
            insort(self._results.setdefault(result.depth, []), (result, index))
        last = trial.reports[-1] if trial.reports else None
        return _Seen(trial, trial.state, last, where, found)

    def _forget(self, index: int, seen: _Seen) -> None:
        for result in seen.results or ():
            there = self._results[result.depth]
            del there[bisect_left(there, (result, index))]
        self.judged.discard(index)
        self.waiting.pop(index, None)


def known(spec: SweepSpec, trials: Sequence[Trial]) -> Known:
    """What these trials say; the last few sweeps are kept."""
    sort = msgspec.json.encode((spec.space, spec.goals, spec.early_stop, spec.seed))
    found = _known.pop(sort, None) or Known(spec)
    if not found.follow(trials):
        found = Known(spec)
        found.follow(trials)
    while len(_known) >= _KEPT:
        del _known[next(iter(_known))]
    _known[sort] = found
    return found


_known: dict[bytes, Known] = {}


def results(spec: SweepSpec, rungs: Sequence[int], trial: Trial) -> tuple[Result, ...] | None:
    """What it had at each depth, the deepest last; empty: it failed. None: nothing is known yet,
    or never will be.

    A trial that still runs has results of the rungs that it has passed: others ended there.
    """
    if trial.state in _FAILED:
        return ()
    if not trial.reports:
        return None
    found: list[Result] = []
    for rung in rungs:
        if trial.step >= rung:
            there = next(each for each in trial.reports if each.step >= rung)
            found.append(Result(rung, 0, spec.goal.loss(there.values[0])))
    last = trial.reports[-1]
    if trial.state is TrialState.DONE:
        found.append(Result(END, -END, spec.goal.loss(last.values[0])))
    elif not rungs and trial.state.is_ended:
        found.append(Result(END, -last.step, spec.goal.loss(last.values[0])))
    if not all(math.isfinite(result.loss) for result in found):
        return ()
    return tuple(found) or None


def _rungs(spec: SweepSpec) -> tuple[int, ...]:
    """Where trials are compared."""
    stop = spec.early_stop
    if stop.method not in _STOPPING:
        return ()
    return rung_steps(stop.min, stop.max, stop.eta)
