"""How a port inside a run of this machine is reached."""

import os
import socket
import threading
from typing import TYPE_CHECKING

from batchml.errors import NoDoor
from batchml.runtime.exec.program import find_program, join_network

if TYPE_CHECKING:
    from batchml.client.tunnel import Connect
    from batchml.local.exec import Sitting

_LOOPBACK = "127.0.0.1"
_LIMIT = 10.0  # seconds for one connection


def way_to(sitting: "Sitting", port: int) -> "Connect | None":
    """How to connect to a port of this attempt; None where it is a port of this machine itself.

    Raises NoDoor.
    """
    if sitting.container:
        from batchml.client.doors_container import way_into

        return way_into(sitting, port)
    program = find_program(sitting.runner, sitting.mark)
    if program is None:
        raise NoDoor("The run's program is not there: it is only starting, or is ending.")
    address = program.environ.get("BATCHML_NODE_ADDRESS", "")
    if is_elsewhere(program.pid):
        return through_network(program.pid, port)
    if address:
        return lambda: _first(port, _LOOPBACK, address)
    return None


def connect_here(port: int) -> "Connect":
    return lambda: _first(port, _LOOPBACK)


def is_elsewhere(pid: int) -> bool:
    """Whether a process has a network of its own."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return False


def through_network(pid: int, port: int) -> "Connect":
    """Connect inside the network of a process, which stays for as long as this is kept."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def connect() -> socket.socket:
        done: list[socket.socket] = []
        failed: list[OSError] = []

        def work() -> None:  # a network belongs to a thread, and this one ends at once
            try:
                if not join_network(namespace):
                    raise PermissionError("the network of the run is closed to this user")
                done.append(_first(port, _LOOPBACK))
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return done[0]

    return connect


def _first(port: int, *addresses: str) -> socket.socket:
    for address in addresses[:-1]:
        try:
            return socket.create_connection((address, port), _LIMIT)
        except OSError:
            continue
    return socket.create_connection((addresses[-1], port), _LIMIT)
