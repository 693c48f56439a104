"""A node's link to the main node: made, kept alive, and made again while that can help."""

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

_EVERY = 0.5  # seconds between two rounds of tries
_CALL = 2.0  # seconds that one port has to answer
_NOTICE = 30.0  # seconds between two lines about a main node that does not answer


class MainNode(NamedTuple):
    """Where the main node listens: on one of these ports. `token`: the secret of the run."""

    address: str
    ports: Sequence[int]
    token: str


class ConnectLimits(NamedTuple):
    """Seconds for which the main node is tried."""

    start: float  # before it was ever reached
    silent: float  # after it fell silent
    closed: float  # after its connection was closed


class Uplink:
    """`hear` receives what the main node sends but signs of life; `lost` is called when it is gone.

    `say` takes lines for people. `source` is the address of this node to connect from.
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
        self._notice_at = self._since + _NOTICE
        self._may_join = False
        self._ports = list(main.ports)  # the next one to be tried is the first
        self._missed = 0  # ports that did not answer, in this round
        self._call: Optional[socket.socket] = None
        self._call_until = 0.0
        self._held: List[Message] = []
        self._why = "nothing answers there"
        self.given_up = ""  # the reason, once the main node is not tried any more

    @property
    def is_up(self) -> bool:
        return self._peer is not None

    def until_due(self, now: float) -> float:
        if self._peer is not None:
            return self._peer.until_due(now)
        if self._call is not None:
            due = self._call_until
        else:
            due = self._next if self._may_join else now + _EVERY
        return max(0.0, due - now)

    def hurry(self) -> None:
        """Try now: there is something to send."""
        self._next = 0.0

    def tick(self, now: float, may_join: bool = True, state: Mapping[str, object] = {}) -> None:
        """`may_join`: nothing of an earlier start runs here. `state` goes with signs of life."""
        self._may_join = may_join
        if self._peer is not None:
            self._peer.tick(now, state)
            return
        if self._call is not None and now >= self._call_until:
            self._end_call().close()
            self._miss(LinkClosed("timed out"), now)
        if self._call is None and may_join and now >= self._next:
            self._try(now)
        if self._peer is None and now >= self._notice_at:
            self._notice_at = now + _NOTICE
            self._say(f"waiting for the main node at {self._main.address}: {self._why}")

    def send(self, message: Message) -> None:
        """Send now; dropped while there is no link: the main node has given up this node's work."""
        if self._peer is not None:
            self._peer.send(message)

    def send_later(self, message: Message) -> None:
        """Send as soon as the main node is reached again."""
        self._held.append(message)

    def close(self) -> None:
        if self._call is not None:
            self._end_call().close()
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def _try(self, now: float) -> None:
        """Dial the ports in turn: which of them was free on the main node is not known here.

        Nothing blocks, so a stop is noticed although a host that has vanished never answers.
        """
        while self._call is None and now >= self._next and not self.given_up:
            try:
                made = self._connect(self._main.address, self._ports[0], self._source)
            except LinkClosed as closed:
                self._miss(closed, now)
                continue
            self._call, self._call_until = made, now + _CALL
            self._selector.register(made, selectors.EVENT_WRITE, self._answered)

    def _answered(self) -> None:
        """The connection was accepted or refused. A main node that accepts greets at once."""
        try:
            link = greet(self._end_call(), self._main.token, self._info, _CALL)
        except LinkClosed as closed:
            self._miss(closed, time.monotonic())
            return
        self._missed = 0
        self._peer = Peer(link, self._selector, self._beats, self._take, self._gone)
        self._peer.start()
        held, self._held = self._held, []
        for message in held:
            self.send(message)

    def _end_call(self) -> socket.socket:
        made, self._call = self._call, None
        assert made is not None
        self._selector.unregister(made)
        return made

    def _miss(self, closed: LinkClosed, now: float) -> None:
        if closed.final:
            self.given_up = str(closed)
            return
        is_refused = "refused" in str(closed)
        if not is_refused:
            self._why = str(closed)
        self._ports = [*self._ports[1:], self._ports[0]]
        self._missed += 1
        is_round = self._missed == len(self._ports)
        if is_round:
            self._missed, self._next = 0, now + _EVERY
        if now >= self._until and (is_round or not is_refused):
            main, waited = self._main.address, now - self._since
            self.given_up = (
                f"the main node ({main}) is not reached within {waited:.0f} s: {self._why}"
            )

    def _take(self, _peer: Peer, message: Message) -> None:
        if message["do"] != "beat":
            self._hear(message)

    def _gone(self, _peer: Peer, why: str, silent: bool) -> None:
        self._peer = None
        self._why = why
        self._since = time.monotonic()
        self._until = self._since + (self._limits.silent if silent else self._limits.closed)
        self._notice_at = self._since + _NOTICE
        self._next = 0.0
        self._lost()


def send_once(
    main: MainNode,
    info: Message,
    source: str,
    limit: float,
    stops_within: Callable[[float], bool],
) -> bool:
    """Give the main node one message, as the handshake of a member. Whether it has it.

    For a node that ends and has no link: the main node may not listen yet, so it is tried for
    `limit` seconds. `stops_within` waits, and returns True once a stop was requested.
    """
    until = time.monotonic() + limit
    while True:
        for port in main.ports:
            left = until - time.monotonic()
            if left <= 0:
                return False
            try:
                join(main.address, port, main.token, info, source, min(_CALL, left)).close()
                return True
            except LinkClosed as closed:
                if closed.final or ("refused" not in str(closed) and stops_within(0.0)):
                    return False
        if stops_within(_EVERY):
            return False
