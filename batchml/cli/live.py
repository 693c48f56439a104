"""Show a run as it goes: the classic text, and on a terminal a status line below it."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self, TextIO

from msgspec.structs import replace

from batchml.cli.colour import is_dumb, kind_of, paint, screen, window_width
from batchml.cli.output import say, say_lost
from batchml.cli.render import RULE, job_title, printable, timestamp, verdict
from batchml.clock import Clock
from batchml.model.names import short_id
from batchml.model.run import (
    IN_QUEUE,
    JobStatus,
    Run,
    array_size,
    classify,
    done,
    shown_state,
    state_text,
)
from batchml.ops.watch import (
    CUT,
    SHORT,
    Closed,
    Ended,
    Happening,
    Hosted,
    Line,
    Lost,
    Measured,
    Opened,
    Outages,
    Progress,
    StatusChanged,
    Used,
)

if TYPE_CHECKING:
    from batchml.cli.statusline import Board
    from batchml.ops.metrics import Metrics


_LONG = 10.0  # seconds in the queue after which people ask why
_LOST = 40.0  # seconds: longer than any pause between two tries


class View:
    """Lines without colour or cursor movement: for a pipe, a file, a CI log.

    They come in floods, so they are held back until `flush`. `note` is for what is not output.
    """

    def __init__(self, clock: Clock, stream: TextIO) -> None:
        self._clock = clock
        self._stream = stream
        self._held: list[str] = []
        self._outages = Outages(clock, say_lost)

    def take(self, happening: Happening) -> None:
        """Learn of what happens to the run, as far as that is not said in lines."""
        if isinstance(happening, Lost):
            self._outages.lost(happening.error)

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


class TerminalView(View):
    """The same lines above a status line that stays at the bottom."""

    def __init__(self, clock: Clock, metrics: "Metrics", stream: TextIO, *, colour: bool) -> None:
        from batchml.cli.bottom import Bottom

        super().__init__(clock, stream)
        self._colour = colour
        self._seen = Seen(clock, metrics)
        self._bottom = Bottom(stream, self._status, lambda: window_width(stream))

    def take(self, happening: Happening) -> None:
        self._seen.take(happening)

    def _status(self, width: int) -> str:
        from batchml.cli.statusline import status_line

        now = self._clock.monotonic()
        shown = status_line(self._seen.board(now), now, width)
        return "  ".join(self._paint(part.text, part.kind) for part in shown)

    def _paint(self, text: str, kind: str) -> str:
        return paint(text, kind) if self._colour else text

    def line(self, text: str, child: str = "") -> None:
        whose = self._paint(f"{child} | ", "dim") if child else ""
        self._held.append(f"{whose}{printable(text)}\n")

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


def open_view(clock: Clock, metrics: "Metrics", *, to_stderr: bool) -> View:
    """The view for where the output goes; `to_stderr` keeps stdout for a JSON document."""
    if sys.stdout.isatty() and not to_stderr and not is_dumb():
        return TerminalView(clock, metrics, sys.stdout, colour=screen().colour)
    return View(clock, sys.stderr if to_stderr else sys.stdout)


def waiting_words(run: Run, seconds: float) -> str:
    """What a run waits for, as far as it says so itself; else, after a while, how to ask."""
    if shown_state(run) not in IN_QUEUE:
        return ""
    if run.status is JobStatus.PENDING and run.depends_on and not run.children:
        return "after " + ", ".join(map(short_id, run.depends_on))
    return f"why: batchml explain {short_id(run.job_id)}" if seconds >= _LONG else ""


class Seen:
    """What has been seen of a run, as far as its status line needs it.

    `metrics` is what reads the happenings on their way here.
    """

    def __init__(self, clock: Clock, metrics: "Metrics") -> None:
        from batchml.ops.progress import Course

        self._clock = clock
        self._metrics = metrics
        self._course = Course()
        self._line_at = 0.0  # when the last line was written, by its own time
        self._line_seen = 0.0  # and by our clock when it was seen
        self._run: Run | None = None
        self._states: tuple[tuple[str, float], ...] = ()
        self._text = ""
        self._lost = "", 0.0  # the error, and until when it is shown
        self._usage: dict[str, float] = {}

    def _see(self, run: Run) -> None:
        from batchml.cli.statusline import entered

        self._run = run
        self._text = ""
        self._states = entered(self._states, run, self._clock.now(), self._clock.monotonic())

    def _words(self, now: float) -> str:
        error, until = self._lost
        if now < until:
            return printable(f"no contact: {error}")
        if self._run is None or self._text:
            return printable(self._text)
        return waiting_words(self._run, now - self._states[-1][1])

    def take(self, happening: Happening) -> None:
        """Learn of anything. Of many children, none stands for the run."""
        from batchml.ops.progress import Course

        match happening:
            case Line(at, text, child):
                self._lost = "", 0.0
                if not child:
                    self._text = ""
                    self._reached(at / 1000)
                    self._course.feed(text, at / 1000)
            case StatusChanged(run):
                self._see(run)
            case Progress(text=text):
                self._text = text
            case Lost(error):
                # Each try that fails says so; who has not heard of one for a while has contact.
                self._lost = error, self._clock.monotonic() + _LOST
            case Opened(number=number, child="") if number > 1:
                self._course, self._usage = Course(), {}
            case Measured(points=points, child=""):
                for point in points:
                    self._take_point(point)
            case Used(usage=usage, child=""):
                self._usage = usage

    def _take_point(self, point: dict[str, float]) -> None:
        step, total, at = (point.get(name) for name in ("step", "total", "time"))
        if step is not None and total and total > 0 and at is not None:
            self._reached(at)
            self._course.report(step, total, at)

    def _reached(self, at: float) -> None:
        self._line_at, self._line_seen = at, self._clock.monotonic()

    def board(self, now: float) -> "Board":
        """All that there is to show, at a moment of the clock."""
        from batchml.cli.statusline import Board, Curve

        run = self._run
        if run is None:
            return Board("submitted", text=self._words(now))
        board = Board(
            f"{run.name} {short_id(run.job_id)}",
            states=self._states,
            text=self._words(now),
            children=state_text(run) if run.children else "",
            usage=self._usage,
        )
        if run.children:
            return replace(board, fraction=done(run) / (array_size(run) or 1))
        if run.status is JobStatus.RUNNING:
            left = self._course.left(self._line_at + now - self._line_seen)
            board = replace(board, fraction=self._course.fraction, left=left)
        shown = self._metrics.first()
        return replace(board, curve=Curve(*shown)) if shown else board


def show(happenings: Iterable[Happening], view: View, *, from_start: bool) -> Run:
    """Show everything that happens to a run and return it as it ended.

    `from_start` says that the run was submitted just now: one that is too short to be seen running
    is announced all the same.
    """
    announced = not from_start
    last: JobStatus | None = None
    silent: dict[str, Opened] = {}  # children that have printed nothing yet
    hosts: set[str] = set()  # what was said of what nodes run in
    for happening in happenings:
        view.take(happening)
        match happening:
            case Line(at, text, child):
                if child in silent:
                    _open(view, silent.pop(child))
                view.line(f"[{timestamp(at)}] {text}", child)
                continue
            case Measured() | Used():
                continue
            case StatusChanged(run):
                running = run.status is JobStatus.RUNNING
                too_short = run.status.is_terminal and run.started_at and not announced
                if run.status is not last and (running or too_short):
                    announced = True
                    view.line(f"{job_title(run)} is RUNNING.")
                last = run.status
            case Progress(text=text):
                view.note(text)
            case Hosted(how):
                if (words := _host(how)) not in hosts:
                    hosts.add(words)
                    view.note(words)
            case Opened(child=child) if child:
                silent[child] = happening
            case Opened():
                _open(view, happening)
            case Closed(child=child) if child in silent:
                if not happening.is_complete:  # it may have printed something
                    _open(view, silent.pop(child))
                    view.note(_proof(happening))
            case Closed():
                if not happening.child:
                    view.rule()
                view.note(_proof(happening))
            case Ended(run):
                view.line(f"{job_title(run)} {run.status}")
                if run.status is JobStatus.FAILED:
                    view.note(verdict(run), kind_of(classify(run).outcome.value))
                view.flush()
                return run
        view.flush()
    raise AssertionError("unreachable: a run that is followed to its end has one")


def _open(view: View, opened: Opened) -> None:
    """A block for a run's own output. Lines of children come mixed: each names its child.

    A child that prints nothing has none.
    """
    stream, number, child = opened.stream, opened.number, opened.child
    if child:
        view.line(f"Output [{stream}]:", child)
        return
    if number > 1:
        view.note(f"Attempt {number}:")
    view.line(f"Output [{stream}]:")
    view.rule()


def _host(how: dict[str, str]) -> str:
    if "environment" in how:
        return f"Runs as a process of this machine, in the environment {how['environment']}."
    image = how.get("image", "")
    if how.get("executor") == "docker":
        return f"Runs in a container of the image {image}."
    return f"Runs as a process of this machine, with its own programs, not in the image {image}."


def _proof(closed: Closed) -> str:
    who = f"Log of {closed.child}" if closed.child else "Log"
    count = f"{closed.lines} line{'' if closed.lines == 1 else 's'}"
    if closed.is_complete:
        return f"{who} complete: {count}."
    if closed.check is not None and closed.proof != SHORT:
        return closed.check.describe(closed.child)
    if closed.proof == SHORT:
        return f"{who} INCOMPLETE: {count} arrived, and the run counted another number."
    if closed.proof == CUT:
        return f"{who} INCOMPLETE: {count} arrived before it could be read no more."
    return f"{who}: {count}; its end is not marked, so nothing proves that this is all."
