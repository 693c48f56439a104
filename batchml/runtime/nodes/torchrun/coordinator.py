"""The main node's part in a gang: it hears of everything, asks the rules, and gives the orders."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Mapping
from typing import Callable, Deque, Dict, List, NamedTuple, Optional, Set

from batchml.runtime.nodes.torchrun.link import MEASURED, Gone, Greeting, Link, Message, ports
from batchml.runtime.nodes.torchrun.restarts import History, Looker, Newest, closed
from batchml.runtime.nodes.torchrun.rules import (
    Action,
    Asked,
    Begin,
    Ended,
    EndRanks,
    Event,
    Exit,
    Failure,
    Joined,
    Left,
    Limits,
    Lost,
    Node,
    NotBegun,
    Progressed,
    Pulse,
    RankExited,
    Record,
    Say,
    State,
    StopRanks,
    Tick,
    begin,
    step,
)
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR

_LOOK = 1.0  # seconds between two looks for a new checkpoint
_GREETING = 5.0  # seconds that a connection has to say who it is
FROZEN = 5.0  # seconds without a turn of the loop: then it was us who were silent


class Beats(NamedTuple):
    """Seconds between two signs of life of a supervisor, and after how many one is lost."""

    every: float = 2.0
    silent: float = 15.0


class Identity(NamedTuple):
    """What all nodes of a gang have in common, or do not belong to it."""

    job: str
    attempt: int
    token: str
    key: str


class _Seat:
    """A node that is here, by its connection; the main node's own has none."""

    def __init__(self, link: Link, member: Message, now: float) -> None:
        self.link = link
        self.member = member
        self.heard = now
        self.asked = 0.0  # since when the connection is measured
        self.has_joined = False


class Coordinator:
    """`order` brings an order to the main node's own member."""

    def __init__(
        self,
        identity: Identity,
        own: Message,
        limits: Limits,
        beats: Beats,
        bandwidth: float,
        folder: str,
        history: History,
        selector: selectors.BaseSelector,
        order: Callable[[Message], None],
        say: Callable[[str], None],
    ) -> None:
        self._identity, self._own = identity, own
        self._limits, self._beats, self._bandwidth = limits, beats, bandwidth
        self._looker, self._history = Looker(folder), history
        self._selector, self._order, self._say = selector, order, say
        self._seats: Dict[int, _Seat] = {}
        self._greetings: Dict[Greeting, float] = {}
        self._listener: Optional[socket.socket] = None
        self._turn = self._beat = self._looked = 0.0
        self._newest = self._began_with = Newest()
        self._state: Optional[State] = None
        self._events: Deque[Event] = deque()
        self._bringing: Set[int] = set()  # nodes that still fetch what rank 0 saved
        self._is_at_work = False
        self._has_told = False  # that the history cannot be kept
        self.exit: Optional[Exit] = None

    def start(self, address: str, now: float) -> None:
        """Listen, and begin with what earlier attempts remembered. Raises OSError."""
        self._turn = now
        past, began_with = self._history.read()
        self._newest = self._began_with = self._looker.newest()
        past = closed(past, self._newest.is_after(began_with))
        self._state = begin(self._limits, now, past, bool(self._newest))
        if self._limits.nodes > 1:
            self._listen(address)
        self._post(Joined(now, _node(0, self._own), str(self._own.get("unfit", ""))))

    def _listen(self, address: str) -> None:
        for port in ports(self._identity.key):
            for place in (address, ""):
                made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    made.bind((place, port))
                    made.listen(128)
                except OSError as error:
                    made.close()
                    trouble = error
                    continue
                made.setblocking(False)
                self._listener = made
                self._selector.register(made, selectors.EVENT_READ, self._accept)
                return
        raise trouble

    # --- what is heard -------------------------------------------------------------------------

    def hear(self, index: int, message: Message) -> None:
        """What a node tells, this one among them."""
        now, what = time.monotonic(), message["do"]
        if what == "beat":
            self._post(Pulse(now - float(message["pulse"])))
        elif what == "exited":
            self._post(RankExited(now, message["generation"], failure_of(index, message)))
        elif what == "ended":
            self._look(now)  # what was saved last counts
            self._post(Ended(now, message["generation"], index, message["unfit"]))
        elif what == "asked":
            self._post(Asked(
                now, index, message["code"], message["why"], message["softly"], message["grace"]
            ))  # fmt: skip
        elif what == "not_begun":
            self._post(NotBegun(now, index, message["code"], message["why"]))
        elif what == "measured":
            self._measured(index, now)
        elif what == "ready" and self._state and message["generation"] == self._state.generation:
            self._bringing.discard(index)
            if not self._bringing:
                self._order_all({"do": "go"})

    def until_due(self, now: float) -> float:
        return max(0.0, min(self._beat + self._beats.every, self._looked + _LOOK) - now)

    def tick(self, now: float) -> None:
        if now - self._turn > FROZEN:  # this process was stopped; nobody else was silent
            for seat in self._seats.values():
                seat.heard += now - self._turn
        self._turn = now
        if now - self._beat >= self._beats.every:
            self._beat = now
            for index in list(self._seats):
                self._send(index, {"do": "beat"})
        for index, seat in list(self._seats.items()):
            if now - seat.heard > self._beats.silent:
                self._lose(index, silent=True)
        for greeting, since in list(self._greetings.items()):
            if now - since > _GREETING:
                self._forget(greeting)
        if now - self._looked >= _LOOK:
            self._look(now)
            self._post(Tick(now))

    def is_alone(self) -> bool:
        """Whether no other node is connected any more."""
        return not self._seats

    def close(self) -> None:
        for index in list(self._seats):
            self._drop(index)
        for greeting in list(self._greetings):
            self._forget(greeting)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()

    def _look(self, now: float) -> None:
        self._looked = now
        found = self._looker.newest()
        if found.is_after(self._newest):
            self._newest = found
            self._post(Progressed(now))

    def _post(self, event: Event) -> None:
        """What an order brings about, such as a node found gone, waits until all were given."""
        self._events.append(event)
        if self._is_at_work:
            return
        self._is_at_work = True
        while self._events:
            assert self._state is not None
            self._state, actions = step(self._state, self._events.popleft())
            for action in actions:
                self._do(action)
        self._is_at_work = False

    # --- what is done --------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        if isinstance(action, Say):
            self._say(action.text)
        elif isinstance(action, Record):
            self._record(action)
        elif isinstance(action, Begin):
            self._begin(action)
        elif isinstance(action, EndRanks):
            order = {"do": "end", "grace": action.grace, "stacks": action.stacks}
            self._order_all(order)
        elif isinstance(action, StopRanks):
            self._order_all({"do": "stop", **action._asdict()})
        elif isinstance(action, Exit):
            self.exit = action
            self._order_all({"do": "exit", **action._asdict(), "grace": self._limits.end_grace})

    def _begin(self, action: Begin) -> None:
        nodes, ranks = len(action.nodes), sum(node.processes for node in action.nodes)
        self._say(
            f"generation {action.generation}: {nodes} node{'s'[: nodes > 1]}, "
            f"{ranks} rank{'s'[: ranks > 1]}{self._newest.words()}."
        )
        address = str(self._own["address"])
        bringing = {i for i, seat in self._seats.items() if seat.member.get("brings")}
        self._bringing = bringing if action.restarts else set()
        self._order_all({
            "do": "begin",
            "generation": action.generation,
            "restarts": action.restarts,
            "nodes": [[node.number, node.processes] for node in action.nodes],
            "waits": bool(self._bringing),
            "saved": self._looker.told() if self._bringing else {},
            "master": address,
            "port": free_port(f"{self._identity.key}/{os.getpid()}/{action.generation}"),
        })  # fmt: skip

    def _record(self, action: Record) -> None:
        if action.past[-1].kind == "open":
            self._began_with = self._newest
        try:
            self._history.write(action.past, self._began_with)
        except OSError as error:
            if not self._has_told:
                self._has_told = True
                self._say(f"how generations end cannot be remembered for later attempts: {error}")

    def _order_all(self, order: Message) -> None:
        for index in list(self._seats):
            if self._seats[index].has_joined or order["do"] == "exit":
                self._send(index, order)
        self._order(order)

    def _send(self, index: int, message: Message) -> None:
        seat = self._seats.get(index)
        if seat is not None:
            try:
                seat.link.send(message)
                self._listen_to(index, seat)
            except Gone:
                self._lose(index, silent=False)

    # --- connections ---------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
            greeting = Greeting(connection, self._identity.token)
        except OSError:
            return
        self._greetings[greeting] = time.monotonic()
        read = self._reader_of(greeting)
        self._selector.register(greeting.socket, selectors.EVENT_READ, read)

    def _reader_of(self, greeting: Greeting) -> Callable[[], None]:
        def read() -> None:
            try:
                member = greeting.heard()
                if member is not None:
                    del self._greetings[greeting]
                    self._selector.unregister(greeting.socket)
                    self._judge(greeting, member)
            except (Gone, KeyError, TypeError, ValueError):  # or of another version of ours
                self._forget(greeting)

        return read

    def _forget(self, greeting: Greeting) -> None:
        if self._greetings.pop(greeting, None) is not None:
            self._selector.unregister(greeting.socket)
        greeting.socket.close()

    def _judge(self, greeting: Greeting, member: Message) -> None:
        """Whether a node that has the token is of this attempt, and there is a seat for it."""
        now, index = time.monotonic(), int(member["index"])
        theirs, ours = (member["job"], member["attempt"]), self._identity[:2]
        if theirs != ours:
            words = "this is attempt {1} of job {0}, and that node is of attempt {3} of job {2}"
            greeting.refuse(words.format(*ours, *theirs), final=True)
            return
        if not 0 < index < self._limits.nodes:
            greeting.refuse(f"there is no node {index} of {self._limits.nodes}", final=True)
            return
        if "not_begun" in member or "lost" in member:
            greeting.welcome().close()
            if "lost" in member:
                self._post(Lost(now, index, member["lost"]))
            else:
                self._post(NotBegun(now, index, *member["not_begun"]))
            return
        seat = self._seats.get(index)
        is_other = seat is not None and seat.member["instance"] != member["instance"]
        if seat is not None and is_other and now - seat.heard < self._beats.silent:
            greeting.refuse(f"another node {index} is here still", final=False)
            return
        if seat is not None:
            self._drop(index)
        self._seats[index] = _Seat(greeting.welcome(), member, now)
        self._listen_to(index, self._seats[index])
        unlike = _unlike(self._own, member)
        if unlike:
            self._post(NotBegun(now, index, CONFIGURATION_ERROR, unlike))
        elif self._bandwidth and not member.get("unfit"):
            self._measure_next(now)
        else:
            self._join(index, now, str(member.get("unfit", "")))

    def _join(self, index: int, now: float, unfit: str = "") -> None:
        seat = self._seats[index]
        seat.has_joined = True
        self._post(Joined(now, _node(index, seat.member), unfit))

    def _listen_to(self, index: int, seat: _Seat) -> None:
        seat.link.watch(self._selector, self._reader(index, seat))

    def _reader(self, index: int, seat: _Seat) -> Callable[[], None]:
        def read() -> None:
            try:
                seat.link.flush()
                messages = seat.link.messages()
                seat.heard = time.monotonic()
                for message in messages:
                    if self._seats.get(index) is seat:
                        self.hear(index, message)
            except (Gone, KeyError, TypeError, ValueError):
                if self._seats.get(index) is seat:
                    self._lose(index, silent=False)
                return
            if self._seats.get(index) is seat:
                self._listen_to(index, seat)

        return read

    def _lose(self, index: int, silent: bool) -> None:
        joined = self._seats[index].has_joined
        self._drop(index)
        if joined:
            self._post(Left(time.monotonic(), index, silent))
        if self._bandwidth:
            self._measure_next(time.monotonic())

    def _drop(self, index: int) -> None:
        seat = self._seats.pop(index)
        if seat.link.socket in self._selector.get_map():
            self._selector.unregister(seat.link.socket)
        seat.link.close()

    # --- the network ---------------------------------------------------------------------------

    def _measure_next(self, now: float) -> None:
        """One node at a time: together they would share what each is to have."""
        new = [(i, s) for i, s in self._seats.items() if not s.has_joined]
        if not new or any(seat.asked for _, seat in new):
            return
        index, seat = min(new, key=lambda each: each[0])
        seat.asked = now
        try:
            seat.link.measure()
            self._listen_to(index, seat)
        except Gone:
            self._lose(index, silent=False)

    def _measured(self, index: int, now: float) -> None:
        seat = self._seats[index]
        rate = 2 * MEASURED / max(1e-6, now - seat.asked)
        name = _node(index, seat.member).named()
        found = f"{rate / (1 << 20):.0f} MiB/s"
        self._say(f"{found} between {name} and the main node")
        seat.asked = 0.0
        unfit = ""
        if rate < self._bandwidth:
            floor = f"{self._bandwidth / (1 << 20):.0f} MiB/s"
            unfit = f"this host is unfit: {found} to the main node, and {floor} were asked for"
        self._join(index, now, unfit)
        self._measure_next(now)


def _node(index: int, member: Mapping[str, object]) -> Node:
    return Node(
        index, int(str(member["processes"])), str(member["address"]), str(member.get("host", ""))
    )


def failure_of(index: int, message: Message) -> Failure:
    """What a node tells of a rank that has ended."""
    return Failure(
        index, message["rank"], message["code"], tuple(message["tail"]), message["stamp"],
        message["was_sent"], message["is_memory"],
    )  # fmt: skip


def _unlike(own: Message, member: Message) -> str:
    """Versions that differ: ranks of a training that are not alike fail late, and strangely."""
    found: List[str] = []
    for name, version in own["versions"].items():
        theirs = member["versions"].get(name)
        if version and theirs and theirs != version:
            found.append(f"{name} is {theirs}, and {version} on the main node")
    return f"{'; '.join(found)}: give all nodes one image" if found else ""


def free_port(seed: str) -> int:
    """A port of this host that nobody listens on, on whatever address.

    Below those that Linux gives to outgoing connections, so that it stays free for the moment until
    rank 0 listens there.
    """
    import random

    chance = random.Random(seed)
    for number in (*(chance.randrange(20_000, 32_000) for _ in range(50)), 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("", number))
                return int(tried.getsockname()[1])
            except OSError:
                continue
    raise OSError("no port is free")
