"""What a sampler knows of a sweep's trials: results, and trials without a result yet.

Built once and then kept up to date: of 10,000 trials only changed ones are read again.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import msgspec

from batchml.model.sweep import SweepSpec, Trial, TrialReport, TrialState, is_discrete
from batchml.runtime.protocol.rungs import rung_steps
from batchml.sweeps.samplers.kernels import Coordinates, KernelAxis, locate, make_axes
from batchml.sweeps.samplers.points import point_key

END = math.inf  # the depth of a completed trial


class DepthResult(NamedTuple):
    """The result of a trial at one depth: at a rung, or at its end. Sorts the best first."""

    depth: float
    behind: float  # minus the steps that it came to, where there are no rungs
    loss: float


_FAILED = (TrialState.FAILED, TrialState.DIVERGED)
_STOPPING = ("asha", "halving")
_KEPT = 4  # sweeps


class _Observed(NamedTuple):
    """A trial as it was when it was last read."""

    trial: Trial
    state: TrialState
    last: TrialReport | None
    at: Coordinates | None
    results: tuple[DepthResult, ...] | None


class TrialObservations:
    """The trials of one sweep: those with results, and those that have none yet."""

    def __init__(self, spec: SweepSpec) -> None:
        self.axes: tuple[KernelAxis, ...] = make_axes(spec.space)
        self.with_results: set[int] = set()  # trials with results, failed ones too; by their index
        self.waiting: dict[int, Coordinates] = {}
        self.points: set[Hashable] = set()  # that were tried; only in a discrete space
        self.is_discrete = is_discrete(spec.space)
        self._spec = spec
        self._rungs = _rungs(spec)
        self._results: dict[float, list[tuple[DepthResult, int]]] = {}  # by depth, the best first
        self._observed: list[_Observed] = []

    def coordinates(self, index: int) -> Coordinates:
        found = self._observed[index].at
        assert found is not None
        return found

    def best(self, count: int) -> list[int]:
        """The best trials, each ranked at the depth that it has come to.

        So a running trial that leads at its rung is not behind all that have ended.
        """
        standing: list[tuple[int, float, int]] = []
        for depth, found in self._results.items():
            for position, (_, index) in enumerate(found[:count]):
                results = self._observed[index].results
                if results and results[-1].depth == depth:
                    standing.append((position, -depth, index))
        return [index for _, _, index in sorted(standing)[:count]]

    def follow(self, trials: Sequence[Trial]) -> bool:
        """Read the changed trials. False if these are not the trials that it knows."""
        if len(trials) < len(self._observed):
            return False
        for index, (trial, observed) in enumerate(zip(trials, self._observed, strict=False)):
            if trial is not observed.trial:
                return False
            last = trial.reports[-1] if trial.reports else None
            if trial.state is not observed.state or last is not observed.last:
                self._forget(index, observed)
                self._observed[index] = self._observe(index, trial, observed.at)
        for index in range(len(self._observed), len(trials)):
            trial = trials[index]
            if self.is_discrete:
                self.points.add(point_key(trial.params))
            where = locate(self._spec.space, self.axes, trial.params)
            self._observed.append(self._observe(index, trial, where))
        return True

    def _observe(self, index: int, trial: Trial, where: Coordinates | None) -> _Observed:
        found: tuple[DepthResult, ...] | None = None
        if where is not None and trial.confirms is None:
            found = results_by_depth(self._spec, self._rungs, trial)
            if found is not None:
                self.with_results.add(index)
            elif not trial.state.is_ended:
                self.waiting[index] = where
        for result in found or ():
            insort(self._results.setdefault(result.depth, []), (result, index))
        last = trial.reports[-1] if trial.reports else None
        return _Observed(trial, trial.state, last, where, found)

    def _forget(self, index: int, observed: _Observed) -> None:
        for result in observed.results or ():
            there = self._results[result.depth]
            del there[bisect_left(there, (result, index))]
        self.with_results.discard(index)
        self.waiting.pop(index, None)


def observe_trials(spec: SweepSpec, trials: Sequence[Trial]) -> TrialObservations:
    """The observations of these trials. Those of the last few sweeps are kept."""
    sort = msgspec.json.encode((spec.space, spec.goals, spec.early_stop, spec.seed))
    found = _known.pop(sort, None) or TrialObservations(spec)
    if not found.follow(trials):
        found = TrialObservations(spec)
        found.follow(trials)
    while len(_known) >= _KEPT:
        del _known[next(iter(_known))]
    _known[sort] = found
    return found


_known: dict[bytes, TrialObservations] = {}


def results_by_depth(
    spec: SweepSpec, rungs: Sequence[int], trial: Trial
) -> tuple[DepthResult, ...] | None:
    """The results of a trial at each depth, the deepest last; empty: it failed. None: it has none.

    A trial that still runs has results at the rungs that it has passed, where others ended.
    """
    if trial.state in _FAILED:
        return ()
    if not trial.reports:
        return None
    found: list[DepthResult] = []
    for rung in rungs:
        if trial.step >= rung:
            there = next(each for each in trial.reports if each.step >= rung)
            found.append(DepthResult(rung, 0, spec.goal.loss(there.values[0])))
    last = trial.reports[-1]
    if trial.state is TrialState.DONE:
        found.append(DepthResult(END, -END, spec.goal.loss(last.values[0])))
    elif not rungs and trial.state.is_ended:
        found.append(DepthResult(END, -last.step, spec.goal.loss(last.values[0])))
    if not all(math.isfinite(result.loss) for result in found):
        return ()
    return tuple(found) or None


def _rungs(spec: SweepSpec) -> tuple[int, ...]:
    """The steps at which trials are compared."""
    stop = spec.early_stop
    if stop.method not in _STOPPING:
        return ()
    return rung_steps(stop.min, stop.max, stop.eta)
