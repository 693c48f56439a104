"""Control groups: find where they can be made, limit the processes in them, and kill these.

Each runner has a control group of its own, its `Slot`. Both versions of the kernel's interface are
supported. Where neither can be written, resources are counted but not enforced.

Standard library only, because runners import it.
"""

from __future__ import annotations

import errno
import os
import signal
import time

from batchml.runtime.processes import start_time

_LIMITED = ("memory", "pids", "cpu")  # controllers; version 1 has a tree for each

Groups = dict[str, str]  # controller -> folder; version 2 has one tree, "all"


def find(identity: str) -> Groups:
    """The folders for a state folder's slots; empty where making them is denied.

    They are below this process's own group, so that its limits apply to jobs, too.
    """
    name = name_of(identity)
    try:
        mounts, own = _mounts_and_own()
    except OSError:
        return {}
    usable = [c for c in _LIMITED if c in mounts and c in own]
    if {*usable} >= {"memory", "pids"}:
        groups = {c: _make(os.path.join(mounts[c] + own[c], name)) for c in usable}
        return groups if all(groups.values()) else {}
    if "all" in mounts and "all" in own:
        return find_v2(mounts["all"], own["all"], name)
    return {}


def name_of(identity: str) -> str:
    """The name of the group that contains a state folder's slots."""
    return f"batchml-{identity}"


def ours(groups: Groups, identity: str) -> Groups:
    """The recorded groups that belong to this state folder, which may be a copy of another."""
    name = name_of(identity)
    return {c: path for c, path in groups.items() if os.path.basename(path) == name}


def current_groups() -> dict[str, str]:
    """The groups of this process: controller -> folder. Raises OSError."""
    mounts, own = _mounts_and_own()
    return {c: mounts[c] + own[c] for c in mounts if c in own}


def _mounts_and_own() -> tuple[dict[str, str], dict[str, str]]:
    return mounts_in(_read("/proc/self/mountinfo")), own_groups(_read("/proc/self/cgroup"))


def own_groups(text: str) -> dict[str, str]:
    """Parse /proc/self/cgroup: controller -> path. Version 2's line has no controller."""
    paths = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(",") if controllers else ["all"]:
            paths[controller] = "" if path == "/" else path
    return paths


def mounts_in(text: str) -> dict[str, str]:
    """Parse /proc/self/mountinfo: controller -> the mount point of its tree. Trees whose mount does
    not begin at their root are left out.
    """
    mounts: dict[str, str] = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        fields = before.split(" ")
        # If the root of the mount is a group below the tree's root, as in a container, its paths
        # differ from those in /proc/self/cgroup, unless a namespace makes both `/`.
        if fields[3] != "/":
            continue
        if kind == "cgroup2":
            mounts.setdefault("all", fields[4])
        elif kind == "cgroup":
            for controller in set(options.split(" ")[-1].split(",")) & set(_LIMITED):
                mounts.setdefault(controller, fields[4])
    return mounts


def find_v2(mount: str, path: str, name: str) -> Groups:
    """The nearest group, from `path` upwards, whose children can have limits.

    A group that contains processes cannot give its children limits, so it is seldom this process's
    own group.
    """
    while True:
        parent = mount + path
        enabled = _child_controllers(parent)
        if enabled >= {"memory", "pids"}:
            folder = _make(os.path.join(parent, name))
            for controller in (
                (enabled & {*_LIMITED}) - _child_controllers(folder) if folder else ()
            ):
                write(os.path.join(folder, "cgroup.subtree_control"), f"+{controller}")
            if folder and _child_controllers(folder) >= {"memory", "pids"}:
                return {"all": folder}
        if not path:
            return {}
        path = os.path.dirname(path).rstrip("/")


def _child_controllers(group: str) -> set[str]:
    """The controllers that a group enables for its children."""
    try:
        return set(_read(os.path.join(group, "cgroup.subtree_control")).split())
    except OSError:
        return set()


def _make(folder: str) -> str:
    """Make the folder unless it exists; return its path, or "" where it cannot be made or
    written.
    """
    for _ in range(10):  # the last runner of an earlier server may be removing it now
        try:
            os.mkdir(folder)
        except FileExistsError:
            pass
        except OSError:
            return ""
        if os.access(folder, os.W_OK):
            return folder
        if os.path.isdir(folder):
            return ""
    return ""


def slot_name(pid: int, started: int | None) -> str:
    """The name of a runner's slot. It identifies the runner, also when the runner has ended."""
    return f"{pid}-{started or 0}"


def members(folders: list[str]) -> list[int]:
    """The processes in the groups and in groups below them."""
    pids: dict[int, None] = {}
    for folder in folders:
        for group, _, _ in os.walk(folder):
            try:
                text = _read(os.path.join(group, "cgroup.procs"))
            except OSError:
                continue
            pids.update(dict.fromkeys(map(int, text.split())))
    pids.pop(0, None)  # a process of another PID namespace: for kill, 0 is our own group
    return list(pids)


def kill(folders: list[str]) -> list[int]:
    """Kill the processes in the groups of a dead runner; their process ids.

    Call it until it finds none. The processes in the groups cannot fork meanwhile.
    """
    for folder in folders:
        if not write(os.path.join(folder, "cgroup.kill"), "1"):
            write(os.path.join(folder, "pids.max"), "0")
    left = members(folders)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    return left


def remove(folders: list[str], limit: float = 1.0) -> bool:
    """Remove groups and the groups below them. False when some are still in use after `limit`
    seconds.
    """
    end = time.monotonic() + limit
    while True:
        left = [folder for folder in folders if not _try_remove(folder)]
        if not left or time.monotonic() > end:
            return not left
        time.sleep(0.005)  # processes that were just killed are still in the groups


def _try_remove(folder: str) -> bool:
    """Remove a group and the groups below it. False when one is in use."""
    for group, _, _ in os.walk(folder, topdown=False):
        try:
            os.rmdir(group)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
    return True


def forget(groups: Groups) -> None:
    """Remove the folders of a state folder's slots, if they are empty; the next slot makes them
    again.

    Not with version 2, where they also enable the controllers of their children.
    """
    for controller, folder in groups.items():
        if controller != "all":
            try:
                os.rmdir(folder)
            except OSError:
                pass  # it contains the slot of another runner


def remove_dead_slots(groups: Groups) -> list[int]:
    """Kill and remove the slots of runners that have ended. Returns the processes that were
    killed.
    """
    killed: list[int] = []
    for parent in groups.values():
        for name in _names_in(parent):
            folder = os.path.join(parent, name)
            pid, _, started = name.partition("-")
            if not (os.path.isdir(folder) and pid.isdigit() and started.isdigit()):
                continue
            if start_time(int(pid)) == int(started):
                continue  # the runner lives, and its attempt continues
            killed += [pid for pid in kill([folder]) if pid not in killed]
            remove([folder])
    return killed


def _names_in(folder: str) -> list[str]:
    """The names in a folder, which its last runner may be removing now: see `forget`."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def max_pids() -> int:
    """The maximum number of processes for one attempt: an eighth of the system's, within bounds."""
    try:
        return min(max(int(_read("/proc/sys/kernel/pid_max")) // 8, 1024), 32_768)
    except (OSError, ValueError):
        return 4096


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def write(path: str, text: str) -> bool:
    """Write to a file of a group. False when the file is missing, or the kernel refuses."""
    try:
        must_write(path, text)
    except OSError:
        return False
    return True


def must_write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


# --- The control group of one runner --------------------------------------------------------------
# Every program that a runner starts is born in the runner's slot. Its processes cannot escape the
# slot's limits by calling setsid, by clearing their environment or by outliving their parent.

_MIB = 1 << 20
_UNLIMITED = 1 << 60
_FLAGS = os.O_CLOEXEC

Limits = tuple[int | None, int, int]  # the arguments of `Slot.limit`


def make_slot(groups: Groups, name: str) -> Slot:
    """Make a slot. Raises OSError when that is impossible."""
    return (SlotV2 if "all" in groups else Slot)(groups, name)


class Slot:
    """A slot in version 1 of control groups.

    The thread that starts programs calls `enter` before each start, and only this thread moves,
    which takes 5 us. It is not the first thread of its process, so the kernel neither counts the
    runner's memory in the slot nor chooses the runner when it kills for memory.
    """

    _MEMBERS = "tasks"
    _OOM = ("memory", "memory.oom_control")

    def __init__(self, groups: Groups, name: str, own: Groups | None = None) -> None:
        """`own` has the runner's own groups; None: find them. Raises OSError."""
        self.folders = {c: os.path.join(folder, name) for c, folder in groups.items()}
        self._oom_kills = 0
        self._limits: Limits | None = None
        for folder in self.folders.values():
            _make_slot_folder(folder)
        own = own or current_groups()
        self._moves = [
            (self._open_members(self.folders[c]), self._open_members(own[c])) for c in groups
        ]
        controller, file = self._OOM
        self._oom = os.open(os.path.join(self.folders[controller], file), os.O_RDONLY | _FLAGS)

    def _open_members(self, folder: str) -> int:
        return os.open(os.path.join(folder, self._MEMBERS), os.O_WRONLY | _FLAGS)

    def limit(self, memory: int | None, vcpus: int, pids: int) -> None:
        """Set the limits, unless they are unchanged. Memory in MiB, or None for no limit. Raises
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
        """Kill the processes in the slot. The runner is outside of it, and collects them."""
        self._limits = None  # a group that is being killed may contain no process for a while
        kill(list(self.folders.values()))

    def remove(self) -> None:
        remove(list(self.folders.values()))
        forget({c: os.path.dirname(folder) for c, folder in self.folders.items()})


class SlotV2(Slot):
    """A slot in version 2, which can only move the whole runner in and out again.

    While the runner is inside, memory has no limit: else the runner, which is larger than the new
    process, would be killed.
    """

    _MEMBERS = "cgroup.procs"
    _OOM = ("all", "memory.events")

    def __init__(self, groups: Groups, name: str, own: Groups | None = None) -> None:
        super().__init__(groups, name, own)
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


def _make_slot_folder(folder: str) -> None:
    """Make the folder of a slot. Another runner may be removing the folder above it."""
    for _ in range(10):
        try:
            return os.makedirs(folder, exist_ok=True)
        except FileNotFoundError:
            continue
    os.makedirs(folder, exist_ok=True)
