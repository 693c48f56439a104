"""A tunnel to a server of this machine, such as `ssh -L` makes, which a test cuts and mends."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Tunnel:
    """Listens on a port of 127.0.0.1 and passes each connection on to another port.

    The server knows its own port only, so its number is put into the heads of requests.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_cut = threading.Event()
        self._broken: dict[bytes, int] = {}  # part of a request line -> requests to break off
        self.requests: list[str] = []  # their first lines
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break off all connections, and refuse new ones."""
        self._is_cut.set()
        with self._lock:
            found = list(self._open)
        for each in found:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._is_cut.clear()

    def break_off(self, part: str, times: int) -> None:
        """Close the connection of the next `times` requests with this part in their first line."""
        self._broken[part.encode()] = times

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(ours,), daemon=True).start()

    def _serve(self, ours: socket.socket) -> None:
        with ours, suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as theirs:
            if self._is_cut.is_set():
                return
            with self._lock:
                self._open |= {ours, theirs}
            back = threading.Thread(target=self._pass, args=(theirs, ours, False), daemon=True)
            back.start()
            self._pass(ours, theirs, True)
            back.join()
            with self._lock:
                self._open -= {ours, theirs}

    def _pass(self, one: socket.socket, other: socket.socket, is_request: bool) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                if is_request:
                    line = data.partition(b"\r\n")[0]
                    self.requests.append(line.decode("latin-1"))
                    if self._breaks(line):
                        break
                    data = re.sub(rb":%d\b" % self.port, b":%d" % self._to, data)
                other.sendall(data)
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _breaks(self, line: bytes) -> bool:
        for part, times in self._broken.items():
            if part in line and times:
                self._broken[part] = times - 1
                return True
        return False


@contextmanager
def tunnel(port: int) -> Iterator[Tunnel]:
    found = Tunnel(port)
    try:
        yield found
    finally:
        found.close()
