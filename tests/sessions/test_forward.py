"""A port that leads into a run, over plain sockets; and who holds one."""

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from batchml.errors import UsageError
from batchml.sessions.forward.listener import (
    PortForward,
    PortRelay,
    has_no_listener,
    open_listener,
    port_holder,
)


@contextmanager
def echo_server() -> Iterator[int]:
    """Sends back what comes, and its own end once the other's has come; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(there: socket.socket) -> None:
        with there:
            while data := there.recv(65_536):
                there.sendall(data)

    def accept() -> None:
        while True:
            try:
                there, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(there,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def talk_to(port: int, data: bytes) -> bytes:
    """Send, half close, and read to the end."""
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        found = b""
        while more := sock.recv(65_536):
            found += more
        return found


@contextmanager
def relay_to(port: int, over: str = "") -> Iterator[PortRelay]:
    def connect() -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), 10)

    relay = PortRelay(port, open_listener(0, None), connect, lambda: over)
    with relay:
        yield relay


def test_what_is_sent_and_closed_arrives_and_so_does_the_answer() -> None:
    with echo_server() as port, relay_to(port) as relay:
        assert talk_to(relay.local_port, b"ping" * 100_000) == b"ping" * 100_000


def test_many_connections_at_once_each_get_their_own() -> None:
    with echo_server() as port, relay_to(port) as relay:
        found: dict[int, bytes] = {}

        def one(number: int) -> None:
            found[number] = talk_to(relay.local_port, b"%d" % number * 1000)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert found == {number: b"%d" % number * 1000 for number in range(60)}


def test_what_nobody_reads_is_not_kept_here() -> None:
    """A gigabyte would be held in memory otherwise: the sender is held instead."""
    listener = socket.create_server(("127.0.0.1", 0))
    with closing(listener), relay_to(listener.getsockname()[1]) as relay:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with socket.create_connection(("127.0.0.1", relay.local_port)) as sock:
            there, _ = listener.accept()
            sock.setblocking(False)
            sent = 0
            block = bytes(1 << 20)
            idle = 0
            while idle < 3 and sent < 1 << 30:
                try:
                    sent += sock.send(block)
                except BlockingIOError:
                    idle += 1
                    threading.Event().wait(0.05)
            there.close()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert sent < 1 << 28 and grown < 100_000, (sent, grown)


def test_a_port_where_nobody_listens_yet_refuses_and_later_does_not() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    with relay_to(port) as relay:
        with pytest.raises(OSError):
            assert talk_to(relay.local_port, b"x") == b"never"
        with (
            closing(socket.create_server(("127.0.0.1", port))) as listener,
            socket.create_connection(("127.0.0.1", relay.local_port), 10) as sock,
        ):
            there, _ = listener.accept()
            there.sendall(b"here")
            there.close()
            assert sock.recv(10) == b"here"


def test_a_run_that_ends_closes_its_tunnel_and_says_why() -> None:
    with echo_server() as port, relay_to(port, "train has ended: succeeded.") as relay:
        with socket.create_connection(("127.0.0.1", relay.local_port), 10) as sock:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
            assert relay.wait() == "train has ended: succeeded."
            assert sock.recv(1) == b"", "what goes through it is closed, too"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", relay.local_port), 1)


def test_a_port_that_is_taken_is_named_with_its_holder_and_only_where_it_was_asked_for() -> None:
    with echo_server() as port:
        with pytest.raises(
            UsageError, match=rf"Port {port} of this machine is taken by process {os.getpid()}"
        ):
            open_listener(port, port)
        with closing(open_listener(port, None)) as other:
            assert other.getsockname()[0] == "127.0.0.1"
            assert other.getsockname()[1] != port
        assert not has_no_listener(port)
    with pytest.raises(UsageError):
        open_listener(8888, 70_000)
    assert port_holder(1) == ""
    assert has_no_listener(1)


def test_a_tunnel_that_is_closed_says_so() -> None:
    tunnel = PortForward(8888, 8888, lambda: "", is_direct=True)
    with tunnel:
        assert tunnel.url == "http://127.0.0.1:8888"
    assert tunnel.wait() == "closed"
