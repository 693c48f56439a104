"""Find the runs that are the first in the order of a column, however many there are."""

from collections.abc import Callable, Iterator
from itertools import islice
from math import inf

from msgspec.structs import replace

from batchml.history import History, HistoryRecords
from batchml.runs.compare.columns import Column, first_runs
from batchml.runs.compare.newest import NewestRuns
from batchml.runs.metrics.conditions import MetricCondition, MetricValue, child_of
from batchml.runs.search import FoundRun, RunFilter, SkippedRuns, to_bound, to_query

_AT_ONCE = 100  # runs that are completed together
_LONG = 1024 * 1024  # bytes of a history whose records are not all read for a metric
_WIDER = 8  # times as many runs, if other conditions leave too few


def find_first(
    history: History,
    env: str,
    search: Callable[[RunFilter, SkippedRuns], Iterator[FoundRun]],
    complete: Callable[[list[FoundRun]], list[FoundRun]],
    wanted: RunFilter,
    limit: int,
    column: Column,
    now: int,
    *,
    descending: bool,
) -> NewestRuns:
    """The first `limit` runs that match the filter; no more are kept in memory.

    `search` finds the newest first, with the metrics of the filter; `complete` adds what the column
    needs. For a metric and a long history, only the records of the runs with the first values are
    read, and of those whose values the history does not have. `now` is in ms since the epoch.
    """
    count = limit + 1  # one more tells that there are more
    left_out = SkippedRuns()
    if column.metric is None or history.size < _LONG:
        found = search(wanted, left_out)
        chunks = iter(lambda: list(islice(found, _AT_ONCE)), [])
        completed = (each for chunk in chunks for each in complete(chunk))
        first = first_runs(count, completed, column, now, descending=descending)
        return NewestRuns(first[:limit], len(first) > limit, left_out)
    records = history.records(env)
    for condition in _conditions(records, wanted, column.metric, count, descending=descending):
        left_out = SkippedRuns()
        having = search(replace(wanted, metrics=(*wanted.metrics, condition)), left_out)
        first = first_runs(count, having, column, now, descending=descending)
        if len(first) == count:
            break
    else:
        left_out, ids = SkippedRuns(), {each.job_id for each in first}
        without = (each for each in search(wanted, left_out) if each.job_id not in ids)
        first += islice(without, count - len(first))
    return NewestRuns(first[:limit], len(first) > limit, left_out)


def _conditions(
    records: HistoryRecords, wanted: RunFilter, metric: MetricValue, count: int, *, descending: bool
) -> Iterator[MetricCondition]:
    """Conditions that at least `count` runs meet as far as the index knows, then ever more runs.

    All runs with a value meet the last condition.
    """
    sign, end = (">=", -inf) if descending else ("<=", inf)
    widest = MetricCondition(metric.name, sign, end, metric.function)
    bound, query = to_bound(widest), to_query(wanted)
    # The index has neither the directions of metrics nor the values of children.
    while len(bound.columns) == 1 and child_of(metric.name)[0] == metric.name:
        value = records.nth_value(query, bound, count)
        if value is None:
            break
        yield replace(widest, bound=value)
        count *= _WIDER
    yield widest
