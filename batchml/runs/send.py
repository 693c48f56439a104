"""Send one SubmitJob request exactly once.

SubmitJob has no client token: sent twice, it makes two jobs. So a key is part of the job's name,
the intent is on disk before the call, the call goes out once, and when its answer is lost the job
is looked up by its name before anything is sent again.
"""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from batchml.aws.batch.jobs import JobApi, NamedJob
from batchml.aws.batch.requests import SubmissionRequests, dated_registration
from batchml.aws.errors import ErrorClass, classify_error
from batchml.clock import Clock
from batchml.errors import (
    BatchmlError,
    NoQueue,
    ServiceError,
    ServiceUnreachable,
    SubmissionUnknown,
)
from batchml.history import History
from batchml.model.names import bare_name
from batchml.model.run import JobStatus, Record
from batchml.runs.in_flight import InFlight, RateBucket

# --- Finding the job of a submission by its name -------------------------------------------------


# Seconds until ListJobs certainly shows what SubmitJob did. AWS promises nothing; a minute is far
# beyond what was seen. The embedded server shows it at once, and may still be at work on a call.
AWS_LISTING_DELAY = 60.0
LOCAL_LISTING_DELAY = 2.0
MAX_PAUSE = 15.0  # seconds between two polls
SECOND_RUN = "batchml: second run of one submission"


def listing_delay(api: JobApi) -> float:
    """Seconds after which a run that ListJobs does not return does not exist."""
    return LOCAL_LISTING_DELAY if api.is_local else AWS_LISTING_DELAY


def look_up(api: JobApi, record: Record, clock: Clock, seconds: float) -> list[NamedJob]:
    """The runs of a submission; polls until there is one, or `seconds` have passed.

    Raises the error of the last poll; then it is not known whether there is a run.
    """
    end = clock.monotonic() + seconds
    pause = 1.0
    while True:
        left = end - clock.monotonic()
        try:
            found = api.find_by_name(record.queue, record.job_name)
        except (ServiceUnreachable, ServiceError) as error:
            if clock.monotonic() >= end or not _is_temporary(error):
                raise
            found = []
        if found or left <= 0:
            return found
        clock.sleep(min(pause, left))
        pause = min(pause * 2, MAX_PAUSE)


def _is_temporary(error: ServiceUnreachable | ServiceError) -> bool:
    return isinstance(error, ServiceUnreachable) or error.status >= 500


def keep_one_job(api: JobApi, found: Iterable[NamedJob], tell: Callable[[str], None]) -> str:
    """Keep one run of a submission, and stop the others; the id of the kept one.

    That is the oldest, but not a failed one while another lives: the second job to start finds the
    first one's claim, and ends.
    """
    kept, *others = sorted(
        found, key=lambda job: (job.status is JobStatus.FAILED, job.created_at, job.job_id)
    )
    for other in others:
        if other.status.is_terminal:
            continue
        try:
            api.terminate(other.job_id, f"{SECOND_RUN}: {kept.job_id} goes on")
        except BatchmlError as error:
            tell(f"A second run could not be stopped: batchml cancel {other.job_id}\n  {error}")
    return kept.job_id


# --- Sending --------------------------------------------------------------------------------------


RESENDS = 2  # times that a submission without a trace is sent again
PATIENCE = 300.0  # seconds for which a throttled submission is tried
TRIES = 4  # attempts to reach the service
MAX_BACKOFF = 20.0  # seconds
INTENT_TOLERANCE = 2.0  # seconds: an intent this young has the time of the call


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a submission. `job_id` is its run, if it is known.

    `is_open` is True while nobody knows: then `batchml reconcile KEY` finds out.
    """

    def __init__(self, key: str, job_id: str = "", is_open: bool = False) -> None:
        self.key = key
        self.job_id = job_id
        self.is_open = is_open
        super().__init__(key)


def send_intent(
    api: JobApi,
    requests: SubmissionRequests,
    history: History,
    record: Record,
    *,
    clock: Clock,
    bucket: RateBucket | None = None,
    share: str = "",
    tell: Callable[[str], None] = lambda _: None,
) -> str:
    """Send an intent that is on disk already, and in flight. Raises as `submit` does."""
    flights = InFlight.beside(history, record.env)
    sender = _Sender(api, requests, history, record, clock, bucket, share, tell)
    try:
        job_id = sender.send()
        _settle(history, flights, record.key, tell, job_id)
    except SubmissionUnknown:
        raise
    except BatchmlError as error:
        _settle(history, flights, record.key, tell, why=str(error))
        raise
    except KeyboardInterrupt:
        stop = sender.interrupted()
        if not stop.is_open:
            why = "" if stop.job_id else "interrupted before it was sent"
            _settle(history, flights, record.key, tell, stop.job_id, why)
        raise stop from None
    return job_id


def _settle(
    history: History,
    flights: InFlight,
    key: str,
    tell: Callable[[str], None],
    job_id: str = "",
    why: str = "",
) -> None:
    """Write down the outcome. A full disk must not hide the job's id from the user."""
    try:
        if job_id:
            history.add_job_id(key, job_id)
        else:
            history.add_refusal(key, why)
    except OSError as error:
        tell(f"This could not be kept on disk ({error.strerror}): `batchml reconcile` will.")
    else:
        flights.remove(key)


class _Sender:
    """One submission that is being sent."""

    def __init__(
        self,
        api: JobApi,
        requests: SubmissionRequests,
        history: History,
        record: Record,
        clock: Clock,
        bucket: RateBucket | None,
        share: str,
        tell: Callable[[str], None],
    ) -> None:
        self._api = api
        self._requests = requests
        self._history = history
        self._record = record
        self._clock = clock
        self._bucket = bucket
        self._share = share
        self._tell = tell
        self._is_open = False  # a call may have had an effect
        self._job_id = ""
        self._was_lost = 0  # calls with unknown outcome
        self._unreached = 0
        self._pauses = 0
        self._mended: set[str] = set()
        self._end = clock.monotonic() + PATIENCE

    def send(self) -> str:
        while True:
            if self._bucket is not None:
                self._bucket.take(self._clock, self._tell)
            self._renew()
            self._is_open = True
            try:
                self._job_id = self._api.submit(self._requests.submit)
            except BatchmlError as error:
                self._job_id = self._after(error)
                if self._job_id:
                    return self._job_id
                continue
            return self._only(self._job_id) if self._was_lost else self._job_id

    def interrupted(self) -> Interrupted:
        """After Ctrl-C: look up the run once. A second Ctrl-C ends that, too."""
        if self._job_id or not self._is_open:
            return Interrupted(self._record.key, self._job_id)
        try:
            found = self._api.find_by_name(self._record.queue, self._record.job_name, once=True)
        except (BatchmlError, KeyboardInterrupt):
            found = []
        job_id = found[0].job_id if found else ""
        return Interrupted(self._record.key, job_id, is_open=not job_id)

    def _renew(self) -> None:
        """Before a call that leaves later than the intent says: update the intent's time on disk.

        A process that finds the intent of a killed client waits for its lag, counted from that
        time.
        """
        now = int(self._clock.now() * 1000)
        if abs(now - self._record.at) > INTENT_TOLERANCE * 1000:
            self._record = replace(self._record, at=now)
            self._history.intend(self._record)

    def _after(self, error: BatchmlError) -> str:
        """After a failed call: the id of its run, if there is one, or "" to send it again."""
        what = classify_error(error)
        if what is ErrorClass.UNREACHED and self._api.is_local:
            what = ErrorClass.UNKNOWN  # the last of several attempts; others were lost
        if what is ErrorClass.UNKNOWN:
            return self._look_up(error)
        self._is_open = False
        if what is ErrorClass.REFUSED:
            self._requests = self._mend(error)
        elif what is ErrorClass.BUSY:
            if self._bucket is not None:
                self._bucket.throttled(self._clock)
            self._pause(error, "AWS Batch is too busy; waiting for a turn.")
        else:
            self._unreached += 1
            if self._unreached >= TRIES:
                raise error
            self._pause(error, "AWS Batch cannot be reached; trying again.")
        return ""

    def _look_up(self, error: BatchmlError) -> str:
        if not self._was_lost:
            self._tell("The answer was lost; looking whether the run is there.")
        self._was_lost += 1
        try:
            found = look_up(self._api, self._record, self._clock, listing_delay(self._api))
        except BatchmlError as then:
            raise SubmissionUnknown(
                self._record.name, self._record.key, f"{error} {then}"
            ) from then
        if found:
            return keep_one_job(self._api, found, self._tell)
        self._is_open = False
        if self._was_lost > RESENDS:
            raise error
        return ""

    def _only(self, job_id: str) -> str:
        """The run that stays when an earlier call was carried out late, after the look-up."""
        try:
            found = self._api.find_by_name(self._record.queue, self._record.job_name)
        except BatchmlError:
            return job_id
        return keep_one_job(self._api, found, self._tell) if len(found) > 1 else job_id

    def _pause(self, error: BatchmlError, words: str) -> None:
        """Wait, each time longer and with jitter. Raises `error` at the end."""
        from random import random

        if self._clock.monotonic() >= self._end:
            raise error
        if not self._pauses:
            self._tell(words)
        longest = min(MAX_BACKOFF, 2.0**self._pauses)
        self._pauses += 1
        self._clock.sleep(longest * (0.5 + random() / 2))

    def _mend(self, error: BatchmlError) -> SubmissionRequests:
        """The request to send instead of a refused one. Raises `error` where there is none."""
        submit, register = self._requests.submit, self._requests.register
        if not isinstance(error, ServiceError):
            raise error
        if self._share and "shareIdentifier" not in submit and _asks_for_share(error):
            return replace(self._requests, submit={**submit, "shareIdentifier": self._share})
        if error.code != "ClientException":
            raise error
        told = error.message.lower()
        if "queue" in told:  # before a definition is registered for nothing
            self._check_queue(error)
        if "definition" in self._mended:
            raise error
        self._mended.add("definition")
        if not self._api.has_definition(register["jobDefinitionName"]):
            self._api.register(dated_registration(register, self._clock.now()))
            return self._requests
        if "queue" not in told:
            self._check_queue(error)
        if "definition" not in told:
            raise error
        return self._requests  # another process has registered it just now

    def _check_queue(self, refusal: ServiceError) -> None:
        """Raise NoQueue where the queue does not exist, if AWS allows the look-up."""
        queue = bare_name(self._requests.submit["jobQueue"])
        try:
            queues = self._api.queues()
        except BatchmlError:
            return
        if queue not in queues:
            hint = "Choose one with --queue, or make it: batchml queue create."
            raise NoQueue(queue, queues, hint) from refusal


def _asks_for_share(error: ServiceError) -> bool:
    text = error.message.lower()
    return "shareidentifier" in text or "share identifier" in text


def user_name() -> str:
    """The name of this user; empty where the system has none."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        return ""


def user_share() -> str:
    """The share identifier of this user, for queues with fair-share scheduling."""
    return "".join(char for char in user_name() if char.isascii() and char.isalnum()) or "default"
