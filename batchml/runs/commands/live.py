"""Show a run while it goes on: its output, and on a terminal a status line below it."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TextIO, cast
from urllib.parse import unquote

from batchml.cli.app import why_it_waits
from batchml.cli.output import say, say_lost
from batchml.cli.render import RULE, duration, job_title, output_line, printable, timestamp
from batchml.cli.status_line import HINT, StatusBoard, add_state, status_line
from batchml.cli.terminal import (
    BottomLine,
    StreamAbove,
    is_dumb,
    kind_of,
    paint,
    screen,
    window_width,
)
from batchml.clock import Clock
from batchml.model.names import short_id
from batchml.model.numbering import shown_id
from batchml.model.outcome import describe_outcome
from batchml.model.run import (
    IN_QUEUE,
    JobStatus,
    Run,
    classify,
    describe_state,
    effective_state,
    is_step,
)
from batchml.runs.names import bare_id
from batchml.runs.watch.events import (
    CUT,
    SHORT,
    ContactLost,
    HostAssigned,
    IdlenessReported,
    LogClosed,
    LogOpened,
    MetricsReported,
    OutputLine,
    RunEnded,
    RunEvent,
    RunMessage,
    StatusChanged,
    UsageReported,
)
from batchml.runs.watch.poller import Outages, ReasonReporter
from batchml.runs.watch.progress import RunProgress, waiting_words

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.runs.metrics.series import Metrics


class LogView:
    """Prints lines without colour or cursor movement: to a pipe, a file, a CI log.

    Lines are buffered until `flush`, because many may come at once. `note` prints messages, on
    stderr.
    """

    def __init__(self, clock: Clock, stream: TextIO) -> None:
        self._clock = clock
        self._stream = stream
        self._held: list[str] = []
        self._outages = Outages(clock, say_lost)

    def take(self, event: RunEvent) -> None:
        """Note an event. `line` prints lines of output."""
        if isinstance(event, ContactLost):
            self._outages.lost(event.error)

    def line(self, text: str, child: str = "") -> None:
        self._held.append(f"{child} | {text}\n" if child else f"{text}\n")

    def rule(self) -> None:
        self.line(RULE)

    def note(self, text: str, kind: str = "dim") -> None:
        self.flush()
        say(text)

    def flush(self) -> None:
        if self._held:
            held, self._held = "".join(self._held), []
            self._write(held)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()


class TerminalView(LogView):
    """Prints the lines on a terminal, above a status line."""

    def __init__(self, clock: Clock, metrics: "Metrics", stream: TextIO, *, colour: bool) -> None:
        super().__init__(clock, stream)
        self._colour = colour
        self._seen = RunProgress(clock, metrics)
        self._bottom = BottomLine(stream, self._status, lambda: window_width(stream))

    def take(self, event: RunEvent) -> None:
        self._seen.take(event)

    def _status(self, width: int) -> str:
        now = self._clock.monotonic()
        parts = status_line(self._seen.board(now), now, width)
        return "  ".join(self._paint(part.text, part.kind) for part in parts)

    def _paint(self, text: str, kind: str) -> str:
        return paint(text, kind) if self._colour else text

    def line(self, text: str, child: str = "") -> None:
        whose = self._paint(f"{child} | ", "dim") if child else ""
        self._held.append(f"{whose}{output_line(text, colour=self._colour)}\n")

    def rule(self) -> None:
        self.line(RULE[: window_width(self._stream)])

    def note(self, text: str, kind: str = "dim") -> None:
        self._held.append(self._paint(printable(text), kind) + "\n")

    def _write(self, text: str) -> None:
        self._bottom.print(text)

    def __enter__(self) -> Self:
        self._bottom.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            self._bottom.stop()


def open_view(clock: Clock, metrics: "Metrics", *, to_stderr: bool) -> LogView:
    """The view for stdout, or with `to_stderr` for stderr, if stdout gets a JSON document."""
    if sys.stdout.isatty() and not to_stderr and not is_dumb():
        return TerminalView(clock, metrics, sys.stdout, colour=screen().colour)
    return LogView(clock, sys.stderr if to_stderr else sys.stdout)


def show_live(events: Iterable[RunEvent], view: LogView, *, from_start: bool) -> Run:
    """Show all events of a run; the run at its end.

    `from_start`: the run was just submitted; "is RUNNING" is printed even if it ends before a poll
    returns that state.
    """
    announced = not from_start
    last: JobStatus | None = None
    silent: dict[str, LogOpened] = {}  # children that have printed nothing yet
    hosts: set[str] = set()  # reported hosts of nodes
    idle: set[str] = set()  # reported causes of idleness
    for event in events:
        view.take(event)
        match event:
            case OutputLine(at, text, child):
                if child in silent:
                    _open(view, silent.pop(child))
                view.line(f"[{timestamp(at)}] {text}", child)
                continue
            case MetricsReported() | UsageReported():
                continue
            case StatusChanged(run):
                running = run.status is JobStatus.RUNNING
                too_short = run.status.is_terminal and run.started_at and not announced
                if run.status is not last and (running or too_short):
                    announced = True
                    view.line(f"{job_title(run)} is RUNNING.")
                last = run.status
            case RunMessage(text=text):
                if not is_step(text):
                    view.note(text)
            case IdlenessReported(waits, child):
                words = f"{f'{child} | ' if child else ''}Idle: {waits}"
                if words not in idle:
                    idle.add(words)
                    view.note(printable(words))
            case HostAssigned(how):
                if (words := _describe_host(how)) not in hosts:
                    hosts.add(words)
                    view.note(words)
            case LogOpened(child=child) if child:
                silent[child] = event
            case LogOpened():
                _open(view, event)
            case LogClosed(child=child) if child in silent:
                if not event.is_complete:  # it may have printed something
                    _open(view, silent.pop(child))
                    view.note(_describe_log_end(event))
            case LogClosed():
                if not event.child:
                    view.rule()
                view.note(_describe_log_end(event))
            case RunEnded(run):
                view.line(f"{job_title(run)} {run.status}")
                if run.status is JobStatus.FAILED:
                    kind = kind_of(classify(run).outcome.value)
                    view.note(printable(describe_outcome(run)), kind)
                view.flush()
                return run
        view.flush()
    raise AssertionError("unreachable: a run that is followed to its end has one")


def _open(view: LogView, opened: LogOpened) -> None:
    """Print the heading of an attempt's output.

    The lines of children are mixed, and each begins with its child.
    """
    stream, number, child = opened.stream, opened.number, opened.child
    if child:
        view.line(f"Output [{stream}]:", child)
        return
    if number > 1:
        view.note(f"Attempt {number}:")
    view.line(f"Output [{stream}]:")
    view.rule()


def _describe_host(how: dict[str, str]) -> str:
    if "environment" in how:
        made = f", {unquote(how['made'])}" if "made" in how else ""
        return f"Runs as a process of this machine, in the environment {how['environment']}{made}."
    image = how.get("image", "")
    if how.get("executor") == "docker":
        return f"Runs in a container of the image {image}."
    return f"Runs as a process of this machine, with its own programs, not in the image {image}."


def _describe_log_end(closed: LogClosed) -> str:
    who = f"Log of {closed.child}" if closed.child else "Log"
    count = f"{closed.lines} line{'' if closed.lines == 1 else 's'}"
    if closed.is_complete:
        return f"{who} complete: {count}."
    if closed.check is not None and closed.proof != SHORT:
        return closed.check.describe(closed.child)
    if closed.proof == SHORT:
        return f"{who} INCOMPLETE: {count} arrived, but the run wrote another number."
    if closed.proof == CUT:
        return f"{who} INCOMPLETE: {count} arrived, then the log could not be read."
    return f"{who}: {count}; its end is not marked, so lines may be missing."


# --- Waiting for runs -----------------------------------------------------------------------------


_WHY_AFTER = 30.0  # seconds in a queue before the first message with the reason
_WHY_MOST = 3600.0  # the longest pause between messages, in seconds


class WaitingRuns:
    """The states of runs that a command waits for; `hint`, in the status line, explains Ctrl-C."""

    def __init__(self, clock: Clock, runs: Sequence[Run], hint: str = HINT) -> None:
        self._hint = hint
        self._clock = clock
        self._since = clock.monotonic()
        self._states: tuple[tuple[str, float], ...] = ()
        self._runs: dict[str, Run] = {}
        self.see({run.job_id: run for run in runs})

    def see(self, told: Mapping[str, Run]) -> None:
        """Note the states of these runs; other runs keep their states."""
        self._runs |= told
        if len(self._runs) == 1:
            (run,) = self._runs.values()
            now = self._clock.now(), self._clock.monotonic()
            self._states = add_state(self._states, run, *now)

    def board(self, now: float) -> StatusBoard:
        runs = list(self._runs.values())
        if len(runs) == 1:
            (run,) = runs
            return StatusBoard(
                f"{run.name} {short_id(shown_id(run))}",
                states=self._states,
                children=describe_state(run) if run.children else "",
                text=waiting_words(run, now - self._states[-1][1]),
                hint=self._hint,
            )
        order = [str(each) for each in JobStatus]
        counts = Counter(map(effective_state, runs))
        states = sorted(counts.items(), key=lambda each: -order.index(each[0]))
        return StatusBoard(
            f"{len(runs)} runs",
            states=(("waiting", self._since),),
            children=", ".join(f"{count} {state}" for state, count in states),
            hint=self._hint,
        )


def is_shown() -> bool:
    """True if stdout can show a status line."""
    return sys.stdout.isatty() and not is_dumb()


class WaitingText:
    """Prints on stderr why queued runs wait, if there is no status line.

    The first message comes after half a minute, others ever later.
    """

    def __init__(
        self,
        context: "Context",
        asked: Iterable[str],
        say: Callable[[str], None],
        why: Callable[[str], str] | None = None,
    ) -> None:
        """`asked` are the ids of the runs. `why` returns the reason for one of them."""
        self._why = why or (lambda job_id: why_it_waits(context, job_id))
        self._clock = context.clock
        self._asked = frozenset(asked)
        self._runs: dict[str, Run] = {}
        self._whys = ReasonReporter(
            context.clock, say, self._words, first=_WHY_AFTER, most=_WHY_MOST, repeats=True
        )

    def see(self, told: Mapping[str, Run]) -> None:
        """Note the states of these runs; children and nodes do not count."""
        for job_id, run in told.items():
            whole = bare_id(job_id)
            if job_id in self._asked or job_id == whole:
                # A run that has moved to another queue keeps its key.
                self._runs[(run.key or whole) + job_id[len(whole) :]] = run
        self._whys.see(bool(self._waiting()))

    def _waiting(self) -> list[Run]:
        return [run for run in self._runs.values() if effective_state(run) in IN_QUEUE]

    def _words(self) -> str:
        waiting = self._waiting()
        run, many = waiting[0], len(self._runs)
        after = self._clock.now() - (run.created_at or 0) / 1000
        said = f" after {duration(after)}" if run.created_at else ""
        why = self._why(run.job_id)
        words = f"{run.name} {short_id(shown_id(run))} is {run.status}{said}{why and ': '}{why}"
        return printable(f"{len(waiting)} of {many} runs wait. {words}" if many > 1 else words)


@contextmanager
def status_line_below(waited: WaitingRuns, clock: Clock, is_wanted: bool) -> Iterator[None]:
    """Show a status line below other output, if stdout is a terminal."""
    if not is_wanted or not is_shown():
        yield
        return
    stream, colour = sys.stdout, screen().colour

    def draw(width: int) -> str:
        now = clock.monotonic()
        parts = status_line(waited.board(now), now, width)
        return "  ".join(paint(each.text, each.kind) if colour else each.text for each in parts)

    bottom = BottomLine(stream, draw, lambda: window_width(stream))
    bottom.start()
    sys.stdout = cast("TextIO", StreamAbove(bottom, stream))
    try:
        yield
    finally:
        sys.stdout = stream
        bottom.stop()
