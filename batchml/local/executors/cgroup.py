"""Control groups: where they may be made, who is in them, and how they are emptied.

Each runner has a group of its own (`cgroup_slot.py`). Both versions of the kernel's interface are
served. Where neither may be written there are none: resources are counted and not enforced.

Standard library only: runners import it.
"""

from __future__ import annotations

import errno
import os
import signal
import time

from batchml.runtime.processes import start_time

_LIMITED = ("memory", "pids", "cpu")  # version 1 has a tree for each

Groups = dict[str, str]  # controller -> folder; version 2 has one tree, "all"


def find(identity: str) -> Groups:
    """The folders below which a state folder's slots may be made; empty where that is denied.

    Below the group that we are in, so that limits set on us hold for jobs too.
    """
    name = name_of(identity)
    try:
        mounts, own = _mounts_and_own()
    except OSError:
        return {}
    wanted = [c for c in _LIMITED if c in mounts and c in own]
    if {*wanted} >= {"memory", "pids"}:
        made = {c: _make(os.path.join(mounts[c] + own[c], name)) for c in wanted}
        return made if all(made.values()) else {}
    if "all" in mounts and "all" in own:
        return find_v2(mounts["all"], own["all"], name)
    return {}


def name_of(identity: str) -> str:
    """The name of the groups below which a state folder's slots are."""
    return f"batchml-{identity}"


def ours(groups: Groups, identity: str) -> Groups:
    """Of groups that were written down, those of this state folder: it may be a copy of another."""
    name = name_of(identity)
    return {c: path for c, path in groups.items() if os.path.basename(path) == name}


def whereabouts() -> dict[str, str]:
    """The groups that this process is in: controller -> folder. Raises OSError."""
    mounts, own = _mounts_and_own()
    return {c: mounts[c] + own[c] for c in mounts if c in own}


def _mounts_and_own() -> tuple[dict[str, str], dict[str, str]]:
    return mounts_in(_read("/proc/self/mountinfo")), own_groups(_read("/proc/self/cgroup"))


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


def find_v2(mount: str, path: str, name: str) -> Groups:
    """The nearest group at or above ours, `path`, whose children may have limits.

    A group that holds processes cannot give its children limits, so it is seldom our own.
    """
    while True:
        parent = mount + path
        given = _gives(parent)
        if given >= {"memory", "pids"}:
            folder = _make(os.path.join(parent, name))
            for controller in (given & {*_LIMITED}) - _gives(folder) if folder else ():
                write(os.path.join(folder, "cgroup.subtree_control"), f"+{controller}")
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
    """The folder, made unless it is there; empty where it cannot be made or written."""
    for _ in range(10):  # the last runner of an earlier server may just be removing it
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
    found.pop(0, None)  # one of another PID namespace; to us, 0 is our own group
    return list(found)


def kill(folders: list[str]) -> list[int]:
    """Kill what is in the groups of a dead runner; what was still there when it was looked for.

    Call it until that is nothing. Nobody in there can fork meanwhile.
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
        for name in _names_in(parent):
            folder = os.path.join(parent, name)
            pid, _, started = name.partition("-")
            if not (os.path.isdir(folder) and pid.isdigit() and started.isdigit()):
                continue
            if start_time(int(pid)) == int(started):
                continue  # it lives, and its attempt goes on
            killed += [pid for pid in kill([folder]) if pid not in killed]
            remove([folder])
    return killed


def _names_in(folder: str) -> list[str]:
    """What is in a folder, which its last runner may just be removing: see `forget`."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def most_pids() -> int:
    """How many processes one attempt may have: an eighth of the system's, within reason."""
    try:
        return min(max(int(_read("/proc/sys/kernel/pid_max")) // 8, 1024), 32_768)
    except (OSError, ValueError):
        return 4096


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def write(path: str, text: str) -> bool:
    """False when there is no such file, or the kernel refuses."""
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
