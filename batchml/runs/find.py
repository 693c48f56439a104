"""Find runs in AWS Batch and in the history: by filters, by job ids, by words of a command line."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from batchml.aws.batch.jobs import MAX_DESCRIBE, USAGE, LogMark
from batchml.context import Context
from batchml.errors import AccessError, BatchmlError, NotFound, ServiceError
from batchml.model.fallback import MOVED_MARK
from batchml.model.numbering import format_ranges, original_id, original_numbers, rerun_id
from batchml.model.run import (
    NOT_KNOWN,
    NOT_KNOWN_WORDS,
    MetricRange,
    Record,
    Run,
    first_child_id,
    first_start,
    has_begun,
)
from batchml.runs.metrics.conditions import MetricValue
from batchml.runs.metrics.pace import PaceLog
from batchml.runs.metrics.series import (
    SampleWindow,
    Series,
    last_values,
    ranges_of,
    read_series,
)
from batchml.runs.names import ProjectScope, bare_id, select_run
from batchml.runs.search import (
    FoundRun,
    RunFilter,
    SkippedRuns,
    keep_ends,
    lacks_ranges,
    run_from_history,
    search,
    with_metrics,
)
from batchml.runtime.protocol.log_marks import MARK

if TYPE_CHECKING:
    from batchml.aws.batch.jobs import JobApi
    from batchml.history import HistoryRecords

_USAGE = f"{MARK}{USAGE} "
MAX_CHILDREN = 32  # of an array, whose logs are read
READING_TIME = 5.0  # seconds for which a log is read for its metrics; the rest is not read


class RunMetrics(NamedTuple):
    """The metrics in a run's log, and the marks with its usage.

    `is_whole` is False if the log was too long to read all of it, or if `is_damaged`: the log is
    not what the run wrote.
    """

    series: dict[str, Series]
    is_whole: bool
    is_damaged: bool = False
    usage: tuple[LogMark, ...] = ()

    @property
    def last(self) -> dict[str, float]:
        """The last value of each metric; without NaN and infinity, which JSON cannot hold."""
        return last_values(self.series)

    @property
    def ranges(self) -> dict[str, MetricRange]:
        """The first, least and greatest value of each metric."""
        return ranges_of(self.series)

    def added_to(self, record: Record | None) -> Record:
        """The record with these metrics, or with its own if there are none here."""
        record = record or Record()
        if not self.series:
            return record
        return msgspec.structs.replace(record, metrics=self.last, ranges=self.ranges)


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
        is_array = run.array_size > 0
        found = FoundRun(run, record)
        read = read_children(context, found) if is_array else read_metrics(context, run, record)
        return read.added_to(record)

    return measure


def measure_runs(
    context: Context, runs: Iterable[FoundRun], values: Sequence[MetricValue]
) -> list[FoundRun]:
    """The runs with these values of metrics: a log is read if the history does not have them."""
    return [with_metrics(each, values, _measure(context)) for each in runs]


def check_queues(api: "JobApi", queues: Iterable[str]) -> None:
    """Raise NotFound for the first of these queues that does not exist: one call at most."""
    queues = list(queues)
    known = api.queues() if queues else []
    for queue in queues:
        if queue not in known:
            hint = "Without --queue the runs of all queues are shown."
            raise NotFound("Job queue", queue, known, hint)


def load_runs(context: Context, job_ids: Sequence[str]) -> list[FoundRun]:
    """The runs with these ids, in their order, from AWS Batch or the history: a hundred in a call.

    Raises NotFound for the first run that is in neither.
    """
    history, now = context.history, int(context.clock.now() * 1000)
    records = history.records(context.env)
    described = context.describe(list(dict.fromkeys(job_ids)))
    known = {job_id: records.get(job_id) for job_id in {*job_ids, *described}}
    keep_ends(history, filter(None, map(known.get, described)), described)
    found = []
    for job_id in job_ids:
        run, record = described.get(job_id), known[job_id]
        if run is not None and record is not None and record.failures:
            run = msgspec.structs.replace(run, failures=record.failures)
        elif run is not None:
            run = with_child_failures(context, run)
        if record is not None:
            run = run or run_from_history(context.batch, record, now)
        elif run is None:
            raise unknown_run(context, job_id)
        found.append(FoundRun(run, record or _record_of_child(records, job_id)))
    return found


# The module with the function `with_trials(context, runs)`. It is imported only for runs of sweeps.
_TRIALS = "batchml.sweeps.trials"


def with_trials(context: Context, runs: Sequence[FoundRun]) -> list[FoundRun]:
    """The runs; trials of sweeps with their own parameters, which their requests do not have."""
    if not any(each.sweep for each in runs):
        return list(runs)
    found: list[FoundRun] = import_module(_TRIALS).with_trials(context, runs)
    return found


def with_child_failures(context: Context, run: Run) -> Run:
    """The run; an array that failed with the outcomes of its children, which takes one call."""
    if not run.children or run.failures:
        return run
    from batchml.aws.batch import jobs

    return jobs.with_child_failures(context.connect(), run)


def with_first_start(context: Context, found: FoundRun) -> FoundRun:
    """The run; an array with the time when its first child started, which takes one call."""
    run = found.run
    if run is None or run.started_at or not has_begun(run):
        return found
    child = first_child_id(run.job_id)
    try:
        start = first_start(context.describe([child]).get(child))
    except BatchmlError:  # the start is optional information
        return found
    if start and run.status.is_terminal and found.record is not None:
        with suppress(OSError):  # a full disk: the next call tries again
            context.history.add_starts({run.job_id: start})
    return FoundRun(msgspec.structs.replace(run, started_at=start), found.record)


def unknown_run(context: Context, job_id: str) -> NotFound:
    """The error for a job id that AWS Batch does not return."""
    if context.history.records(context.env).get(bare_id(job_id)) is not None:
        hint = NOT_KNOWN_WORDS
    else:
        hint = f"It is {NOT_KNOWN}, and was not submitted from here. `batchml ls` shows the runs."
    return NotFound("Run", job_id, [], describe_parts(context, job_id) or hint)


def describe_parts(context: Context, job_id: str) -> str:
    """For a child or node that does not exist, a sentence with the numbers that exist; else ""."""
    whole = bare_id(job_id)
    run = context.describe([whole]).get(whole) if whole != job_id else None
    if run is None:
        return ""
    size, what = (run.array_size, "children") if ":" in job_id else (run.nodes, "nodes")
    if size:
        return f"The {what} of {run.name} are 0 to {size - 1}."
    return f"{run.name} has no {what}: leave out {job_id.removeprefix(whole)}."


def _record_of_child(records: "HistoryRecords", job_id: str) -> Record | None:
    """The record of a child or node: the request of the whole run, without the run's end."""
    whole = records.get(bare_id(job_id))
    if whole is None:
        return None
    return msgspec.structs.replace(
        whole,
        job_id=job_id,
        status="",
        outcome="",
        metrics={},
        ranges={},
        measured=False,
        cost=None,
    )


def load_children(context: Context, found: FoundRun) -> list[FoundRun]:
    """The first `MAX_CHILDREN` children of an array, in one call; none for any other run."""
    size = found.run.array_size if found.run else 0
    ids = [f"{found.job_id}:{index}" for index in range(min(size, MAX_CHILDREN))]
    return with_trials(context, load_runs(context, ids))


def read_metrics(
    context: Context, run: Run, record: Record | None, beside: PaceLog | None = None,
    window: SampleWindow | None = None,
) -> RunMetrics:  # fmt: skip
    """Read the metrics in a run's log; the history keeps those of a run that has ended.

    There are none if the log is gone, if the user may not read it, and for an array: see
    `read_children`. `beside` reads the same lines. With a window, read only the samples in it.
    """
    end = context.clock.monotonic() + READING_TIME
    found = _read_log(context, run, record, end, beside, window)
    is_part = run.array_size or window is not None
    return found if is_part else _keep_metrics(context, run, record, found)


def read_children(
    context: Context, array: FoundRun, window: SampleWindow | None = None
) -> RunMetrics:
    """Read the metrics in the logs of an array's first children: `loss:3` is of child 3."""
    assert array.run is not None
    end = context.clock.monotonic() + READING_TIME
    first = original_numbers(array.run, array.record)
    series: dict[str, Series] = {}
    try:
        children = load_children(context, array)
    except BatchmlError:  # AWS Batch has forgotten some
        return RunMetrics({}, False)
    is_whole, is_damaged = len(children) == array.run.array_size, False
    for index, child in enumerate(each.run for each in children):
        if child is None:
            is_whole = False
            continue
        found = _read_log(context, child, array.record, end, window=window)
        number = first[index] if index < len(first) else index
        for name, each in found.series.items():
            whole = f"{name}:{number}"
            series[whole] = Series(whole, each.samples, each.breaks, each.total)
        is_whole, is_damaged = is_whole and found.is_whole, is_damaged or found.is_damaged
    found = RunMetrics(series, is_whole, is_damaged)
    if window is not None:
        return found
    return _keep_metrics(context, array.run, array.record, found)


def _keep_metrics(
    context: Context, run: Run, record: Record | None, found: RunMetrics
) -> RunMetrics:
    """Keep the metrics of a run that has ended in the history."""
    is_new = record is not None and (not record.measured or lacks_ranges(record))
    if is_new and run.status.is_terminal and found.is_whole:
        with suppress(OSError):  # a full disk must not hide the metrics
            context.history.add_end(run, found.last, ranges=found.ranges)
    return found


def _read_log(
    context: Context, run: Run, record: Record | None, end: float, beside: PaceLog | None = None,
    window: SampleWindow | None = None,
) -> RunMetrics:  # fmt: skip
    """Read the metrics in the log of one container, until the monotonic time `end`."""
    late: list[bool] = []
    damaged: list[bool] = []
    usage: list[LogMark] = []

    def messages(stream: str) -> Iterator[tuple[int, str]]:
        reader = context.open_log(run, stream)
        if beside is not None:
            beside.new_attempt()
        for line in reader.read():
            if context.clock.monotonic() > end:
                late.append(True)
                return
            if line.message.startswith(_USAGE):
                usage.append(LogMark(stream, line.timestamp, line.message))
            if beside is not None:
                beside.read(line.timestamp, line.message)
            yield line.timestamp, line.message
        if reader.check is not None and reader.check.is_damaged:
            damaged.append(True)

    streams = [attempt.log_stream for attempt in run.attempts if attempt.log_stream]
    try:
        series = read_series(
            (messages(stream) for stream in streams), record.patterns if record else {}, window
        )
    except (AccessError, ServiceError):
        return RunMetrics({}, False)
    return RunMetrics(series, not (late or damaged), bool(damaged), tuple(usage))


# --- Runs by the words of a command line ----------------------------------------------------------


# Modules with a function `suggest(context, word)`, which returns an error with a better message if
# the word names something else. They are imported only for a word that names no run.
_SUGGESTERS = ("batchml.sweeps.stores",)


def select(context: Context, words: Sequence[str]) -> list[str]:
    """The job ids of the runs that the words name, in their order; ListJobs is called once at most.

    Raises NotFound, UsageError.
    """
    if not words:
        return []

    @cache
    def listed() -> list[tuple[str, str]]:
        runs = [run for queue in context.batch.queues() for run in context.batch.list_recent(queue)]
        runs.sort(key=lambda run: run.created_at or 0, reverse=True)
        return [(run.job_id, run.job_name or run.name) for run in runs]

    def find_projects(job_ids: Sequence[str]) -> dict[str, str]:
        return {job_id: run.project for job_id, run in context.describe(job_ids).items()}

    history = context.history.names(context.env)
    scope = ProjectScope(context.project, find_projects)
    found = []
    for word in words:
        try:
            job_id = _to_aws_child(context, word, select_run(word, history, listed, scope))
            found.append(current_job_id(context, job_id))
        except NotFound as error:
            others = (import_module(name).suggest(context, word) for name in _SUGGESTERS)
            raise next(filter(None, others), error) from None
    return found


def current_job_id(context: Context, job_id: str) -> str:
    """The job id of a run, also after it has moved to another queue as another job."""
    names = context.history.names(context.env).named(bare_id(job_id))
    if not any(name.fallback for name in names):
        return job_id
    from batchml.runs.fallback.watch import follow_move

    return follow_move(context, names, job_id)


def _to_aws_child(context: Context, word: str, job_id: str) -> str:
    """The id of a child in AWS Batch, from its id with the number that it had in the first array.

    The numbers differ in partial reruns of arrays. At most one call. Raises NotFound for a child
    that was not run again.
    """
    whole, colon, _ = job_id.partition(":")
    if not colon:
        return job_id
    record = context.history.records(context.env).get(whole)
    run = None if record else context.describe([whole]).get(whole)
    first = original_numbers(run, record)
    own = rerun_id(job_id, first)
    if own is None:
        hint = f"It runs these children of the first array again: {format_ranges(first[:200])}."
        raise NotFound("Child", word, [], hint)
    return own


def display_id(context: Context, job_id: str) -> str:
    """The id of a child for users: with its number in the first array."""
    record = context.history.records(context.env).get(bare_id(job_id))
    return original_id(job_id, original_numbers(None, record))


def describe_runs(context: Context, job_ids: Sequence[str]) -> dict[str, Run]:
    """The runs with these ids, in their order: one call for a hundred.

    Raises NotFound for the first id that AWS Batch does not return.
    """
    job_ids = list(dict.fromkeys(job_ids))
    found = context.describe(job_ids)
    if any(run.status_reason.startswith(MOVED_MARK) for run in found.values()):
        from batchml.runs.fallback.watch import with_moves

        found = with_moves(context, found)
    for job_id in job_ids:
        if job_id not in found:
            raise unknown_run(context, job_id)
    return {job_id: found[job_id] for job_id in job_ids}
