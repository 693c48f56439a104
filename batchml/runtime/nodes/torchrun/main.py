"""A supervisor of one node of a gang.

`python -m batchml.runtime.nodes.torchrun.main -- COMMAND ...`

The entry of the container starts it instead of the command when the run's plan is of the kind
torchrun. It starts the ranks itself, with all the variables that `torchrun` sets; on the main node
it also leads the gang. One loop, no threads. docs/multi-node.md
"""

from __future__ import annotations

import os
import selectors
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Optional

from batchml.runtime.entry.stopping import STOPS, Signals
from batchml.runtime.nodes.torchrun.agent import Leaving, Member, Settings
from batchml.runtime.nodes.torchrun.checkpoint_fetch import brings
from batchml.runtime.nodes.torchrun.child import UNFIT, VERDICT
from batchml.runtime.nodes.torchrun.coordinator import Beats, Coordinator
from batchml.runtime.nodes.torchrun.link import Message
from batchml.runtime.nodes.torchrun.rank_env import (
    LOOPBACK,
    cores_here,
    interface_of,
    own_address,
    processes_here,
)
from batchml.runtime.nodes.torchrun.ranks import dies_with
from batchml.runtime.nodes.torchrun.restarts import History
from batchml.runtime.nodes.torchrun.rules import Limits
from batchml.runtime.nodes.torchrun.settings import (
    BadCommand,
    Stop,
    Times,
    Where,
    asked_for,
    quickly,
    rank_base,
    rank_command,
    ranks_grace,
    until_untold,
    versions,
    write_verdict,
)
from batchml.runtime.nodes.torchrun.uplink import Patience, Uplink
from batchml.runtime.processes import become_reaper, boot_id
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR, TRY_ELSEWHERE
from batchml.runtime.protocol.launch import TOKEN, Plan
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import BRIEF, open_store

_BEAT = 0.5  # seconds between two signs of life of the main node's own ranks
_FAREWELL = 3.0  # seconds that the others have to go before the main node does


class Supervisor:
    """All of one node. `run` returns what the process ends with."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], stream: BinaryIO, temporary: str
    ) -> None:
        self._stream = stream
        self._environ = environ
        self._env = RuntimeEnv.read(environ)
        self._where = Where.read(environ)
        self._times = Times.read(environ)
        plan = Plan.read(environ)
        assert plan is not None
        self._plan = plan
        if self._where.nodes > 1 and not self._where.identity.token:
            raise ValueError(f"{TOKEN} is missing, by which the nodes of a run know each other")
        found = rank_command(
            command, self._where.nodes, lambda name: shutil.which(name, path=environ.get("PATH"))
        )
        self._found = found
        alone = self._where.nodes == 1  # and its ranks need no network
        address = LOOPBACK if alone else own_address(environ, self._where.main)
        if not address:
            raise OSError(
                "this host has no address that other nodes could reach: look at its network, or "
                "set BATCHML_NODE_ADDRESS"
            )
        devices = os.listdir("/dev") if os.path.isdir("/dev") else []
        processes = processes_here(plan.processes or found.processes, environ, devices)
        self._selector = selectors.DefaultSelector()
        self._signals = Signals()
        settings = Settings(
            node=self._where.node,
            nodes=self._where.nodes,
            processes=processes,
            address=address,
            command=found.words,
            environ=rank_base(environ),
            logs=plan.logs,
            run=self._where.identity.job or "run",
            temporary=temporary,
            output=self._env.output_dir,
            metrics=self._env.metrics,
            stop_file=self._env.stop_file,
            cores=cores_here(environ),
            interface=interface_of(address),
            bring=environ if brings(environ, self._where.node) else {},
            bring_within=self._times.bring,
        )
        self._member = Member(
            settings, self._selector, self.write, self.say, self._tell, self._gate
        )
        self._about: Message = {
            "index": self._where.node,
            "job": self._where.identity.job,
            "attempt": self._where.identity.attempt,
            "processes": processes,
            "address": address,
            "source": environ.get("BATCHML_NODE_ADDRESS", ""),
            "host": environ.get("BATCHML_HOST_ID", "") or address,
            "instance": f"{boot_id()}/{os.getpid()}/{os.urandom(4).hex()}",
            "versions": versions(),
            "unfit": environ.get(UNFIT, ""),
            "brings": brings(environ, self._where.node),
        }
        self._coordinator: Optional[Coordinator] = None
        self._uplink: Optional[Uplink] = None
        self._beat = 0.0
        self._alone: Optional[Leaving] = None  # a stop that the main node was not told of
        self._alone_at = float("inf")
        self._told: "list[Message]" = []  # of the main node's own member, still to be heard

    def run(self) -> Leaving:
        become_reaper()
        self._signals.listen()
        self._selector.register(self._signals.wake, selectors.EVENT_READ, self._wake)
        for flag in self._found.ignored:
            self.say(f"torchrun's {flag} is passed over: batchml sets it")
        if self._plan.processes and self._found.processes not in (0, self._plan.processes):
            self.say("torchrun's --nproc-per-node is passed over: processes_per_node is given")
        try:
            self._connect()
            while not self._has_ended():
                self._turn()
            self._say_end()
            self._part()
        finally:
            self._signals.deafen()
        leaving = self._member.leaving
        assert leaving is not None
        return leaving

    def write(self, lines: Sequence[bytes]) -> None:
        self._stream.write(b"".join(line + b"\n" for line in lines))
        self._stream.flush()

    def say(self, text: str) -> None:
        """One line of ours, for people."""
        self.write([f"batchml: {text}".encode("utf-8", "replace")])

    # --- the loop ------------------------------------------------------------------------------

    def _connect(self) -> None:
        times, beats = self._times, Beats(self._times.beat, self._times.silent)
        if self._where.node:
            patience = Patience(self._plan.start_within, times.regroup, times.gone)
            self._uplink = Uplink(
                self._where.main, self._where.identity, self._about, beats, patience,
                self._selector, self._member.order, self._lost_main, self.say,
            )  # fmt: skip
            return
        env = self._env
        store = open_store(env.store, self._environ, patience=BRIEF) if env.store else None
        limits = Limits(
            nodes=self._where.nodes, attempt=env.attempt, start_within=self._plan.start_within,
            regroup=times.regroup, gone=times.gone, hang_after=self._plan.hang_after,
            grace=ranks_grace(env.grace), end_grace=times.end_grace,
        )  # fmt: skip
        self._coordinator = Coordinator(
            self._where.identity, self._about, limits, beats, self._plan.bandwidth,
            env.checkpoint_dir, History(store, env.checkpoint_dir), self._selector,
            self._member.order, self.say,
        )  # fmt: skip
        self._coordinator.start(str(self._about["address"]), time.monotonic())

    def _turn(self) -> None:
        now = time.monotonic()
        pause = self._member.until_due(now)
        for each in (self._coordinator, self._uplink):
            if each is not None:
                pause = min(pause, each.until_due(now))
        if self._told:
            pause = 0.0
        if self._alone is not None:
            pause = min(pause, max(0.0, self._alone_at - now))
        self._handle(pause)
        self._hear_signals()
        self._member.children_ended()
        now = time.monotonic()
        self._member.tick(now)
        if self._member.asked_by_file():
            stop = Stop(0, "the stop file was made", ranks_grace(self._env.grace))
            self._ask(stop, softly=True)
        pulse = self._member.pulse_age(now)
        if self._coordinator is not None:
            if now - self._beat >= _BEAT:
                self._beat = now
                self._tell({"do": "beat", "pulse": pulse})
            while self._told:
                self._coordinator.hear(0, self._told.pop(0))
            self._coordinator.tick(now)
        if self._uplink is not None:
            self._uplink.tick(now, not self._member.is_busy, pulse)
            self._leave_alone(now)
            if self._uplink.given_up:
                leaving = Leaving(TRY_ELSEWHERE, self._uplink.given_up, True)
                self._member.leave(leaving, self._times.end_grace)

    def _handle(self, pause: float) -> None:
        for key, _ in self._selector.select(pause):
            # What came before it may have closed it, and its number may be another's by now.
            now = self._selector.get_map().get(key.fd)
            if now is not None and now.data is key.data:
                key.data()

    def _has_ended(self) -> bool:
        return self._member.leaving is not None and not self._member.is_busy

    def _wake(self) -> None:
        try:
            os.read(self._signals.wake, 65_536)
        except BlockingIOError:
            pass

    def _hear_signals(self) -> None:
        for number in self._signals.take():
            if number not in STOPS:
                self._member.pass_on(number)
                continue
            self._ask(asked_for(self._environ, number, self._env.grace))

    def _ask(self, stop: Stop, softly: bool = False) -> None:
        """A stop, for all nodes; for this one alone where the main node cannot be asked."""
        asked = {"do": "asked", **stop._asdict(), "softly": softly}
        if self._uplink is None or self._uplink.is_up:
            self._tell(asked)
            return
        self._uplink.tell_later(asked)
        self._uplink.hurry()
        if not softly and self._alone is None:
            self._member.make_stop_file()
            self._alone = Leaving(stop.code, stop.why, True, is_untold=True)
            self._alone_at = time.monotonic() + until_untold(True, stop.grace)

    def _leave_alone(self, now: float) -> None:
        """With a stop that the main node cannot be told of."""
        if self._alone is None or self._uplink is None or self._uplink.is_up:
            return  # or it has been told by now, and says what follows
        if not self._member.is_busy:
            self._alone_at = min(self._alone_at, now + until_untold(False, self._env.grace))
        if now >= self._alone_at:
            self._member.leave(self._alone, self._times.end_grace)

    def _tell(self, message: Message) -> None:
        if self._uplink is not None:
            self._uplink.tell(message)
        else:
            self._told.append(message)

    def _lost_main(self) -> None:
        """What runs here runs without its peers, and may no longer save: end it."""
        stopping = self._member.stopping
        if stopping is not None:
            self._member.leave(stopping, ranks_grace(self._env.grace))
        elif self._member.leaving is None:
            self.say("the main node does not answer any more: the ranks of this node are ended")
            self._member.end(self._times.end_grace)

    def _gate(self) -> Optional[str]:
        from batchml.runtime.health.gate import gate

        return gate(
            self._env, quickly(self._environ), lambda line: self.write([line.encode("utf-8")])
        )

    # --- the end -------------------------------------------------------------------------------

    def _say_end(self) -> None:
        leaving = self._member.leaving
        if leaving is None or not leaving.why:
            return
        if leaving.tail:
            self.say("its last lines were:")
            self.write([f"  {line}".encode("utf-8", "replace") for line in leaving.tail])
        self.say(leaving.why)

    def _part(self) -> None:
        """The main node goes last: Batch ends all others when it has gone."""
        if self._uplink is not None:
            self._uplink.close()
        coordinator = self._coordinator
        if coordinator is None:
            return
        until = time.monotonic() + _FAREWELL
        while not coordinator.is_alone() and time.monotonic() < until:
            self._handle(0.2)
        coordinator.close()


def _command(arguments: Sequence[str]) -> "list[str]":
    return list(arguments[1:] if arguments[:1] == ["--"] else arguments)


def supervise(arguments: Sequence[str], environ: Mapping[str, str], stream: BinaryIO) -> int:
    """The exit code of the process, with the verdict file written where it is the runtime's."""
    temporary = ""
    try:
        temporary = tempfile.mkdtemp(
            prefix="gang-", dir=os.path.dirname(environ.get(VERDICT, "")) or None
        )
        leaving = Supervisor(_command(arguments), environ, stream, temporary).run()
    except (BadCommand, ValueError) as error:
        leaving = _ended(stream, CONFIGURATION_ERROR, str(error))
    except OSError as error:
        leaving = _ended(stream, TRY_ELSEWHERE, f"the nodes cannot be led from here: {error}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    stream.flush()
    if leaving.by_runtime:
        write_verdict(environ, leaving.code, leaving.why, leaving.is_untold)
    code = leaving.code
    return 128 - code if code < 0 else code


def _ended(stream: BinaryIO, code: int, why: str) -> Leaving:
    stream.write(f"batchml: {why}\n".encode())
    return Leaving(code, why, True, is_untold=True)


def main() -> None:
    """Never returns: Python's own way out would set the signals' handlers back."""
    code = 70
    dies_with(os.getppid())()
    if sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]
    try:
        code = supervise(sys.argv[1:], os.environ, sys.stdout.buffer)
    except BrokenPipeError:
        code = TRY_ELSEWHERE
    except BaseException as error:
        import traceback

        traceback.print_exc()
        why = f"a mistake of batchml's own: {type(error).__name__}: {error}"
        write_verdict(os.environ, code, why, is_untold=True)
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
