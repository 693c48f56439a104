"""Settle submissions whose answers were lost: find the run by its name, keep one, or find none."""

from collections.abc import Callable, Iterable

from msgspec import Struct

from batchml.aws.batch.jobs import JobApi
from batchml.clock import Clock
from batchml.errors import BatchmlError, ServiceError
from batchml.history import History
from batchml.model.run import Record
from batchml.runs.in_flight import InFlight, UnsentRequests
from batchml.runs.send import keep_one_job, listing_delay, look_up

NEVER_ARRIVED = "it never reached AWS Batch"
_MAX_SETTLED = 5  # abandoned submissions that a new one settles on its way


class SettledSubmission(Struct, frozen=True):
    """The outcome of an open submission: a run, no run (`job_id` is ""), or still open."""

    record: Record
    job_id: str = ""
    is_open: bool = False


def reconcile(
    api: JobApi,
    history: History,
    env: str,
    clock: Clock,
    *,
    keys: Iterable[str] | None = None,
    wait: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> list[SettledSubmission]:
    """Settle the open submissions of an environment, or those with these keys; the oldest first.

    Submissions that another process is just sending are left alone. A run that is not listed yet
    may still appear: with `wait` this function waits for it, without it the submission stays open.
    Nothing is sent a second time; but a group run whose head exists is completed. Raises
    AccessError, ServiceError or ServiceUnreachable.
    """
    flights = InFlight.beside(history, env)
    settled: list[SettledSubmission] = []
    left: set[str] = set()  # keys of heads whose submission is still open
    for record in _select_records(history.unconfirmed(env), None if keys is None else set(keys)):
        if record.gang in left:
            settled.append(SettledSubmission(record, is_open=True))
            continue
        if flights.is_flying(record.key):
            left.add(record.key)
            settled.append(SettledSubmission(record, is_open=True))
            continue
        settled.append(_settle(api, history, record, clock, wait, tell))
        if settled[-1].is_open:
            left.add(record.key)
        else:
            flights.remove(record.key)
    _delete_unsent(history, env, flights)
    if keys is None:  # files of clients that were killed before they kept an intent
        for key in set(flights.abandoned(clock.now())) - {
            each.key for each in history.unconfirmed(env)
        }:
            flights.remove(key)
    return settled


def _select_records(records: list[Record], keys: set[str] | None) -> list[Record]:
    """The records with these keys, or all; of a group run every job, the head first."""
    if keys is not None:
        gangs = {key for record in records if keys & {*record.keys} for key in record.keys[-1:]}
        records = [record for record in records if record.keys[-1] in gangs]
    return sorted(records, key=lambda record: bool(record.gang))


def _delete_unsent(history: History, env: str, flights: InFlight) -> None:
    """Delete kept requests of group runs that are complete, or never will be."""
    unsent = UnsentRequests.beside(history, env)
    kept = unsent.gangs()
    known = {record.gang for record in history.unconfirmed(env)} if kept else set()
    for gang in kept:
        if gang not in known and not flights.is_flying(gang):
            unsent.drop(gang)


def _settle(
    api: JobApi,
    history: History,
    record: Record,
    clock: Clock,
    wait: bool,
    tell: Callable[[str], None],
) -> SettledSubmission:
    # After a clock was set back an intent looks young for ever: it gets its lag once more.
    left = min(listing_delay(api), max(0.0, record.at / 1000 + listing_delay(api) - clock.now()))
    try:
        found = look_up(api, record, clock, left if wait else 0.0)
    except ServiceError as error:
        if error.code != "ClientException":
            raise
        found = []  # its queue was deleted, and with it its jobs
    if found:
        job_id = keep_one_job(api, found, tell)
        history.add_job_id(record.key, job_id)
        if record.gang:
            from batchml.runs.groups.submit import end_late_workers

            end_late_workers(api, history, record, job_id, tell)
        return SettledSubmission(record, job_id)
    if left and not wait:
        return SettledSubmission(record, is_open=True)
    if record.gang:
        from batchml.runs.groups.submit import submit_unsent_workers

        return SettledSubmission(record, submit_unsent_workers(api, history, record, clock, tell))
    history.add_refusal(record.key, NEVER_ARRIVED)
    return SettledSubmission(record)


def settle_abandoned(
    api: JobApi, history: History, env: str, clock: Clock, tell: Callable[[str], None]
) -> None:
    """Settle submissions that killed clients have left, before another submission.

    Without any, that costs one look into a folder. A failure is left for the next time.
    """
    flights = InFlight.beside(history, env)
    keys = flights.abandoned(clock.now())[:_MAX_SETTLED]
    if not keys:
        return
    try:
        settled = reconcile(api, history, env, clock, keys=keys, wait=False, tell=tell)
    except (BatchmlError, OSError):
        return
    for one in settled:
        if one.job_id:
            tell(f"An interrupted submission of {one.record.name!r} did arrive: job {one.job_id}.")
    for key in set(keys) - {one.record.key for one in settled}:
        flights.remove(key)  # it ended before its intent was kept, or just after it was settled
