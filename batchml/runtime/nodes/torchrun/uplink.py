"""A child node's connection to the main node: made, kept alive, and made again while that helps."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Mapping
from typing import Callable, List, NamedTuple, Optional

from batchml.runtime.nodes.torchrun.coordinator import FROZEN, Beats, Identity
from batchml.runtime.nodes.torchrun.link import Gone, Link, Message, call, greet, join, ports

_EVERY = 0.5  # seconds between two rounds of tries
_CALL = 2.0  # seconds that one port has to answer
_TELL = 30.0  # seconds between two lines about a main node that is waited for


class Patience(NamedTuple):
    """Until when the main node is tried: longer before it was ever there than after."""

    start_within: float
    regroup: float
    gone: float


class Uplink:
    """`hear` is given what the main node says, `lost` is called when it is gone. `say` is for
    people, `dial` is `gang_wire.call`.
    """

    def __init__(
        self,
        main: str,
        identity: Identity,
        member: Message,
        beats: Beats,
        patience: Patience,
        selector: selectors.BaseSelector,
        hear: Callable[[Message], None],
        lost: Callable[[], None],
        say: Callable[[str], None],
        dial: Callable[[str, int, str], socket.socket] = call,
    ) -> None:
        self._main, self._identity, self._member = main, identity, member
        self._beats, self._patience = beats, patience
        self._selector, self._hear, self._lost = selector, hear, lost
        self._say, self._dial = say, dial
        self._link: Optional[Link] = None
        self._since = self._turn = time.monotonic()
        self._until = self._since + patience.start_within
        self._next = self._beat = self._heard = 0.0
        self._tell_at = self._since + _TELL
        self._may_join = False
        self._ports = ports(identity.key)  # the next to be tried is the first
        self._missed = 0  # of them, in this round
        self._call: Optional[socket.socket] = None
        self._call_until = 0.0
        self._held: List[Message] = []
        self._why = "nothing answers there"
        self.given_up = ""  # why, once it is

    @property
    def is_up(self) -> bool:
        return self._link is not None

    def until_due(self, now: float) -> float:
        if self._link is not None:
            due = self._beat
        elif self._call is not None:
            due = self._call_until
        else:
            due = self._next if self._may_join else now + _EVERY
        return max(0.0, due - now)

    def hurry(self) -> None:
        """Try now: there is something to tell."""
        self._next = 0.0

    def tick(self, now: float, may_join: bool, pulse: float) -> None:
        """`may_join`: nothing of a generation runs here. `pulse`: seconds since a sign of life."""
        if now - self._turn > FROZEN:
            self._heard += now - self._turn
        self._turn = now
        self._may_join = may_join
        if self._link is None:
            if self._call is not None and now >= self._call_until:
                self._hung_up().close()
                self._miss(Gone("timed out"), now)
            if self._call is None and may_join and now >= self._next:
                self._try(now)
            if self._link is None and now >= self._tell_at:
                self._tell_at = now + _TELL
                self._say(f"waiting for the main node at {self._main}: {self._why}")
            return
        if now - self._heard > self._beats.silent:
            self._gone(f"it was silent for {self._beats.silent:.0f} s", self._patience.regroup)
        elif now >= self._beat:
            self._beat = now + self._beats.every
            self.tell({"do": "beat", "pulse": pulse})

    def tell(self, message: Message) -> None:
        """Lost if the main node is: it asks for no more of a generation that it has given up."""
        if self._link is not None:
            try:
                self._link.send(message)
                self._listen()
            except Gone as gone:
                self._gone(str(gone), self._patience.gone)

    def tell_later(self, message: Message) -> None:
        """As soon as the main node is there."""
        self._held.append(message)

    def close(self) -> None:
        if self._call is not None:
            self._hung_up().close()
        if self._link is not None:
            link, self._link = self._link, None
            if link.socket in self._selector.get_map():
                self._selector.unregister(link.socket)
            link.close()

    def _try(self, now: float) -> None:
        """The ports in turn: which of them was free on the main node is not known here.

        Nothing waits, so that a stop is heard though a host that has vanished answers nothing.
        """
        while self._call is None and now >= self._next and not self.given_up:
            try:
                made = self._dial(self._main, self._ports[0], self._member["source"])
            except Gone as gone:
                self._miss(gone, now)
                continue
            self._call, self._call_until = made, now + _CALL
            self._selector.register(made, selectors.EVENT_WRITE, self._answered)

    def _answered(self) -> None:
        """It was taken, or refused. Who takes it answers at once, or is frozen."""
        try:
            link = greet(self._hung_up(), self._identity.token, self._member, _CALL)
        except Gone as gone:
            self._miss(gone, time.monotonic())
            return
        self._link = link
        self._missed = 0
        self._heard = time.monotonic()
        self._beat = self._heard + self._beats.every
        self._listen()
        self._take(link.waiting)
        held, self._held = self._held, []
        for message in held:
            self.tell(message)

    def _hung_up(self) -> socket.socket:
        made, self._call = self._call, None
        assert made is not None
        self._selector.unregister(made)
        return made

    def _miss(self, gone: Gone, now: float) -> None:
        if gone.final:
            self.given_up = str(gone)
            return
        is_refused = "refused" in str(gone)
        if not is_refused:
            self._why = str(gone)
        self._ports = [*self._ports[1:], self._ports[0]]
        self._missed += 1
        is_round = self._missed == len(self._ports)
        if is_round:
            self._missed, self._next = 0, now + _EVERY
        if now >= self._until and (is_round or not is_refused):
            waited = now - self._since
            self.given_up = (
                f"the main node ({self._main}) is not reached within {waited:.0f} s: {self._why}"
            )

    def _listen(self) -> None:
        if self._link is not None:
            self._link.watch(self._selector, self._read)

    def _read(self) -> None:
        link = self._link
        if link is None:
            return
        try:
            link.flush()
        except Gone as gone:
            self._gone(str(gone), self._patience.gone)
            return
        self._take(link.messages)

    def _take(self, source: Callable[[], List[Message]]) -> None:
        link = self._link
        try:
            messages = source()
        except (Gone, ValueError, KeyError) as gone:
            self._gone(str(gone), self._patience.gone)
            return
        self._heard = time.monotonic()
        for message in messages:
            if message["do"] != "beat":
                self._hear(message)
        if self._link is link:
            self._listen()

    def _gone(self, why: str, patience: float) -> None:
        self.close()
        self._why = why
        self._since = time.monotonic()
        self._until = self._since + patience
        self._tell_at = self._since + _TELL
        self._next = 0.0
        self._lost()


def tell(
    environ: Mapping[str, str], main: str, identity: Identity, index: int, news: Message,
    limit: float, stops_within: Callable[[float], bool],
) -> bool:  # fmt: skip
    """Tell the main node what became of this one, which is no member; whether it has heard."""
    member = {"index": index, "job": identity.job, "attempt": identity.attempt, **news}
    source = environ.get("BATCHML_NODE_ADDRESS", "")
    until = time.monotonic() + limit
    while True:
        for port in ports(identity.key):
            left = until - time.monotonic()
            if left <= 0:
                return False
            try:
                join(main, port, identity.token, member, source, min(_CALL, left)).close()
                return True
            except Gone as gone:
                if gone.final or ("refused" not in str(gone) and stops_within(0.0)):
                    return False
        if stops_within(_EVERY):
            return False
