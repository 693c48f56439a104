"""The head of a Ray gang: Ray's own head, a port for the workers' supervisors, and the program."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Callable, Dict, List, Optional, Set

from batchml.runtime.entry.stopping import STOPS, Signals
from batchml.runtime.nodes.ray.batch_api import Batch, attempts_of, is_last, still_there
from batchml.runtime.nodes.ray.node import NoRay, Ray, RayNode, find_ray, unlike, variables
from batchml.runtime.nodes.ray.rendezvous import Card, Meeting, own_address
from batchml.runtime.nodes.ray.rules import (
    BEAT,
    MOST_STARTS,
    SILENT,
    Head,
    HeadAction,
    HeadEvent,
    Joined,
    Leave,
    Left,
    Member,
    PassOn,
    ProgramEnded,
    RayEnded,
    Say,
    Start,
    Stop,
    Tick,
    begin_head,
    head_step,
    is_short,
)
from batchml.runtime.nodes.torchrun.child import ASKED, VERDICT
from batchml.runtime.nodes.torchrun.link import Gone, Greeting, Link
from batchml.runtime.processes import descendants, send
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR, STOPPED, TRY_ELSEWHERE
from batchml.runtime.protocol.launch import Plan, Workers
from batchml.runtime.storage.store import StoreError

# --- the port for workers -------------------------------------------------------------------------
# The head's door: a port to which the workers' supervisors of a Ray gang connect.


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


# --- the head -------------------------------------------------------------------------------------


START_LIMIT = 120.0  # seconds that Ray may take to start
FAREWELL = 10.0  # seconds that workers have to end, before Batch is asked to end their jobs
REASON = "The head of its gang has ended"  # of jobs that have no more to do

Tell = Callable[[str], None]


def lead(
    command: Sequence[str],
    environ: Mapping[str, str],
    plan: Plan,
    token: str,
    signals: Signals,
    say: Tell,
) -> Leave:
    """Run the command as the program of a gang. Raises StoreError where members cannot meet."""
    farewell = Farewell(environ, plan, signals, say)
    try:
        return _lead(command, environ, plan, token, signals, say, farewell)
    except StoreError:
        raise
    except (NoRay, OSError) as error:
        return farewell.without_workers(Leave(CONFIGURATION_ERROR, str(error)))


def _lead(
    command: Sequence[str],
    environ: Mapping[str, str],
    plan: Plan,
    token: str,
    signals: Signals,
    say: Tell,
    farewell: Farewell,
) -> Leave:
    if shutil.which(command[0] if command else "", path=environ.get("PATH")) is None:
        why = f"cannot run {command[:1]}: no such command in this image."
        return farewell.without_workers(Leave(127, why))
    ray, address = find_ray(environ), own_address(environ)
    env = {**environ, **variables(environ, token, address)}
    node, words = start_ray(ray, address, env, signals)
    if node is None:
        code = STOPPED if signals.stop_asked else TRY_ELSEWHERE
        return farewell.without_workers(Leave(code, words))
    try:
        with closing(Door(address, token, (ray.version, ray.python), plan.groups)) as door:
            gcs_port = int(node.gcs().rpartition(":")[2])
            card = Card(
                farewell.run, farewell.attempt, address, gcs_port, door.port, ray.version,
                ray.python, time.time(),
            )  # fmt: skip
            later = farewell.meeting.head()
            if later is not None and later.run == card.run and later.attempt > card.attempt:
                return Leave(TRY_ELSEWHERE, f"attempt {later.attempt} of this head runs already")
            farewell.meeting.publish(card)
            say(f"Ray {ray.version} runs on this head, {card.gcs}")
            program = Program(command, {**env, "RAY_ADDRESS": card.gcs})
            guide = _Guide(plan, node, door, program, signals, say)
            leave = guide.run()
            farewell.say(leave, guide)
            return leave
    finally:
        node.end(2.0)


def start_ray(
    ray: Ray, address: str, env: Mapping[str, str], signals: Signals
) -> "tuple[Optional[RayNode], str]":
    """Ray's head, up; else why not. Another Ray may take a port between our look and its use."""
    words = ""
    for _ in range(MOST_STARTS):
        node = RayNode(ray, address, env)
        node.start_head()
        until = time.monotonic() + START_LIMIT
        while not node.gcs() and not node.has_ended() and time.monotonic() < until:
            if signals.stop_asked:
                node.end(2.0)
                return None, "stopped before Ray was up"
            time.sleep(0.05)
        if node.gcs() and not node.has_ended():
            return node, ""
        words = node.last_words()
        node.end(2.0)
    return None, f"Ray does not start on the head: {words}"


class Program:
    """The command of the run."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environ = dict(environ)
        self._process: Optional[subprocess.Popen[bytes]] = None

    def start(self) -> Optional[Leave]:
        try:
            self._process = subprocess.Popen(
                self._command, env=self._environ, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            return Leave(126, f"cannot run {self._command[0]!r}: {error.strerror}")
        return None

    def code(self) -> Optional[int]:
        """As a shell has it; None while it runs."""
        found = None if self._process is None else self._process.poll()
        return found if found is None or found >= 0 else 128 - found

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            pid = self._process.pid
            send([pid, *descendants(pid)], number)


class _Guide:
    """The loop of a head: events in, actions out."""

    def __init__(
        self, plan: Plan, node: RayNode, door: Door, program: Program, signals: Signals, say: Tell
    ) -> None:
        self.door = door
        self.node = node
        self.state: Head = begin_head(plan.groups, time.monotonic(), plan.start_within)
        self._program = program
        self._signals = signals
        self._say = say

    def run(self) -> Leave:
        while True:
            for event in self._events():
                self.state, actions = head_step(self.state, event)
                for action in actions:
                    leave = self._do(action)
                    if leave is not None:
                        return leave
            left = self.state.until - time.monotonic()
            self.wait(1.0 if self.state.is_running else min(1.0, max(0.0, left)))

    def wait(self, seconds: float) -> None:
        """Until something comes, or for a second at most."""
        with selectors.DefaultSelector() as selector:
            for sock in self.door.sockets():
                selector.register(sock, selectors.EVENT_READ)
            selector.register(self._signals.wake, selectors.EVENT_READ)
            selector.select(seconds)
        try:
            os.read(self._signals.wake, 4096)
        except BlockingIOError:
            pass

    def _events(self) -> List[HeadEvent]:
        events: List[HeadEvent] = []
        for number in self._signals.take():
            if number in STOPS:
                events.append(Stop(number))
            else:
                self._program.signal(number)
        code = self._program.code()
        if code is not None:  # before what Ray does when a signal came to it as well
            return [*events, ProgramEnded(code)]
        now = time.monotonic()
        events += self.door.look(now)
        while self.door.refusals:
            self._say(self.door.refusals.pop(0))
        if self.node.has_ended():
            events.append(RayEnded(self.node.last_words()))
        return [*events, Tick(now)]

    def _do(self, action: HeadAction) -> Optional[Leave]:
        if isinstance(action, Say):
            self._say(action.text)
        elif isinstance(action, Start):
            return self._program.start()
        elif isinstance(action, PassOn):
            self._program.signal(action.number)
        else:
            return action
        return None


class Farewell:
    """How a head goes: for good, which ends its workers, or to come again, which they wait for."""

    def __init__(self, environ: Mapping[str, str], plan: Plan, signals: Signals, say: Tell) -> None:
        self.run = environ.get("AWS_BATCH_JOB_ID", "")
        self.attempt = int(environ.get("AWS_BATCH_JOB_ATTEMPT") or 1)
        self.meeting = Meeting.of(environ)
        self._asked = environ.get(VERDICT, "") + ASKED
        self._attempts = attempts_of(environ)
        self._batch = Batch(environ)
        self._groups = plan.groups
        self._signals = signals
        self._tell = say

    def without_workers(self, leave: Leave) -> Leave:
        """Before any could join."""
        code = self._code(leave)
        if self._is_last(code):
            self._write(code)
            self._end_jobs(self._groups)
        return leave

    def say(self, leave: Leave, guide: _Guide) -> None:
        code, door = self._code(leave), guide.door
        if not self._is_last(code):
            door.tell({"do": "leaving", "code": code})
            return
        self._write(code)
        door.tell({"do": "ended", "code": code})
        guide.node.ask_to_end()
        until = time.monotonic() + FAREWELL
        while not door.is_empty and time.monotonic() < until:
            door.look(time.monotonic())
            guide.wait(0.2)
        stay = not door.is_empty
        self._end_jobs([each for each in self._groups if stay or is_short(guide.state, each)])

    def _code(self, leave: Leave) -> int:
        """How the run will end: the entry may have a code of its own for a stop."""
        if not self._signals.stop_asked:
            return leave.code
        try:
            with open(self._asked, encoding="utf-8") as file:
                return int(json.load(file)["code"])
        except (OSError, ValueError, TypeError, KeyError):
            return STOPPED

    def _is_last(self, code: int) -> bool:
        """Whether Batch will not try this head again."""
        is_stopped = bool(self._signals.stop_asked)
        if code == 0 and not is_stopped:
            return True
        try:
            job = self._batch.job(self.run)
        except StoreError:
            job = None
        told = None if is_stopped and code == STOPPED else code
        return is_last(job, self.attempt, told, self._attempts)

    def _write(self, code: int) -> None:
        try:
            self.meeting.end(code, time.time())
        except StoreError as error:
            self._tell(f"workers in the queue cannot be told that the gang has ended: {error}")

    def _end_jobs(self, groups: Sequence[Workers]) -> None:
        """The jobs of workers that are not here: they wait in the queue, or hang."""
        for group in groups:
            try:
                for job in still_there(self._batch.named(group.queue, group.job_name)):
                    self._batch.terminate(job, REASON)
                    self._tell(f"the job of group {group.name} was ended; not all of it had come")
            except StoreError as error:
                why = f"those of group {group.name} that still wait end when they start"
                self._tell(f"{why}: their job cannot be ended from here ({error})")
