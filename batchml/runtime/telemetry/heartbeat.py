"""`progress`: each rank reports its step, and how long it waits for the other ranks.

A rank writes a small file, BATCHML_PROGRESS. The file is a sign of life for the supervisor, and
shows which rank is slow: docs/seeing.md.

This module must not be named `progress`, because its import would replace the function of that name
in the package.
"""

from __future__ import annotations

import math
import os
import time
from typing import Callable, NamedTuple, Optional

VARIABLE = "BATCHML_PROGRESS"
EVERY = 0.2  # least seconds between two writes: a step may take less than a millisecond
_WIDTH = 95  # characters of the line, so that a new line overwrites the old one completely
_UNKNOWN = "-"


class RankProgress(NamedTuple):
    """The content of a progress file. Times are of CLOCK_MONOTONIC, in seconds."""

    step: Optional[float]
    waited: Optional[float]  # seconds of waiting for other ranks, since `began`
    at: float  # when the file was written
    began: float  # when the process called `progress` first

    def to_text(self) -> str:
        step = _UNKNOWN if self.step is None else f"{self.step:.15g}"
        waited = _UNKNOWN if self.waited is None else f"{self.waited:.6f}"
        return f"{step} {waited} {self.at:.6f} {self.began:.6f}"

    @classmethod
    def read(cls, text: str) -> Optional[RankProgress]:
        """Read the text of a progress file; None for any other text."""
        words = text.split()
        try:
            step, waited = (None if word == _UNKNOWN else float(word) for word in words[:2])
            at, began = map(float, words[2:4])
        except ValueError:
            return None
        return cls(step, waited, at, began)


def waited_share(before: Optional[RankProgress], now: RankProgress) -> Optional[float]:
    """The part of the time between two reports that the process spent waiting, 0 to 1.

    Without `before` it is the part of the time since the start. None if the program reports no
    waits, or has reported nothing new.
    """
    if now.waited is None:
        return None
    if before is None or before.began != now.began:  # the process was started again
        before = RankProgress(None, 0.0, now.began, now.began)
    passed = now.at - before.at
    if passed <= 0:
        return None
    return min(1.0, max(0.0, (now.waited - (before.waited or 0.0)) / passed))


class ProgressFile:
    """The progress file of this process. Errors, such as a full disk, are ignored."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._began: Optional[float] = None
        self._written = -math.inf
        self._step: Optional[float] = None
        self._waited: Optional[float] = None

    def update(self, step: Optional[float], waited: Optional[float]) -> None:
        now = self._clock()
        if waited is not None:
            # The wait that the first call reports was before `began`.
            self._waited = (self._waited or 0.0) + (waited if self._began is not None else 0.0)
        if self._began is None:
            self._began = now
        self._step = self._step if step is None else step
        if now - self._written < EVERY:
            return
        self._written = now
        progress = RankProgress(self._step, self._waited, now, self._began)
        line = progress.to_text().ljust(_WIDTH) + "\n"
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
            try:
                os.pwrite(descriptor, line.encode(), 0)
            finally:
                os.close(descriptor)
        except OSError:
            pass


_files: "dict[str, ProgressFile]" = {}


def progress(step: Optional[float] = None, *, waited: Optional[float] = None) -> None:
    """Report the step of this rank, and how many seconds of the step it `waited` for other ranks:
    `progress(120, waited=0.03)`. Call this in every rank, at every step.

    Measure the wait at a barrier before the gradients are reduced. Outside a run of ranks this does
    nothing. A step or time that is not finite is ignored.

    Raises TypeError or ValueError for a value that is no number, as `float` does.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    file = _files.get(path)
    if file is None:
        file = _files[path] = ProgressFile(path)
    file.update(_finite(step), _finite(waited))


def _finite(value: Optional[float]) -> Optional[float]:
    if value is None:
        return None
    found = float(value)
    return found if math.isfinite(found) else None
