"""Spares: the processes of the next start of a node's ranks, begun before it is needed.

After a rank is killed, most of the time to the next step is `import torch`. So while the ranks of a
program train that has imported torch, its supervisor starts the next process of each, with the very
command and variables of the next start. Such a spare imports torch and waits, before it has read a
line of its program (`runtime/site/batchml_torch.py`); it opens no GPU. It is no fork of another
process: threads, CUDA and the supervisor's bond with its children do not survive one. If the next
start is not the expected one, or a spare ended itself because its program could see a difference,
the rank is started plainly.

A spare takes about 1.5 s of CPU time, and 150 MiB with torch for CPUs. So they are started one at
a time, a while after their ranks, only where a processor is idle and memory is left, and are ended
when memory gets short; the kernel, too, kills them first. BATCHML_SPARES=0 switches them off, and 1
lets them start also where no processor is idle.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from batchml.runtime.processes import die_with_parent, read
from batchml.runtime.telemetry.usage import memory_left

VARIABLE = "BATCHML_SPARES"
ORDER = "BATCHML_SPARE"  # for sitecustomize: the connection, and the file of the rank's state
_MIB = 1 << 20
_SIZE = 384 * _MIB  # of memory for each spare that is started, and
_LEAST = 512 * _MIB  # for all else
_TOO_LITTLE = 256 * _MIB  # memory that is left, below which spares are ended
_LOOK_EVERY = 5.0  # seconds over which processors must have been idle


class RankStart(NamedTuple):
    """The start of a rank."""

    command: Sequence[str]
    environ: Mapping[str, str]
    errors_apart: bool  # standard error has a pipe of its own


def start_rank(start: RankStart, *channel: int) -> subprocess.Popen[bytes]:
    """Start the process of a rank, with these descriptors. Raises OSError and ValueError."""
    return subprocess.Popen(
        list(start.command),
        env=dict(start.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if start.errors_apart else subprocess.STDOUT,
        start_new_session=True,
        pass_fds=channel,
        preexec_fn=die_with_parent(os.getpid()),
    )


def idle_seconds() -> float:
    """The CPU seconds for which processors of this host were idle since it booted: proc(5)."""
    words = read("/proc/stat").partition("\n")[0].split()
    return sum(map(int, words[4:6])) / os.sysconf("SC_CLK_TCK")


class Spares:
    """The spares of one node. `state_of`: the file that a rank with this process id may have
    written about its import of torch. `after`: seconds from the start of the ranks to the first
    spare.
    """

    def __init__(
        self,
        state_of: Callable[[int], str],
        after: float,
        setting: str = "",
        memory: Callable[[], int] = memory_left,
        idle: Callable[[], float] = idle_seconds,
    ) -> None:
        self._state_of, self._after, self._setting = state_of, after, setting
        self._memory, self._idle = memory, idle
        self._next: List[RankStart] = []  # those that have no spare yet
        self._at = 0.0  # when the next spare may be started
        self._looked: Optional[Tuple[float, float]] = None  # time, `idle()`
        self._spares: Dict[int, _Spare] = {}  # by process id

    @property
    def pids(self) -> Set[int]:
        return set(self._spares)

    def begin(self, starts: Sequence[RankStart], now: float) -> None:
        """The ranks of a generation were started; `starts` are the next ones. End other spares."""
        self.end()
        is_python = all(os.path.basename(s.command[0]).startswith("python") for s in starts)
        self._next = list(starts) if is_python and self._setting != "0" else []
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
        state = self._state_of(ranks[len(self._spares)])
        if os.path.exists(state) and self._has_room(now):  # the rank has imported torch
            self._start(self._next.pop(0), state)

    def end(self) -> None:
        """End all spares, and start no more for these ranks."""
        self._next = []
        while self._spares:
            self._spares.popitem()[1].end()

    def _has_room(self, now: float) -> bool:
        if self._memory() < _LEAST + _SIZE * len(self._next):
            return False
        if self._setting == "1":
            return True
        before, self._looked = self._looked, (now, self._idle())
        if before is None or now - before[0] < _LOOK_EVERY:
            self._looked = before or self._looked
            return False
        return self._looked[1] - before[1] >= now - before[0]

    def _start(self, start: RankStart, state: str) -> None:
        try:
            spare = _Spare(start, state)
        except (OSError, ValueError):
            self.end()
            return
        self._spares[spare.process.pid] = spare


class _Spare:
    """One spare. The constructor starts its process. Raises OSError and ValueError."""

    def __init__(self, start: RankStart, state: str) -> None:
        self.start = start
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        self._is_ready = False
        with theirs:
            order = {ORDER: f"{theirs.fileno()} {state}"}
            own = start._replace(environ={**start.environ, **order})
            self.process = start_rank(own, theirs.fileno())

    def is_ready(self) -> Optional[bool]:
        """Whether it has imported torch; None if it has ended."""
        try:
            data = self._channel.recv(16)
        except BlockingIOError:
            return self._is_ready
        except OSError:
            return None
        self._is_ready = data == b"ready"
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

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._channel.close()
        for file in (self.process.stdout, self.process.stderr):
            if file is not None:
                file.close()
