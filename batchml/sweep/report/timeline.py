"""When each trial ran: start-up, training, and the width that was left idle."""

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from batchml.model.sweep import Trial, TrialState
from batchml.sweep.report.numbers import short

_LANES = 64  # more have no height that can be seen
_BARS = 11_000
_UNITS = 6_000  # of which the whole time has so many
_BUCKETS = 160


class Bar(NamedTuple):
    """A trial's container. From `trains` on it trained: before lies its start-up."""

    start: float
    trains: float
    end: float
    number: int


def bars(trials: Iterable[Trial], now: float) -> list[Bar]:
    """By their start. One for each stretch that a trial ran."""
    found: list[Bar] = []
    for trial in trials:
        if trial.started_at is not None:
            found += _stretches(trial, trial.started_at, now)
    return sorted(found)


def _stretches(trial: Trial, start: float, now: float) -> list[Bar]:
    """The stretches of one trial, as its reports tell them.

    A trial that went on after a pause has gaps between its signs of life. How long its containers
    ran is known, so the longest gaps are pauses, until the rest is no longer than that.
    """
    end = max(start, trial.stopped_at if trial.stopped_at is not None else now)
    signs = sorted(report.at for report in trial.reports if start <= report.at <= end)
    points = [start, *signs, end]
    gaps = sorted(range(len(points) - 1), key=lambda place: points[place] - points[place + 1])
    over = end - start - trial.ran(now) * 1.05 - 1.0
    pauses = set()
    for place in gaps:
        if over <= 0 or not trial.seconds:
            break
        pauses.add(place)
        over -= points[place + 1] - points[place]
    step = median(b - a for a, b in pairwise(signs)) if len(signs) > 1 else None
    found, first = [], 0
    for place in range(len(points) - 1):
        if place in pauses or place == len(points) - 2:
            last = place if place in pauses else place + 1
            if points[last] > points[first]:
                found.append(_bar(points[first : last + 1], step, trial.number))
            first = place + 1
    return found


def _bar(points: Sequence[float], step: float | None, number: int) -> Bar:
    """Its start-up ends one step before its first report; unknown without two reports."""
    start, end = points[0], points[-1]
    trains = start
    if step is not None and len(points) > 2:
        trains = min(max(start, points[1] - step), end)
    return Bar(start, trains, end, number)


def timeline(trials: Sequence[Trial], began: float, now: float, width: int) -> dict[str, Any]:
    """`busy`: `[seconds, training, starting, idle]` by time; `bars`: six numbers for each.

    They are lane, start, training since, end, trial, state; three of them in `unit` seconds since
    `from`. No bars where they could not be told apart. `shares` are those of the whole time.
    """
    found = bars(trials, now)
    if not found:
        return {}
    first, last = found[0].start, max(bar.end for bar in found)
    span = max(last - first, 1e-6)
    lanes, count = _in_lanes(found)
    unit = span / _UNITS
    flat: list[int] = []
    order = list(TrialState)
    states = {trial.number: order.index(trial.state) for trial in trials}
    if count <= _LANES and len(found) <= _BARS:
        for bar, lane in zip(found, lanes, strict=True):
            times = (round((at - first) / unit) for at in (bar.start, bar.trains, bar.end))
            flat += (lane, *times, bar.number, states[bar.number])
    busy = _busy(found, first, span, max(1, min(width, len(trials))))
    return {
        "from": short(first - began, 5),
        "span": short(span, 5),
        "unit": short(unit),
        "lanes": count,
        "bars": flat,
        "busy": busy,
        "shares": _shares(busy),
    }


def _in_lanes(found: Sequence[Bar]) -> tuple[list[int], int]:
    """A lane for each bar, the lowest that is free, and how many lanes that takes."""
    free: list[int] = []
    ends: list[tuple[float, int]] = []
    lanes: list[int] = []
    count = 0
    for bar in found:
        while ends and ends[0][0] <= bar.start:
            heapq.heappush(free, heapq.heappop(ends)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, count = count, count + 1
        heapq.heappush(ends, (bar.end, lane))
        lanes.append(lane)
    return lanes, count


def _busy(found: Sequence[Bar], first: float, span: float, width: int) -> list[list[Any]]:
    size = span / _BUCKETS
    starting = _means([(bar.start, bar.trains) for bar in found], first, size)
    training = _means([(bar.trains, bar.end) for bar in found], first, size)
    return [
        [
            short(place * size, 5),
            short(training[place], 4),
            short(starting[place], 4),
            short(max(0.0, width - training[place] - starting[place]), 4),
        ]
        for place in range(_BUCKETS)
    ]


def _means(spans: Iterable[tuple[float, float]], first: float, size: float) -> list[float]:
    """How many of the spans lie over each bucket, on average."""
    whole = [0.0] * (_BUCKETS + 1)  # differences: +1 where buckets begin to be covered
    parts = [0.0] * _BUCKETS
    for start, end in spans:
        a, b = (start - first) / size, (end - first) / size
        i, j = min(_BUCKETS - 1, int(a)), min(_BUCKETS - 1, int(b))
        if i == j:
            parts[i] += b - a
            continue
        parts[i] += i + 1 - a
        parts[j] += b - j
        whole[i + 1] += 1
        whole[j] -= 1
    level, found = 0.0, []
    for place in range(_BUCKETS):
        level += whole[place]
        found.append(level + parts[place])
    return found


def _shares(busy: Sequence[Sequence[float]]) -> dict[str, float | None]:
    sums = [math.fsum(row[place] for row in busy) for place in (1, 2, 3)]
    total = math.fsum(sums) or 1.0
    names = ("training", "starting", "idle")
    return {name: short(part / total, 4) for name, part in zip(names, sums, strict=True)}
