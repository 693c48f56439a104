"""Tree-structured Parzen estimator: draws near good trials and far from bad ones.

Source: J. Bergstra and others, "Algorithms for hyper-parameter optimization", 2011. Differences:
kernels over all parameters together; kernels of a fixed width, because narrow kernels make trials
that run at once all alike; a trial without a result counts as bad (the constant liar), so that the
next trial differs; trials that ended early or still run count by their rank among all trials at the
same rung. Figures: docs/sweeps-figures.md.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import repeat
from operator import and_, is_not, mul, neg
from random import Random
from typing import Any, NamedTuple

from batchml.model.job import Scalar
from batchml.model.sweep import (
    Dimension,
    Params,
    Space,
    SweepSpec,
    Trial,
    TrialState,
    is_discrete,
)
from batchml.sweeps.samplers.points import (
    Scale,
    build_point,
    from_unit,
    index_of,
    point_key,
    seeded_random,
)
from batchml.sweeps.samplers.sequences import find_unused, is_allowed

# --- Kernel density estimates in plain Python: one kernel around each point -----------------------
# Every parameter becomes coordinates in which a kernel depends on the squared distance: a number
# becomes its position divided by the kernel's width, a choice one coordinate for each of its
# values. So a kernel is `exp(-math.dist(a, b) ** 2)`, and the loops run in C. All densities are
# relative to that of a random draw, which is 1 everywhere.


_ROOT = math.sqrt(2)
_ROOT_2PI = math.sqrt(2 * math.pi)


class KernelAxis(NamedTuple):
    """A parameter. `values`: the number of values of a choice; 0 for a number."""

    name: str
    values: int
    dimension: Dimension
    scale: Scale


# On each axis: the position of a number, the index of a choice; None for an inactive parameter.
Coordinates = tuple[float | None, ...]


def make_axes(space: Space) -> tuple[KernelAxis, ...]:
    """The axes of all parameters but constants."""
    return tuple(
        KernelAxis(
            name,
            len(dimension.values) if dimension.kind == "choice" else 0,
            dimension,
            Scale(dimension),
        )
        for name, dimension in space.items()
        if dimension.kind != "constant"
    )


def locate(axes: Sequence[KernelAxis], params: Params) -> Coordinates | None:
    """The coordinates of a point; None for a point outside of the space."""
    coordinates: list[float | None] = []
    for name, count, dimension, scale in axes:
        if name not in params:
            coordinates.append(None)
            continue
        value = params[name]
        position = index_of(dimension, value) if count else scale.position(value)
        if position is None:
            return None
        coordinates.append(position)
    return tuple(coordinates)


class Kernel(NamedTuple):
    """The shape of all kernels."""

    width: float  # the deviation along a number's axis, as a share of the range
    other: float  # the probability mass that a choice's kernel spreads over all values

    def place(self, axis: KernelAxis, position: float) -> tuple[float, ...]:
        """The coordinates of a position on an axis."""
        if not axis.values:
            return (position / self.width / _ROOT,)
        return _place_of_choice(self, axis.values, int(position))

    def log_height(self, axis: KernelAxis, position: float) -> float:
        """The logarithm of the height of the kernel at a position: that of a normal density, which
        is cut off outside of [0, 1], or the probability of the kernel's own choice."""
        if axis.values:
            return math.log(self.choice_probabilities(axis.values)[0] * axis.values)
        return self.along_number(position)[1]

    def along_number(self, position: float) -> tuple[float, float]:
        """The coordinate of a position on a number's axis, and `log_height` there."""
        at = position / self.width / _ROOT
        inside = math.erf((1 - position) / self.width / _ROOT) + math.erf(at)
        return at, math.log(2 / (inside * self.width * _ROOT_2PI))

    def choice_probabilities(self, count: int) -> tuple[float, float]:
        """The probability of the choice of the kernel's point, and that of each other choice."""
        other = self.other / count
        return 1 - (count - 1) * other, other

    def draw_near(self, axis: KernelAxis, position: float, random: Random) -> float:
        """Draw a position from the kernel around a position."""
        if axis.values:
            is_any = random.random() < self.other
            return random.randrange(axis.values) if is_any else position
        while True:
            drawn = random.gauss(position, self.width)
            if 0 <= drawn < 1:
                return drawn


@lru_cache(1024)
def _place_of_choice(kernel: Kernel, count: int, chosen: int) -> tuple[float, ...]:
    same, other = kernel.choice_probabilities(count)
    side = math.sqrt(math.log(same / other) / 2)
    return tuple(side if index == chosen else 0.0 for index in range(count))


Row = tuple[float, ...]
_PART = 32  # kernels whose densities are computed at once
_MAX_ROWS = 1 << 14  # that are kept of one group


class Kernels:
    """The kernels of one sweep, in rows of coordinates that are computed once for all mixtures.

    A kernel whose centre lacks a parameter has no density along its axis. So the kernels are
    grouped by the parameters that they share with the points at which densities are asked.
    """

    def __init__(self, axes: Sequence[KernelAxis], kernel: Kernel) -> None:
        self.axes = axes
        self.kernel = kernel
        self._groups: dict[tuple[bool, ...], KernelGroup] = {}

    def group(self, active: tuple[bool, ...], point: Coordinates) -> "KernelGroup":
        """The group of the kernel around a point, for densities at points with these active
        parameters."""
        shared = active
        if None in point:
            shared = tuple(map(and_, active, map(is_not, point, repeat(None))))
        if shared not in self._groups:
            self._groups[shared] = KernelGroup(self.axes, self.kernel, shared)
        return self._groups[shared]


class KernelGroup:
    """The kernels along the axes of these parameters."""

    def __init__(
        self, axes: Sequence[KernelAxis], kernel: Kernel, shared: tuple[bool, ...]
    ) -> None:
        self._kernel = kernel
        self._axes = [  # with the height along a choice, which is the same everywhere
            (n, axis, kernel.log_height(axis, 0.0) if axis.values else 0.0)
            for n, (axis, used) in enumerate(zip(axes, shared, strict=True))
            if used
        ]
        self._rows: dict[Coordinates, Row] = {}
        # The kernel is highest at an end of the range, where half of it is cut off.
        self._top = sum(
            max(kernel.log_height(axis, end) for end in (0.0, 1.0)) for _, axis, _ in self._axes
        )
        self.height = math.exp(self._top)  # by which the sum of `exp(-distance ** 2)` is multiplied

    def row(self, point: Coordinates) -> Row:
        """The coordinates of a kernel. Its height is one more coordinate, so that one distance
        includes it."""
        found = self._rows.get(point)
        if found is None:
            if len(self._rows) >= _MAX_ROWS:
                self._rows.clear()
            found = self._rows[point] = self._make_row(point)
        return found

    def _make_row(self, point: Coordinates) -> Row:
        kernel, height = self._kernel, 0.0
        row: list[float] = []
        for n, axis, log_height in self._axes:
            position = point[n] or 0.0
            if axis.values:
                row += kernel.place(axis, position)
            else:
                at, log_height = kernel.along_number(position)
                row.append(at)
            height += log_height
        return (*row, math.sqrt(max(0.0, self._top - height)))

    def place(self, point: Coordinates) -> Row:
        """The coordinates at which a density is asked."""
        place: Row = ()
        for n, axis, _ in self._axes:
            place += self._kernel.place(axis, point[n] or 0.0)
        return (*place, 0.0)


class _Part(NamedTuple):
    """At most _PART kernels of one group. Their rows are computed when a density is asked."""

    points: list[Coordinates]
    rows: list[Row]


class Mixture:
    """The density of many kernels and a random draw, whose weight is that of `prior` kernels."""

    def __init__(self, kernels: Kernels, points: Sequence[Coordinates], prior: float = 1.0) -> None:
        self.axes = kernels.axes
        self.points = list(points)
        self.prior = prior
        self._kernels = kernels
        self._places = {axis.name: place for place, axis in enumerate(self.axes)}
        self._views: dict[tuple[bool, ...], dict[KernelGroup, list[_Part]]] = {}  # by active ones

    def add(self, point: Coordinates) -> None:
        self.points.append(point)
        for active in self._views:
            self._add_to_view(active, point)

    def _add_to_view(self, active: tuple[bool, ...], point: Coordinates) -> None:
        parts = self._views[active].setdefault(self._kernels.group(active, point), [])
        if not parts or len(parts[-1].points) == _PART:
            parts.append(_Part([], []))
        parts[-1].points.append(point)

    def log_density(self, point: Coordinates) -> float:
        """The logarithm of the density at a point, in the subspace of its active parameters."""
        total = self.prior + sum(self.parts(point))
        return math.log(total / (self.prior + len(self.points)))

    def parts(self, point: Coordinates) -> Iterator[float]:
        """The sums of the densities of some kernels each at a point, those of the newest first."""
        active = tuple(position is not None for position in point)
        if active not in self._views:
            self._views[active] = {}
            for other in self.points:
                self._add_to_view(active, other)
        for group, parts in self._views[active].items():
            place = repeat(group.place(point))
            for points, rows in reversed(parts):
                rows += map(group.row, points[len(rows) :])
                distances = list(map(math.dist, place, rows))
                yield group.height * sum(map(math.exp, map(neg, map(mul, distances, distances))))

    def draw(self, space: Space, random: Random) -> Params:
        """Draw a point from one of the kernels; parameters that its centre lacks are random."""
        index = int(random.random() * (len(self.points) + self.prior))
        centre = self.points[index] if index < len(self.points) else (None,) * len(self.axes)

        def pick(name: str, dimension: Dimension) -> Scalar:
            if name not in self._places:  # a constant
                return from_unit(dimension, random.random())
            place = self._places[name]
            axis, position = self.axes[place], centre[place]
            if position is None:
                return axis.scale.value(random.random())
            drawn = self._kernels.kernel.draw_near(axis, position, random)
            return dimension.values[int(drawn)] if axis.values else axis.scale.value(drawn)

        return build_point(space, pick)


def find_greatest_ratio(good: Mixture, bad: Mixture, points: Sequence[Coordinates]) -> int:
    """The index of the point with the greatest ratio of the densities `good` and `bad`.

    The density of bad kernels is summed part by part, always that of the point whose ratio may
    still be the greatest: what is summed so far bounds the ratio. So most of the kernels are
    compared with few of the points.
    """
    ratios: list[tuple[float, int, float, float, Iterator[float]]] = []
    for index, point in enumerate(points):
        above = good.prior + sum(good.parts(point))
        ratios.append((-above / bad.prior, index, above, bad.prior, bad.parts(point)))
    heapify(ratios)
    while True:
        _, index, above, below, parts = ratios[0]
        part = next(parts, None)
        if part is None:
            return index
        below += part
        heapreplace(ratios, (-above / below, index, above, below, parts))


# --- Settings -------------------------------------------------------------------------------------


class TpeSettings(NamedTuple):
    """Settings, chosen on benchmarks/sweep_problems.py, not with the seeds of the figures."""

    first: int = 10  # results that are needed before a model is used,
    first_each: int = 2  # and more results for each parameter
    candidates: int = 24  # points that are compared for one suggestion
    draws: int = 8  # for each candidate, at most: `where` refuses some points, others were tried
    share: float = 0.1  # of the results count as good,
    good: int = 12  # at most so many
    bad: int = 400  # results that count as bad, at most; of more a sample is taken
    width: float = 0.15  # `Kernel.width`
    other: float = 0.3  # `Kernel.other`
    prior: float = 1.0  # the weight of a random draw, in kernels


SETTINGS = TpeSettings()


# --- The results of trials so far -----------------------------------------------------------------


END = math.inf  # the depth of a completed trial


class DepthResult(NamedTuple):
    """The result of a trial at one depth: at a rung, or at its end. Sorts the best first."""

    depth: float  # the step of the rung; END: the trial's end
    minus_steps: float  # where there are no rungs, longer trials come first
    loss: float


_FAILED = (TrialState.FAILED, TrialState.DIVERGED)


class _Observed(NamedTuple):
    """A trial as it was when it was last read."""

    coordinates: Coordinates | None
    results: tuple[DepthResult, ...] | None


class TrialObservations:
    """The trials of one sweep: those with results, and those that have none yet.

    Whoever keeps it for several suggestions notes each trial that is new or has changed.
    """

    def __init__(self, spec: SweepSpec, trials: Iterable[Trial] = ()) -> None:
        self.kernels = Kernels(make_axes(spec.space), Kernel(SETTINGS.width, SETTINGS.other))
        self.with_results: list[int] = []  # numbers of trials with results, also of failed ones
        self.waiting: dict[int, Coordinates] = {}  # trials that have no result yet, by number
        self.points: set[Hashable] = set()  # keys of the tried points; only in a discrete space
        self.is_discrete = is_discrete(spec.space)
        self._spec = spec
        self._rungs = spec.early_stop.rungs
        self._results: dict[float, list[tuple[DepthResult, int]]] = {}  # by depth, the best first
        self._observed: dict[int, _Observed] = {}  # by number
        self._noted: dict[int, Trial] = {trial.number: trial for trial in trials}

    def note(self, trial: Trial) -> None:
        """Note that a trial is new or has changed; `read` reads it."""
        self._noted[trial.number] = trial

    def coordinates(self, number: int) -> Coordinates:
        coordinates = self._observed[number].coordinates
        assert coordinates is not None
        return coordinates

    def best(self, count: int) -> list[int]:
        """The numbers of the best trials, each ranked at the greatest depth that it has reached.

        So a running trial that leads at its rung is not behind all trials that have ended.
        """
        ranks: list[tuple[int, float, int]] = []
        for depth, at_depth in self._results.items():
            for position, (_, number) in enumerate(at_depth[:count]):
                results = self._observed[number].results
                if results and results[-1].depth == depth:
                    ranks.append((position, -depth, number))
        return [number for _, _, number in sorted(ranks)[:count]]

    def read(self) -> None:
        """Read the trials that were noted since the last call."""
        for number, trial in self._noted.items():
            before = self._observed.get(number)
            if before is None:
                coordinates = locate(self.kernels.axes, trial.params)
                if self.is_discrete:
                    self.points.add(point_key(trial.params))
            else:
                coordinates = before.coordinates
                self._forget(number, before)
            self._observed[number] = self._observe(trial, coordinates)
        self._noted.clear()

    def _observe(self, trial: Trial, coordinates: Coordinates | None) -> _Observed:
        number = trial.number
        results: tuple[DepthResult, ...] | None = None
        if coordinates is not None and trial.confirms is None:
            results = results_by_depth(self._spec, self._rungs, trial)
            if results is not None:
                insort(self.with_results, number)
            elif not trial.state.is_ended:
                self.waiting[number] = coordinates
        for result in results or ():
            insort(self._results.setdefault(result.depth, []), (result, number))
        return _Observed(coordinates, results)

    def _forget(self, number: int, observed: _Observed) -> None:
        for result in observed.results or ():
            _remove(self._results[result.depth], (result, number))
        if observed.results is not None:
            _remove(self.with_results, number)
        self.waiting.pop(number, None)


def _remove(items: list[Any], item: Any) -> None:
    """Remove an item from a sorted list."""
    del items[bisect_left(items, item)]


def results_by_depth(
    spec: SweepSpec, rungs: Sequence[int], trial: Trial
) -> tuple[DepthResult, ...] | None:
    """The results of a trial at each depth, the deepest last; empty: it failed; None: no result.

    A trial that still runs has results at the rungs that it has passed, where other trials ended.
    """
    if trial.state in _FAILED:
        return ()
    if not trial.reports:
        return None
    results: list[DepthResult] = []
    for rung in rungs:
        if trial.step >= rung:
            at_rung = next(each for each in trial.reports if each.step >= rung)
            results.append(DepthResult(rung, 0, spec.goal.loss(at_rung.values[0])))
    last = trial.reports[-1]
    if trial.state is TrialState.DONE:
        results.append(DepthResult(END, -END, spec.goal.loss(last.values[0])))
    elif not rungs and trial.state.is_ended:
        results.append(DepthResult(END, -last.step, spec.goal.loss(last.values[0])))
    if not all(math.isfinite(result.loss) for result in results):
        return ()
    return tuple(results) or None


# --- The sampler ----------------------------------------------------------------------------------


def suggest_points(
    spec: SweepSpec, observed: TrialObservations, indices: Sequence[int]
) -> Iterator[tuple[Params, str]]:
    """Points number `indices`, with the origin "tpe" or "random". Ends if no point is left."""
    observed.read()
    tried = observed.points | set(map(point_key, spec.points)) if observed.is_discrete else set()
    axes = observed.kernels.axes
    enough = SETTINGS.first + SETTINGS.first_each * len(axes)
    model = None
    for index in indices:
        params: Params | None = None
        origin = "tpe"
        random = seeded_random(spec.seed, index, "tpe")
        if axes and len(observed.with_results) >= enough:
            model = model or _make_model(observed, random)
            params = _choose_candidate(spec, model, tried, random)
        if params is None:
            params, origin = find_unused(spec, tried, index), "random"
        if params is None:
            return
        yield params, origin
        if observed.is_discrete:
            tried.add(point_key(params))
        coordinates = locate(axes, params)
        if model is not None and coordinates is not None:
            model.bad.add(coordinates)


class _Model(NamedTuple):
    good: Mixture
    bad: Mixture


def _make_model(observed: TrialObservations, random: Random) -> _Model:
    count = math.ceil(SETTINGS.share * len(observed.with_results))
    good = observed.best(min(count, SETTINGS.good))
    bad = observed.with_results.copy()
    for number in good:
        _remove(bad, number)
    if len(bad) > SETTINGS.bad:
        bad = random.sample(bad, SETTINGS.bad)
    good_points, bad_points = (list(map(observed.coordinates, each)) for each in (good, bad))
    waiting = (point for _, point in sorted(observed.waiting.items()))
    return _Model(
        Mixture(observed.kernels, good_points, SETTINGS.prior),
        Mixture(observed.kernels, [*bad_points, *waiting], SETTINGS.prior),
    )


def _choose_candidate(
    spec: SweepSpec, model: _Model, tried: set[object], random: Random
) -> Params | None:
    """Draw candidates from the good kernels; choose the one with the best ratio of the densities of
    good and bad kernels. None if no draw is allowed and new."""
    candidates: list[Params] = []
    points: list[Coordinates] = []
    for _ in range(SETTINGS.candidates * SETTINGS.draws):
        params = model.good.draw(spec.space, random)
        if not is_allowed(spec, params) or (tried and point_key(params) in tried):
            continue
        coordinates = locate(model.good.axes, params)
        assert coordinates is not None
        candidates.append(params)
        points.append(coordinates)
        if len(points) == SETTINGS.candidates:
            break
    return candidates[find_greatest_ratio(model.good, model.bad, points)] if points else None
