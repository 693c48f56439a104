"""The HTML of a value in a notebook, of the panels that the dashboard has."""

from collections.abc import Callable, Sequence
from functools import singledispatch
from itertools import accumulate
from typing import Any

from batchml.clock import SystemClock
from batchml.dashboard.app import PageQuery
from batchml.dashboard.compare import (
    FactRow,
    fact_rows,
    label_runs,
    results_panel,
    show_files,
)
from batchml.dashboard.curves import RunSeries, colours_of
from batchml.dashboard.html import Child, Html, join, tag
from batchml.dashboard.notebook.inline import inline
from batchml.dashboard.notebook.plots import PlotLine, curves, plot
from batchml.dashboard.run import metrics_panel, request_panel, state_panel
from batchml.dashboard.runs import choose_columns, count_of, heading_of, row, state_mark
from batchml.dashboard.sweeps.page import (
    importances_panel,
    standing_panel,
    summary_panel,
    trials_panel,
)
from batchml.dashboard.sweeps.reading import SweepReading, read_line, read_whole
from batchml.errors import BatchmlError
from batchml.handles import RunHandle, RunList
from batchml.model.names import short_id
from batchml.model.run import first_start
from batchml.runs.compare.columns import known_names
from batchml.runs.compare.service import ComparedRuns, RunComparison
from batchml.runs.search import FoundRun
from batchml.sweeps.handle import SweepHandle

MOST_ROWS = 100  # of a list of runs
MOST_TRIALS = "10"
MOST_COLUMNS = 12  # runs side by side
_MOST_TEXT = 32  # characters of a cell
_LINES = 10  # last lines of a run that failed


def to_html(value: object) -> str:
    """The value as HTML. An environment that does not answer is a sentence."""
    try:
        return inline(tag("div", show(value), style="overflow-x:auto"))
    except BatchmlError as error:
        return inline(tag("p", str(error), class_="failed"))


@singledispatch
def show(value: Any) -> Html:
    """The panels of a value. Raises TypeError for one that has none."""
    raise TypeError(f"{type(value).__name__} has no HTML")


def _now_ms() -> int:
    return int(SystemClock().now() * 1000)


def _head(*parts: Child) -> Html:
    return tag("p", *parts)


def _part(title: str, content: Html | None) -> Html | None:
    return None if content is None else join((tag("p", tag("b", title)), content))


@show.register
def _(handle: RunHandle) -> Html:
    run = handle.describe()
    found = handle.find()
    record = found.record
    parts: list[Child] = [
        _head(tag("b", run.name), " ", tag("span", short_id(found.shown_id), class_="dim")),
        state_panel(run, _now_ms()),
    ]
    if run.status.is_terminal and run.status.value != "SUCCEEDED":
        why = handle.explain()
        parts.append(tag("p", tag("b", why.verdict), " ", why.fix))
        last = [line.text for line in handle.logs()][-_LINES:]
        if last:
            parts.append(tag("pre", "\n".join(last)))
    started, directions = first_start(run), record.directions if record else {}
    drawn = curves([RunSeries(handle.job_id, "", handle.series(), started, 0, directions)])
    parts.append(metrics_panel(handle) if drawn else None)
    parts.append(drawn)
    details = tag("details", tag("summary", "Request"), request_panel(found))
    return join((*parts, details))


@show.register
def _(handles: RunList) -> Html:
    runs = [each.seen for each in handles if each.seen is not None]
    if not runs:
        return tag("p", "No runs.", class_="dim")
    metrics = sorted(name for name in known_names(runs).metrics if "," not in name)[:4]
    facts = ("name", "status", "submitted", "ran", "params", "cost", "id")
    columns = choose_columns(",".join((*facts, *metrics)), known_names(runs))
    heading = tag(
        "tr", *(tag("th", heading_of(name, column)[0], scope="col") for name, column in columns)
    )
    rows = (row(each, columns, _now_ms()) for each in runs[:MOST_ROWS])
    left = len(runs) - MOST_ROWS
    more = tag("p", f"And {count_of(left, left, 'more run')}.", class_="dim") if left > 0 else None
    return join((tag("table", tag("thead", heading), tag("tbody", *rows)), more))


@show.register
def _(compared: ComparedRuns) -> Html:
    singles = [group.runs[0] for group in compared.groups if len(group.runs) == 1]
    shown = [each.found for each in singles][:MOST_COLUMNS]
    labels, colours = label_runs(shown), colours_of([each.job_id for each in shown])
    series = [
        RunSeries(each.found.job_id, label, each.series,
                  first_start(each.found.run) if each.found.run else None,
                  colours[each.found.job_id],
                  each.found.record.directions if each.found.record else {})
        for each, label in zip(singles, labels, strict=False)
    ]  # fmt: skip
    return join((
        _part("Differences", _differences(shown, labels)) if len(shown) > 1 else None,
        _part("Results", results_panel(compared, [each.job_id for each in shown])),
        _part("Curves", curves(series)) if series else None,
    ))  # fmt: skip


def _differences(runs: Sequence[FoundRun], labels: Sequence[str]) -> Html:
    heads = (tag("th", each, scope="col") for each in labels)
    state = tag("tr", tag("th", "state", scope="row"),
                *(tag("td", state_mark(each)) for each in runs))  # fmt: skip
    rows = [_difference(each) for each in fact_rows(runs) if each.differs]
    return tag("table", tag("thead", tag("tr", tag("th", ""), *heads)),
               tag("tbody", state, *rows))  # fmt: skip


def _difference(fact: FactRow) -> Html:
    cells = (tag("td", shorten(each or "-"), title=each or None) for each in fact.cells)
    return tag("tr", tag("th", fact.name, scope="row"), *cells)


def shorten(words: str) -> str:
    """The text, in a table that has to be narrow."""
    return words if len(words) <= _MOST_TEXT else f"{words[: _MOST_TEXT - 3]}..."


@show.register
def _(compared: RunComparison) -> Html:
    runs = (compared.left, compared.right)
    parts: list[Child] = [_part("Differences", _differences(runs, label_runs(runs)))]
    if compared.files is None:
        parts.append(tag("p", f"The files cannot be compared. {compared.why}"))
    elif not compared.files:
        parts.append(tag("p", "The code is the same."))
    return join((*parts, *show_files(compared.files or ())))


@show.register
def _(handle: SweepHandle) -> Html:
    line = read_line(handle)
    reading = read_whole(handle, line, handle.controller())
    return join((
        _head(tag("b", line.name), " ", tag("span", line.key[:8], class_="dim")),
        summary_panel(reading), standing_panel(reading), _history(reading),
        _part("Importances", importances_panel(reading)),
        _part("Best trials",
              trials_panel(reading, PageQuery("", params={"rows": MOST_TRIALS}))),
    ))  # fmt: skip


def _history(reading: SweepReading) -> Html | None:
    """The result of each trial, and the best one so far."""
    spec = reading.line.spec
    ended = [each for each in reading.trials if each.values and each.rank is not None
             and each.confirms is None]  # fmt: skip
    if spec is None or not ended:
        return None
    goal = spec.goals[0]
    ended.sort(key=lambda each: each.number)
    xs = tuple(float(each.number) for each in ended)
    ys = [each.values[0] for each in ended]
    better: Callable[[float, float], float] = max if goal.direction == "max" else min
    best = accumulate(ys, better)
    return plot(goal.metric, [
        PlotLine("trials", xs, tuple(ys), 0, is_points=True),
        PlotLine("best so far", xs, tuple(best), 1),
    ])  # fmt: skip
