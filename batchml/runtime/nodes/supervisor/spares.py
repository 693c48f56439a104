"""Spares: the processes of the next start of a node's ranks, begun before it is needed.

After a rank is killed, most of the time to the next step is `import torch`. So while the ranks of a
program train that has imported torch, the supervisor of a run with BATCHML_SPARES=1 starts the next
process of each, with the very command and variables of the next start. Such a spare imports torch
and waits, before it has read a line of its program (`runtime/site/batchml_torch.py`); it opens no
GPU. It is no fork of another process: threads, CUDA and the supervisor's bond with its children do
not survive one. If the next start is not the expected one, or a spare ended itself because its
program could see a difference, the rank is started plainly. The start after that of a spare is
plain, too, because only such a rank shows how its program imports torch now.

A process knows that it is a spare by its name, which is that of the link that the supervisor
started it by: it loses the name when it starts another program, such as that of a wrapper.

A spare takes about 1.5 s of CPU time, and 150 MiB with torch for CPUs. So they are started one at
a time, a while after their ranks, only where a processor is idle and memory is left, and are ended
when memory gets short.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from batchml.runtime.processes import SPARE, die_with_parent, read
from batchml.runtime.processors import SITE, available_processors
from batchml.runtime.telemetry.usage import memory_left

VARIABLE = "BATCHML_SPARES"
_ORDER = "spare-order"  # for batchml_torch: descriptor of the connection, our id, the rank's state
_MIB = 1 << 20
_SIZE = 384 * _MIB  # of memory for each spare that is started, and
_LEAST = 512 * _MIB  # for all else
_TOO_LITTLE = 256 * _MIB  # memory that is left, below which spares are ended
_LOOK_EVERY = 5.0  # seconds over which processors must have been idle
_END_LIMIT = 5.0  # seconds; a process that is stuck in the kernel cannot be killed


def are_wanted(environ: Mapping[str, str]) -> bool:
    """Whether a run asks for spares. `runtime/site/sitecustomize.py` decides the same."""
    return environ.get(VARIABLE) == "1"


class RankStart(NamedTuple):
    """The start of a rank."""

    command: Sequence[str]
    environ: Mapping[str, str]
    errors_apart: bool  # standard error has a pipe of its own


def start_rank(
    start: RankStart, *channel: int, link: Optional[str] = None
) -> subprocess.Popen[bytes]:
    """Start the process of a rank, with these descriptors. Raises OSError and ValueError.

    `link`: the path of its program, if that is not the first word of the command.
    """
    return subprocess.Popen(
        list(start.command),
        executable=link,
        env=dict(start.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if start.errors_apart else subprocess.STDOUT,
        start_new_session=True,
        pass_fds=channel,
        preexec_fn=die_with_parent(os.getpid()),
    )


def idle_seconds() -> float:
    """The CPU seconds for which our processors were idle since the boot; 0 if a quota, too, limits
    them: then an idle one is not ours to use. Source: proc(5), /proc/stat.
    """
    ours = os.sched_getaffinity(0)
    if available_processors() < len(ours):
        return 0.0
    return idle_of(read("/proc/stat"), ours)


def idle_of(stat: str, processors: Collection[int]) -> float:
    """The seconds for which these processors were idle or waited for a disk."""
    names = {f"cpu{number}" for number in processors}
    lines = (line.split() for line in stat.splitlines())
    return sum(int(n) for w in lines if names & {*w[:1]} for n in w[4:6]) / os.sysconf("SC_CLK_TCK")


class Spares:
    """The spares of one node. `folder`: for files; it has those of ranks, too. `after`: seconds
    from the start of the ranks to the first spare; 0, for tests: also if no processor is idle.
    `are_on`: without that, there are none.
    """

    def __init__(
        self,
        folder: str,
        after: float,
        are_on: bool,
        memory: Callable[[], int] = memory_left,
        idle: Callable[[], float] = idle_seconds,
    ) -> None:
        self._folder, self._after, self.are_on = folder, after, are_on
        self._memory, self._idle = memory, idle
        self._next: List[RankStart] = []  # those that have no spare yet
        self._at = 0.0  # when the next spare may be started
        self._looked: Optional[Tuple[float, float]] = None  # time, `idle()`
        self._spares: Dict[int, _Spare] = {}  # by process id
        self._killed = 0

    @property
    def pids(self) -> Set[int]:
        return set(self._spares)

    def begin(self, starts: Sequence[RankStart], now: float) -> None:
        """The ranks of a generation were started; `starts` are the next ones. End other spares."""
        self.end()
        self._next = list(starts)
        self._at = now + self._after
        self._looked = None

    def take(self, start: RankStart) -> Optional[subprocess.Popen[bytes]]:
        """The spare for this start, which begins its program now; None without one."""
        for pid, spare in list(self._spares.items()):
            if spare.start == start and spare.release():
                del self._spares[pid]
                return spare.process
        return None

    def tick(self, now: float, ranks: Sequence[int]) -> None:
        """Start a spare, if that is due. Called about once a second.

        `ranks`: process ids in the order of the starts; without any, no spare is started.
        """
        ready = [spare.is_ready() for spare in self._spares.values()]
        if None in ready or (ready and self._memory() < _TOO_LITTLE):
            self.end()  # a spare that has ended would end again
        if not (ranks and self._next) or now < self._at or False in ready:
            return
        rank = ranks[len(self._spares)]
        if os.path.exists(self._state(rank)) and self._has_room(now):  # it has imported torch
            self._start(self._next.pop(0), rank)

    def end(self) -> None:
        """End all spares, and start no more for these ranks."""
        self._next = []
        spares, self._spares = list(self._spares.values()), {}
        for spare in spares:
            spare.kill()
        until = time.monotonic() + _END_LIMIT
        self._killed += sum(spare.close(until) for spare in spares)

    def count_killed(self) -> int:
        """How many spares others have killed: the kernel, perhaps, because memory was full."""
        if any(spare.process.poll() is not None for spare in self._spares.values()):
            self.end()
        return self._killed

    def forget(self, rank: int) -> None:
        """A rank has ended: remove what it noted."""
        if self.are_on:
            with suppress(OSError):
                os.unlink(self._state(rank))

    def _state(self, rank: int) -> str:
        """The file in which a rank notes how it imports torch: `runtime/site/batchml_torch.py`."""
        return os.path.join(self._folder, f"torch-{rank}")

    def _has_room(self, now: float) -> bool:
        if self._memory() < _LEAST + _SIZE * len(self._next):
            return False
        if not self._after:
            return True
        before, self._looked = self._looked, (now, self._idle())
        if before is None or now - before[0] < _LOOK_EVERY:
            self._looked = before or self._looked
            return False
        return self._looked[1] - before[1] >= now - before[0]

    def _start(self, start: RankStart, rank: int) -> None:
        try:
            link, program = os.path.join(self._folder, SPARE), _program_of(start, rank)
            if os.path.lexists(link):
                os.unlink(link)
            os.symlink(program, link)
            spare = _Spare(start, link, self._state(rank))
        except (OSError, ValueError):
            self.end()
            return
        self._spares[spare.process.pid] = spare


def _program_of(start: RankStart, rank: int) -> str:
    """The path of the Python that this start runs, as the rank does.

    Raises OSError and ValueError if the rank runs another program by now: the command is a wrapper,
    whose preparations must not be made beside a rank.
    """
    found = shutil.which(start.command[0], path=start.environ.get("PATH"))
    is_own = read(f"/proc/{rank}/cmdline").split("\0")[:-1] == list(start.command)
    is_own = is_own and not any(word.startswith("batchml.") for word in start.command)  # -m
    if not found or not is_own or not os.path.samefile(found, f"/proc/{rank}/exe"):
        raise ValueError(f"rank process {rank} is not that of {start.command[0]}")
    os.stat(os.path.join(SITE, "sitecustomize.py"))  # without it, a spare would not wait
    return os.path.abspath(found)


class _Spare:
    """One spare. The constructor starts its process. Raises OSError and ValueError.

    `link`: the path of its program. `state`: the file of the rank.
    """

    def __init__(self, start: RankStart, link: str, state: str) -> None:
        self.start = start
        self._is_ready = self._is_ended = False
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        with theirs:
            try:
                order = os.path.join(os.path.dirname(link), _ORDER)
                with open(order, "w", encoding="utf-8") as file:
                    file.write(f"{theirs.fileno()} {os.getpid()} {state}")
                self.process = start_rank(start, theirs.fileno(), link=link)
            except BaseException:
                self._channel.close()
                raise

    def is_ready(self) -> Optional[bool]:
        """Whether it has imported torch; None if it has ended."""
        try:
            data = self._channel.recv(64)
        except BlockingIOError:
            return self._is_ready
        except OSError:
            return None
        self._is_ready = data == f"ready {self.process.pid}".encode()
        return self._is_ready or None

    def release(self) -> bool:
        """Let it run its program. False if it cannot: then it must be ended."""
        if not self.is_ready():
            return False
        try:
            return self._channel.send(b"go") == 2
        except OSError:
            return False
        finally:
            self._channel.close()

    def kill(self) -> None:
        if self.process.poll() is None:
            self._is_ended = True
            self.process.kill()

    def close(self, until: float) -> bool:
        """Wait for its end, no longer than `until`. Return whether others have killed it."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
        self._channel.close()
        for file in (self.process.stdout, self.process.stderr):
            if file is not None:
                file.close()
        return self.process.returncode == -signal.SIGKILL and not self._is_ended
