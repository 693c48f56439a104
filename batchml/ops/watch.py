"""Follow runs to their end: one poller, and logs that lose no line.

`follow` yields what happens to one run as values; `wait` waits for many with one call a round.
Both end when the runs do; the caller decides what to show.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from batchml.aws.logs import StreamReader
from batchml.clock import Clock
from batchml.errors import ServiceUnreachable
from batchml.model.run import Run
from batchml.model.status import JobStatus
from batchml.runtime.lines import parse_mark


class Pace(Struct, frozen=True):
    """How often to ask, in seconds, and when a log is at its end."""

    first: float = 2.0
    most: float = 15.0
    # After the end of a run its last lines may still be on their way to CloudWatch. Without an end
    # mark a log is complete when nothing has come for this long.
    quiet: float = 10.0
    # How long a job may be invisible after its submission, or contact be lost, before we give up.
    patience: float = 60.0
    # The embedded server has every line that a program wrote once its exit is on record.
    kept: bool = False


LOCAL_PACE = Pace(first=0.05, most=0.5, quiet=0.0, patience=20.0, kept=True)


def backoff(pace: Pace) -> Iterator[float]:
    """Seconds between polls: from `first`, half as much again each time, up to `most`."""
    delay = pace.first
    while True:
        yield delay
        delay = min(delay * 1.5, pace.most)


class StatusChanged(Struct, frozen=True):
    run: Run


class Progress(Struct, frozen=True):
    """Why a run does not run yet: its environment is being made, nothing has room for it."""

    run: Run
    text: str


class Opened(Struct, frozen=True):
    """An attempt's output begins; `number` from 1."""

    stream: str
    number: int


class Hosted(Struct, frozen=True):
    """What the attempt runs in, as the embedded server says it."""

    how: dict[str, str]


class Line(Struct, frozen=True):
    timestamp: int  # ms
    text: str


class Closed(Struct, frozen=True):
    """An attempt's output has ended. `proof` says whether all of it was seen, and how we know."""

    stream: str
    lines: int
    proof: str


class Lost(Struct, frozen=True):
    """No contact for now; the run goes on."""

    error: str


class Ended(Struct, frozen=True):
    run: Run


Happening = StatusChanged | Progress | Opened | Hosted | Line | Closed | Lost | Ended

MARKED = "marked"  # the end mark counted as many lines as we saw
KEPT = "kept"  # no mark, but the server has all that the program wrote
QUIET = "quiet"  # no mark; nothing more came
SHORT = "short"  # the end mark counted other than we saw


Describe = Callable[[Sequence[str]], dict[str, Run]]
OpenLog = Callable[[Run, str], StreamReader]


class _Tail:
    """One attempt's output."""

    def __init__(self, reader: StreamReader, number: int) -> None:
        self._reader = reader
        self._number = number
        self._lines = 0
        self._promised: int | None = None
        self._opened = False
        self._over_since: float | None = None
        self.is_closed = False

    def read(self) -> Iterator[Happening]:
        for line in self._reader.read():
            mark = parse_mark(line.message)
            if mark is not None and mark[0] == "host":
                yield Hosted(mark[1])
                continue
            if not self._opened:
                self._opened = True
                yield Opened(self._reader.stream, self._number)
            if mark is None:
                self._lines += 1
                yield Line(line.timestamp, line.message)
            elif mark[0] == "end":
                self._promised = int(mark[1].get("lines", "0"))

    def close(self, now: float, quiet: float, kept: bool) -> Iterator[Closed]:
        """The attempt has ended: close once all is here, or nothing has come for `quiet` seconds.

        `kept` says that the service has all of it.

        To be called after a read that came after the end was known.
        """
        if self._over_since is None:
            self._over_since = now
        whole = self._promised is not None and self._lines >= self._promised
        if not whole and now - self._over_since < quiet:
            return
        self.is_closed = True
        if self._opened:
            yield Closed(self._reader.stream, self._lines, self._proof(kept))

    def _proof(self, kept: bool) -> str:
        if self._promised is None:
            return KEPT if kept else QUIET
        return MARKED if self._lines == self._promised else SHORT


class _Follower:
    """What has been seen of one run. `look` turns a new look at it into news."""

    def __init__(self, open_log: OpenLog, clock: Clock, pace: Pace) -> None:
        self._open_log = open_log
        self._clock = clock
        self._pace = pace
        self._last: Run | None = None
        self._tails: dict[str, _Tail] = {}

    def look(self, run: Run) -> Iterator[Happening]:
        last, self._last = self._last, run
        if last is None or run.status is not last.status:
            yield StatusChanged(run)
        told = "" if last is None else last.status_reason
        held_up = run.status in (JobStatus.STARTING, JobStatus.RUNNABLE)
        if held_up and run.status_reason not in ("", told):
            yield Progress(run, run.status_reason)
        yield from self._read_logs(run)
        if run.status.is_terminal and self._all_closed(run):
            yield Ended(run)

    def _read_logs(self, run: Run) -> Iterator[Happening]:
        """Attempts in order: a later one's lines come after all of an earlier one's."""
        for number, attempt in enumerate(run.attempts, start=1):
            not_yet = run.status is JobStatus.STARTING and attempt.stopped_at is None
            if not attempt.log_stream or not_yet:
                continue
            if attempt.log_stream not in self._tails:
                reader = self._open_log(run, attempt.log_stream)
                self._tails[attempt.log_stream] = _Tail(reader, number)
            tail = self._tails[attempt.log_stream]
            if tail.is_closed:
                continue
            yield from tail.read()
            if attempt.stopped_at is not None:
                kept = self._pace.kept and attempt.exit_code is not None
                yield from tail.close(self._clock.monotonic(), self._pace.quiet, kept)
            if not tail.is_closed:
                return

    def _all_closed(self, run: Run) -> bool:
        streams = [attempt.log_stream for attempt in run.attempts if attempt.log_stream]
        return all(stream in self._tails and self._tails[stream].is_closed for stream in streams)


def follow(
    describe: Describe, open_log: OpenLog, job_id: str, *, clock: Clock, pace: Pace
) -> Iterator[Happening]:
    """Yield what happens to a run until it has ended and its output has been read.

    Raises ServiceUnreachable when the run cannot be found or reached for longer than `patience`.
    """
    follower = _Follower(open_log, clock, pace)
    patience = _Patience(clock, pace)
    delays = backoff(pace)
    for seen in _looks(describe, job_id, clock=clock, pace=pace):
        news = False
        try:
            for happening in [seen] if isinstance(seen, Lost) else follower.look(seen):
                yield happening
                if isinstance(happening, Ended):
                    return
                news = not isinstance(happening, Lost)
            patience.renew()
        except ServiceUnreachable as error:  # the log goes on later from where it was
            yield Lost(str(error))
            if patience.is_over() and isinstance(seen, Run) and seen.status.is_terminal:
                yield Ended(seen)  # how it ended is known, if not all that it printed
                return
            if patience.is_over():
                raise
        if news:
            delays = backoff(pace)
        clock.sleep(next(delays))


class _Patience:
    """How long contact may be lost, or a run be invisible, before we give up."""

    def __init__(self, clock: Clock, pace: Pace) -> None:
        self._clock = clock
        self.limit = pace.patience
        self._since: float | None = None

    def renew(self) -> None:
        self._since = None

    def is_over(self) -> bool:
        """To be asked each time that contact fails."""
        now = self._clock.monotonic()
        self._since = now if self._since is None else self._since
        return now - self._since >= self.limit


def _looks(describe: Describe, job_id: str, *, clock: Clock, pace: Pace) -> Iterator[Run | Lost]:
    """The run, again and again. A failed call is no news of the run."""
    patience = _Patience(clock, pace)
    while True:
        try:
            run = describe([job_id]).get(job_id)
            problem = f"Job {job_id} is not known to the service"
        except ServiceUnreachable as error:
            run, problem = None, str(error)
        if run is not None:
            patience.renew()
            yield run
        elif patience.is_over():
            raise _given_up(problem, pace)
        else:
            yield Lost(problem)


def _given_up(problem: str, pace: Pace) -> ServiceUnreachable:
    return ServiceUnreachable(
        f"{problem}, for {pace.patience:.0f} seconds now. The job itself may go on."
    )


def wait(describe: Describe, job_ids: Iterable[str], *, clock: Clock, pace: Pace) -> Iterator[Run]:
    """Yield each run once it has ended; one call a round for all that have not.

    Raises ServiceUnreachable when there is no contact, or a run is not to be found, for longer
    than `patience`.
    """
    left = list(dict.fromkeys(job_ids))
    patience = _Patience(clock, pace)
    delays = backoff(pace)
    while left:
        try:
            found = describe(left)
            missing = [job_id for job_id in left if job_id not in found]
            problem = f"Job {missing[0]} is not known to the service" if missing else ""
        except ServiceUnreachable as error:
            found, problem = {}, str(error)
        if not problem:
            patience.renew()
        elif patience.is_over():
            raise _given_up(problem, pace)
        ended = [run for run in found.values() if run.status.is_terminal]
        yield from ended
        done = {run.job_id for run in ended}
        left = [job_id for job_id in left if job_id not in done]
        if ended:
            delays = backoff(pace)
        if left:
            clock.sleep(next(delays))
