"""Find the newest runs that match a filter, in AWS Batch and in the history."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from batchml.aws.batch.jobs import MAX_DESCRIBE
from batchml.context import Context
from batchml.errors import ServiceError
from batchml.model.run import Record, Run
from batchml.runs.find import check_queues, with_trials
from batchml.runs.metrics.conditions import MetricValue
from batchml.runs.search import FoundRun, RunFilter, SkippedRuns, search, with_metrics


class NewestRuns(NamedTuple):
    """The result of a search."""

    runs: list[FoundRun]
    has_more: bool
    left_out: SkippedRuns


def find(context: Context, wanted: RunFilter, limit: int) -> NewestRuns:
    """The newest `limit` runs that match the filter."""
    left_out = SkippedRuns()
    # A filter on what only DescribeJobs returns leaves out many runs.
    first = MAX_DESCRIBE if wanted.is_deep else min(limit + 1, MAX_DESCRIBE)
    newest = list(islice(find_all(context, wanted, left_out, first), limit + 1))
    return NewestRuns(newest[:limit], len(newest) > limit, left_out)


def find_all(
    context: Context,
    wanted: RunFilter,
    left_out: SkippedRuns | None = None,
    first: int = MAX_DESCRIBE,
) -> Iterator[FoundRun]:
    """The runs that match the filter, the newest first; `left_out` and `first` as in `search`."""
    api = context.batch
    queues = [wanted.queue] if wanted.queue else api.queues()
    now = int(context.clock.now() * 1000)
    try:
        yield from search(
            api, context.history, context.env, queues, wanted, _measure(context), now, left_out,
            lambda runs: with_trials(context, runs), first,
        )  # fmt: skip
    except ServiceError as error:
        if error.operation == "ListJobs":
            check_queues(api, [wanted.queue] if wanted.queue else [])
        raise


def _measure(context: Context) -> Callable[[Run, Record], Record]:
    """A function that adds the metrics in a run's log to its record."""

    def measure(run: Run, record: Record) -> Record:
        from batchml.runs.metrics.reading import measure_run  # late: few searches read logs

        return measure_run(context, run, record)

    return measure


def measure_runs(
    context: Context, runs: Iterable[FoundRun], values: Sequence[MetricValue]
) -> list[FoundRun]:
    """The runs with these values of metrics: a log is read if the history does not have them."""
    return [with_metrics(each, values, _measure(context)) for each in runs]
