"""Kernel density estimates in plain Python: one kernel around each point.

Every parameter becomes coordinates in which a kernel depends on the squared distance: a number
becomes its position divided by the kernel's width, a choice one coordinate for each of its values.
So a kernel is `exp(-math.dist(a, b) ** 2)`, and the loops run in C. All densities are relative to
that of a random draw, which is 1 everywhere.
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
from batchml.sweeps.samplers.points import from_unit, index_of, to_unit

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
