"""Start commands on other nodes of the run, without ssh: for `srun` and for the agent of `mpirun`.

A program on the main node, such as `srun`, connects to the main node's server (`RemoteCommand`). It
names a node and sends an order: what to run there. The server passes the order on (`StartRelay`).
The node runs its processes, the tasks (`RemoteTasks`), and sends back their output and exit codes.
When the program dies, its tasks on other nodes are ended.
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
from batchml.runtime.processes import die_with_parent, shell_code
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.storage.files import write_atomically

WINDOW = 1 << 20  # bytes of output that the program may not have printed yet
OUTPUT_LIMIT = 2.0  # seconds in which the output of tasks that have ended is read to its end
_READ = 65_536
_GRACE = 10.0  # seconds from SIGTERM to SIGKILL for tasks whose program is gone

# waits for a child process, and passes its exit code to the function
Adopt = Callable[["subprocess.Popen[bytes]", Callable[[int], None]], None]


# --- The main node --------------------------------------------------------------------------------


class StartRelay:
    """Passes orders of programs on the main node to nodes, and output and exit codes back.

    `send` sends a message to a node, and returns whether the node is connected.
    """

    def __init__(self, send: Callable[[int, Message], bool]) -> None:
        self._send = send
        self._programs: Dict[Peer, int] = {}  # program -> number of its order; 0: none yet
        # number of an order, which messages call `task` -> node, program
        self._orders: Dict[int, Tuple[int, Peer]] = {}
        self._last = 0  # number of the latest order

    def add(self, program: Peer) -> None:
        """A program has connected."""
        program.silent_after = float("inf")  # a busy program may send no signs of life
        self._programs[program] = 0

    def has(self, peer: Peer) -> bool:
        return peer in self._programs

    def hear(self, program: Peer, message: Message) -> None:
        """Take a message of a program."""
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
        """Take a message of a node about an order."""
        number = int(message.get("task", 0))
        owner, program = self._orders.get(number, (-1, None))
        if program is None or owner != node:
            return  # the program is gone
        if message["do"] == "output":
            program.send({"do": "output", "data": message["data"]})
        elif message["do"] == "finished":
            self._finish(number, message["codes"], message["why"])

    def lose(self, program: Peer) -> None:
        """A program is gone: end its tasks."""
        number = self._programs.pop(program)
        if number in self._orders:
            node, _ = self._orders.pop(number)
            self._send(node, {"do": "abandon", "task": number})

    def lose_node(self, node: int, name: str) -> None:
        """A node is gone, and so are its tasks. `name`: the node in messages for people."""
        for number, (owner, _) in list(self._orders.items()):
            if owner == node:
                self._finish(number, [TRY_ELSEWHERE], f"{name} is gone")

    def _finish(self, number: int, codes: Sequence[int], why: str) -> None:
        _, program = self._orders.pop(number)
        program.send({"do": "finished", "codes": list(codes), "why": why})


# --- A node ---------------------------------------------------------------------------------------


class TaskCommand(NamedTuple):
    """One process of an order."""

    words: Sequence[str]
    environ: Mapping[str, str]
    folder: Optional[str] = None  # its working folder; None: that of this process
    label: bytes = b""  # printed before each line of its output


class PreparedTasks(NamedTuple):
    """The processes of an order, and where their output goes."""

    commands: Sequence[TaskCommand]
    returns_output: bool  # to the program on the main node; else it goes to this node's log
    joins_errors: bool  # standard error goes where the output goes; else to this node's log


class RemoteTasks:
    """The tasks on this node that programs on the main node have started.

    `send` sends a message to the main node, `prepare` reads an order.
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
        """Take a message of the main node."""
        number = int(message.get("task", 0))
        if message["do"] == "start":
            self._start(number, message["order"])
        group = self._groups.get(number)
        if group is None:
            return
        if message["do"] == "signal":
            group.signal(int(message["number"]))
        elif message["do"] == "taken":
            group.count_printed(int(message["bytes"]))
        elif message["do"] == "abandon":
            group.abandon()

    def tick(self, now: float) -> None:
        """Kill abandoned tasks, and finish orders whose tasks have ended."""
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
        emit = partial(self._emit, number) if prepared.returns_output else write_output
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
        """Report an order once its tasks have ended and their output was sent."""
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
        on_change: Callable[[], None],
    ) -> None:
        """`emit` receives output. `on_change` is called when a task or its output has ended."""
        self._prepared, self._selector = prepared, selector
        self._emit, self._on_change = emit, on_change
        self._processes: List["subprocess.Popen[bytes]"] = []
        self._codes: Dict[int, int] = {}  # index of a process -> its exit code
        self._pipes: Dict[int, Tuple[bytes, bytearray]] = {}  # pipe -> label, unfinished line
        self._unprinted = 0  # bytes that the program on the main node has not printed yet
        self._read_until = self._kill_at = float("inf")

    def start(self, adopt: Adopt) -> None:
        """Start the processes. Raises OSError, after which some processes may run."""
        die = die_with_parent(os.getpid())
        commands = self._prepared.commands
        is_read = self._prepared.returns_output or any(command.label for command in commands)
        for index, command in enumerate(commands):
            process = subprocess.Popen(
                list(command.words),
                cwd=command.folder,
                env=dict(command.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_read else None,
                stderr=subprocess.STDOUT if self._prepared.joins_errors else None,
                start_new_session=True,
                preexec_fn=die,
            )
            self._processes.append(process)
            adopt(process, partial(self._note_exit, index))
            if process.stdout is not None:
                pipe = process.stdout.fileno()
                os.set_blocking(pipe, False)
                self._pipes[pipe] = command.label, bytearray()
                self._watch(pipe)

    def signal(self, number: int) -> None:
        for index, process in enumerate(self._processes):
            if index not in self._codes:
                try:
                    os.killpg(process.pid, number)
                except (ProcessLookupError, PermissionError):
                    continue

    def abandon(self) -> None:
        """End the tasks, and drop their output."""
        self._emit = lambda data: None
        self.count_printed(self._unprinted)
        self.signal(signal.SIGTERM)
        self._kill_at = time.monotonic() + _GRACE

    def count_printed(self, count: int) -> None:
        """The program has printed so many bytes: read more output if it was too slow before."""
        was_full = self._is_full
        self._unprinted -= count
        if was_full and not self._is_full:
            for pipe in self._pipes:
                self._watch(pipe)

    def tick(self, now: float) -> None:
        if now >= self._kill_at:
            self._kill_at = float("inf")
            self.signal(signal.SIGKILL)

    def is_finished(self, now: float) -> bool:
        """Whether all tasks have ended and their output was read.

        Processes that tasks leave behind may keep the pipes open. They are given `OUTPUT_LIMIT`.
        """
        if len(self._codes) < len(self._processes):
            return False
        if self._is_full or self._read_until == float("inf"):
            self._read_until = now + OUTPUT_LIMIT
        return not self._pipes or now >= self._read_until

    def exit_codes(self) -> List[int]:
        """The exit codes of the processes in order, as a shell reports them."""
        return [shell_code(code) for _, code in sorted(self._codes.items())]

    def close(self) -> None:
        for pipe in list(self._pipes):
            self._end(pipe)

    @property
    def _is_full(self) -> bool:
        return self._unprinted >= WINDOW

    def _note_exit(self, index: int, code: int) -> None:
        self._codes[index] = code
        self._on_change()

    def _watch(self, pipe: int) -> None:
        self._selector.register(pipe, selectors.EVENT_READ, lambda: self._read(pipe))

    def _read(self, pipe: int) -> None:
        try:
            data = os.read(pipe, _READ)
        except BlockingIOError:
            return
        if not data:
            self._end(pipe)
            self._on_change()
            return
        label, rest = self._pipes[pipe]
        rest += data
        lines, end, after = bytes(rest).rpartition(b"\n")
        if len(after) > _READ:  # a line that is too long to wait for its end
            lines, end, after = bytes(rest), b"", b""
        rest[:] = after
        if lines or end:
            self._write(label, lines, end)

    def _write(self, label: bytes, lines: bytes, end: bytes) -> None:
        if label:
            lines = b"\n".join(label + line for line in lines.split(b"\n"))
            end = b"\n"
        data = lines + end
        if self._prepared.returns_output:
            self._unprinted += len(data)
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
    """Where the main node's server listens, for programs on the main node."""

    address: str
    port: int
    token: str

    @classmethod
    def read(cls, path: str) -> ControlAddress:
        """Read the file that `write` has written. Raises OSError and ValueError."""
        with open(path, encoding="utf-8") as file:
            return cls(**json.load(file))

    def write(self, path: str) -> None:
        write_atomically(path, json.dumps(self._asdict()).encode(), 0o600)


class RemoteCommand:
    """A command on another node. This process prints its output.

    The constructor starts the command. It raises LinkClosed.
    """

    def __init__(self, control: ControlAddress, node: int, order: Message) -> None:
        self._link = join(control.address, control.port, control.token, {"starts": True})
        self._link.send({"do": "start", "node": node, "order": order})
        self._codes: Optional[List[int]] = None
        self._signals: List[int] = []  # numbers of signals to send

    @property
    def socket(self) -> int:
        """A descriptor that is readable when `poll` may have something to do."""
        return self._link.socket.fileno()

    def poll(self) -> Optional[List[int]]:
        """Print new output. Return the exit codes of the tasks once all have ended, else None."""
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
        """Whether a signal ended one of the tasks."""
        return any(code > 128 for code in self._codes or ())

    def signal(self, number: int) -> None:
        """Signal the tasks at the next `poll`. A signal handler may call this at any moment."""
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
            if why:  # the tasks did not end by themselves
                print(f"batchml: {why}", file=sys.stderr, flush=True)
            self._link.close()


def write_output(data: bytes) -> None:
    """Write all bytes to standard output at once."""
    sys.stdout.flush()
    while data:
        data = data[os.write(1, data) :]
