"""A worker of a Ray gang: it finds the head, lends its CPUs to Ray, and ends when the head does."""

from __future__ import annotations

import os
import random
import selectors
import time
from collections.abc import Mapping
from typing import Any, Callable, Dict, List, Optional

from batchml.runtime.entry.stopping import STOPS, Signals
from batchml.runtime.nodes.ray.batch_api import Batch, attempts_of, is_head_over
from batchml.runtime.nodes.ray.node import DRAIN, RayNode, find_ray, unlike, variables
from batchml.runtime.nodes.ray.rendezvous import Card, Meeting, own_address
from batchml.runtime.nodes.ray.rules import (
    BEAT,
    HEAD_GRACE,
    SILENT,
    Connected,
    Dial,
    EndRay,
    Found,
    Leave,
    Lost,
    Over,
    RayDown,
    RayUp,
    Say,
    StartRay,
    Stop,
    TellJoined,
    TurnedAway,
    Worker,
    WorkerAction,
    WorkerEvent,
    worker_step,
)
from batchml.runtime.nodes.torchrun.link import Gone, Link, join
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR
from batchml.runtime.protocol.launch import Plan
from batchml.runtime.storage.store import StoreError

GRACE = "BATCHML_HEAD_GRACE"  # seconds, instead of HEAD_GRACE
_FIRST_LOOK, _LOOK_MOST = 0.2, 10.0  # seconds between two looks for a head: thousands may wait
_LOOK_MORE = 1.1  # times as long is each than the one before
_ENDED_EVERY = 60.0  # seconds between two looks while there is one, which says it itself
_ASK_EVERY = 60.0  # seconds, about, between two questions for the job of a head that is not there
_ASK_FIRST = 5.0  # seconds, about, when it was there just now

Tell = Callable[[str], None]


def work(environ: Mapping[str, str], plan: Plan, token: str, signals: Signals, say: Tell) -> Leave:
    """Be a worker until the gang ends. Raises NoRay, StoreError and OSError."""
    loop = _Loop(environ, plan, token, signals, say)
    try:
        return loop.run()
    finally:
        loop.close()


class _Loop:
    """Events in, actions out."""

    def __init__(
        self, environ: Mapping[str, str], plan: Plan, token: str, signals: Signals, say: Tell
    ) -> None:
        self._environ = environ
        self._token = token
        self._signals = signals
        self._say = say
        self._ray = find_ray(environ)
        self._meeting = Meeting.of(environ)
        self._address = own_address(environ)
        self._env = {**environ, **variables(environ, token, self._address)}
        self._grace = _seconds(environ.get(GRACE, ""), HEAD_GRACE)
        until = time.monotonic() + plan.start_within
        self._state = Worker(until, attempts=attempts_of(environ))
        self._link: Optional[Link] = None
        self._node: Optional[RayNode] = None
        self._heard = self._beat = 0.0
        self._batch: Optional[Batch] = None
        self._next_look = 0.0
        self._pause = _FIRST_LOOK
        self._next_ask = _about(_ASK_EVERY)
        self._trouble = ""
        self._queue: List[WorkerEvent] = []

    def run(self) -> Leave:
        self._say(f"a worker with Ray {self._ray.version} looks for the head of its gang")
        while True:
            self._queue += self._events()
            while self._queue:
                self._state, actions = worker_step(self._state, self._queue.pop(0), self._grace)
                for action in actions:
                    if isinstance(action, Leave):
                        return action
                    self._do(action)
            self._wait()

    def close(self) -> None:
        """Ray first, so that what it drains can reach the others; the head sees us go last."""
        self._end_node(DRAIN if self._signals.stop_asked and self._link is not None else 1.0)
        if self._link is not None:
            self._link.close()

    # --- events ---------------------------------------------------------------------------------

    def _events(self) -> List[WorkerEvent]:
        now = time.monotonic()
        events: List[WorkerEvent] = [*self._hear(now), *self._of_ray(now)]
        stops = [number for number in self._signals.take() if number in STOPS]
        if stops or now >= self._next_look:
            events.append(self._look(now))  # first: who ends a gang ends its jobs, too
        return [*events, *map(Stop, stops)]

    def _hear(self, now: float) -> List[WorkerEvent]:
        if self._link is None:
            return []
        events: List[WorkerEvent] = []
        try:
            for message in [*self._link.waiting(), *self._link.messages()]:
                self._heard = now
                if message.get("do") == "ended":
                    events.append(Over(int(message.get("code", 0))))
                elif message.get("do") == "leaving":
                    raise Gone("the head leaves")
            if now - self._heard > SILENT:
                raise Gone("the head is silent")
            if now - self._beat >= BEAT:
                self._beat = now
                self._link.send({"do": "beat"})
        except Gone:
            self._link.close()
            self._link, self._pause, self._next_look = None, _FIRST_LOOK, now
            self._next_ask = _about(_ASK_FIRST)
            events.append(Lost(now))
        return events

    def _of_ray(self, now: float) -> List[WorkerEvent]:
        if self._node is None:
            return []
        if self._node.has_ended():
            words = self._node.last_words()
            self._end_node(0.0)
            return [RayDown(now, words)]
        return [RayUp()] if not self._state.is_up and self._node.gcs() else []

    def _look(self, now: float) -> Found:
        """Into the place where both meet. What cannot be read now may be later."""
        self._pause = min(_LOOK_MOST, self._pause * _LOOK_MORE)
        self._next_look = now + (_ENDED_EVERY if self._link is not None else self._pause)
        try:
            ended = self._meeting.ended()
            card = None if ended is not None or self._link is not None else self._meeting.head()
        except StoreError as error:
            self._trouble = str(error)
            return Found(now, None, None, trouble=self._trouble)
        return Found(now, card, ended, self._is_over(card, now), self._trouble)

    def _is_over(self, card: Optional[Card], now: float) -> bool:
        """Whether the job of a head that is not there has ended; asked seldom."""
        if self._link is not None or now < self._next_ask:
            return False
        self._next_ask = _about(_ASK_EVERY)
        try:
            self._batch = self._batch or Batch(self._environ)
            return is_head_over(self._batch, self._environ, card.run if card else "")
        except StoreError:
            return False  # not every job may ask

    def _wait(self) -> None:
        """Until something comes, or for a moment."""
        starts = self._node is not None and not self._state.is_up
        until_look = max(0.0, self._next_look - time.monotonic())
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.wake, selectors.EVENT_READ)
            if self._link is not None:
                selector.register(self._link.socket, selectors.EVENT_READ)
            selector.select(min(until_look, 0.1 if starts else 1.0))
        try:
            os.read(self._signals.wake, 4096)
        except BlockingIOError:
            pass

    # --- actions --------------------------------------------------------------------------------

    def _do(self, action: WorkerAction) -> None:
        if isinstance(action, Say):
            self._say(action.text)
        elif isinstance(action, Dial):
            self._dial(action.card)
        elif isinstance(action, StartRay):
            self._node = RayNode(self._ray, self._address, self._env)
            self._node.start_worker(action.card.gcs)
        elif isinstance(action, EndRay):
            self._end_node(1.0)
        elif isinstance(action, TellJoined) and self._link is not None:
            self._say("joined the gang")
            self._send({"do": "joined"})

    def _dial(self, card: Card) -> None:
        why = unlike((card.ray, card.python), (self._ray.version, self._ray.python))
        try:
            self._link = join(card.address, card.control_port, self._token, self._member())
        except Gone as gone:
            self._trouble = f"the head at {card.address}: {gone}"
            if gone.final or why:
                self._queue.append(TurnedAway(CONFIGURATION_ERROR, why or str(gone)))
            return
        self._heard = self._beat = now = time.monotonic()
        self._queue.append(Connected(now, card))

    def _member(self) -> Dict[str, Any]:
        return {
            "key": self._environ.get("BATCHML_KEY", ""),
            "index": int(self._environ.get("AWS_BATCH_JOB_ARRAY_INDEX") or 0),
            "address": self._address,
            "ray": self._ray.version,
            "python": self._ray.python,
        }

    def _send(self, message: Dict[str, Any]) -> None:
        if self._link is not None:
            try:
                self._link.send(message)
            except Gone:
                pass  # the next look at it says so

    def _end_node(self, limit: float) -> None:
        """Ray, and all that it started, within `limit` seconds."""
        if self._node is not None:
            self._node.end(limit)
            self._node = None


def _about(seconds: float) -> float:
    """When so many seconds from now have passed; thousands of workers do not ask at once."""
    return time.monotonic() + seconds * random.uniform(0.8, 1.6)


def _seconds(text: str, default: float) -> float:
    """A number of seconds that a user may have set."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return default
