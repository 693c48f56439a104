"""Read the output of the jobs of a run: the run itself, the children of an array, or nodes."""

from array import array
from collections import Counter
from collections.abc import Callable
from itertools import islice

from batchml.aws.logs import LogLine, LogPage, StreamReader
from batchml.clock import Clock
from batchml.context import PollIntervals
from batchml.model.logcheck import LogCheck
from batchml.model.run import Attempt, JobStatus, Run
from batchml.runs.watch.events import (
    CUT,
    DAMAGED,
    MARKED,
    PROVEN,
    QUIET,
    SHORT,
    HostAssigned,
    IdlenessReported,
    LogClosed,
    LogOpened,
    MetricsReported,
    OutputLine,
    RunEvent,
    RunMessage,
    UsageReported,
)
from batchml.runs.watch.poller import LogGate
from batchml.runtime.protocol.log_marks import NEEDED_MEMORY, parse_mark, read_points

# --- The output of one attempt: each line once, and proof that no line is missing -----------------


# Seconds between this machine's clock and AWS's, at most: AWS refuses requests with another time.
_MAX_SKEW = 300.0


class Tail:
    """The output of one attempt. Each `step` makes one call.

    `number` counts attempts from 1; `child` is the name of the part in the events.
    """

    def __init__(
        self,
        reader: StreamReader,
        number: int,
        child: str,
        *,
        clock: Clock,
        pace: PollIntervals,
        gate: LogGate,
    ) -> None:
        self._reader = reader
        self._number = number
        self._child = child
        self._clock = clock
        self._pace = pace
        self._gate = gate
        self._began = clock.monotonic()
        self._lines = 0
        self._seen = array("q")  # a hash of each line, to recognise it when the log is read again
        self._promised: int | None = None
        self._opened = False
        self._quiet_since: float | None = None
        self._end_seen_at: float | None = None
        self._known: Counter[int] = Counter()  # hashes of lines to skip when the log is read again
        self._was_read_again = False
        self._was_read_late = False
        self._check: LogCheck | None = None
        self.missing = ""
        self.caught_up = False
        self.is_closed = False
        self.last_read = float("-inf")  # monotonic
        self.is_read_alone = False  # also if it was read together with others, but not whole

    @property
    def stream(self) -> str:
        return self._reader.stream

    @property
    def has_end_mark(self) -> bool:
        return self._promised is not None

    @property
    def is_overdue(self) -> bool:
        """True if the log stream does not exist, although the attempt began some time ago."""
        waited = self._clock.monotonic() - self._began
        return bool(self.missing) and waited >= self._pace.stream_report_after

    @property
    def reader(self) -> StreamReader:
        return self._reader

    def step(self) -> list[RunEvent]:
        """Read one page; its events."""
        self.is_read_alone = True
        return self.take(self._gate.page(self._reader))

    def take(self, page: LogPage) -> list[RunEvent]:
        """The events of a page."""
        now = self._clock.monotonic()
        self.last_read = now
        self.missing = page.missing
        self._check = page.check
        self.caught_up = page.caught_up
        if page.lines or not page.caught_up:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        lines = [(hash(line), line) for line in page.lines]
        if self._known:
            lines = [(digest, line) for digest, line in lines if not self._was_seen(digest)]
        if page.caught_up:
            self._known.clear()
        self._seen.extend(digest for digest, _ in lines)
        return self._to_events([line for _, line in lines])

    def _was_seen(self, digest: int) -> bool:
        """True if a line was read before the log was read again; equal lines are counted."""
        if self._known[digest] <= 0:
            return False
        self._known[digest] -= 1
        return True

    def _to_events(self, lines: list[LogLine]) -> list[RunEvent]:
        """The events of the lines of a page, of which there may be ten thousand."""
        found: list[RunEvent] = []
        for timestamp, message in lines:
            mark = parse_mark(message)
            if mark is not None:
                found += self._read_mark(*mark)
                continue
            if not self._opened:
                found += self._open()
            self._lines += self._promised is None or message != NEEDED_MEMORY
            found.append(OutputLine(timestamp, message, self._child))
        return found

    def _read_mark(self, kind: str, values: dict[str, str]) -> list[RunEvent]:
        if kind == "host":
            return [HostAssigned(values)]
        if kind == "metrics":
            points = tuple(read_points(values["points"]))
            return [MetricsReported(self.stream, points, self._child)] if points else []
        if kind == "usage":
            usage = {name: float(value) for name, value in values.items()}
            return [UsageReported(self.stream, usage, self._child)]
        if kind == "idle":
            return [IdlenessReported(values["waits"], self._child)]
        if kind != "end":  # the marks of ranks are for `show`
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
        """True if the end mark was read, and as many lines as it counts."""
        return self._promised is not None and self._lines == self._promised

    def try_to_close(self, stopped_at: int | None) -> list[RunEvent]:
        """Close the output of an attempt that has ended, if it is complete or no more lines come.

        Call this method after a read that began when the end of the attempt was known.
        """
        if self._check is not None:
            return self.close(self._proof()) if self._check.is_final else []
        now = self._clock.monotonic()
        if self._end_seen_at is None:
            self._end_seen_at = now
            self._quiet_since = now if self._quiet_since is not None else None
        if not self.is_whole:
            if not self.caught_up or not self._is_quiet(now, stopped_at):
                return []
            if self._promised is not None and self._lines < self._promised:
                is_late = self._since_stop(now, stopped_at) >= self._pace.end_mark_wait
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
        """True `quiet` seconds after the end, if nothing new came for `settle` seconds."""
        if self._quiet_since is None or now - self._quiet_since < self._pace.settle:
            return False
        return self._since_stop(now, stopped_at) >= self._pace.quiet

    def _since_stop(self, now: float, stopped_at: int | None) -> float:
        """Seconds since the end at least, as the clocks of AWS and of this machine may differ."""
        seen = now - (now if self._end_seen_at is None else self._end_seen_at)
        if stopped_at is None:
            return seen
        return max(seen, self._clock.now() - stopped_at / 1000 - _MAX_SKEW)

    def _start_over(self) -> None:
        """Read the log again from its start, for late lines with earlier timestamps."""
        self._reader = self._reader.restart()
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


def is_whole_log(page: LogPage) -> bool:
    """Whether a page from the start of a log is the whole log: it has as many lines as the log's
    end mark counts, or as the embedded server has found in the complete log.
    """
    lines, promised, shown = 0, None, 0
    for _, message in page.lines:
        mark = parse_mark(message)
        if mark is None:
            shown += 1
            lines += promised is None or message != NEEDED_MEMORY
        elif mark[0] == "end":
            promised = int(mark[1]["lines"])
    if page.check is not None:
        return page.check.is_complete is True and shown == page.check.lines
    return lines == promised


# --- The output of one job ------------------------------------------------------------------------


OpenLog = Callable[[Run, str], StreamReader]


def describe_missing_log(run: Run, stream: str, missing: str, *, is_over: bool) -> str:
    """The message for an attempt without a log. `missing` is "group" or "stream"."""
    if missing == "group":
        return f"No output: the log group {run.log_group} does not exist in this region."
    if not is_over:
        return f"No output yet: the log stream {stream} does not exist."
    return (
        f"No output: the log stream {stream} does not exist. The retention time of the log group "
        f"{run.log_group} may be over."
    )


class WatchedJob:
    """One job whose attempts are read one after the other."""

    def __init__(
        self,
        number: int | None,
        open_log: OpenLog,
        *,
        clock: Clock,
        pace: PollIntervals,
        gate: LogGate,
    ) -> None:
        """`number` is the number of a child or node; None for the run itself."""
        self.number = number or 0
        self.child = "" if number is None else str(number)
        self.run: Run | None = None
        self._open_log = open_log
        self._clock = clock
        self._pace = pace
        self._gate = gate
        self._tails: dict[str, Tail] = {}
        self._reported: set[str] = set()  # missing streams that were reported
        self._given_up = False

    def update(self, run: Run) -> None:
        self.run = run

    @property
    def has_ended(self) -> bool:
        return self.run is not None and self.run.status.is_terminal

    @property
    def is_done(self) -> bool:
        """True if the job has ended, and its output was read."""
        return self.has_ended and self.current() is None

    @property
    def may_have_ended(self) -> bool:
        """True if the log has an end mark, but the last known state is not final."""
        found = self.current()
        return found is not None and found[0].has_end_mark and not self.has_ended

    def current(self) -> tuple[Tail, Attempt] | None:
        """The attempt whose output is read next."""
        if self.run is None or self._given_up:
            return None
        for number, attempt in enumerate(self.run.attempts, start=1):
            starting = self.run.status is JobStatus.STARTING and attempt.stopped_at is None
            if not attempt.log_stream or starting:
                continue
            tail = self._tails.get(attempt.log_stream)
            if tail is None:
                tail = self._tails[attempt.log_stream] = self._tail(attempt.log_stream, number)
            if not tail.is_closed:
                return tail, attempt
        return None

    def _tail(self, stream: str, number: int) -> Tail:
        assert self.run is not None
        return Tail(
            self._open_log(self.run, stream),
            number,
            f"{self.child}/{number}" if self.child and number > 1 else self.child,
            clock=self._clock,
            pace=self._pace,
            gate=self._gate,
        )

    @property
    def last_read(self) -> float:
        found = self.current()
        return found[0].last_read if found else float("-inf")

    @property
    def is_caught_up(self) -> bool:
        """True if the last read reached the end of the log."""
        found = self.current()
        return found is not None and found[0].caught_up

    def read(self) -> list[RunEvent]:
        """Read one page of the current attempt; close the attempt when its output is complete."""
        found = self.current()
        if found is None:
            return []
        return self._close_if_over(*found, found[0].step())

    def unread(self) -> StreamReader | None:
        """The reader of the current attempt, if this job has ended and the log was not read."""
        found = self.current()
        if found is None or not self.has_ended or found[0].is_read_alone:
            return None
        return found[0].reader

    def take_whole(self, page: LogPage | None) -> list[RunEvent]:
        """Take the page of a log that was read together with others, if it is the whole log. Else
        the log is read alone, from its start.
        """
        found = self.current()
        if found is None:
            return []
        found[0].is_read_alone = True
        if page is None or not is_whole_log(page):
            return []
        return self._close_if_over(*found, found[0].take(page))

    def _close_if_over(
        self, tail: Tail, attempt: Attempt, events: list[RunEvent]
    ) -> list[RunEvent]:
        stopped_at = self._stopped_at(attempt)
        if stopped_at is not None or self.has_ended:
            events += tail.try_to_close(stopped_at)
        if tail.missing and (tail.is_closed or tail.is_overdue):
            events += self._note_missing(tail, attempt)
        return events

    def _stopped_at(self, attempt: Attempt) -> int | None:
        """The time when the attempt ended, in ms; None while it goes on."""
        assert self.run is not None
        if attempt.stopped_at is not None:
            return attempt.stopped_at
        return self.run.stopped_at if self.run.status.is_terminal else None

    def _note_missing(self, tail: Tail, attempt: Attempt) -> list[RunEvent]:
        assert self.run is not None
        if tail.stream in self._reported or (tail.is_closed and not attempt.started_at):
            return []
        self._reported.add(tail.stream)
        where = f"[{self.child}] " if self.child else ""
        text = describe_missing_log(self.run, tail.stream, tail.missing, is_over=tail.is_closed)
        return [RunMessage(self.run, where + text)]

    def give_up(self) -> list[RunEvent]:
        """Stop reading this job's output."""
        self._given_up = True
        cut = [tail.close() for tail in self._tails.values() if not tail.is_closed]
        return [event for each in cut for event in each]


# --- Which children of an array, or nodes, are described next -------------------------------------


_LEAST_UNKNOWN = 20  # parts that may have begun, in one round
_MAX_ALL = 99  # parts that are all described in one call, together with the run
_BEGUN = (JobStatus.STARTING, JobStatus.RUNNING, JobStatus.SUCCEEDED, JobStatus.FAILED)


class PartSchedule:
    """Chooses the children of an array (`ID:3`) or nodes (`ID#3`) that are described next.

    Their ids follow from their numbers, so no call lists them. While few have not ended, all are
    described. Of many, those that are running; and while the array counts more started children
    than are known, the first of the others, or once a quarter of these has not begun, all in turn.
    """

    def __init__(self, parent: Run) -> None:
        self.is_array = parent.array_size > 0
        self.size = parent.array_size or parent.nodes
        self._parent_id = parent.job_id
        # Number of a running part -> the round in which it was last described
        self._polled_in_round: dict[int, int] = {}
        self._round = 0
        self._ended: set[int] = set()
        self._times_missing: dict[int, int] = {}  # rounds in a row
        self._next_turn = 0
        self._is_in_order = True  # the parts begin in the order of their numbers
        self._expected = self._found = 0  # parts to find at the last choice, and those found

    def job_id(self, number: int) -> str:
        return f"{self._parent_id}{':' if self.is_array else '#'}{number}"

    def number(self, job_id: str) -> int:
        return int(job_id[len(self._parent_id) + 1 :])

    @property
    def all_ended(self) -> bool:
        return len(self._ended) == self.size

    def update(self, number: int, run: Run) -> None:
        self._times_missing.pop(number, None)
        was_known = number in self._ended or self._polled_in_round.pop(number, None) is not None
        self._found += run.status in _BEGUN and not was_known
        if run.status.is_terminal:
            self._ended.add(number)
        elif run.status in _BEGUN:
            self._polled_in_round[number] = self._round

    def note_missing(self, number: int, parent: Run) -> None:
        """Note that AWS Batch does not return a part. After its parent's end it never existed."""
        self._times_missing[number] = self._times_missing.get(number, 0) + 1
        if parent.status.is_terminal and self._times_missing[number] >= 2:
            self.drop(number)

    def drop(self, number: int) -> None:
        """Do not describe a part any more."""
        self._polled_in_round.pop(number, None)
        self._ended.add(number)

    def choose(self, parent: Run, most: int) -> list[int]:
        """The parts to describe next; at most `most`, a multiple of a hundred."""
        if not self._has_begun(parent):
            return []
        self._round += 1
        if self.size - len(self._ended) <= _MAX_ALL:
            return [number for number in range(self.size) if number not in self._ended]
        by_age = sorted(
            self._polled_in_round, key=lambda number: (self._polled_in_round[number], number)
        )
        chosen = by_age[: most // 2]
        unseen = self._count_unseen(parent)
        if unseen > 0:
            count = most - len(chosen)
            self._is_in_order &= self._found >= self._expected * 3 / 4
            if self._is_in_order:
                self._next_turn, count = 0, min(count, max(2 * unseen, _LEAST_UNKNOWN))
            chosen += self._next_unknown(count)
            self._expected, self._found = min(unseen, count), 0
        return chosen

    def _next_unknown(self, most: int) -> list[int]:
        """The next parts that were not described yet, or had not begun."""
        turn = (
            number % self.size for number in range(self._next_turn, self._next_turn + self.size)
        )
        unknown = (n for n in turn if n not in self._ended and n not in self._polled_in_round)
        found = list(islice(unknown, most))
        if found:
            self._next_turn = (found[-1] + 1) % self.size
        return found

    def _has_begun(self, parent: Run) -> bool:
        if self.is_array and not parent.status.is_terminal:
            return self._count_begun(parent) > 0
        return parent.status in _BEGUN

    def _count_begun(self, parent: Run) -> int:
        return sum(parent.children.get(status, 0) for status in _BEGUN)

    def _count_unseen(self, parent: Run) -> int:
        """The number of parts that have begun but are not known; after the parent's end, of all."""
        if parent.status.is_terminal:
            return self.size - len(self._ended)
        return self._count_begun(parent) - len(self._ended) - len(self._polled_in_round)
