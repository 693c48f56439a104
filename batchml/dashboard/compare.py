"""The page that compares runs: differences, results, code, curves, and plots of their values."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any
from urllib.parse import urlencode

from msgspec import Struct
from msgspec.structs import replace

from batchml.client import Client
from batchml.clock import Clock
from batchml.dashboard.app import PageQuery, Route, route
from batchml.dashboard.curves import SCRIPTS as CURVES
from batchml.dashboard.curves import (
    STYLES,
    RunSeries,
    colours_of,
    curves_document,
    curves_section,
    read_window,
)
from batchml.dashboard.html import Child, Html, join, tag, visible
from batchml.dashboard.hub import Hub
from batchml.dashboard.layout import command_line, page
from batchml.dashboard.run import run_series
from batchml.dashboard.runs import (
    count_of,
    heading_of,
    matching,
    note,
    state_mark,
    state_of,
    state_text,
)
from batchml.errors import UsageError
from batchml.jobs.code_diff import FileDifference
from batchml.model.names import short_id
from batchml.model.run import Record
from batchml.runs.compare.columns import FACTS, Column, known_names, metric_column, param_column
from batchml.runs.compare.facts import describe_unused, unused_params
from batchml.runs.compare.figures import RunGroup, choose_labels, request_facts
from batchml.runs.compare.render import figure_rows, title_of
from batchml.runs.compare.service import ComparedRuns
from batchml.runs.metrics.conditions import MetricValue, child_of
from batchml.runs.search import FoundRun, code_digest

MOST_RUNS = 2_000  # in the plots and in the table of values
MOST_ROWS = 200  # of the table of values
MOST_BESIDE = 24  # runs side by side, whose logs are read
MOST_CODES = 5  # versions of the code that are compared with the first
MOST_LINES = 2_000  # of one version's diff
_KEPT_SERIES = 100  # runs that have ended, whose curves are kept
_HIDDEN = ("batchml:",)  # tags of batchml's own: different in each run
_GROUPS = {"params": "Parameters", "commit": "Code", "uncommitted": "Code", "code": "Code",
           "name": "Name and tags", "tags": "Name and tags"}  # fmt: skip
_PARAM, _METRIC = "param", "metric"  # kinds of columns
_STATE = "State"
_ORDER = ("Parameters", "Code", "Environment", "Name and tags")


class ChosenRuns(Struct, frozen=True):
    """The runs of the page, the first one being the baseline, and the query that chooses them."""

    runs: tuple[FoundRun, ...]
    query: str
    labels: tuple[str, ...] = ()
    searched: str = ""  # the words that found them

    @property
    def ids(self) -> list[str]:
        return [each.job_id for each in self.runs]

    @property
    def beside(self) -> tuple[FoundRun, ...]:
        """The runs that stand side by side."""
        return self.runs[:MOST_BESIDE]


def choose_runs(
    params: Mapping[str, str], known: Sequence[FoundRun], find: "Client | None" = None
) -> ChosenRuns:
    """The runs of `?runs=ID,ID` or `?q=WORDS`. `find` looks for names that are not job ids.

    Raises NotFound, and UsageError for too many runs.
    """
    words = [word.strip() for word in params.get("runs", "").split(",") if word.strip()]
    if len(words) > MOST_RUNS:
        raise UsageError(f"{len(words)} runs: at most {MOST_RUNS} can be compared at once.")
    by_id = {each.job_id: each for each in known}
    chosen: dict[str, FoundRun] = {}
    for word in words:
        found = by_id.get(word)
        if found is None and find is not None:
            found = find.run(word).seen
        if found is not None:
            chosen[found.job_id] = found
    query = {"runs": ",".join(words)}
    if not words and params.get("q", "").strip():
        query = {"q": params["q"]}
        chosen = {each.job_id: each for each in matching(known, params["q"])[:MOST_RUNS]}
    runs = tuple(chosen.values())
    return ChosenRuns(runs, urlencode(query), tuple(label_runs(runs)), query.get("q", "").strip())


def label_runs(runs: Sequence[FoundRun]) -> list[str]:
    """Short labels of runs: names, parameters that differ, or ids."""
    return choose_labels(
        [each.name for each in runs], [each.params for each in runs],
        [short_id(each.shown_id) for each in runs], [each.shown_id for each in runs],
    )  # fmt: skip


# --- The page -------------------------------------------------------------------------------------


def compare_page(chosen: ChosenRuns, now_ms: int, env: str, trouble: str = "") -> Html:
    """The page. Differences and values are in it; results, code and curves are asked for."""
    content = _content(chosen, now_ms, env) if len(chosen.runs) > 1 else _help(chosen)
    return page(
        "Compare", tag("h1", f"Compare {len(chosen.runs)} runs" if chosen.runs else "Compare runs"),
        note(trouble), content, env=env, current="/compare", view="compare",
        scripts=("theme.js", "app.js", *CURVES, "plots.js", "compare.js"), styles=STYLES,
    )  # fmt: skip


def _help(chosen: ChosenRuns) -> Html:
    words = "One run is chosen. " if chosen.runs else "No runs are chosen. "
    if chosen.searched:
        number = "Only one run has" if chosen.runs else "No run has"
        words = f"{number} all of these words: {chosen.searched}. "
    return join((
        tag("p", words, "In ", tag("a", "the list of runs", href="/"), ", a click on a row, or the "
            "space bar on a name, chooses a run; then the link ", tag("strong", "Compare"),
            " stands above the list."),
        command_line("batchml compare @last~1 @last"),
    ))  # fmt: skip


def _content(chosen: ChosenRuns, now_ms: int, env: str) -> Html:
    beside, query = chosen.beside, chosen.query
    is_over = all(each.run is None or each.run.status.is_terminal for each in beside)
    left = len(chosen.runs) - len(beside)
    more = f"The first {len(beside)} of {len(chosen.runs)} runs; the plots have all of them."
    words = " ".join(short_id(each.shown_id) for each in beside)
    is_short = len(chosen.runs) <= MOST_ROWS
    written = json.dumps(values_document(chosen, now_ms)) if is_short else None
    parts: list[Child] = [
        tag("p", more, class_="dim wide") if left else None,
        _card("Differences", tag("div", differences_panel(chosen), id="differences",
                                 data_source=f"/compare/differences?{query}")),
        _card("Results", tag("div", data_panel=f"/compare/results?{query}", id="results"),
              command_line(f"batchml compare {words}")),
        _card("Code", tag("div", data_panel=f"/compare/code?{query}")),
        _card("Curves", curves_section(f"/compare/series?{query}", is_over=is_over)),
        _card("Parallel coordinates", tag("div", tag("p", "The plot needs scripts; its values are "
              "in the table below.", class_="dim"), id="parallel")),
        _card("Scatter plot", tag("div", tag("p", "The plot needs scripts; its values are in the "
              "table below.", class_="dim"), id="scatter")),
        _card("Values", tag("div", values_table(chosen, now_ms), id="values",
                            data_source=f"/compare/values?{query}", data_document=written)),
    ]  # fmt: skip
    return tag("div", *parts, class_="cards compare")


def _card(title: str, *content: Child) -> Html:
    return tag("section", tag("h2", title), *content, class_="card wide")


# --- Differences ----------------------------------------------------------------------------------


class FactRow(Struct, frozen=True):
    """A fact of each run as text; "" if a run does not have it."""

    group: str
    name: str
    cells: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.cells)) > 1


def fact_rows(runs: Sequence[FoundRun]) -> list[FactRow]:
    """Every fact of the requests: parameters, code, environment, name and tags.

    Variables may hold secrets, so only their equality is shown: "set (1)", "set (2)".
    """
    facts = [request_facts(each) for each in runs]
    names = [n for n in dict.fromkeys(n for each in facts for n in each)
             if not n.removeprefix("tags.").startswith(_HIDDEN)]  # fmt: skip
    rows = [
        FactRow(_group(name), name.removeprefix("params.").removeprefix("tags."),
                tuple(_text(each.get(name)) for each in facts))
        for name in names
    ]  # fmt: skip
    rows += _variable_rows(runs)
    kept = [row for row in rows if any(row.cells)]
    return sorted(kept, key=lambda row: _ORDER.index(row.group))


def _group(name: str) -> str:
    return _GROUPS.get(name.partition(".")[0], "Environment")


def _text(value: object) -> str:
    if value is None:
        return ""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _variable_rows(runs: Sequence[FoundRun]) -> list[FactRow]:
    known = [each.run.environment if each.run else {} for each in runs]
    names = sorted({n for each in known for n in each if not n.startswith(("BATCHML_", "AWS_"))})
    rows = []
    for name in names:
        values = list(dict.fromkeys(each[name] for each in known if name in each))
        words = {value: f"set ({number})" for number, value in enumerate(values, 1)}
        if len(values) == 1:
            words = dict.fromkeys(values, "set")
        cells = (words[each[name]] if name in each else "" for each in known)
        rows.append(FactRow("Environment", f"variable {name}", tuple(cells)))
    return rows


def differences_panel(chosen: ChosenRuns) -> Html:
    """The facts that differ, a column a run; the equal ones are folded."""
    runs, rows = chosen.beside, fact_rows(chosen.beside)
    state = FactRow(_STATE, "State", tuple(state_text(each) for each in runs))
    differing = [row for row in rows if row.differs]
    parts: list[Child] = [
        _fact_table(chosen, [state, *differing], "Facts that differ; those of the first run are "
                    "shown dim where others have the same"),
    ]  # fmt: skip
    if not differing:
        parts.append(tag("p", "The requests do not differ, as far as AWS Batch and the history "
                              "describe them."))  # fmt: skip
    equal = [row for row in rows if not row.differs]
    if equal:
        lines = (tag("tr", tag("th", row.name, scope="row"), tag("td", row.cells[0]))
                 for row in equal)  # fmt: skip
        table = tag("table", tag("caption", "Facts that all runs share", class_="unseen"),
                    tag("tbody", *lines))  # fmt: skip
        parts.append(tag("details", tag("summary", f"{len(equal)} equal facts"),
                         _region(table, "Equal facts")))  # fmt: skip
    return join(parts)


def _fact_table(chosen: ChosenRuns, rows: Iterable[FactRow], caption: str) -> Html:
    runs = chosen.beside
    colours = colours_of(chosen.ids[:MOST_BESIDE])
    heads = []
    for found, label in zip(runs, chosen.labels, strict=False):
        drop = _drop_link(chosen, found.job_id, label) if len(runs) == len(chosen.runs) else None
        link = tag("a", label, href=f"/run/{found.job_id}", title=found.job_id)
        heads.append(tag("th", _swatch(colours[found.job_id]), link, " ", drop, scope="col"))
    bodies = []
    for group, together in groupby(rows, key=lambda row: row.group):
        title = tag("tr", tag("th", group, scope="rowgroup", colspan=len(runs) + 1, class_="part"))
        lines = (_fact_line(row, runs) for row in together)
        bodies.append(tag("tbody", title if group != _STATE else None, *lines))
    table = tag("table", tag("caption", caption, class_="unseen"),
                tag("thead", tag("tr", tag("th", "Fact", scope="col"), *heads)),
                *bodies, class_="beside")  # fmt: skip
    return _region(table, "Differences")


def _drop_link(chosen: ChosenRuns, job_id: str, label: str) -> Html:
    others = ",".join(each for each in chosen.ids if each != job_id)
    return tag("a", "\u00d7", href=f"/compare?runs={others}", class_="drop",
               aria_label=f"Leave {label} out", title="Leave out")  # fmt: skip


def _fact_line(row: FactRow, runs: Sequence[FoundRun]) -> Html:
    """A row; values that are those of the first run are dim."""
    cells = []
    for place, (found, words) in enumerate(zip(runs, row.cells, strict=True)):
        if row.group == _STATE:
            cells.append(tag("td", state_mark(found)))
        else:
            same = place > 0 and words == row.cells[0]
            cells.append(
                tag("td", words or "-", title=words or None, class_="dim" if same else None)
            )
    return tag("tr", tag("th", row.name, scope="row"), *cells, data_name=row.name)


def _swatch(colour: int | None) -> Html | None:
    return (
        None if colour is None else tag("span", class_=f"swatch c{colour + 1}", aria_hidden="true")
    )


def _region(table: Html, label: str) -> Html:
    return tag("div", table, class_="within", tabindex="0", role="region", aria_label=label)


# --- Results and code -----------------------------------------------------------------------------


def results_panel(found: ComparedRuns, job_ids: Sequence[str]) -> Html:
    """Metrics, speed, use and cost of each group, with what they show, as `batchml compare`.

    `job_ids` are the runs that stand side by side: they have the colours.
    """
    groups, colours = found.groups, colours_of(job_ids)
    heads = (tag("th", _swatch(colours.get(group.first.job_id)) if len(group.runs) == 1 else None,
                 group.label or title_of(group), scope="col", class_="number",
                 title=title_of(group)) for group in groups)  # fmt: skip
    rows = []
    for row in figure_rows(groups):
        best = _best(row.name, groups)
        cells = []
        for place, words in enumerate(row.cells):
            star = (
                tag("span", " \u2605", title="The best value", class_="star")
                if place == best
                else None
            )
            cells.append(tag("td", words or "-", star, class_="number"))
        rows.append(tag("tr", tag("th", row.name, scope="row"), *cells))
    table = tag("table", tag("caption", "Results", class_="unseen"),
                tag("thead", tag("tr", tag("th", "Figure", scope="col"), *heads)),
                tag("tbody", *rows), class_="beside")  # fmt: skip
    if not rows:
        table = tag("p", "Nothing was measured yet.", class_="dim")
    grouped = any(len(group.runs) > 1 for group in groups)
    return join((
        _region(table, "Results") if rows else table,
        tag("p", "Runs that differ only in a seed are one column: mean and standard deviation.",
            class_="dim") if grouped else None,
        tag("ul", *(tag("li", each.text) for each in found.conclusions))
        if found.conclusions else None,
        *(tag("p", words, class_="dim") for words in found.notices),
    ))  # fmt: skip


def _best(name: str, groups: Sequence[RunGroup]) -> int | None:
    """The place of the group with the best value of a metric whose direction is known."""
    records = [group.first.record or Record() for group in groups]
    direction = next((r.directions[name] for r in records if name in r.directions), "")
    values = [group.value("metrics", name, "last") for group in groups]
    known = [value for value in values if value is not None]
    if not direction or len(set(known)) < 2:
        return None
    return values.index((max if direction == "max" else min)(known))


def code_panel(chosen: ChosenRuns, client: Client) -> Html:
    """The files that differ between the first run and each other version of the code."""
    first, *others = chosen.beside
    labels = dict(zip(chosen.ids, chosen.labels, strict=True))
    versions: dict[str, list[FoundRun]] = {}
    for each in others:
        if code_digest(each.code) != code_digest(first.code):
            versions.setdefault(code_digest(each.code), []).append(each)
    if not versions:
        words = "The code is the same." if code_digest(first.code) else "The runs have no code."
        return tag("p", words, class_="dim")
    parts: list[Child] = []
    for same in list(versions.values())[:MOST_CODES]:
        found = client.diff(first.job_id, same[0].job_id)
        names = ", ".join(labels[each.job_id] for each in same)
        parts.append(tag("h3", f"{labels[first.job_id]} to {names}"))
        if found.files is None:
            parts.append(tag("p", f"The files cannot be compared. {found.why}"))
        parts += show_files(found.files or ())
        ids = f"{short_id(first.shown_id)} {short_id(same[0].shown_id)}"
        parts.append(command_line(f"batchml diff {ids} --full"))
    if len(versions) > MOST_CODES:
        parts.append(tag("p", f"And {len(versions) - MOST_CODES} versions more.", class_="dim"))
    return join(parts)


def show_files(files: Sequence[FileDifference]) -> list[Child]:
    """The lines that differ, file by file."""
    found: list[Child] = []
    room = MOST_LINES
    for each in files:
        added = sum(line.startswith("+") for line in each.lines[2:])
        removed = sum(line.startswith("-") for line in each.lines[2:])
        words = each.why or f"+{added} -{removed}"
        shown, room = each.lines[:room], max(0, room - len(each.lines))
        lines = (tag("span", line, "\n", class_=_line_class(line)) for line in shown)
        hidden = len(each.lines) - len(shown)
        more = tag("p", f"{hidden} lines more.", class_="dim") if hidden else None
        body = tag("pre", *lines, tabindex="0", class_="within") if shown else None
        summary = tag("summary", tag("code", each.name), f" {each.change}, {words}")
        found.append(tag("details", summary, body, more, open=len(files) == 1))
    return found


def _line_class(line: str) -> str | None:
    if line.startswith(("+++", "---")):
        return "dim"
    return {"+": "added", "-": "removed", "@": "dim"}.get(line[:1])


# --- Values of all runs, and their curves ---------------------------------------------------------


def value_columns(runs: Sequence[FoundRun], now_ms: int) -> list[tuple[str, str, Column]]:
    """The columns worth a plot: (kind, name, column) of what differs between the runs."""
    known = known_names(runs)
    metrics = {name for name in known.metrics if child_of(name)[1] is None}
    both = known.params & metrics  # `lr`, which many programs report
    found = [(_PARAM, f"params.{name}" if name in both else name, param_column(name))
             for name in sorted(known.params)]  # fmt: skip
    found += [(_METRIC, f"metrics.{name}" if name in both else name,
               metric_column(MetricValue(name))) for name in sorted(metrics)]  # fmt: skip
    names = ("class", "ran", "waited", "cost", "attempts", "vcpus", "memory", "gpus", "queue",
             "image", "commit")  # fmt: skip
    found += [("fact", name, FACTS[name]) for name in names]
    return [
        (kind, name, column) for kind, name, column in found
        if len({column.value(each, now_ms) for each in runs} - {None}) > (kind != _METRIC)
    ]  # fmt: skip


def values_document(chosen: ChosenRuns, now_ms: int) -> dict[str, Any]:
    """The values of all runs by column, for the plots: numbers, texts, or null if unknown."""
    runs, colours = chosen.runs, colours_of(chosen.ids)
    directions: dict[str, str] = {}
    for each in runs:
        directions |= each.record.directions if each.record else {}
    return {
        "ids": chosen.ids,
        "labels": [visible(label) for label in chosen.labels],
        "states": [state_of(each) for each in runs],
        "colours": [colours[each] for each in chosen.ids],
        "columns": [
            {
                "name": visible(name),
                "kind": kind,
                "direction": directions.get(name.removeprefix("metrics."), "")
                if kind == _METRIC
                else "",
                "values": _values([column.value(each, now_ms) for each in runs]),
            }
            for kind, name, column in value_columns(runs, now_ms)
        ],
    }


def _values(values: Sequence[Any]) -> list[Any]:
    """Numbers if all known values are finite numbers, else texts."""
    numbers = [_number(value) for value in values]
    if all(number is not None for number, value in zip(numbers, values, strict=True)
           if value is not None):  # fmt: skip
        return numbers
    return [None if value is None else visible(str(value)) for value in values]


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if abs(number) < float("inf") else None


def values_table(chosen: ChosenRuns, now_ms: int) -> Html:
    """The same values as a table, a row a run: the first `MOST_ROWS`."""
    columns = value_columns(chosen.runs, now_ms)
    left = len(chosen.runs) - MOST_ROWS
    right = [
        not any(isinstance(value, str) for value in _values(
            [column.value(each, now_ms) for each in chosen.runs[:MOST_ROWS]]))
        for _, _, column in columns
    ]  # fmt: skip
    names = [heading_of(name, column)[0] if kind == "fact" else name
             for kind, name, column in columns]  # fmt: skip
    heads = (tag("th", name, scope="col", class_="number" if is_right else None)
             for name, is_right in zip(names, right, strict=True))  # fmt: skip
    rows = (
        tag("tr", tag("th", tag("a", label, href=f"/run/{found.job_id}"), scope="row"),
            tag("td", state_mark(found)),
            *(tag("td", column.text(found, now_ms) or "-",
                  class_="number" if is_right else None)
              for (_, _, column), is_right in zip(columns, right, strict=True)),
            data_id=found.job_id)
        for found, label in zip(chosen.runs[:MOST_ROWS], chosen.labels, strict=False)
    )  # fmt: skip
    table = tag("table", tag("caption", "Values of the runs", class_="unseen"),
                tag("thead", tag("tr", tag("th", "Run", scope="col"),
                                 tag("th", "State", scope="col"), *heads)),
                tag("tbody", *rows))  # fmt: skip
    shown = {name.removeprefix("params.") for kind, name, _ in columns if kind == _PARAM}
    unused = [name for each in chosen.runs for name in unused_params(each) if name in shown]
    region = tag("div", table, class_="within tall", tabindex="0", role="region",
                 aria_label="Values of the runs")  # fmt: skip
    more = f"And {count_of(left, left, 'more run')}."
    return join((
        region,
        tag("p", more, class_="dim", id="left") if left > 0 else None,
        tag("p", describe_unused(unused), class_="dim") if unused else None,
    ))  # fmt: skip


# --- Routes ---------------------------------------------------------------------------------------


class ComparePages:
    """The routes of the page that compares runs."""

    def __init__(self, client: Client, hub: Hub, clock: Clock) -> None:
        self._client, self._hub, self._clock = client, hub, clock
        # Of runs whose logs were read: job id -> the run, with its metrics; its series if it ended
        self._measured: dict[str, FoundRun] = {}
        self._series: dict[str, RunSeries] = {}

    @property
    def _now(self) -> int:
        return int(self._clock.now() * 1000)

    def routes(self) -> list[Route]:
        return [
            route("/compare", self.page),
            route("/compare/differences", lambda q: differences_panel(self._chosen(q))),
            route("/compare/values", lambda q: values_table(self._chosen(q), self._now)),
            route("/compare/document",
                  lambda q: values_document(self._chosen(q), self._now)),
            route("/compare/results", self.results),
            route("/compare/code", lambda q: code_panel(self._chosen(q), self._client)),
            route("/compare/series", self.series),
        ]  # fmt: skip

    def _chosen(self, query: PageQuery) -> ChosenRuns:
        known = self._hub.snapshot()[1]
        measured = self._measured
        with_metrics = [
            FoundRun(each.run, measured[each.job_id].record) if each.job_id in measured else each
            for each in known
        ]
        return choose_runs(query.params, with_metrics, self._client)

    def page(self, query: PageQuery) -> Html:
        chosen = self._chosen(query)
        return compare_page(chosen, self._now, self._client.env, self._hub.trouble)

    def results(self, query: PageQuery) -> Html:
        ids = [each.job_id for each in self._chosen(query).beside]
        found = self._client.compare(ids)
        singles = [each.found for group in found.groups for each in group.runs]
        self._measured |= {each.job_id: each for each in singles if ":" not in each.job_id}
        return results_panel(found, ids)

    def series(self, query: PageQuery) -> dict[str, Any]:
        chosen = self._chosen(query)
        colours = colours_of([each.job_id for each in chosen.beside])
        read: list[RunSeries] = []
        window = read_window(query.params)
        for found, label in zip(chosen.beside, chosen.labels, strict=False):
            if window is not None:
                part = run_series(self._client.run(found.job_id), window)
                read.append(replace(part, label=label, colour=colours[found.job_id]))
                continue
            known = self._series.get(found.job_id)
            if known is None:
                known = run_series(self._client.run(found.job_id))
                if found.run is None or found.run.status.is_terminal:
                    self._series[found.job_id] = known
            read.append(replace(known, label=label, colour=colours[found.job_id]))
        for job_id in list(self._series)[:-_KEPT_SERIES]:
            self._series.pop(job_id, None)
        return curves_document(read)
