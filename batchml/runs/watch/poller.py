"""Poll the states of runs: a hundred in a call, no faster than AWS allows, through outages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from batchml.aws.logs import LogPage, StreamReader, StreamsReader
from batchml.clock import Clock
from batchml.context import PollIntervals, backoff
from batchml.errors import AccessError, BatchmlError, ServiceError, ServiceUnreachable
from batchml.model.run import Record, Run, run_from_record
from batchml.runs.watch.events import ContactLost

# --- When the next poll is due, and how many calls a second are made ------------------------------


class PollCadence:
    """The time of the next poll: soon after a change, ever later while nothing changes."""

    def __init__(self, first: float, most: float) -> None:
        self._first = first
        self._most = most
        self._delay = first
        self._earliest = 0.0
        self.next = 0.0  # on the monotonic clock; 0: now

    def done(self, now: float, *, news: bool, rest: float = 0.0) -> None:
        """Note a poll; the next poll is due after `rest` seconds at the earliest."""
        if news:
            self._delay = self._first
        self._earliest = now + rest
        self.next = max(now + self._delay, self._earliest)
        self._delay = min(self._delay * 1.5, self._most)

    def hurry(self, now: float) -> None:
        """Note a change: the next poll is due at once, and polls become frequent again."""
        self._delay = self._first
        self.next = max(now, self._earliest)


_MIN_RATE = 0.25  # calls a second
_GROW_AFTER = 20  # successful calls


class Limiter:
    """Spreads calls over time, and slows down for a service that throttles.

    A failure halves the rate; failures within one second count once. After twenty calls without a
    failure a reduced rate rises by a fifth, up to its first value.
    """

    def __init__(self, clock: Clock, rate: float | None) -> None:
        self._clock = clock
        self._top = rate
        self._rate = rate
        self._next = 0.0
        self._successes = 0
        self._has_waited = False
        self._failed_at = float("-inf")

    def take(self) -> None:
        """Wait until the next call may be made."""
        if self._rate is None:
            return
        wait = self._next - self._clock.monotonic()
        if wait > 0:
            self._has_waited = True
            self._clock.sleep(wait)
        self._next = self._clock.monotonic() + 1 / self._rate

    def succeeded(self) -> None:
        self._successes += 1
        if self._rate is None or self._top is None:
            return
        if self._successes >= _GROW_AFTER and self._has_waited:
            self._successes, self._has_waited = 0, False
            self._rate = min(self._rate * 1.2, self._top)

    def failed(self) -> None:
        now = self._clock.monotonic()
        self._successes = 0
        if self._rate is not None and now - self._failed_at >= 1:
            self._failed_at = now
            self._rate = max(self._rate / 2, min(_MIN_RATE, self._rate))


class ReasonReporter:
    """Reports why a run waits, ever less often.

    After `first` seconds of waiting, and then after pauses that double up to `most` seconds, `why`
    returns the reason, and `tell` gets it. The same reason is repeated only with `repeats`.
    """

    def __init__(
        self,
        clock: Clock,
        tell: Callable[[str], None],
        why: Callable[[], str],
        *,
        first: float,
        most: float,
        repeats: bool = False,
    ) -> None:
        self._clock = clock
        self._tell = tell
        self._why = why
        self._first, self._most = first, most
        self._repeats = repeats
        self._last = ""
        self._pause = 0.0
        self._next = float("inf")  # infinite while no run waits

    def see(self, waits: bool) -> None:
        """Note at each poll whether a run waits."""
        now = self._clock.monotonic()
        if not waits:
            self._next = float("inf")
        elif self._next == float("inf"):
            self._pause, self._next = self._first, now + self._first
        elif now >= self._next:
            self._pause = min(self._pause * 2, self._most)
            self._next = now + self._pause
            words = self._why()
            if words and (self._repeats or words != self._last):
                self._last = words
                self._tell(words)


# --- Outages: how long failed calls are tolerated -------------------------------------------------


_TRIES = 5  # failures before an outage is permanent, at least


def is_temporary(error: BatchmlError) -> bool:
    """True for a failure after which the next call may succeed.

    A user can sign in again, and a service that failed with 5xx recovers.
    """
    if isinstance(error, ServiceError):
        return error.status >= 500
    return isinstance(error, ServiceUnreachable | AccessError)


class ServiceContact:
    """Decides how long failures of one kind of call are tolerated.

    `renew` is called so that the next call reads new credentials. If no call has succeeded yet, an
    AccessError is raised at once; otherwise there are `outage_limit` seconds to sign in again. The
    service may be unreachable for `startup_limit` seconds before its first answer and for
    `outage_limit` seconds after it. `is_known` is for the log of a run whose state is known: it may
    be unreachable for `log_outage_limit` seconds.
    """

    def __init__(
        self,
        clock: Clock,
        pace: PollIntervals,
        renew: Callable[[], None] | None = None,
        *,
        is_known: bool = False,
    ) -> None:
        self._clock = clock
        self._pace = pace
        self._renew = renew
        self._is_known = is_known
        self._was_made = is_known
        self._unreached = _FailureSeries()
        self._signed_out = _FailureSeries()

    def made(self) -> None:
        self._was_made = True
        self._unreached = _FailureSeries()
        self._signed_out = _FailureSeries()

    def lost(self, error: BatchmlError) -> None:
        """Tolerate a failure. Raises it if it is permanent, or has lasted for too long."""
        now = self._clock.monotonic()
        if isinstance(error, AccessError):
            self._unreached = _FailureSeries()  # the service answers
            if not self._was_made or self._signed_out.is_over(now, self._pace.outage_limit):
                raise error
            if self._renew is not None:
                self._renew()
            return
        limit = self._pace.outage_limit if self._was_made else self._pace.startup_limit
        limit = self._pace.log_outage_limit if self._is_known else limit
        if not is_temporary(error):
            raise error
        if self._unreached.is_over(now, limit):
            raise unreachable_error(str(error), limit) from error


_REPORT_AFTER = 10.0  # seconds of an outage before a message
_SAME_OUTAGE = 40.0  # seconds between two failures of one outage, at most


class Outages:
    """Reports each outage once, if it lasts. Call `lost` after each failure."""

    def __init__(self, clock: Clock, tell: Callable[[str], None]) -> None:
        self._clock = clock
        self._tell = tell
        self._since = self._last = float("-inf")
        self._is_told = False

    def lost(self, error: str) -> None:
        now = self._clock.monotonic()
        if now - self._last > _SAME_OUTAGE:
            self._since, self._is_told = now, False
        self._last = now
        if not self._is_told and now - self._since >= _REPORT_AFTER:
            self._is_told = True
            self._tell(error)


class _FailureSeries:
    """Consecutive failures."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._tries = 0

    def is_over(self, now: float, limit: float) -> bool:
        """Count a failure; True if there were several, over at least `limit` seconds."""
        self._since = now if self._since is None else self._since
        self._tries += 1
        return now - self._since >= limit and self._tries >= _TRIES


class LogGate:
    """Makes the calls for logs, within the rate limit; all streams of a run share it."""

    def __init__(self, limiter: Limiter, contact: ServiceContact) -> None:
        self._limiter = limiter
        self._contact = contact

    def page(self, reader: StreamReader) -> LogPage:
        """Wait until the rate limit allows a call; the next page of a stream."""
        self._limiter.take()
        page = reader.read_page()
        self._limiter.succeeded()
        self._contact.made()
        return page

    def read_together(self, reader: StreamsReader) -> bool:
        """The same for many streams; True at their end. AWS allows half as many of these calls."""
        self._limiter.take()
        self._limiter.take()
        is_over = reader.read_page()
        self._limiter.succeeded()
        self._contact.made()
        return is_over

    def run_ended(self) -> None:
        """The run has ended: count the time without logs from now on."""
        self._contact.made()

    def failed(self, error: BatchmlError) -> None:
        """Tolerate a failure of `page`, or raise it: see ServiceContact.lost."""
        self._limiter.failed()
        self._contact.lost(error)


class MissingJobs:
    """Jobs that DescribeJobs does not return, which is normal just after a submission."""

    def __init__(self, clock: Clock, pace: PollIntervals) -> None:
        self._clock = clock
        self._pace = pace
        self._since: dict[str, float] = {}

    def seen(self, job_id: str) -> None:
        self._since.pop(job_id, None)

    def is_over(self, job_id: str) -> bool:
        """Note that a job is missing; True if it has been missing for too long."""
        now = self._clock.monotonic()
        return now - self._since.setdefault(job_id, now) >= self._pace.startup_limit

    def given_up(self, job_id: str) -> ServiceUnreachable:
        return unreachable_error(
            f"{unknown_job_text(job_id)}: it forgets a job some days after its end",
            self._pace.startup_limit,
        )


def unknown_job_text(job_id: str) -> str:
    return f"AWS Batch does not return the job {job_id}"


def unreachable_error(problem: str, limit: float) -> ServiceUnreachable:
    return ServiceUnreachable(f"{problem}, for {limit:.0f} seconds now. The job itself may go on.")


# --- The poller -----------------------------------------------------------------------------------


MAX_DESCRIBE = 100  # ids of one DescribeJobs

Describe = Callable[[Sequence[str]], dict[str, Run]]  # by job id; a run may be missing
Recall = Callable[[str], Run | None]


class RunPoller:
    """Polls the states of runs. `recall` finds a run that DescribeJobs does not return."""

    def __init__(
        self,
        describe: Describe,
        clock: Clock,
        pace: PollIntervals,
        *,
        recall: Recall | None = None,
        renew: Callable[[], None] | None = None,
    ) -> None:
        self._describe = describe
        self._recall = recall
        self._limiter = Limiter(clock, pace.describe_rate)
        self._contact = ServiceContact(clock, pace, renew)
        self._missing = MissingJobs(clock, pace)

    def poll(self, job_ids: Sequence[str]) -> Iterator[Run | ContactLost]:
        """Yield each run as it is now, call by call; ContactLost after a failed call.

        Raises ServiceUnreachable or AccessError after failures that lasted too long.
        """
        for found in self.poll_calls(job_ids):
            if isinstance(found, ContactLost):
                yield found
                return
            asked, runs = found
            yield from runs.values()
            for job_id in asked:
                if job_id not in runs:
                    yield self.find_missing(job_id)

    def poll_calls(
        self, job_ids: Sequence[str]
    ) -> Iterator[tuple[Sequence[str], dict[str, Run]] | ContactLost]:
        """Yield the ids of each call and the runs by their ids; after a failed call, ContactLost.

        Runs may be missing: see `find_missing`.
        """
        for start in range(0, len(job_ids), MAX_DESCRIBE):
            asked = job_ids[start : start + MAX_DESCRIBE]
            self._limiter.take()
            try:
                runs = self._describe(asked)
            except BatchmlError as error:
                self._limiter.failed()
                self._contact.lost(error)
                yield ContactLost(str(error))
                return
            self._limiter.succeeded()
            self._contact.made()
            for job_id in runs:
                self._missing.seen(job_id)
            yield asked, runs

    def find_missing(self, job_id: str) -> Run | ContactLost:
        """A run that DescribeJobs did not return, from `recall`; ContactLost while it may appear.

        Raises ServiceUnreachable if it stays missing.
        """
        if not self._missing.is_over(job_id):
            return ContactLost(unknown_job_text(job_id))
        try:
            found = None if self._recall is None else self._recall(job_id)
        except BatchmlError as error:
            self._contact.lost(error)
            return ContactLost(str(error))
        if found is None:
            raise self._missing.given_up(job_id)
        return found


def poll_until_ended(
    describe: Describe,
    job_ids: Iterable[str],
    *,
    clock: Clock,
    pace: PollIntervals,
    recall: Recall | None = None,
    renew: Callable[[], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Iterator[Run]:
    """Yield each run when it has ended; one call for a hundred runs.

    `tell` gets a message for each outage that lasts: the user may have to sign in again. Raises
    ServiceUnreachable if AWS cannot be reached, or a run not be found, for too long; AccessError if
    the user does not sign in again.
    """
    poller = RunPoller(describe, clock, pace, recall=recall, renew=renew)
    left = list(dict.fromkeys(job_ids))
    outages = None if tell is None else Outages(clock, tell)
    delays = backoff(pace)
    while left:
        done: set[str] = set()
        for seen in poller.poll(left):
            if isinstance(seen, ContactLost):
                if outages is not None:
                    outages.lost(seen.error)
            elif seen.status.is_terminal:
                done.add(seen.job_id)
                yield seen
        left = [job_id for job_id in left if job_id not in done]
        if done:
            delays = backoff(pace)
        if left:
            clock.sleep(next(delays))


# --- Runs that DescribeJobs does not return -------------------------------------------------------


class Listing(Protocol):
    """ListJobs of a queue, by job name; JobApi implements it."""

    def list_recent(self, queue: str, since: int = 0, name: str = "") -> Iterable[Run]: ...


class RunRecords(Protocol):
    """The records of runs; History implements it."""

    def find(self, env: str, job_id: str) -> Record | None: ...


def make_recall(listing: Callable[[], Listing], history: RunRecords, env: str) -> Recall:
    """The `recall` function of RunPoller for the runs of an environment.

    AWS Batch may list a job before it describes it. It forgets a job some days after its end: then
    the history has the end.
    """

    def recall(job_id: str) -> Run | None:
        record = history.find(env, job_id)
        if record is None:
            return None
        if record.job_name:
            for run in listing().list_recent(record.queue, name=record.job_name):
                if run.job_id == job_id:
                    return run
        return run_from_record(record) if record.has_ended else None

    return recall
