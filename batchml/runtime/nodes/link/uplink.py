"""A node's link to the main node: connect, keep the link alive, and connect again after a loss."""

from __future__ import annotations

import selectors
import socket
import time
from typing import Callable, List, Mapping, NamedTuple, Optional, Sequence

from batchml.runtime.nodes.link.connection import (
    Heartbeats,
    LinkClosed,
    Message,
    Peer,
    dial,
    greet,
    join,
)

_ROUND_EVERY = 0.5  # seconds between two rounds in which each port is tried
_CONNECT_LIMIT = 2.0  # seconds that one port has to answer
_NOTICE_EVERY = 30.0  # seconds between two lines about a main node that does not answer


class MainNode(NamedTuple):
    """Where the main node listens."""

    address: str
    ports: Sequence[int]  # it listens on one of these
    token: str  # the secret of the run


class ConnectLimits(NamedTuple):
    """For how many seconds a node tries to reach the main node."""

    start: float  # for the first time
    silent: float  # after the main node fell silent
    closed: float  # after the connection was closed


class Uplink:
    """The link of a node to the main node. No method blocks; the selector and `tick` drive it.

    `info` describes this node in the handshake. `hear` receives the messages of the main node,
    without signs of life. `lost` is called when the link is lost, `say` with lines for people.
    `source`: the address of this node to connect from.
    """

    def __init__(
        self,
        main: MainNode,
        info: Message,
        source: str,
        beats: Heartbeats,
        limits: ConnectLimits,
        selector: selectors.BaseSelector,
        hear: Callable[[Message], None],
        lost: Callable[[], None],
        say: Callable[[str], None],
        connect: Callable[[str, int, str], socket.socket] = dial,
    ) -> None:
        self._main, self._info, self._source = main, info, source
        self._beats, self._limits, self._selector = beats, limits, selector
        self._hear, self._lost, self._say, self._connect = hear, lost, say, connect
        self._peer: Optional[Peer] = None
        self._since = time.monotonic()
        self._until = self._since + limits.start
        self._next = 0.0
        self._notice_at = self._since + _NOTICE_EVERY
        self._may_join = False
        self._ports = list(main.ports)  # the first of them is tried next
        self._missed = 0  # ports that did not answer, in this round
        self._dialled: Optional[socket.socket] = None  # a connection that is being made
        self._dialled_until = 0.0
        self._held: List[Message] = []  # messages to send once the link exists
        self._why = "nothing answers at this address"  # why the main node is not connected
        self.given_up = ""  # why the main node is not tried any more; empty: it is tried

    @property
    def is_connected(self) -> bool:
        return self._peer is not None

    def until_due(self, now: float) -> float:
        """Seconds until `tick` has something to do."""
        if self._peer is not None:
            return self._peer.until_due(now)
        if self._dialled is not None:
            due = self._dialled_until
        else:
            due = self._next if self._may_join else now + _ROUND_EVERY
        return max(0.0, due - now)

    def hurry(self) -> None:
        """Try to connect at the next `tick`."""
        self._next = 0.0

    def tick(self, now: float, may_join: bool = True, state: Mapping[str, object] = {}) -> None:
        """Connect, and send signs of life, when it is time for that.

        `may_join`: no process of an earlier generation runs on this node. `state` is sent with
        signs of life.
        """
        self._may_join = may_join
        if self._peer is not None:
            self._peer.tick(now, state)
            return
        if self._dialled is not None and now >= self._dialled_until:
            self._take_dialled().close()
            self._note_miss(LinkClosed("timed out"), now)
        if self._dialled is None and may_join and now >= self._next:
            self._try(now)
        if self._peer is None and now >= self._notice_at:
            self._notice_at = now + _NOTICE_EVERY
            self._say(f"waiting for the main node at {self._main.address}: {self._why}")

    def send(self, message: Message) -> None:
        """Send a message. Without a link it is dropped: the main node has given up this node."""
        if self._peer is not None:
            self._peer.send(message)

    def send_later(self, message: Message) -> None:
        """Send as soon as the main node is reached again, and try to reach it at once."""
        self._held.append(message)
        self.hurry()

    def close(self) -> None:
        if self._dialled is not None:
            self._take_dialled().close()
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def _try(self, now: float) -> None:
        """Dial the ports in turn: this node does not know on which of them the main node listens.

        It does not wait for an answer, which a host that has vanished never gives, so that the
        loop still notices a stop.
        """
        while self._dialled is None and now >= self._next and not self.given_up:
            try:
                connection = self._connect(self._main.address, self._ports[0], self._source)
            except LinkClosed as closed:
                self._note_miss(closed, now)
                continue
            self._dialled, self._dialled_until = connection, now + _CONNECT_LIMIT
            self._selector.register(connection, selectors.EVENT_WRITE, self._greet)

    def _greet(self) -> None:
        """Do the handshake, now that the connection was accepted or refused.

        This waits briefly: a main node that accepts a connection greets at once.
        """
        try:
            link = greet(self._take_dialled(), self._main.token, self._info, _CONNECT_LIMIT)
        except LinkClosed as closed:
            self._note_miss(closed, time.monotonic())
            return
        self._missed = 0
        self._peer = Peer(link, self._selector, self._beats, self._take, self._lose)
        self._peer.start()
        held, self._held = self._held, []
        for message in held:
            self.send(message)

    def _take_dialled(self) -> socket.socket:
        connection, self._dialled = self._dialled, None
        assert connection is not None
        self._selector.unregister(connection)
        return connection

    def _note_miss(self, closed: LinkClosed, now: float) -> None:
        if closed.final:
            self.given_up = str(closed)
            return
        is_refused = "refused" in str(closed)
        if not is_refused:
            self._why = str(closed)
        self._ports = [*self._ports[1:], self._ports[0]]
        self._missed += 1
        round_is_over = self._missed == len(self._ports)
        if round_is_over:
            self._missed, self._next = 0, now + _ROUND_EVERY
        if now >= self._until and (round_is_over or not is_refused):
            main, waited = self._main.address, now - self._since
            self.given_up = (
                f"the main node ({main}) could not be reached within {waited:.0f} s: {self._why}"
            )

    def _take(self, _peer: Peer, message: Message) -> None:
        if message["do"] != "beat":
            self._hear(message)

    def _lose(self, _peer: Peer, why: str, silent: bool) -> None:
        self._peer = None
        self._why = why
        self._since = time.monotonic()
        self._until = self._since + (self._limits.silent if silent else self._limits.closed)
        self._notice_at = self._since + _NOTICE_EVERY
        self._next = 0.0
        self._lost()


def send_once(
    main: MainNode,
    info: Message,
    source: str,
    limit: float,
    stops_within: Callable[[float], bool],
) -> bool:
    """Send the main node one message, as a handshake's description. Return whether it arrived.

    For a node that ends and has no link. The main node may not listen yet, so this tries for
    `limit` seconds. `stops_within` waits, and returns True once a stop was requested.
    """
    until = time.monotonic() + limit
    while True:
        for port in main.ports:
            left = until - time.monotonic()
            if left <= 0:
                return False
            try:
                join(
                    main.address, port, main.token, info, source, min(_CONNECT_LIMIT, left)
                ).close()
                return True
            except LinkClosed as closed:
                if closed.final or ("refused" not in str(closed) and stops_within(0.0)):
                    return False
        if stops_within(_ROUND_EVERY):
            return False
