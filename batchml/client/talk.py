"""The client's side of `runtime/exec/relay`: our terminal, or our input and output, in frames."""

import os
import select
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from batchml.client.terminal import lent, raw, size_changes
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

_BLOCK = 65_536


class Line(Protocol):
    """A way to our program inside, and back."""

    def frames(self, until: float | None = None) -> Iterator[list[Frame]]:
        """What comes, until the end of it. A frame without a kind is for people, on their errors.

        Raises TimeoutError once it is later than `until`, of the monotonic clock.
        """

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Raises OSError when it has ended."""

    def cut(self) -> None:
        """Let go: what is inside sees that, and ends. From any thread, and more than once."""


class Said:
    """What came of a talk: `code` is None where no exit code came; `began` once it was answered."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.began = False
        self.cut_by = 0  # a signal to this process


def talk(line: Line, tty: bool) -> Said:
    """Give the terminal, or our input and output, to the command at the other end."""
    said = Said()
    wake, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    over = threading.Event()

    def cut(number: int) -> None:
        said.cut_by = number
        line.cut()

    try:
        with lent(cut, is_heard=tty), raw(tty), size_changes(told):
            for frames in line.frames():
                for kind, content in frames:
                    if kind == EXIT:
                        said.code = int(content)
                    elif kind == READY and not said.began:
                        said.began = True
                        passing = (line, wake, tty, over)
                        threading.Thread(target=_pass_input, args=passing, daemon=True).start()
                    elif kind in (OUTPUT, ERRORS, b""):
                        write_out(1 if kind == OUTPUT else 2, content)
                if said.code is not None:
                    break
    finally:
        over.set()
        os.write(told, b"o")
    if said.cut_by:
        said.code = 128 + said.cut_by
    return said


def listen(line: Line, limit: float | None, what: str) -> tuple[Said, bytes]:
    """What a command prints that gets no input. Raises ServiceUnreachable after `limit` seconds."""
    said, out = Said(), bytearray()
    end = None if limit is None else time.monotonic() + limit
    try:
        for frames in line.frames(end):
            for kind, content in frames:
                if kind == EXIT:
                    said.code = int(content)
                elif kind == READY and not said.began:
                    said.began = True
                    line.send(OVER)
                elif kind == OUTPUT:
                    out += content
            if said.code is not None:
                break
    except TimeoutError:
        line.cut()
        raise ServiceUnreachable(f"{what} did not end within {limit:.0f} s inside.") from None
    except OSError:
        pass  # it has ended
    return said, bytes(out)


def _pass_input(line: Line, wake: int, tty: bool, over: threading.Event) -> None:
    """In a thread: our output may be slow while the command waits for input."""
    files = [0, wake]
    with suppress(OSError, ValueError):
        while not over.is_set():
            ready, _, _ = select.select(files, [], [], BEAT)
            if not ready:
                line.send(ALIVE)
            if wake in ready:
                os.read(wake, 64)
                if tty and not over.is_set():
                    columns, lines = os.get_terminal_size()
                    line.send(SIZE, struct.pack("!HH", lines, columns))
            if 0 in ready and not over.is_set():
                data = os.read(0, _BLOCK)
                if data:
                    line.send(INPUT, data)
                else:
                    line.send(OVER)
                    files.remove(0)


def write_out(file: int, content: bytes) -> None:
    """All of it, past what was printed before."""
    (sys.stdout if file == 1 else sys.stderr).flush()
    data = memoryview(content)
    while data:
        data = data[os.write(file, data) :]
