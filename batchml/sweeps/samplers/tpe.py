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
from functools import lru_cache
from itertools import repeat
from operator import mul, neg
from random import Random
from typing import NamedTuple

import msgspec

from batchml.model.job import Scalar
from batchml.model.sweep import (
    Params,
    Space,
    SweepSpec,
    Trial,
    TrialReport,
    TrialState,
    is_active,
    is_discrete,
)
from batchml.sweeps.samplers.points import from_unit, index_of, point_key, seeded_random, to_unit
from batchml.sweeps.samplers.sequences import find_unused, is_allowed

# --- kernels --------------------------------------------------------------------------------------
# Kernel density estimates in plain Python: one kernel around each point.
#
# Every parameter becomes coordinates in which a kernel depends on the squared distance: a number
# becomes its position divided by the kernel's width, a choice one coordinate for each of its
# values. So a kernel is `exp(-math.dist(a, b) ** 2)`, and the loops run in C. All densities are
# relative to that of a random draw, which is 1 everywhere.


_ROOT = math.sqrt(2)


class KernelAxis(NamedTuple):
    """A parameter. `values`: the number of values of a choice; 0 for a number."""

    name: str
    values: int


# By axis: the position of a number, the index of a choice; None: inactive.
Coordinates = tuple[float | None, ...]


def make_axes(space: Space) -> tuple[KernelAxis, ...]:
    """The axes of all parameters but constants."""
    return tuple(
        KernelAxis(name, len(dimension.values) if dimension.kind == "choice" else 0)
        for name, dimension in space.items()
        if dimension.kind != "constant"
    )


def locate(space: Space, along: Sequence[KernelAxis], params: Params) -> Coordinates | None:
    """The coordinates of a point; None: outside of the space."""
    found: list[float | None] = []
    for name, count in along:
        if name not in params:
            found.append(None)
            continue
        value = params[name]
        position = index_of(space[name], value) if count else to_unit(space[name], value)
        if position is None:
            return None
        found.append(position)
    return tuple(found)


class Kernel(NamedTuple):
    """Widths of kernels. `width`: of numbers, as a share of their range. `other`: the probability
    that a choice differs from the choice of the kernel's point."""

    width: float
    other: float

    def spread(self, axis: KernelAxis, position: float) -> tuple[tuple[float, ...], float]:
        """The coordinates of a position on an axis, and the logarithm of the kernel's height."""
        if not axis.values:
            return (position / self.width / _ROOT,), math.log(self._height(position))
        return _of_choice(self, axis.values, int(position))

    def likely(self, count: int) -> tuple[float, float]:
        """The probability of the choice of the kernel's point, and that of each other choice."""
        other = self.other / count
        return 1 - (count - 1) * other, other

    def _height(self, position: float) -> float:
        """The height of a normal density that is cut off outside of [0, 1]."""
        inside = math.erf((1 - position) / self.width / _ROOT) + math.erf(
            position / self.width / _ROOT
        )
        return 2 / (inside * self.width * math.sqrt(2 * math.pi))

    def near(self, axis: KernelAxis, position: float, random: Random) -> float:
        """Draw a position from the kernel around a position."""
        if axis.values:
            _, other = self.likely(axis.values)
            return (
                random.randrange(axis.values) if random.random() < other * axis.values else position
            )
        while True:
            drawn = random.gauss(position, self.width)
            if 0 <= drawn < 1:
                return drawn


@lru_cache(1024)
def _of_choice(kernel: Kernel, count: int, chosen: int) -> tuple[tuple[float, ...], float]:
    same, other = kernel.likely(count)
    side = math.sqrt(math.log(same / other) / 2)
    coordinates = tuple(side if index == chosen else 0.0 for index in range(count))
    return coordinates, math.log(same * count)


class Mixture:
    """The density of many kernels and a random draw, whose weight is that of `prior` kernels."""

    def __init__(
        self,
        along: Sequence[KernelAxis],
        points: Sequence[Coordinates],
        kernel: Kernel,
        prior: float = 1.0,
    ) -> None:
        self.axes = along
        self.points = list(points)
        self.kernel = kernel
        self.prior = prior
        self._views: dict[tuple[bool, ...], _View] = {}

    def add(self, point: Coordinates) -> None:
        self.points.append(point)
        for active, view in self._views.items():
            view.add(active, point)

    def log_density(self, point: Coordinates) -> float:
        """The logarithm of the density at a point, in the subspace of its active parameters."""
        active = tuple(position is not None for position in point)
        if active not in self._views:
            view = self._views[active] = _View(self.axes, self.kernel)
            for known in self.points:
                view.add(active, known)
        total = self.prior + self._views[active].total(point)
        return math.log(total / (self.prior + len(self.points)))

    def draw(self, space: Space, random: Random) -> Params:
        """Draw a point from one of the kernels; parameters that it lacks are drawn at random."""
        index = int(random.random() * (len(self.points) + self.prior))
        centre = self.points[index] if index < len(self.points) else (None,) * len(self.axes)
        known = {
            axis.name: (axis, position) for axis, position in zip(self.axes, centre, strict=True)
        }
        params: Params = {}
        for name, dimension in space.items():
            if not is_active(dimension, params):
                continue
            axis, position = known.get(name, (None, None))
            value: Scalar
            if axis is None or position is None:
                value = from_unit(dimension, random.random())
            elif axis.values:
                value = dimension.values[int(self.kernel.near(axis, position, random))]
            else:
                value = from_unit(dimension, self.kernel.near(axis, position, random))
            params[name] = value
        return params


class _View:
    """The kernels as seen from points with one set of active parameters.

    A kernel without one of these has no density along its axis. So kernels are grouped by the
    parameters that they share with the points.
    """

    def __init__(self, along: Sequence[KernelAxis], kernel: Kernel) -> None:
        self._axes = along
        self._kernel = kernel
        self._groups: dict[tuple[bool, ...], tuple[list[tuple[float, ...]], float]] = {}

    def add(self, active: tuple[bool, ...], point: Coordinates) -> None:
        shared = tuple(
            a and position is not None for a, position in zip(active, point, strict=True)
        )
        if shared not in self._groups:
            top = sum(
                _highest(self._kernel, axis)
                for axis, used in zip(self._axes, shared, strict=True)
                if used
            )
            self._groups[shared] = ([], top)
        rows, top = self._groups[shared]
        coordinates, height = self._coordinates(shared, point)
        # The height is one more coordinate, so that one distance includes it.
        rows.append((*coordinates, math.sqrt(max(0.0, top - height))))

    def total(self, point: Coordinates) -> float:
        total = 0.0
        for shared, (rows, top) in self._groups.items():
            coordinates, _ = self._coordinates(shared, point)
            distances = list(map(math.dist, repeat((*coordinates, 0.0)), rows))
            falls = map(math.exp, map(neg, map(mul, distances, distances)))
            total += math.exp(top) * sum(falls)
        return total

    def _coordinates(
        self, shared: tuple[bool, ...], point: Coordinates
    ) -> tuple[tuple[float, ...], float]:
        coordinates: tuple[float, ...] = ()
        height = 0.0
        for axis, used, position in zip(self._axes, shared, point, strict=True):
            if used and position is not None:
                more, higher = self._kernel.spread(axis, position)
                coordinates += more
                height += higher
        return coordinates, height


def _highest(kernel: Kernel, axis: KernelAxis) -> float:
    """The greatest height of `spread`: at an end of the range, where half is cut off."""
    return max(kernel.spread(axis, position)[1] for position in (0.0, 1.0))


# --- tpe ------------------------------------------------------------------------------------------


# --- What trials have shown so far ----------------------------------------------------------------


END = math.inf  # the depth of a completed trial


class DepthResult(NamedTuple):
    """The result of a trial at one depth: at a rung, or at its end. Sorts the best first."""

    depth: float
    behind: float  # minus the steps that it came to, where there are no rungs
    loss: float


_FAILED = (TrialState.FAILED, TrialState.DIVERGED)
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
        self._rungs = spec.early_stop.rungs
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
