"""Metrics of a run, from its output or from `report`, as series that can be drawn."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from batchml.cli.render import cells, pad, printable
from batchml.cli.terminal import sparkline
from batchml.model.outcome import is_supervised
from batchml.runs.watch.events import (
    LogOpened,
    MetricsReported,
    OutputLine,
    RunEvent,
    StatusChanged,
)
from batchml.runtime.protocol.log_marks import STEP, TIME, TOTAL, parse_mark, read_points

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")

# The number of samples kept of one metric. Beyond it every second one is dropped: a curve of
# a million steps needs no more to be drawn, and a run of weeks can be followed.
MAX_SAMPLES = 8192

MAIN_NODE = "0"  # the rank, of those that train together, whose log has the metrics for `show`


class Sample(NamedTuple):
    value: float
    time: float  # seconds since the epoch
    step: float | None  # None where the program gave none


class Series(Struct, frozen=True):
    """The values of one metric, in the order in which they came."""

    name: str
    samples: tuple[Sample, ...]

    @property
    def values(self) -> list[float]:
        return [sample.value for sample in self.samples]

    @property
    def last(self) -> float:
        return self.samples[-1].value

    @property
    def has_steps(self) -> bool:
        return all(sample.step is not None for sample in self.samples)

    @property
    def steps(self) -> list[float]:
        """The steps, or 1, 2, 3 where the program gave none."""
        if not self.has_steps:
            return [float(place) for place in range(1, len(self.samples) + 1)]
        return [sample.step for sample in self.samples if sample.step is not None]


class SampleCollector:
    """One metric that is being read, thinned when it is long; the newest value is always kept."""

    def __init__(self) -> None:
        self._kept: list[Sample] = []
        self._every = 1
        self._since = 0
        self._newest: Sample | None = None

    def add(self, sample: Sample) -> None:
        self._newest = sample
        self._since += 1
        if self._since < self._every:
            return
        self._since, self._newest = 0, None
        self._kept.append(sample)
        if len(self._kept) >= MAX_SAMPLES:
            self._kept = self._kept[1::2]
            self._every *= 2

    def go_back_to(self, step: float) -> None:
        """A new attempt went on from a checkpoint: later values of the last one do not count."""
        self._kept = [each for each in self.samples() if each.step is None or each.step < step]
        self._newest = None

    def samples(self) -> list[Sample]:
        return self._kept if self._newest is None else [*self._kept, self._newest]


class Metrics:
    """The metrics of one run: `patterns` is `[metrics]` of a job.toml, name -> regular expression.

    A pattern has one group, around the value. A pattern named `step` gives the step for its line
    and the lines after it. A match that is not a number is ignored.
    """

    def __init__(self, patterns: Mapping[str, str] = {}) -> None:
        self.patterns = patterns
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items()}
        self._gathered: dict[str, SampleCollector] = {}
        self._steps: dict[str, float] = {}  # child -> the step of its current line
        self._may_go_back: dict[str, set[str]] = {}  # metrics, by the child of a new attempt
        self._streams: dict[str, str] = {}  # child -> the stream that is being read
        self._is_one = False  # ranks on many nodes that train together, of which the first reports
        self.values: dict[str, float] = {}  # the last of each whose last is finite

    @property
    def series(self) -> dict[str, Series]:
        """Name -> the values, for every metric that has any."""
        return {
            name: Series(name, tuple(gathered.samples()))
            for name, gathered in self._gathered.items()
        }

    def feed(self, line: str, time: float = 0.0, child: str = "") -> None:
        """Read one line of output without colours."""
        if not self._patterns:
            return
        plain = _ANSI.sub("", line) if "\x1b" in line else line
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

    def first(self) -> tuple[str, list[float]] | None:
        """The metric for a status line: the first of job.toml with values, else the first that was
        reported.
        """
        names = [name for name in self._patterns if name in self._gathered]
        # A copy: a status line asks in a thread of its own, while others come in.
        name = next(iter(names or list(self._gathered)), None)
        if name is None:
            return None
        return name, [sample.value for sample in self._gathered[name].samples()]

    def watch(self, happenings: Iterable[RunEvent]) -> Iterator[RunEvent]:
        """Pass on the events of a run, reading their lines and points."""
        for happening in happenings:
            if isinstance(happening, OutputLine):
                if self._patterns:
                    child = self._whose(happening.child)
                    self.feed(happening.text, happening.timestamp / 1000, child)
            elif isinstance(happening, StatusChanged):
                self._is_one = happening.run.nodes > 0 and is_supervised(happening.run)
            elif self._is_one and isinstance(happening, MetricsReported):
                self._of_stream(happening.stream, "")
                self.take(happening.points, 0.0)
            elif isinstance(happening, LogOpened | MetricsReported):
                child = self._whose(happening.child)
                self._of_stream(happening.stream, child)
                if isinstance(happening, MetricsReported):
                    self.take(happening.points, 0.0, child)
            yield happening

    def _whose(self, part: str) -> str:
        """The child whose metrics a part's are; "" for the run's own, also for its main node's."""
        child = _child_of(part)
        return "" if self._is_one and child == MAIN_NODE else child

    def _of_stream(self, stream: str, child: str) -> None:
        """Another log stream belongs to a new attempt."""
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
            gathered = self._gathered[name] = SampleCollector()
        may_go_back = self._may_go_back.get(child, set())
        if name in may_go_back and sample.step is not None:
            gathered.go_back_to(sample.step)
        may_go_back.discard(name)
        gathered.add(sample)
        if math.isfinite(sample.value):
            self.values[name] = sample.value
        else:  # JSON has no such number; the series has it
            self.values.pop(name, None)


def last_values(series: Mapping[str, Series]) -> dict[str, float]:
    """The last value of each metric that is finite: JSON, and the history, hold no others."""
    return {name: each.last for name, each in series.items() if math.isfinite(each.last)}


def describe_unmatched(patterns: Mapping[str, str], names: Iterable[str]) -> str:
    """The message about patterns without a value in a whole log; "" where all have one.

    `names` are the metrics with values; `loss:3` is the metric of child 3.
    """
    known = {part for name in names for part in (name, name.rpartition(":")[0])}
    missing = [name for name in patterns if name not in known and name != STEP]
    each = ", ".join(f"{name} ({patterns[name]})" for name in missing)
    return f"No line has what these patterns of [metrics] look for: {each}" if missing else ""


def _child_of(part: str) -> str:
    """`3` for `3/2`, the second attempt of child 3."""
    return part.partition("/")[0]


def read_series(
    attempts: Iterable[Iterable[tuple[int, str]]], patterns: Mapping[str, str]
) -> dict[str, Series]:
    """The metrics of a run from its log: for each attempt (ms, message), with marks."""
    metrics = Metrics(patterns)
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


FEW = 4  # children whose values are listed one by one


class Spread(Struct, frozen=True):
    """The distribution of a metric's last values over the children that have it."""

    count: int
    least: float
    middle: float
    most: float


def by_child(metrics: Mapping[str, float]) -> dict[str, dict[int, float]]:
    """Name -> child -> value, for the metrics of children."""
    found: dict[str, dict[int, float]] = {}
    for whole, value in metrics.items():
        name, child = child_of(whole)
        if child is not None:
            found.setdefault(name, {})[child] = value
    return found


def child_of(metric: str) -> tuple[str, int | None]:
    """`("loss", 3)` for `loss:3`; no child for another metric."""
    name, _, child = metric.rpartition(":")
    is_one = bool(name) and child.isascii() and child.isdecimal()
    return (name, int(child)) if is_one else (metric, None)


def spread(values: Mapping[int, float]) -> Spread:
    known = list(values.values())
    from statistics import median

    return Spread(len(known), min(known), median(known), max(known))


def metric_texts(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Each metric and its value; for many children their distribution, in place of the first."""
    many = {name: each for name, each in by_child(metrics).items() if len(each) > FEW}
    found: dict[str, str] = {}
    for whole, value in metrics.items():
        name, child = child_of(whole)
        if child is None or name not in many:
            found[whole] = f"{value:g}"
        else:
            found.setdefault(name, _describe_spread(spread(many[name])))
    return list(found.items())


def _describe_spread(found: Spread) -> str:
    """`0.02 to 0.9, median 0.3, of 40 children`"""
    span = f"{found.least:.4g} to {found.most:.4g}, median {found.middle:.4g}"
    return f"{span}, of {found.count} children"


def metric_lines(series: Mapping[str, Series], width: int = 0) -> list[str]:
    """A line for each metric: `loss 0.21 (a curve) 0.21 to 2.3, 12 values`; 80 cells unless
    `width`.
    """
    names = max((cells(name) for name in map(printable, series)), default=0)
    lines = []
    for each in series.values():
        known = [value for value in each.values if math.isfinite(value)]
        span = f"{min(known):.4g} to {max(known):.4g}, " if len(known) > 1 else ""
        count = len(each.samples)
        words = f"{span}{count} value{'' if count == 1 else 's'}"
        start = f"{pad(printable(each.name), names)}  {each.last:<8.4g}"
        room = (width or 80) - cells(start) - 4
        curve = f"{sparkline(each.values, min(24, room)):<24}" if count > 1 else ""
        line = f"{start}  {curve}"
        lines.append(f"{line}  {words}".rstrip() if len(words) + 26 <= room else line.rstrip())
    return lines


# --- progress -------------------------------------------------------------------------------------
# The progress of a run and its estimated end, where its program prints it in a usual form.


_COUNTED = re.compile(
    r"\b(?:(epoch|round|fold)s?|(?:step|iter|iteration|batch)(?:es|s)?)"
    r"\b[ \t:#=\[(]{0,4}(\d{1,12}) ?(?:/|of) ?(\d{1,12})\b",
    re.IGNORECASE,
)
_BAR = re.compile(r"(?:^|[\s:])(\d{1,3})%\|")  # tqdm: ` 45%|####     | 45/100 [00:10<00:12]`
_KERAS = re.compile(r"^\s*(\d{1,12})/(\d{1,12})\s+(?:\[[=>.]|\u2501)")
_PERCENT = re.compile(r"\bprogress\b[ \t:=]{0,3}(\d{1,3}(?:\.\d+)?) ?%", re.IGNORECASE)
_MAX_LINE = 2000  # characters: longer lines are no progress lines

# A smaller part of the run is no base for an estimate.
_MIN_PROGRESS = 0.005


class ProgressReport(NamedTuple):
    """The progress in one line of output: the epoch, and the part done of it or of the run."""

    epoch: tuple[int, int] | None = None
    part: float | None = None  # from 0 to 1
    is_result: bool = False  # more text follows: the line ends the epoch


def read_progress(line: str) -> ProgressReport | None:
    """The progress that a line shows; None for most lines."""
    if len(line) > _MAX_LINE or not _may_show_progress(line):
        return None
    plain = _ANSI.sub("", line).rstrip("\r").rpartition("\r")[2]
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
    """Whether any of the patterns could match; most lines end here."""
    return "/" in line or "%" in line or "of" in line.lower()


def _part_of_bar(plain: str) -> float | None:
    for pattern in (_BAR, _PERCENT):
        found = pattern.search(plain)
        if found:
            return min(1.0, float(found[1]) / 100)
    counted = _KERAS.search(plain)
    return int(counted[1]) / int(counted[2]) if counted and int(counted[2]) else None


class ProgressTrend:
    """The progress of an attempt. `fraction` is None where it is not known."""

    def __init__(self) -> None:
        self.fraction: float | None = None
        self._epoch: tuple[int, int] | None = None
        self._from_zero = False
        self._is_reported = False
        self._is_in_turns = (
            False  # a progress bar that starts again and again does not show the whole
        )
        self._first: tuple[float, float] | None = None
        self._last: tuple[float, float] | None = None

    def report(self, step: float, total: float, time: float) -> None:
        """The program reported its progress with `report`: from now on its output is ignored."""
        self._is_reported = True
        self._reach(min(1.0, max(0.0, step / total)), time)

    def feed(self, line: str, time: float) -> None:
        """One line of output, and the time when it was written, in seconds."""
        told = None if self._is_reported else read_progress(line)
        if told is None:
            return
        if told.epoch is not None:
            self._epoch = told.epoch
            self._from_zero = self._from_zero or told.epoch[0] == 0
        if self._epoch is None:
            self._of_one_bar(told.part or 0.0, time)
            return
        count, of = self._epoch
        done = count if self._from_zero else count - 1
        part = told.part if told.part is not None else float(told.is_result)
        self._reach(min(1.0, (done + part) / of), time)

    def left(self, time: float) -> float | None:
        """Seconds from `time` to the end, at the pace so far."""
        if not (self._first and self._last):
            return None
        passed, gained = (b - a for a, b in zip(self._first, self._last, strict=True))
        if gained < _MIN_PROGRESS or passed <= 0:
            return None
        end = self._last[0] + (1 - self._last[1]) * passed / gained
        return max(0.0, end - time)

    def _of_one_bar(self, part: float, time: float) -> None:
        if self.fraction is not None and part < self.fraction:
            self._is_in_turns = True
            self.fraction = self._first = self._last = None
        if not self._is_in_turns:
            self._reach(part, time)

    def _reach(self, fraction: float, time: float) -> None:
        if self._first is None or (self.fraction is not None and fraction < self.fraction):
            self._first = time, fraction  # also of a program that began again
        self.fraction, self._last = fraction, (time, fraction)
