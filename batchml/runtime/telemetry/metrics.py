"""Metrics of a program: `report` writes them to a file, the `Relay` carries them to the log."""

from __future__ import annotations

import math
import os
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Optional

from batchml.runtime.protocol.log_marks import (
    MARK,
    MAX_METRIC_NAME,
    STEP,
    TIME,
    TOTAL,
    metrics_marks,
    read_point,
    write_point,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.entry.attempt import Attempt

EVERY = 2.0  # seconds between two marks
# Of the points that come between two looks, as many of each kind go to the log, evenly chosen and
# the last of them always: a log costs money by its size. The file has all of them.
MAX_POINTS = 100
_told: set[str] = set()
_BLOCK = 1 << 20
_MAX_POINT = 65_536  # bytes of one line


def report(step: Optional[float] = None, *, total: Optional[float] = None, **values: float) -> bool:
    """Record metrics of this moment: `report(step=3, loss=0.5)`.

    Values are numbers, or what `float` makes one of: a tensor of one element, a NumPy scalar.
    `total` is the last step, so that clients can say how far the run is and when it will end.
    Outside a run this does nothing. Of processes that train together, by RANK, the points of the
    first alone are recorded; of the others a report says how far they are, as `progress` does.

    False once the run is to save and stop: it is cancelled, or other trials of its sweep do better.
    Where trials are stopped early, a report of the sweep's goal waits until it was judged.

    Raises TypeError or ValueError for a value that is no number, as `float` does.
    """
    point = {TIME: round(time.time(), 3)}
    for name, value in ((STEP, step), (TOTAL, total)):
        if value is not None:
            point[name] = _whole(_number(value))
    for name, value in values.items():
        if name == TIME:
            raise ValueError("time is recorded by report() itself: choose another name.")
        point[name] = _number(value)
    path = os.environ.get("BATCHML_METRICS")
    if not path:
        return True
    stop_file = os.environ.get("BATCHML_STOP_FILE", "")
    if "BATCHML_PROGRESS" in os.environ:
        from batchml.runtime.telemetry.heartbeat import progress

        progress(step)
    if os.environ.get("RANK", "0") not in ("", "0"):
        return not os.path.exists(stop_file)
    for name in [name for name in point if not 0 < len(name) <= MAX_METRIC_NAME]:
        del point[name]
        _say_once(
            "name", f"the metric {name[:20]!r}... is not recorded: its name has {len(name)} "
            f"characters, 1 to {MAX_METRIC_NAME} are taken",
        )  # fmt: skip
    verdict = None
    if stop_file and os.environ.get("BATCHML_GOAL") in point:
        from batchml.runtime.sweep.verdict import Verdict

        verdict = Verdict(path, stop_file)
    end = 0
    try:
        end = append_point(path, point)
    except OSError as error:  # a full disk: the training is worth more than its curve
        _say_once(f"path {path}", f"metrics are not recorded: {error}")
    return verdict.goes_on(end) if verdict else not os.path.exists(stop_file)


def _say_once(what: str, words: str) -> None:
    if what not in _told:
        _told.add(what)
        print(f"batchml: {words}", file=sys.stderr, flush=True)


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number that no float holds
        return math.inf if value > 0 else -math.inf


def append_point(path: str, point: Mapping[str, float]) -> int:
    """One line, by one write, so that the lines of several processes do not mix.

    Returns where it ends in the file, 0 where that is no file.
    """
    line = write_point(point).encode() + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK  # a pipe must not hold us up
    descriptor = os.open(path, flags, 0o644)
    try:
        os.write(descriptor, line)
        return os.lseek(descriptor, 0, os.SEEK_CUR) if _is_file(descriptor) else 0
    finally:
        os.close(descriptor)


def _whole(value: float) -> float:
    """3 and not 3.0, where that is the same: it is shorter, and what people count."""
    return int(value) if value.is_integer() else value


class Relay:
    """A companion: from the metrics file, to which the program adds, to marks in the log."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._source = Points(attempt.env.metrics)
        self._next = 0.0

    def tick(self, now: float) -> None:
        if now >= self._next and self._pass_on():
            self._next = now + EVERY

    def finish(self) -> None:
        while self._pass_on():  # a block at a time
            pass

    def _pass_on(self) -> bool:
        points = self._source.new()
        for mark in metrics_marks(thinned(points, MAX_POINTS)):
            self._attempt.mark(mark[len(MARK) :])
        return bool(points)


class Points:
    """The points in a metrics file that is being written."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.read = 0  # bytes
        self._rest = b""

    def new(self) -> list[dict[str, float]]:
        """Those that have come since the last call; often none."""
        return [point for point in map(read_point, self._lines()) if _has_values(point)]

    def _lines(self) -> list[bytes]:
        """The lines that are whole now. A line that never ends is dropped, not collected."""
        try:
            data = _read_at(self._path, self.read)
        except OSError:  # not there yet, or no more
            return []
        self.read += len(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()[-_MAX_POINT:]
        return lines


def _read_at(path: str, start: int) -> bytes:
    """A block of a file; nothing of a pipe, which the program may have put there: it would hold."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not _is_file(descriptor):
            return b""
        return os.pread(descriptor, _BLOCK, start)
    finally:
        os.close(descriptor)


def _is_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def _has_values(point: Mapping[str, float]) -> bool:
    return any(name != TIME for name in point)


def thinned(points: Sequence[Mapping[str, float]], most: int) -> list[Mapping[str, float]]:
    """At most `most` points of each set of names, evenly chosen with the last, in their order.

    By sets of names, so that a rare metric is not lost among the points of a frequent one.
    """
    kinds: dict[frozenset[str], list[int]] = {}
    for place, point in enumerate(points):
        kinds.setdefault(frozenset(point), []).append(place)
    kept = []
    for places in kinds.values():
        count = min(most, len(places))
        kept += [places[(i + 1) * len(places) // count - 1] for i in range(count)]
    return [points[place] for place in sorted(kept)]
