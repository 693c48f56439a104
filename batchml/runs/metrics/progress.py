"""The progress of a run and its estimated end, where its program prints it in a usual form."""

import re
from typing import NamedTuple

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_COUNTED = re.compile(
    r"\b(?:(epoch|round|fold)s?|(?:step|iter|iteration|batch)(?:es|s)?)"
    r"\b[ \t:#=\[(]{0,4}(\d{1,12}) ?(?:/|of) ?(\d{1,12})\b",
    re.IGNORECASE,
)
_BAR = re.compile(r"(?:^|[\s:])(\d{1,3})%\|")  # tqdm: ` 45%|####     | 45/100 [00:10<00:12]`
_KERAS = re.compile(r"^\s*(\d{1,12})/(\d{1,12})\s+(?:\[[=>.]|\u2501)")
_SAID = re.compile(r"\bprogress\b[ \t:=]{0,3}(\d{1,3}(?:\.\d+)?) ?%", re.IGNORECASE)
_MAX_LINE = 2000  # characters: longer lines are no progress lines

# A smaller part of the run is no base for an estimate.
_ENOUGH = 0.005


class ProgressReport(NamedTuple):
    """The progress in one line of output: the epoch, and the part done of it or of the run."""

    epoch: tuple[int, int] | None = None
    part: float | None = None  # from 0 to 1
    is_result: bool = False  # more text follows: the line ends the epoch


def read_progress(line: str) -> ProgressReport | None:
    """The progress that a line shows; None for most lines."""
    if len(line) > _MAX_LINE or not _may_tell(line):
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


def _may_tell(line: str) -> bool:
    """Whether any of the patterns could match; most lines end here."""
    return "/" in line or "%" in line or "of" in line.lower()


def _part_of_bar(plain: str) -> float | None:
    for pattern in (_BAR, _SAID):
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
        if gained < _ENOUGH or passed <= 0:
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
