"""`batchml.local.server.app` over real sockets, with short limits. docs/behaviours.md B110-B112."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest
import uvicorn

from batchml.local.server.app import ConnectionGate, ConnectionLimits
from tests.support.local_server import wait_for

OK = b"HTTP/1.1 200 OK"


LARGE = 64 << 20  # more than the buffers of both ends


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads the request; whoever asks for /known/KEY is known by the key. /held is not answered."""
    while (await receive()).get("more_body"):
        pass
    _, word, *key = scope["path"].split("/")
    if word:
        scope["state"]["trust"](key[0] if key else "mine")
    body = b"a" * LARGE + b"ok" if word == "large" else b"ok"
    if word == "held":
        await asyncio.Event().wait()
    length = str(len(body)).encode()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
    )
    await send({"type": "http.response.body", "body": body})


class Serving:
    def __init__(self, limits: ConnectionLimits) -> None:
        self.gate = ConnectionGate(limits)
        self.listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            app, log_config=None, log_level="error", lifespan="off", ws="none",
            http=cast(Any, self.gate.protocol), h11_max_incomplete_event_size=4096,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve(sockets=[self.listener]))
        )

    def connect(self) -> socket.socket:
        made = socket.create_connection(self.listener.getsockname(), timeout=10)
        return made

    def connected(self) -> int:
        return len(self.gate._connected)


Serve = Callable[..., Serving]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:

        @contextmanager
        def running(serving: Serving) -> Iterator[None]:
            serving.thread.start()
            yield
            serving.server.should_exit = True
            serving.thread.join(20)

        def start(**limits: Any) -> Serving:
            serving = Serving(ConnectionLimits(**limits))
            stack.enter_context(running(serving))
            return serving

        yield start


def get(peer: socket.socket, path: str = "/") -> bytes:
    peer.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    found = b""
    while not found.endswith(b"ok") and (data := peer.recv(65_536)):
        found += data
    return found


def until_closed(peer: socket.socket) -> bytes:
    """All that comes before the other side closes."""
    found = b""
    try:
        while data := peer.recv(65_536):
            found += data
    except ConnectionResetError:
        pass
    return found


def refusal(raw: bytes) -> tuple[int, str]:
    """The status and the code of an answer in AWS's shape."""
    head, _, body = raw.partition(b"\r\n\r\n")
    code = json.loads(body)["__type"]
    assert f"x-amzn-errortype: {code}".encode() in head
    assert b"connection: close" in head
    return int(head.split()[1]), code


@pytest.mark.parametrize("sent", [b"", b"GET", b"GET / HTTP/1.1\r\nhost: x\r\nslow: "])
def test_headers_that_do_not_come_in_time_end_the_connection(serve: Serve, sent: bytes) -> None:
    """B111."""
    peer = serve(headers=0.3).connect()
    peer.sendall(sent)
    assert refusal(until_closed(peer)) == (408, "RequestTimeoutException")


def test_headers_that_drip_get_no_more_time(serve: Serve) -> None:
    """B111."""
    peer = serve(headers=0.5).connect()
    peer.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n")
    peer.settimeout(0.02)
    found = b""
    with pytest.raises((ConnectionError, EOFError)):
        for _ in range(1000):
            peer.sendall(b"a: b\r\n")
            try:
                data = peer.recv(65_536)
            except TimeoutError:
                continue
            if not data:
                raise EOFError
            found += data
    assert found.startswith(b"HTTP/1.1 408")


def test_a_body_that_does_not_come_in_time_ends_the_connection(serve: Serve) -> None:
    """B111."""
    peer = serve(body=0.3).connect()
    peer.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf")
    assert refusal(until_closed(peer)) == (408, "RequestTimeoutException")


def test_a_later_request_of_a_connection_has_to_hurry_as_well(serve: Serve) -> None:
    peer = serve(headers=0.3).connect()
    assert get(peer, "/known").startswith(OK)
    peer.sendall(b"GET /known")
    assert refusal(until_closed(peer)) == (408, "RequestTimeoutException")


def test_a_signed_connection_may_be_silent_for_longer(serve: Serve) -> None:
    """B112."""
    serving = serve(headers=0.3, body=0.3, idle_stranger=1, idle=60)
    known, stranger = serving.connect(), serving.connect()
    assert get(known, "/known").startswith(OK)
    assert get(stranger).startswith(OK)
    assert until_closed(stranger) == b""
    assert get(known).startswith(OK)


def test_strangers_make_room_for_new_ones_and_signed_connections_stay(serve: Serve) -> None:
    """B110."""
    serving = serve(strangers=3, settling=0.0, headers=30.0)
    known = serving.connect()
    assert get(known, "/known").startswith(OK)
    silent = [serving.connect() for _ in range(20)]
    for peer in silent[:17]:
        assert refusal(until_closed(peer)) == (503, "ServiceUnavailableException")
    assert get(known).startswith(OK)
    assert get(serving.connect()).startswith(OK)


def test_clients_that_come_all_at_once_are_all_served(serve: Serve) -> None:
    serving = serve(strangers=3, settling=30.0)
    peers = [serving.connect() for _ in range(50)]
    assert all(get(peer).startswith(OK) for peer in peers)


def test_connections_have_an_end_and_then_the_oldest_stranger_goes(serve: Serve) -> None:
    """B110."""
    serving = serve(strangers=100, connections=10, settling=30.0)
    peers = [serving.connect() for _ in range(9)]
    assert all(get(peer, "/known").startswith(OK) for peer in peers)
    strangers = [serving.connect() for _ in range(3)]
    for peer in strangers[:2]:
        assert refusal(until_closed(peer)) == (503, "ServiceUnavailableException")
    assert all(get(peer).startswith(OK) for peer in (*peers, strangers[2]))


def test_who_has_gone_makes_room(serve: Serve) -> None:
    serving = serve(connections=5)
    for _ in range(30):
        peer = serving.connect()
        assert get(peer, "/known").startswith(OK)
        peer.close()
        wait_for(lambda: serving.connected() == 0, "it is seen to have gone")
    assert not serving.gate._strangers


def test_a_key_that_holds_most_connections_makes_room_and_others_stay(serve: Serve) -> None:
    """B110."""
    serving = serve(signed=6)
    mine = [serving.connect() for _ in range(2)]
    assert all(get(peer, "/known/mine").startswith(OK) for peer in mine)
    hogging = [serving.connect() for _ in range(20)]
    for peer in hogging:
        assert get(peer, "/known/job").startswith(OK)
    for peer in hogging[:16]:
        assert refusal(until_closed(peer)) == (503, "ServiceUnavailableException")
    newcomer = serving.connect()
    assert all(get(peer, "/known/mine").startswith(OK) for peer in (*mine, newcomer))
    assert refusal(until_closed(hogging[16])) == (503, "ServiceUnavailableException")


@pytest.mark.parametrize(
    "sent", [b"", b"GET /", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nslow"]
)
def test_one_key_that_is_slow_or_silent_makes_room_for_its_own_newcomers(
    serve: Serve, sent: bytes
) -> None:
    """B110."""
    serving = serve(signed=3, headers=30.0, body=30.0)
    slow = [serving.connect() for _ in range(3)]
    for peer in slow:
        assert get(peer, "/known").startswith(OK)
        peer.sendall(sent)
    assert get(serving.connect(), "/known").startswith(OK)
    assert refusal(until_closed(slow[0])) == (503, "ServiceUnavailableException")


def test_who_is_being_answered_stays_and_the_newcomer_goes(serve: Serve) -> None:
    """B110."""
    serving = serve(signed=1)
    held, newcomer = serving.connect(), serving.connect()
    held.sendall(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n")
    wait_for(lambda: len(serving.gate._signed) == 1, "the connection is signed")
    newcomer.sendall(b"GET /known HTTP/1.1\r\nhost: x\r\n\r\n")
    assert refusal(until_closed(newcomer)) == (503, "ServiceUnavailableException")
    assert serving.connected() == 1


def test_a_peer_that_takes_no_answer_is_no_peer_for_long(serve: Serve) -> None:
    """B112."""
    serving = serve(receive=0.3)
    peer = serving.connect()
    peer.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
    wait_for(lambda: serving.connected() == 1, "it is there")
    wait_for(lambda: serving.connected() == 0, "it is gone")


def test_a_peer_that_takes_no_answer_makes_room_at_once(serve: Serve) -> None:
    """B110."""
    serving = serve(signed=1)
    peer = serving.connect()
    peer.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
    wait_for(
        lambda: any(not each.is_being_answered for each in serving.gate._signed), "it is stuck"
    )
    newcomer = serving.connect()
    assert get(newcomer, "/known").startswith(OK)
    assert serving.connected() == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n", b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"a" * 8000, b"GET /" + b"a" * 8000,
    ],
)  # fmt: skip
def test_what_is_no_http_is_refused_in_aws_s_shape(serve: Serve, sent: bytes) -> None:
    peer = serve().connect()
    peer.sendall(sent)
    assert refusal(until_closed(peer)) == (400, "SerializationException")
