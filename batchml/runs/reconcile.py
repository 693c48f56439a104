"""Settle submissions whose answers were lost: find out by the job's name whether there is a job."""

from collections.abc import Iterable

from msgspec import Struct

from batchml.errors import BatchmlError, ServiceError
from batchml.history import History
from batchml.model.run import Record
from batchml.runs.in_flight import InFlight, UnsentRequests
from batchml.runs.send import Submitter, keep_one_job, listing_delay, look_up

NEVER_ARRIVED = "it never reached AWS Batch"
_MAX_SETTLED = 5  # abandoned submissions that are settled before a new one


class SettledSubmission(Struct, frozen=True):
    """The outcome of an open submission: a job, no job (`job_id` is ""), or still open."""

    record: Record
    job_id: str = ""
    is_open: bool = False


def reconcile(
    submitter: Submitter, env: str, *, keys: Iterable[str] | None = None, wait: bool = True
) -> list[SettledSubmission]:
    """Settle the open submissions of an environment, or those with these keys; the oldest first.

    Submissions that another process is sending are left alone. AWS Batch may list a job late: with
    `wait` this function waits for it, without `wait` the submission stays open. Nothing is sent a
    second time; but a group run whose head exists gets its missing workers. Raises AccessError,
    ServiceError or ServiceUnreachable.
    """
    history = submitter.history
    in_flight = InFlight.beside(history, env)
    settled: list[SettledSubmission] = []
    open_keys: set[str] = set()  # of heads, too: their workers wait
    for record in _select_records(history.unconfirmed(env), None if keys is None else set(keys)):
        if record.gang in open_keys or in_flight.is_being_sent(record.key):
            outcome = SettledSubmission(record, is_open=True)
        else:
            outcome = _settle(submitter, record, wait)
            if not outcome.is_open:
                in_flight.remove(record.key)
        if outcome.is_open:
            open_keys.add(record.key)
        settled.append(outcome)
    _delete_unsent(history, env, in_flight)
    if keys is None:  # files of clients that were killed before they wrote a record
        unconfirmed = {each.key for each in history.unconfirmed(env)}
        for key in set(in_flight.abandoned(submitter.clock.now())) - unconfirmed:
            in_flight.remove(key)
    return settled


def _select_records(records: list[Record], keys: set[str] | None) -> list[Record]:
    """The records with these keys, or all; for a group run all its jobs. Heads come first."""
    if keys is not None:
        head_keys = {record.keys[-1] for record in records if keys & {*record.keys}}
        records = [record for record in records if record.keys[-1] in head_keys]
    return sorted(records, key=lambda record: bool(record.gang))


def _delete_unsent(history: History, env: str, in_flight: InFlight) -> None:
    """Delete the stored requests of group runs that are complete, or will never be completed."""
    unsent = UnsentRequests.beside(history, env)
    stored = unsent.head_keys()
    needed = {record.gang for record in history.unconfirmed(env)} if stored else set()
    for key in stored:
        if key not in needed and not in_flight.is_being_sent(key):
            unsent.drop(key)


def _settle(submitter: Submitter, record: Record, wait: bool) -> SettledSubmission:
    delay = listing_delay(submitter.api)
    # If the clock was set back, the record is in the future: then the whole delay counts again.
    left = min(delay, max(0.0, record.at / 1000 + delay - submitter.clock.now()))
    try:
        found = look_up(submitter.api, record, submitter.clock, left if wait else 0.0)
    except ServiceError as error:
        if error.code != "ClientException":
            raise
        found = []  # the queue was deleted, and its jobs with it
    if found:
        job_id = keep_one_job(submitter.api, found, submitter.tell)
        submitter.history.add_job_id(record.key, job_id)
        if record.gang:
            from batchml.runs.groups.submit import end_late_workers

            end_late_workers(submitter, record, job_id)
        return SettledSubmission(record, job_id)
    if left and not wait:
        return SettledSubmission(record, is_open=True)
    if record.gang:
        from batchml.runs.groups.submit import submit_unsent_workers

        return SettledSubmission(record, submit_unsent_workers(submitter, record))
    submitter.history.add_refusal(record.key, NEVER_ARRIVED)
    return SettledSubmission(record)


def settle_abandoned(submitter: Submitter, env: str) -> None:
    """Settle submissions that killed clients have left, before another submission.

    Without any, the cost is one listing of a folder. After a failure the next submission tries
    again.
    """
    in_flight = InFlight.beside(submitter.history, env)
    keys = in_flight.abandoned(submitter.clock.now())[:_MAX_SETTLED]
    if not keys:
        return
    try:
        settled = reconcile(submitter, env, keys=keys, wait=False)
    except (BatchmlError, OSError):
        return
    for each in settled:
        if each.job_id:
            submitter.tell(
                f"An interrupted submission of {each.record.name!r} did arrive: job {each.job_id}."
            )
    for key in set(keys) - {each.record.key for each in settled}:
        in_flight.remove(key)  # the client ended before it wrote a record, or just after it settled
