"""Runs by what is known of them, in AWS Batch and in the history of this machine."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from batchml.client.waiting import judged
from batchml.errors import NotFound, ServiceError
from batchml.model.record import NOT_KNOWN, NOT_KNOWN_WORDS
from batchml.ops.search import Found, Wanted, remember, search, unlisted
from batchml.ops.select import bare_id

if TYPE_CHECKING:
    from batchml.aws.batch.jobs import BatchApi
    from batchml.client.place import Place
    from batchml.model.record import Record
    from batchml.model.run import Run
    from batchml.ops.history import Remembered
    from batchml.ops.metrics import Series

READING_TIME = 5.0  # seconds that a log is read for its metrics before the rest is left unread


class Measured(NamedTuple):
    """The metrics of a run's log.

    `is_whole` is False where the log was too long to read it all, or `is_damaged`: not what the run
    wrote.
    """

    series: "dict[str, Series]"
    is_whole: bool
    is_damaged: bool = False

    @property
    def last(self) -> dict[str, float]:
        """The last value of each metric; without NaN and infinity, which JSON cannot hold."""
        from batchml.ops.metrics import last_values

        return last_values(self.series)


class Newest(NamedTuple):
    """Runs that were looked for. `sweeps`: the keys of those whose runs were left out."""

    runs: list[Found]
    has_more: bool
    sweeps: frozenset[str]


def find(place: "Place", wanted: Wanted, limit: int) -> Newest:
    """The newest `limit` runs that are looked for."""
    api = place.batch
    queues = [wanted.queue] if wanted.queue else api.queues()

    def metrics(run: "Run", record: "Record") -> dict[str, float]:
        return measure(place, run, record).last

    now = int(place.clock.now() * 1000)
    sweeps: set[str] = set()
    found = search(api, place.history, place.env, queues, wanted, metrics, now, sweeps)
    try:
        newest = list(islice(found, limit + 1))
    except ServiceError as error:
        if error.operation == "ListJobs":
            check_queues(api, [wanted.queue] if wanted.queue else [])
        raise
    return Newest(newest[:limit], len(newest) > limit, frozenset(sweeps))


def check_queues(api: "BatchApi", queues: "Iterable[str]") -> None:
    """Raise NotFound for the first of these queues that is not there: one call, if any is given."""
    asked = list(queues)
    known = api.queues() if asked else []
    for queue in asked:
        if queue not in known:
            hint = "Without --queue the runs of all are shown."
            raise NotFound("Job queue", queue, known, hint)


def recall(place: "Place", job_ids: Sequence[str]) -> list[Found]:
    """These runs, also those that AWS has forgotten; a hundred a call.

    Raises NotFound for the first that neither AWS nor the history knows.
    """
    history, now = place.history, int(place.clock.now() * 1000)
    records = history.remembered(place.env)
    told = place.describe(list(dict.fromkeys(job_ids)))
    remember(history, filter(None, map(records.get, told)), told)
    found = []
    for job_id in job_ids:
        run, record = told.get(job_id), records.get(job_id)
        if run is not None and record is not None and record.failures:
            run = msgspec.structs.replace(run, failures=record.failures)
        elif run is not None:
            run = judged(place, run)
        if record is not None:
            run = run or unlisted(place.batch, record, now)
        elif run is None:
            raise unknown(place, job_id)
        found.append(Found(run, record or _of_child(records, job_id)))
    return found


def with_start(place: "Place", found: Found) -> Found:
    """An array with the time when its first child was started: one call, for an array only."""
    from batchml.errors import BatchmlError
    from batchml.model.run import began, first_child, has_begun

    run = found.run
    if run is None or run.started_at or not has_begun(run):
        return found
    child = first_child(run.job_id)
    try:
        start = began(place.describe([child]).get(child))
    except BatchmlError:  # it is an extra
        return found
    if start and run.status.is_terminal and found.record is not None:
        with suppress(OSError):  # the next time, then
            place.history.began({run.job_id: start})
    return Found(msgspec.structs.replace(run, started_at=start), found.record)


def unknown(place: "Place", job_id: str) -> NotFound:
    """What to say of a job id that the server does not know."""
    if place.history.remembered(place.env).get(bare_id(job_id)) is not None:
        hint = NOT_KNOWN_WORDS
    else:
        hint = f"It is {NOT_KNOWN}, and was not submitted from here. `batchml ls` shows the runs."
    return NotFound("Run", job_id, [], about_part(place, job_id) or hint)


def about_part(place: "Place", job_id: str) -> str:
    """For a child or node that is not there: which the run has, if any."""
    whole = bare_id(job_id)
    run = place.describe([whole]).get(whole) if whole != job_id else None
    if run is None:
        return ""
    size, what = (run.array_size, "children") if ":" in job_id else (run.nodes, "nodes")
    if size:
        return f"The {what} of {run.name} are 0 to {size - 1}."
    return f"{run.name} has no {what}: leave out {job_id.removeprefix(whole)}."


def _of_child(records: "Remembered", job_id: str) -> "Record | None":
    """What was asked for of one child of an array, or of one node: the same as of the whole."""
    whole = records.get(bare_id(job_id))
    if whole is None:
        return None
    return msgspec.structs.replace(
        whole, job_id=job_id, status="", outcome="", metrics={}, measured=False, cost=None
    )


def measure(place: "Place", run: "Run", record: "Record | None") -> Measured:
    """The metrics of a run, from its log; those of one that has ended are remembered.

    A log that is gone, or that may not be read, has none.
    """
    from batchml.errors import AccessError
    from batchml.ops.metrics import gather

    end = place.clock.monotonic() + READING_TIME
    late: list[bool] = []
    damaged: list[bool] = []

    def messages(stream: str) -> Iterator[tuple[int, str]]:
        reader = place.open_log(run, stream)
        for line in reader.read():
            if place.clock.monotonic() > end:
                late.append(True)
                return
            yield line.timestamp, line.message
        if reader.check is not None and reader.check.is_damaged:
            damaged.append(True)

    streams = [attempt.log_stream for attempt in run.attempts if attempt.log_stream]
    try:
        series = gather((messages(stream) for stream in streams), record.patterns if record else {})
    except (AccessError, ServiceError):
        return Measured({}, False)
    found = Measured(series, not (late or damaged), bool(damaged))
    if record is not None and not record.measured and run.status.is_terminal and found.is_whole:
        with suppress(OSError):  # a full disk is no reason not to show them
            place.history.ended(run, found.last)
    return found
