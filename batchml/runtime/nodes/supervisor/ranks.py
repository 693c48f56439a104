"""The ranks of a generation on one node: start them, copy their output, signal and end them.

Each rank has a session of its own and dies with the supervisor. Processes that it leaves behind
become children of the supervisor, which ends them before it reports that the generation is over.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Callable, Deque, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.nodes.link.connection import Message
from batchml.runtime.nodes.supervisor import rank_site
from batchml.runtime.nodes.supervisor.settings import RankLayout, prepend_path, rank_environment
from batchml.runtime.processes import descendants, die_with_parent, kill_descendants, send
from batchml.runtime.protocol.launch import MAIN
from batchml.runtime.protocol.log_marks import LineSplitter

TAIL = 20  # last lines of each rank that are kept for a report
MAX_LOG = 32 << 20  # bytes of a rank's file; there are two: this one, and the one before
_READ = 65_536
_MOST_OF_LINE = 2_000  # characters of a line of the tail


class RankEnd(NamedTuple):
    rank: int
    code: int  # below 0: of a signal
    tail: Tuple[str, ...]
    stamp: float
    was_sent: bool


class RankProcesses:
    """The processes of one generation on this node. `write` takes whole lines for the log."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        write: Callable[[Sequence[bytes]], None],
        temporary: str,
        output: str,
        logs: str,
    ) -> None:
        self._selector = selector
        self._write = write
        self._temporary = temporary
        self._output = os.path.join(output, "ranks") if output else ""
        self._logs = logs
        self._ranks: Dict[int, _Rank] = {}  # by process id
        self._others: Dict[int, Tuple[subprocess.Popen[bytes], Callable[[int], None]]] = {}
        self._sent: Tuple[int, ...] = ()
        self.last_output = time.monotonic()

    def start(self, command: Sequence[str], environ: Mapping[str, str], layout: RankLayout) -> None:
        """Start the ranks. Raises OSError and ValueError, as Popen does, with no rank left."""
        self._begin()
        site = self._site()
        try:
            for local in range(layout.here):
                rank = layout.first + local
                files = self._files(rank, layout.generation)
                files["PYTHONPATH"] = prepend_path(environ, "PYTHONPATH", site)
                found = rank_environment(environ, layout, local, files)
                label = f"[r{rank}] ".encode() if layout.here > 1 else b""
                error_file = files["TORCHELASTIC_ERROR_FILE"]
                self._start_rank(rank, label, command, found, layout.generation, error_file)
        except BaseException:
            self.signal(signal.SIGKILL)
            for pid in list(self._ranks):
                self._ended(self._ranks.pop(pid))
            raise

    def run_first(
        self, command: Sequence[str], environ: Mapping[str, str], on_exit: Callable[[int], None]
    ) -> None:
        """Start a program that has to end before the ranks start. Raises OSError."""
        die = die_with_parent(os.getpid())
        made = subprocess.Popen(
            list(command), env=dict(environ), stdin=subprocess.DEVNULL, preexec_fn=die
        )
        self.adopt(made, on_exit)

    def adopt(self, process: subprocess.Popen[bytes], on_exit: Callable[[int], None]) -> None:
        """Wait for a child that is no rank; `on_exit` receives its code, below 0 of a signal."""
        self._others[process.pid] = process, on_exit

    def hear(self, message: Message) -> None:
        """Take a message of the main node that the agent does not know. Plain ranks get none, so
        this does nothing.
        """

    def tick(self, now: float) -> None:
        """Do what is due; called about once a second."""

    def stacks_file(self, rank: int) -> str:
        return os.path.join(self._temporary, f"stacks-{rank}")

    def progress_files(self) -> List[str]:
        return [os.path.join(self._temporary, f"progress-{r.rank}") for r in self._ranks.values()]

    def living(self) -> List[Tuple[int, int]]:
        """(rank, process id) of the ranks that have not ended, and can write their stacks."""
        return sorted((rank.rank, pid) for pid, rank in self._ranks.items())

    def signal(self, number: int) -> None:
        """Signal every process of the generation, whatever its session."""
        self._signal(descendants(os.getpid()), number)

    def reap(self) -> List[RankEnd]:
        """The ranks that have ended since the last call; orphans are collected on the way."""
        found = []
        while True:
            try:
                state = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if state is None:
                break
            rank = self._ranks.pop(state.si_pid, None)
            other = self._others.pop(state.si_pid, None)
            if other is not None:
                process, on_exit = other
                on_exit(process.wait())
                continue
            if rank is None:
                os.waitpid(state.si_pid, os.WNOHANG)
                continue
            found.append(self._ended(rank))
        return found

    def clear(self) -> bool:
        """Once all ranks have ended, end what they left behind. Whether no process is left."""
        return not self._ranks and kill_descendants(5.0)

    def _begin(self) -> None:
        self._sent = ()
        self.last_output = time.monotonic()

    def _start_rank(
        self,
        rank: int,
        label: bytes,
        command: Sequence[str],
        environ: Mapping[str, str],
        generation: int,
        error_file: str = "",
    ) -> None:
        is_apart = self._logs == MAIN and rank > 0
        made = _Rank(rank, label, is_apart, self._log(rank, generation), error_file)
        made.start(command, environ, die_with_parent(os.getpid()))
        self._ranks[made.pid] = made
        for pipe in made.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, self._reader(made, pipe))

    def _signal(self, pids: List[int], number: int) -> None:
        self._sent = (*self._sent, number)
        send(pids, number)
        if number == signal.SIGTERM:
            send(pids, signal.SIGCONT)  # a stopped process would not receive it

    def _ended(self, rank: _Rank) -> RankEnd:
        code = rank.process.wait()
        for pipe in rank.pipes:
            while self._read(rank, pipe):
                pass  # not until its end: a child of the rank may keep the pipe open
            rest = rank.splitters[pipe].finish()
            self._pass_on(rank, pipe, rest)
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
        rank.close()
        was_sent = -code in self._sent
        return RankEnd(rank.rank, code, tuple(rank.tail), _stamp(rank.error_file), was_sent)

    def _reader(self, rank: _Rank, pipe: int) -> Callable[[], None]:
        def read() -> None:
            if self._read(rank, pipe) == b"":
                self._selector.unregister(pipe)

        return read

    def _read(self, rank: _Rank, pipe: int) -> Optional[bytes]:
        try:
            data = os.read(pipe, _READ)
        except BlockingIOError:
            return None
        if data:
            self.last_output = time.monotonic()
            self._pass_on(rank, pipe, rank.splitters[pipe].feed(data))
        return data

    def _pass_on(self, rank: _Rank, pipe: int, lines: List[bytes]) -> None:
        if lines:
            rank.keep(lines)
            if rank.is_shown[pipe]:
                self._write([rank.label + line for line in lines] if rank.label else lines)

    def _log(self, rank: int, generation: int) -> Optional[_RankLog]:
        if not self._output:
            return None
        try:
            os.makedirs(self._output, exist_ok=True)
            return _RankLog(os.path.join(self._output, f"rank-{rank}.log"), generation)
        except OSError:
            return None  # a full disk: the run's log has the output as well

    def _files(self, rank: int, generation: int) -> Dict[str, str]:
        stacks = self.stacks_file(rank)
        if os.path.exists(stacks):
            os.unlink(stacks)
        return {
            "BATCHML_STACKS": stacks,
            "BATCHML_PROGRESS": os.path.join(self._temporary, f"progress-{rank}"),
            "TORCHELASTIC_ERROR_FILE": os.path.join(
                self._temporary, f"error-{generation}-{rank}.json"
            ),
        }

    def _site(self) -> str:
        folder = os.path.join(self._temporary, "site")
        if not os.path.isdir(folder):
            os.makedirs(folder)
            shutil.copy(rank_site.__file__, os.path.join(folder, "sitecustomize.py"))
        return folder


class _Rank:
    def __init__(
        self, rank: int, label: bytes, is_apart: bool, log: Optional[_RankLog], error_file: str
    ) -> None:
        self.rank = rank
        self.label = label
        self.tail: Deque[str] = deque(maxlen=TAIL)
        self.error_file = error_file
        self._has_stderr_pipe = is_apart
        self._log = log

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], die: Callable[[], None]
    ) -> None:
        self.process = subprocess.Popen(
            list(command),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if self._has_stderr_pipe else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die,
        )
        self.pid = self.process.pid
        files = [self.process.stdout, *([self.process.stderr] if self._has_stderr_pipe else [])]
        self.pipes = [file.fileno() for file in files if file is not None]
        for pipe in self.pipes:
            os.set_blocking(pipe, False)
        self.splitters = {pipe: LineSplitter() for pipe in self.pipes}
        # With two pipes, the first is the standard output of a rank other than 0, which only that
        # rank's file gets.
        self.is_shown = {
            pipe: not self._has_stderr_pipe or place == 1 for place, pipe in enumerate(self.pipes)
        }

    def keep(self, lines: Sequence[bytes]) -> None:
        self.tail.extend(line.decode("utf-8", "replace")[:_MOST_OF_LINE] for line in lines[-TAIL:])
        if self._log is not None and not self._log.write(lines):
            self._log = None

    def close(self) -> None:
        for file in (self.process.stdout, self.process.stderr):
            if file is not None:
                file.close()
        if self._log is not None:
            self._log.close()


class _RankLog:
    """The output of a rank over all generations, in two files: the older half is dropped."""

    def __init__(self, path: str, generation: int) -> None:
        self._path = path
        self._open()
        self.write([f"--- generation {generation}".encode()])

    def _open(self) -> None:
        self._file: BinaryIO = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._size = self._file.tell()

    def write(self, lines: Sequence[bytes]) -> bool:
        """False once the file cannot be written."""
        data = b"\n".join(lines) + b"\n"
        try:
            if self._size + len(data) > MAX_LOG:
                self._file.close()
                os.replace(self._path, self._path + ".1")
                self._open()
            self._file.write(data)
        except OSError:
            return False
        self._size += len(data)
        return True

    def close(self) -> None:
        self._file.close()


def _stamp(path: str) -> float:
    """When a rank failed by its own account, which `@record` of torch writes; 0 without one."""
    try:
        with open(path, encoding="utf-8") as file:
            return float(json.load(file)["message"]["extraInfo"]["timestamp"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0.0
