"""Frames between a client and the command that it started in a container, over one connection.

A Docker engine relays bytes, but no terminal size, no exit code, and no notice that the client has
gone. So this program makes the terminal, and ends the command at the end of the client's stream.

A frame is a letter, the length of its content in four bytes, and the content. ECS Exec puts a
terminal into the connection, so there frames are sent as lines of text.
"""

from __future__ import annotations

import base64
import fcntl
import os
import pty
import select
import socket
import struct
import subprocess
import termios
import threading
import time
import tty
from typing import Dict, Iterator, List, Tuple

from batchml.runtime.exec.command import (
    RUN_ENDED,
    ExecRequest,
    exit_code,
    handle_signals,
    kill_children,
    open_signal_pipe,
    resolve_command,
    start,
)
from batchml.runtime.exec.presence import hold_presence

# Frames from the client. OVER: its input has ended; SIZE: lines and columns of its terminal
INPUT, OVER, SIZE, ALIVE = b"i", b"e", b"w", b"k"
BEAT = 30.0  # seconds between two ALIVE frames of a remote client
# Frames to the client. EXIT: the exit code; READY: the command was started
OUTPUT, ERRORS, EXIT, READY = b"o", b"r", b"x", b"s"
REFUSED = 111  # exit code if no program listens on the port: ECONNREFUSED

_HEAD = struct.Struct("!cI")
_BLOCK = 65_536
_LINE_SIZE = 1500  # bytes of content in a line
_LINE_MARK = b"~batchml~"  # before the frame in each line
# seconds without input after which the client is gone: its machine sleeps, or the network is down
_SILENCE_LIMIT = 4 * BEAT
_MAX_WAITING = 1 << 20  # bytes of input that the command has not read yet

Frame = Tuple[bytes, bytes]


def frame(kind: bytes, content: bytes = b"") -> bytes:
    return _HEAD.pack(kind, len(content)) + content


class FrameParser:
    """Splits a stream of bytes into frames."""

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


class FrameCodec(FrameParser):
    """Reads and writes frames as bytes."""

    def pack(self, kind: bytes, content: bytes = b"") -> bytes:
        return frame(kind, content)

    def write(self, kind: bytes, content: bytes = b"") -> None:
        """Write a frame to standard output."""
        data = memoryview(self.pack(kind, content))
        while data:
            data = data[os.write(1, data) :]


class LineCodec(FrameCodec):
    """Reads and writes frames as lines of text. Other text between them is ignored."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            _, mark, text = line.rstrip(b"\r").partition(_LINE_MARK)
            if mark:
                try:
                    yield from FrameParser().feed(base64.b64decode(text))
                except ValueError:
                    continue

    def pack(self, kind: bytes, content: bytes = b"") -> bytes:
        parts = range(0, len(content) or 1, _LINE_SIZE)
        return b"".join(
            _LINE_MARK + base64.b64encode(frame(kind, content[at : at + _LINE_SIZE])) + b"\n"
            for at in parts
        )


def codec_for(request: ExecRequest) -> FrameCodec:
    if not request.text:
        return FrameCodec()
    try:
        tty.setraw(0)  # otherwise the terminal limits the length of lines, and echoes them
    except Exception:
        pass  # it is not a terminal
    return LineCodec()


def refuse(request: ExecRequest, code: int, text: str) -> None:
    """Tell the client why the command cannot be started."""
    codec = codec_for(request)
    codec.write(ERRORS, f"batchml: {text}\n".encode())
    codec.write(EXIT, str(code).encode())


def serve(request: ExecRequest, environ: Dict[str, str], folder: str) -> int:
    """Run the request with frames on standard input and output; return its exit code.

    Raises ExecFailed.
    """
    codec = codec_for(request)
    if request.port:
        return _serve_port(request.port, codec)
    with hold_presence(environ):
        return _RelayedCommand(request, environ, folder, codec).run()


class _RelayedCommand:
    """A command that is started with a terminal of its own, or with pipes."""

    def __init__(
        self, request: ExecRequest, environ: Dict[str, str], folder: str, codec: FrameCodec
    ) -> None:
        self._codec = codec
        self._wake = open_signal_pipe()
        words = resolve_command(request, environ)
        self._outputs: Dict[int, bytes] = {}
        self._input = -1
        self._terminal = -1
        if request.size:
            self._process = self._on_terminal(words, environ, folder, list(request.size))
        else:
            self._process = self._on_pipes(words, environ, folder)
        self._waiting = bytearray()  # input that the command has not read yet
        self._input_ended = False
        self._silence = _SILENCE_LIMIT if request.text else None
        self._last_input = time.monotonic()

    def _on_pipes(
        self, words: List[str], environ: Dict[str, str], folder: str
    ) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        process = start(words, environ, folder, stdin=pipe, stdout=pipe, stderr=pipe)
        assert process.stdin and process.stdout and process.stderr
        self._input = os.dup(process.stdin.fileno())
        process.stdin.close()
        self._outputs = {process.stdout.fileno(): OUTPUT, process.stderr.fileno(): ERRORS}
        os.set_blocking(self._input, False)
        return process

    def _on_terminal(
        self, words: List[str], environ: Dict[str, str], folder: str, size: List[int]
    ) -> subprocess.Popen[bytes]:
        ours, theirs = pty.openpty()
        _resize(ours, *size)

        def make_controlling_terminal() -> None:  # in the child
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        try:
            process = start(
                words,
                environ,
                folder,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                preexec_fn=make_controlling_terminal,
            )
        finally:
            os.close(theirs)
        self._input = os.dup(ours)
        self._terminal = ours
        self._outputs = {ours: OUTPUT}
        os.set_blocking(self._input, False)
        return process

    def run(self) -> int:
        self._codec.write(READY)
        while self._process.poll() is None or self._has_output():
            if self._is_client_gone():
                return self._kill()
            for file, _ in self._wait_for_files():
                if file == self._wake:
                    if handle_signals(file, self._process):
                        return self._kill()
                elif file == 0:
                    data = _read_input() if self._has_room() else b""
                    if not data:
                        return self._kill()
                    self._last_input = time.monotonic()
                    for kind, content in self._codec.feed(data):
                        self._handle_frame(kind, content)
                elif file == self._input:
                    self._write_input()
                elif not self._send_output(file):
                    del self._outputs[file]
        code = exit_code(self._process)
        self._codec.write(EXIT, str(code).encode())
        return code

    def _kill(self) -> int:
        """End the command, because the client has gone."""
        kill_children()
        return RUN_ENDED

    def _wait_for_files(self) -> List[Tuple[int, int]]:
        """Wait until a file can be read or written; return all such files."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        # Without room for input nothing is read, but poll still reports the end of the stream.
        poll.register(0, select.POLLIN if self._has_room() else 0)
        for file in self._outputs:
            poll.register(file, select.POLLIN)
        if self._waiting and self._input >= 0:
            poll.register(self._input, select.POLLOUT)
        pause = None if self._silence is None else 1000 * BEAT
        return poll.poll(pause if self._process.poll() is None else 0)

    def _is_client_gone(self) -> bool:
        return self._silence is not None and time.monotonic() > self._last_input + self._silence

    def _has_room(self) -> bool:
        return len(self._waiting) < _MAX_WAITING

    def _has_output(self) -> bool:
        """Say whether output can be read now. Its end may never come: other processes may keep the
        stream open.
        """
        poll = select.poll()
        for file in self._outputs:
            poll.register(file, select.POLLIN)
        return any(event & select.POLLIN for _, event in poll.poll(0))

    def _handle_frame(self, kind: bytes, content: bytes) -> None:
        if kind == INPUT and self._input >= 0:
            self._waiting += content
        elif kind == OVER:
            self._input_ended = True
            if not self._waiting:
                self._close_input()
        elif kind == SIZE and self._terminal >= 0:
            _resize(self._terminal, *struct.unpack("!HH", content))

    def _write_input(self) -> None:
        try:
            size = os.write(self._input, self._waiting[:_BLOCK])
        except BlockingIOError:
            return
        except OSError:  # the command reads no more
            self._waiting.clear()
            self._close_input()
            return
        del self._waiting[:size]
        if self._input_ended and not self._waiting:
            self._close_input()

    def _close_input(self) -> None:
        if self._input >= 0:
            os.close(self._input)
            self._input = -1

    def _send_output(self, file: int) -> bool:
        """Send output to the client; return False at its end, which for a terminal is an error."""
        try:
            data = os.read(file, _BLOCK)
        except OSError:
            return False
        if data:
            self._codec.write(self._outputs[file], data)
        return bool(data)


def _resize(terminal: int, lines: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def _read_input() -> bytes:
    try:
        return os.read(0, _BLOCK)
    except OSError:  # the terminal has gone
        return b""


def _serve_port(port: int, codec: FrameCodec) -> int:
    """Relay one connection to a port of this container."""
    try:
        there = socket.create_connection(("127.0.0.1", port), 10.0)
    except OSError:
        codec.write(EXIT, str(REFUSED).encode())
        return REFUSED
    there.settimeout(None)
    codec.write(READY)
    back = threading.Thread(target=_relay_back, args=(there, codec), daemon=True)
    back.start()
    while True:
        data = _read_input()
        if not data:
            return 0  # the client is gone
        for kind, content in codec.feed(data):
            try:
                if kind == INPUT:
                    there.sendall(content)
                elif kind == OVER:
                    there.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the other thread notices the end of the connection
            if kind == OVER:
                back.join()
                return 0


def _relay_back(there: socket.socket, codec: FrameCodec) -> None:
    while True:
        try:
            data = there.recv(_BLOCK)
        except OSError:
            data = b""
        if not data:
            return codec.write(EXIT, b"0")
        codec.write(OUTPUT, data)
