"""Forward a port of this machine into a run: listen, connect inside the run, copy both ways.

Each connection takes two threads, and 64 KiB for each direction. Data is read only as fast as the
other end takes it.
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
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, no time; closing looks like a refusal
_CHECK_EVERY = 1.0  # seconds between two checks whether the run has ended

Connect = Callable[[], socket.socket]
EndReason = Callable[[], str]  # why the run has ended; "" while it goes on


class PortForward:
    """Forwards `local_port` on 127.0.0.1 to `port` inside a run, until `close` or the run's end."""

    def __init__(
        self, port: int, local_port: int, end_reason: EndReason, is_direct: bool = False
    ) -> None:
        """`is_direct`: the run's port is a port of this machine, and nothing is forwarded."""
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
        self._live: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="forward", daemon=True).start()

    def close(self) -> None:
        super().close()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        with self._lock:
            live = list(self._live)
        for each in live:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                here, _ = self._listener.accept()
            except OSError:
                if self._closed.is_set():
                    return
                self._closed.wait(0.1)  # out of descriptors: some will become free
                continue
            threading.Thread(target=self._serve, args=(here,), daemon=True).start()

    def _serve(self, here: socket.socket) -> None:
        try:
            there = self._connect()
        except OSError:
            with suppress(OSError):
                here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            here.close()
            return
        with self._lock:
            self._live |= {here, there}
        back = threading.Thread(target=_copy, args=(there, here), daemon=True)
        back.start()
        _copy(here, there)
        back.join()
        with self._lock:
            self._live -= {here, there}
        here.close()
        there.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy to the end of the source, and end the target then; an error ends both directions."""
    buffer = memoryview(bytearray(_BLOCK))
    try:
        while size := source.recv_into(buffer):
            target.sendall(buffer[:size])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def open_listener(port: int, wanted: int | None) -> socket.socket:
    """Listen on 127.0.0.1: on the wanted port, else on the run's port number, else on any port.

    Raises UsageError for a wanted port that is taken, with its holder if that is known.
    """
    for number in (wanted,) if wanted is not None else (port, 0):
        try:
            return socket.create_server((_LOOPBACK, number), backlog=128)
        except (PermissionError, OverflowError) as error:
            if wanted is not None:
                raise UsageError(f"Port {wanted} of this machine: {_words(error)}.") from error
        except OSError as error:
            if wanted is not None:
                raise port_taken(wanted) from error
    raise UsageError("No port of this machine is free.")


def port_taken(port: int) -> UsageError:
    """Make the error for a wanted port."""

    holder = port_holder(port)
    by = f" by {holder}" if holder else ""
    return UsageError(
        f"Port {port} of this machine is taken{by}. Give another one, or none to use a free port."
    )


def _words(error: Exception) -> str:
    if isinstance(error, PermissionError):
        return "only the administrator may listen on ports below 1024"
    return "a port is a number from 1 to 65535"


# --- Listening processes --------------------------------------------------------------------------
# From /proc, which shows a user only their own processes.


_LISTENING = "0A"  # TCP_LISTEN of include/net/tcp_states.h


def port_holder(port: int, proc: Path = Path("/proc")) -> str:
    """Return `process 4711 (jupyter-lab)`; "" if it is unknown or another user's."""
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
    """Say whether certainly no process listens on a port. It makes no connection."""
    return (proc / "net" / "tcp").exists() and not any(_inodes(port, proc))


def _inodes(port: int, proc: Path) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                yield words[9]
