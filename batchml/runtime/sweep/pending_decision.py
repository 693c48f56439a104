"""Let `report` in a program wait for the decision whether its trial continues.

So a program that checks the result of `report` ends at the very step of the decision. The entry of
the container decides, and writes into a file how much of the metrics file it has decided on.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Callable

PATIENCE = 10.0  # seconds to wait for a decision; after one timeout no later report waits
_PAUSES = (0.0005, 0.005)  # seconds between two polls, at first and at most
_WIDTH = 20  # digits

_may_wait = True  # no wait has timed out
_ignores_sigterm = False  # because `wait` has returned False


class PendingDecision:
    """The decision on one report.

    Make this object before the report is written, because the decision may come at once. From then
    on SIGTERM, which follows a decision to stop, does not end the program, so that it can save. If
    the program continues nevertheless and reports again, the constructor ends it with SIGTERM.
    """

    def __init__(self, path: str, stop_file: str) -> None:
        self._path, self._stop_file = path, stop_file
        if _ignores_sigterm and os.path.exists(stop_file):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self._replaced_handler = _change_handler(signal.SIG_DFL, signal.SIG_IGN)

    def wait(self, end: int) -> bool:
        """Wait for the decision on the metrics file up to byte `end`; return whether to go on."""
        global _ignores_sigterm
        _wait(self._path, end)
        if os.path.exists(self._stop_file):
            _ignores_sigterm = self._replaced_handler
            return False
        if self._replaced_handler:
            _change_handler(signal.SIG_IGN, signal.SIG_DFL)
        return True


def _change_handler(old: "signal.Handlers", new: "signal.Handlers") -> bool:
    """Replace the handler of SIGTERM if it is `old`. Return whether it was replaced."""
    if signal.getsignal(signal.SIGTERM) is not old:
        return False
    try:
        signal.signal(signal.SIGTERM, new)
    except ValueError:  # only the main thread may do it
        return False
    return True


def _wait(
    path: str,
    end: int,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    global _may_wait
    until, pause = monotonic() + PATIENCE, _PAUSES[0]
    while _may_wait and bytes_decided(path) < end:
        if monotonic() > until:
            _may_wait = False
        sleep(pause)
        pause = min(_PAUSES[1], pause * 1.5)


def bytes_decided(path: str) -> int:
    """Up to which byte the metrics file at `path` was decided on."""
    try:
        with open(_file_of(path), "rb") as file:
            return int(file.read(_WIDTH) or b"0")
    except (OSError, ValueError):
        return 0


def note_decided(path: str, end: int) -> None:
    """Record that the metrics file was decided on up to byte `end`."""
    try:
        descriptor = os.open(_file_of(path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return  # then the program waits for `PATIENCE`, and continues
    try:
        os.pwrite(descriptor, f"{end:0{_WIDTH}d}".encode(), 0)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _file_of(path: str) -> str:
    return f"{path}.judged"
