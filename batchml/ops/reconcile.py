"""Settle submissions whose answers were lost: find the run by its name, keep one, or say none."""

from collections.abc import Callable, Iterable

from msgspec import Struct

from batchml.aws.batch.jobs import BatchApi, Found
from batchml.clock import Clock
from batchml.errors import BatchmlError, ServiceError, ServiceUnreachable
from batchml.model.record import Record
from batchml.model.run import JobStatus
from batchml.ops.flights import Flights
from batchml.ops.history import History
from batchml.ops.unsent import Unsent

# Seconds until ListJobs certainly shows what SubmitJob did. AWS promises nothing; a minute is far
# beyond what was seen. The embedded server shows it at once, and may still be at work on a call.
AWS_LAG = 60.0
LOCAL_LAG = 2.0
LONGEST_PAUSE = 15.0  # seconds between two looks
SECOND_RUN = "batchml: second run of one submission"
NEVER_ARRIVED = "it never reached AWS Batch"
_AT_ONCE = 5  # abandoned submissions that a new one settles on its way


class Settled(Struct, frozen=True):
    """What became of an open submission: a run, none (`job_id` is ""), or still open."""

    record: Record
    job_id: str = ""
    is_open: bool = False


def lag(api: BatchApi) -> float:
    """Seconds after which a run that is not listed is not there."""
    return LOCAL_LAG if api.is_local else AWS_LAG


def look_up(api: BatchApi, record: Record, clock: Clock, seconds: float) -> list[Found]:
    """The runs of a submission, looked for until there is one, or `seconds` have passed.

    Raises what the last look raised; whether there is a run is then not known.
    """
    end = clock.monotonic() + seconds
    pause = 1.0
    while True:
        left = end - clock.monotonic()
        try:
            found = api.called(record.queue, record.job_name)
        except (ServiceUnreachable, ServiceError) as error:
            if clock.monotonic() >= end or not _passes(error):
                raise
            found = []
        if found or left <= 0:
            return found
        clock.sleep(min(pause, left))
        pause = min(pause * 2, LONGEST_PAUSE)


def _passes(error: ServiceUnreachable | ServiceError) -> bool:
    return isinstance(error, ServiceUnreachable) or error.status >= 500


def adopt(api: BatchApi, found: Iterable[Found], tell: Callable[[str], None]) -> str:
    """Keep one run of a submission, and stop the others; the id of the one that stays.

    That is the oldest, but not one that failed while another lives: the second to start finds the
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


def reconcile(
    api: BatchApi,
    history: History,
    env: str,
    clock: Clock,
    *,
    keys: Iterable[str] | None = None,
    wait: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Settled]:
    """Settle the open submissions of an environment, or those with these keys; the oldest first.

    Those that another process is just sending are left to it. A run that is not listed yet may
    still come: with `wait` that is waited for, without it the submission stays open. Nothing is
    ever sent again; but a gang whose head is there is made whole. Raises AccessError, ServiceError
    or ServiceUnreachable.
    """
    flights = Flights.beside(history, env)
    settled: list[Settled] = []
    left: set[str] = set()  # heads of which nothing is known yet
    for record in _chosen(history.open(env), None if keys is None else set(keys)):
        if record.gang in left:
            settled.append(Settled(record, is_open=True))
            continue
        if flights.is_flying(record.key):
            left.add(record.key)
            settled.append(Settled(record, is_open=True))
            continue
        settled.append(_settle(api, history, record, clock, wait, tell))
        if settled[-1].is_open:
            left.add(record.key)
        else:
            flights.landed(record.key)
    _forget_requests(history, env, flights)
    return settled


def _chosen(records: list[Record], keys: set[str] | None) -> list[Record]:
    """Those with these keys, or all; of a gang every job, the head first."""
    if keys is not None:
        gangs = {key for record in records if keys & {*record.keys} for key in record.keys[-1:]}
        records = [record for record in records if record.keys[-1] in gangs]
    return sorted(records, key=lambda record: bool(record.gang))


def _forget_requests(history: History, env: str, flights: Flights) -> None:
    """Of gangs that are whole, or never will be, whoever has left them."""
    unsent = Unsent.beside(history, env)
    kept = unsent.gangs()
    known = {record.gang for record in history.open(env)} if kept else set()
    for gang in kept:
        if gang not in known and not flights.is_flying(gang):
            unsent.drop(gang)


def _settle(
    api: BatchApi,
    history: History,
    record: Record,
    clock: Clock,
    wait: bool,
    tell: Callable[[str], None],
) -> Settled:
    # A clock that was set back makes an intent look young for ever: it is given its lag once more.
    left = min(lag(api), max(0.0, record.at / 1000 + lag(api) - clock.now()))
    try:
        found = look_up(api, record, clock, left if wait else 0.0)
    except ServiceError as error:
        if error.code != "ClientException":
            raise
        found = []  # its queue is gone, and a queue goes after its jobs
    if found:
        job_id = adopt(api, found, tell)
        history.submitted(record.key, job_id)
        if record.gang:
            from batchml.ops.gang import end_left_over

            end_left_over(api, history, record, job_id, tell)
        return Settled(record, job_id)
    if left and not wait:
        return Settled(record, is_open=True)
    if record.gang:
        from batchml.ops.gang import finish

        return Settled(record, finish(api, history, record, clock, tell))
    history.refused(record.key, NEVER_ARRIVED)
    return Settled(record)


def settle_abandoned(
    api: BatchApi, history: History, env: str, clock: Clock, tell: Callable[[str], None]
) -> None:
    """Settle what clients that were killed have left, on the way to something else.

    When there is nothing, that costs one look into a folder. What fails is left for the next time.
    """
    flights = Flights.beside(history, env)
    keys = flights.abandoned(clock.now())[:_AT_ONCE]
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
        flights.landed(key)  # it ended before its intent was kept, or just after it was settled
