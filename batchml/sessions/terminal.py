"""Connect a command inside a run with the terminal, or the input and output, of this process.

Data travels in frames. The program at the other end is `runtime/exec/relay.py`.
"""

import os
import select
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from tty import setraw
from typing import Any, Protocol

from batchml.errors import ServiceUnreachable
from batchml.runtime.exec.relay import (
    ALIVE,
    BEAT,
    ERRORS,
    EXIT,
    INPUT,
    OUTPUT,
    OVER,
    READY,
    SIZE,
    Frame,
)

# --- The terminal of this process -----------------------------------------------------------------


# Resets modes that a killed program may have left on: the alternate screen, a hidden cursor, mouse
# reports, bracketed paste. Source: XTerm Control Sequences, "DEC Private Mode Reset".
_RESET = b"\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1006l\x1b[?2004l\x1b[0m"

_FROM_KEYS = (signal.SIGINT, signal.SIGQUIT)  # Ctrl-C and Ctrl-\


@contextmanager
def lend_terminal(cut: Callable[[int], object], *, gets_ctrl_c: bool = True) -> Iterator[None]:
    """Lend the terminal to a command: Ctrl-C is for the command, and TERM and HUP call `cut`.

    `gets_ctrl_c` says whether the command gets Ctrl-C from the terminal; else it calls `cut`, too.
    Changes to the terminal's modes are undone afterwards.
    """
    modes = _modes()
    before = _install_handlers(cut, gets_ctrl_c)
    try:
        yield
    finally:
        _restore(modes)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def raw_mode(tty: bool) -> Iterator[None]:
    """With a terminal, pass every key on unchanged, even Ctrl-C."""
    if not tty:
        yield
        return
    modes = _modes()
    try:
        setraw(sys.stdin.fileno(), termios.TCSADRAIN)
        yield
    finally:
        _restore(modes)


@contextmanager
def notify_resizes(wake: int) -> Iterator[None]:
    """Write a byte to `wake` whenever this terminal's size changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def notify(_number: int, _frame: object) -> None:
        with suppress(OSError):
            os.write(wake, b"w")

    before = signal.signal(signal.SIGWINCH, notify)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)


def reset_display() -> None:
    """Reset the terminal after a killed program."""
    with suppress(OSError, ValueError):
        if sys.stdout.isatty():
            sys.stdout.flush()
            os.write(sys.stdout.fileno(), _RESET)


def _install_handlers(cut: Callable[[int], object], gets_ctrl_c: bool) -> dict[int, Any]:
    """Install signal handlers; return the earlier ones.

    Signals are handled and not ignored, because a program that is started inherits ignored signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    before: dict[int, Any] = {}
    for number in (*_FROM_KEYS, signal.SIGTERM, signal.SIGHUP):
        if number in _FROM_KEYS and gets_ctrl_c:
            before[number] = signal.signal(number, lambda *_: None)
        elif signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
            before[number] = signal.signal(number, lambda number, _: cut(number))
    return before


def _modes() -> list[Any] | None:
    try:
        return termios.tcgetattr(sys.stdin.fileno())
    except (termios.error, OSError, ValueError):
        return None


def _restore(modes: list[Any] | None) -> None:
    """Take the terminal back from the command, with its earlier modes."""
    if modes is None:
        return
    # A background process that changes the terminal is stopped, unless it ignores SIGTTOU.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        file = sys.stdin.fileno()
        with suppress(OSError):
            os.tcsetpgrp(file, os.getpgrp())
        with suppress(termios.error):
            termios.tcsetattr(file, termios.TCSADRAIN, modes)
    finally:
        signal.signal(signal.SIGTTOU, before)


# --- Input and output as frames -------------------------------------------------------------------


_BLOCK = 65_536


class ExecStream(Protocol):
    """A connection to batchml's program inside a run."""

    def frames(self, until: float | None = None) -> Iterator[list[Frame]]:
        """Yield frames until the end. A frame without a kind is text for the user's stderr.

        Raises TimeoutError after `until`, a time of the monotonic clock.
        """

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Send a frame. Raises OSError after the end."""

    def cut(self) -> None:
        """Close the connection, which ends the command. May be called in any thread, repeatedly."""


class ExecOutcome:
    """How a command ended."""

    def __init__(self) -> None:
        self.code: int | None = None  # the exit code; None: the connection ended before it
        self.began = False  # batchml's program in the run has answered
        self.cut_by = 0  # the signal to this process that ended the command; 0: none


def nonblocking_pipe() -> tuple[int, int]:
    """A pipe whose ends do not block: `os.pipe2` does not exist on macOS."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


def attach(stream: ExecStream, tty: bool) -> ExecOutcome:
    """Connect the command with our terminal, or with our input and output."""
    outcome = ExecOutcome()
    wake, wake_write = nonblocking_pipe()
    has_ended = threading.Event()

    def cut(number: int) -> None:
        outcome.cut_by = number
        stream.cut()

    try:
        with lend_terminal(cut, gets_ctrl_c=tty), raw_mode(tty), notify_resizes(wake_write):
            for frames in stream.frames():
                for kind, content in frames:
                    if kind == EXIT:
                        outcome.code = int(content)
                    elif kind == READY and not outcome.began:
                        outcome.began = True
                        passing = (stream, wake, tty, has_ended)
                        threading.Thread(target=_relay_input, args=passing, daemon=True).start()
                    elif kind in (OUTPUT, ERRORS, b""):
                        write_out(1 if kind == OUTPUT else 2, content)
                if outcome.code is not None:
                    break
    finally:
        has_ended.set()
        os.write(wake_write, b"o")
    if outcome.cut_by:
        outcome.code = 128 + outcome.cut_by
    return outcome


def collect_output(stream: ExecStream, limit: float | None, name: str) -> tuple[ExecOutcome, bytes]:
    """Collect the output of a command without input. Raises ServiceUnreachable after `limit`."""
    outcome, out = ExecOutcome(), bytearray()
    end = None if limit is None else time.monotonic() + limit
    try:
        for frames in stream.frames(end):
            for kind, content in frames:
                if kind == EXIT:
                    outcome.code = int(content)
                elif kind == READY and not outcome.began:
                    outcome.began = True
                    stream.send(OVER)
                elif kind == OUTPUT:
                    out += content
            if outcome.code is not None:
                break
    except TimeoutError:
        stream.cut()
        raise ServiceUnreachable(
            f"{name} did not end within {limit:.0f} s inside the run."
        ) from None
    except OSError:
        pass  # the command has ended, and takes no frame
    return outcome, bytes(out)


def _relay_input(stream: ExecStream, wake: int, tty: bool, has_ended: threading.Event) -> None:
    """Send our input; in a thread, because writing output may block while the command reads."""
    files = [0, wake]
    with suppress(OSError, ValueError):
        while not has_ended.is_set():
            ready, _, _ = select.select(files, [], [], BEAT)
            if not ready:
                stream.send(ALIVE)
            if wake in ready:
                os.read(wake, 64)
                if tty and not has_ended.is_set():
                    columns, lines = os.get_terminal_size()
                    stream.send(SIZE, struct.pack("!HH", lines, columns))
            if 0 in ready and not has_ended.is_set():
                data = os.read(0, _BLOCK)
                if data:
                    stream.send(INPUT, data)
                else:
                    stream.send(OVER)
                    files.remove(0)


def write_out(file: int, content: bytes) -> None:
    """Write all bytes to the descriptor `file`, after what was printed before."""
    (sys.stdout if file == 1 else sys.stderr).flush()
    data = memoryview(content)
    while data:
        data = data[os.write(file, data) :]
