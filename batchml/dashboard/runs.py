"""The page of all runs: the first rows as HTML, and a document of all runs for the script.

The document is made of columns, not of rows: that is half as long, and the script sorts and
filters one column at a time.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from batchml.dashboard.html import Child, Html, join, tag, visible
from batchml.dashboard.layout import command_line, page
from batchml.model.run import classify
from batchml.runs.compare.columns import FACTS, Column, KnownNames, known_names, read_column
from batchml.runs.search import FoundRun

FIRST_ROWS = 60  # in the HTML; the script draws the others
DEFAULT = ("name", "status", "queue", "age", "ran", "params", "cost", "id")
NUMBERS = ("code", "age", "ran", "waited", "attempts", "cost", "vcpus", "memory", "gpus")
_SHOWN = 160  # characters of a cell
_SEARCHED = 4_000  # characters of a run that the search knows
_BLANKS = re.compile("[ \t\n\v\f\r\u00a0]+")
# Headings of facts, for people who do not type their names, and what they mean.
_HEADINGS = {
    "id": ("ID", "The beginning of the job id"),
    "age": ("Age", "Since it was submitted, in hours:minutes:seconds"),
    "ran": ("Ran", "Of all attempts together, in hours:minutes:seconds"),
    "waited": ("Waited", "Until its first start, in hours:minutes:seconds"),
    "class": ("Outcome", "How it ended"),
    "code": ("Exit code", "Of the program"),
    "params": ("Parameters", ""),
    "cost": ("Cost", "In USD; empty if it is not known"),
    "vcpus": ("vCPUs", ""),
    "gpus": ("GPUs", ""),
    "memory": ("Memory", "Of the request"),
}
# A word of AWS Batch -> what it means.
MEANINGS = {
    "SUBMITTED": "it waits until AWS Batch has looked at it",
    "PENDING": "it waits for other runs",
    "RUNNABLE": "it waits for room on a host",
    "STARTING": "it has a host, which fetches the image and starts the container",
    "RUNNING": "its program runs",
    "SUCCEEDED": "its program ended with code 0",
    "FAILED": "it ended otherwise; its page says why",
    "CANCELLED": "it was cancelled; AWS Batch calls it FAILED",
}
_LEGEND = (
    ("waiting", "SUBMITTED, PENDING, RUNNABLE: waits"), ("starting", "STARTING: has a host"),
    ("running", "RUNNING"), ("succeeded", "SUCCEEDED"), ("failed", "FAILED"),
    ("cancelled", "CANCELLED"),
)  # fmt: skip
GLYPHS = {
    "waiting": "\u25cb", "starting": "\u25d4", "running": "\u25b6", "succeeded": "\u2713",
    "failed": "\u2715", "cancelled": "\u2298", "unknown": "?",
}  # fmt: skip


def state_of(found: FoundRun) -> str:
    """The state of a run as one of the words of GLYPHS, for its colour and its mark."""
    run = found.run
    if run is None:
        return "unknown"
    if run.status.is_terminal:
        outcome = classify(run).outcome.value
        return outcome if outcome in ("succeeded", "cancelled") else "failed"
    # AWS Batch calls an array PENDING as long as its children run.
    if run.status.value == "RUNNING" or run.children.get("RUNNING"):
        return "running"
    if run.status.holds_resources or run.children.get("STARTING"):
        return "starting"
    return "waiting"


def state_text(found: FoundRun) -> str:
    """The state of a run as of `batchml ls`, whose column CLASS tells which FAILED run was
    cancelled: here it is CANCELLED, on all pages and for the search.
    """
    words = FACTS["status"].text(found, 0)
    return words.replace("FAILED", "CANCELLED", 1) if state_of(found) == "cancelled" else words


def state_mark(found: FoundRun) -> Html:
    """A state: its mark, its colour and its words, because a colour alone says nothing."""
    state = state_of(found)
    mark = tag("span", GLYPHS[state], aria_hidden="true")
    return tag("span", mark, " ", shortened(state_text(found)), class_=f"state {state}")


_STATUS = FACTS["status"]._replace(
    value=lambda found, _: state_text(found), text=lambda found, _: state_text(found)
)


def choose_columns(given: str, known: KnownNames) -> list[tuple[str, Column]]:
    """The columns of `?cols=name,status,lr`. Raises UsageError for a column that is not known."""
    names = [name for name in given.split(",") if name] or list(DEFAULT)
    found = {name: read_column(name, "cols", known) for name in dict.fromkeys(names)}
    return [(name, _STATUS if column is FACTS["status"] else column)
            for name, column in found.items()]  # fmt: skip


def runs_page(
    runs: Sequence[FoundRun], revision: int, now_ms: int, env: str, columns: str,
    trouble: str = "", known: KnownNames | None = None, *, is_loaded: bool = True,
    words: str = "", total: int | None = None,
) -> Html:  # fmt: skip
    """The page. It is whole without scripts, but has only the first rows then.

    `is_loaded`: whether `runs` are all runs, and not only the newest. `words`: of a search that
    found these among `total` runs.
    """
    total = len(runs) if total is None else total
    known = known or known_names(runs)
    chosen = choose_columns(columns, known)
    choices = [*FACTS, *sorted(known.params), *sorted(known.metrics)]
    heading = tag("tr", *(_heading(name, column) for name, column in chosen))
    rows = (row(each, chosen, now_ms) for each in runs[:FIRST_ROWS])
    table = tag(
        "table",
        tag("caption", "Runs, the newest first", class_="unseen"),
        tag("thead", heading),
        tag("tbody", *rows),
        id="runs", class_="grid", aria_rowcount=len(runs) + 1,
    )  # fmt: skip
    search = tag(
        "input", id="search", name="q", type="search", value=words or None,
        placeholder="Search: name, state, tag, lr=0.1, ...",
        aria_label="Search the runs", autocomplete="off", spellcheck="false",
    )  # fmt: skip
    options = (
        tag(
            "label",
            tag("input", type="checkbox", value=name, checked=name in dict(chosen)),
            " ",
            name,
        )
        for name in choices
    )
    chooser = tag("details", tag("summary", "Columns"), tag("div", *options, class_="choices"),
                  id="columns")  # fmt: skip
    count = tag(
        "span",
        count_of(len(runs), total, "run") if is_loaded else "Loading all runs ...",
        id="count",
        role="status",
    )
    none = tag("p", no_match(words), id="no-match", hidden=bool(runs))
    table = join((table, none))
    if not total:
        form = tag("a", "a form", href="/submit")
        table = tag("div", tag("p", "No runs yet: ", form, " or a command submits one."),
                    command_line("batchml submit lenet", "In a terminal"))  # fmt: skip
    bar = tag("form", search, count, chooser, tag("span", id="actions"), class_="bar",
              method="get", action="/", role="search")  # fmt: skip
    region = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Runs",
                 data_revision=revision)  # fmt: skip
    hint = None
    if runs:
        hint = tag("div", _legend(), tag("p", "A click on a row chooses it for a comparison; so "
                   "does the space bar on a name.", class_="dim"), class_="under")  # fmt: skip
    return page("Runs", tag("h1", "Runs", class_="unseen"), note(trouble), bar, region, hint,
                env=env, current="/", view="runs",
                scripts=("theme.js", "app.js", "runs.js"))  # fmt: skip


def count_of(found: int, total: int, noun: str) -> str:
    """How many a search has found: `1 run`, `3 of 25 runs`."""
    every = f"{total} {noun}{'' if total == 1 else 's'}"
    return every if found == total else f"{found} of {every}"


def no_match(words: str) -> str:
    """Why the list of runs is empty although there are some. The script says the same."""
    return f"No run has all of these words: {words}"


def note(trouble: str) -> Html:
    """The place of messages; empty if there is none."""
    return tag("p", trouble, id="trouble", role="alert", hidden=not trouble)


def heading_of(name: str, column: Column) -> tuple[str, str]:
    """The heading of a column and what it means, which may be ""; parameters and metrics have their
    names."""
    if name.lower() not in FACTS:
        return column.heading, ""
    return _HEADINGS.get(name.lower(), (column.heading.capitalize(), ""))


def state_words(words: str) -> str:
    """What a state means, for people who do not know the words of AWS Batch."""
    meaning = MEANINGS.get(words)
    return f"{words}: {meaning}" if meaning else words


def _legend() -> Html:
    marks = (tag("span", tag("span", GLYPHS[state], aria_hidden="true", class_=f"state {state}"),
                 " ", words) for state, words in _LEGEND)  # fmt: skip
    return tag("p", *marks, class_="keys dim")


def row(found: FoundRun, columns: Iterable[tuple[str, Column]], now_ms: int) -> Html:
    cells = (_cell(found, name, column, now_ms) for name, column in columns)
    return tag("tr", *cells, data_id=found.job_id)


def _heading(name: str, column: Column) -> Html:
    words, meaning = heading_of(name, column)
    button = tag("button", words, type="button", class_="sort", data_column=name,
                 title=meaning or None)  # fmt: skip
    return tag("th", button, scope="col", class_="number" if name in NUMBERS else None)


def _cell(found: FoundRun, name: str, column: Column, now_ms: int) -> Html:
    words = shortened(column.text(found, now_ms))
    shown: Child = words
    if name == "name":
        shown = tag("a", words, href=f"/run/{found.job_id}")
    elif name == "status":
        shown = state_mark(found)
        words = state_words(words)
    is_number = name in NUMBERS or (column.metric is not None)
    return tag("td", shown, class_="number" if is_number else None, title=words or None)


class RunCells:
    """The texts and values of runs, kept as long as a run is the same.

    To make them anew for 10,000 runs would take seconds. Those that depend on the time are made
    again, as long as it does.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[FoundRun, dict[str, tuple[str, Any]]]] = {}
        self._searched: dict[str, tuple[FoundRun, str]] = {}
        self._names: tuple[int, KnownNames] | None = None

    def names(self, runs: Sequence[FoundRun], revision: int) -> KnownNames:
        """The parameters and metrics of all runs at a revision."""
        if self._names is None or self._names[0] != revision:
            self._names = (revision, known_names(runs))
        return self._names[1]

    def searched(self, found: FoundRun) -> str:
        """See `searched`."""
        kept = self._searched.get(found.job_id)
        if kept is None or kept[0] is not found:
            kept = self._searched[found.job_id] = (found, searched(found))
        return kept[1]

    def cell(self, found: FoundRun, name: str, column: Column, now_ms: int) -> tuple[str, Any]:
        """The text of a cell, and the value to sort by."""
        if name == "age" or (name in ("ran", "waited") and not _ended(found)):
            return visible(column.text(found, now_ms)), _finite(column.value(found, now_ms))
        kept = self._kept.get(found.job_id)
        if kept is None or kept[0] is not found:
            kept = self._kept[found.job_id] = (found, {})
        cell = kept[1].get(name)
        if cell is None:
            text = shortened(visible(column.text(found, now_ms)))
            cell = kept[1][name] = (text, _finite(column.value(found, now_ms)))
        return cell


# --- The document of all runs ---------------------------------------------------------------------


def runs_document(
    runs: Sequence[FoundRun], revision: int, now_ms: int, columns: str = "",
    cells: RunCells | None = None, known: KnownNames | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Columns of all runs: texts, values to sort by, and what the search finds.

    `cells` are kept from one call to the next. `known` are the names that a column may have.
    """
    cells = cells or RunCells()
    chosen = choose_columns(columns, known or known_names(runs))
    rows = [[cells.cell(each, name, column, now_ms) for name, column in chosen] for each in runs]
    found = list(zip(*rows, strict=True)) or [() for _ in chosen]
    return {
        "revision": revision,
        "at": now_ms,
        "columns": [
            {"name": name, "heading": heading_of(name, column)[0], "number": name in NUMBERS
             or column.metric is not None}
            for name, column in chosen
        ],
        "ids": [each.job_id for each in runs],
        "states": [state_of(each) for each in runs],
        "meanings": MEANINGS,
        "created": [each.created_at for each in runs],
        "ended": [_ended(each) for each in runs],
        "found": [cells.searched(each) for each in runs],
        "texts": [[text for text, _ in column] for column in found],
        "values": [[value for _, value in column] for column in found],
    }  # fmt: skip


def search_words(text: str) -> list[str]:
    """The words of a search. `searchWords` in app.js is the same rule: tests/dashboard/search.json
    has examples that both meet."""
    return [word for word in _BLANKS.split(text.lower()) if word]


def searched(found: FoundRun) -> str:
    """The text in which the search looks: name, state, parameters, tags, project, commit, id."""
    tags = (f"{name}={value}" for name, value in found.tags.items())
    params = (f"{name}={value}" for name, value in found.params.items())
    outcome = classify(found.run).outcome.value if found.run else ""
    state = found.run.status.value if found.run and state_of(found) != "cancelled" else ""
    words = (found.name, state, outcome, found.job_id, found.queue, found.commit, *params, *tags)
    return " ".join(word for word in words if word).lower()[:_SEARCHED]


def shortened(text: str) -> str:
    """The text of a cell, which is never wider than this in the table."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}\N{HORIZONTAL ELLIPSIS}"


def _ended(found: FoundRun) -> bool:
    return found.run is None or found.run.status.is_terminal


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


def matching(runs: Iterable[FoundRun], words: str, cells: RunCells | None = None) -> list[FoundRun]:
    """The runs in which all words of a search occur, as the script finds them."""
    wanted, text = search_words(words), (cells or RunCells()).searched
    return [each for each in runs if all(word in text(each) for word in wanted)]


def chips(pairs: Iterable[tuple[str, object]]) -> Html:
    """Names and values as small labels."""
    return join((tag("span", f"{name}={value}", class_="chip") for name, value in pairs), " ")
