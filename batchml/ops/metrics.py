"""Metrics of a run, from what its program prints or reports, as series that can be drawn."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from batchml.model.outcome import is_torchrun
from batchml.ops.watch import Happening, Line, Measured, Opened, StatusChanged
from batchml.runtime.protocol.log_marks import STEP, TIME, TOTAL, parse_mark, read_points

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")

# Samples that are kept of one metric. When there are more, every second one is dropped: a curve of
# a million steps needs no more to be drawn, and a run of weeks can be followed.
MAX_SAMPLES = 8192

MAIN_NODE = "0"  # of ranks that train together: the one whose log `show` reads for metrics


class Sample(NamedTuple):
    value: float
    time: float  # seconds since the epoch
    step: float | None  # None where the program did not say


class Series(Struct, frozen=True):
    """The values of one metric, in the order in which they were reached."""

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
        """The steps, or 1, 2, 3 where the program did not say."""
        if not self.has_steps:
            return [float(place) for place in range(1, len(self.samples) + 1)]
        return [sample.step for sample in self.samples if sample.step is not None]


class Gathered:
    """One metric while it comes in, thinned when it is long; the newest is always kept."""

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
        """A new attempt went on from a checkpoint: what came after that does not count."""
        self._kept = [each for each in self.samples() if each.step is None or each.step < step]
        self._newest = None

    def samples(self) -> list[Sample]:
        return self._kept if self._newest is None else [*self._kept, self._newest]


class Metrics:
    """The metrics of one run: `patterns` is `[metrics]` of a job.toml, name -> regular expression.

    A pattern has one group, around the value. A pattern named `step` gives the step of what stands
    on its line and after it. What a pattern matches that is no number is passed over.
    """

    def __init__(self, patterns: Mapping[str, str] = {}) -> None:
        self.patterns = patterns
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items()}
        self._gathered: dict[str, Gathered] = {}
        self._steps: dict[str, float] = {}  # of each child the one that its lines are at
        self._may_go_back: dict[str, set[str]] = {}  # metrics, by the child of a new attempt
        self._streams: dict[str, str] = {}  # of each child the one that is read
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
        """Read one line, as a terminal would show it: without colours."""
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
        """Add what the program reported; `time` stands for those that do not tell theirs."""
        for point in points:
            for name, value in point.items():
                if name not in (STEP, TOTAL, TIME):
                    sample = Sample(value, point.get(TIME, time), point.get(STEP))
                    self._add(name, child, sample)

    def new_attempt(self, child: str = "") -> None:
        """What comes next is of a new attempt, which may begin at an earlier step."""
        self._steps.pop(child, None)
        self._may_go_back[child] = set(self._gathered)

    def first(self) -> tuple[str, list[float]] | None:
        """The metric that tells most in a line: the first that job.toml names and that has values;
        without such the first that was reported.
        """
        names = [name for name in self._patterns if name in self._gathered]
        # A copy: a status line asks in a thread of its own, while others come in.
        name = next(iter(names or list(self._gathered)), None)
        if name is None:
            return None
        return name, [sample.value for sample in self._gathered[name].samples()]

    def watch(self, happenings: Iterable[Happening]) -> Iterator[Happening]:
        """Pass on what happens to a run, reading its lines and points on the way."""
        for happening in happenings:
            if isinstance(happening, Line):
                if self._patterns:
                    child = self._whose(happening.child)
                    self.feed(happening.text, happening.timestamp / 1000, child)
            elif isinstance(happening, StatusChanged):
                self._is_one = happening.run.nodes > 0 and is_torchrun(happening.run)
            elif self._is_one and isinstance(happening, Measured):
                self._of_stream(happening.stream, "")
                self.take(happening.points, 0.0)
            elif isinstance(happening, Opened | Measured):
                child = self._whose(happening.child)
                self._of_stream(happening.stream, child)
                if isinstance(happening, Measured):
                    self.take(happening.points, 0.0, child)
            yield happening

    def _whose(self, part: str) -> str:
        """The child whose metrics a part's are; "" for the run's own, and so for its main node."""
        child = _child_of(part)
        return "" if self._is_one and child == MAIN_NODE else child

    def _of_stream(self, stream: str, child: str) -> None:
        """Another stream than before is of a new attempt, whatever of it comes first."""
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
            gathered = self._gathered[name] = Gathered()
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
    """The last of each whose last is finite: what JSON, and so the history, can hold."""
    return {name: each.last for name, each in series.items() if math.isfinite(each.last)}


def unmatched(patterns: Mapping[str, str], names: Iterable[str]) -> str:
    """What to say of patterns that found no value in a whole log; "" where all did.

    `names` are the metrics that have values; `loss:3` is that of child 3.
    """
    known = {part for name in names for part in (name, name.rpartition(":")[0])}
    missing = [name for name in patterns if name not in known and name != STEP]
    each = ", ".join(f"{name} ({patterns[name]})" for name in missing)
    return f"No line has what these patterns of [metrics] look for: {each}" if missing else ""


def _child_of(part: str) -> str:
    """`3` for `3/2`, the second attempt of child 3."""
    return part.partition("/")[0]


def gather(
    attempts: Iterable[Iterable[tuple[int, str]]], patterns: Mapping[str, str]
) -> dict[str, Series]:
    """The metrics of a run whose log is there: for each attempt (ms, message), marks and all."""
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
