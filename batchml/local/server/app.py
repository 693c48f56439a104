"""The server as an ASGI application, and the limits of its connections."""

import asyncio
import json
import logging
import socket
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import h11
from msgspec import Struct
from uvicorn.protocols.http.h11_impl import H11Protocol

from batchml.clock import Clock
from batchml.errors import LocalServerError
from batchml.local.batch.core import Core
from batchml.local.batch.events import CallReceived
from batchml.local.batch.fault_injection import is_throttled
from batchml.local.batch.operations import HANDLERS
from batchml.local.batch.reads import READS, ReadView
from batchml.local.home import AccessKeys
from batchml.local.logs.api import LOG_OPERATIONS, LogReads
from batchml.local.server import auth, protocol
from batchml.local.server.auth import (
    ReplayGuard,
    SignedCaller,
    claimed_key,
    claimed_service,
    verify,
)
from batchml.local.server.protocol import ApiCall, ApiError, HttpRequest, HttpResponse
from batchml.local.store.journal import Journal

log = logging.getLogger("batchml.local")

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_LONGEST_ID = 128
# Bytes of an oversized body that are read before the answer: a sender that is still sending would
# not read the answer.
_DRAIN = 16 * protocol.MAX_BODY


# Each service's error for requests above the rate limit: code, message, status.
_TOO_MANY = {
    "batch": ("TooManyRequestsException", "Too Many Requests", 429),
    "logs": ("ThrottlingException", "Rate exceeded", 400),
}


def _ignore_key(_key: str) -> None: ...


class BatchServer:
    """The ASGI application of the server. `handle` answers one request and needs no HTTP
    connection.
    """

    def __init__(
        self,
        core: Core,
        journal: Journal,
        logs: LogReads,
        keys: AccessKeys,
        port: int,
        clock: Clock,
        held_back: Callable[[], str] = lambda: "",
    ) -> None:
        """`held_back` returns the reason why this machine cannot start programs now, or ""."""
        self._held_back = held_back
        self._core = core
        self._journal = journal
        self.logs = logs
        self._keys = keys
        self._port = port
        self._clock = clock
        self._requests = 0
        self._replays = ReplayGuard(clock.now())
        self.last_request = clock.monotonic()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"only http is served, not {scope['type']}")
        request = await _read_request(scope, receive)
        if request is None:
            return
        response = await self.handle(request, scope.get("state", {}).get("trust", _ignore_key))
        is_unread = len(request.body) > protocol.MAX_BODY
        closing = [(b"connection", b"close")] if is_unread else []
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": [
                    *((name.encode(), value.encode()) for name, value in response.headers),
                    (b"content-length", str(len(response.body)).encode()),
                    *closing,
                ],
            }
        )
        await send({"type": "http.response.body", "body": response.body})

    async def handle(
        self, request: HttpRequest, trust: Callable[[str], None] = _ignore_key
    ) -> HttpResponse:
        """Check, route and answer one request. Never raises.

        `trust` is called with the access key once the signature has been verified.
        """
        request_id = str(uuid.uuid4())
        service = claimed_service(request)
        try:
            protocol.check_service(service)
            protocol.check_size(request)
            protocol.check_origin(request, self._port)
            caller = verify(request, self._keys_for(request), self._clock.now())
            service = caller.service
            trust(caller.access_key_id)
            self.last_request = self._clock.monotonic()
            self._throttle(request, caller)
            call = protocol.read_call(request, service, request_id)
            auth.check_permitted(caller.access_key_id, service, call.operation)
            return await self._answer(call, request, caller)
        except ApiError as error:
            return protocol.error_response(error, service, request_id)
        except LocalServerError as error:
            return _server_error(str(error), service, request_id)
        except Exception:
            log.exception("request %s failed", request_id)
            text = f"Internal error in the embedded AWS Batch; its server.log has {request_id}."
            return _server_error(text, service, request_id)

    async def _answer(
        self, call: ApiCall, request: HttpRequest, caller: SignedCaller
    ) -> HttpResponse:
        read = READS.get((call.service, call.operation))
        if read is not None:
            now = int(self._clock.now() * 1000)
            caller_id, held_back = caller.access_key_id, self._held_back()
            view = ReadView(self._core.state, self._journal, caller_id, now, held_back)
            return protocol.answer_response(call, read(view, call.params))
        if call.service == "logs" and call.operation in LOG_OPERATIONS:
            return protocol.answer_response(
                call, *await self.logs.answer(call.operation, call.params)
            )
        if call.service == "batch" and call.operation in HANDLERS:
            event = CallReceived(
                operation=call.operation,
                params=call.params,
                now=int(self._clock.now() * 1000),
                new_id=str(uuid.uuid4()),
                request_id=call.request_id,
            )
            call_id = self._check_replay(request, caller)
            return protocol.answer_response(
                call, await self._core.request(event, call_id, _content(request))
            )
        raise protocol.not_served_error(call.service, call.operation)

    def _keys_for(self, request: HttpRequest) -> AccessKeys:
        """The keys to verify a request with: those of a live attempt, or the server's."""
        task_id = auth.task_of(claimed_key(request))
        alive = bool(task_id) and task_id in self._core.state.by_task
        return auth.job_keys(self._keys, task_id) if alive else self._keys

    def _throttle(self, request: HttpRequest, caller: SignedCaller) -> None:
        """Refuse the fraction of calls that fault injection asks for, but no repetition of a call
        that has been applied.
        """
        if caller.service not in _TOO_MANY:
            return
        self._requests += 1
        refused = is_throttled(self._core.state.chaos, self._requests)
        if refused and not self._core.has_received(_call_id(request, caller)):
            raise ApiError(*_TOO_MANY[caller.service])

    def _check_replay(self, request: HttpRequest, caller: SignedCaller) -> str:
        """The id of a call. Raises ApiError if another call has used its signature."""
        call_id = _call_id(request, caller)
        if self._journal.remembered_call(call_id) is None:
            self._replays.check(caller.signature, caller.signed_at, self._clock.now())
        return call_id


def _call_id(request: HttpRequest, caller: SignedCaller) -> str:
    """The id of a call, which is the same each time a client sends the call again."""
    sdk_id = request.header("amz-sdk-invocation-id")
    return sdk_id if 0 < len(sdk_id) <= _LONGEST_ID else f"signature/{caller.signature}"


def _content(request: HttpRequest) -> bytes:
    return f"{request.method} {request.path}?{request.query}\n".encode() + request.body


def _server_error(text: str, service: str, request_id: str) -> HttpResponse:
    return protocol.error_response(ApiError("ServerException", text, 500), service, request_id)


async def _read_request(scope: MutableMapping[str, Any], receive: Receive) -> HttpRequest | None:
    """The request, or None when the sender has disconnected. Of a body that is too large only the
    start is kept.
    """
    body = b""
    received = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        received += len(part)
        # One byte over the limit shows that the body is too large.
        body = (body + part)[: protocol.MAX_BODY + 1]
        if not message.get("more_body") or received > _DRAIN:
            break
    return HttpRequest(
        method=scope["method"],
        path=scope["raw_path"].decode("ascii", "replace"),
        query=scope["query_string"].decode("ascii", "replace"),
        headers=tuple((k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"]),
        body=body,
    )


async def wait_until_idle(
    server: BatchServer, core: Core, clock: Clock, limit: float, poll: Callable[[], None]
) -> None:
    """Return once there was no unfinished job and no request for `limit` seconds."""
    busy_until = clock.monotonic() + limit
    while clock.monotonic() < busy_until:
        await asyncio.sleep(1)
        poll()
        server.logs.forget_old_merge()
        if core.state.jobs:
            busy_until = clock.monotonic() + limit
        busy_until = max(busy_until, server.last_request + limit)


# --- Limits of connections ------------------------------------------------------------------------
# Any program of this machine can connect, and the server must keep serving its user meanwhile. A
# connection is a stranger until a request over it was signed correctly. The number of strangers is
# limited, they have short time limits, and the oldest are closed to make room for new connections.
# So a program that opens thousands of connections and sends nothing delays only itself.
#
# If there are too many signed connections, one of them is closed: the key with the most connections
# loses the one with the oldest signed request, unless that is being answered. So the owner of a
# key, such as a job, cannot exclude others with connections that are idle, slow, or do not receive.


class ConnectionLimits(Struct, frozen=True):
    """Times in seconds."""

    headers: float = 5.0  # from the connection, or from the first byte of a later request
    body: float = 5.0  # from the end of the headers
    idle_stranger: int = 5  # between two requests of a stranger
    idle: int = 65  # longer than any client of batchml waits between two requests
    strangers: int = 64
    signed: int = 448  # connections with a signed request; the rest is for new connections
    connections: int = 512
    receive: float = 30.0  # from sending data to a peer until the peer must have received it
    settling: float = 0.25  # a younger connection is not closed: clients may connect all at once


class ConnectionGate:
    """All connections, within their limits. uvicorn calls `protocol` for each new connection."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._connected: set[_LimitedProtocol] = set()
        self._strangers: dict[_LimitedProtocol, float] = {}  # -> time of the connection
        # Signed connections and their keys, in the order of their last signed requests.
        self._signed: dict[_LimitedProtocol, str] = {}

    def protocol(self, **arguments: Any) -> H11Protocol:
        return _LimitedProtocol(self, **arguments)

    def enter(self, peer: "_LimitedProtocol", now: float) -> None:
        self._connected.add(peer)
        self._strangers[peer] = now
        if len(self._connected) > self.limits.connections:
            self._close_oldest()
        elif len(self._strangers) > self.limits.strangers:
            since = next(iter(self._strangers.values()))
            if now - since > self.limits.settling:
                self._close_oldest()

    def _close_oldest(self) -> None:
        self._close(next(iter(self._strangers)))

    def _close(self, peer: "_LimitedProtocol") -> None:
        self.leave(peer)
        peer.refuse(503, "ServiceUnavailableException", "Too many connections.")

    def trust(self, peer: "_LimitedProtocol", key: str) -> None:
        """A request of this peer was signed with this key."""
        if peer not in self._connected:
            return  # it was closed while its request was read
        self._strangers.pop(peer, None)
        self._signed.pop(peer, None)
        self._signed[peer] = key
        if len(self._signed) > self.limits.signed:
            self._close(self._least_used() or peer)

    def _least_used(self) -> "_LimitedProtocol | None":
        """The least recently used connection of the key with the most connections; None if all are
        being answered.
        """
        waiting = {peer: key for peer, key in self._signed.items() if not peer.is_being_answered}
        held = Counter(self._signed.values())
        return max(waiting, key=lambda peer: held[waiting[peer]], default=None)

    def leave(self, peer: "_LimitedProtocol") -> None:
        self._connected.discard(peer)
        self._strangers.pop(peer, None)
        self._signed.pop(peer, None)


class _LimitedProtocol(H11Protocol):
    def __init__(self, gate: ConnectionGate, app_state: dict[str, Any], **given: Any) -> None:
        super().__init__(app_state={**app_state, "trust": self._trust}, **given)
        self.timeout_keep_alive = gate.limits.idle_stranger
        self._gate = gate
        # What the peer must send next. h11.IDLE: headers; h11.SEND_BODY: a body; other: nothing.
        self._owed: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def _trust(self, key: str) -> None:
        """A request of this peer was signed with one of the server's keys."""
        self._gate.trust(self, key)
        self.timeout_keep_alive = self._gate.limits.idle

    @property
    def is_being_answered(self) -> bool:
        """Whether the server works on a request of this connection, and does not wait for the
        peer.
        """
        cycle = self.cycle
        is_over = cycle is None or cycle.response_complete
        return not (is_over or self._owed is h11.SEND_BODY or self.flow.write_paused)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # The kernel closes a connection whose peer does not receive what it is sent (tcp(7)).
        milliseconds = int(self._gate.limits.receive * 1000)
        transport.get_extra_info("socket").setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds
        )
        self._expect(h11.IDLE)
        self._gate.enter(self, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self._gate.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._expect(self.conn.their_state)

    def _expect(self, owed: Any) -> None:
        """Start or stop the timer when the peer has to send something else than before."""
        if owed is self._owed:
            return
        if self._timer is not None:
            self._timer.cancel()
        limits = self._gate.limits
        limit = {h11.IDLE: limits.headers, h11.SEND_BODY: limits.body}.get(owed)
        self._timer = None if limit is None else self.loop.call_later(limit, self._time_out)
        self._owed = owed

    def _time_out(self) -> None:
        self.refuse(408, "RequestTimeoutException", "The request did not arrive in time.")

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "SerializationException", "This is not a valid HTTP request.")

    def refuse(self, status: int, code: str, message: str) -> None:
        """Close the connection, with an answer unless one has been started."""
        if self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():  # the peer does not receive
            self.transport.abort()
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # the handler of the request must not answer as well
            cycle.message_event.set()
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_response(status, code, message))
        self.transport.close()


def _response(status: int, code: str, message: str) -> bytes:
    body = json.dumps({"__type": code, "message": message}).encode()
    head = (
        f"HTTP/1.1 {status} {code}\r\ncontent-type: application/json\r\n"
        f"x-amzn-errortype: {code}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
