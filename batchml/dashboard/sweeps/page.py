"""The page of one sweep: what was found, what runs, what was stopped early, and every trial. Pure.

Tables are HTML of this module. The plots are drawn by the script of the sweep report, from the same
document: see `batchml.sweeps.report`.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from msgspec import Struct

from batchml.cli.render import duration
from batchml.dashboard.app import PageQuery
from batchml.dashboard.html import Child, Html, join, tag
from batchml.dashboard.layout import command_line, facts, nothing, page
from batchml.dashboard.runs import note
from batchml.dashboard.sweeps.actions import TrialStops
from batchml.dashboard.sweeps.reading import SweepLine, SweepReading, TrialLine
from batchml.dashboard.sweeps.table import (
    MARKS,
    NONE,
    STYLES,
    goal_words,
    method_words,
    money,
    number,
    shares,
    shown_value,
    status_mark,
    trial_mark,
    trials_words,
)
from batchml.errors import UsageError, did_you_mean
from batchml.model.names import short_duration
from batchml.model.sweep import SweepSpec, TrialState
from batchml.runtime.protocol.variables import format_value
from batchml.sweeps.results import LEAST

ROWS = 50  # of the table of trials
MOST_ROWS = 2_000  # of it in an export, which has no server that turns its pages
_BARS = 14  # importances that have a row
_LIMITS = {"hours": "Hours", "USD": "Cost limit", "failed": "Failed trials",
           "failed %": "Failed trials"}  # fmt: skip
_UNITS = {"USD": " USD", "failed %": "%"}
PANELS = ("summary", "standing", "rungs", "importances", "failures", "trials")


def sweep_page(
    key: str, reading: SweepReading | None, query: PageQuery, env: str,
    stops: TrialStops | None = None,
) -> Html:  # fmt: skip
    """The page. Without a reading its panels say that they wait, and the script fills them."""
    name = reading.line.name if reading else key
    made = panels(reading, query, stops) if reading else {}
    later = join((
        tag("p", "The sweep is being read ...", class_="dim"),
        tag("noscript", tag("a", "Show it", href=f"/sweep/{quote(key)}")),
    ))  # fmt: skip
    place = {name: tag("div", made.get(name, later), id=name) for name in PANELS}
    search = tag(
        "form",
        tag("input", type="search", id="trial-search", name="q", value=query.params.get("q"),
            placeholder="Search: state, lr=0.1, number, ...", aria_label="Search the trials",
            autocomplete="off", spellcheck="false"),
        class_="bar", method="get", role="search",
    )  # fmt: skip
    plots = tag(
        "div",
        tag("p", "The plots need scripts. The tables have the best trials and all values.",
            class_="dim"),
        id="plots", class_="cards plots", role="group", aria_label="Plots",
    )  # fmt: skip
    return page(
        f"{name}: sweep", tag("h1", name), note(""),
        tag("p", "", id="sweep-trouble", role="alert", hidden=True),
        tag("div", data_panel=f"/sweep/{quote(key)}/actions", id="sweep-actions"),
        tag(
            "div",
            tag("div", _card("Best trial", place["summary"]), _card("Rungs", place["rungs"]),
                _card("Importances", place["importances"]), class_="pile"),
            _card("Trials", place["standing"], "third"),
            class_="cards",
        ),
        plots,
        tag(
            "div",
            tag("div", id="spending", class_="contents plots"),
            _card("Failures", place["failures"]),
            tag("section", tag("h2", "All trials"), search, place["trials"], class_="card wide",
                id="all-trials"),
            class_="cards",
        ),
        env=env, current="/sweeps", view="sweep", styles=STYLES,
        scripts=("theme.js", "app.js", "act.js", "sweep_plots.js", "sweep.js"),
    )  # fmt: skip


def _card(title: str, body: Html, width: str = "") -> Html:
    return tag("section", tag("h2", title), body, class_=f"card {width}".rstrip())


def panels(
    reading: SweepReading, query: PageQuery, stops: TrialStops | None = None
) -> dict[str, Html]:
    """The content of each panel. Raises UsageError for a column that the trials do not have.

    `stops`: the buttons of trials that can be stopped.
    """
    return {
        "summary": summary_panel(reading),
        "standing": standing_panel(reading),
        "rungs": rungs_panel(reading.document),
        "importances": importances_panel(reading),
        "failures": failures_panel(reading.document),
        "trials": trials_panel(reading, query, stops),
    }


def live_document(
    reading: SweepReading, query: PageQuery, stops: TrialStops | None = None
) -> dict[str, Any]:
    """What has changed since the version that the page names: nothing, or all of it."""
    seen = reading.line.snapshot
    head = {"version": reading.version, "over": bool(seen and seen.ended)}
    if query.params.get("known") == reading.version:
        return head
    made = {name: str(each) for name, each in panels(reading, query, stops).items()}
    return {**head, "panels": made, "document": reading.document}


# --- Panels ---------------------------------------------------------------------------------------


def summary_panel(reading: SweepReading) -> Html:
    """The status, the best trial with its command, and the confirming runs."""
    line, document, best = reading.line, reading.document, reading.document["best"]
    spec, seen = line.spec, line.snapshot
    assert spec is not None and seen is not None, "a reading has both"
    why = seen.ended or seen.stopping
    parts: list[Child] = [
        tag("p", status_mark(seen.status, line.by), f": {why}" if why else "", class_="status")
    ]
    if not best:
        parts.append(tag("p", "No trial has a result yet.", class_="dim"))
    else:
        values = " \u00b7 ".join(shown_value(each) for each in best["values"])
        step = f", {document['step']} {best['step']}" if document["max"] else ""
        state = "" if best["state"] == TrialState.DONE.value else f", {best['state'].lower()}"
        about = f" {goal_words(spec)}: trial {best['n']}{step}{state}"
        params = (
            tag("div", tag("span", name), " ", tag("b", format_value(value)))
            for name, value in best["params"].items()
        )
        parts += [
            tag("p", tag("span", values, class_="best"), tag("small", about), class_="big"),
            tag("div", *params, class_="params"),
            command_line(best["command"], "Run it again here"),
        ]
    parts += [tag("p", _confirmed(each), class_="dim") for each in best.get("confirmed", ())]
    notices = document["head"]["notices"]
    if notices:
        parts.append(tag("ul", *(tag("li", each) for each in notices), class_="notices"))
    return join(parts)


def _confirmed(again: dict[str, Any]) -> str:
    sure = f" \u00b1 {number(again['deviation'])}" if again["runs"] > 1 else ""
    return f"Confirmed: trial {again['n']} has {number(again['mean'])}{sure} over " + (
        f"{again['runs']} runs."
    )


def standing_panel(reading: SweepReading) -> Html:
    """Trials by state, limits with what is used of them, time, cost, controller."""
    line, document = reading.line, reading.document
    spec, seen = line.spec, line.snapshot
    assert spec is not None and seen is not None, "a reading has both"
    states = [(state, many) for state, many in seen.counts.items() if many]
    counts = (
        tag("tr", tag("th", trial_mark(state), scope="row"),
            tag("td", number(many), class_="number"))
        for state, many in states
    )  # fmt: skip
    limits = [
        (_LIMITS.get(each["name"], each["name"]),
         f"{number(each['used'])}{_UNITS.get(each['name'], '')} of at most "
         f"{number(each['limit'])}{_UNITS.get(each['name'], '')}")
        for each in document["limits"]
        if each["limit"] is not None and each["name"] != "trials"
    ]  # fmt: skip
    head = document["head"]
    cost = None
    if seen.spent is not None:
        cost = money(seen.spent) if seen.ended else f"{money(seen.spent)} so far"
        if seen.committed and not seen.ended:
            cost += f", up to {money(seen.spent + seen.committed)} with the trials in flight"
    return join((
        tag("p", trials_words(seen), tag("small", " trials have ended"), class_="big"),
        shares([(MARKS[state][1], many) for state, many in states],
               max(sum(seen.counts.values()), seen.wanted or 0)),
        tag("table", tag("caption", "Trials by state", class_="unseen"), tag("tbody", *counts),
            class_="plain"),
        facts([
            ("Took" if seen.ended else "Runs for", short_duration(head["took"])),
            ("Time left", f"about {short_duration(seen.eta)}" if seen.eta else None),
            ("Parallel trials", f"{seen.parallel} at most"),
            ("Cost", cost),
            *limits,
            ("Controller", reading.controller or None),
            ("Goal", goal_words(spec)),
            ("Method", method_words(spec)),
            ("Job", spec.job),
            ("Queue", head["queue"] or None),
            ("Code", head["commit"][:10] or None),
            ("Key", tag("code", line.key)),
        ]),
    ))  # fmt: skip


def rungs_panel(document: dict[str, Any]) -> Html:
    """How many trials reached each rung, continued, and were stopped at it."""
    saved, full = document["saved"]
    if document["stop"] == "none" or not document["max"]:
        return tag("p", "No early stopping: every trial trains to its own end.", class_="dim")
    if not document["rungs"]:
        return tag("p", "No rung has been reached yet.", class_="dim")
    step = f"{document['step']}s"
    names = (document["step"].capitalize(), "Reached", "Went on", "Stopped", "Running", "",
             "Cut-off value", f"Saved {step}")  # fmt: skip
    heading = (tag("th", name or tag("span", "Share", class_="unseen"), scope="col",
                   class_="number" if name else None) for name in names)  # fmt: skip
    most = max(1, *(each["in"] for each in document["rungs"]))
    rows = []
    for each in document["rungs"]:
        parts = [("succeeded", each["on"]), ("pruned", each["out"]), ("failed", each["ended"]),
                 ("running", each["now"])]  # fmt: skip
        cells = [each["step"], each["in"], each["on"], each["out"], each["now"]]
        rows.append(
            tag("tr", tag("th", number(cells[0]), scope="row", class_="number"),
                *(tag("td", number(cell), class_="number") for cell in cells[1:]),
                tag("td", shares(parts, most)), tag("td", number(each["cutoff"]), class_="number"),
                tag("td", number(each["saved"]), class_="number"))
        )  # fmt: skip
    words = None
    if full:
        words = tag("p", f"{100 * saved / full:.0f}%", tag("small", f" of the {step} saved by "
                    f"early stopping: {number(saved)} of {number(full)}"),
                    class_="big")  # fmt: skip
    table = tag("table", tag("caption", "Trials at each rung", class_="unseen"),
                tag("thead", tag("tr", *heading)), tag("tbody", *rows))  # fmt: skip
    return join((words, within(table, "Rungs", "rung-table")))


def importances_panel(reading: SweepReading) -> Html:
    """Which parameters decide the result: an estimate."""
    found = list(reading.document["importances"].items())
    if not found:
        ranked = sum(each.rank is not None for each in reading.trials)
        words = "No estimate: no parameter makes more difference than chance would."
        if ranked < LEAST:
            words = (f"No estimate yet: it needs {LEAST} trials with a result, and {ranked} have "
                     f"one. {LEAST - ranked} more are missing.")  # fmt: skip
        return tag("p", words, class_="dim")
    most = found[0][1]
    rows = (
        tag("tr", tag("th", name, scope="row"), tag("td", shares([("succeeded", share)], most)),
            tag("td", "under 1%" if share < 0.005 else f"{100 * share:.0f}%", class_="number"))
        for name, share in found[:_BARS]
    )  # fmt: skip
    rest = None
    if len(found) > _BARS:
        rest = tag("p", f"and {len(found) - _BARS} more that matter less", class_="dim")
    return join((
        tag("p", "How much a parameter's values among the best tenth of the trials differ from its "
            "values in all (PED-ANOVA, corrected for chance).", class_="dim"),
        tag("table", tag("caption", "Importances", class_="unseen"), tag("tbody", *rows),
            class_="plain"),
        rest,
    ))  # fmt: skip


def failures_panel(document: dict[str, Any]) -> Html:
    """Failed trials by the last line that they printed."""
    groups = document["failures"]
    if not groups:
        return nothing()  # the counts of states say so
    return join(_failure(place, each) for place, each in enumerate(groups))


def _failure(place: int, group: dict[str, Any]) -> Html:
    more = ", ..." if group["count"] > len(group["trials"]) else ""
    why = f", {group['why']}" if group["why"] and group["why"] != group["line"] else ""
    tail = None
    if len(group["tail"]) > 1:
        tail = tag("details", tag("summary", f"Last lines of trial {group['trials'][0]}"),
                   tag("pre", "\n".join(group["tail"]), tabindex="0"),
                   id=f"tail-{place}")  # fmt: skip
    state = trial_mark(TrialState(group["state"]))
    numbers = ", ".join(map(str, group["trials"]))
    return tag(
        "div", tag("strong", f"{group['count']} x "), state, f"{why}: trials {numbers}{more}",
        tag("p", tag("code", group["line"])), tail, class_="failure",
    )  # fmt: skip


def within(table: Html, label: str, name: str) -> Html:
    """A table that scrolls sideways in a narrow window, also by keyboard."""
    return tag("div", table, class_="within", tabindex="0", role="region", aria_label=label,
               id=name)  # fmt: skip


# --- The table of trials --------------------------------------------------------------------------


class _TrialColumn(Struct, frozen=True):
    """A column: its name in `?sort=`, its heading, the value to sort by, the cell."""

    name: str
    heading: str
    is_number: bool = True


def columns_of(spec: SweepSpec, has_steps: str, has_why: bool) -> list[_TrialColumn]:
    goals = [_TrialColumn(f"goal.{each.metric}", each.metric) for each in spec.goals]
    steps = [_TrialColumn("step", has_steps)] if has_steps else []
    params = [_TrialColumn(f"param.{name}", name) for name in spec.space]
    why = [_TrialColumn("why", "Why it ended", is_number=False)] if has_why else []
    first = [_TrialColumn("trial", "Trial"), _TrialColumn("state", "State", is_number=False)]
    return [*first, *goals, *steps, _TrialColumn("ran", "Ran"), *params, *why]


def value_of(trial: TrialLine, name: str, spec: SweepSpec) -> Any:
    """The value of a column; None where the trial has none."""
    kind, _, rest = name.partition(".")
    if kind == "goal":
        place = [goal.metric for goal in spec.goals].index(rest)
        return trial.values[place] if place < len(trial.values) else None
    if kind == "param":
        return trial.params.get(rest)
    if kind == "state":
        return trial.state.value
    found = {"trial": trial.number, "step": trial.step, "ran": trial.ran, "why": trial.why or None}
    return found[kind]


def choose_trials(
    reading: SweepReading, columns: Sequence[_TrialColumn], sort: str, words: str
) -> list[TrialLine]:
    """The trials in which all words occur, sorted by a column: `lr` rising, `-lr` falling; without
    a column the best first. Trials without a value come last. Raises UsageError."""
    spec = reading.line.spec
    assert spec is not None, "a reading has it"
    wanted = words.lower().split()
    found = [each for each in reading.trials if not wanted or _has(each, spec, wanted)]
    if not sort:
        most = len(reading.trials)
        return sorted(found, key=lambda t: (most if t.rank is None else t.rank, t.number))
    name, falls = sort.removeprefix("-"), sort.startswith("-")
    names = [each.name for each in columns]
    if name not in names:
        raise UsageError(f"sort={sort}: no such column.{did_you_mean(name, names)}")
    keyed = [(value_of(each, name, spec), each) for each in found]
    known = [pair for pair in keyed if pair[0] is not None and pair[0] == pair[0]]
    known.sort(key=lambda pair: (_sort_key(pair[0]), pair[1].number), reverse=falls)
    numbers = {each.number for _, each in known}
    return [each for _, each in known] + [each for each in found if each.number not in numbers]


def _sort_key(value: Any) -> tuple[bool, float, str]:
    """A key for numbers and texts in one column: numbers first."""
    if isinstance(value, int | float):
        return (False, float(value), "")
    return (True, 0.0, str(value))


def _has(trial: TrialLine, spec: SweepSpec, wanted: Iterable[str]) -> bool:
    params = (f"{name}={format_value(value)}" for name, value in trial.params.items())
    text = " ".join((f"trial {trial.number}", trial.state.value, trial.origin, *params, trial.why))
    return all(word in text.lower() for word in wanted)


def trials_panel(reading: SweepReading, query: PageQuery, stops: TrialStops | None = None) -> Html:
    """A part of the trials, as links choose it: `sort`, `q`, `page`, `rows`. Raises UsageError."""
    spec, document = reading.line.spec, reading.document
    assert spec is not None, "a reading has it"
    words, sort = query.params.get("q", ""), query.params.get("sort", "")
    has_why = any(each.why for each in reading.trials)
    columns = columns_of(spec, document["step"] if document["max"] else "", has_why)
    found = choose_trials(reading, columns, sort, words)
    size = max(1, query.number("rows", ROWS, MOST_ROWS))
    last = max(1, -(-len(found) // size))
    current = min(max(1, query.number("page", 1, last)), last)
    shown = found[(current - 1) * size : current * size]
    has_stops = stops is not None and any(map(stops.can_stop, shown))
    rows = (
        tag("tr", *(_trial_cell(each, column, spec) for column in columns),
            *_stop_cell(reading.line, each, stops if has_stops else None),
            class_="first" if each.rank == 0 else None)
        for each in shown
    )  # fmt: skip
    heading = [_trial_heading(each, sort, words) for each in columns]
    if has_stops:
        heading.append(tag("th", tag("span", "Action", class_="unseen"), scope="col"))
    every = f"{len(reading.trials)} trial{'' if len(reading.trials) == 1 else 's'}"
    count = f"{len(found)} of {len(reading.trials)} trials" if words else every
    order = "" if sort else ", the best first"
    table = tag("table", tag("caption", "Trials", class_="unseen"),
                tag("thead", tag("tr", *heading)), tag("tbody", *rows), class_="grid")  # fmt: skip
    return join((
        tag("p", f"{count}{order}", class_="dim", role="status"),
        within(table, "All trials", "trial-table"),
        _pager(current, last, sort, words),
    ))  # fmt: skip


def _stop_cell(line: SweepLine, trial: TrialLine, stops: TrialStops | None) -> list[Html]:
    if stops is None:
        return []
    return [tag("td", stops.button(line, trial) if stops.can_stop(trial) else None)]


def _trial_heading(column: _TrialColumn, sort: str, words: str) -> Html:
    is_on = sort.removeprefix("-") == column.name
    turned = f"-{column.name}" if sort == column.name else column.name
    link = tag("a", column.heading, href=_address(turned, words), id=f"sort-{column.name}",
               class_="sort")  # fmt: skip
    order = "descending" if sort.startswith("-") else "ascending"
    return tag("th", link, scope="col", aria_sort=order if is_on else None,
               class_="number" if column.is_number else None)  # fmt: skip


def _trial_cell(trial: TrialLine, column: _TrialColumn, spec: SweepSpec) -> Html:
    value = value_of(trial, column.name, spec)
    shown: Child
    if column.name == "trial":
        words = f"{trial.number}" + ("" if trial.confirms is None else f" (as {trial.confirms})")
        shown = words
        if trial.job_id:
            shown = tag("a", words, href=f"/run/{quote(trial.job_id)}", id=f"t-{trial.number}",
                        aria_label=f"Trial {words}: its run")  # fmt: skip
        return tag("th", shown, scope="row", class_="number")
    if column.name == "state":
        shown = trial_mark(trial.state)
    elif column.name == "ran":
        shown = duration(trial.ran) if trial.ran else NONE
    elif value is None:
        shown = NONE
    elif isinstance(value, float):
        shown = shown_value(value)
    else:
        shown = format_value(value)
    title = format_value(value) if isinstance(value, int | float | str) else None
    return tag("td", shown, class_="number" if column.is_number else None, title=title or None)


def _pager(current: int, last: int, sort: str, words: str) -> Html | None:
    if last == 1:
        return None
    parts: list[Child] = []
    for label, number_, is_on in (("Back", current - 1, current > 1),
                                  ("Next", current + 1, current < last)):  # fmt: skip
        if is_on:
            parts.append(tag("a", label, href=_address(sort, words, number_), id=f"page-{label}"))
        else:
            parts.append(tag("span", label, class_="dim"))
    parts.insert(1, tag("span", f"Page {current} of {last}"))
    return tag("nav", *parts, class_="bar", aria_label="Pages of trials")


def _address(sort: str, words: str, number_: int = 1) -> str:
    """The rest of the page's address that chooses trials."""
    chosen = {"sort": sort, "q": words, "page": str(number_) if number_ > 1 else ""}
    return f"?{urlencode({name: each for name, each in chosen.items() if each})}#all-trials"
