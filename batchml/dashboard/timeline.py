"""The time axis of a run: its states with their dwell times, restarts and unfit hosts as marks."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from batchml.cli.render import timestamp
from batchml.dashboard.html import Child, Html, join, tag
from batchml.errors import NotFound
from batchml.handles import RunHandle
from batchml.model.names import short_duration
from batchml.model.outcome import describe_attempt, restarts_in_place
from batchml.model.run import JobStatus, Run, attempt_end, first_start
from batchml.runs.metrics.usage import Restart, UnfitNotice

_MARKS_SHOWN = 200  # in the picture; the table has all
_LEAST = 0.4  # percent of the axis: a shorter span would not be seen


class StateSpan(Struct, frozen=True):
    """A time in one state. `state` is one of the words of GLYPHS, for its colour; times in ms."""

    name: str
    state: str
    since: int
    until: int
    note: str = ""
    is_open: bool = False  # it still lasts


class TimelineMark(Struct, frozen=True):
    """A moment, in ms since the epoch."""

    at: int
    kind: str
    text: str


def present_run(handle: RunHandle) -> Run:
    """The run as it is now, or as the history has it if AWS Batch has forgotten it.

    Raises NotFound if neither has its end.
    """
    try:
        return handle.describe()
    except NotFound:
        if handle.seen is None or handle.seen.run is None:
            raise
        return handle.seen.run


def timeline_panel(handle: RunHandle, now_ms: int) -> Html:
    """The panel of a run. Restarts and health are read from its log."""
    run = present_run(handle)
    spans = spans_of(run, now_ms)
    return draw_timeline(spans, marks_of(handle.restarts(), handle.unfit_hosts()))


def spans_of(run: Run, now_ms: int) -> list[StateSpan]:
    """The states of a run in their order.

    AWS Batch reports when a run was submitted, and when each attempt started and stopped; the time
    before a start is that of SUBMITTED, PENDING, RUNNABLE and STARTING together. For an array an
    attempt is the time from its first start to its last end.
    """
    end = (run.stopped_at or now_ms) if run.status.is_terminal else now_ms
    at = run.created_at or first_start(run) or end
    found: list[StateSpan] = []
    for span in _runs(run, now_ms):
        if span.since > at:
            found.append(_waiting(run, at, span.since, is_first=not found))
        found.append(span)
        at = max(at, span.until)
    if not run.status.is_terminal and not (found and found[-1].is_open):
        name = run.status.value
        is_starting = run.status is JobStatus.STARTING
        found.append(StateSpan(name, "starting" if is_starting else "waiting", at, end,
                               run.status_reason, is_open=True))  # fmt: skip
    elif run.status.is_terminal and not found and run.children:
        # AWS Batch reports no start of an array: its children have theirs.
        found.append(StateSpan("All children", _outcome(run), at, end, run.status_reason))
    elif run.status.is_terminal and not found:
        found.append(StateSpan("Never started", "waiting", at, end, run.status_reason))
    return found


def _runs(run: Run, now_ms: int) -> Iterator[StateSpan]:
    """The attempts."""
    began = first_start(run)
    if not run.attempts and began:
        is_open = not run.status.is_terminal
        until = now_ms if is_open else run.stopped_at or began
        yield StateSpan("Running", _outcome(run), began, until, is_open=is_open)
    many = len(run.attempts) > 1
    for number, attempt in enumerate(run.attempts, 1):
        is_last = number == len(run.attempts)
        is_open = is_last and not run.status.is_terminal and attempt.stopped_at is None
        since = attempt.started_at or attempt.stopped_at
        if since is None:
            continue
        if is_open:
            state, note = "running", f"on {attempt.host}" if attempt.host else ""
        elif is_last and run.status is JobStatus.SUCCEEDED:
            state, note = "succeeded", "ended with code 0"
        else:
            state = _outcome(run) if is_last and run.status.is_terminal else "failed"
            note = describe_attempt(attempt, is_ours=bool(run.key), restarts=restarts_in_place(run))
        name = f"Attempt {number}" if many else "Running"
        yield StateSpan(name, state, since, attempt_end(run, attempt, now_ms), note, is_open)


def _waiting(run: Run, since: int, until: int, *, is_first: bool) -> StateSpan:
    why = f"after {len(run.depends_on)} other runs" if is_first and run.depends_on else ""
    return StateSpan("Waiting", "waiting", since, until, why if is_first else "between attempts")


def _outcome(run: Run) -> str:
    if not run.status.is_terminal:
        return "running"
    if run.status is JobStatus.SUCCEEDED:
        return "succeeded"
    return "cancelled" if run.is_terminated or run.is_cancelled else "failed"


def marks_of(restarts: Iterable[Restart], notices: Iterable[UnfitNotice]) -> list[TimelineMark]:
    """Restarts in place and unfit hosts, by time."""
    found = [TimelineMark(each.at, "restart", each.why) for each in restarts]
    found += [TimelineMark(each.at, "unfit host", each.why) for each in notices]
    return sorted(found, key=lambda each: each.at)


def draw_timeline(spans: Sequence[StateSpan], marks: Sequence[TimelineMark]) -> Html:
    """The picture, and the same as tables."""
    if not spans:
        return tag("p", "The times of this run are not known.", class_="dim")
    begin = spans[0].since
    whole = max(max(span.until for span in spans) - begin, 1)

    def place(at: int) -> float:
        return min(max((at - begin) * 100 / whole, 0), 100)

    bars = []
    for span in spans:
        x = place(span.since)
        width = max(place(span.until) - x, _LEAST)
        words = f"{span.name}: {_dwell(span)}{f', {span.note}' if span.note else ''}"
        bars.append(tag("rect", tag("title", words), x=f"{min(x, 100 - width):.3f}%", y=2,
                        width=f"{width:.3f}%", height=20, class_=f"span {span.state}"))  # fmt: skip
    dots = [
        tag("circle", tag("title", f"{mark.kind}: {mark.text}"), cx=f"{place(mark.at):.3f}%", cy=32,
            r=5, class_="mark" if mark.kind == "restart" else "mark unfit")
        for mark in marks[-_MARKS_SHOWN:]
    ]  # fmt: skip
    said = "; ".join(f"{span.name} {_dwell(span)}" for span in spans[:20])
    # For the script: the cursor that the charts share, and the time that they are zoomed in to.
    shared = (tag("rect", class_="zoomed", y=0, height="100%", width=0),
              tag("line", class_="moment", y1=0, y2="100%", visibility="hidden"))  # fmt: skip
    picture = tag("svg", *bars, *dots, *shared, role="img", data_begin=begin,
                  data_end=begin + int(whole), aria_label=f"Timeline: {said}", width="100%",
                  height=40 if dots else 24, class_="spans")  # fmt: skip
    ends = tag("div", tag("span", _time(begin), " UTC"), tag("span", _time(begin + whole), " UTC"),
               class_="ends dim")  # fmt: skip
    heading = ("State", "From (UTC)", "For", "Note")
    rows = [
        (span.name, _time(span.since), _dwell(span), span.note) for span in spans
    ]  # fmt: skip
    parts: list[Child] = [picture, ends, _table("States", heading, rows)]
    if marks:
        events = [(mark.kind, _time(mark.at), mark.text) for mark in marks]
        parts.append(_table("Restarts and health", ("Event", "At (UTC)", "Why"), events))
    return join(parts)


def _table(caption: str, heading: Sequence[str], rows: Iterable[Sequence[Child]]) -> Html:
    first = tag("tr", *(tag("th", name, scope="col") for name in heading))
    lines = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    table = tag("table", tag("caption", caption, class_="unseen"), first, *lines)
    return tag("div", table, class_="within", tabindex="0", role="region", aria_label=caption)


def _dwell(span: StateSpan) -> str:
    ms = span.until - span.since
    words = f"{ms} ms" if ms < 1000 else short_duration(ms / 1000)
    return f"{words} so far" if span.is_open else words


def _time(ms: int) -> Html:
    return tag("time", timestamp(ms)[:19].replace("T", " "), datetime=timestamp(ms))
