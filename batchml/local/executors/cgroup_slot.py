"""The control group of one runner: its limits cannot be escaped.

Every program that the runner starts is born in it. The program's processes cannot leave it by
calling setsid, by clearing their environment or by outliving their parent.

Standard library only: runners import it.
"""

from __future__ import annotations

import os

from batchml.local.executors import cgroup
from batchml.local.executors.cgroup import Groups, must_write, write

_MIB = 1 << 20
_UNLIMITED = 1 << 60
_FLAGS = os.O_CLOEXEC

Limits = tuple[int | None, int, int]


def make_slot(groups: Groups, name: str) -> Slot:
    """Make a slot. Raises OSError when that is impossible."""
    return (SlotV2 if "all" in groups else Slot)(groups, name)


class Slot:
    """A slot in version 1 of control groups.

    The thread that starts programs calls `enter` before each start, and only this thread moves,
    which takes 5 us. It is not the first thread of its process, so the kernel neither counts the
    runner's memory here nor chooses the runner when it kills for memory.
    """

    _MEMBERS = "tasks"
    _OOM = ("memory", "memory.oom_control")

    def __init__(self, groups: Groups, name: str, home: Groups | None = None) -> None:
        """`home` is the runner's own group, which is found unless given. Raises OSError."""
        self.folders = {c: os.path.join(folder, name) for c, folder in groups.items()}
        self._oom_kills = 0
        self._limits: Limits | None = None
        for folder in self.folders.values():
            _make(folder)
        home = home or cgroup.current_groups()
        self._moves = [
            (self._open_members(self.folders[c]), self._open_members(home[c])) for c in groups
        ]
        controller, name = self._OOM
        self._oom = os.open(os.path.join(self.folders[controller], name), os.O_RDONLY | _FLAGS)

    def _open_members(self, folder: str) -> int:
        return os.open(os.path.join(folder, self._MEMBERS), os.O_WRONLY | _FLAGS)

    def limit(self, memory: int | None, vcpus: int, pids: int) -> None:
        """Set the limits, unless they are unchanged. Memory in MiB, or None for any. Raises
        OSError.
        """
        if self._limits == (memory, vcpus, pids):
            return
        self._limits = None
        self._set(None if memory is None else memory * _MIB, vcpus, pids)
        self._limits = (memory, vcpus, pids)

    def _set(self, memory: int | None, vcpus: int, pids: int) -> None:
        self._set_memory(_UNLIMITED if memory is None else memory)
        must_write(f"{self.folders['pids']}/pids.max", str(pids))
        if "cpu" in self.folders:
            write(f"{self.folders['cpu']}/cpu.shares", str(1024 * vcpus))

    def _set_memory(self, size: int) -> None:
        """The limit with swap, where it exists, must never be below the limit without: the order
        matters.
        """
        group = self.folders["memory"]
        both, alone = f"{group}/memory.memsw.limit_in_bytes", f"{group}/memory.limit_in_bytes"
        if os.path.exists(both):
            write(both, str(_UNLIMITED))
        if not write(alone, str(size)):
            # The file cache of earlier attempts is counted here; it can be dropped.
            write(f"{group}/memory.force_empty", "0")
            must_write(alone, str(size))
        if os.path.exists(both):
            write(both, str(size))

    def enter(self) -> None:
        """Move this thread into the slot: its children are born there from now on."""
        for inside, _ in self._moves:
            os.write(inside, b"0")

    def leave(self) -> None:
        for _, outside in self._moves:
            os.write(outside, b"0")

    def oom_kills(self) -> int:
        """How many processes the kernel has killed for memory since the last call."""
        for line in os.pread(self._oom, 4096, 0).splitlines():
            if line.startswith(b"oom_kill "):
                before, self._oom_kills = self._oom_kills, int(line.split()[1])
                return self._oom_kills - before
        return 0

    def kill(self) -> None:
        """Kill the processes in the slot. The runner is not in there, and collects them."""
        self._limits = None  # a group that is being killed may contain no process for a while
        cgroup.kill(list(self.folders.values()))

    def remove(self) -> None:
        cgroup.remove(list(self.folders.values()))
        cgroup.forget({c: os.path.dirname(folder) for c, folder in self.folders.items()})


class SlotV2(Slot):
    """A slot in version 2, which can only move the whole runner in and out again.

    While the runner is inside, memory has no limit: else the runner, which is larger than the new
    process, would be killed.
    """

    _MEMBERS = "cgroup.procs"
    _OOM = ("all", "memory.events")

    def __init__(self, groups: Groups, name: str, home: Groups | None = None) -> None:
        super().__init__(groups, name, home)
        self._memory = "max"
        self.enter()  # fails here if the runner may not move, or not return
        self.leave()

    def _set(self, memory: int | None, vcpus: int, pids: int) -> None:
        group = self.folders["all"]
        write(f"{group}/memory.swap.max", "0")
        must_write(f"{group}/pids.max", str(pids))
        write(f"{group}/cpu.weight", str(min(100 * vcpus, 10_000)))
        self._memory = "max" if memory is None else str(memory)
        self._limit_memory(self._memory)

    def enter(self) -> None:
        if self._memory != "max":
            self._limit_memory("max")
        super().enter()

    def leave(self) -> None:
        super().leave()
        if self._memory != "max":
            self._limit_memory(self._memory)

    def _limit_memory(self, text: str) -> None:
        must_write(f"{self.folders['all']}/memory.max", text)


def _make(folder: str) -> None:
    """Make a folder, in a folder that another runner may be removing at its end."""
    for _ in range(10):
        try:
            return os.makedirs(folder, exist_ok=True)
        except FileNotFoundError:
            continue
    os.makedirs(folder, exist_ok=True)
