"""Densities from points: one kernel around each, in plain Python.

Every parameter becomes coordinates in which the kernel's fall is the squared distance: a number
becomes its place divided by the width, a choice one coordinate for each of its values. So a
kernel is `exp(-math.dist(a, b) ** 2)`, and the loops run in C. All densities are relative to that
of a random draw, for which it is 1 everywhere.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from operator import mul, neg
from random import Random
from typing import NamedTuple

from batchml.model.job import Scalar
from batchml.model.sweep import Params, Space, is_active
from batchml.sweep.unit import from_unit, index_of, to_unit

_ROOT = math.sqrt(2)


class Axis(NamedTuple):
    """A parameter as kernels see it. `values`: how many a choice has; 0: it is a number."""

    name: str
    values: int


Places = tuple[float | None, ...]  # by axis: place of a number, index of a choice; None: inactive


def axes(space: Space) -> tuple[Axis, ...]:
    """All parameters but the constants."""
    return tuple(
        Axis(name, len(dimension.values) if dimension.kind == "choice" else 0)
        for name, dimension in space.items()
        if dimension.kind != "constant"
    )


def places(space: Space, along: Sequence[Axis], params: Params) -> Places | None:
    """Where a point lies; None: outside the space."""
    found: list[float | None] = []
    for name, count in along:
        if name not in params:
            found.append(None)
            continue
        value = params[name]
        place = index_of(space[name], value) if count else to_unit(space[name], value)
        if place is None:
            return None
        found.append(place)
    return tuple(found)


class Kernel(NamedTuple):
    """How wide kernels are. `width`: of numbers, in shares of their range; `other`: how likely a
    choice differs from that of the kernel's point."""

    width: float
    other: float

    def spread(self, axis: Axis, place: float) -> tuple[tuple[float, ...], float]:
        """Coordinates of a place along an axis, and the logarithm of the kernel's height there."""
        if not axis.values:
            return (place / self.width / _ROOT,), math.log(self._height(place))
        return _of_choice(self, axis.values, int(place))

    def likely(self, count: int) -> tuple[float, float]:
        """How likely a choice is the same as that of the kernel's point, and one of the others."""
        other = self.other / count
        return 1 - (count - 1) * other, other

    def _height(self, place: float) -> float:
        """Of a normal density whose share outside [0, 1] is cut off."""
        inside = math.erf((1 - place) / self.width / _ROOT) + math.erf(place / self.width / _ROOT)
        return 2 / (inside * self.width * math.sqrt(2 * math.pi))

    def near(self, axis: Axis, place: float, random: Random) -> float:
        """A place drawn from the kernel around `place`."""
        if axis.values:
            _, other = self.likely(axis.values)
            return random.randrange(axis.values) if random.random() < other * axis.values else place
        while True:
            drawn = random.gauss(place, self.width)
            if 0 <= drawn < 1:
                return drawn


@lru_cache(1024)
def _of_choice(kernel: Kernel, count: int, chosen: int) -> tuple[tuple[float, ...], float]:
    same, other = kernel.likely(count)
    side = math.sqrt(math.log(same / other) / 2)
    coordinates = tuple(side if index == chosen else 0.0 for index in range(count))
    return coordinates, math.log(same * count)


class Mixture:
    """The density of many kernels and of a random draw, which weighs as much as `prior` of them."""

    def __init__(
        self, along: Sequence[Axis], points: Sequence[Places], kernel: Kernel, prior: float = 1.0
    ) -> None:
        self.axes = along
        self.points = list(points)
        self.kernel = kernel
        self.prior = prior
        self._views: dict[tuple[bool, ...], _View] = {}

    def add(self, point: Places) -> None:
        self.points.append(point)
        for active, view in self._views.items():
            view.add(active, point)

    def log_density(self, point: Places) -> float:
        """The logarithm of the density at a point, in its own subspace of active parameters."""
        active = tuple(place is not None for place in point)
        if active not in self._views:
            view = self._views[active] = _View(self.axes, self.kernel)
            for known in self.points:
                view.add(active, known)
        total = self.prior + self._views[active].total(point)
        return math.log(total / (self.prior + len(self.points)))

    def draw(self, space: Space, random: Random) -> Params:
        """A point of one of the kernels; where that knows nothing of a parameter, at random."""
        index = int(random.random() * (len(self.points) + self.prior))
        centre = self.points[index] if index < len(self.points) else (None,) * len(self.axes)
        known = {axis.name: (axis, place) for axis, place in zip(self.axes, centre, strict=True)}
        params: Params = {}
        for name, dimension in space.items():
            if not is_active(dimension, params):
                continue
            axis, place = known.get(name, (None, None))
            value: Scalar
            if axis is None or place is None:
                value = from_unit(dimension, random.random())
            elif axis.values:
                value = dimension.values[int(self.kernel.near(axis, place, random))]
            else:
                value = from_unit(dimension, self.kernel.near(axis, place, random))
            params[name] = value
        return params


class _View:
    """Kernels as points with one set of active parameters see them.

    A kernel that lacks one of these says nothing about it; so the kernels come in groups by what
    they share with the points that ask.
    """

    def __init__(self, along: Sequence[Axis], kernel: Kernel) -> None:
        self._axes = along
        self._kernel = kernel
        self._groups: dict[tuple[bool, ...], tuple[list[tuple[float, ...]], float]] = {}

    def add(self, active: tuple[bool, ...], point: Places) -> None:
        shared = tuple(a and place is not None for a, place in zip(active, point, strict=True))
        if shared not in self._groups:
            top = sum(
                _highest(self._kernel, axis)
                for axis, used in zip(self._axes, shared, strict=True)
                if used
            )
            self._groups[shared] = ([], top)
        rows, top = self._groups[shared]
        coordinates, height = self._coordinates(shared, point)
        # The height travels as one more coordinate, so that one distance says it all.
        rows.append((*coordinates, math.sqrt(max(0.0, top - height))))

    def total(self, point: Places) -> float:
        total = 0.0
        for shared, (rows, top) in self._groups.items():
            coordinates, _ = self._coordinates(shared, point)
            distances = list(map(math.dist, repeat((*coordinates, 0.0)), rows))
            falls = map(math.exp, map(neg, map(mul, distances, distances)))
            total += math.exp(top) * sum(falls)
        return total

    def _coordinates(
        self, shared: tuple[bool, ...], point: Places
    ) -> tuple[tuple[float, ...], float]:
        coordinates: tuple[float, ...] = ()
        height = 0.0
        for axis, used, place in zip(self._axes, shared, point, strict=True):
            if used and place is not None:
                more, higher = self._kernel.spread(axis, place)
                coordinates += more
                height += higher
        return coordinates, height


def _highest(kernel: Kernel, axis: Axis) -> float:
    """The most that `spread` can say of a height: at an end, where half is cut off."""
    return max(kernel.spread(axis, place)[1] for place in (0.0, 1.0))
