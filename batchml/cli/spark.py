"""Curves in a line of text."""

import math
from collections.abc import Sequence

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_NOT_FINITE = "\N{MULTIPLICATION SIGN}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as blocks of eight heights, at most `width` of them, lowest to highest.

    More values than that are taken together by their means; NaN and infinity become a cross, which
    nobody overlooks.
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    means = [_mean(values[edges[i] : edges[i + 1]]) for i in range(count)]
    known = [mean for mean in means if math.isfinite(mean)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return "".join(_block(mean, low, high) for mean in means)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values) if _finite(values) else math.nan


def _finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return _NOT_FINITE
    if low == high:
        return BLOCKS[3]
    part = (value / 2 - low / 2) / (high / 2 - low / 2)  # halves: their difference is finite
    return BLOCKS[min(7, max(0, int(part * 8)))]
