"""The ranks of a generation on one node: started, listened to, signalled, and gone in the end.

Each has a session of its own and dies with the supervisor. What they leave behind becomes the
supervisor's child, which ends it before it says that the generation is over.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Callable, Deque, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.nodes.torchrun.rank_env import Place, rank_environment, with_path
from batchml.runtime.processes import descendants, kill_descendants, send
from batchml.runtime.protocol.launch import MAIN
from batchml.runtime.protocol.log_marks import LineSplitter

TAIL = 20  # lines of each rank that are remembered
MAX_LOG = 32 << 20  # bytes of a rank's file, of which there are two: this one, and the one before
_READ = 65_536
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_WHOLE = 2_000  # characters of a line of the tail


class RankEnd(NamedTuple):
    rank: int
    code: int  # below 0: of a signal
    tail: Tuple[str, ...]
    stamp: float
    was_sent: bool


class Ranks:
    """Those of one generation. `write` takes whole lines for the log."""

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
        self._ranks: Dict[int, _Rank] = {}  # pid ->
        self._others: Dict[int, Tuple[subprocess.Popen[bytes], Callable[[int], None]]] = {}
        self._sent: Tuple[int, ...] = ()
        self.last_output = time.monotonic()

    def start(self, command: Sequence[str], environ: Mapping[str, str], place: Place) -> None:
        """Raises OSError and ValueError, as Popen does, with no rank left."""
        site = self._site()
        self._sent = ()
        self.last_output = time.monotonic()
        die = dies_with(os.getpid())
        try:
            for local in range(place.here):
                rank = place.first + local
                files = self._files(rank, place.generation)
                files["PYTHONPATH"] = with_path(environ, "PYTHONPATH", site)
                found = rank_environment(environ, place, local, files)
                label = f"[r{rank}] ".encode() if place.here > 1 else b""
                made = _Rank(rank, label, self._streams(rank), self._log(rank, place.generation))
                made.start(command, found, die)
                made.error_file = files["TORCHELASTIC_ERROR_FILE"]
                self._ranks[made.pid] = made
                for pipe in made.pipes:
                    self._selector.register(pipe, selectors.EVENT_READ, self._reader(made, pipe))
        except BaseException:
            self.signal(signal.SIGKILL)
            for pid in list(self._ranks):
                self._ended(self._ranks.pop(pid))
            raise

    def first(
        self, command: Sequence[str], environ: Mapping[str, str], ended: Callable[[int], None]
    ) -> None:
        """Start what has to be done before the ranks start; `ended` hears its code, below 0 of a
        signal. It is a child as they are, and goes with them. Raises OSError.
        """
        die = dies_with(os.getpid())
        made = subprocess.Popen(
            list(command), env=dict(environ), stdin=subprocess.DEVNULL, preexec_fn=die
        )
        self._others[made.pid] = made, ended

    def stacks_file(self, rank: int) -> str:
        return os.path.join(self._temporary, f"stacks-{rank}")

    def progress_files(self) -> List[str]:
        return [os.path.join(self._temporary, f"progress-{r.rank}") for r in self._ranks.values()]

    def living(self) -> List[Tuple[int, int]]:
        """(rank, pid) of those that have not ended."""
        return sorted((rank.rank, pid) for pid, rank in self._ranks.items())

    def signal(self, number: int) -> None:
        """To every process of the generation, whatever its session."""
        self._sent = (*self._sent, number)
        found = descendants(os.getpid())
        send(found, number)
        if number == signal.SIGTERM:
            send(found, signal.SIGCONT)  # who is stopped would not hear it

    def reap(self) -> List[RankEnd]:
        """Ranks that have ended since the last call; orphans are collected on the way."""
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
                process, ended = other
                ended(process.wait())
                continue
            if rank is None:
                os.waitpid(state.si_pid, os.WNOHANG)
                continue
            found.append(self._ended(rank))
        return found

    def clear(self) -> bool:
        """Once all ranks have ended: end what they left behind. Whether nothing is there now."""
        return not self._ranks and kill_descendants(5.0)

    def _ended(self, rank: _Rank) -> RankEnd:
        code = rank.process.wait()
        for pipe in rank.pipes:
            while self._read(rank, pipe):
                pass  # not to the end: a child of it may keep the pipe open
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
            if rank.shown[pipe]:
                self._write([rank.label + line for line in lines] if rank.label else lines)

    def _streams(self, rank: int) -> str:
        return "apart" if self._logs == MAIN and rank else "one"

    def _log(self, rank: int, generation: int) -> Optional[_File]:
        if not self._output:
            return None
        try:
            os.makedirs(self._output, exist_ok=True)
            return _File(os.path.join(self._output, f"rank-{rank}.log"), generation)
        except OSError:
            return None  # a full disk: the log has it all the same

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
        from batchml.runtime.nodes.torchrun import rank_site

        folder = os.path.join(self._temporary, "site")
        if not os.path.isdir(folder):
            os.makedirs(folder)
            shutil.copy(rank_site.__file__, os.path.join(folder, "sitecustomize.py"))
        return folder


class _Rank:
    def __init__(self, rank: int, label: bytes, streams: str, log: Optional[_File]) -> None:
        self.rank = rank
        self.label = label
        self.tail: Deque[str] = deque(maxlen=TAIL)
        self.error_file = ""
        self._streams = streams
        self._log = log

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], die: Callable[[], None]
    ) -> None:
        apart = self._streams == "apart"
        self.process = subprocess.Popen(
            list(command),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if apart else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die,
        )
        self.pid = self.process.pid
        files = [self.process.stdout, *([self.process.stderr] if apart else [])]
        self.pipes = [file.fileno() for file in files if file is not None]
        for pipe in self.pipes:
            os.set_blocking(pipe, False)
        self.splitters = {pipe: LineSplitter() for pipe in self.pipes}
        # Apart, the first is the output of a rank other than 0, which is in its file alone.
        self.shown = {pipe: not apart or place == 1 for place, pipe in enumerate(self.pipes)}

    def keep(self, lines: Sequence[bytes]) -> None:
        self.tail.extend(line.decode("utf-8", "replace")[:_WHOLE] for line in lines[-TAIL:])
        if self._log is not None and not self._log.write(lines):
            self._log = None

    def close(self) -> None:
        for file in (self.process.stdout, self.process.stderr):
            if file is not None:
                file.close()
        if self._log is not None:
            self._log.close()


class _File:
    """The whole output of a rank over all generations, bounded: the older half is dropped."""

    def __init__(self, path: str, generation: int) -> None:
        self._path = path
        self._open()
        self.write([f"--- generation {generation}".encode()])

    def _open(self) -> None:
        self._file: BinaryIO = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._size = self._file.tell()

    def write(self, lines: Sequence[bytes]) -> bool:
        """False once that is impossible."""
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


def dies_with(parent: int) -> Callable[[], None]:
    """What a process calls that is to be killed when its parent, of this id, dies."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it has died already
            os._exit(1)

    return ask


def _stamp(path: str) -> float:
    """When a rank failed by its own account, which `@record` of torch writes; 0 without one."""
    try:
        with open(path, encoding="utf-8") as file:
            return float(json.load(file)["message"]["extraInfo"]["timestamp"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0.0
