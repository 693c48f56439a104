"""Connect to ports inside runs of this machine, which are processes or containers."""

import os
import socket
import threading
from contextlib import suppress

from batchml.errors import ExecUnavailable
from batchml.local import exec as engine
from batchml.local.exec import ContainerExec, ExecRefused, LocalAttempt, RelayFrames
from batchml.runtime.exec.relay import EXIT, INPUT, OUTPUT, OVER, READY, REFUSED, Frame, frame
from batchml.runtime.exec.run_process import find_run_process, join_network
from batchml.sessions.forward.listener import Connect

_LOOPBACK = "127.0.0.1"
_CONNECT_LIMIT = 10.0  # seconds
_BLOCK = 65_536


def connect_to_process(attempt: LocalAttempt, port: int) -> Connect | None:
    """Return how to connect to a port of a process; None for a port of this machine itself.

    Raises ExecUnavailable.
    """
    process = find_run_process(attempt.runner, attempt.mark)
    if process is None:
        raise ExecUnavailable("The run's program has not started yet, or is ending.")
    address = process.environ.get("BATCHML_NODE_ADDRESS", "")
    if has_own_network(process.pid):
        return connect_in_network(process.pid, port)
    if address:
        return lambda: _connect_first(port, _LOOPBACK, address)
    return None


def connect_here(port: int) -> Connect:
    return lambda: _connect_first(port, _LOOPBACK)


def has_own_network(pid: int) -> bool:
    """Say whether a process has a network namespace of its own."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return False


def connect_in_network(pid: int, port: int) -> Connect:
    """Return how to connect inside the network namespace of a process, which is kept open."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def connect() -> socket.socket:
        done: list[socket.socket] = []
        failed: list[OSError] = []

        def work() -> None:  # in a thread of its own, because a thread has one namespace
            try:
                if not join_network(namespace):
                    raise PermissionError("this user may not enter the network of the run")
                done.append(_connect_first(port, _LOOPBACK))
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return done[0]

    return connect


def _connect_first(port: int, *addresses: str) -> socket.socket:
    """Connect to the first address that accepts."""
    for address in addresses[:-1]:
        try:
            return socket.create_connection((address, port), _CONNECT_LIMIT)
        except OSError:
            continue
    return socket.create_connection((addresses[-1], port), _CONNECT_LIMIT)


# --- Containers -----------------------------------------------------------------------------------


def connect_to_container(attempt: LocalAttempt, port: int) -> Connect:
    """Return how to connect to a port of a container, even one bound to its 127.0.0.1.

    The connection is made inside the container's network namespace if this user may enter it, else
    by batchml's program in the container, else to the container's address.
    """
    try:
        pid = engine.process_of(attempt.container)
        if pid and _may_enter(pid):
            return connect_in_network(pid, port)
        if engine.has_python(attempt.container):
            return connect_by_exec(attempt, port)
        address = engine.address_of(attempt.container)
    except ExecRefused as error:
        raise ExecUnavailable(f"The container cannot be entered: {error}") from error
    return lambda: socket.create_connection((address, port), _CONNECT_LIMIT)


def _may_enter(pid: int) -> bool:
    """Say whether this user may enter the network of a process of this machine."""
    try:
        os.close(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return os.geteuid() == 0


def connect_by_exec(attempt: LocalAttempt, port: int) -> Connect:
    """Return how to connect through a program in the container, one for each connection."""

    def connect() -> socket.socket:
        try:
            request = attempt.request((), stream="port", port=port)
            started = engine.start_program(attempt.container, request)
        except ExecRefused as error:
            raise ConnectionRefusedError(str(error)) from error
        frames = RelayFrames()
        first = _first_frames(started, frames)
        if not first or first[0][0] != READY:
            started.close()
            raise ConnectionRefusedError(REFUSED, "nothing listens on the port")
        ours, theirs = socket.socketpair()
        _relay(started, theirs, frames, first[1:])
        return ours

    return connect


def _first_frames(started: ContainerExec, frames: RelayFrames) -> list[Frame]:
    """Wait for frames with a kind; text for the user's stderr is passed over."""
    while data := started.receive():
        found = [each for each in frames.feed(data) if each[0]]
        if found:
            return found
    return []


def _relay(
    started: ContainerExec, there: socket.socket, frames: RelayFrames, first: list[Frame]
) -> None:
    """Copy both ways between the frames of an exec and a socket, in two threads."""

    def copy_output() -> None:
        with suppress(OSError):
            if not _write_frames(first, there):
                return
            while data := started.receive():
                if not _write_frames(list(frames.feed(data)), there):
                    return
            there.shutdown(socket.SHUT_RDWR)

    def copy_input() -> None:
        with suppress(OSError):
            while data := there.recv(_BLOCK):
                started.stream.sendall(frame(INPUT, data))
            started.stream.sendall(frame(OVER))

    def copy_both() -> None:
        other = threading.Thread(target=copy_input, daemon=True)
        other.start()
        copy_output()
        other.join()
        there.close()
        started.close()

    threading.Thread(target=copy_both, daemon=True).start()


def _write_frames(frames: list[Frame], there: socket.socket) -> bool:
    """Write output to the socket. Return False at the end of the connection."""
    for kind, content in frames:
        if kind == OUTPUT:
            there.sendall(content)
        elif kind == EXIT:
            there.shutdown(socket.SHUT_WR)
            return False
    return True
