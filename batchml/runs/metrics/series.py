"""Metrics and progress of a run, from its output or from `batchml.runtime.report`."""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from batchml.cli.render import cells, pad, printable
from batchml.cli.terminal import sparkline
from batchml.model.outcome import is_supervised
from batchml.model.run import MetricRange
from batchml.runs.metrics.conditions import best_values, child_of
from batchml.runs.watch.events import (
    LogOpened,
    MetricsReported,
    OutputLine,
    RunEvent,
    StatusChanged,
)
from batchml.runtime.protocol.log_marks import STEP, TIME, TOTAL, parse_mark, read_points

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")

# Samples of one metric in memory. When there are more, every second one is dropped: that is enough
# for a curve, and a run of weeks can be followed.
MAX_SAMPLES = 8192

MAIN_NODE = "0"  # its log has the metrics of ranks that train together


class Sample(NamedTuple):
    """One value of a metric."""

    value: float
    time: float  # seconds since the epoch
    step: float | None  # None if the program gave no step


class Series(Struct, frozen=True):
    """The values of one metric, in the order in which they came.

    `breaks`: the indices of the first samples of attempts that may have begun again, as they do not
    say at which step. `total`: how many values there were; 0 if none of them were dropped.
    """

    name: str
    samples: tuple[Sample, ...]
    breaks: tuple[int, ...] = ()
    total: int = 0

    @property
    def values(self) -> list[float]:
        return [sample.value for sample in self.samples]

    @property
    def last(self) -> float:
        return self.samples[-1].value

    @property
    def range(self) -> MetricRange | None:
        """The first, least and greatest finite value; None if no value is finite."""
        known = [value for value in self.values if math.isfinite(value)]
        return MetricRange(known[0], min(known), max(known)) if known else None

    @property
    def has_steps(self) -> bool:
        return all(sample.step is not None for sample in self.samples)

    @property
    def steps(self) -> list[float]:
        """The steps, or 1, 2, 3 if the program gave no steps."""
        if not self.has_steps:
            return [float(place) for place in range(1, len(self.samples) + 1)]
        return [sample.step for sample in self.samples if sample.step is not None]


class SampleWindow(Struct, frozen=True):
    """A part of a series: from `low` to `high`, and the samples right beside that.

    `by`: "step", or "time" in seconds since the epoch.
    """

    by: str
    low: float
    high: float

    def has(self, sample: Sample) -> bool:
        place = sample.time if self.by == "time" else sample.step
        return place is not None and self.low <= place <= self.high


class SampleCollector:
    """Collects the samples of a metric, about `MAX_SAMPLES` at most.

    The first, the newest, the least and the greatest are always kept. With a window, all of this is
    so for the samples in it.
    """

    def __init__(self, window: SampleWindow | None = None) -> None:
        self._window = window
        self._outside: Sample | None = None  # the sample before the next one, if it is outside
        self._is_beside = False  # whether the sample before was in the window
        self._count = 0
        self._kept: list[tuple[int, Sample]] = []  # with their numbers
        self._every = 1
        self._since = 0
        self._first: tuple[int, Sample] | None = None
        self._least: tuple[int, Sample] | None = None
        self._greatest: tuple[int, Sample] | None = None
        self._newest: tuple[int, Sample] | None = None
        self._breaks: list[int] = []  # the numbers of the first samples of attempts

    def add(self, sample: Sample) -> None:
        if self._window is None:
            self._add(sample)
        elif self._window.has(sample):
            if self._outside is not None:
                self._add(self._outside)
            self._outside, self._is_beside = None, True
            self._add(sample)
        elif self._is_beside:
            self._outside, self._is_beside = None, False
            self._add(sample)
        else:
            self._outside = sample

    def _add(self, sample: Sample) -> None:
        numbered = self._count, sample
        self._count += 1
        self._note(numbered)
        self._newest = numbered
        self._since += 1
        if self._since < self._every:
            return
        self._since = 0
        self._kept.append(numbered)
        if len(self._kept) >= MAX_SAMPLES:
            self._kept = self._kept[1::2]
            self._every *= 2

    def _note(self, numbered: tuple[int, Sample]) -> None:
        value = numbered[1].value
        if not math.isfinite(value):
            return
        if self._first is None or self._least is None or self._greatest is None:
            self._first = self._least = self._greatest = numbered
        elif value < self._least[1].value:
            self._least = numbered
        elif value > self._greatest[1].value:
            self._greatest = numbered

    def go_back_to(self, step: float) -> None:
        """Drop samples from `step` on: a new attempt went on there from a checkpoint."""
        numbered = self._numbered()
        self._kept = [each for each in numbered if each[1].step is None or each[1].step < step]
        self._first = self._least = self._greatest = self._newest = None
        for each in self._kept:
            self._note(each)

    def begin_attempt(self) -> None:
        """The next sample is of a new attempt, which does not say at which step it begins."""
        self._breaks.append(self._count)

    def series(self, name: str) -> Series:
        numbered = list(self._numbered())
        numbers = [number for number, _ in numbered]
        breaks = (bisect_left(numbers, each) for each in self._breaks)
        samples = tuple(sample for _, sample in numbered)
        total = self._count if self._every > 1 else 0
        return Series(name, samples, tuple(each for each in breaks if each), total)

    def _numbered(self) -> list[tuple[int, Sample]]:
        if self._every == 1:  # nothing was dropped
            return self._kept
        extremes = (self._first, self._least, self._greatest, self._newest)
        return sorted({*self._kept, *filter(None, extremes)}, key=lambda each: each[0])


class Metrics:
    """Reads the metrics of one run. `patterns` is `[metrics]` of job.toml: name -> pattern.

    A pattern is a regular expression with one group, around the value. A pattern named `step`
    finds the step for its line and the lines after it. A match that is not a number is ignored.
    """

    def __init__(
        self, patterns: Mapping[str, str] = {}, window: SampleWindow | None = None
    ) -> None:
        self.patterns = patterns
        self._window = window
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items()}
        self._gathered: dict[str, SampleCollector] = {}
        self._steps: dict[str, float] = {}  # child -> the step of its current line
        # Child -> metrics without a value in its newest attempt, which may begin at an earlier step
        self._may_go_back: dict[str, set[str]] = {}
        self._streams: dict[str, str] = {}  # child -> the stream that is being read
        # True if ranks on several nodes train together: the main node reports.
        self._is_one_training = False
        self.values: dict[str, float] = {}  # the last value of each metric, if it is finite

    @property
    def series(self) -> dict[str, Series]:
        """The values of each metric that has any, by name."""
        made = {name: gathered.series(name) for name, gathered in self._gathered.items()}
        return {name: each for name, each in made.items() if each.samples}

    @property
    def ranges(self) -> dict[str, MetricRange]:
        """The first, least and greatest value of each metric that has a finite value."""
        return ranges_of(self.series)

    def feed(self, line: str, time: float = 0.0, child: str = "") -> None:
        """Read one line of output; colours are removed. `time` is in seconds since the epoch."""
        if not self._patterns:
            return
        plain = ANSI.sub("", line) if "\x1b" in line else line
        found = {name: self._matches(name, plain) for name in self._patterns}
        steps = [step for step in found.pop(STEP, ()) if math.isfinite(step)]
        if steps:
            self._steps[child] = steps[-1]
        for name, values in found.items():
            for value in values:
                self._add(name, child, Sample(value, time, self._steps.get(child)))

    def take(self, points: Iterable[Mapping[str, float]], time: float, child: str = "") -> None:
        """Add points that the program reported; `time` is for points without a time."""
        for point in points:
            for name, value in point.items():
                if name not in (STEP, TOTAL, TIME):
                    sample = Sample(value, point.get(TIME, time), point.get(STEP))
                    self._add(name, child, sample)

    def new_attempt(self, child: str = "") -> None:
        """The next lines belong to a new attempt, which may begin at an earlier step."""
        self._steps.pop(child, None)
        self._may_go_back[child] = set(self._gathered)

    def first(self) -> Series | None:
        """The metric for a status line: the first of job.toml that has values, else the first that
        was reported.
        """
        names = [name for name in self._patterns if name in self._gathered]
        # A copy: the thread of the status line calls this while metrics are added.
        name = next(iter(names or list(self._gathered)), None)
        return None if name is None else self._gathered[name].series(name)

    def watch(self, events: Iterable[RunEvent]) -> Iterator[RunEvent]:
        """Pass on the events of a run, reading their lines and points."""
        for event in events:
            if isinstance(event, OutputLine):
                if self._patterns:
                    child = self._whose(event.child)
                    self.feed(event.text, event.timestamp / 1000, child)
            elif isinstance(event, StatusChanged):
                self._is_one_training = event.run.nodes > 0 and is_supervised(event.run)
            elif self._is_one_training and isinstance(event, MetricsReported):
                self._of_stream(event.stream, "")
                self.take(event.points, 0.0)
            elif isinstance(event, LogOpened | MetricsReported):
                child = self._whose(event.child)
                self._of_stream(event.stream, child)
                if isinstance(event, MetricsReported):
                    self.take(event.points, 0.0, child)
            yield event

    def _whose(self, part: str) -> str:
        """The child that the metrics of a part belong to; "" for the run, and for its main node."""
        child = _child_of(part)
        return "" if self._is_one_training and child == MAIN_NODE else child

    def _of_stream(self, stream: str, child: str) -> None:
        """Note the log stream of a child: another stream belongs to a new attempt."""
        if self._streams.get(child, stream) != stream:
            self.new_attempt(child)
        self._streams[child] = stream

    def _matches(self, name: str, plain: str) -> list[float]:
        values = []
        for found in self._patterns[name].finditer(plain):
            try:
                values.append(float(found[1]))
            except (TypeError, ValueError):
                continue
        return values

    def _add(self, name: str, child: str, sample: Sample) -> None:
        name = f"{name}:{child}" if child else name
        gathered = self._gathered.get(name)
        if gathered is None:
            gathered = self._gathered[name] = SampleCollector(self._window)
        may_go_back = self._may_go_back.get(child, set())
        if name in may_go_back and sample.step is not None:
            gathered.go_back_to(sample.step)
        elif name in may_go_back:
            gathered.begin_attempt()
        may_go_back.discard(name)
        gathered.add(sample)
        if math.isfinite(sample.value):
            self.values[name] = sample.value
        else:  # JSON has no NaN and infinity
            self.values.pop(name, None)


def last_values(series: Mapping[str, Series]) -> dict[str, float]:
    """The last value of each metric, without NaN and infinity, which JSON cannot hold."""
    return {name: each.last for name, each in series.items() if math.isfinite(each.last)}


def shown_values(series: Mapping[str, Series]) -> dict[str, float]:
    """The last values for people: with NaN and infinity, except those of children of an array,
    whose distribution is shown.
    """
    return {
        name: each.last
        for name, each in series.items()
        if math.isfinite(each.last) or child_of(name)[1] is None
    }


def ranges_of(series: Mapping[str, Series]) -> dict[str, MetricRange]:
    """The first, least and greatest value of each metric that has a finite value."""
    return {name: known for name, each in series.items() if (known := each.range)}


def describe_unmatched(patterns: Mapping[str, str], names: Iterable[str]) -> str:
    """The message about patterns that matched nothing in a whole log; "" if all have matched.

    `names` are the metrics with values; `loss:3` is the metric `loss` of child 3.
    """
    known = {part for name in names for part in (name, name.rpartition(":")[0])}
    missing = [name for name in patterns if name not in known and name != STEP]
    each = ", ".join(f"{name} ({patterns[name]})" for name in missing)
    return f"No line matches these patterns of [metrics]: {each}" if missing else ""


def _child_of(part: str) -> str:
    """The child of a part: `3` for `3/2`, the second attempt of child 3."""
    return part.partition("/")[0]


def read_series(
    attempts: Iterable[Iterable[tuple[int, str]]],
    patterns: Mapping[str, str],
    window: SampleWindow | None = None,
) -> dict[str, Series]:
    """The metrics of a run from its log: (ms, message) of the lines, with marks, by attempt."""
    metrics = Metrics(patterns, window)
    for number, messages in enumerate(attempts):
        if number:
            metrics.new_attempt()
        for timestamp, message in messages:
            mark = parse_mark(message)
            if mark is None:
                metrics.feed(message, timestamp / 1000)
            elif mark[0] == "metrics":
                metrics.take(read_points(mark[1]["points"]), timestamp / 1000)
    return metrics.series


# --- Metrics of an array's children ---------------------------------------------------------------


FEW = 4  # for up to so many children each value is listed


def by_child(metrics: Mapping[str, float]) -> dict[str, dict[int, float]]:
    """The metrics of children: name -> child -> value."""
    found: dict[str, dict[int, float]] = {}
    for whole, value in metrics.items():
        name, child = child_of(whole)
        if child is not None:
            found.setdefault(name, {})[child] = value
    return found


def metric_texts(
    metrics: Mapping[str, float], best: Mapping[str, float] = {}
) -> list[tuple[str, str]]:
    """Each metric with its last value, and its best value if that is known and another.

    For many children, one text for all of them.
    """
    many = {name: each for name, each in by_child(metrics).items() if len(each) > FEW}
    found: dict[str, str] = {}
    for whole, value in metrics.items():
        name, child = child_of(whole)
        if child is None or name not in many:
            found[whole] = f"{value:g}{_describe_best(value, best.get(whole))}"
        else:
            found.setdefault(name, describe_children(many[name]))
    return list(found.items())


def _describe_best(last: float, best: float | None) -> str:
    return "" if best is None or best == last else f" (best {best:g})"


def describe_children(last: Mapping[int, float], best: tuple[int, float] | None = None) -> str:
    """The last values of a metric by child: `0.3 \u00b1 0.1, 0.02 to 0.9, of 40 children`.

    The mean, and the standard deviation of a sample (divided by n - 1). `best`: the child with the
    best value, and that value.
    """
    from statistics import fmean, stdev

    known = list(last.values())
    deviation = f" \u00b1 {stdev(known):.2g}" if len(known) > 1 else ""
    count = f"{len(known)} {'child' if len(known) == 1 else 'children'}"
    text = f"{fmean(known):.4g}{deviation}, {min(known):.4g} to {max(known):.4g}, of {count}"
    return text if best is None else f"{text}, best {best[1]:.4g} of child {best[0]}"


def children_texts(
    last: Mapping[str, float], best: Mapping[str, float], directions: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Each metric of children with a text for all of them; `directions`: metric -> "max"."""
    by_name, found = by_child(best), []
    for name, values in by_child(last).items():
        choose = max if directions.get(name) == "max" else min
        known = by_name.get(name, {})
        top = choose(known, key=lambda child: known[child]) if known else None
        found.append((name, describe_children(values, None if top is None else (top, known[top]))))
    return found


def metric_lines(
    series: Mapping[str, Series], width: int = 0, directions: Mapping[str, str] = {}
) -> list[str]:
    """A line for each metric, of `width` or 80 cells: `loss 0.2 (curve) 0.2 to 2.3, 12 values`.

    A metric whose direction is known also shows its best value: `best 0.1, 0.1 to 2.3, 12 values`.
    """
    best = best_values(ranges_of(series), directions)
    names = max((cells(name) for name in map(printable, series)), default=0)
    lines = []
    for each in series.values():
        known = [value for value in each.values if math.isfinite(value)]
        span = f"{min(known):.4g} to {max(known):.4g}, " if len(known) > 1 else ""
        count = len(each.samples)
        head = f"best {best[each.name]:.4g}, " if each.name in best and count > 1 else ""
        count_words = f"{count} value{'' if count == 1 else 's'}"
        start = f"{pad(printable(each.name), names)}  {each.last:<8.4g}"
        room = (width or 80) - cells(start) - 4
        curve = f"{sparkline(each.values, min(24, room), each.breaks):<24}" if count > 1 else ""
        texts = (f"{head}{span}{count_words}", f"{head}{count_words}")
        words = next((text for text in texts if len(text) + 26 <= room), "")
        lines.append(f"{start}  {curve}  {words}".rstrip())
    return lines


# --- The progress of a run and its estimated end, from common forms of output ---------------------


_COUNTED = re.compile(
    r"\b(?:(epoch|round|fold)s?|(?:step|iter|iteration|batch)(?:es|s)?)"
    r"\b[ \t:#=\[(]{0,4}(\d{1,12}) ?(?:/|of) ?(\d{1,12})\b",
    re.IGNORECASE,
)
_BAR = re.compile(r"(?:^|[\s:])(\d{1,3})%\|")  # tqdm: ` 45%|####     | 45/100 [00:10<00:12]`
_KERAS = r"^\s*(\d{1,12})/(\d{1,12})\s+(?:\[[=>.]|\u2501)"
_PERCENT = re.compile(r"\bprogress\b[ \t:=]{0,3}(\d{1,3}(?:\.\d+)?) ?%", re.IGNORECASE)
_MAX_LINE = 2000  # characters; longer lines do not show progress

# The part of a run after which its end can be estimated.
_MIN_PROGRESS = 0.005


class ProgressReport(NamedTuple):
    """The progress in a line of output: the epoch (count, total), and the part of it that is done.

    Without an epoch, `part` is the part of the run.
    """

    epoch: tuple[int, int] | None = None
    part: float | None = None  # from 0 to 1
    is_result: bool = False  # True if text follows, such as a loss: the epoch has ended


def read_progress(line: str) -> ProgressReport | None:
    """The progress that a line shows; None for most lines."""
    if len(line) > _MAX_LINE or not _may_show_progress(line):
        return None
    plain = ANSI.sub("", line).rstrip("\r").rpartition("\r")[2]
    epoch, part, end = None, None, 0
    for found in _COUNTED.finditer(plain):
        count, of = int(found[2]), int(found[3])
        if of == 0 or count > of:
            continue
        end = found.end()
        if found[1]:
            epoch = count, of
        else:
            part = count / of
    bar = _part_of_bar(plain)
    part = bar if bar is not None else part
    if epoch is None and part is None:
        return None
    return ProgressReport(epoch, part, is_result=bool(plain[end:].strip(" \t])}:.-=")))


def _may_show_progress(line: str) -> bool:
    """True if one of the patterns could match, which is rare; a fast check."""
    return "/" in line or "%" in line or "of" in line.lower()


def _part_of_bar(plain: str) -> float | None:
    for pattern in (_BAR, _PERCENT):
        found = pattern.search(plain)
        if found:
            return min(1.0, float(found[1]) / 100)
    counted = re.search(_KERAS, plain)
    return int(counted[1]) / int(counted[2]) if counted and int(counted[2]) else None


class ProgressTrend:
    """The progress of an attempt. `fraction` is between 0 and 1, None if it is unknown."""

    def __init__(self) -> None:
        self.fraction: float | None = None
        self._epoch: tuple[int, int] | None = None
        self._from_zero = False
        self._is_reported = False
        self._has_restarted = False  # True after a bar began again: it does not show the whole run
        self._first: tuple[float, float] | None = None
        self._last: tuple[float, float] | None = None

    def report(self, step: float, total: float, time: float) -> None:
        """Note progress that the program reported: from now on its output is ignored."""
        self._is_reported = True
        self._reach(min(1.0, max(0.0, step / total)), time)

    def feed(self, line: str, time: float) -> None:
        """Note the progress in a line of output; `time` in seconds since the epoch."""
        found = None if self._is_reported else read_progress(line)
        if found is None:
            return
        if found.epoch is not None:
            self._epoch = found.epoch
            self._from_zero = self._from_zero or found.epoch[0] == 0
        if self._epoch is None:
            self._note_bar(found.part or 0.0, time)
            return
        count, of = self._epoch
        done = count if self._from_zero else count - 1
        part = found.part if found.part is not None else float(found.is_result)
        self._reach(min(1.0, (done + part) / of), time)

    def left(self, time: float) -> float | None:
        """Seconds from `time` to the estimated end; None if that is unknown."""
        if not (self._first and self._last):
            return None
        passed, gained = (b - a for a, b in zip(self._first, self._last, strict=True))
        if gained < _MIN_PROGRESS or passed <= 0:
            return None
        end = self._last[0] + (1 - self._last[1]) * passed / gained
        return max(0.0, end - time)

    def _note_bar(self, part: float, time: float) -> None:
        if self.fraction is not None and part < self.fraction:
            self._has_restarted = True
            self.fraction = self._first = self._last = None
        if not self._has_restarted:
            self._reach(part, time)

    def _reach(self, fraction: float, time: float) -> None:
        if self._first is None or (self.fraction is not None and fraction < self.fraction):
            self._first = time, fraction  # also after the program began again
        self.fraction, self._last = fraction, (time, fraction)
