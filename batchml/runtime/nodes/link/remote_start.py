"""Start commands on other nodes of the run, without ssh: for `srun` and for the agent of `mpirun`.

A program on the main node connects to the main node's server (`RemoteCommand`) and names a node.
The server passes the order on (`StartRelay`), the node runs it (`RemoteTasks`) and sends back the
output and the exit codes. A program that dies takes its commands on other nodes with it.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.nodes.link.connection import LinkClosed, Message, Peer, join
from batchml.runtime.processes import die_with_parent
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.storage.files import write_atomically

WINDOW = 1 << 20  # bytes of output that may be on their way to the program
READING = 2.0  # seconds for the rest of the output of tasks that have ended
_READ = 65_536
_GRACE = 10.0  # seconds from SIGTERM to SIGKILL for tasks whose program is gone

Adopt = Callable[["subprocess.Popen[bytes]", Callable[[int], None]], None]


# --- The main node --------------------------------------------------------------------------------


class StartRelay:
    """Passes orders of programs on the main node to nodes, and their output and codes back.

    `send` sends a message to a node, and returns whether it is connected.
    """

    def __init__(self, send: Callable[[int, Message], bool]) -> None:
        self._send = send
        self._programs: Dict[Peer, int] = {}  # with the number of their order; 0: none yet
        self._orders: Dict[int, Tuple[int, Peer]] = {}  # node and program, by number
        self._last = 0

    def add(self, program: Peer) -> None:
        program.silent_after = float("inf")  # it may have no time for signs of life
        self._programs[program] = 0

    def has(self, peer: Peer) -> bool:
        return peer in self._programs

    def hear(self, program: Peer, message: Message) -> None:
        number = self._programs[program]
        if message["do"] == "start" and not number:
            self._last += 1
            number = self._programs[program] = self._last
            node = int(message["node"])
            self._orders[number] = node, program
            order = {"do": "start", "task": number, "order": message["order"]}
            if not self._send(node, order):
                self._finish(number, [TRY_ELSEWHERE], f"node {node} is gone")
        elif message["do"] in ("signal", "taken") and number in self._orders:
            self._send(self._orders[number][0], {**message, "task": number})

    def hear_node(self, node: int, message: Message) -> None:
        number = int(message.get("task", 0))
        owner, program = self._orders.get(number, (-1, None))
        if program is None or owner != node:
            return  # the program is gone
        if message["do"] == "output":
            program.send({"do": "output", "data": message["data"]})
        elif message["do"] == "finished":
            self._finish(number, message["codes"], message["why"])

    def lose(self, program: Peer) -> None:
        """A program is gone: end what it started."""
        number = self._programs.pop(program)
        if number in self._orders:
            node, _ = self._orders.pop(number)
            self._send(node, {"do": "abandon", "task": number})

    def lose_node(self, node: int, name: str) -> None:
        for number, (owner, _) in list(self._orders.items()):
            if owner == node:
                self._finish(number, [TRY_ELSEWHERE], f"{name} is gone")

    def _finish(self, number: int, codes: Sequence[int], why: str) -> None:
        _, program = self._orders.pop(number)
        program.send({"do": "finished", "codes": list(codes), "why": why})


# --- A node ---------------------------------------------------------------------------------------


class TaskCommand(NamedTuple):
    """One process of an order. `label` is put before each line of its output."""

    words: Sequence[str]
    environ: Mapping[str, str]
    folder: Optional[str] = None  # the current folder of this process, unless given
    label: bytes = b""


class PreparedTasks(NamedTuple):
    """The processes of an order, and where their output goes."""

    commands: Sequence[TaskCommand]
    returns: bool  # to the program; else to this node's log
    joins: bool  # standard error goes the same way; else to this node's log


class RemoteTasks:
    """The tasks that programs of the main node have started here.

    `send` sends a message to the main node, `prepare` reads an order, and `adopt` waits for a
    child process and reports its code.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        send: Callable[[Message], None],
        prepare: Callable[[Message], PreparedTasks],
        adopt: Adopt,
    ) -> None:
        self._selector, self._send = selector, send
        self._prepare, self._adopt = prepare, adopt
        self._groups: Dict[int, _TaskGroup] = {}

    @property
    def is_empty(self) -> bool:
        return not self._groups

    def hear(self, message: Message) -> None:
        number = int(message.get("task", 0))
        if message["do"] == "start":
            self._start(number, message["order"])
        group = self._groups.get(number)
        if group is None:
            return
        if message["do"] == "signal":
            group.signal(int(message["number"]))
        elif message["do"] == "taken":
            group.taken(int(message["bytes"]))
        elif message["do"] == "abandon":
            group.abandon()

    def tick(self, now: float) -> None:
        """Kill abandoned tasks, and give up the output of processes that tasks left behind."""
        for number, group in list(self._groups.items()):
            group.tick(now)
            self._check(number)

    def signal(self, number: int) -> None:
        for group in self._groups.values():
            group.signal(number)

    def abandon(self) -> None:
        """End all tasks: the main node is gone."""
        for group in self._groups.values():
            group.abandon()

    def _start(self, number: int, order: Message) -> None:
        prepared = self._prepare(order)
        emit = partial(self._emit, number) if prepared.returns else write_output
        group = _TaskGroup(prepared, self._selector, emit, partial(self._check, number))
        try:
            group.start(self._adopt)
        except OSError as error:
            group.signal(signal.SIGKILL)
            group.close()
            self._finish(number, [127], f"{prepared.commands[0].words[0]}: {error.strerror}")
            return
        self._groups[number] = group

    def _check(self, number: int) -> None:
        """Report an order once its tasks have ended, and their output is sent."""
        group = self._groups.get(number)
        if group is not None and group.is_finished(time.monotonic()):
            del self._groups[number]
            group.close()
            self._finish(number, group.exit_codes(), "")

    def _emit(self, number: int, data: bytes) -> None:
        text = base64.b64encode(data).decode()
        self._send({"do": "output", "task": number, "data": text})

    def _finish(self, number: int, codes: Sequence[int], why: str) -> None:
        self._send({"do": "finished", "task": number, "codes": list(codes), "why": why})


class _TaskGroup:
    """The processes of one order."""

    def __init__(
        self,
        prepared: PreparedTasks,
        selector: selectors.BaseSelector,
        emit: Callable[[bytes], None],
        changed: Callable[[], None],
    ) -> None:
        self._prepared, self._selector = prepared, selector
        self._emit, self._changed = emit, changed
        self._processes: List["subprocess.Popen[bytes]"] = []
        self._codes: Dict[int, int] = {}
        self._pipes: Dict[int, Tuple[bytes, bytearray]] = {}  # label and unfinished line
        self._unread = 0  # bytes that the program has not taken yet
        self._until = self._kill_at = float("inf")

    def start(self, adopt: Adopt) -> None:
        """Raises OSError, after which some processes may run."""
        die = die_with_parent(os.getpid())
        is_read = self._prepared.returns or any(each.label for each in self._prepared.commands)
        for place, command in enumerate(self._prepared.commands):
            process = subprocess.Popen(
                list(command.words),
                cwd=command.folder,
                env=dict(command.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_read else None,
                stderr=subprocess.STDOUT if self._prepared.joins else None,
                start_new_session=True,
                preexec_fn=die,
            )
            self._processes.append(process)
            adopt(process, partial(self._exited, place))
            if process.stdout is not None:
                pipe = process.stdout.fileno()
                os.set_blocking(pipe, False)
                self._pipes[pipe] = command.label, bytearray()
                self._watch(pipe)

    def signal(self, number: int) -> None:
        for place, process in enumerate(self._processes):
            if place not in self._codes:
                try:
                    os.killpg(process.pid, number)
                except (ProcessLookupError, PermissionError):
                    continue

    def abandon(self) -> None:
        """End the tasks; nobody reads their output any more."""
        self._emit = lambda data: None
        self.taken(self._unread)
        self.signal(signal.SIGTERM)
        self._kill_at = time.monotonic() + _GRACE

    def taken(self, count: int) -> None:
        was_full = self._is_full
        self._unread -= count
        if was_full and not self._is_full:
            for pipe in self._pipes:
                self._watch(pipe)

    def tick(self, now: float) -> None:
        if now >= self._kill_at:
            self._kill_at = float("inf")
            self.signal(signal.SIGKILL)

    def is_finished(self, now: float) -> bool:
        """Whether all tasks have ended and their output is read.

        Processes that they leave behind may keep the pipes open: those are not waited for.
        """
        if len(self._codes) < len(self._processes):
            return False
        if self._is_full or self._until == float("inf"):
            self._until = now + READING
        return not self._pipes or now >= self._until

    def exit_codes(self) -> List[int]:
        """The exit codes of the processes in order, as a shell reports them: 128 + N after signal
        N.
        """
        codes = [code for _, code in sorted(self._codes.items())]
        return [128 - code if code < 0 else code for code in codes]

    def close(self) -> None:
        for pipe in list(self._pipes):
            self._end(pipe)

    @property
    def _is_full(self) -> bool:
        return self._unread >= WINDOW

    def _exited(self, place: int, code: int) -> None:
        self._codes[place] = code
        self._changed()

    def _watch(self, pipe: int) -> None:
        self._selector.register(pipe, selectors.EVENT_READ, lambda: self._read(pipe))

    def _read(self, pipe: int) -> None:
        try:
            data = os.read(pipe, _READ)
        except BlockingIOError:
            return
        if not data:
            self._end(pipe)
            self._changed()
            return
        label, rest = self._pipes[pipe]
        rest += data
        lines, end, after = bytes(rest).rpartition(b"\n")
        if len(after) > _READ:  # a line without an end
            lines, end, after = bytes(rest), b"", b""
        rest[:] = after
        if lines or end:
            self._write(label, lines, end)

    def _write(self, label: bytes, lines: bytes, end: bytes) -> None:
        if label:
            lines = b"\n".join(label + line for line in lines.split(b"\n"))
            end = b"\n"
        data = lines + end
        if self._prepared.returns:
            self._unread += len(data)
        self._emit(data)
        if self._is_full:
            for pipe in self._pipes:
                self._unwatch(pipe)

    def _end(self, pipe: int) -> None:
        self._unwatch(pipe)
        label, rest = self._pipes.pop(pipe)
        if rest:
            self._write(label, bytes(rest), b"")
        for process in self._processes:
            if process.stdout is not None and process.stdout.fileno() == pipe:
                process.stdout.close()
                process.stdout = None

    def _unwatch(self, pipe: int) -> None:
        if pipe in self._selector.get_map():
            self._selector.unregister(pipe)


# --- A program on the main node -------------------------------------------------------------------


class ControlAddress(NamedTuple):
    """Where the main node's server listens, for programs of this node."""

    address: str
    port: int
    token: str

    @classmethod
    def read(cls, path: str) -> ControlAddress:
        """Raises OSError and ValueError."""
        with open(path, encoding="utf-8") as file:
            return cls(**json.load(file))

    def write(self, path: str) -> None:
        write_atomically(path, json.dumps(self._asdict()).encode(), 0o600)


class RemoteCommand:
    """A command on another node. What it prints is printed here. Raises LinkClosed at its start."""

    def __init__(self, control: ControlAddress, node: int, order: Message) -> None:
        self._link = join(control.address, control.port, control.token, {"starts": True})
        self._link.send({"do": "start", "node": node, "order": order})
        self._codes: Optional[List[int]] = None
        self._signals: List[int] = []  # to be sent

    @property
    def socket(self) -> int:
        """Readable when there may be something to `poll`."""
        return self._link.socket.fileno()

    def poll(self) -> Optional[List[int]]:
        """Print what has come. The exit codes of the tasks once all have ended."""
        if self._codes is None:
            try:
                while self._signals:
                    self._link.send({"do": "signal", "number": self._signals.pop(0)})
                self._link.flush()
                for message in [*self._link.waiting(), *self._link.messages()]:
                    self._take(message)
            except LinkClosed as closed:
                self._end([TRY_ELSEWHERE], f"the supervisor of this node is gone: {closed}")
        return self._codes

    def was_one_killed(self) -> bool:
        return any(code > 128 for code in self._codes or ())

    def signal(self, number: int) -> None:
        """Signal the tasks, at the next `poll`: a handler of signals may call this at any time."""
        self._signals.append(number)

    def _take(self, message: Message) -> None:
        if message["do"] == "output":
            data = base64.b64decode(message["data"])
            write_output(data)
            self._link.send({"do": "taken", "bytes": len(data)})
        elif message["do"] == "finished":
            self._end([int(code) for code in message["codes"]], message["why"])

    def _end(self, codes: List[int], why: str) -> None:
        if self._codes is None:
            self._codes = codes
            if why:
                print(f"batchml: {why}", file=sys.stderr, flush=True)
            self._link.close()


def write_output(data: bytes) -> None:
    sys.stdout.flush()
    while data:
        data = data[os.write(1, data) :]
