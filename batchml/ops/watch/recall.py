"""A run that DescribeJobs does not know: it may be listed already, or be on record here."""

from collections.abc import Callable, Iterable
from typing import Protocol

from batchml.model.record import Record
from batchml.model.run import Run
from batchml.ops.search import as_run


class Listing(Protocol):
    """ListJobs of a queue, by name: BatchApi has it."""

    def list_recent(self, queue: str, since: int = 0, name: str = "") -> Iterable[Run]: ...


class History(Protocol):
    def recent(self, env: str | None = None) -> list[Record]: ...


def recalling(listing: Listing, history: History, env: str) -> Callable[[str], Run | None]:
    """What to hand to `follow` and `wait` as `recall`, for the runs of an environment.

    AWS Batch lists a job sooner than it describes it, and forgets it some days after its end: then
    what was seen of that end from here is the answer.
    """

    def recall(job_id: str) -> Run | None:
        record = next((each for each in history.recent(env) if each.job_id == job_id), None)
        if record is None:
            return None
        if record.job_name:
            for run in listing.list_recent(record.queue, name=record.job_name):
                if run.job_id == job_id:
                    return run
        return as_run(record) if record.has_ended else None

    return recall
