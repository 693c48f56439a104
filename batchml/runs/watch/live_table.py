"""A run as a table of a notebook that is kept current until the run has ended."""

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from html import escape
from importlib import import_module
from typing import Any

from batchml.cli.render import duration
from batchml.cli.status_line import usage_text
from batchml.cli.terminal import sparkline
from batchml.clock import Clock
from batchml.errors import BatchmlError
from batchml.model.outcome import describe_outcome
from batchml.model.run import JobStatus, Run
from batchml.runs.metrics.series import Metrics
from batchml.runs.watch.events import (
    OutputLine,
    PollingPaused,
    RunEnded,
    RunEvent,
    StatusChanged,
)
from batchml.runs.watch.progress import RunProgress

Display = Callable[..., Any]  # IPython.display.display

_LINES = 3  # last lines of the output
_CURVE_WIDTH = 16  # characters
_MAX_METRICS = 12


class LiveTable:
    """The rows of the table. `patterns` is `[metrics]` of job.toml."""

    def __init__(self, clock: Clock, patterns: Mapping[str, str] = {}) -> None:
        self._clock = clock
        self.metrics = Metrics(patterns)
        self._progress = RunProgress(clock, self.metrics)
        self._run: Run | None = None
        self._lines: list[str] = []
        self._error = ""

    def take(self, event: RunEvent) -> None:
        """Note an event, which `metrics` has read."""
        self._progress.take(event)
        if isinstance(event, StatusChanged | RunEnded):
            self._run = event.run
        elif isinstance(event, OutputLine):
            whose = f"{event.child} | " if event.child else ""
            self._lines = [*self._lines, f"{whose}{event.text}"][-_LINES:]

    def fail(self, error: BaseException) -> None:
        """Note that the run can no longer be watched."""
        self._error = str(error)

    def rows(self) -> list[tuple[str, str]]:
        """Label and text of each row that has something to show."""
        now = self._clock.monotonic()
        board, run = self._progress.board(now), self._run
        found = [("Run", board.title), ("Status", self._status(board.states, now))]
        if board.children:
            found.append(("Children", board.children))
        elif board.fraction is not None:
            left = "" if board.left is None else f", ~{duration(board.left)} left"
            found.append(("Done", f"{board.fraction:.0%}{left}"))
        for name, series in list(self.metrics.series.items())[:_MAX_METRICS]:
            values = [sample.value for sample in series.samples]
            found.append((name, f"{values[-1]:.4g} {sparkline(values[-200:], _CURVE_WIDTH)}"))
        if board.usage:
            found.append(("Use", usage_text(board.usage)))
        if run is not None and run.status is JobStatus.FAILED:
            found.append(("Why", describe_outcome(run)))
        elif board.text:
            found.append(("Note", board.text))
        if self._error:
            found.append(("Note", self._error))
        if self._lines:
            found.append(("Output", "\n".join(self._lines)))
        return found

    def _status(self, states: tuple[tuple[str, float], ...], now: float) -> str:
        """`RUNNABLE 0:02 · RUNNING 0:42`; the last state of an ended run has no duration."""
        if not states:
            return "submitted"
        ends = [*(began for _, began in states[1:]), now]
        is_over = self._run is not None and self._run.status.is_terminal
        shown = [
            name if is_over and number == len(states) else f"{name} {duration(end - began)}"
            for number, ((name, began), end) in enumerate(zip(states, ends, strict=True), 1)
        ]
        return " \u00b7 ".join(shown)

    def to_html(self) -> str:
        """The table. All texts are escaped: the program of the run chose some of them."""
        cells = "".join(
            f'<tr><th style="text-align:left;vertical-align:top">{escape(label)}</th>'
            f'<td style="text-align:left"><pre style="margin:0">{escape(text)}</pre></td></tr>'
            for label, text in self.rows()
        )
        return f"<table>{cells}</table>"


def kernel_display() -> Display | None:
    """`display` of IPython if this process is the kernel of a notebook, else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if getattr(shell, "kernel", None) is None:
        return None
    display: Display = import_module("IPython.display").display
    return display


def show_live_table(
    events: Iterable[RunEvent], table: LiveTable, display: Display, text: str,
    final: Callable[[], str] | None = None,
) -> threading.Thread:  # fmt: skip
    """Show the table, and keep it current from a thread until the last of `events`.

    `text` is for front ends without HTML. `final` makes what takes the place of the table then.
    The thread, which is returned, ends with the run.
    """

    html = table.to_html()
    shown = display({"text/html": html, "text/plain": text}, raw=True, display_id=True)

    def update() -> None:
        nonlocal html
        if html != (html := table.to_html()):
            shown.update({"text/html": html, "text/plain": text}, raw=True)

    def keep_current() -> None:
        try:
            for event in table.metrics.watch(events):
                table.take(event)
                if isinstance(event, StatusChanged | PollingPaused):
                    update()
        except (BatchmlError, OSError) as error:
            table.fail(error)
        else:
            if final is not None:
                shown.update({"text/html": final(), "text/plain": text}, raw=True)
                return
        update()

    thread = threading.Thread(target=keep_current, name="batchml-live-table", daemon=True)
    thread.start()
    return thread
