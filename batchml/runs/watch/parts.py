"""The jobs of a run whose output is read: the run itself, children of an array, or nodes."""

from collections.abc import Callable
from itertools import islice

from batchml.aws.logs import StreamReader
from batchml.clock import Clock
from batchml.model.polling import PollIntervals
from batchml.model.run import Attempt, JobStatus, Run
from batchml.runs.watch.events import RunEvent, WaitingProgress
from batchml.runs.watch.poller import RetryGate
from batchml.runs.watch.tail import Tail

OpenLog = Callable[[Run, str], StreamReader]


def missing_text(run: Run, stream: str, missing: str, *, is_over: bool) -> str:
    """The message for an attempt without a log; `missing` is "group" or "stream"."""
    if missing == "group":
        return f"No output: the log group {run.log_group} does not exist in this region."
    if not is_over:
        return f"No output yet: the log stream {stream} is not there so far."
    return (
        f"No output: the log stream {stream} is not there. The log group {run.log_group} may keep "
        "lines for a shorter time than that."
    )


class WatchedJob:
    """One job and its attempts in order: the lines of an attempt come after all lines of the
    attempt before.
    """

    def __init__(
        self,
        number: int | None,
        open_log: OpenLog,
        *,
        clock: Clock,
        pace: PollIntervals,
        gate: RetryGate,
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
        self._noted: set[str] = set()  # streams whose absence was reported
        self._given_up = False

    def seen(self, run: Run) -> None:
        self.run = run

    @property
    def has_ended(self) -> bool:
        return self.run is not None and self.run.status.is_terminal

    @property
    def is_done(self) -> bool:
        """The job has ended, and its output was read."""
        return self.has_ended and self.current() is None

    @property
    def may_have_ended(self) -> bool:
        """The output says that the job has ended, but its state was not asked for since."""
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
        """The last read brought nothing new."""
        found = self.current()
        return found is not None and found[0].caught_up

    def read(self) -> list[RunEvent]:
        """Read one page of the current attempt; close the attempt when its output is complete."""
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
        """When the attempt ended, in ms; an attempt has ended at the latest when the next one
        begins.
        """
        assert self.run is not None
        if attempt.stopped_at is not None:
            return attempt.stopped_at
        return self.run.stopped_at if self.run.status.is_terminal else None

    def _note_missing(self, tail: Tail, attempt: Attempt) -> list[RunEvent]:
        assert self.run is not None
        if tail.stream in self._noted or (tail.is_closed and not attempt.started_at):
            return []
        self._noted.add(tail.stream)
        where = f"[{self.child}] " if self.child else ""
        text = missing_text(self.run, tail.stream, tail.missing, is_over=tail.is_closed)
        return [WaitingProgress(self.run, where + text)]

    def give_up(self) -> list[RunEvent]:
        """Stop reading this job's output."""
        self._given_up = True
        cut = [tail.close() for tail in self._tails.values() if not tail.is_closed]
        return [happening for each in cut for happening in each]


# --- Children of an array, or nodes, to ask about ------------------------------------------------


_FEW = 99  # ids of one call, in addition to the run's own
_BEGUN = (JobStatus.STARTING, JobStatus.RUNNING, JobStatus.SUCCEEDED, JobStatus.FAILED)


class Family:
    """The children of an array (`ID:3`) or nodes of a multi-node run (`ID#3`), by number.

    Their ids are known, so no call lists them. While few are left, DescribeJobs gets all of them.
    Of many it gets those that are running; and while the array counts more started children than
    were seen, the others in turn.
    """

    def __init__(self, parent: Run) -> None:
        self.is_array = parent.array_size > 0
        self.size = parent.array_size or parent.nodes
        self._parent_id = parent.job_id
        self._active: dict[
            int, int
        ] = {}  # number -> the count of calls when it was last asked about
        self._round = 0
        self._ended: set[int] = set()
        self._missed: dict[int, int] = {}  # times in a row
        self._turn = 0

    def job_id(self, number: int) -> str:
        return f"{self._parent_id}{':' if self.is_array else '#'}{number}"

    def number(self, job_id: str) -> int:
        return int(job_id[len(self._parent_id) + 1 :])

    @property
    def all_ended(self) -> bool:
        return len(self._ended) == self.size

    def seen(self, number: int, run: Run) -> None:
        self._missed.pop(number, None)
        self._active.pop(number, None)
        if run.status.is_terminal:
            self._ended.add(number)
        elif run.status in _BEGUN:
            self._active[number] = self._round

    def missing(self, number: int, parent: Run) -> None:
        """Note that AWS Batch does not know a part. If its parent has ended and it stays unknown,
        it never existed.
        """
        self._missed[number] = self._missed.get(number, 0) + 1
        if parent.status.is_terminal and self._missed[number] >= 2:
            self.leave(number)

    def leave(self, number: int) -> None:
        """Stop asking about a part."""
        self._active.pop(number, None)
        self._ended.add(number)

    def chosen(self, parent: Run, most: int) -> list[int]:
        """The parts to ask about next; at most `most`, a multiple of a hundred."""
        if not self._has_begun(parent):
            return []
        self._round += 1
        if self.size - len(self._ended) <= _FEW:
            return [number for number in range(self.size) if number not in self._ended]
        by_age = sorted(self._active, key=lambda number: (self._active[number], number))
        chosen = by_age[: most // 2]
        if self._hidden(parent) > 0:
            chosen += self._others(most - len(chosen))
        return chosen

    def _others(self, most: int) -> list[int]:
        """The next parts of which nothing is known."""
        turn = (number % self.size for number in range(self._turn, self._turn + self.size))
        unknown = (n for n in turn if n not in self._ended and n not in self._active)
        found = list(islice(unknown, most))
        if found:
            self._turn = (found[-1] + 1) % self.size
        return found

    def _has_begun(self, parent: Run) -> bool:
        if self.is_array and not parent.status.is_terminal:
            return self._begun(parent) > 0
        return parent.status in _BEGUN

    def _begun(self, parent: Run) -> int:
        return sum(parent.children.get(status, 0) for status in _BEGUN)

    def _hidden(self, parent: Run) -> int:
        """The number of started parts that were not seen yet; after the parent's end all that are
        left.
        """
        if parent.status.is_terminal:
            return self.size - len(self._ended)
        return self._begun(parent) - len(self._ended) - len(self._active)
