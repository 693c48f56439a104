"""Read the metrics in the logs of runs; the history keeps those of runs that have ended."""

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import msgspec

from batchml.aws.batch.jobs import USAGE, LogMark
from batchml.context import Context
from batchml.errors import AccessError, BatchmlError, ServiceError
from batchml.model.numbering import original_numbers
from batchml.model.run import MetricRange, Record, Run
from batchml.runs.find import load_children
from batchml.runs.metrics.pace import PaceLog
from batchml.runs.metrics.series import (
    SampleWindow,
    Series,
    last_values,
    ranges_of,
    read_series,
)
from batchml.runs.search import FoundRun, lacks_ranges
from batchml.runtime.protocol.log_marks import MARK

_USAGE = f"{MARK}{USAGE} "
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


def measure_run(context: Context, run: Run, record: Record) -> Record:
    """The record with the metrics in the run's log."""
    is_array = run.array_size > 0
    found = FoundRun(run, record)
    read = read_children(context, found) if is_array else read_metrics(context, run, record)
    return read.added_to(record)


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
