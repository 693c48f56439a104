"""One end of a link: it reads messages as they come, and notices when the other side falls silent.

Both sides send `{"do": "beat"}` regularly. Everything happens in the loop of the owner: the
selector calls when data comes, and the owner calls `tick`.
"""

from __future__ import annotations

import selectors
import time
from typing import Callable, Mapping, NamedTuple, Optional, Sequence

from batchml.runtime.nodes.link.connection import LinkClosed, Message, NodeLink

FROZEN = 5.0  # seconds without a turn of the loop: then it was this process that was silent


def dispatch(selector: selectors.BaseSelector, pause: float) -> None:
    """Wait for at most `pause` seconds, and call the data of each file that is ready."""
    for key, _ in selector.select(pause):
        # An earlier call may have closed the file, and its number may be another file's by now.
        found = selector.get_map().get(key.fd)
        if found is not None and found.data is key.data:
            key.data()


class Heartbeats(NamedTuple):
    """Seconds between two signs of life of one side, and the silence after which it is lost."""

    every: float = 2.0
    silent: float = 15.0


class Peer:
    """The other side of a link. `info` is its description of itself in the handshake.

    `hear` receives each message; `lost` is called once, with the reason and whether it was silence,
    unless the owner closed the link itself.
    """

    def __init__(
        self,
        link: NodeLink,
        selector: selectors.BaseSelector,
        beats: Heartbeats,
        hear: Callable[[Peer, Message], None],
        lost: Callable[[Peer, str, bool], None],
        info: Optional[Message] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info: Message = info or {}
        self.silent_after = beats.silent
        self.heard = self._turn = clock()
        self.is_open = True
        self._link, self._selector, self._every = link, selector, beats.every
        self._hear, self._lost, self._clock = hear, lost, clock
        self._next_beat = self.heard + beats.every

    def start(self) -> None:
        """Begin to read; messages that came with the greeting are heard at once."""
        self._watch()
        self._take(self._link.waiting)

    def send(self, message: Message) -> None:
        """Send, unless the link is closed; a link that proves to be closed is lost."""
        self._try(lambda: self._link.send(message))

    def measure(self) -> None:
        """Measure the connection: `{"do": "measured"}` is heard once the block is back."""
        self._try(self._link.measure)

    def until_due(self, now: float) -> float:
        return max(0.0, self._next_beat - now)

    def tick(self, now: float, state: Mapping[str, object] = {}) -> None:
        """Send a sign of life when it is due, with `state` in it; notice a silent peer."""
        if now - self._turn > FROZEN:
            self.heard += now - self._turn
        self._turn = now
        if now - self.heard > self.silent_after:
            self._lose(f"it was silent for {self.silent_after:.0f} s", silent=True)
        elif now >= self._next_beat:
            self._next_beat = now + self._every
            self.send({"do": "beat", **state})

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            if self._link.socket in self._selector.get_map():
                self._selector.unregister(self._link.socket)
            self._link.close()

    def _try(self, act: Callable[[], None]) -> None:
        if self.is_open:
            try:
                act()
                self._watch()
            except LinkClosed as closed:
                self._lose(str(closed), silent=False)

    def _watch(self) -> None:
        self._link.watch(self._selector, self._read)

    def _read(self) -> None:
        self._try(self._link.flush)
        if self.is_open:
            self._take(self._link.messages)

    def _take(self, source: Callable[[], Sequence[Message]]) -> None:
        try:
            messages = source()
        except (LinkClosed, ValueError, KeyError) as error:
            self._lose(str(error), silent=False)
            return
        self.heard = self._clock()
        for message in messages:
            if self.is_open:  # what was heard before may have closed it
                self._hear(self, message)
        if self.is_open:
            self._watch()

    def _lose(self, why: str, silent: bool) -> None:
        self.close()
        self._lost(self, why, silent)
