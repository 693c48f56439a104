"""Render compared runs: a table for the terminal, JSON, and a page with curves."""

import math
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from batchml.cli.render import cells, cut, duration, printable, table
from batchml.cli.terminal import Screen
from batchml.model.names import dollars, short_id
from batchml.model.params import is_seed
from batchml.model.run import classify, describe_state
from batchml.runs.compare.conclusions import Conclusion
from batchml.runs.compare.facts import UNUSED, unused_params
from batchml.runs.compare.figures import Figure, MeanValue, RunGroup
from batchml.runs.metrics.plot import Chart, escape_text, metric_chart, write_plot
from batchml.runs.metrics.series import Series
from batchml.runs.metrics.usage import usage_charts

DIGITS, DEVIATION_DIGITS = 4, 2  # significant digits of a mean and of its standard deviation
STATUS = "status"
LONGEST = 40  # cells of a value in the table
STEPS = 1000  # for so many steps a cost is shown: one step costs too little to be read


class Row(NamedTuple):
    """A row of the table: a name, and a text for each group."""

    name: str
    cells: list[str]
    has_seeds: bool = False  # the seeds of the runs of a group

    @property
    def matters(self) -> bool:
        """Whether the groups differ, runs have several seeds, or not all runs have succeeded."""
        if self.has_seeds or len(set(self.cells)) > 1:
            return True
        return self.name == STATUS and self.cells[0] != "SUCCEEDED"


# --- The table ------------------------------------------------------------------------------------


Text = Callable[[float, int], str]  # the text of a value with so many significant digits


def _number(value: float, digits: int) -> str:
    """`0.1234`, `49,029`; only very large and very small numbers have an exponent."""
    if not 10**digits <= abs(value) < 1e15:
        return f"{value:.{digits}g}"
    return f"{value if digits == DIGITS else float(f'{value:.{digits}g}'):,.0f}"


def _duration(seconds: float, digits: int) -> str:
    """`12 ms`, `3.21 s`, `1:04:05`"""
    if seconds < 1:
        return f"{_number(seconds * 1000, digits)} ms"
    return f"{_number(seconds, digits)} s" if seconds < 60 else duration(seconds)


def _usd(value: float, digits: int) -> str:
    """`$1.25`, `$0.0123`; a small amount with significant digits."""
    if value >= 1 or not value:
        return dollars(Decimal(str(value)))
    return f"${value:.{digits - 1 - math.floor(math.log10(value))}f}"


def _usd_of_steps(value: float, digits: int) -> str:
    return _usd(STEPS * value, digits)


def _mebibytes(value: float, _: int) -> str:
    return f"{value:.0f}M"


def _percent(value: float, _: int) -> str:
    return f"{value:.0f} %"


# Figure -> its name and its text in the table. Figures that are not here are in the JSON.
_FIGURES: dict[Figure, tuple[str, Text]] = {
    ("speed", "secondsPerStep"): ("time of a step", _duration),
    ("speed", "epochsPerHour"): ("epochs an hour", _number),
    ("speed", "seconds"): ("ran", _duration),
    ("speed", "waited"): ("waited", _duration),
    ("use", "cpu"): ("CPU cores used", _number),
    ("use", "memory"): ("most memory", _mebibytes),
    ("use", "gpu"): ("GPU used", _percent),
    ("use", "gpuMemory"): ("most GPU memory", _mebibytes),
    ("cost", "usd"): ("cost", _usd),
    ("cost", "usdPerHour"): ("cost of an hour", _usd),
    ("cost", "usdPerStep"): (
        f"cost of {STEPS} steps",
        lambda usd, digits: _usd(STEPS * usd, digits),
    ),
    ("cost", "usdPerEpoch"): ("cost of an epoch", _usd),
}


def fact_rows(groups: Sequence[RunGroup]) -> list[Row]:
    """A row for each fact of the requests, and one for the states."""
    names = dict.fromkeys(name for group in groups for name in group.facts)
    are_several = any(len(group.runs) > 1 for group in groups)
    rows = [
        Row(
            name,
            [_fact(group, name) for group in groups],
            are_several and is_seed(name.removeprefix("params.")),
        )
        for name in names
    ]
    rows = [row for row in rows if any(row.cells)]
    return [*rows, Row(STATUS, [_states(group) for group in groups])]


def figure_rows(groups: Sequence[RunGroup], *, full: bool = False) -> list[Row]:
    """A row for each figure that a group has.

    Best values that are the last ones, and first values, only with `full`.
    """
    rows: list[Row] = []
    names = sorted({n for group in groups for kind, n, *_ in group.figures if kind == "metrics"})
    for name in names:
        first, best, last = (
            _figure_row(words, ("metrics", name, function), _number, groups)
            for function, words in (
                ("first", f"first({name})"), ("best", f"best({name})"), ("last", name),
            )
        )  # fmt: skip
        rows += [first] if full else []
        rows += [best] if full or best.cells != last.cells else []
        rows.append(last)
    rows += [_figure_row(words, key, text, groups) for key, (words, text) in _FIGURES.items()]
    return [row for row in rows if any(row.cells)]


def _figure_row(words: str, name: Figure, text: Text, groups: Sequence[RunGroup]) -> Row:
    return Row(words, [_mean(group.figures.get(name), text, len(group.runs)) for group in groups])


def _mean(value: MeanValue | None, text: Text, runs: int) -> str:
    """`0.98 \u00b1 0.01`; with the number of runs that have the value, if not all have it."""
    if value is None:
        return ""
    spread = "" if value.sd is None else f" \u00b1 {text(value.sd, DEVIATION_DIGITS)}"
    return f"{text(value.mean, DIGITS)}{spread}{f' (of {value.n})' if value.n < runs else ''}"


def _fact(group: RunGroup, name: str) -> str:
    value = group.facts.get(name)
    is_unused = name.removeprefix("params.") in unused_params(group.first) and "params." in name
    return "" if value is None else f"{value}{UNUSED if is_unused else ''}"


def _states(group: RunGroup) -> str:
    """The states of the runs, and the classes of those that failed; each once."""
    texts = []
    for each in group.runs:
        run = each.found.run
        failed = run is not None and run.status.value == "FAILED"
        state = describe_state(run) if run else "not known to the server"
        texts.append(f"{state}, {classify(run).outcome}" if run and failed else state)
    return ", ".join(dict.fromkeys(texts))


def title_of(group: RunGroup) -> str:
    """`lenet 6b0e2f6c:3`, `lenet 6b0e2f6c, 3 children`, or `lenet 6b0e2f6c, 3 runs`"""
    count, more = len(group.runs), ""
    if count > 1:
        more = f", {count} {'children' if group.is_array else 'runs'}"
    return f"{cut(group.first.name, 20)} {group.short_id}{more}"


def tables(groups: Sequence[RunGroup], rows: Sequence[Row], target: Screen) -> list[str]:
    """The table; in a window several, one below the other, each with the groups that fit."""
    lines = [["", *map(title_of, groups)], *([row.name, *row.cells] for row in rows)]
    lines = [[cut(printable(cell), LONGEST) for cell in line] for line in lines]
    widths = [max(map(cells, column)) + 2 for column in zip(*lines, strict=True)]
    found, start = [], 1
    while start < len(widths):
        end, used = start + 1, widths[0] + widths[start]
        while end < len(widths) and (not target.width or used + widths[end] - 2 <= target.width):
            used += widths[end]
            end += 1
        found.append(table([[line[0], *line[start:end]] for line in lines], target, keep=True))
        start = end
    return found


# --- JSON -----------------------------------------------------------------------------------------


def to_json(groups: Sequence[RunGroup], conclusions: Iterable[Conclusion]) -> dict[str, Any]:
    """The groups, each with its runs, facts and figures: `{"mean", "sd", "n"}`."""
    return {
        "groups": [_group_json(group) for group in groups],
        "conclusions": [{"text": each.text, **each.figures} for each in conclusions],
    }


def _group_json(group: RunGroup) -> dict[str, Any]:
    figures: dict[str, Any] = {kind: {} for kind in ("metrics", "speed", "use", "cost")}
    for (kind, *names), value in group.figures.items():
        inner = figures[kind]
        for name in names[:-1]:
            inner = inner.setdefault(name, {})
        inner[names[-1]] = {"mean": value.mean, "sd": value.sd, "n": value.n}
    runs = [
        {
            "jobId": each.found.job_id,
            "name": each.found.name,
            "status": each.found.run.status.value if each.found.run else None,
            "logComplete": each.is_whole,
        }
        for each in group.runs
    ]
    return {"label": group.label, "runs": runs, "facts": dict(group.facts), **figures}


# --- The page -------------------------------------------------------------------------------------


def write_page(
    path: Path, groups: Sequence[RunGroup], rows: Sequence[Row], conclusions: Sequence[Conclusion]
) -> None:
    """Write the table, the conclusions and the curves of all runs into a `.html` file, which loads
    nothing; into a `.png` file only the curves. Raises UsageError and OSError as `write_plot`.
    """
    title = f"{', '.join(dict.fromkeys(group.first.name for group in groups))}: compared"
    lines = "".join(f"<p>{escape_text(each.text)}</p>\n" for each in conclusions)
    write_plot(path, {}, title, make_charts(groups), _html_table(groups, rows) + lines)


def _html_table(groups: Sequence[RunGroup], rows: Sequence[Row]) -> str:
    heading = "".join(f"<th>{escape_text(title_of(group))}</th>" for group in groups)
    body = "\n".join(
        f"<tr><th>{escape_text(row.name)}</th>"
        + "".join(f"<td>{escape_text(cell)}</td>" for cell in row.cells)
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr><th></th>{heading}</tr></thead>\n<tbody>{body}</tbody></table>\n"


def make_charts(groups: Sequence[RunGroup]) -> list[Chart]:
    """A chart for each metric and each kind of resource use, with a curve for each run.

    The curves of a group have its colour. Metrics are drawn by step, where all runs have steps, and
    otherwise, as resource use, by the time since the first value.
    """
    legend = [group.label for group in groups]
    found = []
    names = dict.fromkeys(n for group in groups for each in group.runs for n in each.series)
    for name in names:
        curves = [
            (_curve_name(group, each.found.shown_id), colour, each.series[name])
            for colour, group in enumerate(groups)
            for each in group.runs
            if name in each.series
        ]
        found.append(metric_chart(name, legend, curves, from_zero=False))
    by_title: dict[str, list[tuple[str, int, Series]]] = {}
    for colour, group in enumerate(groups):
        for each in group.runs:
            for title, nodes in usage_charts(each.uses).items():
                for node, series in nodes.items():
                    run = _curve_name(group, each.found.shown_id)
                    label = f"{run}, {node}" if len(nodes) > 1 else run
                    by_title.setdefault(title, []).append((label, colour, series))
    return [*found, *(metric_chart(title, legend, curves) for title, curves in by_title.items())]


def _curve_name(group: RunGroup, job_id: str) -> str:
    return group.label if len(group.runs) == 1 else f"{group.label}, {short_id(job_id)}"
