"""The supervisor of one node: it starts the ranks, obeys the main node, and ends with the exit code
that the main node sends.

The entry of the container starts the supervisor instead of the command, as the module of the launch
kind (`nodes/torchrun.py`, `nodes/mpi/main.py`). On the main node the supervisor also contains the
coordinator, which leads all nodes. It is one loop without threads. docs/multi-node.md describes it
for users.
"""

from __future__ import annotations

import os
import selectors
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Callable, List, NamedTuple, Optional

from batchml.runtime.entry.stopping import STOPS, Signals
from batchml.runtime.health.checks import HostCheck
from batchml.runtime.health.efa import instance_type
from batchml.runtime.nodes.launcher import UNFIT, VERDICT
from batchml.runtime.nodes.link.address import (
    LOOPBACK,
    OWN_ADDRESS,
    NodePosition,
    interface_of,
    own_address,
)
from batchml.runtime.nodes.link.connection import Heartbeats, Message, dispatch
from batchml.runtime.nodes.link.uplink import ConnectLimits, Uplink
from batchml.runtime.nodes.supervisor.agent import AgentSettings, NodeAgent, SupervisorExit
from batchml.runtime.nodes.supervisor.checkpoint_fetch import needs_fetch
from batchml.runtime.nodes.supervisor.coordinator import Coordinator
from batchml.runtime.nodes.supervisor.group import GroupWatch
from batchml.runtime.nodes.supervisor.network_check import NetworkCheck, is_checked
from batchml.runtime.nodes.supervisor.ranks import RankContext, RankProcesses
from batchml.runtime.nodes.supervisor.restarts import RestartHistory
from batchml.runtime.nodes.supervisor.rules import SupervisorLimits
from batchml.runtime.nodes.supervisor.settings import (
    StopOrder,
    SupervisorTimes,
    command_environment,
    count_gpus,
    count_processes,
    ranks_grace,
    read_stop,
    report_limit,
    versions,
    without_deep_checks,
    write_verdict,
)
from batchml.runtime.nodes.supervisor.spares import are_wanted
from batchml.runtime.package import drop_working_folder
from batchml.runtime.processes import become_reaper, boot_id, die_with_parent, shell_code
from batchml.runtime.processors import count_processors
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR, TRY_ELSEWHERE
from batchml.runtime.protocol.launch import TOKEN, LaunchPlan, RankCommand
from batchml.runtime.protocol.log_marks import LAST_LINES
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.store import BRIEF

_BEAT_EVERY = 0.5  # seconds between two signs of life of the main node's own ranks
_FAREWELL_LIMIT = 3.0  # seconds that the other nodes have to end before the main node does


class ProgramMissing(Exception):
    """The image lacks a program that the launch kind needs; the text says how to install it."""


class SupervisorKind(NamedTuple):
    """The parts in which the launch kinds differ."""

    # words of the command, number of nodes, environment -> what to run. Raises ValueError and
    # ProgramMissing
    read_command: Callable[[Sequence[str], int, Mapping[str, str]], RankCommand]
    make_ranks: Callable[[RankContext], RankProcesses]
    launcher: str = ""  # the program that starts all ranks; empty: each supervisor starts its own


class Supervisor:
    """The supervisor of a node. `run` returns how this process ends.

    `stream` is the log. `temporary` is a folder that is removed with the attempt.
    """

    def __init__(
        self,
        kind: SupervisorKind,
        command: Sequence[str],
        environ: Mapping[str, str],
        stream: BinaryIO,
        temporary: str,
    ) -> None:
        self._kind = kind
        self._stream = stream
        self._environ = environ
        self._env = RuntimeEnv.read(environ)
        self._position = NodePosition.read(environ)
        self._times = SupervisorTimes.read(environ)
        plan = LaunchPlan.read(environ)
        assert plan is not None
        self._plan = plan
        if self._position.nodes > 1 and not self._position.identity.token:
            raise ValueError(
                f"{TOKEN} is not set, but the nodes of a run need it to recognize each other: "
                f"submit with batchml"
            )
        self._command = kind.read_command(command, self._position.nodes, environ)
        is_alone = self._position.nodes == 1  # its ranks need no network
        address = LOOPBACK if is_alone else own_address(environ)
        if not address:
            raise OSError(
                "this host has no address that other nodes could reach: check its network, or set "
                f"{OWN_ADDRESS}"
            )
        devices = os.listdir("/dev") if os.path.isdir("/dev") else []
        processes = count_processes(plan.processes or self._command.processes, environ, devices)
        fetches = needs_fetch(environ, self._position.node)
        self._selector = selectors.DefaultSelector()
        self._signals = Signals()
        settings = AgentSettings(
            node=self._position.node,
            processes=processes,
            command=self._command.words,
            environ=command_environment(environ),
            run=self._position.identity.job or "run",
            temporary=temporary,
            output=self._env.output_dir,
            metrics=self._env.metrics,
            stop_file=self._env.stop_file,
            processors=count_processors(environ),
            interface=interface_of(address),
            fetch=environ if fetches else {},
            fetch_within=self._times.fetch_within,
        )
        self._ranks = kind.make_ranks(
            RankContext(
                self._selector, self.write, self._tell, temporary, self._env.output_dir, plan.logs,
                self._position.identity.token, self._times.spares, are_wanted(environ),
            )
        )  # fmt: skip
        group = None
        if not (self._position.node or kind.launcher):
            group = GroupWatch(self._notice, self._times.alone)
        self._agent = NodeAgent(
            settings, self._ranks, self.say, self._tell, self._gate, self._leave_host, group
        )
        self._info: Message = {
            "index": self._position.node,
            "job": self._position.identity.job,
            "attempt": self._position.identity.attempt,
            "processes": processes,
            "address": address,
            "host": environ.get("BATCHML_HOST_ID", "") or address,
            "instance": f"{boot_id()}/{os.getpid()}/{os.urandom(4).hex()}",
            "versions": versions(),
            "unfit": environ.get(UNFIT, ""),
            "brings": fetches,
            "gpus": count_gpus(environ, devices),
            "type": instance_type(environ),
        }
        self._coordinator: Optional[Coordinator] = None
        self._uplink: Optional[Uplink] = None
        self._last_beat = 0.0
        self._unreported: Optional[SupervisorExit] = None  # a stop that the main node does not know
        self._unreported_until = float("inf")  # when to end without having reported it
        self._reports: List[Message] = []  # of the main node's own agent

    def run(self) -> SupervisorExit:
        become_reaper()
        self._signals.listen()
        self._selector.register(self._signals.wake, selectors.EVENT_READ, self._signals.drain)
        for flag in self._command.ignored:
            self.say(f"torchrun's {flag} is ignored: batchml sets it")
        differs = self._command.processes not in (0, self._plan.processes)
        if self._plan.processes and differs and not self._kind.launcher:
            self.say("torchrun's --nproc-per-node is ignored: the job sets processes_per_node")
        try:
            self._connect()
            while not self._has_ended():
                self._turn()
            self._say_end()
            self._close_links()
        finally:
            self._signals.ignore()
        leaving = self._agent.leaving
        assert leaving is not None
        return leaving

    def write(self, lines: Sequence[bytes]) -> None:
        self._stream.write(b"".join(line + b"\n" for line in lines))
        self._stream.flush()

    def say(self, text: str) -> None:
        """Write one line for people."""
        self.write([f"batchml: {text}".encode("utf-8", "replace")])

    def _notice(self, text: str) -> None:
        """Write one line that is no reason for an end."""
        self.write([f"batchml notice: {text}".encode("utf-8", "replace")])

    # --- The loop ------------------------------------------------------------------------------

    def _connect(self) -> None:
        times, beats = self._times, Heartbeats(self._times.beat, self._times.silent)
        if self._position.node:
            limits = ConnectLimits(self._plan.start_within, times.regroup, times.gone)
            self._uplink = Uplink(
                self._position.main_node, self._info, self._environ.get(OWN_ADDRESS, ""), beats,
                limits, self._selector, self._agent.order, self._lost_main, self.say,
            )  # fmt: skip
            return
        env = self._env
        store = open_store(env.store, self._environ, limits=BRIEF) if env.store else None
        run_limits = SupervisorLimits(
            nodes=self._position.nodes, attempt=env.attempt,
            start_within=self._plan.start_within, regroup=times.regroup, gone=times.gone,
            hang_after=self._plan.hang_after, grace=ranks_grace(env.grace),
            end_grace=times.end_grace, launcher=self._kind.launcher,
            checks_network=is_checked(
                self._environ, self._position.nodes, bool(self._kind.launcher)
            ),
        )  # fmt: skip
        self._coordinator = Coordinator(
            self._position.identity, self._info, run_limits, beats, self._plan.bandwidth,
            env.checkpoint_dir, RestartHistory(store, env.checkpoint_dir), self._selector,
            self._agent.order, self.say, NetworkCheck(self._environ, self.say, self._notice),
            are_wanted(self._environ),
        )  # fmt: skip
        self._coordinator.start(str(self._info["address"]), time.monotonic())

    def _turn(self) -> None:
        now = time.monotonic()
        pause = self._agent.until_due(now)
        for part in (self._coordinator, self._uplink):
            if part is not None:
                pause = min(pause, part.until_due(now))
        if self._reports:
            pause = 0.0
        if self._unreported is not None:
            pause = min(pause, max(0.0, self._unreported_until - now))
        dispatch(self._selector, pause)
        self._take_signals()
        self._agent.children_ended()
        now = time.monotonic()
        self._agent.tick(now)
        if self._agent.is_stopped_by_file():
            stop = StopOrder(0, "the stop file was made", ranks_grace(self._env.grace))
            self._request_stop(stop, softly=True)
        silence = self._agent.seconds_since_sign_of_life(now)
        if self._coordinator is not None:
            if now - self._last_beat >= _BEAT_EVERY:
                self._last_beat = now
                self._tell({"do": "beat", "pulse": silence})
            while self._reports:
                self._coordinator.hear(0, self._reports.pop(0))
            self._coordinator.tick(now)
        if self._uplink is not None:
            self._uplink.tick(now, not self._agent.is_busy, {"pulse": silence})
            self._leave_unreported(now)
            if self._uplink.given_up:
                leaving = SupervisorExit(TRY_ELSEWHERE, self._uplink.given_up, True)
                self._agent.leave(leaving, self._times.end_grace)

    def _has_ended(self) -> bool:
        return self._agent.leaving is not None and not self._agent.is_busy

    def _take_signals(self) -> None:
        for number in self._signals.take():
            if number in STOPS:
                self._request_stop(read_stop(self._environ, number, self._env.grace))
            else:
                self._agent.pass_on(number)

    def _request_stop(self, stop: StopOrder, softly: bool = False) -> None:
        """Stop all nodes, or this node alone if the main node cannot be reached."""
        report = {"do": "asked", **stop._asdict(), "softly": softly}
        if self._uplink is None or self._uplink.is_connected:
            self._tell(report)
            return
        self._uplink.send_later(report)
        if not softly and self._unreported is None:
            self._agent.make_stop_file()
            self._unreported = SupervisorExit(stop.code, stop.why, True, is_untold=True)
            self._unreported_until = time.monotonic() + report_limit(True, stop.grace)

    def _leave_unreported(self, now: float) -> None:
        """End this node after a stop that could not be reported to the main node."""
        if self._unreported is None or self._uplink is None or self._uplink.is_connected:
            return  # with a link the stop was reported, and orders follow
        if not self._agent.is_busy:
            limit = now + report_limit(False, self._env.grace)
            self._unreported_until = min(self._unreported_until, limit)
        if now >= self._unreported_until:
            self._agent.leave(self._unreported, self._times.end_grace)

    def _tell(self, message: Message) -> None:
        if self._uplink is not None:
            self._uplink.send(message)
        else:
            self._reports.append(message)

    def _lost_main(self) -> None:
        """End the ranks: without their peers they cannot save any more."""
        stopping = self._agent.stopping
        if stopping is not None:
            self._agent.leave(stopping, ranks_grace(self._env.grace))
        elif self._agent.leaving is None:
            self.say("the main node does not answer any more, so the ranks of this node are ended")
            self._agent.end(self._times.end_grace)

    def _gate(self) -> Optional[str]:
        from batchml.runtime.health.gate import check_host

        environ = without_deep_checks(self._environ)
        return check_host(self._env, environ, self._write_line)

    def _leave_host(self, checks: Sequence[HostCheck]) -> str:
        from batchml.runtime.health.gate import leave_host

        return leave_host(self._env, self._environ, self._write_line, checks)

    def _write_line(self, line: str) -> None:
        self.write([line.encode("utf-8", "replace")])

    # --- The end -------------------------------------------------------------------------------

    def _say_end(self) -> None:
        leaving = self._agent.leaving
        if leaving is None or not leaving.why:
            return
        # The main node's log tells why the run ended; there a rank of another node is not seen.
        is_main = self._coordinator is not None
        if leaving.tail and is_main and not self._ranks.has_shown(leaving.tail):
            self.say(LAST_LINES)
            self.write([f"  {line}".encode("utf-8", "replace") for line in leaving.tail])
        self.say(leaving.why)

    def _close_links(self) -> None:
        """Close the links. The main node ends last: at its end AWS Batch kills all other nodes."""
        if self._uplink is not None:
            self._uplink.close()
        if self._coordinator is not None:
            until = time.monotonic() + _FAREWELL_LIMIT
            while not self._coordinator.is_alone() and time.monotonic() < until:
                dispatch(self._selector, 0.2)
            self._coordinator.close()


def supervise(
    kind: SupervisorKind, arguments: Sequence[str], environ: Mapping[str, str], stream: BinaryIO
) -> int:
    """Supervise a node, and return the exit code.

    If the runtime chose that code, and not the program, the verdict file says so.
    """
    command = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    temporary = ""
    try:
        temporary = tempfile.mkdtemp(
            prefix="nodes-", dir=os.path.dirname(environ.get(VERDICT, "")) or None
        )
        leaving = Supervisor(kind, command, environ, stream, temporary).run()
    except ProgramMissing as error:
        leaving = _refuse(stream, 127, str(error))
    except ValueError as error:
        leaving = _refuse(stream, CONFIGURATION_ERROR, str(error))
    except OSError as error:
        leaving = _refuse(stream, TRY_ELSEWHERE, f"this node's supervisor cannot work: {error}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    stream.flush()
    if leaving.by_runtime:
        write_verdict(environ, leaving.code, leaving.why, leaving.is_untold)
    return shell_code(leaving.code)


def _refuse(stream: BinaryIO, code: int, why: str) -> SupervisorExit:
    stream.write(f"batchml: {why}\n".encode())
    return SupervisorExit(code, why, True, is_untold=True)


def main(kind: SupervisorKind) -> None:
    """Run the process of a supervisor. Never returns: Python's exit would reset signal handlers."""
    code = 70  # after a mistake of our own
    die_with_parent(os.getppid())()
    drop_working_folder()
    try:
        code = supervise(kind, sys.argv[1:], os.environ, sys.stdout.buffer)
    except BrokenPipeError:
        code = TRY_ELSEWHERE
    except BaseException as error:
        traceback.print_exc()
        why = f"an error in batchml itself: {type(error).__name__}: {error}"
        write_verdict(os.environ, code, why, is_untold=True)
    finally:
        sys.stdout.flush()
        os._exit(code)
