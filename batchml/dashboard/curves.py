"""Curves of metrics of one run or several: their values for the script, and their place."""

import math
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from msgspec import Struct

from batchml.dashboard.html import Html, tag, visible
from batchml.errors import UsageError
from batchml.runs.metrics.conditions import child_of
from batchml.runs.metrics.plot import thin_points
from batchml.runs.metrics.series import SampleWindow, Series

MOST_POINTS = 20_000  # in one chart; more are thinned out
MOST_LINES = 64  # in one chart: of children of an array, or of runs
COLOURS = 8  # of page.css: --c1 to --c8
AXES = ("step", "time", "clock")  # of curves.js: time is since the start of a run
STYLES = ("page.css", "uPlot.min.css")
SCRIPTS = ("uPlot.iife.min.js", "curves.js")


class RunSeries(Struct, frozen=True):
    """The metrics of a run, its label in the charts, and when it began: ms since the epoch.

    `colour` is one of `colours_of`; None for a grey line among many.
    """

    job_id: str
    label: str
    series: Mapping[str, Series]
    started: int | None = None
    colour: int | None = 0
    directions: Mapping[str, str] = {}  # metric -> "max" or "min"


class ChartWindow(Struct, frozen=True):
    """A part of all charts: from `low` to `high` on one of AXES, in steps or seconds."""

    axis: str
    low: float
    high: float

    def samples_of(self, started: int | None) -> SampleWindow | None:
        """The part of a run that began at `started` ms; None for all of it."""
        if self.axis == "step":
            return SampleWindow("step", self.low, self.high)
        if self.axis == "time" and started is None:
            return None
        shift = (started or 0) / 1000 if self.axis == "time" else 0.0
        return SampleWindow("time", self.low + shift, self.high + shift)


def read_window(params: Mapping[str, str]) -> ChartWindow | None:
    """The window of `?x=step&from=1&to=2`; None without one. Raises UsageError."""
    if "from" not in params and "to" not in params:
        return None
    axis = params.get("x", "step")
    try:
        low, high = float(params.get("from", "")), float(params.get("to", ""))
    except ValueError as error:
        raise UsageError("from, to: write numbers.") from error
    if axis not in AXES or not (math.isfinite(low) and math.isfinite(high)):
        raise UsageError(f"x={axis}: choose one of {', '.join(AXES)}, and finite numbers.")
    return ChartWindow(axis, low, high)


def colours_of(job_ids: Sequence[str]) -> dict[str, int | None]:
    """A colour, 0 to 7, for each of at most 8 runs; None for each of more.

    It is made of the run's id: it stays the same in another order, and mostly beside other runs.
    """
    if len(job_ids) > COLOURS:
        return dict.fromkeys(job_ids)
    found: dict[str, int | None] = {}
    for job_id in job_ids:
        place = crc32(job_id.encode()) % COLOURS
        while place in found.values():
            place = (place + 1) % COLOURS
        found[job_id] = place
    return found


def curves_section(source: str, *, is_over: bool = False) -> Html:
    """The place of the curves; `source` is the path of their document, final if `is_over`."""
    return tag(
        "div",
        tag("p", "The curves need scripts. The last values are below.", class_="dim"),
        class_="curves", data_series=source, data_over=is_over,
    )  # fmt: skip


def curves_document(runs: Sequence[RunSeries], most: int = MOST_POINTS) -> dict[str, Any]:
    """Every chart with its lines: steps, seconds since the start, values; null is not finite.

    A line is a run, or a child of an array. A chart has about `most` points at most: in each
    interval the extremes are kept. `total` is the number of values that the run had.
    """
    charts: dict[str, list[tuple[RunSeries, int | None, Series]]] = {}
    for each in runs:
        for whole, series in each.series.items():
            if series.samples:
                name, child = child_of(whole)
                charts.setdefault(name, []).append((each, child, series))
    return {
        "runs": [
            {"id": each.job_id, "label": visible(each.label), "colour": each.colour}
            for each in runs
        ],
        "charts": [_chart(name, lines, most) for name, lines in charts.items()],
    }


def _chart(
    name: str, lines: Sequence[tuple[RunSeries, int | None, Series]], points: int
) -> dict[str, Any]:
    shown = lines[:MOST_LINES]
    most = max(2, points // len(shown))
    direction = next(filter(None, (run.directions.get(name) for run, _, _ in shown)), "")
    return {
        "name": visible(name),
        "direction": direction,
        "hasSteps": all(series.has_steps for _, _, series in shown),
        "leftOut": len(lines) - len(shown),
        "lines": [_line(run, child, series, most) for run, child, series in shown],
    }


def _line(run: RunSeries, child: int | None, series: Series, most: int) -> dict[str, Any]:
    samples, steps = series.samples, series.steps
    start = (run.started or 0) / 1000 or samples[0].time
    kept = thin_points(list(enumerate(series.values)), most)
    places = [int(place) for place, _ in kept]
    last = samples[-1].value
    return {
        "run": run.job_id,
        "child": child,
        "start": start,
        "steps": [_short(steps[place]) for place in places],
        "times": [_short(round(samples[place].time - start, 3)) for place in places],
        "values": [_finite(value) for _, value in kept],
        "breaks": [_short(steps[place]) for place in series.breaks],
        "total": max(series.total, len(samples)),
        "last": _finite(last),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _short(value: float) -> float | int:
    """The number without `.0`, which half of a document would consist of."""
    return int(value) if value == int(value) else value
