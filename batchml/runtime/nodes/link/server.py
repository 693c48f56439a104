"""The main node's side of the links: it listens, checks who connects, and keeps the members.

Also where nodes find each other if nobody knows their addresses beforehand (`Rendezvous`).
"""

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

_HANDSHAKE_LIMIT = 10.0  # seconds that a connection has to prove that it belongs to the run
_MAX_HANDSHAKES = 256  # handshakes at the same time; further connections queue
_MALFORMED = (KeyError, TypeError, ValueError)  # what a message of another version leads to


class Refusal(NamedTuple):
    """Why a member with the right token may not join. `final`: it need not try again."""

    why: str
    final: bool


class MemberServer:
    """All members that are connected. No method blocks; the owner's selector and `tick` drive it.

    `admit` checks the description of a new member. `joined` receives the member, `hear` its
    messages. `lost` is called when the member is gone, with whether it fell silent. `refused`
    receives the reason why a connection was closed before it became a member.
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
        self._handshakes: Dict[Handshake, float] = {}
        self._peers: List[Peer] = []
        self.port = 0

    def listen(self, candidates: Iterable[Tuple[str, int]]) -> None:
        """Listen on the first (address, port) that is free. Raises OSError."""
        last_error: Optional[OSError] = None
        for candidate in candidates:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(candidate)
                listener.listen(128)
            except OSError as error:
                listener.close()
                last_error = error
                continue
            listener.setblocking(False)
            self._listener, self.port = listener, int(listener.getsockname()[1])
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
            return
        raise last_error or OSError("no address to listen on")

    @property
    def peers(self) -> List[Peer]:
        return list(self._peers)

    def until_due(self, now: float) -> float:
        """Seconds until `tick` has something to do."""
        return min((peer.until_due(now) for peer in self._peers), default=1.0)

    def tick(self, now: float) -> None:
        """Send signs of life; give up silent members, and connections that prove nothing."""
        for peer in self.peers:
            peer.tick(now)
        for handshake, since in list(self._handshakes.items()):
            if now - since > _HANDSHAKE_LIMIT:
                self._forget(handshake, f"it sent no greeting within {_HANDSHAKE_LIMIT:.0f} s")

    def drop(self, peer: Peer) -> None:
        """Close the link of a member, without a call of `lost`."""
        if peer in self._peers:
            self._peers.remove(peer)
        peer.close()

    def close(self) -> None:
        for peer in self.peers:
            self.drop(peer)
        for handshake in list(self._handshakes):
            self._forget(handshake, "")
        if self._listener is not None:
            self._pause()
            self._listener.close()

    # --- New connections ----------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        try:
            handshake = Handshake(connection, self._token)
        except OSError:
            connection.close()
            return
        self._handshakes[handshake] = self._clock()
        self._selector.register(
            handshake.socket, selectors.EVENT_READ, lambda: self._read_handshake(handshake)
        )
        if len(self._handshakes) >= _MAX_HANDSHAKES:
            self._pause()

    def _pause(self) -> None:
        if self._listener is not None and self._listener in self._selector.get_map():
            self._selector.unregister(self._listener)

    def _read_handshake(self, handshake: Handshake) -> None:
        try:
            info = handshake.read()
            if info is None:
                return
            refusal = self._admit(info)
            if refusal is not None:
                self._end_handshake(handshake)
                handshake.refuse(*refusal)
                return
            self._end_handshake(handshake)
            link = handshake.welcome()
        except LinkClosed as closed:
            self._forget(handshake, str(closed))
            return
        except _MALFORMED:
            self._forget(handshake, "it is of another version")
            return
        peer = Peer(link, self._selector, self._beats, self._take, self._lose, info, self._clock)
        self._peers.append(peer)
        self._joined(peer)
        if peer.is_open:
            peer.start()

    def _end_handshake(self, handshake: Handshake) -> None:
        if self._handshakes.pop(handshake, None) is not None:
            self._selector.unregister(handshake.socket)
        if self._listener is not None and self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _forget(self, handshake: Handshake, why: str) -> None:
        self._end_handshake(handshake)
        handshake.socket.close()
        if why:
            self._refused(why)

    # --- Members ------------------------------------------------------------------------------

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


# --- Rendezvous -----------------------------------------------------------------------------------
# For nodes whose addresses nobody knows beforehand: one node writes its address into a store as a
# JSON document, and the others read it. Ray's head and the first node of a Slurm script do that.


ADDRESS = "BATCHML_GANG"  # s3:// address of a group run's store; empty: a folder of the workspace
KEY = "BATCHML_GANG_KEY"  # key of the head's submission

_FOLDERS = (".batchml", "gangs")  # below the workspace


class Rendezvous:
    """JSON documents of a run, by name. Every method raises StoreError if the store fails.

    `workspace` and `key` name the store's folder, if the store is in a workspace.
    """

    def __init__(self, store: Store, workspace: str = "", key: str = "") -> None:
        self._store = store
        self._workspace, self._key = workspace, key

    @classmethod
    def of_group(cls, environ: Mapping[str, str]) -> Rendezvous:
        """The documents that the head and the workers of a group run share."""
        address = environ.get(ADDRESS, "")
        workspace, key = environ.get("BATCHML_WORKSPACE", ""), environ.get(KEY, "")
        if address:
            return cls(open_store(address, environ, limits=BRIEF))
        if not (workspace and key):
            raise StoreError(
                f"head and workers cannot find each other: set {ADDRESS}, or BATCHML_WORKSPACE and "
                f"{KEY}. `batchml submit` does that for a job with [[groups]]"
            )
        folder = os.path.join(workspace, *_FOLDERS, key)
        return cls(open_store(folder, environ, limits=BRIEF), workspace, key)

    def read(self, name: str) -> Optional[Dict[str, Any]]:
        """None if the document does not exist."""
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
        """Make the document's folder in the workspace, writable for every user: the next run may
        belong to another user.
        """
        path = self._workspace
        for part in (*_FOLDERS, self._key, os.path.dirname(name)) if path else ():
            path = os.path.join(path, part)
            try:
                os.mkdir(path)
                os.chmod(path, 0o777)  # whatever the umask
            except OSError:
                continue  # it exists, or the store will report why it cannot be made
