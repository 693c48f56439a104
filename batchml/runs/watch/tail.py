"""Read the output of one attempt: each line once, and proof that no line is missing."""

from array import array
from collections import Counter

from batchml.aws.logs import LogLine, StreamReader
from batchml.clock import Clock
from batchml.model.logcheck import LogCheck
from batchml.model.polling import PollIntervals
from batchml.runs.watch.events import (
    CUT,
    DAMAGED,
    MARKED,
    PROVEN,
    QUIET,
    SHORT,
    HostAssigned,
    LogClosed,
    LogOpened,
    MetricsReported,
    OutputLine,
    RunEvent,
    UsageReported,
)
from batchml.runs.watch.poller import RetryGate
from batchml.runtime.protocol.log_marks import NEEDED_MEMORY, parse_mark, read_points

# A clock this far from AWS's has its requests refused, so a run that stopped longer ago has.
_MAX_SKEW = 300.0


class Tail:
    """The output of one attempt. Each `step` makes one call."""

    def __init__(
        self,
        reader: StreamReader,
        number: int,
        child: str,
        *,
        clock: Clock,
        pace: PollIntervals,
        gate: RetryGate,
    ) -> None:
        self._reader = reader
        self._number = number
        self._child = child
        self._clock = clock
        self._pace = pace
        self._gate = gate
        self._began = clock.monotonic()
        self._lines = 0
        self._seen = array("q")  # a hash of each event, to recognise it in a second reading
        self._promised: int | None = None
        self._opened = False
        self._quiet_since: float | None = None
        self._over_since: float | None = None
        self._known: Counter[int] = Counter()  # in a reading from the start: events seen before
        self._was_read_again = False
        self._was_read_late = False
        self._check: LogCheck | None = None
        self.missing = ""
        self.caught_up = False
        self.is_closed = False
        self.last_read = float("-inf")  # monotonic

    @property
    def stream(self) -> str:
        return self._reader.stream

    @property
    def has_end_mark(self) -> bool:
        return self._promised is not None

    @property
    def is_overdue(self) -> bool:
        """True when the stream does not exist, long after the attempt has begun."""
        waited = self._clock.monotonic() - self._began
        return bool(self.missing) and waited >= self._pace.no_stream

    def step(self) -> list[RunEvent]:
        """The events of one page."""
        page = self._gate.page(self._reader)
        now = self._clock.monotonic()
        self.last_read = now
        self.missing = page.missing
        self._check = page.check
        self.caught_up = page.caught_up
        if page.lines or not page.caught_up:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        events = [(hash(line), line) for line in page.lines]
        if self._known:
            events = [(event, line) for event, line in events if not self._was_seen(event)]
        if page.caught_up:
            self._known.clear()
        self._seen.extend(event for event, _ in events)
        return self._told([line for _, line in events])

    def _was_seen(self, event: int) -> bool:
        """Whether a second reading from the start returns this event again; equal events count."""
        if self._known[event] <= 0:
            return False
        self._known[event] -= 1
        return True

    def _told(self, lines: list[LogLine]) -> list[RunEvent]:
        """The events of a page of up to ten thousand lines; the usual page takes the short path."""
        found: list[RunEvent] = []
        for timestamp, message in lines:
            mark = parse_mark(message)
            if mark is not None:
                found += self._told_by_mark(*mark)
                continue
            if not self._opened:
                found += self._open()
            self._lines += self._promised is None or message != NEEDED_MEMORY
            found.append(OutputLine(timestamp, message, self._child))
        return found

    def _told_by_mark(self, kind: str, values: dict[str, str]) -> list[RunEvent]:
        if kind == "host":
            return [HostAssigned(values)]
        if kind == "metrics":
            points = tuple(read_points(values["points"]))
            return [MetricsReported(self.stream, points, self._child)] if points else []
        if kind == "usage":
            usage = {name: float(value) for name, value in values.items()}
            return [UsageReported(self.stream, usage, self._child)]
        if kind != "end":  # of ranks, which `show` reads
            return []
        self._promised = int(values["lines"])
        return self._open()

    def _open(self) -> list[RunEvent]:
        if self._opened:
            return []
        self._opened = True
        return [LogOpened(self.stream, self._number, self._child)]

    @property
    def is_whole(self) -> bool:
        """The end mark has come, and as many lines as it counts."""
        return self._promised is not None and self._lines == self._promised

    def try_to_close(self, stopped_at: int | None) -> list[RunEvent]:
        """Close the output of an attempt that has ended, if it is complete or the quiet rule says
        so.

        Call it after a read that began when the end was known.
        """
        if self._check is not None:
            return self.close(self._proof()) if self._check.is_final else []
        now = self._clock.monotonic()
        if self._over_since is None:
            self._over_since = now
            self._quiet_since = now if self._quiet_since is not None else None
        if not self.is_whole:
            if not self.caught_up or not self._is_quiet(now, stopped_at):
                return []
            if self._promised is not None and self._lines < self._promised:
                is_late = self._since_stop(now, stopped_at) >= self._pace.late
                if not self._was_read_again or (is_late and not self._was_read_late):
                    self._was_read_again, self._was_read_late = True, is_late
                    self._start_over()
                    return []
                if not is_late:
                    return []
        return self.close(self._proof())

    def close(self, proof: str = CUT) -> list[RunEvent]:
        self.is_closed = True
        opened = self._open() if proof == DAMAGED else []
        closed = LogClosed(self.stream, self._lines, proof, self._child, self._check)
        return [*opened, closed] if self._opened else []

    def _is_quiet(self, now: float, stopped_at: int | None) -> bool:
        """Two reads `settle` seconds apart brought nothing, and the end was `quiet` seconds ago."""
        if self._quiet_since is None or now - self._quiet_since < self._pace.settle:
            return False
        return self._since_stop(now, stopped_at) >= self._pace.quiet

    def _since_stop(self, now: float, stopped_at: int | None) -> float:
        """Seconds since the end, at least: AWS's clock and this machine's may differ."""
        seen = now - (now if self._over_since is None else self._over_since)
        if stopped_at is None:
            return seen
        return max(seen, self._clock.now() - stopped_at / 1000 - _MAX_SKEW)

    def _start_over(self) -> None:
        """Read everything again, for lines that arrived late with earlier timestamps."""
        self._reader = self._reader.restarted()
        self._known = Counter(self._seen)
        self._quiet_since = None
        self.caught_up = False

    def _proof(self) -> str:
        if self._check is not None and self._check.is_damaged:
            return DAMAGED
        if self._promised is not None and not self.is_whole:
            return SHORT
        if self._check is not None:
            return PROVEN if self._check.is_complete else QUIET
        return QUIET if self._promised is None else MARKED
