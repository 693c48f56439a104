"""Numbers as a page needs them: short, within a frame, and not more of them than can be seen."""

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

from msgspec import Struct

T = TypeVar("T")

_LOG = 50.0  # a frame whose ends differ by this factor is logarithmic
_BEYOND = 0.03  # of the values, at the bad end, may lie outside of the frame


def short(value: float | None, digits: int = 6) -> float | None:
    """The value with few digits; None for what JSON and an axis have no place for."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def even(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of them, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    if most < 2:
        return list(items[:most])
    return [items[place * (len(items) - 1) // (most - 1)] for place in range(most)]


class Frame(Struct, frozen=True):
    """The ends of an axis."""

    low: float
    high: float
    log: bool = False
    beyond: int = 0  # values that lie outside


def frame(values: Iterable[float], direction: str) -> Frame | None:
    """The part of an axis in which values of a goal can be told apart; None without any.

    The good end is never cut. The few worst are, where they would press all others together.
    """
    known = sorted(value for value in values if math.isfinite(value))
    if not known:
        return None
    cut = int(len(known) * _BEYOND)
    low, high = known[0], known[-1]
    if cut and direction == "max" and high - known[cut] < 0.5 * (high - low):
        low = known[cut]
    if cut and direction == "min" and known[-1 - cut] - low < 0.5 * (high - low):
        high = known[-1 - cut]
    beyond = sum(not low <= value <= high for value in known)
    if low > 0 and high / low > _LOG:
        return Frame(low, high, True, beyond)
    pad = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return Frame(low - pad, high + pad, False, beyond)
