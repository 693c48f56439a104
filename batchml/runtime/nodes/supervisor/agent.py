"""The agent of one node: it starts and ends ranks as the main node orders, and reports on them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Callable, List, NamedTuple, Optional, Tuple

from batchml.runtime.entry.stopping import make_stop_file
from batchml.runtime.health.checks import HostCheck
from batchml.runtime.nodes.link.connection import Message
from batchml.runtime.nodes.supervisor.group import GroupWatch
from batchml.runtime.nodes.supervisor.network_check import NetworkProbe
from batchml.runtime.nodes.supervisor.ranks import RankProcesses
from batchml.runtime.nodes.supervisor.settings import RankLayout
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR, TRY_ELSEWHERE
from batchml.runtime.telemetry.usage import memory_kills

_STACKS_LIMIT = 1.0  # seconds that ranks have to write their stacks
_CHECK_EVERY = 1.0  # seconds between two checks for signs of life
_MAX_STACK_LINES = 400  # lines of a rank's stacks in the log; the file in the outputs has all


class AgentSettings(NamedTuple):
    """The node, its run, and the command of its ranks."""

    node: int  # 0: the main node
    processes: int  # ranks on this node
    command: Tuple[str, ...]
    environ: Mapping[str, str]  # of the ranks
    run: str  # the id of the multi-node job
    temporary: str  # a folder that is removed with the attempt
    output: str  # the folder of outputs
    metrics: str  # the metrics file, whose changes are signs of life
    stop_file: str
    processors: int
    interface: str  # the network interface that has this node's address
    fetch: Mapping[str, str] = {}  # environment of checkpoint_fetch.py, on nodes that need it
    fetch_within: float = 600.0  # seconds


class SupervisorExit(NamedTuple):
    """How the supervisor ends, once its ranks are gone."""

    code: int
    why: str
    by_runtime: bool  # the runtime chose the code, not the program
    tail: Tuple[str, ...] = ()  # the last lines of the rank that caused the end
    is_untold: bool = False  # the main node does not know of this end


class NodeAgent:
    """The agent of one node. `order` receives the orders of the main node; the owner calls `tick`.

    `tell` sends a message to the main node. `gate` checks the host, and returns why it is unfit to
    run ranks, or None; it raises OSError if too many hosts were unfit. `leave_host` records that
    this host is unfit, returns the reason, and raises the same. `group` watches whether the ranks
    connect to each other: on the main node, unless a launcher starts them.
    """

    def __init__(
        self,
        settings: AgentSettings,
        ranks: RankProcesses,
        say: Callable[[str], None],
        tell: Callable[[Message], None],
        gate: Callable[[], Optional[str]],
        leave_host: Callable[[Sequence[HostCheck]], str],
        group: Optional[GroupWatch] = None,
    ) -> None:
        self._settings = settings
        self._say = say
        self._tell = tell
        self._gate, self._leave_host = gate, leave_host
        self._probe = NetworkProbe(
            ranks, settings.environ, settings.interface, settings.temporary, tell
        )
        self._group = group
        self._ranks = ranks
        self._generation = 0
        self._is_busy = False  # a generation runs on this node, and its end was not reported
        self._is_ending = False
        self._waiting: Optional[RankLayout] = None  # ranks to start once all nodes are ready
        self._checks_host = False  # the host is checked before the end is reported
        self._term_at = self._kill_at = float("inf")
        self._grace = 0.0
        self._checked_at = 0.0
        self._memory_kills = 0  # `memory_kills()` when the ranks were started
        self._last_sign = time.monotonic()  # when a rank last gave a sign of life other than output
        self._observed: Tuple[object, ...] = ()  # size and time of the files that ranks change
        self._has_stop_file = False
        self.stopping: Optional[SupervisorExit] = None  # a stop was ordered: the run ends
        self.leaving: Optional[SupervisorExit] = None  # how the supervisor ends, after the ranks

    # --- Orders -----------------------------------------------------------------------------------

    def order(self, message: Message) -> None:
        """Carry out an order of the main node."""
        kind = message["do"]
        if kind == "begin":
            self._probe.cancel()
            self._begin(message)
        elif kind == "check_network":
            self._probe.start(message, self._settings.node, time.monotonic())
        elif kind == "end_network_check":
            self._probe.end()
        elif kind == "leave_network_check":
            self._probe.cancel()
        elif kind == "leave_host":
            self._tell_unfit([HostCheck(*check) for check in message["checks"]])
        elif kind == "go" and self._waiting is not None:
            layout, self._waiting = self._waiting, None
            self._start(layout)
        elif kind == "end":
            self.end(message["grace"], bool(message.get("stacks")), checks_host=True)
        elif kind == "stop":
            self._stop(message)
        elif kind == "exit":
            tail = tuple(message.get("tail", ()))
            self.leave(
                SupervisorExit(message["code"], message["why"], message["by_runtime"], tail),
                message["grace"],
            )
        else:
            self._ranks.hear(message)

    def end(self, grace: float, stacks: bool = False, checks_host: bool = False) -> None:
        """End the ranks, and report once none of their processes is left.

        `stacks`: they first write their stacks. `checks_host`: check the host before the report.
        """
        now = time.monotonic()
        self._checks_host = checks_host
        if self._is_ending:
            self._kill_at = min(self._kill_at, now + grace)
            return
        self._is_ending = True
        self._waiting = None
        self._grace = grace
        if not self._is_busy:
            self._tell_ended()
            return
        self._term_at = now
        if stacks and self._ranks.living():
            self._ask_for_stacks()
            self._term_at = now + _STACKS_LIMIT
        self.tick(now)

    def leave(self, leaving: SupervisorExit, grace: float) -> None:
        """End the supervisor, after the ranks."""
        if self.leaving is None:
            self.leaving = leaving
            self._ranks.end_spares()
            if self._is_busy:
                self.end(grace)

    def _begin(self, message: Message) -> None:
        members = message["nodes"]
        layout = RankLayout(
            node=self._settings.node,
            nodes=len(members),
            first=sum(count for index, count, _ in members if index < self._settings.node),
            here=self._settings.processes,
            world=sum(count for _, count, _ in members),
            master=message["master"],
            port=message["port"],
            generation=message["generation"],
            restarts=message["restarts"],
            run=self._settings.run,
            processors=self._settings.processors,
            interface=self._settings.interface,
            members=tuple((address, count) for _, count, address in members),
            control_port=message["control"],
            next_port=message.get("next_port", 0),
        )
        self._generation = layout.generation
        self._is_ending = False
        self._is_busy = True
        self._last_sign = time.monotonic()
        if not message["waits"]:
            self._start(layout)
            return
        self._waiting = layout
        if self._settings.fetch:
            self._fetch(message["saved"])

    def _fetch(self, saved: Message) -> None:
        """Fetch the checkpoints of rank 0 before any rank looks for them or saves new ones."""
        path = os.path.join(self._settings.temporary, "saved")
        generation = self._generation

        def on_exit(code: int) -> None:
            if self._is_ending:
                return
            if code == 0:
                self._tell({"do": "ready", "generation": generation})
                return
            why = f"checkpoint_fetch ended with {code}"
            if code == TRY_ELSEWHERE:
                with open(path, encoding="utf-8") as file:
                    why = file.read()
            self._report_failed_start(TRY_ELSEWHERE, why)

        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({**saved, "limit": self._settings.fetch_within}, file)
            self._ranks.run_first(
                [sys.executable, "-m", "batchml.runtime.nodes.supervisor.checkpoint_fetch", path],
                self._settings.fetch,
                on_exit,
            )
        except OSError as error:
            self._report_failed_start(TRY_ELSEWHERE, str(error))

    def _start(self, layout: RankLayout) -> None:
        self._last_sign = time.monotonic()
        killed_spares = self._ranks.killed_spares()
        self._memory_kills = memory_kills() - killed_spares
        try:
            self._ranks.start(self._settings.command, self._settings.environ, layout)
        except (OSError, ValueError) as error:
            missing = isinstance(error, FileNotFoundError)
            words = "no such command in this image" if missing else str(error)
            why = f"cannot run {self._settings.command[0]!r}: {words}"
            self._report_failed_start(127 if missing else 126, why)
            return
        if self._group is not None:
            self._group.begin(layout, self._last_sign)

    def _report_failed_start(self, code: int, why: str) -> None:
        self._is_busy, self._waiting = False, None
        self._tell({"do": "not_begun", "code": code, "why": why})

    def _stop(self, message: Message) -> None:
        self.make_stop_file()
        if message["softly"]:
            return
        self.stopping = SupervisorExit(message["code"], message["why"], True)
        self._ranks.end_spares()
        self.end(message["grace"])

    def make_stop_file(self) -> None:
        """Let the ranks know that they have to stop."""
        if not self._has_stop_file and self._settings.stop_file:
            self._has_stop_file = True
            make_stop_file(self._settings.stop_file)

    # --- Events -----------------------------------------------------------------------------------

    def children_ended(self) -> None:
        """A child process has ended: a rank, or a process that a rank left behind."""
        for end in self._ranks.reap():
            killed = end.code == -signal.SIGKILL and not end.was_sent
            others = self._memory_kills + self._ranks.killed_spares()
            is_memory = killed and memory_kills() > others
            self._tell({
                "do": "exited", "generation": self._generation, "rank": end.rank,
                "code": end.code, "tail": list(end.tail) if end.code else [],
                "stamp": end.stamp, "was_sent": end.was_sent, "is_memory": is_memory,
            })  # fmt: skip
        if self._is_ending:
            self._finish()

    def pass_on(self, number: int) -> None:
        """Send the ranks a signal that does not request a stop."""
        self._ranks.signal(number)

    def until_due(self, now: float) -> float:
        """Seconds until `tick` has something to do."""
        due = min(self._checked_at + _CHECK_EVERY, self._term_at, self._kill_at)
        return max(0.0, due - now)

    def tick(self, now: float) -> None:
        if now >= self._term_at:
            self._term_at = float("inf")
            self._kill_at = min(self._kill_at, now + self._grace)
            self._show_stacks()
            self._ranks.signal(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = now + 0.1  # again: a process may have forked meanwhile
            self._ranks.signal(signal.SIGKILL)
        if self._is_ending and self._is_busy:
            self.children_ended()
        self._probe.tick(now)
        if now - self._checked_at >= _CHECK_EVERY:
            self._checked_at = now
            self._check_files(now)
            self._ranks.tick(now)
            if self._group is not None and not self._is_ending and self._ranks.living():
                self._group.tick(now, now - self.seconds_since_sign_of_life(now))

    def seconds_since_sign_of_life(self, now: float) -> float:
        """Seconds since the last sign of life of a rank on this node."""
        if self._waiting is not None:
            return 0.0
        return max(0.0, now - max(self._last_sign, self._ranks.last_output))

    def is_stopped_by_file(self) -> bool:
        """Whether another process has made the stop file. True at most once."""
        if self._has_stop_file or not self._settings.stop_file:
            return False
        self._has_stop_file = os.path.exists(self._settings.stop_file)
        return self._has_stop_file

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    def _check_files(self, now: float) -> None:
        files = [self._settings.metrics, *self._ranks.progress_files()]
        observed = tuple(map(_size_and_time, files))
        if observed != self._observed:
            self._observed = observed
            self._last_sign = now

    def _finish(self) -> None:
        if not self._is_busy or self._term_at != float("inf") or not self._ranks.clear():
            return
        self._is_busy = False
        self._kill_at = float("inf")
        self._tell_ended()

    def _tell_unfit(self, checks: Sequence[HostCheck]) -> None:
        try:
            self._tell({"do": "unfit", "why": self._leave_host(checks)})
        except OSError as error:  # so many hosts were unfit that no other host is tried
            self._report_failed_start(CONFIGURATION_ERROR, str(error))

    def _tell_ended(self) -> None:
        unfit = None
        if self._checks_host and self.leaving is None:
            try:
                unfit = self._gate()
            except OSError as error:  # so many hosts were unfit that no other host is tried
                self._report_failed_start(CONFIGURATION_ERROR, str(error))
                return
        self._tell({"do": "ended", "generation": self._generation, "unfit": unfit or ""})

    # --- Stacks of ranks that hang ----------------------------------------------------------------

    def _ask_for_stacks(self) -> None:
        living = self._ranks.living()
        py_spy = shutil.which("py-spy", path=self._settings.environ.get("PATH"))
        for rank, pid in living:
            if py_spy:
                self._run_py_spy(py_spy, rank, pid)
            try:
                os.kill(pid, signal.SIGUSR1)
            except OSError:
                continue

    def _run_py_spy(self, py_spy: str, rank: int, pid: int) -> None:
        """Add the stacks that py-spy finds, if it may read the process.

        It needs a capability that containers of AWS Batch do not have.
        """
        try:
            done = subprocess.run(
                [py_spy, "dump", "--nonblocking", "--pid", str(pid)], timeout=3.0,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return
        if done.returncode == 0 and done.stdout:
            with open(self._ranks.stacks_file(rank), "ab") as file:
                file.write(done.stdout)

    def _show_stacks(self) -> None:
        for rank, _ in self._ranks.living():
            path = self._ranks.stacks_file(rank)
            try:
                with open(path, encoding="utf-8", errors="replace") as file:
                    lines: List[str] = file.read().splitlines()
            except OSError:
                continue
            if not lines:
                continue
            self._say(f"rank {rank} was ended while its code was at these lines:")
            for line in lines[:_MAX_STACK_LINES]:
                self._say(f"  [r{rank}] {line}")
            if self._settings.output:
                name = f"rank-{rank}.generation-{self._generation}.stacks"
                try:
                    shutil.copy(path, os.path.join(self._settings.output, "ranks", name))
                except OSError:
                    pass  # the log has them


def _size_and_time(path: str) -> object:
    """Values that change whenever a file changes; None without the file."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns
