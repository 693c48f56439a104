"""Metrics of a program: `report` writes them to a file, `MetricsRelay` copies them to the log."""

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
    encode_point,
    metrics_marks,
    read_point,
)
from batchml.runtime.telemetry.heartbeat import progress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.entry.attempt import AttemptHandle

EVERY = 2.0  # seconds between two marks
# At most so many points of each kind are copied at once, evenly chosen and always with the last,
# because a log costs money by its size. The file has all points.
MAX_POINTS = 100
_warned: set[str] = set()
_BLOCK = 1 << 20
_MAX_POINT = 65_536  # bytes of one line


def report(step: Optional[float] = None, *, total: Optional[float] = None, **values: float) -> bool:
    """Record the current metrics: `report(step=3, loss=0.5)`.

    Values are numbers, or objects that `float` accepts: a tensor of one element, a NumPy scalar.
    `total` is the number of the last step; clients need it to show the progress and the expected
    end.
    Outside a run this does nothing. Of ranks that train together (RANK), only rank 0 records
    points; in the others, `report` shows their progress, as `progress` does.

    Returns False once the run is to save and stop: it was cancelled, or early stopping ends this
    trial. With early stopping, a report of the sweep's goal waits for the decision.

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
        progress(step)
    if os.environ.get("RANK", "0") not in ("", "0"):
        return not os.path.exists(stop_file)
    for name in [name for name in point if not 0 < len(name) <= MAX_METRIC_NAME]:
        del point[name]
        _say_once(
            "name", f"the metric {name[:20]!r}... is not recorded: its name has {len(name)} "
            f"characters, and 1 to {MAX_METRIC_NAME} are allowed",
        )  # fmt: skip
    decision = None
    if stop_file and os.environ.get("BATCHML_GOAL") in point:
        from batchml.runtime.sweep.pending_decision import PendingDecision

        decision = PendingDecision(path, stop_file)
    end = 0
    try:
        end = append_point(path, point)
    except OSError as error:  # for example a full disk, which must not end the training
        _say_once(f"path {path}", f"metrics are not recorded: {error}")
    return decision.wait(end) if decision else not os.path.exists(stop_file)


def _say_once(subject: str, message: str) -> None:
    if subject not in _warned:
        _warned.add(subject)
        print(f"batchml: {message}", file=sys.stderr, flush=True)


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number that is too large for a float
        return math.inf if value > 0 else -math.inf


def append_point(path: str, point: Mapping[str, float]) -> int:
    """Append a line by one write, so that the lines of several processes do not mix.

    Returns the end of the line in the file; 0 if the path is no regular file.
    """
    line = encode_point(point).encode() + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK  # a pipe must not block
    descriptor = os.open(path, flags, 0o644)
    try:
        os.write(descriptor, line)
        return os.lseek(descriptor, 0, os.SEEK_CUR) if _is_file(descriptor) else 0
    finally:
        os.close(descriptor)


def _whole(value: float) -> float:
    """A whole number as an int: JSON then has 3 instead of 3.0."""
    return int(value) if value.is_integer() else value


class MetricsRelay:
    """An attempt plug-in that copies the points in the metrics file to the log."""

    def __init__(self, attempt: AttemptHandle) -> None:
        self._attempt = attempt
        self._source = MetricsFile(attempt.env.metrics)
        self._next = 0.0  # the time of the next copy at the earliest

    def tick(self, now: float) -> None:
        if now >= self._next and self._copy():
            self._next = now + EVERY

    def finish(self) -> None:
        while self._copy():  # one block at a time
            pass

    def _copy(self) -> bool:
        points = self._source.new()
        for mark in metrics_marks(thin_out(points, MAX_POINTS)):
            self._attempt.mark(mark[len(MARK) :])
        return bool(points)


class MetricsFile:
    """The points in a metrics file that is being written."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.bytes_read = 0
        self._rest = b""

    def new(self) -> list[dict[str, float]]:
        """The points since the last call; often none."""
        return [point for point in map(read_point, self._lines()) if point.keys() - {TIME}]

    def _lines(self) -> list[bytes]:
        """The new complete lines. Of a line that is too long only the end is kept."""
        try:
            data = _read_at(self._path, self.bytes_read)
        except OSError:  # the file does not exist yet, or was removed
            return []
        self.bytes_read += len(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()[-_MAX_POINT:]
        return lines


def _read_at(path: str, start: int) -> bytes:
    """A block of a file; empty for a pipe that the program has put there, which would block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not _is_file(descriptor):
            return b""
        return os.pread(descriptor, _BLOCK, start)
    finally:
        os.close(descriptor)


def _is_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def thin_out(points: Sequence[Mapping[str, float]], most: int) -> list[Mapping[str, float]]:
    """At most `most` points of each kind, evenly chosen and with the last, in order.

    Points with the same names are of one kind, so that a rare metric is not lost among the points
    of a frequent one.
    """
    kinds: dict[frozenset[str], list[int]] = {}
    for index, point in enumerate(points):
        kinds.setdefault(frozenset(point), []).append(index)
    kept = []
    for indexes in kinds.values():
        count = min(most, len(indexes))
        kept += [indexes[(i + 1) * len(indexes) // count - 1] for i in range(count)]
    return [points[index] for index in sorted(kept)]
