"""Between the port and the application: limits on time and on connections.

Any program of this machine can connect, and this server is to go on serving its user meanwhile. A
peer is a stranger until one of its requests was signed rightly; strangers are few, have to hurry,
and make room for newcomers, the oldest first. So a peer that opens thousands of connections and
says nothing takes time from itself alone.

Peers that have signed make room for each other: the key that holds most connections gives up the
one whose last signed request is the oldest, unless it is being answered. So whoever holds a key,
such as a job, cannot keep others out with connections that are idle, slow, or read no answer.
"""

import asyncio
import json
import socket
from collections import Counter
from typing import Any

import h11
from msgspec import Struct
from uvicorn.protocols.http.h11_impl import H11Protocol


class Limits(Struct, frozen=True):
    """Times in seconds."""

    headers: float = 5.0  # from the connection, or from a later request's first byte
    body: float = 5.0  # from the end of the headers
    idle_stranger: int = 5  # between two requests
    idle: int = 65  # longer than any client of ours waits between two looks
    strangers: int = 64
    known: int = 448  # that have signed; the rest is for newcomers
    connections: int = 512
    taken: float = 30.0  # in which the peer has to take what it is sent
    settling: float = 0.25  # so young a connection makes no room: clients that come all at once


class Gate:
    """Who is connected. `protocol` is what uvicorn makes one of for each connection."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._connected: set[_Guarded] = set()
        self._strangers: dict[_Guarded, float] = {}  # by time of connection
        self._known: dict[_Guarded, str] = {}  # their keys, by time of the last signed request

    def protocol(self, **given: Any) -> H11Protocol:
        return _Guarded(self, **given)

    def enter(self, peer: "_Guarded", now: float) -> None:
        self._connected.add(peer)
        self._strangers[peer] = now
        if len(self._connected) > self.limits.connections:
            self._turn_away_oldest()
        elif len(self._strangers) > self.limits.strangers:
            since = next(iter(self._strangers.values()))
            if now - since > self.limits.settling:
                self._turn_away_oldest()

    def _turn_away_oldest(self) -> None:
        self._turn_away(next(iter(self._strangers)))

    def _turn_away(self, peer: "_Guarded") -> None:
        self.leave(peer)
        peer.refuse(503, "ServiceUnavailableException", "Too many connections.")

    def trust(self, peer: "_Guarded", key: str) -> None:
        """A request of this peer was signed with this key."""
        if peer not in self._connected:
            return  # it was turned away while its request was read
        self._strangers.pop(peer, None)
        self._known.pop(peer, None)
        self._known[peer] = key
        if len(self._known) > self.limits.known:
            self._turn_away(self._least_used() or peer)

    def _least_used(self) -> "_Guarded | None":
        """Of the key with most connections, the one that was used least lately; none if all are
        being answered.
        """
        waiting = {peer: key for peer, key in self._known.items() if not peer.is_answered}
        held = Counter(self._known.values())
        return max(waiting, key=lambda peer: held[waiting[peer]], default=None)

    def leave(self, peer: "_Guarded") -> None:
        self._connected.discard(peer)
        self._strangers.pop(peer, None)
        self._known.pop(peer, None)


class _Guarded(H11Protocol):
    def __init__(self, gate: Gate, app_state: dict[str, Any], **given: Any) -> None:
        super().__init__(app_state={**app_state, "trust": self._trust}, **given)
        self.timeout_keep_alive = gate.limits.idle_stranger
        self._gate = gate
        self._owed: Any = None  # h11.IDLE: headers; h11.SEND_BODY: the body; else nothing
        self._timer: asyncio.TimerHandle | None = None

    def _trust(self, key: str) -> None:
        """A request of this peer was signed with this key of ours."""
        self._gate.trust(self, key)
        self.timeout_keep_alive = self._gate.limits.idle

    @property
    def is_answered(self) -> bool:
        """Whether the server works for it now, and the peer is not what is waited for."""
        cycle = self.cycle
        is_over = cycle is None or cycle.response_complete
        return not (is_over or self._owed is h11.SEND_BODY or self.flow.write_paused)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # The kernel ends a connection whose peer does not take what it is sent (tcp(7)).
        milliseconds = int(self._gate.limits.taken * 1000)
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
        """Start the clock when the peer has to send something else than before, or stop it."""
        if owed is self._owed:
            return
        if self._timer is not None:
            self._timer.cancel()
        limits = self._gate.limits
        limit = {h11.IDLE: limits.headers, h11.SEND_BODY: limits.body}.get(owed)
        self._timer = None if limit is None else self.loop.call_later(limit, self._too_slow)
        self._owed = owed

    def _too_slow(self) -> None:
        self.refuse(408, "RequestTimeoutException", "The request did not arrive in time.")

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "SerializationException", "This is not a valid HTTP request.")

    def refuse(self, status: int, code: str, message: str) -> None:
        """Close the connection, with an answer unless one is on its way already."""
        if self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():  # it does not take what it was sent
            self.transport.abort()
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # whoever works on it must not answer as well
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
