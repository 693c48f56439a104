"""In a program: `report` waits until its trial's value was judged. Beside it: who judges is told.

So a program that looks at what `report` returns ends at the very step at which it is to.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Callable

PATIENCE = (
    10.0  # seconds that a judge is waited for; one that does not come is not waited for again
)
_PAUSES = (0.0005, 0.005)  # seconds between two looks, at first and at most
_WIDTH = 20  # digits

_waits = True
_ignores = False  # the signal, because False was returned once


class Verdict:
    """One report's. Made before the report is written, for the word may come at once.

    From then on the signal that follows a bad word does not end the program, so that it may save.
    One that went on after a bad word, and reports again, is ended by the signal here.
    """

    def __init__(self, path: str, stop_file: str) -> None:
        self._path, self._stop_file = path, stop_file
        if _ignores and os.path.exists(stop_file):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self._is_ours = _set(signal.SIG_DFL, signal.SIG_IGN)

    def goes_on(self, end: int) -> bool:
        """Whether the trial goes on, once the metrics file was judged up to byte `end`."""
        global _ignores
        _wait(self._path, end)
        if os.path.exists(self._stop_file):
            _ignores = self._is_ours
            return False
        if self._is_ours:
            _set(signal.SIG_IGN, signal.SIG_DFL)
        return True


def _set(old: "signal.Handlers", new: "signal.Handlers") -> bool:
    """Set what a TERM does, if it does `old`; whether it was set."""
    if signal.getsignal(signal.SIGTERM) is not old:
        return False
    try:
        signal.signal(signal.SIGTERM, new)
    except ValueError:  # of another thread than the main one, which alone may say so
        return False
    return True


def _wait(
    path: str,
    end: int,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    global _waits
    until, pause = monotonic() + PATIENCE, _PAUSES[0]
    while _waits and judged(path) < end:
        if monotonic() > until:
            _waits = False
        sleep(pause)
        pause = min(_PAUSES[1], pause * 1.5)


def judged(path: str) -> int:
    """Bytes of the metrics file at `path` that were judged."""
    try:
        with open(_note(path), "rb") as file:
            return int(file.read(_WIDTH) or b"0")
    except (OSError, ValueError):
        return 0


def note_judged(path: str, end: int) -> None:
    """Say that the metrics file was judged up to byte `end`."""
    try:
        descriptor = os.open(_note(path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return  # the program waits in vain, and goes on
    try:
        os.pwrite(descriptor, f"{end:0{_WIDTH}d}".encode(), 0)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _note(path: str) -> str:
    return f"{path}.judged"
