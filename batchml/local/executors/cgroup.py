"""Control groups: limits that hold, and a way to find every process of an attempt.

Each runner has a group of its own, its slot, and every program that it starts is born in it: what
the program starts in turn cannot leave it by calling setsid, by forgetting its environment or by
outliving its parent. Both versions of the kernel's interface are served. Where neither may be
written there are no slots: resources are counted and not enforced.

Standard library only: runners import it.
"""

from __future__ import annotations

import errno
import os
import signal
import time

from batchml.runtime.processes import start_time

_MOUNTS = "/proc/self/mountinfo"
_LIMITED = ("memory", "pids", "cpu")  # version 1 has a tree for each
_MIB = 1 << 20
_UNLIMITED = 1 << 60
_FLAGS = os.O_CLOEXEC

Groups = dict[str, str]  # controller -> folder; version 2 has one tree, "all"


def find(state_folder: str) -> Groups:
    """The folders below which this state folder's slots may be made; empty where that is denied.

    Below the group that we are in, so that limits set on us hold for jobs too.
    """
    import hashlib

    name = "batchml-" + hashlib.sha256(state_folder.encode()).hexdigest()[:12]
    try:
        with open("/proc/self/cgroup", encoding="ascii") as file:
            own = own_groups(file.read())
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            mounts = mounts_in(file.read())
    except OSError:
        return {}
    wanted = [(c, mounts[c], own[c]) for c in _LIMITED if c in mounts and c in own]
    if {c for c, _, _ in wanted} >= {"memory", "pids"}:
        made = {c: _make(os.path.join(mount + path, name)) for c, mount, path in wanted}
        return {c: folder for c, folder in made.items() if folder} if all(made.values()) else {}
    if "all" in mounts and "all" in own:
        return _find_v2(mounts["all"], own["all"], name)
    return {}


def own_groups(text: str) -> dict[str, str]:
    """Of /proc/self/cgroup: controller -> path. Version 2's line has no controller."""
    found = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(",") if controllers else ["all"]:
            found[controller] = "" if path == "/" else path
    return found


def mounts_in(text: str) -> dict[str, str]:
    """Of /proc/self/mountinfo: controller -> where its tree is mounted from the root on."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        fields = before.split(" ")
        # A tree that is mounted from another group on, as in a container, shows other paths
        # than /proc/self/cgroup unless there is a namespace, which makes both `/`.
        if fields[3] != "/":
            continue
        if kind == "cgroup2":
            found.setdefault("all", fields[4])
        elif kind == "cgroup":
            for controller in set(options.split(" ")[-1].split(",")) & set(_LIMITED):
                found.setdefault(controller, fields[4])
    return found


def _find_v2(mount: str, path: str, name: str) -> Groups:
    """The nearest group at or above ours whose children may have limits.

    A group that holds processes cannot give its children limits, so it is seldom our own.
    """
    while True:
        parent = mount + path
        if _gives(parent) >= {"memory", "pids"}:
            folder = _make(os.path.join(parent, name))
            for controller in _LIMITED if folder else ():
                _write(os.path.join(folder, "cgroup.subtree_control"), f"+{controller}")
            if folder and _gives(folder) >= {"memory", "pids"}:
                return {"all": folder}
        if not path:
            return {}
        path = os.path.dirname(path).rstrip("/")


def _gives(group: str) -> set[str]:
    """What the children of a group can be limited in."""
    try:
        return set(_read(os.path.join(group, "cgroup.subtree_control")).split())
    except OSError:
        return set()


def _make(folder: str) -> str:
    try:
        os.mkdir(folder)
    except FileExistsError:
        pass
    except OSError:
        return ""
    return folder if os.access(folder, os.W_OK) else ""


class Slot:
    """The group of one runner. The thread that starts programs calls `enter` before each.

    With version 1 the entering thread is moved alone, which costs 5 us. It is not the first thread
    of its process, so the kernel neither counts the runner's memory here nor ever chooses the
    runner when it kills for memory. Version 2 can only move the whole runner, in and out again.
    """

    def __init__(self, groups: Groups, name: str) -> None:
        """Raises OSError when the slot cannot be made."""
        self.folders = {c: os.path.join(folder, name) for c, folder in groups.items()}
        self._oom_kills = 0
        self._limits: tuple[int | None, int, int] | None = None
        for folder in self.folders.values():
            _make_slot(folder)
        if "all" in groups:
            home = mounts_in(_read(_MOUNTS))["all"] + own_groups(_read("/proc/self/cgroup"))["all"]
            self._ways = {"all": _way(self.folders["all"], home, "cgroup.procs")}
            self._oom = os.open(f"{self.folders['all']}/memory.events", os.O_RDONLY | _FLAGS)
            return
        mounts, own = mounts_in(_read(_MOUNTS)), own_groups(_read("/proc/self/cgroup"))
        self._ways = {
            c: _way(folder, mounts[c] + own[c], "tasks") for c, folder in self.folders.items()
        }
        self._oom = os.open(f"{self.folders['memory']}/memory.oom_control", os.O_RDONLY | _FLAGS)

    def limit(self, memory: int | None, vcpus: int, pids: int) -> None:
        """Memory in MiB, or None: any. What is as it was is not written again. Raises OSError."""
        if self._limits == (memory, vcpus, pids):
            return
        self._limits = None
        if "all" in self.folders:
            group = self.folders["all"]
            _write(f"{group}/memory.swap.max", "0")
            _must_write(f"{group}/memory.max", "max" if memory is None else str(memory * _MIB))
            _must_write(f"{group}/pids.max", str(pids))
            _write(f"{group}/cpu.weight", str(min(100 * vcpus, 10_000)))
        else:
            self._limit_memory(_UNLIMITED if memory is None else memory * _MIB)
            _must_write(f"{self.folders['pids']}/pids.max", str(pids))
            if "cpu" in self.folders:
                _write(f"{self.folders['cpu']}/cpu.shares", str(1024 * vcpus))
        self._limits = (memory, vcpus, pids)

    def _limit_memory(self, size: int) -> None:
        """With swap, where it is counted, never below the limit without: the order matters."""
        group = self.folders["memory"]
        both, alone = f"{group}/memory.memsw.limit_in_bytes", f"{group}/memory.limit_in_bytes"
        if os.path.exists(both):
            _write(both, str(_UNLIMITED))
        if not _write(alone, str(size)):
            # What earlier attempts left in the file cache is counted here; it can go.
            _write(f"{group}/memory.force_empty", "0")
            _must_write(alone, str(size))
        if os.path.exists(both):
            _write(both, str(size))

    def enter(self) -> None:
        """From here on this thread's children are born in the slot."""
        for inside, _ in self._ways.values():
            os.write(inside, b"0")

    def leave(self) -> None:
        for _, outside in self._ways.values():
            os.write(outside, b"0")

    def oom_kills(self) -> int:
        """How many processes the kernel has killed for memory since the last look."""
        for line in os.pread(self._oom, 4096, 0).splitlines():
            if line.startswith(b"oom_kill "):
                before, self._oom_kills = self._oom_kills, int(line.split()[1])
                return self._oom_kills - before
        return 0

    def kill(self) -> None:
        """Kill what is in there; the runner, which is not, reaps it."""
        self._limits = None  # a group that is being killed may hold no process for a while
        kill(list(self.folders.values()))

    def remove(self) -> None:
        self.leave()
        remove(list(self.folders.values()))
        forget({c: os.path.dirname(folder) for c, folder in self.folders.items()})


def _make_slot(folder: str) -> None:
    """Another runner that ends may just be removing what it is made in."""
    for _ in range(10):
        try:
            return os.makedirs(folder, exist_ok=True)
        except FileNotFoundError:
            continue
    os.makedirs(folder, exist_ok=True)


def _way(folder: str, home: str, name: str) -> tuple[int, int]:
    """Descriptors to write to: into a group, and back to where the runner came from."""
    return (
        os.open(os.path.join(folder, name), os.O_WRONLY | _FLAGS),
        os.open(os.path.join(home, name), os.O_WRONLY | _FLAGS),
    )


def slot_name(pid: int, started: int | None) -> str:
    """The name of a runner's slot says whose it is, also once the runner is gone."""
    return f"{pid}-{started or 0}"


def members(folders: list[str]) -> list[int]:
    """The processes in the groups and in groups below them."""
    found: dict[int, None] = {}
    for folder in folders:
        for group, _, _ in os.walk(folder):
            try:
                text = _read(os.path.join(group, "cgroup.procs"))
            except OSError:
                continue
            found.update(dict.fromkeys(map(int, text.split())))
    return list(found)


def kill(folders: list[str]) -> list[int]:
    """Kill what is in the groups of a dead runner; what was still there when it was looked for.

    Call it until that is nothing. Nobody in there can fork meanwhile.
    """
    for folder in folders:
        if not _write(os.path.join(folder, "cgroup.kill"), "1"):
            _write(os.path.join(folder, "pids.max"), "0")
    left = members(folders)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    return left


def remove(folders: list[str], limit: float = 1.0) -> bool:
    """Remove groups and those below them. False when some are still in use after `limit` s."""
    end = time.monotonic() + limit
    while True:
        left = [folder for folder in folders if not _removed(folder)]
        if not left or time.monotonic() > end:
            return not left
        time.sleep(0.005)  # what was killed a moment ago is still in there


def _removed(folder: str) -> bool:
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
    """Remove the folders of a state folder's slots, if they are empty: a slot brings them back.

    Not with version 2, where they also hand on what can be limited.
    """
    for controller, folder in groups.items():
        if controller != "all":
            try:
                os.rmdir(folder)
            except OSError:
                pass  # another runner's slot is in there


def sweep(groups: Groups) -> list[int]:
    """Kill and remove the slots of runners that are gone; the processes that were killed."""
    killed: list[int] = []
    for parent in groups.values():
        for name in os.listdir(parent) if os.path.isdir(parent) else []:
            folder = os.path.join(parent, name)
            pid, _, started = name.partition("-")
            if not (os.path.isdir(folder) and pid.isdigit() and started.isdigit()):
                continue
            if start_time(int(pid)) == int(started):
                continue  # it lives, and its attempt goes on
            killed += [pid for pid in kill([folder]) if pid not in killed]
            remove([folder])
    return killed


def most_pids() -> int:
    """How many processes one attempt may have: an eighth of the system's, within reason."""
    try:
        return min(max(int(_read("/proc/sys/kernel/pid_max")) // 8, 1024), 32_768)
    except (OSError, ValueError):
        return 4096


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _write(path: str, text: str) -> bool:
    """False when there is no such file, or the kernel refuses."""
    try:
        _must_write(path, text)
    except OSError:
        return False
    return True


def _must_write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | _FLAGS)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
