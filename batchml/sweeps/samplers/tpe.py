"""Tree-structured Parzen estimator: draws near good trials and far from bad ones.

J. Bergstra and others, "Algorithms for hyper-parameter optimization", 2011. Differences: kernels
over all parameters together; kernels of a fixed width, because narrow ones make trials that run at
once all alike; a trial without a result counts as bad (the constant liar), so that the next one
differs; trials that ended early or still run count by their rank among all that came to the same
rung. Figures: docs/sweeps-figures.md.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from random import Random
from typing import NamedTuple

import msgspec

from batchml.model.sweep import Params, SweepSpec, Trial, TrialReport, TrialState, is_discrete
from batchml.runtime.protocol.rungs import rung_steps
from batchml.sweeps.samplers.kernels import (
    Coordinates,
    Kernel,
    KernelAxis,
    Mixture,
    locate,
    make_axes,
)
from batchml.sweeps.samplers.points import point_key, seeded_random
from batchml.sweeps.samplers.sequences import find_unused, is_allowed

# --- What trials have shown so far ----------------------------------------------------------------


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


# --- The sampler ----------------------------------------------------------------------------------


class TpeSettings(NamedTuple):
    """Chosen on the problems of benchmarks/sweep_problems.py, with seeds that are not reported."""

    first: int = 10  # results before a model is used, and
    first_each: int = 2  # more of them for each parameter
    candidates: int = 24
    draws: int = 8  # for each candidate at most: `where` refuses some, others were tried
    share: float = 0.1  # of the results, which count as good
    good: int = 12  # at most
    bad: int = 400  # at most; of more a sample is taken
    width: float = 0.15  # of kernels, as a share of a parameter's range
    other: float = 0.3  # of a choice's kernel: the share that is spread over all values
    prior: float = 1.0  # the weight of a random draw, in kernels


SETTINGS = TpeSettings()


def suggest_points(
    spec: SweepSpec,
    trials: Sequence[Trial],
    indices: Sequence[int],
    settings: TpeSettings = SETTINGS,
) -> Iterator[tuple[Params, str]]:
    """Points number `indices`, with the origin "tpe" or "random". Ends if no point is left."""
    observed = observe_trials(spec, trials)
    tried = observed.points | set(map(point_key, spec.points)) if observed.is_discrete else set()
    enough = settings.first + settings.first_each * len(observed.axes)
    model = None
    for index in indices:
        found: tuple[Params, Coordinates | None] | None = None
        random = seeded_random(spec.seed, index, "tpe")
        if observed.axes and len(observed.with_results) >= enough:
            model = model or _model(observed, random, settings)
            found = _best(spec, model, tried, random, settings)
        if found is not None:
            yield found[0], "tpe"
        else:
            params = find_unused(spec, tried, index)
            if params is None:
                return
            found = params, locate(spec.space, observed.axes, params)
            yield params, "random"
        if observed.is_discrete:
            tried.add(point_key(found[0]))
        if model is not None and found[1] is not None:
            model.bad.add(found[1])


class _Model(NamedTuple):
    good: Mixture
    bad: Mixture


def _model(observed: TrialObservations, random: Random, settings: TpeSettings) -> _Model:
    good = observed.best(min(math.ceil(settings.share * len(observed.with_results)), settings.good))
    bad = sorted(observed.with_results.difference(good))
    if len(bad) > settings.bad:
        bad = random.sample(bad, settings.bad)
    good_points, bad_points = (list(map(observed.coordinates, each)) for each in (good, bad))
    kernel = Kernel(settings.width, settings.other)
    return _Model(
        Mixture(observed.axes, good_points, kernel, settings.prior),
        Mixture(observed.axes, [*bad_points, *observed.waiting.values()], kernel, settings.prior),
    )


def _best(
    spec: SweepSpec, model: _Model, tried: set[object], random: Random, settings: TpeSettings
) -> tuple[Params, Coordinates] | None:
    """Of some draws from the good kernels, the one with the least density of the bad ones."""
    best, best_score = None, -math.inf
    left = settings.candidates
    for _ in range(settings.candidates * settings.draws):
        params = model.good.draw(spec.space, random)
        if not is_allowed(spec, params) or (tried and point_key(params) in tried):
            continue
        where = locate(spec.space, model.good.axes, params)
        assert where is not None
        score = model.good.log_density(where) - model.bad.log_density(where)
        if score > best_score:
            best, best_score = (params, where), score
        left -= 1
        if not left:
            break
    return best
