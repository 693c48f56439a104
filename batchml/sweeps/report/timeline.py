"""The timeline of a report: when each trial started up and trained, and how many could have run.

Also the rounding, the thinning and the ends of axes, for all plots of the page.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct

from batchml.model.sweep import Trial, TrialState

# --- Numbers for a page ---------------------------------------------------------------------------


T = TypeVar("T")

_LOG = 50.0  # an axis whose ends differ by more than this factor is logarithmic
_OUTSIDE = 0.03  # the share of the values that may lie outside of the axis, at its bad end


def round_off(value: float | None, digits: int = 6) -> float | None:
    """The value with few digits; None for NaN, infinity and None."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def thin_out(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items, evenly spaced, the first and the last included."""
    if len(items) <= most:
        return list(items)
    if most < 2:
        return list(items[:most])
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]


class AxisFrame(Struct, frozen=True):
    """The ends of an axis."""

    low: float
    high: float
    log: bool = False
    beyond: int = 0  # values that lie outside


def frame_values(values: Iterable[float], direction: str) -> AxisFrame | None:
    """The axis on which values of a goal can be told apart; None without values.

    The best values are never outside. A few of the worst are, if they would leave too little room
    for the others.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return None
    cut = int(len(finite) * _OUTSIDE)
    low, high = finite[0], finite[-1]
    if cut and direction == "max" and high - finite[cut] < 0.5 * (high - low):
        low = finite[cut]
    if cut and direction == "min" and finite[-1 - cut] - low < 0.5 * (high - low):
        high = finite[-1 - cut]
    beyond = sum(not low <= value <= high for value in finite)
    if low > 0 and high / low > _LOG:
        return AxisFrame(low, high, True, beyond)
    pad = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return AxisFrame(low - pad, high + pad, False, beyond)


# --- The timeline ---------------------------------------------------------------------------------


_LANES = 64  # with more lanes, bars would be too thin
_BARS = 11_000
_UNITS = 6_000  # into which the whole time is divided for the times of bars
_BUCKETS = 160  # into which it is divided for averages


class TimelineBar(NamedTuple):
    """A period in which a trial's container ran, in seconds since the epoch."""

    start: float
    trains: float  # the end of the start-up
    end: float
    number: int  # of the trial


def make_bars(trials: Iterable[Trial], now: float) -> list[TimelineBar]:
    """A bar for each period in which a trial ran, sorted by start."""
    bars: list[TimelineBar] = []
    for trial in trials:
        if trial.started_at is not None:
            bars += _periods(trial, trial.started_at, now)
    return sorted(bars)


def _periods(trial: Trial, start: float, now: float) -> list[TimelineBar]:
    """The periods in which one trial ran, by its reports.

    The trial's total running time is known. So the longest gaps between reports count as pauses,
    until the rest is no longer than the running time.
    """
    end = max(start, trial.stopped_at if trial.stopped_at is not None else now)
    times = sorted(report.at for report in trial.reports if start <= report.at <= end)
    points = [start, *times, end]
    gaps = sorted(range(len(points) - 1), key=lambda index: points[index] - points[index + 1])
    excess = end - start - trial.ran(now) * 1.05 - 1.0
    pauses = set()
    for index in gaps:
        if excess <= 0 or not trial.seconds:
            break
        pauses.add(index)
        excess -= points[index + 1] - points[index]
    step = median(b - a for a, b in pairwise(times)) if len(times) > 1 else None
    bars, first = [], 0
    for index in range(len(points) - 1):
        if index in pauses or index == len(points) - 2:
            last = index if index in pauses else index + 1
            if points[last] > points[first]:
                bars.append(_bar(points[first : last + 1], step, trial.number))
            first = index + 1
    return bars


def _bar(points: Sequence[float], step: float | None, number: int) -> TimelineBar:
    """The bar of one period. Its start-up ends one step before the first report."""
    start, end = points[0], points[-1]
    trains = start
    if step is not None and len(points) > 2:
        trains = min(max(start, points[1] - step), end)
    return TimelineBar(start, trains, end, number)


def make_timeline(trials: Sequence[Trial], began: float, now: float, width: int) -> dict[str, Any]:
    """The timeline of a report's page. `width`: the number of trials that may run at once.

    `busy`: `[seconds, training, starting, idle]` over time, in trials. `bars`: six numbers for each
    bar: lane, start, start of training, end, trial, state; the times in `unit` seconds since
    `from`. There are no bars if they would be too thin. `shares`: the shares of training, starting
    and idle in the whole time.
    """
    bars = make_bars(trials, now)
    if not bars:
        return {}
    first, last = bars[0].start, max(bar.end for bar in bars)
    span = max(last - first, 1e-6)
    lanes, count = _assign_lanes(bars)
    unit = span / _UNITS
    flat: list[int] = []
    order = list(TrialState)
    states = {trial.number: order.index(trial.state) for trial in trials}
    if count <= _LANES and len(bars) <= _BARS:
        for bar, lane in zip(bars, lanes, strict=True):
            moments = (round((at - first) / unit) for at in (bar.start, bar.trains, bar.end))
            flat += (lane, *moments, bar.number, states[bar.number])
    busy = _busy(bars, first, span, max(1, min(width, len(trials))))
    return {
        "from": round_off(first - began, 5),
        "span": round_off(span, 5),
        "unit": round_off(unit),
        "lanes": count,
        "bars": flat,
        "busy": busy,
        "shares": _shares(busy),
    }


def _assign_lanes(bars: Sequence[TimelineBar]) -> tuple[list[int], int]:
    """The lane of each bar, which is the lowest free lane, and the number of lanes."""
    free: list[int] = []
    ends: list[tuple[float, int]] = []
    lanes: list[int] = []
    count = 0
    for bar in bars:
        while ends and ends[0][0] <= bar.start:
            heapq.heappush(free, heapq.heappop(ends)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, count = count, count + 1
        heapq.heappush(ends, (bar.end, lane))
        lanes.append(lane)
    return lanes, count


def _busy(bars: Sequence[TimelineBar], first: float, span: float, width: int) -> list[list[Any]]:
    """`[seconds, training, starting, idle]` for each bucket: average numbers of trials."""
    size = span / _BUCKETS
    starting = _means([(bar.start, bar.trains) for bar in bars], first, size)
    training = _means([(bar.trains, bar.end) for bar in bars], first, size)
    return [
        [
            round_off(index * size, 5),
            round_off(training[index], 4),
            round_off(starting[index], 4),
            round_off(max(0.0, width - training[index] - starting[index]), 4),
        ]
        for index in range(_BUCKETS)
    ]


def _means(spans: Iterable[tuple[float, float]], first: float, size: float) -> list[float]:
    """The average number of spans over each bucket."""
    # Spans that cover a bucket completely are counted by differences: +1 at the first such bucket.
    steps = [0.0] * (_BUCKETS + 1)
    parts = [0.0] * _BUCKETS  # what spans cover of the buckets in which they begin and end
    for start, end in spans:
        a, b = (start - first) / size, (end - first) / size
        i, j = min(_BUCKETS - 1, int(a)), min(_BUCKETS - 1, int(b))
        if i == j:
            parts[i] += b - a
            continue
        parts[i] += i + 1 - a
        parts[j] += b - j
        steps[i + 1] += 1
        steps[j] -= 1
    return [covering + part for covering, part in zip(accumulate(steps), parts, strict=False)]


def _shares(busy: Sequence[Sequence[float]]) -> dict[str, float | None]:
    sums = [math.fsum(row[index] for row in busy) for index in (1, 2, 3)]
    total = math.fsum(sums) or 1.0
    names = ("training", "starting", "idle")
    return {name: round_off(part / total, 4) for name, part in zip(names, sums, strict=True)}
