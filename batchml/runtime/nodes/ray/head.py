"""The head of a Ray cluster: it runs Ray's head and the program, and admits the workers."""

from __future__ import annotations

import json
import selectors
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Callable, Dict, List, Optional, Set, Tuple

from batchml.runtime.entry.stopping import STOPS, Signals
from batchml.runtime.nodes.launcher import ASKED, VERDICT
from batchml.runtime.nodes.link.address import LOOPBACK, own_address
from batchml.runtime.nodes.link.connection import Heartbeats, Message, Peer, dispatch
from batchml.runtime.nodes.link.server import MemberServer, Refusal
from batchml.runtime.nodes.ray import rules
from batchml.runtime.nodes.ray.batch_api import BatchApi, attempts_of, is_last, unfinished
from batchml.runtime.nodes.ray.worker import (
    RayInstall,
    RayMissing,
    RayNode,
    describe_mismatch,
    find_ray,
    ray_variables,
)
from batchml.runtime.processes import descendants, send, shell_code
from batchml.runtime.processors import count_processors, thread_variables, with_counts
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR, STOPPED, TRY_ELSEWHERE
from batchml.runtime.protocol.launch import ENDED_BY_HEAD, LaunchPlan, WorkerGroup
from batchml.runtime.storage.store import StoreError

# --- The server to which the supervisors of workers connect ---------------------------------------


class WorkerServer:
    """The connected workers. Turns what they report into events."""

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
            token, self._selector, Heartbeats(rules.BEAT, rules.SILENT), self._admit,
            self._connected, self._hear, self._lost, self._refused, clock,
        )  # fmt: skip
        self._server.listen([(address, 0)])
        self.port = self._server.port
        self._versions = versions
        self._groups = groups
        self._workers: Dict[Peer, rules.WorkerId] = {}
        self._joined: Set[Peer] = set()  # workers whose Ray is part of the cluster
        self._events: List[rules.HeadEvent] = []
        self.refusals: List[str] = []  # lines for people

    @property
    def is_empty(self) -> bool:
        return not self._workers

    def wake_on(self, file: int, drain: Callable[[], None]) -> None:
        """Call `drain` when this descriptor can be read, and let `look` return then."""
        self._selector.register(file, selectors.EVENT_READ, drain)

    def look(self, now: float, wait: float = 0.0) -> List[rules.HeadEvent]:
        """The events since the last call. Waits for one, for at most `wait` seconds."""
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
        why = describe_mismatch(self._versions, (str(info.get("ray")), str(info.get("python"))))
        if not why:
            return None
        self.refusals.append(f"worker {self._worker(info)} cannot join: {why}")
        return Refusal(why, final=True)

    def _connected(self, peer: Peer) -> None:
        self._workers[peer] = self._worker(peer.info)

    def _worker(self, info: Message) -> rules.WorkerId:
        """Find the group by the key of its submission, with which the name of its job ends."""
        key = str(info.get("key"))
        names = (group.name for group in self._groups if key and group.job_name.endswith(key))
        name = next(names, "workers")
        return rules.WorkerId(name, int(info.get("index", 0)), str(info.get("address")))

    def _hear(self, peer: Peer, message: Message) -> None:
        if message.get("do") == "joined" and peer not in self._joined:
            self._joined.add(peer)
            self._events.append(rules.WorkerJoined(self._workers[peer]))

    def _lost(self, peer: Peer, silent: bool) -> None:
        worker = self._workers.pop(peer)
        had_joined = peer in self._joined
        self._joined.discard(peer)
        if had_joined and not self._has_joined(worker):
            self._events.append(rules.WorkerLeft(worker))

    def _has_joined(self, worker: rules.WorkerId) -> bool:
        """Whether a later attempt of the worker joined before the loss of this one was noticed."""
        return any(self._workers[peer].identity == worker.identity for peer in self._joined)

    def _refused(self, why: str) -> None:
        self.refusals.append(f"a connection was refused: {why}")


# --- The head -------------------------------------------------------------------------------------


START_LIMIT = 120.0  # seconds that Ray may take to start
FAREWELL_LIMIT = 10.0  # seconds that workers have to end before their jobs are terminated

Say = Callable[[str], None]  # writes a line for people


def run_head(
    command: Sequence[str],
    environ: Mapping[str, str],
    plan: LaunchPlan,
    token: str,
    signals: Signals,
    say: Say,
) -> rules.LeaveCluster:
    """Run the command with a Ray cluster.

    Raises StoreError if the store fails through which workers find the head.
    """
    ending = HeadEnd(environ, plan, signals, say)
    try:
        if shutil.which(command[0] if command else "", path=environ.get("PATH")) is None:
            why = f"cannot run {command[:1]}: no such command in this image."
            return ending.without_workers(rules.LeaveCluster(127, why))
        ray, address = find_ray(environ), own_address(environ) or LOOPBACK
        processors = count_processors(environ)
        env = with_counts({**environ, **ray_variables(environ, token, address)}, processors)
        node, why = start_ray(ray, address, env, signals)
        if node is None:
            code = STOPPED if signals.stop_signal else TRY_ELSEWHERE
            return ending.without_workers(rules.LeaveCluster(code, why))
        try:
            versions = ray.version, ray.python
            with closing(WorkerServer(address, token, versions, plan.groups)) as server:
                record = rules.HeadRecord(
                    ending.run, ending.attempt, address, int(node.gcs().rpartition(":")[2]),
                    server.port, ray.version, ray.python, time.time(),
                )  # fmt: skip
                other = ending.rendezvous.head()
                if other is not None and other.run == record.run and other.attempt > record.attempt:
                    why = f"attempt {other.attempt} of this head runs already"
                    return rules.LeaveCluster(TRY_ELSEWHERE, why)
                ending.rendezvous.publish(record)
                say(f"Ray {ray.version} runs on this head, {record.gcs}")
                own = {**thread_variables(env, processors), **env, "RAY_ADDRESS": record.gcs}
                program = RayProgram(command, own)
                loop = _HeadLoop(plan, node, server, program, signals, say)
                leave = loop.run()
                ending.announce(leave, loop)
                return leave
        finally:
            node.end(2.0)
    except StoreError:
        raise
    except (RayMissing, OSError) as error:
        return ending.without_workers(rules.LeaveCluster(CONFIGURATION_ERROR, str(error)))


def start_ray(
    ray: RayInstall, address: str, env: Mapping[str, str], signals: Signals
) -> Tuple[Optional[RayNode], str]:
    """Start Ray's head; return it, or why it does not start.

    Another Ray may take a port that was just found free, so it is tried several times.
    """
    words = ""
    for _ in range(rules.MOST_STARTS):
        node = RayNode(ray, address, env)
        node.start_head()
        until = time.monotonic() + START_LIMIT
        while not node.gcs() and not node.has_ended() and time.monotonic() < until:
            if signals.stop_signal:
                node.end(2.0)
                return None, "stopped before Ray was up"
            time.sleep(0.05)
        if node.gcs() and not node.has_ended():
            return node, ""
        words = node.last_lines()
        node.end(2.0)
    return None, f"Ray does not start on the head: {words}"


class RayProgram:
    """The process of the run's command."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environ = dict(environ)
        self._process: Optional[subprocess.Popen[bytes]] = None

    def start(self) -> Optional[rules.LeaveCluster]:
        try:
            self._process = subprocess.Popen(
                self._command, env=self._environ, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            return rules.LeaveCluster(126, f"cannot run {self._command[0]!r}: {error.strerror}")
        return None

    def code(self) -> Optional[int]:
        """Its exit code, as a shell reports it; None while it runs."""
        found = None if self._process is None else self._process.poll()
        return None if found is None else shell_code(found)

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            pid = self._process.pid
            send([pid, *descendants(pid)], number)


class _HeadLoop:
    """The loop of a head: it passes events to the rules, and takes their actions."""

    def __init__(
        self,
        plan: LaunchPlan,
        node: RayNode,
        server: WorkerServer,
        program: RayProgram,
        signals: Signals,
        say: Say,
    ) -> None:
        self.server = server
        self.node = node
        self.state = rules.begin_head(plan.groups, time.monotonic(), plan.start_within)
        self._program = program
        self._signals = signals
        self._say = say
        server.wake_on(signals.wake, signals.drain)

    def run(self) -> rules.LeaveCluster:
        pause = 0.0
        while True:
            for event in self._events(pause):
                self.state, actions = rules.head_step(self.state, event)
                for action in actions:
                    leave = self._do(action)
                    if leave is not None:
                        return leave
            left = self.state.until - time.monotonic()
            pause = 1.0 if self.state.is_running else min(1.0, max(0.0, left))

    def _events(self, pause: float) -> List[rules.HeadEvent]:
        """The events since the last call. Waits for one, for at most `pause` seconds."""
        found = self.server.look(time.monotonic(), pause)
        events: List[rules.HeadEvent] = []
        for number in self._signals.take():
            if number in STOPS:
                events.append(rules.StopSignal(number))
            else:
                self._program.signal(number)
        code = self._program.code()
        if code is not None:  # before the end of Ray, which may have received the signal as well
            return [*events, rules.ProgramEnded(code)]
        events += found
        while self.server.refusals:
            self._say(self.server.refusals.pop(0))
        if self.node.has_ended():
            events.append(rules.RayEnded(self.node.last_lines()))
        return [*events, rules.HeadTick(time.monotonic())]

    def _do(self, action: rules.HeadAction) -> Optional[rules.LeaveCluster]:
        if isinstance(action, rules.Announce):
            self._say(action.text)
        elif isinstance(action, rules.StartProgram):
            return self._program.start()
        elif isinstance(action, rules.PassSignal):
            self._program.signal(action.number)
        else:
            return action
        return None


class HeadEnd:
    """The end of a head: for good, which ends its workers, or to be started again by AWS Batch."""

    def __init__(
        self, environ: Mapping[str, str], plan: LaunchPlan, signals: Signals, say: Say
    ) -> None:
        self.run = environ.get("AWS_BATCH_JOB_ID", "")
        self.attempt = int(environ.get("AWS_BATCH_JOB_ATTEMPT") or 1)
        self.rendezvous = rules.HeadRendezvous.of(environ)
        self._asked = environ.get(VERDICT, "") + ASKED
        self._attempts = attempts_of(environ)
        self._batch = BatchApi(environ)
        self._groups = plan.groups
        self._signals = signals
        self._say = say

    def without_workers(self, leave: rules.LeaveCluster) -> rules.LeaveCluster:
        """End before any worker could join."""
        code = self._code(leave)
        if self._is_last(code):
            self._write(code)
            self._end_jobs(self._groups)
        return leave

    def announce(self, leave: rules.LeaveCluster, loop: _HeadLoop) -> None:
        """Tell the workers how the head ends, and wait until they have ended as well."""
        code, server = self._code(leave), loop.server
        if not self._is_last(code):
            server.send_all({"do": "leaving", "code": code})
            return
        self._write(code)
        server.send_all({"do": "ended", "code": code})
        loop.node.terminate()
        until = time.monotonic() + FAREWELL_LIMIT
        while not server.is_empty and time.monotonic() < until:
            server.look(time.monotonic(), 0.2)
        some_stay = not server.is_empty
        self._end_jobs(
            [group for group in self._groups if some_stay or rules.is_incomplete(loop.state, group)]
        )

    def _code(self, leave: rules.LeaveCluster) -> int:
        """The exit code of the run: the one that the entry wrote for a stop, else `leave`'s."""
        if not self._signals.stop_signal:
            return leave.code
        try:
            with open(self._asked, encoding="utf-8") as file:
                return int(json.load(file)["code"])
        except (OSError, ValueError, TypeError, KeyError):
            return STOPPED

    def _is_last(self, code: int) -> bool:
        """Whether AWS Batch will not start this head again."""
        is_stopped = bool(self._signals.stop_signal)
        if code == 0 and not is_stopped:
            return True
        try:
            job = self._batch.describe(self.run)
        except StoreError:
            job = None
        own_code = None if is_stopped and code == STOPPED else code
        return is_last(job, self.attempt, own_code, self._attempts)

    def _write(self, code: int) -> None:
        try:
            self.rendezvous.end(code, time.time())
        except StoreError as error:
            self._say(
                f"the end of the head could not be recorded for workers in the queue: {error}"
            )

    def _end_jobs(self, groups: Sequence[WorkerGroup]) -> None:
        """Terminate the jobs of groups whose workers may wait in the queue, or hang."""
        for group in groups:
            try:
                for job in unfinished(self._batch.list_by_name(group.queue, group.job_name)):
                    self._batch.terminate(job, ENDED_BY_HEAD)
                    self._say(f"the job of group {group.name} was terminated with its head")
            except StoreError as error:
                self._say(
                    f"the job of group {group.name} could not be ended ({error}): workers that "
                    f"still wait end when they start"
                )
