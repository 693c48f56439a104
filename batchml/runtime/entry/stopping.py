"""Stop signals: how the entry receives them, and how a program learns of them (`should_stop`).

A signal handler only records its signal and wakes the loop that copies the output, which does the
rest. So it does not matter between which two instructions a signal comes.
"""

from __future__ import annotations

import os
import select
import signal
import time
from _thread import get_ident
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Deque, Dict, List

STOPS = (signal.SIGTERM, signal.SIGINT)
_HANDLED = (*STOPS, signal.SIGUSR1)


class StopRequested(Exception):
    """A stop signal came before the command began."""


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals for a child that is started meanwhile, until it calls `Signals.listen`.

    Before that, a signal would end the child unnoticed.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Signals:
    """The signals that have come. The descriptor `wake` is readable after a signal has come."""

    def __init__(self) -> None:
        self.wake = self._wake_end = -1
        self.stop_signal = 0  # the first signal that requested a stop; 0: none
        self._pending: Deque[int] = deque()

    def listen(self) -> None:
        self.wake, self._wake_end = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self._wake_end, False)
        # A full pipe wakes the loop as well.
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        for number in _HANDLED:
            signal.signal(number, self._record)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)  # see `signals_blocked`

    def take(self) -> List[int]:
        """The signals since the last call, in order, without SIGCHLD."""
        found = []
        while self._pending:
            found.append(self._pending.popleft())
        return found

    def drain(self) -> None:
        """Empty `wake`, so that it is readable only after the next signal."""
        try:
            os.read(self.wake, 4096)
        except BlockingIOError:
            pass

    def check(self) -> None:
        """Raises StopRequested if a stop has been requested."""
        if self.stop_signal:
            raise StopRequested(signal.Signals(self.stop_signal).name)

    def wait_for_stop(self, seconds: float) -> bool:
        """Wait for a stop request for at most `seconds`. Return whether a stop was requested."""
        until = time.monotonic() + seconds
        while not self.stop_signal and time.monotonic() < until:
            select.select([self.wake], [], [], max(0.0, until - time.monotonic()))
            self.drain()
        return bool(self.stop_signal)

    def ignore(self) -> None:
        """Ignore signals from now on: the exit code of this process is decided.

        Python resets handlers while it exits, and a TERM at that moment would replace the code.
        """
        for number in _HANDLED:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        os.close(self.wake)
        os.close(self._wake_end)

    @staticmethod
    def reset() -> None:
        """Let signals end this process, after `ignore`."""
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)

    def _record(self, number: int, _frame: object) -> None:
        if number in STOPS and not self.stop_signal:
            self.stop_signal = number
        self._pending.append(number)


def make_stop_file(path: str) -> None:
    """Make the file that `should_stop()` checks, because not every program gets the stop signal."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    except OSError:
        pass  # the program may still get the signal


def should_stop() -> bool:
    """True once the run is to save and stop: it was cancelled, its host will be lost, or its budget
    is spent.

    Call it between two steps; a call takes microseconds. Outside a run it is always False.

    The program must then end by itself: after the first call, SIGTERM no longer ends a program
    without a handler of its own, because the program would end before it has saved. SIGKILL comes
    after the grace in any case.
    """
    path = os.environ.get("BATCHML_STOP_FILE")
    if not path:
        return False
    _survive_sigterm()
    if not os.path.exists(path):
        return False
    _ignore_sigterm()
    return True


_our_handler: Any = None


def _ignore_sigterm() -> None:
    """Ignore SIGTERM, because it may come while Python exits and has reset our handler already."""
    if _our_handler is not None and signal.getsignal(signal.SIGTERM) is _our_handler:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        except ValueError:
            pass  # not in the main thread


def _survive_sigterm() -> None:
    """Install a handler that does nothing, unless the program has a handler of its own."""
    global _our_handler
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    is_first = _our_handler is None
    try:
        signal.signal(signal.SIGTERM, _do_nothing)
    except ValueError:
        return  # not in the main thread, which alone may set handlers
    _our_handler = _do_nothing
    if is_first:
        os.register_at_fork(
            before=_block_sigterm,
            after_in_parent=_unblock_sigterm,
            after_in_child=_reset_sigterm,
        )


def _do_nothing(_number: int, _frame: object) -> None:
    pass


# A forked worker does not call `should_stop`, so SIGTERM must end it. Python drops signals that
# come to a child before it has started, so the kernel holds SIGTERM back until then.
_masks: Dict[int, Any] = {}  # thread -> its mask before it forked


def _block_sigterm() -> None:
    _masks[get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop(get_ident()))


def _reset_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _our_handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock_sigterm()
