"""Signals that come to the entry, and the stop that they, or the run's budget, ask for.

A handler only notes its signal and wakes the loop; everything else is done by the loop, so that it
does not matter between which two instructions a signal comes.
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
_HEARD = (*STOPS, signal.SIGUSR1)


class Stopped(Exception):
    """A stop was asked for before the command began."""


@contextmanager
def held_back() -> Iterator[None]:
    """For a child that is started meanwhile, and that calls `Signals.listen`: signals that come to
    it before wait until then. They would end it, and nobody else would hear of them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Signals:
    """Those that have come. `wake` is a descriptor that can be read once one has."""

    def __init__(self) -> None:
        self.wake = -1
        self.stop_asked = 0  # the first signal that asked for one
        self._come: Deque[int] = deque()

    def listen(self) -> None:
        self.wake, wake_end = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_end, False)
        # A pipe that is full wakes the loop as well.
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        for number in _HEARD:
            signal.signal(number, self._note)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)  # see `held_back`

    def take(self) -> List[int]:
        """What has come since the last call, in order, but for deaths of children."""
        found = []
        while self._come:
            found.append(self._come.popleft())
        return found

    def check(self) -> None:
        """Raises Stopped when a stop has been asked for."""
        if self.stop_asked:
            raise Stopped(signal.Signals(self.stop_asked).name)

    def stops_within(self, seconds: float) -> bool:
        """Wait so long, or until a stop is asked for; whether one was."""
        until = time.monotonic() + seconds
        while not self.stop_asked and time.monotonic() < until:
            select.select([self.wake], [], [], max(0.0, until - time.monotonic()))
            try:
                os.read(self.wake, 4096)
            except BlockingIOError:
                pass
        return bool(self.stop_asked)

    def deafen(self) -> None:
        """From here on no signal changes how this process ends: its exit code has been told.

        Python sets handlers back while it ends, and a TERM that came then would replace the code.
        """
        for number in _HEARD:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)

    def _note(self, number: int, _frame: object) -> None:
        if number in STOPS and not self.stop_asked:
            self.stop_asked = number
        self._come.append(number)


def make_stop_file(path: str) -> None:
    """Tell a program that looks, `should_stop()`, beside the signal that it may not hear."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    except OSError:
        pass  # the signal has told it


def should_stop() -> bool:
    """True once this run is to save and stop: it is cancelled, its host goes, its money is spent.

    Look between two steps; a look costs microseconds. Outside a run it is always False. Who looks
    ends by itself: from the first look on, SIGTERM no longer ends a program that does not handle
    it, for it would before anything is saved. SIGKILL comes after the grace in any case.
    """
    path = os.environ.get("BATCHML_STOP_FILE")
    if not path:
        return False
    _outlive_the_signal()
    if not os.path.exists(path):
        return False
    _ignore_the_signal()
    return True


_our_handler: Any = None


def _ignore_the_signal() -> None:
    """It is known by now, and it may come while Python ends, when our handler is gone already."""
    if _our_handler is not None and signal.getsignal(signal.SIGTERM) is _our_handler:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        except ValueError:
            pass  # of another thread than the main one


def _outlive_the_signal() -> None:
    global _our_handler
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    is_first = _our_handler is None
    try:
        signal.signal(signal.SIGTERM, _pass_over)
    except ValueError:
        return  # of another thread than the main one, which alone may say so
    _our_handler = _pass_over
    if is_first:
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_end_as_before)


def _pass_over(_number: int, _frame: object) -> None:
    pass


# A worker that is forked does not look, and is to end by the signal. Python forgets what comes to a
# child before it has begun, so the kernel keeps the signal until then.
_masks: Dict[int, Any] = {}  # thread -> its mask before it forked


def _hold() -> None:
    _masks[get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop(get_ident()))


def _end_as_before() -> None:
    if signal.getsignal(signal.SIGTERM) is _our_handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_go()
