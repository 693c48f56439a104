"""Find the process of a run's program in /proc; take over its user, control groups and network."""

from __future__ import annotations

import os
from typing import Dict, List, NamedTuple, Optional

from batchml.runtime.processes import INITS, descendants

_BATCH = b"AWS_BATCH_JOB_ID"
_TASK = "BATCHML_TASK"
_RUNTIME = b"batchml.runtime.run"  # in the command lines of processes that only start the program
_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h


class RunProcess(NamedTuple):
    """The process of a run's program."""

    pid: int  # 0: /proc hides the process
    environ: Dict[str, str]
    folder: str
    user: int
    group: int
    groups: List[int]


def find_run_process(root: int, task: str = "") -> Optional[RunProcess]:
    """Return the first process with the variables of a run among `root` and its descendants.

    batchml's runtime and init processes only start the program: they count if there is no other.
    `task`: the attempt to which the process must belong. None without such a process, or if /proc
    hides it.
    """
    starter = None
    for pid in (root, *descendants(root)):
        words = _read(f"/proc/{pid}/cmdline").split(b"\0")
        environ = _environ(pid)
        if _BATCH not in environ or (task and environ.get(_TASK.encode()) != task.encode()):
            continue
        if _only_starts(words):
            starter = starter or _read_process(pid, environ)
            continue
        process = _read_process(pid, environ)
        if process is not None:
            return process
    return starter


def enter_network(pid: int) -> bool:
    """Enter the network namespace of a process. Return False if that is denied."""
    theirs, ours = f"/proc/{pid}/ns/net", "/proc/self/ns/net"
    try:
        if os.stat(theirs).st_ino == os.stat(ours).st_ino:
            return True
        file = os.open(theirs, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return join_network(file)
    finally:
        os.close(file)


def join_network(file: int) -> bool:
    """Enter the namespace of an open /proc/PID/ns/net, for the calling thread."""
    import ctypes  # os.setns is there from Python 3.12 on

    return bool(ctypes.CDLL(None).setns(file, _NETWORK) == 0)


def enter_groups(folders: List[str]) -> bool:
    """Enter control groups, which count memory and processes and end with the run.

    `folders`: their folders. Return False if there is none, or if one cannot be entered.
    """
    entered = bool(folders)
    for folder in folders:
        try:
            with open(os.path.join(folder, "cgroup.procs"), "w", encoding="ascii") as file:
                file.write(str(os.getpid()))
        except OSError:
            entered = False
    return entered


def enter_processors(pid: int) -> None:
    """Use only the processors that a process may use, where the system allows that."""
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(pid))
    except (AttributeError, OSError):
        pass


def become(process: RunProcess) -> None:
    """Switch to the user of the run's program if we are root, as with ECS Exec."""
    if os.geteuid() != 0 or process.user == 0:
        return
    os.setgroups(process.groups)
    os.setgid(process.group)
    os.setuid(process.user)


def _only_starts(words: List[bytes]) -> bool:
    return os.fsdecode(os.path.basename(words[0])) in INITS or any(
        _RUNTIME in word for word in words
    )


def _read_process(pid: int, environ: Dict[bytes, bytes]) -> Optional[RunProcess]:
    try:
        folder = os.readlink(f"/proc/{pid}/cwd")
        ids = _read_ids(pid)
    except OSError:
        return None
    text = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
    return RunProcess(pid, text, folder, ids["Uid"][1], ids["Gid"][1], ids.get("Groups", []))


def _read_ids(pid: int) -> Dict[str, List[int]]:
    """The user and group ids of a process, by their names in /proc/PID/status. Raises OSError."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        fields = (line.partition(":") for line in file)
        return {
            name: [int(word) for word in words.split()]
            for name, _, words in fields
            if name in ("Uid", "Gid", "Groups")
        }


def _environ(pid: int) -> Dict[bytes, bytes]:
    entries = _read(f"/proc/{pid}/environ").split(b"\0")
    return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
