"""Into containers of this machine, by the engine's exec."""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from batchml.client.doors import Asked
from batchml.client.plain_guard import guarded
from batchml.client.talk import listen, talk, write_out
from batchml.client.terminal import lent, raw, size_changes
from batchml.errors import NoDoor, ServiceUnreachable
from batchml.local import exec as engine
from batchml.local.exec import Refusal, Relayed, Started
from batchml.runtime.exec.main import ENDED
from batchml.runtime.exec.relay import EXIT, INPUT, OUTPUT, OVER, READY, REFUSED, Frame, frame

if TYPE_CHECKING:
    from batchml.client.tunnel import Connect
    from batchml.local.exec import Sitting

_BLOCK = 65_536
_NO_SHELL = (126, 127)  # the engine's codes for a command that is not there


class _Exec:
    """A line to our program in a container, by the engine's stream."""

    def __init__(self, started: Started) -> None:
        self._stream = started.stream
        self._relayed = Relayed()

    def frames(self, until: float | None = None) -> Iterator[list[Frame]]:
        while data := _received(self._stream, until):
            yield list(self._relayed.feed(data))

    def send(self, kind: bytes, content: bytes = b"") -> None:
        self._stream.sendall(frame(kind, content))

    def cut(self) -> None:
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)


def run_in_container(sitting: "Sitting", command: tuple[str, ...], tty: bool) -> tuple[int, bool]:
    """The exit code, and whether the run may have ended beneath it. Raises NoDoor."""
    columns, lines = os.get_terminal_size() if tty else (0, 0)
    term = os.environ.get("TERM", "") if tty else ""
    size = [lines, columns] if tty else []
    try:
        if not engine.has_python(sitting.container):
            return _run_plain(sitting, command, tty, term)
        started = engine.start(
            sitting.container, sitting.order(command, stream="relay", size=size, term=term)
        )
    except Refusal as error:
        raise NoDoor(f"There is no way into the container: {error}") from error
    try:
        said = talk(_Exec(started), tty)
    finally:
        started.close()
    return (ENDED, True) if said.code is None else (said.code, False)


def _run_plain(
    sitting: "Sitting", command: tuple[str, ...], tty: bool, term: str
) -> tuple[int, bool]:
    """In an image without Python: the container's own variables, and the engine's terminal."""
    words = command or ("/bin/sh",)
    started = engine.start_plain(sitting.container, words, tty=tty, term=term)
    plain = _Plain(started, tty)
    try:
        with (
            guarded(sitting.container, started) as release,
            lent(plain.cut, is_heard=tty),
            raw(tty),
            size_changes(plain.wake_write),
        ):
            plain.pass_on()
            if not plain.cut_by:
                release()
        code = None if plain.cut_by else engine.exit_code(started.exec_id)
    except Refusal:
        code = None
    finally:
        started.close()
    if plain.cut_by:
        return 128 + plain.cut_by, False
    if code in _NO_SHELL and not command:
        raise NoDoor("This image has no shell: name a program that it has, after --.")
    return code if code is not None else ENDED, code is None or code == 128 + signal.SIGKILL


class _Plain:
    def __init__(self, started: Started, tty: bool) -> None:
        self._started, self._stream, self._tty = started, started.stream, tty
        self._wake, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.cut_by = 0  # a signal to this process

    def cut(self, number: int) -> None:
        self.cut_by = number
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def pass_on(self) -> None:
        threading.Thread(target=self._pass_input, daemon=True).start()
        os.write(self.wake_write, b"w")  # the size, now that it runs
        reading = engine.Reading()
        while data := _received(self._stream):
            if self._tty:
                write_out(1, data)
                continue
            for is_error, content in reading.feed(data):
                write_out(2 if is_error else 1, content)

    def _pass_input(self) -> None:
        with suppress(OSError, ValueError, Refusal):
            while True:
                ready, _, _ = select.select([0, self._wake], [], [])
                if self._wake in ready:
                    os.read(self._wake, 64)
                    if self._tty:
                        columns, lines = os.get_terminal_size()
                        engine.resize(self._started.exec_id, lines, columns)
                if 0 in ready:
                    data = os.read(0, _BLOCK)
                    if not data:
                        return self._stream.shutdown(socket.SHUT_WR)
                    self._stream.sendall(data)


def ask_container(sitting: "Sitting", command: tuple[str, ...], limit: float | None) -> Asked:
    """What a command prints in a container, and its exit code."""
    end = None if limit is None else time.monotonic() + limit
    try:
        if not engine.has_python(sitting.container):
            return _ask_plain(sitting, command, end)
        started = engine.start(sitting.container, sitting.order(command, stream="relay"))
    except Refusal as error:
        raise NoDoor(f"There is no way into the container: {error}") from error
    try:
        said, out = listen(_Exec(started), limit, command[0])
    finally:
        started.close()
    return Asked(ENDED if said.code is None else said.code, out)


def _ask_plain(sitting: "Sitting", command: tuple[str, ...], end: float | None) -> Asked:
    started = engine.start_plain(sitting.container, command, tty=False)
    reading, out = engine.Reading(), bytearray()
    try:
        started.stream.shutdown(socket.SHUT_WR)
        while data := _received(started.stream, end):
            for is_error, content in reading.feed(data):
                if not is_error:
                    out += content
    except TimeoutError:
        raise ServiceUnreachable(f"{command[0]} did not end in time inside.") from None
    finally:
        started.close()
    code = engine.exit_code(started.exec_id)
    return Asked(ENDED if code is None else code, bytes(out))


# --- a port of a container ------------------------------------------------------------------------


def way_into(sitting: "Sitting", port: int) -> "Connect":
    """How to connect to a port of a container, also to one that listens on its 127.0.0.1 alone:
    inside its network where this user may go there, else by our program in it, else by its address.
    """
    from batchml.client.tunnel_local import through_network

    try:
        pid = engine.process_of(sitting.container)
        if pid and _may_enter(pid):
            return through_network(pid, port)
        if engine.has_python(sitting.container):
            return by_exec(sitting, port)
        address = engine.address_of(sitting.container)
    except Refusal as error:
        raise NoDoor(f"There is no way into the container: {error}") from error
    return lambda: socket.create_connection((address, port), 10.0)


def _may_enter(pid: int) -> bool:
    """Whether the process is of this machine, and its network open to us."""
    try:
        os.close(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return os.geteuid() == 0


def by_exec(sitting: "Sitting", port: int) -> "Connect":
    """Each connection is a program of ours in the container, which connects there."""

    def connect() -> socket.socket:
        try:
            started = engine.start(sitting.container, sitting.order((), stream="port", port=port))
        except Refusal as error:
            raise ConnectionRefusedError(str(error)) from error
        frames = Relayed()
        first = _first_frames(started.stream, frames)
        if not first or first[0][0] != READY:
            started.close()
            raise ConnectionRefusedError(REFUSED, "nobody listens there")
        ours, theirs = socket.socketpair()
        _carry(started.stream, theirs, frames, first[1:])
        return ours

    return connect


def _first_frames(stream: socket.socket, frames: Relayed) -> list[tuple[bytes, bytes]]:
    while data := _received(stream):
        found = [each for each in frames.feed(data) if each[0]]
        if found:
            return found
    return []


def _carry(
    stream: socket.socket, there: socket.socket, frames: Relayed, first: list[tuple[bytes, bytes]]
) -> None:
    """Two threads: frames of the exec become bytes of the socket, and the other way."""

    def out() -> None:
        with suppress(OSError):
            if not _take(first, there):
                return
            while data := _received(stream):
                if not _take(list(frames.feed(data)), there):
                    return
            there.shutdown(socket.SHUT_RDWR)

    def back() -> None:
        with suppress(OSError):
            while data := there.recv(_BLOCK):
                stream.sendall(frame(INPUT, data))
            stream.sendall(frame(OVER))

    def both() -> None:
        other = threading.Thread(target=back, daemon=True)
        other.start()
        out()
        other.join()
        there.close()
        stream.close()

    threading.Thread(target=both, daemon=True).start()


def _take(found: list[tuple[bytes, bytes]], there: socket.socket) -> bool:
    """False once the far end has said its last."""
    for kind, content in found:
        if kind == OUTPUT:
            there.sendall(content)
        elif kind == EXIT:
            there.shutdown(socket.SHUT_WR)
            return False
    return True


# --------------------------------------------------------------------------------------------------


def _received(stream: socket.socket, until: float | None = None) -> bytes:
    """What came; empty at the end. Raises TimeoutError when it is too late."""
    if until is not None:
        stream.settimeout(max(0.001, until - time.monotonic()))
    try:
        return stream.recv(_BLOCK)
    except TimeoutError:
        raise
    except OSError:
        return b""
