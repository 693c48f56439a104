"""Curves as SVG without script and style sheet: for notebooks, and exports without scripts.

Lines have a colour and a dash of their own; text has the colour of the page around it.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct

from batchml.dashboard.curves import RunSeries, curves_document
from batchml.dashboard.html import Html, join, tag
from batchml.dashboard.notebook.inline import LINES

WIDTH, HEIGHT = 380, 190  # px
MOST_CHARTS = 12
MOST_POINTS = 1_000  # of one chart
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 24  # px around the lines
_DASHES = ("", "7 4", "", "2 3", "", "10 3 2 3", "", "5 2")
_GREY = "#7d838c"
_LABEL = "display:inline-block;margin-right:14px"
_CHART = "display:inline-block;margin:4px 12px 4px 0;max-width:100%;vertical-align:top"


class PlotLine(Struct, frozen=True):
    """A line: its points, None where the value is not finite, and the place of its colour."""

    label: str
    xs: tuple[float, ...]
    ys: tuple[float | None, ...]
    colour: int | None = 0
    is_points: bool = False  # dots without a line


def curves(runs: Sequence[RunSeries]) -> Html | None:
    """A chart for each metric; None if there is none. Long curves are thinned, extremes kept."""
    document = curves_document(runs, MOST_POINTS)
    charts = document["charts"]
    if not charts:
        return None
    labels = {each["id"]: each for each in document["runs"]}
    drawn = [_chart(each, labels) for each in charts[:MOST_CHARTS]]
    left = len(charts) - len(drawn)
    more = tag("p", f"And {left} metrics more.") if left > 0 else None
    return join((_legend(document["runs"]) if len(runs) > 1 else None,
                 tag("div", *drawn), more))  # fmt: skip


def _chart(chart: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> Html:
    lines = []
    many = len(chart["lines"])
    for place, each in enumerate(chart["lines"]):
        run = runs[each["run"]]
        child = "" if each["child"] is None else f"child {each['child']}"
        label = ", ".join(filter(None, (run["label"] if len(runs) > 1 else "", child)))
        colour = run["colour"] if len(runs) > 1 else place if many <= len(LINES) else None
        xs = each["steps"] if chart["hasSteps"] else range(1, len(each["values"]) + 1)
        lines.append(PlotLine(label or chart["name"], tuple(map(float, xs)),
                              tuple(each["values"]), colour))  # fmt: skip
    last = f" {number(chart['lines'][0]['last'])}" if many == 1 else ""
    return plot(f"{chart['name']}{last}", lines)


def _legend(runs: Sequence[Mapping[str, Any]]) -> Html:
    parts = (
        tag("span", tag("span", class_=f"swatch c{each['colour'] + 1}")
            if each["colour"] is not None else None, each["label"], style=_LABEL)
        for each in runs
    )  # fmt: skip
    return tag("p", *parts)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / count
    base = 10 ** math.floor(math.log10(raw))
    step = next(each * base for each in (1, 2, 5, 10) if each * base >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def plot(title: str, lines: Sequence[PlotLine]) -> Html:
    """A chart with its axes; the title has the name of the values."""
    ys = [y for line in lines for y in line.ys if y is not None]
    xs = [x for line in lines for x in line.xs]
    if not ys or not xs:
        return tag("p", f"{title}: no finite values.")
    x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)
    y_low, y_high = (y_low, y_high) if y_high > y_low else (y_low - 0.5, y_high + 0.5)
    x_low, x_high = (x_low, x_high) if x_high > x_low else (x_low - 0.5, x_high + 0.5)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)
        up = (y - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM)
        return round(_LEFT + across, 1), round(HEIGHT - _BOTTOM - up, 1)

    parts: list[Html] = []

    def text(words: str, x: float, y: float, anchor: str) -> Html:
        return tag("text", words, x=f"{x:g}", y=f"{y:g}", text_anchor=anchor, fill="currentColor",
                   font_size=11)  # fmt: skip

    for y in ticks(y_low, y_high):
        at = place(x_low, y)[1]
        parts.append(tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=str(at), y2=str(at),
                         stroke="currentColor", stroke_opacity="0.15"))  # fmt: skip
        parts.append(text(number(y), _LEFT - 6, at + 4, "end"))
    for x in ticks(x_low, x_high):
        at = place(x, y_low)[0]
        parts.append(text(number(x), at, HEIGHT - 6, "middle"))
    for line in lines:
        parts += _draw(line, place)
    said = f"{title}: from {number(min(ys))} to {number(max(ys))}"
    image = tag("svg", tag("title", said), *parts, width=WIDTH, height=HEIGHT,
                viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=said,
                style="max-width:100%")  # fmt: skip
    return tag("div", tag("div", tag("b", title)), image, class_="chart", style=_CHART)


def _draw(line: PlotLine, place: Any) -> list[Html]:
    stroke = _GREY if line.colour is None else LINES[line.colour]
    points = [(x, y) for x, y in zip(line.xs, line.ys, strict=True)]
    name = tag("title", line.label)
    if line.is_points:
        return [tag("circle", name, cx=str(x), cy=str(y), r=3, fill=stroke)
                for x, y in (place(a, b) for a, b in points if b is not None)]  # fmt: skip
    found = []
    for is_known, part in groupby(points, key=lambda point: point[1] is not None):
        if not is_known:
            continue
        spots = [place(x, y) for x, y in part]
        if len(spots) == 1:
            found.append(tag("circle", name, cx=str(spots[0][0]), cy=str(spots[0][1]), r=3,
                             fill=stroke))  # fmt: skip
            continue
        dash = "" if line.colour is None else _DASHES[line.colour]
        found.append(tag("polyline", name, points=" ".join(f"{x},{y}" for x, y in spots),
                         fill="none", stroke=stroke, stroke_dasharray=dash or None,
                         stroke_width="1" if line.colour is None else "1.75"))  # fmt: skip
    return found
