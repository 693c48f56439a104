"""Send one SubmitJob request exactly once.

SubmitJob has no client token: sent twice, it makes two jobs. So a key is part of the job's name,
the intent is on disk before the call, the call goes out once, and when its answer is lost the job
is looked up by its name before anything is sent again.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from msgspec import Struct
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
from batchml.runs.in_flight import InFlight
from batchml.runs.rate_limit import RateBucket

if TYPE_CHECKING:
    from batchml.context import Context

# --- Finding the job of a submission by its name -------------------------------------------------


# Seconds after SubmitJob in which ListJobs may not return the job yet. AWS promises nothing; a
# minute is far longer than any observed delay. The embedded server lists a job at once, but may
# still be handling the call.
AWS_LISTING_DELAY = 60.0
LOCAL_LISTING_DELAY = 2.0
MAX_PAUSE = 15.0  # seconds between two polls
SECOND_RUN = "batchml: second run of one submission"


def listing_delay(api: JobApi) -> float:
    """Seconds after SubmitJob: a job that ListJobs does not return by then does not exist."""
    return LOCAL_LISTING_DELAY if api.is_local else AWS_LISTING_DELAY


def look_up(api: JobApi, record: Record, clock: Clock, seconds: float) -> list[NamedJob]:
    """Find the jobs of a submission by name: poll until there is one, or `seconds` have passed.

    Raises the error of the last poll; then it is unknown whether there is a job.
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
    """Keep one of the jobs that one submission made, and stop the others; the id of the kept job.

    The oldest is kept, but a failed job only if all have failed: the second job that starts finds
    the claim of the first, and ends.
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


RESENDS = 2  # times that a submission is sent again after no job of it was found
PATIENCE = 300.0  # seconds for which a throttled submission is sent again
TRIES = 4  # attempts to reach the service
MAX_BACKOFF = 20.0  # seconds
INTENT_TOLERANCE = 2.0  # seconds by which the time of an intent may differ from the call's


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a submission. `job_id` is its job, if that is known.

    `is_open` is True while it is unknown whether there is a job: `batchml reconcile KEY` finds out.
    """

    def __init__(self, key: str, job_id: str = "", is_open: bool = False) -> None:
        self.key = key
        self.job_id = job_id
        self.is_open = is_open
        super().__init__(key)


class Submitter(Struct, frozen=True):
    """The API, the history and the rules of a client that submits.

    `tell` gets messages for the user. `bucket` is the rate that all processes of the user share,
    None where there is no limit. A queue with fair-share scheduling takes only jobs with a share
    identifier: a job without one is sent again with `share`.
    """

    api: JobApi
    history: History
    clock: Clock
    tell: Callable[[str], None] = lambda _: None
    bucket: RateBucket | None = None
    share: str = ""


def make_submitter(
    context: "Context", tell: Callable[[str], None], bucket: RateBucket | None = None
) -> Submitter:
    """The submitter of an environment, for this user."""
    return Submitter(context.batch, context.history, context.clock, tell, bucket, user_share())


def send_intent(submitter: Submitter, requests: SubmissionRequests, record: Record) -> str:
    """Send a submission whose intent is on disk, and which is marked as in flight; its job id.

    Raises what `submit` raises.
    """
    sender = _Sender(submitter, requests, record)
    try:
        job_id = sender.send()
        _settle(submitter, record, job_id)
    except SubmissionUnknown:
        raise
    except BatchmlError as error:
        _settle(submitter, record, reason=str(error))
        raise
    except KeyboardInterrupt:
        interruption = sender.look_up_after_interrupt()
        if not interruption.is_open:
            reason = "" if interruption.job_id else "interrupted before it was sent"
            _settle(submitter, record, interruption.job_id, reason)
        raise interruption from None
    return job_id


def _settle(submitter: Submitter, record: Record, job_id: str = "", reason: str = "") -> None:
    """Write the outcome to disk. A full disk must not hide the job's id from the user."""
    try:
        if job_id:
            submitter.history.add_job_id(record.key, job_id)
        else:
            submitter.history.add_refusal(record.key, reason)
    except OSError as error:
        submitter.tell(
            f"The outcome could not be written to disk ({error.strerror}). Later "
            "`batchml reconcile` writes it."
        )
    else:
        InFlight.beside(submitter.history, record.env).remove(record.key)


class _Sender:
    """One submission that is being sent."""

    def __init__(self, submitter: Submitter, requests: SubmissionRequests, record: Record) -> None:
        self._submitter = submitter
        self._api, self._clock, self._tell = submitter.api, submitter.clock, submitter.tell
        self._requests = requests
        self._record = record
        self._is_open = False  # True while a call may have had an effect
        self._job_id = ""
        self._lost_answers = 0
        self._failed_connections = 0
        self._pauses = 0
        self._has_registered = False
        self._end = submitter.clock.monotonic() + PATIENCE

    def send(self) -> str:
        while True:
            if self._submitter.bucket is not None:
                self._submitter.bucket.take(self._clock, self._tell)
            self._update_intent()
            self._is_open = True
            try:
                self._job_id = self._api.submit(self._requests.submit)
            except BatchmlError as error:
                self._job_id = self._handle(error)
                if self._job_id:
                    return self._job_id
                continue
            return self._keep_one(self._job_id) if self._lost_answers else self._job_id

    def look_up_after_interrupt(self) -> Interrupted:
        """Look up the job once after Ctrl-C. A second Ctrl-C ends the look-up, too."""
        if self._job_id or not self._is_open:
            return Interrupted(self._record.key, self._job_id)
        try:
            found = self._api.find_by_name(self._record.queue, self._record.job_name, once=True)
        except (BatchmlError, KeyboardInterrupt):
            found = []
        job_id = found[0].job_id if found else ""
        return Interrupted(self._record.key, job_id, is_open=not job_id)

    def _update_intent(self) -> None:
        """Update the time of the intent on disk, if the call is made later than the intent says.

        A process that settles the submission of a killed client waits until ListJobs must return
        the job, counted from that time.
        """
        now = int(self._clock.now() * 1000)
        if abs(now - self._record.at) > INTENT_TOLERANCE * 1000:
            self._record = replace(self._record, at=now)
            self._submitter.history.intend(self._record)

    def _handle(self, error: BatchmlError) -> str:
        """Handle a failed call: the id of its job, if there is one, or "" to send it again."""
        kind = classify_error(error)
        if kind is ErrorClass.UNREACHED and self._api.is_local:
            # An earlier attempt of the client may have reached the server.
            kind = ErrorClass.UNKNOWN
        if kind is ErrorClass.UNKNOWN:
            return self._look_up(error)
        self._is_open = False
        if kind is ErrorClass.REFUSED:
            self._requests = self._correct(error)
        elif kind is ErrorClass.BUSY:
            if self._submitter.bucket is not None:
                self._submitter.bucket.throttled(self._clock)
            self._pause(error, "AWS Batch is too busy; waiting to send again.")
        else:
            self._failed_connections += 1
            if self._failed_connections >= TRIES:
                raise error
            self._pause(error, "AWS Batch cannot be reached; trying again.")
        return ""

    def _look_up(self, error: BatchmlError) -> str:
        if not self._lost_answers:
            self._tell("The answer of AWS Batch was lost; looking for the run by its name.")
        self._lost_answers += 1
        try:
            found = look_up(self._api, self._record, self._clock, listing_delay(self._api))
        except BatchmlError as second:
            raise SubmissionUnknown(
                self._record.name, self._record.key, f"{error} {second}"
            ) from second
        if found:
            return keep_one_job(self._api, found, self._tell)
        self._is_open = False
        if self._lost_answers > RESENDS:
            raise error
        return ""

    def _keep_one(self, job_id: str) -> str:
        """Keep one job if an earlier call made one after the look-up; the id of the kept job."""
        try:
            found = self._api.find_by_name(self._record.queue, self._record.job_name)
        except BatchmlError:
            return job_id
        return keep_one_job(self._api, found, self._tell) if len(found) > 1 else job_id

    def _pause(self, error: BatchmlError, words: str) -> None:
        """Wait, each time longer and with jitter. Raises `error` when `PATIENCE` is over."""
        from random import random

        if self._clock.monotonic() >= self._end:
            raise error
        if not self._pauses:
            self._tell(words)
        longest = min(MAX_BACKOFF, 2.0**self._pauses)
        self._pauses += 1
        self._clock.sleep(longest * (0.5 + random() / 2))

    def _correct(self, error: BatchmlError) -> SubmissionRequests:
        """The requests to send instead of refused ones. Raises `error` if there are none."""
        submit, register = self._requests.submit, self._requests.register
        if not isinstance(error, ServiceError):
            raise error
        if self._submitter.share and "shareIdentifier" not in submit and _asks_for_share(error):
            return replace(
                self._requests, submit={**submit, "shareIdentifier": self._submitter.share}
            )
        if error.code != "ClientException":
            raise error
        message = error.message.lower()
        if "queue" in message:  # so that no definition is registered for nothing
            self._check_queue(error)
        if self._has_registered:
            raise error
        self._has_registered = True
        if not self._api.has_definition(register["jobDefinitionName"]):
            self._api.register(dated_registration(register, self._clock.now()))
            return self._requests
        if "queue" not in message:
            self._check_queue(error)
        if "definition" not in message:
            raise error
        return self._requests  # another process has registered it just now

    def _check_queue(self, refusal: ServiceError) -> None:
        """Raise NoQueue if the queue does not exist; do nothing if AWS denies the look-up."""
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
    """The share identifier of this user: the letters and digits of the name."""
    return "".join(char for char in user_name() if char.isascii() and char.isalnum()) or "default"
