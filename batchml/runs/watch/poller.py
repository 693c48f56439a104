"""One poller for any number of runs: a hundred ids a call, no faster than the service allows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from batchml.aws.logs import LogPage, StreamReader
from batchml.clock import Clock
from batchml.context import PollIntervals, backoff
from batchml.errors import AccessError, BatchmlError, ServiceError, ServiceUnreachable
from batchml.model.run import Record, Run, run_from_record
from batchml.runs.watch.events import ContactLost

# --- intervals ------------------------------------------------------------------------------------
# When the next poll is due, and how many calls a second are made.


class PollCadence:
    """When a poll is due: soon after a change, less and less often while nothing changes."""

    def __init__(self, first: float, most: float) -> None:
        self._first = first
        self._most = most
        self._delay = first
        self._earliest = 0.0
        self.next = 0.0  # on the monotonic clock; at once

    def done(self, now: float, *, news: bool, rest: float = 0.0) -> None:
        """Note a poll; the next one is due after `rest` seconds at the earliest."""
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
_GROW_AFTER = 20  # calls that went well


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
        self._well = 0
        self._held_back = False
        self._failed_at = float("-inf")

    def take(self) -> None:
        """Wait until the next call may be made."""
        if self._rate is None:
            return
        wait = self._next - self._clock.monotonic()
        if wait > 0:
            self._held_back = True
            self._clock.sleep(wait)
        self._next = self._clock.monotonic() + 1 / self._rate

    def went_well(self) -> None:
        self._well += 1
        if self._rate is None or self._top is None:
            return
        if self._well >= _GROW_AFTER and self._held_back:
            self._well, self._held_back = 0, False
            self._rate = min(self._rate * 1.2, self._top)

    def failed(self) -> None:
        now = self._clock.monotonic()
        self._well = 0
        if self._rate is not None and now - self._failed_at >= 1:
            self._failed_at = now
            self._rate = max(self._rate / 2, min(_MIN_RATE, self._rate))


class ReasonReporter:
    """Reports why something waits, ever less often.

    It asks `why` after `first` seconds of waiting, then after pauses that double up to `most`
    seconds, and tells the answer. It repeats an answer only with `repeats`.
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
        self._next = float("inf")  # while nothing waits

    def see(self, waits: bool) -> None:
        """Take note at each poll whether it waits now."""
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


# --- poller ---------------------------------------------------------------------------------------


# --- Outages: how long failed calls are tolerated -------------------------------------------------


_TRIES = 5  # failures at least, before an outage is permanent


def is_temporary(error: BatchmlError) -> bool:
    """True for a failure that may be gone at the next call.

    A user can sign in again, and a service that failed with 5xx recovers.
    """
    if isinstance(error, ServiceError):
        return error.status >= 500
    return isinstance(error, ServiceUnreachable | AccessError)


class ServiceContact:
    """Failures of one kind of call, and how long they are tolerated.

    `renew` is called so that the next call reads new credentials. A user who was never admitted
    gets the error at once; otherwise there are `absence` seconds to sign in again. The service may
    be unreachable for `patience` seconds before its first answer and for `absence` seconds after
    it. `is_known` is for the log of a run whose state is known: it may be unreachable for `no_log`
    seconds.
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


_REPORT_AFTER = 10.0  # seconds without contact before a message
_SAME_OUTAGE = 40.0  # seconds: longer than any pause between two attempts


class Outages:
    """Reports each outage once, when it lasts. `lost` is called at each failure."""

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
    """Failures in a row."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._tries = 0

    def is_over(self, now: float, limit: float) -> bool:
        """Count one more failure: True when several have lasted for `limit` seconds."""
        self._since = now if self._since is None else self._since
        self._tries += 1
        return now - self._since >= limit and self._tries >= _TRIES


class LogGate:
    """Limits and tolerates failures of calls for logs; all streams of a run share one."""

    def __init__(self, limiter: Limiter, contact: ServiceContact) -> None:
        self._limiter = limiter
        self._contact = contact

    def page(self, reader: StreamReader) -> LogPage:
        """The next page of a stream, when the rate limit allows it."""
        self._limiter.take()
        page = reader.read_page()
        self._limiter.went_well()
        self._contact.made()
        return page

    def run_ended(self) -> None:
        """Count the time without logs from now on."""
        self._contact.made()

    def failed(self, error: BatchmlError) -> None:
        """Tolerate a failure of `page`, or raise it: see ServiceContact.lost."""
        self._limiter.failed()
        self._contact.lost(error)


class MissingJobs:
    """Jobs that DescribeJobs does not return yet; that is normal just after a submission."""

    def __init__(self, clock: Clock, pace: PollIntervals) -> None:
        self._clock = clock
        self._pace = pace
        self._since: dict[str, float] = {}

    def seen(self, job_id: str) -> None:
        self._since.pop(job_id, None)

    def is_over(self, job_id: str) -> bool:
        """Call it each time that the job is missing: True when it was missing for too long."""
        now = self._clock.monotonic()
        return now - self._since.setdefault(job_id, now) >= self._pace.startup_limit

    def given_up(self, job_id: str) -> ServiceUnreachable:
        return unreachable_error(
            f"{unknown_job_text(job_id)}: it forgets a run some days after its end",
            self._pace.startup_limit,
        )


def unknown_job_text(job_id: str) -> str:
    return f"Job {job_id} is not known to the service"


def unreachable_error(problem: str, limit: float) -> ServiceUnreachable:
    return ServiceUnreachable(f"{problem}, for {limit:.0f} seconds now. The job itself may go on.")


# --- The poller -----------------------------------------------------------------------------------


MAX_DESCRIBE = 100  # ids of one DescribeJobs

Describe = Callable[[Sequence[str]], dict[str, Run]]
Recall = Callable[[str], Run | None]


class RunPoller:
    """Asks for the state of runs. `recall` finds a run that DescribeJobs does not return: in
    ListJobs, or in the history of this machine.
    """

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
        self._invisible = MissingJobs(clock, pace)

    def look(self, job_ids: Sequence[str]) -> Iterator[Run | ContactLost]:
        """Yield each run as it is now, call by call; LinesLost for a call that failed.

        Raises ServiceUnreachable or AccessError after failures that lasted too long.
        """
        for found in self.answers(job_ids):
            if isinstance(found, ContactLost):
                yield found
                return
            asked, runs = found
            yield from runs.values()
            for job_id in asked:
                if job_id not in runs:
                    yield self.missing(job_id)

    def answers(
        self, job_ids: Sequence[str]
    ) -> Iterator[tuple[Sequence[str], dict[str, Run]] | ContactLost]:
        """Yield the requested ids and the runs found, call by call; nothing after a failed call.

        A missing run is no failure here.
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
            self._limiter.went_well()
            self._contact.made()
            for job_id in runs:
                self._invisible.seen(job_id)
            yield asked, runs

    def missing(self, job_id: str) -> Run | ContactLost:
        """The run that DescribeJobs did not return, from other sources; None while it may still
        appear.

        Raises ServiceUnreachable when it stays unknown.
        """
        if not self._invisible.is_over(job_id):
            return ContactLost(unknown_job_text(job_id))
        try:
            found = None if self._recall is None else self._recall(job_id)
        except BatchmlError as error:
            self._contact.lost(error)
            return ContactLost(str(error))
        if found is None:
            raise self._invisible.given_up(job_id)
        return found


def wait(
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
    ServiceUnreachable when the service, or a run, cannot be found for too long; AccessError when
    nobody signs in again.
    """
    poller = RunPoller(describe, clock, pace, recall=recall, renew=renew)
    left = list(dict.fromkeys(job_ids))
    outages = None if tell is None else Outages(clock, tell)
    delays = backoff(pace)
    while left:
        done: set[str] = set()
        for seen in poller.look(left):
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
    """ListJobs of a queue, by job name: BatchApi implements it."""

    def list_recent(self, queue: str, since: int = 0, name: str = "") -> Iterable[Run]: ...


class RunRecords(Protocol):
    def recent(self, env: str | None = None) -> list[Record]: ...


def recalling(listing: Listing, history: RunRecords, env: str) -> Callable[[str], Run | None]:
    """The `recall` function of `follow` and `wait` for the runs of an environment.

    AWS Batch lists a job before it describes it, and forgets it some days after its end: then the
    history's record of that end is the answer.
    """

    def recall(job_id: str) -> Run | None:
        record = next((each for each in history.recent(env) if each.job_id == job_id), None)
        if record is None:
            return None
        if record.job_name:
            for run in listing.list_recent(record.queue, name=record.job_name):
                if run.job_id == job_id:
                    return run
        return run_from_record(record) if record.has_ended else None

    return recall
