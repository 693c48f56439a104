"""The head's door: a port to which the workers' supervisors of a Ray gang connect."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Dict, List, Set

from batchml.runtime.gang_wire import Gone, Greeting, Link
from batchml.runtime.launch import Workers
from batchml.runtime.ray_node import unlike
from batchml.runtime.ray_rules import BEAT, SILENT, HeadEvent, Joined, Left, Member

_MOST_GREETINGS = 256  # connections that have not shown yet whose they are
_GREETING = 10.0  # seconds that one may take to


class Door:
    """Where workers' supervisors come in. What they say becomes events."""

    def __init__(
        self, address: str, token: str, versions: Sequence[str], groups: Sequence[Workers]
    ) -> None:
        self._listener = socket.create_server((address, 0), backlog=128)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._token = token
        self._versions = versions
        self._groups = groups
        self._greetings: Dict[Greeting, float] = {}
        self._links: Dict[Link, Member] = {}
        self._heard: Dict[Link, float] = {}
        self._joined: Set[Link] = set()
        self._beat = 0.0
        self.refusals: List[str] = []  # to be told

    def sockets(self) -> "list[socket.socket]":
        comers = [each.socket for each in self._greetings]
        return [self._listener, *comers, *(each.socket for each in self._links)]

    @property
    def is_empty(self) -> bool:
        return not self._links

    def look(self, now: float) -> List[HeadEvent]:
        """Everything that has come since the last look. Never waits."""
        self._accept(now)
        for greeting, since in list(self._greetings.items()):
            self._greet(greeting, since, now)
        events: List[HeadEvent] = []
        for link in list(self._links):
            events += self._hear(link, now)
        if now - self._beat >= BEAT:
            self._beat = now
            events += self.tell({"do": "beat"})
        return events

    def tell(self, message: Dict[str, Any]) -> List[HeadEvent]:
        """Say something to every worker."""
        events: List[HeadEvent] = []
        for link in list(self._links):
            try:
                link.send(message)
            except Gone:
                events += self._drop(link)
        return events

    def close(self) -> None:
        for sock in self.sockets():
            sock.close()

    def _accept(self, now: float) -> None:
        while len(self._greetings) < _MOST_GREETINGS:
            try:
                connection, _ = self._listener.accept()
                self._greetings[Greeting(connection, self._token)] = now
            except (BlockingIOError, ConnectionError):
                return

    def _greet(self, greeting: Greeting, since: float, now: float) -> None:
        try:
            told = greeting.heard()
            if told is None:
                if now - since > _GREETING:
                    raise Gone("it says nothing")
                return
            del self._greetings[greeting]
            self._admit(greeting, told, now)
        except Gone as gone:
            self._greetings.pop(greeting, None)
            self.refusals.append(f"a connection was refused: {gone}")
            greeting.socket.close()

    def _admit(self, greeting: Greeting, told: Dict[str, Any], now: float) -> None:
        member = Member(
            self._group(str(told.get("key"))), int(told.get("index", 0)), str(told.get("address"))
        )
        why = unlike(self._versions, (str(told.get("ray")), str(told.get("python"))))
        if why:
            self.refusals.append(f"worker {member} cannot join: {why}")
            greeting.refuse(why, final=True)
            return
        link = greeting.welcome()
        self._links[link], self._heard[link] = member, now

    def _group(self, key: str) -> str:
        """The group of a worker, by the key of its submission, which is part of its job's name."""
        found = [each.name for each in self._groups if key and each.job_name.endswith(key)]
        return found[0] if found else "workers"

    def _hear(self, link: Link, now: float) -> List[HeadEvent]:
        events: List[HeadEvent] = []
        try:
            for message in [*link.waiting(), *link.messages()]:
                self._heard[link] = now
                if message.get("do") == "joined" and link not in self._joined:
                    self._joined.add(link)
                    events.append(Joined(self._links[link]))
            if now - self._heard[link] > SILENT:
                raise Gone("silent")
        except Gone:
            events += self._drop(link)
        return events

    def _drop(self, link: Link) -> List[HeadEvent]:
        link.close()
        member = self._links.pop(link, None)
        self._heard.pop(link, None)
        was_in = link in self._joined
        self._joined.discard(link)
        if member is None or not was_in or self._has_joined(member):
            return []
        return [Left(member)]

    def _has_joined(self, member: Member) -> bool:
        """True for one that Batch has tried again: it may be back before it was missed."""
        return any(self._links[each].place == member.place for each in self._joined)
