"""Frames between a client and what it started inside a container, over one pair of streams.

The engine passes on bytes and nothing else: neither the size of a terminal, nor an exit code, nor
that the client is gone. So the terminal is made here, and the end of the client's stream is the end
of the client: what was started for it is ended.

A frame is a letter, the length of its content in four bytes, and the content. Where a terminal is
on the way that we did not make, as with ECS Exec, frames go as lines of text.
"""

from __future__ import annotations

import base64
import os
import select
import signal
import socket
import struct
import time
from typing import TYPE_CHECKING, Dict, Iterator, List, Tuple

if TYPE_CHECKING:
    import subprocess

    from batchml.runtime.exec.main import Order

INPUT, OVER, SIZE, ALIVE = b"i", b"e", b"w", b"k"  # from the client: SIZE is lines and columns
BEAT = 30.0  # seconds between two signs of life of a client that is far away
OUTPUT, ERRORS, EXIT, READY = b"o", b"r", b"x", b"s"  # to it
REFUSED = 111  # the code of a port where nobody listens: ECONNREFUSED

_HEAD = struct.Struct("!cI")
_BLOCK = 65_536
_IN_A_LINE = 1500  # bytes of content
_LINE = b"~batchml~"  # how a line of ours begins
_SILENCE = 4 * BEAT  # without any, it is gone: its machine sleeps, or the network is down
_HELD = 1 << 20  # bytes of input that wait for the command; more is not read meanwhile

Frame = Tuple[bytes, bytes]


def frame(kind: bytes, content: bytes = b"") -> bytes:
    return _HEAD.pack(kind, len(content)) + content


class Frames:
    """Bytes in, whole frames out."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._rest += data
        while len(self._rest) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(self._rest)
            end = _HEAD.size + size
            if len(self._rest) < end:
                return
            content = bytes(self._rest[_HEAD.size : end])
            del self._rest[:end]
            yield kind, content


class Wire:
    """Frames as they are."""

    def __init__(self) -> None:
        self._frames = Frames()

    def feed(self, data: bytes) -> Iterator[Frame]:
        return self._frames.feed(data)

    def pack(self, kind: bytes, content: bytes = b"") -> bytes:
        return frame(kind, content)

    def tell(self, kind: bytes, content: bytes = b"") -> None:
        """To whoever reads our standard output."""
        data = memoryview(self.pack(kind, content))
        while data:
            data = data[os.write(1, data) :]


class Lines(Wire):
    """Frames as lines of text; what else comes in between is nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            _, mark, text = line.rstrip(b"\r").partition(_LINE)
            if mark:
                try:
                    yield from Frames().feed(base64.b64decode(text))
                except ValueError:
                    continue

    def pack(self, kind: bytes, content: bytes = b"") -> bytes:
        parts = range(0, len(content) or 1, _IN_A_LINE)
        return b"".join(
            _LINE + base64.b64encode(frame(kind, content[at : at + _IN_A_LINE])) + b"\n"
            for at in parts
        )


def wire_of(order: Order) -> Wire:
    if not order.text:
        return Wire()
    import tty

    try:
        tty.setraw(0)  # else lines have a most, and an echo
    except Exception:
        pass  # it is no terminal
    return Lines()


def refuse(order: Order, code: int, text: str) -> None:
    """Tell the client that there is no way in, and why."""
    wire = wire_of(order)
    wire.tell(ERRORS, f"batchml: {text}\n".encode())
    wire.tell(EXIT, str(code).encode())


def serve(order: Order, environ: Dict[str, str], folder: str) -> int:
    """Run what is asked for, on standard input and output as frames; its exit code.

    Raises NoWay.
    """
    wire = wire_of(order)
    if order.port:
        return _serve_port(order.port, wire)
    from batchml.runtime.exec.prompt import taken

    with taken(environ):
        return _Served(order, environ, folder, wire).run()


class _Served:
    """A command with a terminal that is made for it, or with pipes."""

    def __init__(self, order: Order, environ: Dict[str, str], folder: str, wire: Wire) -> None:
        from batchml.runtime.exec.main import command_of, wake_file

        self._wire = wire
        self._wake = wake_file()
        words = command_of(order, environ)
        self._outputs: Dict[int, bytes] = {}
        self._input = -1
        self._terminal = -1
        more: Dict[str, object] = {"env": environ, "cwd": folder if os.path.isdir(folder) else None}
        if order.size:
            self._process = self._on_terminal(words, list(order.size), more)
        else:
            self._process = self._on_pipes(words, more)
        self._waiting = bytearray()
        self._is_over = False  # the client has no more input
        self._silence = _SILENCE if order.text else None
        self._heard = time.monotonic()

    def _on_pipes(self, words: List[str], more: Dict[str, object]) -> subprocess.Popen[bytes]:
        import subprocess

        from batchml.runtime.exec.main import start

        pipe = subprocess.PIPE
        process = start(words, stdin=pipe, stdout=pipe, stderr=pipe, **more)
        assert process.stdin and process.stdout and process.stderr
        self._input = os.dup(process.stdin.fileno())
        process.stdin.close()
        self._outputs = {process.stdout.fileno(): OUTPUT, process.stderr.fileno(): ERRORS}
        os.set_blocking(self._input, False)
        return process

    def _on_terminal(
        self, words: List[str], size: List[int], more: Dict[str, object]
    ) -> subprocess.Popen[bytes]:
        import fcntl
        import pty
        import termios

        from batchml.runtime.exec.main import start

        ours, theirs = pty.openpty()
        _resize(ours, *size)

        def own() -> None:  # in the child: its session's terminal
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        try:
            process = start(
                words, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=own, **more
            )
        finally:
            os.close(theirs)
        self._input = os.dup(ours)
        self._terminal = ours
        self._outputs = {ours: OUTPUT}
        os.set_blocking(self._input, False)
        return process

    def run(self) -> int:
        from batchml.runtime.exec.main import ENDED, code_of, end_all

        self._wire.tell(READY)
        while self._process.poll() is None or self._has_output():
            if self._is_alone():
                end_all()
                return ENDED
            for file, _ in self._ready():
                if file == self._wake:
                    if self._heed(os.read(file, 64)):
                        end_all()
                        return ENDED
                elif file == 0:
                    data = _read_input() if self._takes_more() else b""
                    if not data:
                        end_all()
                        return ENDED
                    self._heard = time.monotonic()
                    for kind, content in self._wire.feed(data):
                        self._take(kind, content)
                elif file == self._input:
                    self._give()
                elif not self._pass_on(file):
                    del self._outputs[file]
        code = code_of(self._process)
        self._wire.tell(EXIT, str(code).encode())
        return code

    def _ready(self) -> List[Tuple[int, int]]:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        # What cannot be taken is not read; that the client is gone is heard all the same.
        poll.register(0, select.POLLIN if self._takes_more() else 0)
        for file in self._outputs:
            poll.register(file, select.POLLIN)
        if self._waiting and self._input >= 0:
            poll.register(self._input, select.POLLOUT)
        pause = None if self._silence is None else 1000 * BEAT
        return poll.poll(pause if self._process.poll() is None else 0)

    def _is_alone(self) -> bool:
        return self._silence is not None and time.monotonic() > self._heard + self._silence

    def _takes_more(self) -> bool:
        return len(self._waiting) < _HELD

    def _has_output(self) -> bool:
        """Whether there is still some to read now: others may hold the stream for ever."""
        poll = select.poll()
        for file in self._outputs:
            poll.register(file, select.POLLIN)
        return any(event & select.POLLIN for _, event in poll.poll(0))

    def _heed(self, numbers: bytes) -> bool:
        """True where the terminal that the client is on has gone."""
        if signal.SIGTERM in numbers:
            self._process.terminate()
        return signal.SIGHUP in numbers

    def _take(self, kind: bytes, content: bytes) -> None:
        if kind == INPUT and self._input >= 0:
            self._waiting += content
        elif kind == OVER:
            self._is_over = True
            if not self._waiting:
                self._close_input()
        elif kind == SIZE and self._terminal >= 0:
            _resize(self._terminal, *struct.unpack("!HH", content))

    def _give(self) -> None:
        try:
            size = os.write(self._input, self._waiting[:_BLOCK])
        except BlockingIOError:
            return
        except OSError:  # it does not read any more
            self._waiting.clear()
            self._close_input()
            return
        del self._waiting[:size]
        if self._is_over and not self._waiting:
            self._close_input()

    def _close_input(self) -> None:
        if self._input >= 0:
            os.close(self._input)
            self._input = -1

    def _pass_on(self, file: int) -> bool:
        """False at the end of an output; of a terminal that is an error."""
        try:
            data = os.read(file, _BLOCK)
        except OSError:
            return False
        if data:
            self._wire.tell(self._outputs[file], data)
        return bool(data)


def _resize(terminal: int, lines: int, columns: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def _read_input() -> bytes:
    try:
        return os.read(0, _BLOCK)
    except OSError:  # of a terminal that has gone
        return b""


def _serve_port(port: int, wire: Wire) -> int:
    """One connection to a port of this container, from its first byte to its last."""
    import threading

    try:
        there = socket.create_connection(("127.0.0.1", port), 10.0)
    except OSError:
        wire.tell(EXIT, str(REFUSED).encode())
        return REFUSED
    there.settimeout(None)
    wire.tell(READY)
    back = threading.Thread(target=_bring_back, args=(there, wire), daemon=True)
    back.start()
    while True:
        data = _read_input()
        if not data:
            return 0  # the client is gone
        for kind, content in wire.feed(data):
            try:
                if kind == INPUT:
                    there.sendall(content)
                elif kind == OVER:
                    there.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it is read as the end
            if kind == OVER:
                back.join()
                return 0


def _bring_back(there: socket.socket, wire: Wire) -> None:
    while True:
        try:
            data = there.recv(_BLOCK)
        except OSError:
            data = b""
        if not data:
            return wire.tell(EXIT, b"0")
        wire.tell(OUTPUT, data)
