"""A parameter's values and numbers of [0, 1), so that equal steps there are equally likely."""

import math
from functools import lru_cache
from statistics import NormalDist

from batchml.model.job import Scalar
from batchml.model.sweep import Dimension, level, levels, same

_EDGE = 1e-6  # a normal has no ends: this share of it is cut off at each side
_DIGITS = 6  # of a value's range: shorter on a command line, finer than any training can feel
_NORMAL = NormalDist()


def from_unit(dimension: Dimension, place: float) -> Scalar:
    """The value at `place`, from 0 (included) to 1."""
    count = levels(dimension)
    if dimension.kind == "normal":
        return _from_normal(dimension, place)
    if count is None:
        return _from_range(dimension, place)
    return level(dimension, _index_at(dimension, place, count))


def to_unit(dimension: Dimension, value: Scalar) -> float | None:
    """Where a value lies: the middle of what becomes it; None: it is none of them."""
    count = levels(dimension)
    if dimension.kind in ("choice", "constant"):
        index = index_of(dimension, value)
        return None if index is None else (index + 0.5) / len(dimension.values)
    if isinstance(value, str):
        return None
    if dimension.kind == "normal":
        return _to_normal(dimension, value)
    if count is not None and not dimension.log:
        place = ((value - dimension.low) / _step(dimension) + 0.5) / count
    else:
        low, high = _ends(dimension)
        if dimension.log and value <= 0:
            return 0.0
        place = (_scaled(dimension, value) - low) / ((high - low) or 1.0)
    return min(max(place, 0.0), 1.0)


def index_of(dimension: Dimension, value: Scalar) -> int | None:
    """Which of a choice's values it is."""
    for index, known in enumerate(dimension.values):
        if same(known, value):
            return index
    return None


def likely(dimension: Dimension, value: Scalar) -> float:
    """How likely one of its values is, where each place of [0, 1) is as likely."""
    if not dimension.log or dimension.kind in ("choice", "constant"):
        return 1 / (levels(dimension) or 1)
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
    # Half a step beyond, so that the first and the last value are as likely as their neighbours.
    return math.log(low - min(step, low) / 2), math.log(top + step / 2)


def _ends(dimension: Dimension) -> tuple[float, float]:
    """The range of `_scaled`."""
    if not dimension.log:
        return dimension.low, dimension.high
    step = dimension.step or (1 if dimension.kind == "int" else None)
    return _log_ends(dimension.low, dimension.high, step)


def _scaled(dimension: Dimension, value: float) -> float:
    return math.log(value) if dimension.log else value


def _index_at(dimension: Dimension, place: float, count: int) -> int:
    if dimension.log and dimension.kind in ("int", "float"):
        low, high = _ends(dimension)
        value = math.exp(low + place * (high - low))
        index = round((value - dimension.low) / _step(dimension))
    else:
        index = int(place * count)
    return min(max(index, 0), count - 1)


def _from_range(dimension: Dimension, place: float) -> float:
    low, high = _ends(dimension)
    value = low + place * (high - low)
    if dimension.log:
        value = float(f"{math.exp(value):.{_DIGITS}g}")
    elif high > low:
        value = round(value, _DIGITS - math.floor(math.log10(high - low)))
    return min(max(value, dimension.low), dimension.high)


def _from_normal(dimension: Dimension, place: float) -> float:
    deviation = _NORMAL.inv_cdf(min(max(place, _EDGE), 1 - _EDGE))
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
