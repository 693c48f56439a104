"""The terminal of this process, given to a command inside a run and taken back unharmed."""

import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# What a program that was killed may have left on: the other screen, a hidden cursor, the mouse,
# bracketed paste. Source: XTerm Control Sequences, "DEC Private Mode Reset".
_QUIET = b"\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1006l\x1b[?2004l\x1b[0m"

_FOR_INSIDE = (signal.SIGINT, signal.SIGQUIT)


@contextmanager
def lent(cut: Callable[[int], object], *, is_heard: bool = True) -> Iterator[None]:
    """While a command inside has the terminal: Ctrl-C is its, and TERM and HUP call `cut` with
    their number; so does Ctrl-C where the command does not hear of it by itself (`is_heard`).

    Whatever it did to the terminal's modes is undone.
    """
    modes = _modes()
    before = _handlers(cut, is_heard)
    try:
        yield
    finally:
        _take_back(modes)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def raw(wanted: bool) -> Iterator[None]:
    """Every key as it is, Ctrl-C among them, for a terminal that is far away."""
    if not wanted:
        yield
        return
    import tty

    modes = _modes()
    try:
        tty.setraw(sys.stdin.fileno(), termios.TCSADRAIN)
        yield
    finally:
        _take_back(modes)


@contextmanager
def size_changes(wake: int) -> Iterator[None]:
    """A byte is written to `wake` whenever this terminal has another size."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def tell(_number: int, _frame: object) -> None:
        with suppress(OSError):
            os.write(wake, b"w")

    before = signal.signal(signal.SIGWINCH, tell)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)


def quiet() -> None:
    """Turn off what a program that was killed on the terminal had turned on."""
    with suppress(OSError, ValueError):
        if sys.stdout.isatty():
            sys.stdout.flush()
            os.write(sys.stdout.fileno(), _QUIET)


def _handlers(cut: Callable[[int], object], is_heard: bool) -> dict[int, Any]:
    """Those of before. Handlers instead of ignoring: a program that is started heeds signals."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    before: dict[int, Any] = {}
    for number in (*_FOR_INSIDE, signal.SIGTERM, signal.SIGHUP):
        if number in _FOR_INSIDE and is_heard:
            before[number] = signal.signal(number, lambda *_: None)
        elif signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            before[number] = signal.signal(number, lambda number, _: cut(number))
    return before


def _modes() -> list[Any] | None:
    try:
        return termios.tcgetattr(sys.stdin.fileno())
    except (termios.error, OSError, ValueError):
        return None


def _take_back(modes: list[Any] | None) -> None:
    """Be in the foreground again, with the modes of before."""
    if modes is None:
        return
    # Who is in the background is stopped for touching the terminal, unless it does not heed that.
    heeded = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        file = sys.stdin.fileno()
        with suppress(OSError):
            os.tcsetpgrp(file, os.getpgrp())
        with suppress(termios.error):
            termios.tcsetattr(file, termios.TCSADRAIN, modes)
    finally:
        signal.signal(signal.SIGTTOU, heeded)
