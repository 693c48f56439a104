"""One job whose output is read: a run, a child of an array, or a node of a multi-node run."""

from collections.abc import Callable

from batchml.aws.logs import StreamReader
from batchml.clock import Clock
from batchml.model.run import Attempt, JobStatus, Run
from batchml.ops.watch.contact import Gate
from batchml.ops.watch.happenings import Happening, Progress
from batchml.ops.watch.pace import Pace
from batchml.ops.watch.tail import Tail

OpenLog = Callable[[Run, str], StreamReader]


def missing_text(run: Run, stream: str, missing: str, *, is_over: bool) -> str:
    """What to say of an attempt's log that is not there: `missing` is "group" or "stream"."""
    if missing == "group":
        return f"No output: the log group {run.log_group} does not exist in this region."
    if not is_over:
        return f"No output yet: the log stream {stream} is not there so far."
    return (
        f"No output: the log stream {stream} is not there. The log group {run.log_group} may keep "
        "lines for a shorter time than that."
    )


class Part:
    """Its attempts in order: a later one's lines come after all of an earlier one's."""

    def __init__(
        self, number: int | None, open_log: OpenLog, *, clock: Clock, pace: Pace, gate: Gate
    ) -> None:
        """`number` is that of a child or node; None for the run itself."""
        self.number = number or 0
        self.child = "" if number is None else str(number)
        self.run: Run | None = None
        self._open_log = open_log
        self._clock = clock
        self._pace = pace
        self._gate = gate
        self._tails: dict[str, Tail] = {}
        self._noted: set[str] = set()  # streams whose absence was told
        self._given_up = False

    def seen(self, run: Run) -> None:
        self.run = run

    @property
    def has_ended(self) -> bool:
        return self.run is not None and self.run.status.is_terminal

    @property
    def is_done(self) -> bool:
        """It has ended, and its output was read."""
        return self.has_ended and self.current() is None

    @property
    def may_have_ended(self) -> bool:
        """Its output says that it is over, but nobody has looked since."""
        found = self.current()
        return found is not None and found[0].has_end_mark and not self.has_ended

    def current(self) -> tuple[Tail, Attempt] | None:
        """The attempt whose output is to be read now."""
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
        """Nothing more came when it was read last."""
        found = self.current()
        return found is not None and found[0].caught_up

    def read(self) -> list[Happening]:
        """One page of the current attempt; it is closed when that was all."""
        found = self.current()
        if found is None:
            return []
        tail, attempt = found
        happenings = tail.step()
        stopped_at = self._stopped_at(attempt)
        if stopped_at is not None or self.has_ended:
            happenings += tail.try_to_close(stopped_at)
        if tail.missing and (tail.is_closed or tail.is_overdue):
            happenings += self._note_missing(tail, attempt)
        return happenings

    def _stopped_at(self, attempt: Attempt) -> int | None:
        """When the attempt ended, ms; of one that is not the last, the next has begun."""
        assert self.run is not None
        if attempt.stopped_at is not None:
            return attempt.stopped_at
        return self.run.stopped_at if self.run.status.is_terminal else None

    def _note_missing(self, tail: Tail, attempt: Attempt) -> list[Happening]:
        assert self.run is not None
        if tail.stream in self._noted or (tail.is_closed and not attempt.started_at):
            return []
        self._noted.add(tail.stream)
        where = f"[{self.child}] " if self.child else ""
        text = missing_text(self.run, tail.stream, tail.missing, is_over=tail.is_closed)
        return [Progress(self.run, where + text)]

    def give_up(self) -> list[Happening]:
        """Read no more of it."""
        self._given_up = True
        cut = [tail.close() for tail in self._tails.values() if not tail.is_closed]
        return [happening for each in cut for happening in each]
