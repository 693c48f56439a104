"""A port of this machine that leads into a run: it listens, connects inside, copies both ways.

Each connection has two threads and 64 KiB for each direction: what one end does not take, the other
is not asked for.
"""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from batchml.errors import UsageError

_BLOCK = 65_536
_LOOPBACK = "127.0.0.1"
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, no time; a closed connection is a refused one
_LOOK = 1.0  # seconds between two looks whether the run goes on

Connect = Callable[[], socket.socket]
Over = Callable[[], str]  # why there is nothing to lead to any more; empty while there is


class Tunnel:
    """`local_port` on 127.0.0.1 leads to `port` inside, until `close`, or until the run ends."""

    def __init__(self, port: int, local_port: int, over: Over, is_direct: bool = False) -> None:
        """`is_direct`: the run's port is this machine's own, and nothing is in between."""
        self.port = port
        self.local_port = local_port
        self.is_direct = is_direct
        self._over = over
        self._closed = threading.Event()

    @property
    def url(self) -> str:
        return f"http://{_LOOPBACK}:{self.local_port}"

    def wait(self) -> str:
        """Why it ended, once it has: what became of the run, or "closed"."""
        while not (why := self._over()):
            if self._closed.wait(_LOOK):
                return "closed"
        self.close()
        return why

    def close(self) -> None:
        self._closed.set()

    def __enter__(self) -> "Tunnel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


class Relay(Tunnel):
    """One that passes on what comes."""

    def __init__(self, port: int, listener: socket.socket, connect: Connect, over: Over) -> None:
        super().__init__(port, listener.getsockname()[1], over)
        self._listener = listener
        self._connect = connect
        self._lock = threading.Lock()
        self._live: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="tunnel", daemon=True).start()

    def close(self) -> None:
        super().close()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes whoever accepts
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
                self._closed.wait(0.1)  # no descriptors are left: some will be
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
    """All that comes, and then that nothing more will; an end that is gone ends both ways."""
    buffer = memoryview(bytearray(_BLOCK))
    try:
        while size := source.recv_into(buffer):
            target.sendall(buffer[:size])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def listen(port: int, wanted: int | None) -> socket.socket:
    """A listener on 127.0.0.1: on the port that is wanted, else on the run's own, else on any.

    Raises UsageError for a wanted port that is taken, with its holder where that can be known.
    """
    for number in (wanted,) if wanted is not None else (port, 0):
        try:
            return socket.create_server((_LOOPBACK, number), backlog=128)
        except (PermissionError, OverflowError) as error:
            if wanted is not None:
                raise UsageError(f"Port {wanted} of this machine: {_words(error)}.") from error
        except OSError as error:
            if wanted is not None:
                raise taken_port(wanted) from error
    raise UsageError("No port of this machine is free.")


def taken_port(port: int) -> UsageError:
    """For a port that was asked for."""
    from batchml.client.ports import holder_of

    holder = holder_of(port)
    by = f" by {holder}" if holder else ""
    return UsageError(
        f"Port {port} of this machine is taken{by}. Name another, or leave it out, and a free one "
        "is found."
    )


def _words(error: Exception) -> str:
    if isinstance(error, PermissionError):
        return "only the administrator may listen on ports below 1024"
    return "a port is a number from 1 to 65535"
