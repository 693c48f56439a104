"""`progress`: how far each process of a training is, and how long it waits for the others.

Each writes a small file of its own, named by BATCHML_PROGRESS: a sign of life for the supervisor,
and what tells which rank is slow. docs/seeing.md

The module has another name than the function: importing it would put it in the function's place.
"""

from __future__ import annotations

import math
import os
import time
from typing import Callable, NamedTuple, Optional

VARIABLE = "BATCHML_PROGRESS"
EVERY = 0.2  # seconds between two writes at most: a step may take less than a millisecond
_WIDTH = 95  # of the line, so that a shorter one leaves nothing of a longer one
_UNKNOWN = "-"


class Told(NamedTuple):
    """What a process says of itself. Times are of CLOCK_MONOTONIC, in seconds."""

    step: Optional[float]
    waited: Optional[float]  # for the others, since `began`
    at: float
    began: float

    def write(self) -> str:
        step = _UNKNOWN if self.step is None else f"{self.step:.15g}"
        waited = _UNKNOWN if self.waited is None else f"{self.waited:.6f}"
        return f"{step} {waited} {self.at:.6f} {self.began:.6f}"

    @classmethod
    def read(cls, text: str) -> Optional[Told]:
        """None where the file is not there yet, or is another program's."""
        words = text.split()
        try:
            step, waited = (None if word == _UNKNOWN else float(word) for word in words[:2])
            at, began = map(float, words[2:4])
        except ValueError:
            return None
        return cls(step, waited, at, began)


def waited_share(before: Optional[Told], now: Told) -> Optional[float]:
    """Of the time between two looks, or since the beginning, the part that was waited, 0 to 1.

    None where the program does not say, or has said nothing new.
    """
    if now.waited is None:
        return None
    if before is None or before.began != now.began:  # another process: it was started again
        before = Told(None, 0.0, now.began, now.began)
    passed = now.at - before.at
    if passed <= 0:
        return None
    return min(1.0, max(0.0, (now.waited - (before.waited or 0.0)) / passed))


class Pulse:
    """The file of this process. A disk that is full costs the pulse, and nothing else."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._began: Optional[float] = None
        self._written = -math.inf
        self._step: Optional[float] = None
        self._waited: Optional[float] = None

    def beat(self, step: Optional[float], waited: Optional[float]) -> None:
        now = self._clock()
        if waited is not None:
            # What was waited before the first call lies before the beginning.
            self._waited = (self._waited or 0.0) + (waited if self._began is not None else 0.0)
        if self._began is None:
            self._began = now
        self._step = self._step if step is None else step
        if now - self._written < EVERY:
            return
        self._written = now
        line = Told(self._step, self._waited, now, self._began).write().ljust(_WIDTH) + "\n"
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
            try:
                os.pwrite(descriptor, line.encode(), 0)
            finally:
                os.close(descriptor)
        except OSError:
            pass


_pulses: "dict[str, Pulse]" = {}


def progress(step: Optional[float] = None, *, waited: Optional[float] = None) -> None:
    """Say that this process is alive, how far it is, and how many seconds of the step it `waited`
    for the others: `progress(120, waited=0.03)`. Call it in every rank, at every step.

    What is waited is best measured at a barrier before the gradients are put together. Outside a
    gang this does nothing. A step or time that is no finite number is left out.

    Raises TypeError or ValueError for what is no number at all, as `float` does.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    pulse = _pulses.get(path)
    if pulse is None:
        pulse = _pulses[path] = Pulse(path)
    pulse.beat(_finite(step), _finite(waited))


def _finite(value: Optional[float]) -> Optional[float]:
    if value is None:
        return None
    found = float(value)
    return found if math.isfinite(found) else None
