"""The speed of a run, read line by line from its log."""

import math
import re
from collections.abc import Mapping

from msgspec import Struct

from batchml.runs.metrics.series import ANSI
from batchml.runtime.protocol.log_marks import STEP, TIME, parse_mark, read_points

EPOCH = "epoch"  # a metric or pattern of this name has the number of the epoch
_EPOCH = re.compile(r"\bepochs?\b[ \t:=#\[(]{0,4}([0-9]{1,9})(?![0-9.])", re.IGNORECASE)


class Pace(Struct, frozen=True):
    """The steps or epochs of a run, and the time that they took.

    `count` were done in `seconds`, between the first and the last that the log shows, without the
    time between attempts. `done` are all, with those before the first; None if that is unknown.
    """

    count: float
    seconds: float
    done: float | None

    @property
    def seconds_each(self) -> float | None:
        """Seconds for one; None if the log shows only one."""
        return self.seconds / self.count if self.count > 0 and self.seconds > 0 else None


class _Stretch:
    """Steps that came one after the other in one attempt."""

    def __init__(self, step: float, at: float) -> None:
        self.first = self.last = step
        self.began = self.ended = at
        self.seen = 1

    def add(self, step: float, at: float) -> None:
        self.last, self.ended = step, at
        self.seen += 1


class PaceReader:
    """Collects the times of steps, in memory that does not grow with their number."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._is_new = True

    def note(self, step: float, at: float) -> None:
        """Note that the run was at `step`; `at` is in seconds since the epoch."""
        if not math.isfinite(step):
            return
        if self._is_new or step < self._stretches[-1].last:  # an attempt goes back to a checkpoint
            self._stretches.append(_Stretch(step, at))
            self._is_new = False
        elif step > self._stretches[-1].last:
            self._stretches[-1].add(step, at)

    def new_attempt(self) -> None:
        self._is_new = True

    def pace(self) -> Pace | None:
        """The pace; None without any step.

        A program that reports steps 10, 20, ... 100 has done 10 steps before the first report: as
        many as between two reports.
        """
        if not self._stretches:
            return None
        count = sum(each.last - each.first for each in self._stretches)
        seconds = sum(each.ended - each.began for each in self._stretches)
        usual = next((each for each in self._stretches if each.seen > 1), None)
        if usual is None:
            return Pace(count, seconds, None)
        between = (usual.last - usual.first) / (usual.seen - 1)
        first = min(each.first for each in self._stretches)
        last = max(each.last for each in self._stretches)
        return Pace(count, seconds, last - first + between)


class PaceLog:
    """Reads steps and epochs from the lines of one log.

    Steps are those that the program reports, or that the pattern `step` finds; if that pattern has
    the word epoch, they are epochs. Epochs are also those of a metric or pattern `epoch`, and of
    lines such as `epoch 3/10` and `Epoch[3]`.
    """

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self.steps, self.epochs = PaceReader(), PaceReader()
        self._patterns = [
            (
                re.compile(pattern),
                self.epochs if EPOCH in f"{name} {pattern}".lower() else self.steps,
            )
            for name in (STEP, EPOCH)
            if (pattern := patterns.get(name))
        ]
        self._has_epochs = any(reader is self.epochs for _, reader in self._patterns)

    def new_attempt(self) -> None:
        self.steps.new_attempt()
        self.epochs.new_attempt()

    def read(self, timestamp: int, message: str) -> None:
        """Read a line of the log; `timestamp` is in ms since the epoch."""
        at = timestamp / 1000
        mark = parse_mark(message)
        if mark is None:
            self._read_line(ANSI.sub("", message) if "\x1b" in message else message, at)
        elif mark[0] == "metrics":
            for point in read_points(mark[1]["points"]):
                for name, reader in ((STEP, self.steps), (EPOCH, self.epochs)):
                    if name in point:
                        reader.note(point[name], point.get(TIME, at))

    def _read_line(self, line: str, at: float) -> None:
        for pattern, reader in self._patterns:
            for found in pattern.finditer(line):
                try:
                    reader.note(float(found[1]), at)
                except (TypeError, ValueError):
                    continue
        if not self._has_epochs and "poch" in line.lower():
            epoch = _EPOCH.search(line)
            if epoch:
                self.epochs.note(float(epoch[1]), at)


def _has_epoch(name: str, pattern: str) -> bool:
    return name == EPOCH or EPOCH in pattern.lower()
