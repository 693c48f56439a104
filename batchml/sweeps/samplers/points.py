"""Points of a search space: build, compare and scale them, with the same draws after a restart."""

import math
from collections.abc import Callable, Hashable
from functools import lru_cache
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


def from_unit(dimension: Dimension, position: float) -> Scalar:
    """The value at a position from 0 (included) to 1."""
    count = count_levels(dimension)
    if dimension.kind == "normal":
        return _from_normal(dimension, position)
    if count is None:
        return _from_range(dimension, position)
    return level(dimension, _index_at(dimension, position, count))


def to_unit(dimension: Dimension, value: Scalar) -> float | None:
    """The position of a value: the middle of all positions that `from_unit` turns into the value.

    None for a value that the parameter cannot have.
    """
    count = count_levels(dimension)
    if dimension.kind in ("choice", "constant"):
        index = index_of(dimension, value)
        return None if index is None else (index + 0.5) / len(dimension.values)
    if isinstance(value, str):
        return None
    if dimension.kind == "normal":
        return _to_normal(dimension, value)
    if count is not None and not dimension.log:
        position = ((value - dimension.low) / _step(dimension) + 0.5) / count
    else:
        low, high = _ends(dimension)
        if dimension.log and value <= 0:
            return 0.0
        position = (_scaled(dimension, value) - low) / ((high - low) or 1.0)
    return min(max(position, 0.0), 1.0)


def index_of(dimension: Dimension, value: Scalar) -> int | None:
    """The index of a choice's value."""
    return next((i for i, known in enumerate(dimension.values) if is_same(known, value)), None)


def probability(dimension: Dimension, value: Scalar) -> float:
    """The probability of a value, if all positions of [0, 1) are equally likely."""
    if not dimension.log or dimension.kind in ("choice", "constant"):
        return 1 / (count_levels(dimension) or 1)
    assert not isinstance(value, str)
    low, high = _ends(dimension)
    half = _step(dimension) / 2
    below = math.log(value - half) if value > dimension.low else low
    return (math.log(value + half) - below) / (high - low)


def _step(dimension: Dimension) -> float:
    return dimension.step or 1


@lru_cache(1024)
def _log_ends(low: float, high: float, step: float | None) -> tuple[float, float]:
    if step is None:
        return math.log(low), math.log(high)
    top = low + math.floor((high - low) / step + 1e-9) * step
    # Half a step beyond, so that the first and last value are as likely as the others.
    return math.log(low - min(step, low) / 2), math.log(top + step / 2)


def _ends(dimension: Dimension) -> tuple[float, float]:
    """The range of a parameter, or of its logarithm where the scale is logarithmic."""
    if not dimension.log:
        return dimension.low, dimension.high
    step = dimension.step or (1 if dimension.kind == "int" else None)
    return _log_ends(dimension.low, dimension.high, step)


def _scaled(dimension: Dimension, value: float) -> float:
    return math.log(value) if dimension.log else value


def _index_at(dimension: Dimension, position: float, count: int) -> int:
    if dimension.log and dimension.kind in ("int", "float"):
        low, high = _ends(dimension)
        value = math.exp(low + position * (high - low))
        index = round((value - dimension.low) / _step(dimension))
    else:
        index = int(position * count)
    return min(max(index, 0), count - 1)


def _from_range(dimension: Dimension, position: float) -> float:
    low, high = _ends(dimension)
    value = low + position * (high - low)
    if dimension.log:
        value = float(f"{math.exp(value):.{_DIGITS}g}")
    elif high > low:
        value = round(value, _DIGITS - math.floor(math.log10(high - low)))
    return min(max(value, dimension.low), dimension.high)


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
