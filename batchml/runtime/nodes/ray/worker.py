"""A worker of a Ray cluster: it finds the head, gives Ray its CPUs, and ends when the head does."""

from __future__ import annotations

import os
import random
import selectors
import time
from collections.abc import Mapping
from typing import Callable, List, Optional

from batchml.runtime.entry.stopping import STOPS, Signals
from batchml.runtime.nodes.link.address import LOOPBACK, own_address
from batchml.runtime.nodes.link.connection import LinkClosed, Message, join
from batchml.runtime.nodes.link.peer import Heartbeats, Peer, dispatch
from batchml.runtime.nodes.ray.batch_api import BatchApi, attempts_of, is_head_over
from batchml.runtime.nodes.ray.node import DRAIN, RayNode, find_ray, unlike, variables
from batchml.runtime.nodes.ray.rendezvous import HeadRecord, HeadRendezvous
from batchml.runtime.nodes.ray.rules import (
    BEAT,
    HEAD_GRACE,
    SILENT,
    Announce,
    DialHead,
    EndRay,
    HeadConnected,
    HeadEnded,
    HeadLost,
    HeadRefused,
    LeaveCluster,
    RayDown,
    RayUp,
    RendezvousRead,
    ReportJoined,
    StartRay,
    StopSignal,
    WorkerAction,
    WorkerEvent,
    WorkerState,
    worker_step,
)
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR
from batchml.runtime.protocol.launch import LaunchPlan
from batchml.runtime.storage.store import StoreError

GRACE = "BATCHML_HEAD_GRACE"  # seconds, instead of HEAD_GRACE
_FIRST_LOOK, _LONGEST_LOOK = 0.2, 10.0  # seconds between two looks for a head, at first and at most
_LOOK_FACTOR = 1.1  # by which the pause grows: thousands may wait
_END_EVERY = 60.0  # seconds between two looks for the end, which the head also reports itself
_ASK_EVERY = 60.0  # seconds, about, between two calls about the job of a missing head
_ASK_FIRST = 5.0  # seconds, about, until the first call after a head was lost

Say = Callable[[str], None]


def work(
    environ: Mapping[str, str], plan: LaunchPlan, token: str, signals: Signals, say: Say
) -> LeaveCluster:
    """Be a worker until the head has ended. Raises RayMissing, StoreError and OSError."""
    loop = _WorkerLoop(environ, plan, token, signals, say)
    try:
        return loop.run()
    finally:
        loop.close()


class _WorkerLoop:
    """The loop of a worker: it passes events to the rules, and takes their actions."""

    def __init__(
        self, environ: Mapping[str, str], plan: LaunchPlan, token: str, signals: Signals, say: Say
    ) -> None:
        self._environ = environ
        self._token = token
        self._signals = signals
        self._say = say
        self._ray = find_ray(environ)
        self._rendezvous = HeadRendezvous.of(environ)
        self._address = own_address(environ) or LOOPBACK
        self._env = {**environ, **variables(environ, token, self._address)}
        self._grace = _seconds(environ.get(GRACE, ""), HEAD_GRACE)
        until = time.monotonic() + plan.start_within
        self._state = WorkerState(until, attempts=attempts_of(environ))
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.wake, selectors.EVENT_READ, self._drain)
        self._head: Optional[Peer] = None
        self._node: Optional[RayNode] = None
        self._batch: Optional[BatchApi] = None
        self._next_look = 0.0
        self._pause = _FIRST_LOOK
        self._next_ask = _about(_ASK_EVERY)
        self._trouble = ""
        self._queue: List[WorkerEvent] = []

    def run(self) -> LeaveCluster:
        self._say(f"a worker with Ray {self._ray.version} looks for the head")
        while True:
            self._queue.extend(self._events())
            while self._queue:
                self._state, actions = worker_step(self._state, self._queue.pop(0), self._grace)
                for action in actions:
                    if isinstance(action, LeaveCluster):
                        return action
                    self._do(action)
            self._wait()

    def close(self) -> None:
        """End Ray first, so that its work can move; the head sees this worker end last."""
        self._end_node(DRAIN if self._signals.stop_asked and self._head is not None else 1.0)
        if self._head is not None:
            self._head.close()
        self._selector.close()

    # --- Events ---------------------------------------------------------------------------------

    def _events(self) -> List[WorkerEvent]:
        """New events, but those of the link, which come into the queue themselves."""
        now = time.monotonic()
        if self._head is not None:
            self._head.tick(now)
        events = self._ray_events(now)
        stops = [number for number in self._signals.take() if number in STOPS]
        if stops or now >= self._next_look:
            events.append(self._look(now))  # first: whoever ends a run also ends its jobs
        return [*events, *map(StopSignal, stops)]

    def _hear(self, _head: Peer, message: Message) -> None:
        if message.get("do") == "ended":
            self._queue.append(HeadEnded(int(message.get("code", 0))))
        elif message.get("do") == "leaving" and self._head is not None:
            self._head.close()
            self._lost()

    def _lost(self) -> None:
        now = time.monotonic()
        self._head, self._pause, self._next_look = None, _FIRST_LOOK, now
        self._next_ask = _about(_ASK_FIRST)
        self._queue.append(HeadLost(now))

    def _ray_events(self, now: float) -> List[WorkerEvent]:
        if self._node is None:
            return []
        if self._node.has_ended():
            words = self._node.last_words()
            self._end_node(0.0)
            return [RayDown(now, words)]
        return [RayUp()] if not self._state.is_up and self._node.gcs() else []

    def _look(self, now: float) -> RendezvousRead:
        """Read the documents of the head. A store that cannot be read is tried again later."""
        self._pause = min(_LONGEST_LOOK, self._pause * _LOOK_FACTOR)
        self._next_look = now + (_END_EVERY if self._head is not None else self._pause)
        try:
            end = self._rendezvous.end_code()
            is_wanted = end is None and self._head is None
            head = self._rendezvous.head() if is_wanted else None
        except StoreError as error:
            self._trouble = str(error)
            return RendezvousRead(now, None, None, trouble=self._trouble)
        return RendezvousRead(now, head, end, self._is_over(head, now), self._trouble)

    def _is_over(self, head: Optional[HeadRecord], now: float) -> bool:
        """Whether the job of a missing head has ended. AWS Batch is asked seldom."""
        if self._head is not None or now < self._next_ask:
            return False
        self._next_ask = _about(_ASK_EVERY)
        try:
            self._batch = self._batch or BatchApi(self._environ)
            return is_head_over(self._batch, self._environ, head.run if head else "")
        except StoreError:
            return False  # not every job may ask

    def _wait(self) -> None:
        """Wait for an event, for a moment at most."""
        if self._queue:
            return
        starts = self._node is not None and not self._state.is_up
        until_look = max(0.0, self._next_look - time.monotonic())
        dispatch(self._selector, min(until_look, 0.1 if starts else 1.0))

    def _drain(self) -> None:
        try:
            os.read(self._signals.wake, 4096)
        except BlockingIOError:
            pass

    # --- Actions --------------------------------------------------------------------------------

    def _do(self, action: WorkerAction) -> None:
        if isinstance(action, Announce):
            self._say(action.text)
        elif isinstance(action, DialHead):
            self._dial(action.head)
        elif isinstance(action, StartRay):
            self._node = RayNode(self._ray, self._address, self._env)
            self._node.start_worker(action.head.gcs)
        elif isinstance(action, EndRay):
            self._end_node(1.0)
        elif isinstance(action, ReportJoined) and self._head is not None:
            self._say("joined the Ray cluster")
            self._head.send({"do": "joined"})

    def _dial(self, head: HeadRecord) -> None:
        why = unlike((head.ray, head.python), (self._ray.version, self._ray.python))
        try:
            link = join(head.address, head.control_port, self._token, self._info())
        except LinkClosed as closed:
            self._trouble = f"the head at {head.address}: {closed}"
            if closed.final or why:
                self._queue.append(HeadRefused(CONFIGURATION_ERROR, why or str(closed)))
            return
        beats = Heartbeats(BEAT, SILENT)
        self._queue.append(HeadConnected(time.monotonic(), head))
        self._head = Peer(link, self._selector, beats, self._hear, lambda *_: self._lost())
        self._head.start()

    def _info(self) -> Message:
        return {
            "key": self._environ.get("BATCHML_KEY", ""),
            "index": int(self._environ.get("AWS_BATCH_JOB_ARRAY_INDEX") or 0),
            "address": self._address,
            "ray": self._ray.version,
            "python": self._ray.python,
        }

    def _end_node(self, limit: float) -> None:
        """End Ray, and all that it started, within `limit` seconds."""
        if self._node is not None:
            self._node.end(limit)
            self._node = None


def _about(seconds: float) -> float:
    """The time about so many seconds from now: thousands of workers do not call at once."""
    return time.monotonic() + seconds * random.uniform(0.8, 1.6)


def _seconds(text: str, default: float) -> float:
    """A number of seconds that a user may have set."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return default
