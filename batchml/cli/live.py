"""Show a run as it goes: the classic text, and on a terminal a status line below it."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from batchml.cli.output import say
from batchml.cli.render import RULE, duration, job_title, printable, timestamp, verdict
from batchml.clock import Clock
from batchml.model.names import short_id
from batchml.model.run import Run
from batchml.model.status import JobStatus
from batchml.ops.watch import (
    KEPT,
    MARKED,
    SHORT,
    Closed,
    Ended,
    Happening,
    Hosted,
    Line,
    Lost,
    Opened,
    Progress,
    StatusChanged,
)

if TYPE_CHECKING:
    from rich.text import Text


class View(Protocol):
    """Where lines go. `note` is for what is not output."""

    def line(self, text: str) -> None: ...
    def rule(self) -> None: ...
    def note(self, text: str) -> None: ...
    def status(self, text: str) -> None: ...


class PlainView:
    """No colour, no cursor movement: a pipe, a file, a CI log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def rule(self) -> None:
        self.line(RULE)

    def note(self, text: str) -> None:
        say(text)

    def status(self, text: str) -> None:
        pass


class TerminalView:
    """The same lines above a status line that stays at the bottom."""

    def __init__(self, clock: Clock) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._text = Text
        self._clock = clock
        self._since = clock.monotonic()
        self._status = "submitted"
        self._console = Console(highlight=False, soft_wrap=True)
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=4,
            transient=True,
        )

    def _render(self) -> "Text":
        passed = duration(self._clock.monotonic() - self._since)
        text = self._text(f"{self._status}  {passed}  ", style="bold", no_wrap=True)
        text.append("Ctrl-C detaches", style="dim")
        text.truncate(self._console.width, overflow="ellipsis")
        return text

    def line(self, text: str) -> None:
        self._console.print(self._text(printable(text)))

    def rule(self) -> None:
        self.line(RULE[: self._console.width])

    def note(self, text: str) -> None:
        self._console.print(self._text(printable(text), style="dim"))

    def status(self, text: str) -> None:
        self._status = text

    def __enter__(self) -> "TerminalView":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


@contextmanager
def open_view(clock: Clock, *, to_stderr: bool) -> Iterator[View]:
    """The view for where the output goes; `to_stderr` keeps stdout for a JSON document."""
    if sys.stdout.isatty() and not to_stderr:
        with TerminalView(clock) as view:
            yield view
    else:
        yield PlainView(sys.stderr if to_stderr else sys.stdout)


def show(happenings: Iterable[Happening], view: View, *, from_start: bool) -> Run:
    """Show everything that happens to a run and return it as it ended.

    `from_start` says that the run was submitted just now: one that is too short to be seen running
    is announced all the same.
    """
    announced = not from_start
    for happening in happenings:
        match happening:
            case StatusChanged(run):
                view.status(f"{run.name} {short_id(run.job_id)} {run.status}")
                running = run.status is JobStatus.RUNNING
                if running or (run.status.is_terminal and run.started_at and not announced):
                    announced = True
                    view.line(f"{job_title(run)} is RUNNING.")
            case Progress(run, text):
                view.status(f"{run.name} {short_id(run.job_id)} {run.status}: {text}")
                view.note(text)
            case Hosted(how):
                view.note(_host(how))
            case Opened(stream, number):
                if number > 1:
                    view.note(f"Attempt {number}:")
                view.line(f"Output [{stream}]:")
                view.rule()
            case Line(at, text):
                view.line(f"[{timestamp(at)}] {text}")
            case Closed():
                view.rule()
                view.note(_proof(happening))
            case Lost(error):
                view.status(f"no contact: {error}")
            case Ended(run):
                view.line(f"{job_title(run)} {run.status}")
                if run.status is JobStatus.FAILED:
                    view.note(verdict(run))
                return run
    raise AssertionError("unreachable: a run that is followed to its end has one")


def _host(how: dict[str, str]) -> str:
    if "environment" in how:
        return f"Runs as a process of this machine, in the environment {how['environment']}."
    image = how.get("image", "")
    if how.get("executor") == "docker":
        return f"Runs in a container of the image {image}."
    return f"Runs as a process of this machine, with its own programs, not in the image {image}."


def _proof(closed: Closed) -> str:
    count = f"{closed.lines} line{'' if closed.lines == 1 else 's'}"
    if closed.proof in (MARKED, KEPT):
        return f"Log complete: {count}."
    if closed.proof == SHORT:
        return f"Log INCOMPLETE: {count} arrived, and the run counted another number."
    return f"Log: {count}; its end is not marked, so nothing proves that this is all."
