"""The ranks of a generation on one node: start them, copy their output, signal and end them.

Each rank has a session of its own and dies with the supervisor. Processes that a rank leaves behind
become children of the supervisor, which ends them before it reports the end of the generation.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Callable, Deque, Dict, List, NamedTuple, Optional, Set, Tuple

from batchml.runtime.nodes.link.connection import Message
from batchml.runtime.nodes.supervisor.settings import RankLayout, next_layout, rank_environment
from batchml.runtime.nodes.supervisor.spares import RankStart, Spares, start_rank
from batchml.runtime.processes import descendants, die_with_parent, kill_descendants, send
from batchml.runtime.protocol.launch import MAIN
from batchml.runtime.protocol.log_marks import SAME_TRACEBACK, LineSplitter

TAIL = 20  # last lines of each rank that are kept for its report
MAX_LOG = 32 << 20  # bytes of a rank's log file; there are two, the current and the previous one
_READ = 65_536
_MAX_TAIL_LINE = 2_000  # characters


class RankEnd(NamedTuple):
    """The end of a rank. The fields have the meaning of `rules.RankFailure`."""

    rank: int
    code: int  # -N: signal N ended the rank
    tail: Tuple[str, ...]
    stamp: float
    was_sent: bool


class RankContext(NamedTuple):
    """What the supervisor gives to the `RankProcesses` of a launch kind."""

    selector: selectors.BaseSelector
    write: Callable[[Sequence[bytes]], None]  # writes whole lines to the log
    tell: Callable[[Message], None]  # sends a message to the main node
    temporary: str  # a folder that is removed with the attempt
    output: str  # the folder of outputs; empty: ranks have no log files
    logs: str  # `LaunchPlan.logs`
    token: str  # the secret of the run
    spares_after: float = 60.0  # seconds from the start of ranks to that of their spares
    has_spares: bool = False


# --- Tracebacks -----------------------------------------------------------------------------------


_MAX_BLOCK = 400  # lines; a longer traceback is printed as it comes
_BEGIN = b"Traceback (most recent call last):"
_TORCH_LABEL = re.compile(rb"\[rank[0-9]+\]:\s?")  # before each line of a traceback


class TracebackFolder:
    """Prints a traceback once, however many ranks of a node, or starts, end with it.

    All ranks of a program with a mistake print the same traceback, and again after a restart in
    place. The run's log gets the first one, and a line for each other one; the log files of the
    ranks have them all.
    """

    def __init__(self) -> None:
        self._seen: Dict[Tuple[bytes, ...], int] = {}  # traceback -> the first rank that printed it
        self._held: Dict[int, List[bytes]] = {}  # by rank: a traceback that has not ended

    def feed(self, rank: int, lines: Sequence[bytes]) -> List[bytes]:
        """Take lines of a rank; return the lines to print."""
        shown: List[bytes] = []
        for line in lines:
            plain, held = _TORCH_LABEL.sub(b"", line, count=1), self._held.get(rank)
            if held is not None:
                held.append(line)
                if len(held) > _MAX_BLOCK:
                    shown += self._held.pop(rank)
                elif plain.strip() and not plain.startswith(b" "):  # `ValueError: ...`
                    shown += self._fold(rank, self._held.pop(rank))
            elif plain.startswith(_BEGIN):
                self._held[rank] = [line]
            else:
                shown.append(line)
        return shown

    def finish(self, rank: int) -> List[bytes]:
        """The lines of a traceback that the rank was ended in, unless others have printed them."""
        block = self._held.pop(rank, [])
        key = _without_labels(block)
        return [] if any(key == seen[: len(key)] for seen in self._seen) else block

    def _fold(self, rank: int, block: List[bytes]) -> List[bytes]:
        key = _without_labels(block)
        if key not in self._seen:
            self._seen[key] = rank
            return block
        return [block[-1] + SAME_TRACEBACK.format(self._seen[key]).encode()]


def _without_labels(lines: Sequence[bytes]) -> Tuple[bytes, ...]:
    return tuple(_TORCH_LABEL.sub(b"", line, count=1) for line in lines)


# --- Processes ------------------------------------------------------------------------------------


class RankProcesses:
    """The processes of one generation on this node."""

    def __init__(self, context: RankContext) -> None:
        self._selector, self._write = context.selector, context.write
        self._temporary, self._logs = context.temporary, context.logs
        self._output = os.path.join(context.output, "ranks") if context.output else ""
        self._ranks: Dict[int, _Rank] = {}  # by process id
        # other children by process id, and who is told their exit code
        self._others: Dict[int, Tuple[subprocess.Popen[bytes], Callable[[int], None]]] = {}
        self._folder = TracebackFolder()
        self._shown: Set[Tuple[str, ...]] = set()  # last lines of ranks whose output is in the log
        self._sent: Tuple[int, ...] = ()  # signals that this generation was sent
        self._here = 0  # the ranks that were started
        self._spares = Spares(context.temporary, context.spares_after, context.has_spares)
        self.last_output = time.monotonic()  # when a rank printed something last

    def start(self, command: Sequence[str], environ: Mapping[str, str], layout: RankLayout) -> None:
        """Start the ranks. Raises OSError and ValueError, as Popen does, with no rank left."""
        self._begin()
        try:
            for local in range(layout.here):
                rank = layout.first + local
                start = self._rank_start(command, environ, layout, local)
                label = f"[r{rank}] ".encode() if layout.here > 1 else b""
                error_file = start.environ["TORCHELASTIC_ERROR_FILE"]
                if os.path.exists(start.environ["BATCHML_STACKS"]):
                    os.unlink(start.environ["BATCHML_STACKS"])
                self._start_rank(rank, label, start, layout.generation, error_file)
        except BaseException:
            self.signal(signal.SIGKILL)
            for pid in list(self._ranks):
                self._collect(self._ranks.pop(pid))
            raise
        self._here = layout.here
        if self._spares.are_on:
            after, here = next_layout(layout), range(layout.here)
            starts = [self._rank_start(command, environ, after, local) for local in here]
            self._spares.begin(starts, time.monotonic())

    def run_first(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        on_exit: Callable[[int], None],
        output: Optional[int] = None,
    ) -> None:
        """Start a program that has to end before the ranks start. Raises OSError.

        `output`: where it prints, as for Popen; None: the log.
        """
        die = die_with_parent(os.getpid())
        process = subprocess.Popen(
            list(command), env=dict(environ), stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, preexec_fn=die,
        )  # fmt: skip
        self.adopt(process, on_exit)

    def adopt(self, process: subprocess.Popen[bytes], on_exit: Callable[[int], None]) -> None:
        """Wait for a child that is no rank. `on_exit` receives its exit code, -N after signal N."""
        self._others[process.pid] = process, on_exit

    def hear(self, message: Message) -> None:
        """Take a message of the main node that the agent does not understand.

        Only launch kinds with a launcher get such messages.
        """

    def tick(self, now: float) -> None:
        """Do what is due; called about once a second."""
        are_running = len(self._ranks) == self._here and not self._sent
        self._spares.tick(now, [pid for _, pid in self.living()] if are_running else [])

    def end_spares(self) -> None:
        """The ranks are not started again."""
        self._spares.end()

    def killed_spares(self) -> int:
        """How many spares others than this node have killed."""
        return self._spares.count_killed()

    def has_shown(self, tail: Sequence[str]) -> bool:
        """Whether the log of this node has the output of a rank with these last lines."""
        return tuple(tail) in self._shown

    def stacks_file(self, rank: int) -> str:
        """The file to which a rank writes its stacks after SIGUSR1."""
        return os.path.join(self._temporary, f"stacks-{rank}")

    def progress_files(self) -> List[str]:
        """The files whose change is a sign of life."""
        return [os.path.join(self._temporary, f"progress-{r.rank}") for r in self._ranks.values()]

    def living(self) -> List[Tuple[int, int]]:
        """(rank, process id) of the ranks that have not ended and can write their stacks."""
        return sorted((rank.rank, pid) for pid, rank in self._ranks.items())

    def signal(self, number: int) -> None:
        """Signal every process of the generation, whatever its session."""
        self._signal(descendants(os.getpid(), but=self._spares.pids), number)

    def reap(self) -> List[RankEnd]:
        """Return the ranks that have ended since the last call. Other children are reaped, too."""
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
            if state.si_pid in self._spares.pids:
                self._spares.end()
                continue
            if rank is None:
                os.waitpid(state.si_pid, os.WNOHANG)
                continue
            found.append(self._collect(rank))
        return found

    def clear(self) -> bool:
        """Once all ranks have ended, kill their leftovers. Return whether no process is left."""
        return not self._ranks and kill_descendants(5.0, but=self._spares.pids)

    def _begin(self) -> None:
        self._sent = ()
        self.last_output = time.monotonic()

    def _rank_start(
        self, command: Sequence[str], environ: Mapping[str, str], layout: RankLayout, local: int
    ) -> RankStart:
        rank = layout.first + local
        files = self._files(rank, layout.generation)
        found = rank_environment(environ, layout, local, files)
        return RankStart(command, found, errors_apart=self._logs == MAIN and rank > 0)

    def _start_rank(
        self, rank: int, label: bytes, start: RankStart, generation: int, error_file: str = ""
    ) -> None:
        process = self._spares.take(start) or start_rank(start)
        log = self._open_log(rank, generation)
        started = _Rank(rank, label, log, error_file, process)
        self._ranks[process.pid] = started
        for pipe in started.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, self._reader(started, pipe))

    def _signal(self, pids: List[int], number: int) -> None:
        self._sent = (*self._sent, number)
        send(pids, number)
        if number == signal.SIGTERM:
            send(pids, signal.SIGCONT)  # a stopped process would not receive it

    def _collect(self, rank: _Rank) -> RankEnd:
        code = rank.process.wait()
        for pipe in rank.pipes:
            while self._read(rank, pipe):
                pass  # not to the end of the pipe: a child of the rank may keep it open
            self._pass_on(rank, pipe, rank.splitters[pipe].finish())
            if rank.is_shown[pipe]:
                self._print(rank, self._folder.finish(rank.rank))
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
        rank.close()
        self._spares.forget(rank.process.pid)
        stamp, was_sent = _read_stamp(rank.error_file), -code in self._sent
        # A rank may be sent a signal after its traceback, when another has failed the same way.
        has_failed = code and (not was_sent or any(_BEGIN.decode() in line for line in rank.tail))
        if has_failed and all(rank.is_shown.values()):
            self._shown.add(tuple(rank.tail))
        return RankEnd(rank.rank, code, tuple(rank.tail), stamp, was_sent)

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
                self._print(rank, self._folder.feed(rank.rank, lines))

    def _print(self, rank: _Rank, lines: List[bytes]) -> None:
        if lines:
            self._write([rank.label + line for line in lines] if rank.label else lines)

    def _open_log(self, rank: int, generation: int) -> Optional[_RankLog]:
        if not self._output:
            return None
        try:
            os.makedirs(self._output, exist_ok=True)
            return _RankLog(os.path.join(self._output, f"rank-{rank}.log"), generation)
        except OSError:
            return None  # perhaps a full disk; the run's log has the output as well

    def _files(self, rank: int, generation: int) -> Dict[str, str]:
        """The variables that name the files of one rank."""
        return {
            "BATCHML_STACKS": self.stacks_file(rank),
            "BATCHML_PROGRESS": os.path.join(self._temporary, f"progress-{rank}"),
            "TORCHELASTIC_ERROR_FILE": os.path.join(
                self._temporary, f"error-{generation}-{rank}.json"
            ),
        }


class _Rank:
    """A running rank. `label` is printed before each line in the run's log.

    If standard error has a pipe of its own, the run's log gets that alone; the rank's own log gets
    all output.
    """

    def __init__(
        self,
        rank: int,
        label: bytes,
        log: Optional[_RankLog],
        error_file: str,
        process: subprocess.Popen[bytes],
    ) -> None:
        self.rank = rank
        self.label = label
        self.tail: Deque[str] = deque(maxlen=TAIL)
        self.error_file = error_file
        self._log = log
        self.process = process
        shows_errors_only = process.stderr is not None
        files = [file for file in (self.process.stdout, self.process.stderr) if file is not None]
        self.pipes = [file.fileno() for file in files]
        for pipe in self.pipes:
            os.set_blocking(pipe, False)
        self.splitters = {pipe: LineSplitter() for pipe in self.pipes}
        self.is_shown = {
            file.fileno(): not shows_errors_only or file is self.process.stderr for file in files
        }

    def keep(self, lines: Sequence[bytes]) -> None:
        self.tail.extend(line.decode("utf-8", "replace")[:_MAX_TAIL_LINE] for line in lines[-TAIL:])
        if self._log is not None and not self._log.write(lines):
            self._log = None

    def close(self) -> None:
        for file in (self.process.stdout, self.process.stderr):
            if file is not None:
                file.close()
        if self._log is not None:
            self._log.close()


class _RankLog:
    """The output of a rank over all generations. A full file replaces the previous one, `.1`."""

    def __init__(self, path: str, generation: int) -> None:
        self._path = path
        self._open()
        self.write([f"--- generation {generation}".encode()])

    def _open(self) -> None:
        self._file: BinaryIO = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._size = self._file.tell()

    def write(self, lines: Sequence[bytes]) -> bool:
        """Append lines. False once the file cannot be written."""
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


def _read_stamp(path: str) -> float:
    """When a rank failed, as torch's `@record` wrote into a file; 0 without such a file."""
    try:
        with open(path, encoding="utf-8") as file:
            return float(json.load(file)["message"]["extraInfo"]["timestamp"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0.0
