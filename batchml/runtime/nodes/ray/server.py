"""The server of a Ray head: the supervisors of its workers connect to it."""

from __future__ import annotations

import selectors
import time
from collections.abc import Sequence
from typing import Callable, Dict, List, Optional, Set

from batchml.runtime.nodes.link.connection import Message
from batchml.runtime.nodes.link.peer import Heartbeats, Peer, dispatch
from batchml.runtime.nodes.link.server import MemberServer, Refusal
from batchml.runtime.nodes.ray.node import unlike
from batchml.runtime.nodes.ray.rules import (
    BEAT,
    SILENT,
    HeadEvent,
    WorkerId,
    WorkerJoined,
    WorkerLeft,
)
from batchml.runtime.protocol.launch import WorkerGroup


class WorkerServer:
    """The workers that are connected. What they report becomes events."""

    def __init__(
        self,
        address: str,
        token: str,
        versions: Sequence[str],
        groups: Sequence[WorkerGroup],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self._server = MemberServer(
            token, self._selector, Heartbeats(BEAT, SILENT), self._admit, self._connected,
            self._hear, self._lost, self._refused, clock,
        )  # fmt: skip
        self._server.listen([(address, 0)])
        self.port = self._server.port
        self._versions = versions
        self._groups = groups
        self._workers: Dict[Peer, WorkerId] = {}
        self._joined: Set[Peer] = set()
        self._events: List[HeadEvent] = []
        self.refusals: List[str] = []  # lines for people

    @property
    def is_empty(self) -> bool:
        return not self._workers

    def wake_on(self, file: int, drain: Callable[[], None]) -> None:
        """Let `look` return early, after `drain`, when this descriptor can be read."""
        self._selector.register(file, selectors.EVENT_READ, drain)

    def look(self, now: float, wait: float = 0.0) -> List[HeadEvent]:
        """The events since the last look; wait for one for at most `wait` seconds."""
        dispatch(self._selector, wait)
        self._server.tick(now)
        events, self._events = self._events, []
        return events

    def send_all(self, message: Message) -> None:
        for peer in self._server.peers:
            peer.send(message)

    def close(self) -> None:
        self._server.close()
        self._selector.close()

    def _admit(self, info: Message) -> Optional[Refusal]:
        why = unlike(self._versions, (str(info.get("ray")), str(info.get("python"))))
        if not why:
            return None
        self.refusals.append(f"worker {self._worker(info)} cannot join: {why}")
        return Refusal(why, final=True)

    def _connected(self, peer: Peer) -> None:
        self._workers[peer] = self._worker(peer.info)

    def _worker(self, info: Message) -> WorkerId:
        """The group follows from the key of its submission, which is part of its job's name."""
        key = str(info.get("key"))
        groups = [each.name for each in self._groups if key and each.job_name.endswith(key)]
        name = groups[0] if groups else "workers"
        return WorkerId(name, int(info.get("index", 0)), str(info.get("address")))

    def _hear(self, peer: Peer, message: Message) -> None:
        if message.get("do") == "joined" and peer not in self._joined:
            self._joined.add(peer)
            self._events.append(WorkerJoined(self._workers[peer]))

    def _lost(self, peer: Peer, silent: bool) -> None:
        worker = self._workers.pop(peer)
        had_joined = peer in self._joined
        self._joined.discard(peer)
        if had_joined and not self._has_joined(worker):
            self._events.append(WorkerLeft(worker))

    def _has_joined(self, worker: WorkerId) -> bool:
        """Whether a later attempt of the worker has joined before the earlier one was missed."""
        return any(self._workers[each].place == worker.place for each in self._joined)

    def _refused(self, why: str) -> None:
        self.refusals.append(f"a connection was refused: {why}")
