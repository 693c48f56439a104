"""Draw curves of metrics and resource usage into a self-contained HTML file, or a PNG."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from batchml.errors import UsageError
from batchml.runs.metrics.conditions import NO_METRICS, child_of
from batchml.runs.metrics.series import Series
from batchml.runtime.storage.files import write_atomically

WIDTH, HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 34
MAX_DRAWN = 600  # points of one curve; the width has fewer pixels

MAX_CURVES = 64  # in one chart
MAX_NODES = 16  # nodes in one chart, and colours

Point = tuple[float, float]


class ChartCurve(NamedTuple):
    """A curve of a chart with several. Curves of one colour belong together."""

    name: str
    colour: int
    points: Sequence[Point]


class Chart(NamedTuple):
    """Curves with common axes. `legend` has a name for each colour."""

    title: str
    label: str  # of the horizontal axis
    curves: Sequence[ChartCurve]
    legend: Sequence[str]
    from_zero: bool = True  # whether the vertical axis begins at 0
    left_out: int = 0  # curves that are not drawn


# Colours for light and dark pages.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --back: #fff; --fore: #1b1f24; --dim: #59636e; --grid: #d8dee4;
  --line: #0b62c4 }}
@media (prefers-color-scheme: dark) {{
  :root {{ --back: #0d1117; --fore: #e6edf3; --dim: #9198a1; --grid: #2a313c; --line: #58a6ff }} }}
body {{ background: var(--back); color: var(--fore); font: 15px/1.4 system-ui, sans-serif;
  margin: 2rem auto; max-width: 1180px; padding: 0 1rem }}
h1 {{ font-size: 1.3rem; overflow-wrap: anywhere }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr));
  gap: 1.5rem }}
figure {{ margin: 0; min-width: 0 }}
figcaption {{ font-weight: 600; overflow-wrap: anywhere }}
figcaption span {{ color: var(--dim); font-weight: 400 }}
svg {{ display: block; width: 100%; height: auto }}
.grid {{ stroke: var(--grid) }}
text {{ fill: var(--dim); font: 12px system-ui, sans-serif }}
.curve {{ fill: none; stroke: var(--line); stroke-width: 1.8; stroke-linejoin: round }}
.dot {{ fill: var(--line) }}
table {{ border-collapse: collapse; margin: 0 0 1.5rem; display: block; overflow-x: auto }}
th, td {{ text-align: left; padding: .15rem .9rem .15rem 0; border-bottom: 1px solid var(--grid) }}
tbody th {{ font-weight: 400; color: var(--dim) }}
{colours}
</style>
<h1>{title}</h1>
{body}
<main>
{figures}
</main>
</html>
"""


def check_plot_path(path: Path) -> None:
    """Raise UsageError for a suffix that is not drawn, and for a folder that does not exist."""
    if path.suffix.lower() not in (".html", ".htm", ".png"):
        raise UsageError(f"--plot {path}: the name must end in .html or .png.")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: the folder {path.parent} does not exist.")


def write_plot(
    path: Path,
    series: "Mapping[str, Series]",
    title: str,
    charts: Sequence[Chart] = (),
    body: str = "",
) -> None:
    """Draw all metrics, and charts with several curves, into a `.html` or `.png` file.

    `body` is HTML before the figures of a page.

    Raises UsageError for another suffix, for PNG without matplotlib, and if there is nothing to
    draw; OSError if the file cannot be written.
    """
    check_plot_path(path)
    if not series and not charts:
        raise UsageError(f"--plot {path}: there is nothing to draw. {NO_METRICS}")
    if path.suffix.lower() == ".png":
        content = png(series, title, charts)
    else:
        content = html(series, title, charts, body).encode()
    write_atomically(str(path), content, 0o644)


def html(
    series: "Mapping[str, Series]", title: str, charts: Sequence[Chart] = (), body: str = ""
) -> str:
    figures = [_figure(each) for each in series.values()]
    figures += map(_chart, charts)
    return _PAGE.format(
        title=escape_text(title), body=body, figures="\n".join(figures), colours=_colours()
    )


def escape_text(words: str) -> str:
    """Escape text for HTML."""
    return escape(_printable(words))


def _printable(words: str) -> str:
    """Replace control characters and lone surrogates: a program chooses names of metrics."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in words)


def _colours() -> str:
    """A colour for each node that is readable on light and dark backgrounds."""
    return "\n".join(
        f".n{i} {{ stroke: hsl({(210 + i * 137) % 360} 65% 50%) }} "
        f"text.n{i} {{ stroke: none; fill: hsl({(210 + i * 137) % 360} 65% 50%) }}"
        for i in range(MAX_NODES)
    )


class PlotAxis(NamedTuple):
    """The horizontal axis: a label, and a position for each sample."""

    label: str
    positions: list[float]


def make_axis(series: "Series") -> PlotAxis:
    """The axis of a metric: steps, or time for a metric without steps."""
    times = [sample.time for sample in series.samples]
    if series.has_steps or times[0] == times[-1]:
        return PlotAxis("step" if series.has_steps else "value", series.steps)
    seconds = [time - times[0] for time in times]
    for label, size in (("hours", 3600), ("minutes", 60)):
        if seconds[-1] >= 3 * size:
            return PlotAxis(label, [second / size for second in seconds])
    return PlotAxis("seconds", seconds)


def _figure(series: "Series") -> str:
    label, positions = make_axis(series)
    points = list(zip(positions, series.values, strict=True))
    known = [y for _, y in points if _is_drawable(y)]
    name = escape_text(series.name)
    words = f"last {_number(series.last)}"
    if known:
        words += f", least {_number(min(known))}, greatest {_number(max(known))}"
    caption = f"<figcaption>{name} <span>{words}</span></figcaption>"
    svg = _svg(points, label) if known else ""
    return f"<figure>{caption}\n{svg}</figure>"


def time_charts(charts: "Mapping[str, Mapping[str, Series]]") -> list[Chart]:
    """Charts of the usage of nodes: title -> node -> curve, on a common time axis, from 0."""
    return [_time_chart(title, curves) for title, curves in charts.items()]


def _time_chart(title: str, curves: "Mapping[str, Series]") -> Chart:
    kept = dict(list(curves.items())[:MAX_NODES])
    label, times = scale_times(kept)
    drawn = [
        ChartCurve(name, colour, list(zip(times[name], each.values, strict=True)))
        for colour, (name, each) in enumerate(kept.items())
    ]
    return Chart(title, label, drawn, list(kept), left_out=len(curves) - len(kept))


def metric_chart(
    title: str,
    legend: Sequence[str],
    curves: "Sequence[tuple[str, int, Series]]",
    *,
    from_zero: bool = True,
) -> Chart:
    """A chart of curves of several runs: (name, colour, series).

    They are drawn by step, if all have steps and need not begin at 0, otherwise by the time since
    the first value.
    """
    kept = curves[:MAX_CURVES]
    if not from_zero and all(series.has_steps for _, _, series in kept):
        label, places = "step", [make_axis(series).positions for _, _, series in kept]
    else:
        label, times = scale_times({str(i): _from_start(s) for i, (_, _, s) in enumerate(kept)})
        places = list(times.values())
    drawn = [
        ChartCurve(name, colour, list(zip(xs, series.values, strict=True)))
        for (name, colour, series), xs in zip(kept, places, strict=True)
    ]
    return Chart(title, label, drawn, legend, from_zero, len(curves) - len(kept))


def _from_start(series: "Series") -> "Series":
    """The series with times since its first value."""
    start = series.samples[0].time
    moved = tuple(each._replace(time=each.time - start) for each in series.samples)
    return replace(series, samples=moved)


def children_charts(series: "Mapping[str, Series]") -> list[Chart]:
    """A chart for each metric of an array's children, with a curve for each child: `loss:3`."""
    by_name: dict[str, list[tuple[str, Series]]] = {}
    for each in series.values():
        name, child = child_of(each.name)
        if child is not None:
            by_name.setdefault(name, []).append((f"child {child}", each))
    return [
        metric_chart(
            name,
            [label for label, _ in curves],
            [(label, colour, each) for colour, (label, each) in enumerate(curves)],
            from_zero=False,
        )
        for name, curves in by_name.items()
    ]


def _chart(chart: Chart) -> str:
    left = f", and {chart.left_out} more" if chart.left_out else ""
    words = f"{escape_text(', '.join(chart.legend))}{left}"
    caption = f"<figcaption>{escape_text(chart.title)} <span>{words}</span></figcaption>"
    return f"<figure>{caption}\n{_svg_of_curves(chart)}</figure>"


def scale_times(curves: "Mapping[str, Series]") -> tuple[str, dict[str, list[float]]]:
    """A unit of time for all curves, and the times of their samples in it, from the first one."""
    times = {name: [sample.time for sample in each.samples] for name, each in curves.items()}
    first = min(map(min, times.values()))
    long = max(map(max, times.values())) - first
    label, size = next(
        (each for each in (("hours", 3600), ("minutes", 60)) if long >= 3 * each[1]), ("seconds", 1)
    )
    return label, {name: [(at - first) / size for at in each] for name, each in times.items()}


def _svg(points: Sequence[Point], label: str) -> str:
    ys = [y for _, y in points if _is_drawable(y)]
    frame = _Frame(points, min(ys), max(ys))
    place = frame.place
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">', *frame.grid(label)]
    for piece in _split_at_gaps(thin_points(points, MAX_DRAWN)):
        if len(piece) > 1:
            line = " ".join(",".join(place(*point)) for point in piece)
            parts.append(f'<polyline class="curve" points="{line}"/>')
        if len(piece) == 1 or len(points) <= 40:
            for x, y in piece:
                right, down = place(x, y)
                words = f"{label} {_number(x)}: {_number(y)}"
                parts.append(
                    f'<circle class="dot" cx="{right}" cy="{down}" r="2.6">'
                    f"<title>{words}</title></circle>"
                )
    return "\n".join([*parts, "</svg>"])


def _svg_of_curves(chart: Chart) -> str:
    """Several curves, each in its colour; a tooltip has the curve's name."""
    points = [point for curve in chart.curves for point in curve.points if _is_drawable(point[1])]
    if not points:
        return ""
    ys = [y for _, y in points]
    frame = _Frame(points, 0.0 if chart.from_zero else min(ys), max(ys))
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">', *frame.grid(chart.label)]
    for curve in chart.curves:
        for piece in _split_at_gaps(thin_points(curve.points, MAX_DRAWN)):
            line = " ".join(",".join(frame.place(*point)) for point in piece)
            if len(piece) == 1:  # a curve of one point would be invisible
                line = f"{line} {line}"
            parts.append(
                f'<polyline class="curve n{curve.colour % MAX_NODES}" stroke-linecap="round" '
                f'points="{line}"><title>{escape_text(curve.name)}</title></polyline>'
            )
    return "\n".join([*parts, _legend(chart.legend), "</svg>"])


def _legend(names: Sequence[str]) -> str:
    """The first few names in their colours, as many as fit."""
    shown = [
        f'<text class="n{i}" x="{_LEFT + 6 + 120 * (i % 4)}" y="{_TOP + 10 + 14 * (i // 4)}">'
        f"{escape_text(name[:18])}</text>"
        for i, name in enumerate(names[:8])
    ]
    return "\n".join(shown)


class _Frame:
    """The axes of a chart: the positions of points, and the grid."""

    def __init__(self, points: Sequence[Point], low: float, high: float) -> None:
        self.across = ticks(min(x for x, _ in points), max(x for x, _ in points))
        self.upwards = ticks(low, high)
        self._x0 = min(self.across[0], points[0][0])
        self._x1 = max(self.across[-1], max(x for x, _ in points))
        self._y0, self._y1 = self.upwards[0], self.upwards[-1]

    def place(self, x: float, y: float) -> tuple[str, str]:
        x0, x1, y0, y1 = self._x0, self._x1, self._y0, self._y1
        right = _LEFT + (x - x0) / (x1 - x0) * (WIDTH - _LEFT - _RIGHT)
        down = HEIGHT - _BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - _TOP - _BOTTOM)
        return f"{right:.1f}", f"{down:.1f}"

    def grid(self, label: str) -> list[str]:
        parts = []
        for y in self.upwards:
            _, down = self.place(self._x0, y)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{down}" y2="{down}"/>'
            )
            parts.append(
                f'<text x="{_LEFT - 6}" y="{down}" dy="4" text-anchor="end">{_number(y)}</text>'
            )
        for x in self.across:
            right, _ = self.place(x, self._y0)
            parts.append(
                f'<text x="{right}" y="{HEIGHT - 16}" text-anchor="middle">{_number(x)}</text>'
            )
        end = WIDTH - _RIGHT
        parts.append(f'<text x="{end}" y="{HEIGHT - 2}" text-anchor="end">{label}</text>')
        return parts


def _split_at_gaps(points: Sequence[Point]) -> list[list[Point]]:
    """The parts of a curve between values that cannot be drawn."""
    pieces: list[list[Point]] = [[]]
    for point in points:
        if _is_drawable(point[1]):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def thin_points(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points that look like all of them: the extremes of each interval are kept."""
    if len(points) <= most:
        return list(points)
    found = []
    stretches = most // 2
    for number in range(stretches):
        stretch = points[
            number * len(points) // stretches : (number + 1) * len(points) // stretches
        ]
        known = [point for point in stretch if _is_drawable(point[1])]
        if len(known) < len(stretch):
            found.append((stretch[0][0], math.nan))
        extremes = {min(known, key=_height), max(known, key=_height)} if known else set()
        found += sorted(extremes)
    return found


def _is_drawable(value: float) -> bool:
    """False for NaN, infinity, and values that are too large for a scale."""
    return abs(value) < 1e300


def _height(point: Point) -> float:
    return point[1]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers, evenly spaced, from at or below `low` to at or above `high`."""
    size = max(abs(low), abs(high))
    if high / about - low / about <= size * 1e-12:  # high - low may be infinite
        pad = size / 10 or 1.0
        low, high = low - pad, high + pad
    rough = high / about - low / about
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * nice for nice in (1, 2, 2.5, 5, 10) if size * nice >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _number(value: float) -> str:
    return f"{value:.4g}"


def png(series: "Mapping[str, Series]", title: str, charts: Sequence[Chart] = ()) -> bytes:
    """Draw with matplotlib. Raises UsageError if it is not installed."""
    from importlib import import_module
    from io import BytesIO

    try:
        figure_of = import_module("matplotlib.figure").Figure  # without a screen or global state
    except ImportError:
        raise UsageError(
            "PNG needs matplotlib, which is not installed beside batchml: pip install matplotlib. "
            "Or name a file that ends in .html, which needs nothing."
        ) from None
    count = len(series) + len(charts)
    rows, columns = -(-count // 2), min(2, count)
    figure = figure_of(figsize=(6.5 * columns, 3.2 * rows + 0.4), layout="constrained")
    figure.suptitle(_printable(title), parse_math=False)
    plots = list(figure.subplots(rows, columns, squeeze=False).flat)
    for plot, each in zip(plots, series.values(), strict=False):
        label, positions = make_axis(each)
        plot.plot(positions, each.values, marker="." if len(positions) <= 40 else "")
        plot.set_title(_printable(each.name), fontsize=10, parse_math=False)
        plot.set_xlabel(label)
        plot.grid(alpha=0.3)
    for plot, chart in zip(plots[len(series) :], charts, strict=False):
        for place, curve in enumerate(chart.curves):
            is_named = any(each.colour == curve.colour for each in chart.curves[:place])
            name = None if is_named else _printable(chart.legend[curve.colour])
            xs, ys = [x for x, _ in curve.points], [y for _, y in curve.points]
            plot.plot(xs, ys, label=name, color=f"C{curve.colour}")
        plot.set_title(_printable(chart.title), fontsize=10, parse_math=False)
        plot.set_xlabel(chart.label)
        if chart.from_zero:
            plot.set_ylim(bottom=0)
        plot.legend(fontsize=7)
        plot.grid(alpha=0.3)
    for empty in plots[count:]:
        empty.set_visible(False)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
