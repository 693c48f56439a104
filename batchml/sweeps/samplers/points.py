"""Points of a search space: build, compare and scale them, with the same draws after a restart."""

import math
from collections.abc import Callable, Hashable
from random import Random
from statistics import NormalDist

from batchml.model.job import Scalar
from batchml.model.sweep import Dimension, Params, Space, count_levels, is_active, is_same, level

Pick = Callable[[str, Dimension], Scalar]


def build_point(space: Space, pick: Pick) -> Params:
    """Build a point: `pick` chooses the value of each active parameter, parents first."""
    params: Params = {}
    for name, dimension in space.items():
        if is_active(dimension, params):
            params[name] = pick(name, dimension)
    return params


def point_key(params: Params) -> Hashable:
    """A key that is equal for equal points, whatever their order. 1 and true are different."""
    return frozenset((name, isinstance(value, bool), value) for name, value in params.items())


def seeded_random(*words: object) -> Random:
    """A generator of the same random numbers for the same words, in every version of Python."""
    return Random(":".join(map(str, words)))


# --- Unit scaling: from values to positions in [0, 1) and back ------------------------------------
# Intervals of equal length are equally likely.


_EDGE = 1e-6  # the share of a normal distribution that is cut off at each side
_DIGITS = 6  # significant digits: short on a command line, and fine enough for any training
_NORMAL = NormalDist()


class Scale:
    """The scale of one parameter. What all its values have in common is computed once."""

    def __init__(self, dimension: Dimension) -> None:
        self._dimension = dimension
        self._count = count_levels(dimension)
        self._step = dimension.step or 1
        self._low, self._high = _ends(dimension)  # of a logarithmic scale: the logarithms
        self._span = self._high - self._low
        self._decimals = _DIGITS - math.floor(math.log10(self._span)) if self._span > 0 else 0

    def value(self, position: float) -> Scalar:
        """The value at a position from 0 (included) to 1."""
        dimension, count = self._dimension, self._count
        if dimension.kind == "normal":
            return _from_normal(dimension, position)
        if count is not None:
            return level(dimension, self._index_at(position, count))
        value = self._low + position * self._span
        if dimension.log:
            value = float(f"{math.exp(value):.{_DIGITS}g}")
        elif self._span > 0:
            value = round(value, self._decimals)
        return min(max(value, dimension.low), dimension.high)

    def position(self, value: Scalar) -> float | None:
        """The middle of all positions with this value; None if the parameter cannot have it."""
        dimension, count = self._dimension, self._count
        if dimension.kind in ("choice", "constant"):
            index = index_of(dimension, value)
            return None if index is None else (index + 0.5) / len(dimension.values)
        if isinstance(value, str):
            return None
        if dimension.kind == "normal":
            return _to_normal(dimension, value)
        if count is not None and not dimension.log:
            position = ((value - dimension.low) / self._step + 0.5) / count
        else:
            if dimension.log and value <= 0:
                return 0.0
            scaled = math.log(value) if dimension.log else value
            position = (scaled - self._low) / (self._span or 1.0)
        return min(max(position, 0.0), 1.0)

    def probability(self, value: Scalar) -> float:
        """The probability of a value, if all positions of [0, 1) are equally likely."""
        dimension = self._dimension
        if not dimension.log or dimension.kind in ("choice", "constant"):
            return 1 / (self._count or 1)
        assert not isinstance(value, str)
        half = self._step / 2
        below = math.log(value - half) if value > dimension.low else self._low
        return (math.log(value + half) - below) / self._span

    def _index_at(self, position: float, count: int) -> int:
        dimension = self._dimension
        if dimension.log and dimension.kind in ("int", "float"):
            value = math.exp(self._low + position * self._span)
            index = round((value - dimension.low) / self._step)
        else:
            index = int(position * count)
        return min(max(index, 0), count - 1)


def from_unit(dimension: Dimension, position: float) -> Scalar:
    """The value at a position from 0 (included) to 1."""
    return Scale(dimension).value(position)


def index_of(dimension: Dimension, value: Scalar) -> int | None:
    """The index of a choice's value."""
    return next((i for i, known in enumerate(dimension.values) if is_same(known, value)), None)


def _ends(dimension: Dimension) -> tuple[float, float]:
    """The range of a parameter, or of its logarithm where the scale is logarithmic."""
    low, high = dimension.low, dimension.high
    if not dimension.log or dimension.kind == "normal":
        return low, high
    step = dimension.step or (1 if dimension.kind == "int" else None)
    if step is None:
        return math.log(low), math.log(high)
    top = low + math.floor((high - low) / step + 1e-9) * step
    # Half a step beyond, so that the first and last value are as likely as the others.
    return math.log(low - min(step, low) / 2), math.log(top + step / 2)


def _from_normal(dimension: Dimension, position: float) -> float:
    deviation = _NORMAL.inv_cdf(min(max(position, _EDGE), 1 - _EDGE))
    value = dimension.mu + dimension.sigma * deviation
    if dimension.log:
        value = math.exp(value)
    return float(f"{value:.{_DIGITS}g}")


def _to_normal(dimension: Dimension, value: float) -> float:
    if dimension.log:
        if value <= 0:
            return 0.0
        value = math.log(value)
    return _NORMAL.cdf((value - dimension.mu) / dimension.sigma)
