"""Forward a port of this machine into a run: listen, connect inside the run, copy both ways.

Each connection has two threads, and a buffer of 64 KiB for each direction. Data is read only as
fast as the other end takes it.
"""

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from batchml.errors import UsageError

_BLOCK = 65_536
_LOOPBACK = "127.0.0.1"
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: closing resets, as a refused connection does
_CHECK_EVERY = 1.0  # seconds between two checks whether the run has ended

Connect = Callable[[], socket.socket]
EndReason = Callable[[], str]  # why the run has ended; "" while it goes on


class PortForward:
    """Forwards `local_port` on 127.0.0.1 to `port` inside a run, until `close` or the run's end."""

    def __init__(
        self, port: int, local_port: int, end_reason: EndReason, is_direct: bool = False
    ) -> None:
        """`is_direct`: the run's port is itself a port of this machine; nothing is forwarded."""
        self.port = port
        self.local_port = local_port
        self.is_direct = is_direct
        self._end_reason = end_reason
        self._closed = threading.Event()

    @property
    def url(self) -> str:
        return f"http://{_LOOPBACK}:{self.local_port}"

    def wait(self) -> str:
        """Wait for the end; return the reason, or "closed"."""
        while not (why := self._end_reason()):
            if self._closed.wait(_CHECK_EVERY):
                return "closed"
        self.close()
        return why

    def close(self) -> None:
        self._closed.set()

    def __enter__(self) -> "PortForward":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


class PortRelay(PortForward):
    """A forward that copies data itself."""

    def __init__(
        self, port: int, listener: socket.socket, connect: Connect, end_reason: EndReason
    ) -> None:
        super().__init__(port, listener.getsockname()[1], end_reason)
        self._listener = listener
        self._connect = connect
        self._lock = threading.Lock()
        self._open_sockets: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="forward", daemon=True).start()

    def close(self) -> None:
        super().close()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        with self._lock:
            open_sockets = list(self._open_sockets)
        for each in open_sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                if self._closed.is_set():
                    return
                self._closed.wait(0.1)  # out of descriptors: others are closed meanwhile
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            remote = self._connect()
        except OSError:
            with suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.close()
            return
        with self._lock:
            self._open_sockets |= {client, remote}
        back = threading.Thread(target=_copy, args=(remote, client), daemon=True)
        back.start()
        _copy(client, remote)
        back.join()
        with self._lock:
            self._open_sockets -= {client, remote}
        client.close()
        remote.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until the source ends, then end the target; an error ends both directions."""
    buffer = memoryview(bytearray(_BLOCK))
    try:
        while size := source.recv_into(buffer):
            target.sendall(buffer[:size])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def open_listener(port: int, local_port: int | None) -> socket.socket:
    """Listen on 127.0.0.1: on `local_port`; if it is None on `port`, or else on any free port.

    Raises UsageError for a `local_port` that is taken, with the process that has it if known.
    """
    for number in (local_port,) if local_port is not None else (port, 0):
        try:
            return socket.create_server((_LOOPBACK, number), backlog=128)
        except (PermissionError, OverflowError) as error:
            if local_port is not None:
                text = f"Port {local_port} of this machine: {_describe_refusal(error)}."
                raise UsageError(text) from error
        except OSError as error:
            if local_port is not None:
                raise _taken_error(local_port) from error
    raise UsageError("No port of this machine is free.")


def _taken_error(port: int) -> UsageError:
    holder = port_holder(port)
    by = f" by {holder}" if holder else ""
    return UsageError(
        f"Port {port} of this machine is taken{by}. Name another port, or none to use a free port."
    )


def _describe_refusal(error: Exception) -> str:
    if isinstance(error, PermissionError):
        return "only the administrator may listen on ports below 1024"
    return "a port is a number from 1 to 65535"


# --- Listening processes --------------------------------------------------------------------------
# They are read from /proc, which shows a user only their own processes.


_LISTENING = "0A"  # TCP_LISTEN of include/net/tcp_states.h


def port_holder(port: int, proc: Path = Path("/proc")) -> str:
    """Name the process that listens: `process 4711 (jupyter-lab)`; "" if it is another user's."""
    inodes = {f"socket:[{inode}]" for inode in _inodes(port, proc)}
    if not inodes:
        return ""
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            for file in (entry / "fd").iterdir():
                with suppress(OSError):
                    if os.readlink(file) in inodes:
                        return f"process {entry.name} ({(entry / 'comm').read_text().strip()})"
    return ""


def has_no_listener(port: int, proc: Path = Path("/proc")) -> bool:
    """Say whether surely no process listens on a port, without a connection to it."""
    return (proc / "net" / "tcp").exists() and not any(_inodes(port, proc))


def _inodes(port: int, proc: Path) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                yield words[9]
