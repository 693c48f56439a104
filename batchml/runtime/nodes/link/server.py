"""The main node's side of the links: it listens, checks who connects, and keeps the members."""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

from batchml.runtime.nodes.link.connection import Handshake, Heartbeats, LinkClosed, Message, Peer
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.store import BRIEF, Store, StoreError

_GREETING = 10.0  # seconds that a connection has to prove that it belongs to the run
_MOST_GREETINGS = 256  # connections that may do so at the same time; the others queue
_MALFORMED = (KeyError, TypeError, ValueError)  # a message of another version


class Refusal(NamedTuple):
    """Why a member with the right token may not join. `final`: it need not try again."""

    why: str
    final: bool


class MemberServer:
    """All members that are connected. Nothing blocks; the owner's selector and `tick` drive it.

    `admit` checks the description of a member before it becomes one, `joined` receives it, `hear`
    its messages, and `lost` is called when it is gone, with whether it fell silent. `refused`
    receives why a connection was closed.
    """

    def __init__(
        self,
        token: str,
        selector: selectors.BaseSelector,
        beats: Heartbeats,
        admit: Callable[[Message], Optional[Refusal]],
        joined: Callable[[Peer], None],
        hear: Callable[[Peer, Message], None],
        lost: Callable[[Peer, bool], None],
        refused: Callable[[str], None] = lambda why: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token, self._selector, self._beats = token, selector, beats
        self._admit, self._joined, self._hear = admit, joined, hear
        self._lost, self._refused, self._clock = lost, refused, clock
        self._listener: Optional[socket.socket] = None
        self._greetings: Dict[Handshake, float] = {}
        self._peers: List[Peer] = []
        self.port = 0

    def listen(self, places: Iterable[Tuple[str, int]]) -> None:
        """Listen on the first (address, port) that is free. Raises OSError."""
        trouble: Optional[OSError] = None
        for place in places:
            made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                made.bind(place)
                made.listen(128)
            except OSError as error:
                made.close()
                trouble = error
                continue
            made.setblocking(False)
            self._listener, self.port = made, int(made.getsockname()[1])
            self._selector.register(made, selectors.EVENT_READ, self._accept)
            return
        raise trouble or OSError("no address to listen on")

    @property
    def peers(self) -> List[Peer]:
        return list(self._peers)

    def until_due(self, now: float) -> float:
        return min((peer.until_due(now) for peer in self._peers), default=1.0)

    def tick(self, now: float) -> None:
        """Send signs of life, give up silent members and connections that prove nothing."""
        for peer in self.peers:
            peer.tick(now)
        for greeting, since in list(self._greetings.items()):
            if now - since > _GREETING:
                self._forget(greeting, "it says nothing")

    def drop(self, peer: Peer) -> None:
        """Close the link of a member; `lost` is not called."""
        if peer in self._peers:
            self._peers.remove(peer)
        peer.close()

    def close(self) -> None:
        for peer in self.peers:
            self.drop(peer)
        for greeting in list(self._greetings):
            self._forget(greeting, "")
        if self._listener is not None:
            self._pause()
            self._listener.close()

    # --- new connections -----------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        try:
            greeting = Handshake(connection, self._token)
        except OSError:
            connection.close()
            return
        self._greetings[greeting] = self._clock()
        self._selector.register(
            greeting.socket, selectors.EVENT_READ, lambda: self._read_greeting(greeting)
        )
        if len(self._greetings) >= _MOST_GREETINGS:
            self._pause()

    def _pause(self) -> None:
        if self._listener is not None and self._listener in self._selector.get_map():
            self._selector.unregister(self._listener)

    def _read_greeting(self, greeting: Handshake) -> None:
        try:
            info = greeting.read()
            if info is None:
                return
            refusal = self._admit(info)
            if refusal is not None:
                self._end_greeting(greeting)
                greeting.refuse(*refusal)
                return
            self._end_greeting(greeting)
            link = greeting.welcome()
        except LinkClosed as closed:
            self._forget(greeting, str(closed))
            return
        except _MALFORMED:
            self._forget(greeting, "it is of another version")
            return
        peer = Peer(link, self._selector, self._beats, self._take, self._lose, info, self._clock)
        self._peers.append(peer)
        self._joined(peer)
        if peer.is_open:
            peer.start()

    def _end_greeting(self, greeting: Handshake) -> None:
        if self._greetings.pop(greeting, None) is not None:
            self._selector.unregister(greeting.socket)
        if self._listener is not None and self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _forget(self, greeting: Handshake, why: str) -> None:
        self._end_greeting(greeting)
        greeting.socket.close()
        if why:
            self._refused(why)

    # --- members -------------------------------------------------------------------------------

    def _take(self, peer: Peer, message: Message) -> None:
        try:
            self._hear(peer, message)
        except _MALFORMED as error:
            self.drop(peer)
            self._lose(peer, str(error), silent=False)

    def _lose(self, peer: Peer, why: str, silent: bool) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
        self._lost(peer, silent)


# --- rendezvous -----------------------------------------------------------------------------------
# Where nodes meet whose addresses nobody knows beforehand: JSON documents in a store.
#
# One node writes where it listens, the others read it. Ray's head and the main node of a Slurm
# script use it. The store is the run's own, or a folder of the workspace for jobs that run
# together.


ADDRESS = "BATCHML_GANG"  # an s3:// address; empty: the workspace
KEY = "BATCHML_GANG_KEY"  # of the head's submission

_FOLDERS = (".batchml", "gangs")  # of the workspace


class Rendezvous:
    """Documents by name. Every method raises StoreError when the store cannot be used.

    `workspace` and `key` name the folder in the workspace, where that is the store.
    """

    def __init__(self, store: Store, workspace: str = "", key: str = "") -> None:
        self._store = store
        self._workspace, self._key = workspace, key

    @classmethod
    def of_group(cls, environ: Mapping[str, str]) -> Rendezvous:
        """The rendezvous of the jobs of one group run."""
        address = environ.get(ADDRESS, "")
        workspace, key = environ.get("BATCHML_WORKSPACE", ""), environ.get(KEY, "")
        if address:
            return cls(open_store(address, environ, limits=BRIEF))
        if not (workspace and key):
            raise StoreError(
                f"head and workers have nowhere to meet: {ADDRESS} is not set, and neither are "
                f"both BATCHML_WORKSPACE and {KEY}. `batchml submit` sets them for a job with "
                f"[[groups]]"
            )
        folder = os.path.join(workspace, *_FOLDERS, key)
        return cls(open_store(folder, environ, limits=BRIEF), workspace, key)

    def read(self, name: str) -> Optional[Dict[str, Any]]:
        data = self._store.get(name)
        if data is None:
            return None
        try:
            found = json.loads(data)
        except ValueError as error:
            raise StoreError(f"{name} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise StoreError(f"{name} is not a JSON object")
        return found

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        self._make_folder(name)
        self._store.put(name, json.dumps(document).encode())

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def _make_folder(self, name: str) -> None:
        """Make the folder in the workspace, for all: the next run may be another user's."""
        path = self._workspace
        for part in (*_FOLDERS, self._key, os.path.dirname(name)) if path else ():
            path = os.path.join(path, part)
            try:
                os.mkdir(path)
                os.chmod(path, 0o777)  # whatever the umask
            except OSError:
                continue  # it exists, or the store reports why it cannot be made
