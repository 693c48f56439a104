"""The progress of a run as its events show it: states, time left, metric, use of resources."""

from msgspec.structs import replace

from batchml.cli.render import printable
from batchml.cli.status_line import Curve, StatusBoard, add_state
from batchml.clock import Clock
from batchml.model.names import short_id
from batchml.model.numbering import shown_id
from batchml.model.run import (
    IN_QUEUE,
    JobStatus,
    Run,
    array_size,
    count_ended,
    describe_state,
    effective_state,
    is_step,
)
from batchml.runs.metrics.series import Metrics, ProgressTrend
from batchml.runs.watch.events import (
    ContactLost,
    LogOpened,
    MetricsReported,
    OutputLine,
    RunEvent,
    RunMessage,
    StatusChanged,
    UsageReported,
)

_HINT_AFTER = 10.0  # seconds in the queue after which the status line names `explain`
_LOST_SHOWN = 40.0  # seconds for which a lost contact is shown; calls are repeated sooner


def waiting_words(run: Run, seconds: float) -> str:
    """Why a run waits, if the run says so; after a while, the command that explains it; else ""."""
    if effective_state(run) not in IN_QUEUE:
        return ""
    if run.status is JobStatus.PENDING and run.depends_on and not run.children:
        return "after " + ", ".join(map(short_id, run.depends_on))
    return f"why: batchml explain {short_id(shown_id(run))}" if seconds >= _HINT_AFTER else ""


class RunProgress:
    """Collects what the status line shows of a run. `metrics` must read each event before."""

    def __init__(self, clock: Clock, metrics: Metrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._trend = ProgressTrend()
        self._line_at = 0.0  # the time in the last line
        self._line_seen = 0.0  # the time when it was read, on the monotonic clock
        self._run: Run | None = None
        self._states: tuple[tuple[str, float], ...] = ()
        self._text = ""
        self._lost = "", 0.0  # the error, and the time until which it is shown
        self._usage: dict[str, float] = {}

    def _see(self, run: Run) -> None:
        self._run = run
        self._text = ""
        self._states = add_state(self._states, run, self._clock.now(), self._clock.monotonic())

    def _words(self, now: float) -> str:
        error, until = self._lost
        if now < until:
            return printable(f"no contact: {error}")
        if self._run is None or self._text:
            return printable(self._text)
        return waiting_words(self._run, now - self._states[-1][1])

    def take(self, event: RunEvent) -> None:
        """Note an event. Metrics and usage of single children are not shown."""
        match event:
            case OutputLine(at, text, child):
                self._lost = "", 0.0
                if not child:
                    self._text = ""
                    self._reached(at / 1000)
                    self._trend.feed(text, at / 1000)
            case StatusChanged(run):
                self._see(run)
            case RunMessage(text=text):
                # The window has room for the step, rather than for the environment's name.
                self._text = text.partition(": ")[2] if is_step(text) else text
            case ContactLost(error):
                # Each failed call yields an event: without an event there is contact again.
                self._lost = error, self._clock.monotonic() + _LOST_SHOWN
            case LogOpened(number=number, child="") if number > 1:
                self._trend, self._usage = ProgressTrend(), {}
            case MetricsReported(points=points, child=""):
                for point in points:
                    self._take_point(point)
            case UsageReported(usage=usage, child=""):
                self._usage = usage

    def _take_point(self, point: dict[str, float]) -> None:
        step, total, at = (point.get(name) for name in ("step", "total", "time"))
        if step is not None and total and total > 0 and at is not None:
            self._reached(at)
            self._trend.report(step, total, at)

    def _reached(self, at: float) -> None:
        self._line_at, self._line_seen = at, self._clock.monotonic()

    def board(self, now: float) -> StatusBoard:
        """The content of the status line at the monotonic time `now`."""
        run = self._run
        if run is None:
            return StatusBoard("submitted", text=self._words(now))
        board = StatusBoard(
            f"{run.name} {short_id(shown_id(run))}",
            states=self._states,
            text=self._words(now),
            children=describe_state(run) if run.children else "",
            usage=self._usage,
        )
        if run.children:
            return replace(board, fraction=count_ended(run) / (array_size(run) or 1))
        if run.status is JobStatus.RUNNING:
            left = self._trend.left(self._line_at + now - self._line_seen)
            board = replace(board, fraction=self._trend.fraction, left=left)
        first = self._metrics.first()
        return replace(board, curve=first and Curve(first.name, first.values, first.breaks))
