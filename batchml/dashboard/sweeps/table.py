"""The page of all sweeps, and the parts that its page and that of one sweep share. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from urllib.parse import quote

from batchml.cli.render import duration
from batchml.config.project import short_project
from batchml.dashboard.html import Child, Html, join, tag
from batchml.dashboard.layout import command_line, page
from batchml.dashboard.runs import count_of, note
from batchml.dashboard.sweeps.reading import SweepLine
from batchml.model.names import dollars
from batchml.model.sweep import SweepSpec, TrialState
from batchml.sweeps.summary import SweepSnapshot

MOST = 200  # sweeps in the page; `batchml sweeps ls` has all
STYLES = ("page.css", "sweep_plots.css", "sweep.css")
START = "batchml sweep sweep.toml"
NONE = "-"

# A state of a trial: its mark, and its word for the colour.
MARKS: Mapping[TrialState, tuple[str, str]] = {
    TrialState.WAITING: ("\u25cb", "waiting"),
    TrialState.RUNNING: ("\u25b6", "running"),
    TrialState.PAUSED: ("\u25d4", "starting"),
    TrialState.DONE: ("\u2713", "succeeded"),
    TrialState.PRUNED: ("\u2193", "pruned"),
    TrialState.FAILED: ("\u2715", "failed"),
    TrialState.DIVERGED: ("\u2715", "diverged"),
    TrialState.KILLED: ("\u2298", "cancelled"),
    TrialState.LOST: ("?", "lost"),
}


# --- Parts ----------------------------------------------------------------------------------------


def mark(glyph: str, colour: str, words: str) -> Html:
    """A state: its mark, its colour and its words."""
    return tag("span", tag("span", glyph, aria_hidden="true"), " ", words, class_=f"state {colour}")


def trial_mark(state: TrialState) -> Html:
    return mark(*MARKS[state], state.value)


def status_mark(status: str, by: str) -> Html:
    """The status of a sweep; `by` is what ended it."""
    glyph, colour = {
        "running": ("\u25b6", "running"),
        "stopping": ("\u2298", "cancelled"),
        "paused": ("\u25d4", "starting"),
    }.get(status, ("\u2713", "succeeded"))
    if status == "ended" and by in ("failures", "user"):
        glyph, colour = ("\u2715", "failed") if by == "failures" else ("\u2298", "cancelled")
    return mark(glyph, colour, status)


def shares(parts: Iterable[tuple[str, float]], total: float) -> Html:
    """A bar of colours: `(state, amount)`. The numbers stand beside it, so readers skip it."""
    rects, left = [], 0.0
    for state, amount in parts:
        width = 100 * min(amount, max(0.0, total - left)) / total if total else 0.0
        rects.append(tag("rect", x=f"{100 * left / total if total else 0:.2f}", y="0",
                         width=f"{width:.2f}", height="8", class_=f"fill {state}"))  # fmt: skip
        left += amount
    return tag("svg", *rects, class_="share", viewBox="0 0 100 8", preserveAspectRatio="none",
               aria_hidden="true")  # fmt: skip


def number(value: float | None) -> str:
    """Four significant figures; "-" is unknown."""
    if value is None:
        return NONE
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}" if abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:.4g}"


def finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")


def shown_value(value: float | None) -> str:
    """The value of a metric, which may be NaN or infinite."""
    return NONE if value is None else number(value) if finite(value) else str(value)


def money(usd: float) -> str:
    return dollars(Decimal(str(usd)))


def trials_words(seen: SweepSnapshot) -> str:
    """`12 of 64`: trials that have ended, of those that will be."""
    total = max(sum(seen.counts.values()), (seen.wanted or 0) + seen.confirming)
    return f"{seen.over} of {total}"


def method_words(spec: SweepSpec) -> str:
    stop = f" + {spec.early_stop.method}" if spec.early_stop.method != "none" else ""
    return f"{spec.method}{stop}"


def goal_words(spec: SweepSpec) -> str:
    return ", ".join(f"{goal.direction} {goal.metric}" for goal in spec.goals)


# --- The page -------------------------------------------------------------------------------------


HEADINGS = ("Name", "Status", "Trials", "Progress", "Best", "Goal", "Method", "Running", "Cost",
            "Age", "Project", "Key")  # fmt: skip
_NUMBERS = ("Trials", "Best", "Running", "Cost", "Age")


def sweeps_page(
    lines: Sequence[SweepLine], total: int, now: float, env: str, words: str = "", trouble: str = ""
) -> Html:
    """All sweeps, the newest first. `words`: only those in which all of these occur."""
    search = tag(
        "input", id="search", name="q", type="search", value=words or None, autocomplete="off",
        placeholder="Search: name, status, goal, method, ...", aria_label="Search the sweeps",
        spellcheck="false",
    )  # fmt: skip
    bar = tag("form", search, tag("span", "", id="count", role="status"), class_="bar",
              method="get", action="/sweeps", role="search")  # fmt: skip
    place = tag("div", sweeps_rows(lines, total, now, words), id="sweeps", class_="scroll",
                tabindex="0", role="region", aria_label="Sweeps")  # fmt: skip
    return page(
        "Sweeps", tag("h1", "Sweeps", class_="unseen"), note(trouble),
        tag("p", "", id="sweep-trouble", role="alert", hidden=True), bar, place,
        env=env, current="/sweeps", view="sweeps", styles=STYLES,
        scripts=("theme.js", "app.js", "sweeps.js"),
    )  # fmt: skip


def sweeps_rows(lines: Sequence[SweepLine], total: int, now: float, words: str = "") -> Html:
    """The table, for the page and for its script, which asks for it again."""
    if not lines:
        return tag("p", "No sweeps yet. This starts one: ", command_line(START), class_="empty")
    shown = [each for each in lines if matches(each, words)]
    projects = [each.project for each in lines]
    heading = (
        tag("th", name, scope="col", class_="number" if name in _NUMBERS else None)
        for name in HEADINGS
    )
    rows = (_row(each, now, short_project(each.project, projects)) for each in shown)
    caption = count_of(len(shown), total, "sweep")
    more = None
    if total > len(lines):
        more = tag("p", f"Only the newest {len(lines)} are listed. All of them: ",
                   command_line(f"batchml sweeps ls --all --limit {total}"))  # fmt: skip
    return join((
        tag("table", tag("caption", caption, class_="unseen", data_count=caption),
            tag("thead", tag("tr", *heading)), tag("tbody", *rows), class_="grid"),
        more,
    ))  # fmt: skip


def matches(line: SweepLine, words: str) -> bool:
    """Whether all words occur in what the list shows of a sweep."""
    if not words.strip():
        return True
    spec, seen = line.spec, line.snapshot
    about = [line.name, line.key, line.project, line.trouble, seen.status if seen else ""]
    if spec is not None:
        about += [goal_words(spec), method_words(spec), spec.job, *spec.space]
    text = " ".join(about).lower()
    return all(word in text for word in words.lower().split())


def _row(line: SweepLine, now: float, project: str) -> Html:
    link = tag("a", line.name or line.key, href=f"/sweep/{quote(line.key)}", id=f"s-{line.key}")
    cells: list[Child] = [link, *_facts(line)]
    cells += [duration(max(0.0, now - line.created_at)) if line.created_at else NONE, project,
              line.key[:8]]  # fmt: skip
    made = [
        tag("td", cell, class_="number" if name in _NUMBERS else None,
            title=cell if isinstance(cell, str) and cell else None)
        for name, cell in zip(HEADINGS, cells, strict=True)
    ]  # fmt: skip
    return tag("tr", *made, data_id=line.key)


def _facts(line: SweepLine) -> list[Child]:
    spec, seen = line.spec, line.snapshot
    if spec is None or seen is None:
        return [line.trouble or "being read", *[NONE] * 7]
    value = line.best[1][0] if line.best and line.best[1] else None
    states = [(MARKS[state][1], many) for state, many in seen.counts.items() if many]
    total = max(sum(seen.counts.values()), seen.wanted or 0)
    return [
        status_mark(seen.status, line.by), trials_words(seen), shares(states, total),
        shown_value(value), goal_words(spec), method_words(spec),
        number(seen.count(TrialState.RUNNING)),
        NONE if seen.spent is None else money(seen.spent),
    ]  # fmt: skip
