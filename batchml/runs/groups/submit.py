"""Submit the jobs of a group run, each exactly once, and all of them or none.

The whole intent is on disk before the first call: keys and names in the history, and beside it the
requests that are not sent yet. So the next client finishes a group run that a killed client has
left between two jobs.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress

from msgspec import Struct

from batchml.aws.batch.jobs import JobApi
from batchml.aws.batch.requests import SubmissionRequests
from batchml.clock import Clock
from batchml.errors import BatchmlError, SubmissionUnknown
from batchml.history import History
from batchml.model.record import Record, RunName
from batchml.model.run import Run
from batchml.runs.cancel import is_stopping
from batchml.runs.in_flight import InFlight, RateBucket, Unsent
from batchml.runs.send import Interrupted, send_intent

NO_HEAD = "the head of its gang was not submitted"
OVER = "its gang was over before it was submitted"
INCOMPLETE = "batchml: the gang could not be submitted whole"

Tell = Callable[[str], None]


class SubmitIntent(Struct, frozen=True):
    """The requests of a job that will be submitted, and its record."""

    requests: SubmissionRequests
    record: Record


def submit_group_run(
    api: JobApi,
    head: SubmitIntent,
    workers: Sequence[SubmitIntent],
    history: History,
    *,
    clock: Clock,
    bucket: RateBucket | None = None,
    share: str = "",
    tell: Tell = lambda _: None,
) -> str:
    """Send the jobs of a group run, each exactly once, the head first; the head's job id.

    After a refused head nothing is left. Refused workers end the jobs that were sent before them.
    Raises as `submit` does; Interrupted and SubmissionUnknown are about the head. For workers whose
    submission is unknown there is only a message: the head waits for them.
    """
    everyone = [*workers, head]  # the head is the newest: @last
    flights = InFlight.beside(history, head.record.env)
    sending = _Sending(api, head, workers, history, clock, bucket, share, tell)
    with ExitStack() as stack:
        for each in everyone:
            stack.enter_context(flights.flight(each.record.key))
        sending.unsent.keep(head.record.key, {each.record.key: each.requests for each in workers})
        history.intend(*(each.record for each in everyone))
        head_id = sending.head()
        try:
            sending.workers(head_id)
        except KeyboardInterrupt as stop:
            tell("Its workers are not all submitted yet: batchml reconcile does that.")
            raise Interrupted(head.record.key, head_id) from stop
        finally:
            sending.clean()
        return head_id


class _Sending:
    """A group run that is being sent; all of it is on disk."""

    def __init__(
        self,
        api: JobApi,
        head: SubmitIntent,
        workers: Sequence[SubmitIntent],
        history: History,
        clock: Clock,
        bucket: RateBucket | None,
        share: str,
        tell: Tell,
    ) -> None:
        self._api = api
        self._head = head
        self._workers = workers
        self._history = history
        self._clock = clock
        self._bucket = bucket
        self._share = share
        self._tell = tell
        self.unsent = Unsent.beside(history, head.record.env)

    def head(self) -> str:
        """Send the head; workers are sent only after it."""
        try:
            return self._send(self._head)
        except SubmissionUnknown:
            raise
        except BatchmlError:
            self._give_up(self._workers, NO_HEAD)
            raise
        except Interrupted as stop:
            if not stop.job_id and not stop.is_open:
                self._give_up(self._workers, NO_HEAD)
            raise

    def workers(self, head_id: str) -> None:
        """Send the workers. If some are refused, terminate the jobs sent before."""
        sent = [head_id]
        for number, each in enumerate(self._workers):
            try:
                sent.append(self._send(each))
            except SubmissionUnknown as error:
                self._tell(f"{error} The head waits for them.")
            except BatchmlError as error:
                self._give_up(self._workers[number + 1 :], str(error))
                end_all(self._api, sent, INCOMPLETE, self._tell)
                raise

    def clean(self) -> None:
        """Delete the kept requests once nobody will send them any more."""
        record = self._head.record
        with suppress(OSError):
            if not any(each.gang == record.key for each in self._history.open(record.env)):
                self.unsent.drop(record.key)

    def _send(self, each: SubmitIntent) -> str:
        return send_intent(
            self._api, each.requests, self._history, each.record,
            clock=self._clock, bucket=self._bucket, share=self._share, tell=self._tell,
        )  # fmt: skip

    def _give_up(self, left: Iterable[SubmitIntent], why: str) -> None:
        record = self._head.record
        flights = InFlight.beside(self._history, record.env)
        with suppress(OSError):  # a full disk: they stay open, and `reconcile` says the same
            for each in left:
                self._history.refused(each.record.key, why)
                flights.remove(each.record.key)
            self.unsent.drop(record.key)


def finish(api: JobApi, history: History, record: Record, clock: Clock, tell: Tell) -> str:
    """Send workers that a killed client has left, after AWS Batch does not list them.

    The job's id; empty where the group run does not need them any more. `record` is theirs. A
    second process that does the same finds it done. Refused workers end the group run, with a
    message. Raises SubmissionUnknown, and the errors of AWS Batch about the head.
    """
    flights, unsent = InFlight.beside(history, record.env), Unsent.beside(history, record.env)
    with flights.flight(record.key):
        own = next((each for each in _jobs(history, record) if each.key == record.key), None)
        if own is not None and (own.job_id or own.refused):
            return own.job_id
        head = _head(api, history, record)
        requests = unsent.find(record.gang, record.key)
        if head is None or is_stopping(head):
            history.refused(record.key, OVER if head else NO_HEAD)
            return ""
        if requests is None:
            history.refused(record.key, INCOMPLETE)
            _end_gang(api, history, record, tell)
            return ""
        try:
            return send_intent(
                api, requests, history, record, clock=clock, share=head.share, tell=tell
            )
        except SubmissionUnknown:
            raise
        except BatchmlError as error:
            tell(f"{record.name}: {error}")
            _end_gang(api, history, record, tell)
            return ""


def end_left_over(api: JobApi, history: History, record: Record, job_id: str, tell: Tell) -> None:
    """Terminate workers that were found late, if their group run was given up meanwhile."""
    head = _head(api, history, record)
    if head is None or is_stopping(head):
        end_all(api, [job_id], OVER, tell)


def _jobs(history: History, record: Record) -> list[RunName]:
    """The jobs of the group run that these workers belong to, as the history knows them."""
    names = history.names(record.env)
    return [each for each in names if record.gang in (each.key, each.gang)]


def _head(api: JobApi, history: History, record: Record) -> Run | None:
    jobs = _jobs(history, record)
    job_id = next((each.job_id for each in jobs if each.key == record.gang), "")
    return api.describe([job_id]).get(job_id) if job_id else None


def _end_gang(api: JobApi, history: History, record: Record, tell: Tell) -> None:
    known = [each.job_id for each in _jobs(history, record) if each.job_id]
    end_all(api, known, INCOMPLETE, tell)


def end_all(api: JobApi, job_ids: Iterable[str], reason: str, tell: Tell) -> None:
    """Terminate jobs in any state; a failure is a message."""
    for job_id in job_ids:
        try:
            api.terminate(job_id, reason)
        except BatchmlError as error:
            tell(f"It could not be stopped: batchml cancel {job_id}\n  {error}")
