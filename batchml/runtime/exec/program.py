"""The program of an attempt, as /proc shows it: its variables, folder, user and network."""

from __future__ import annotations

import os
from typing import Dict, Iterator, List, NamedTuple, Optional

from batchml.runtime.processes import descendants

_BATCH = b"AWS_BATCH_JOB_ID"
_TASK = "BATCHML_TASK"
_RUNTIME = b"batchml.runtime.run"  # in the words of whoever starts the program, an init among them
_INITS = (b"docker-init", b"tini", b"dumb-init", b"catatonit")  # a container's first process
_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h


class Program(NamedTuple):
    pid: int
    environ: Dict[str, str]
    folder: str
    user: int
    group: int
    groups: List[int]


def find_program(root: int, task: str = "") -> Optional[Program]:
    """What runs below the process `root`, or is it: the first that has the variables of a run.

    Whoever starts and watches it, our runtime and an init, stands aside as long as there is
    anything else. With `task` it has to be of that attempt. None where nothing is found, or nothing
    may be seen.
    """
    aside = None
    for pid in (root, *descendants(root)):
        words = _words(pid)
        environ = _environ(pid)
        if _BATCH not in environ or (task and environ.get(_TASK.encode()) != task.encode()):
            continue
        if _only_starts(words):
            aside = aside or _program(pid, environ)
            continue
        found = _program(pid, environ)
        if found is not None:
            return found
    return aside


def enter_network(pid: int) -> bool:
    """Go over to the network of a process, where it has one of its own.

    False where that is denied: then this process stays where it is.
    """
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
    """The same by an open descriptor of /proc/PID/ns/net, for the thread that calls."""
    import ctypes  # os.setns is there from Python 3.12 on

    return bool(ctypes.CDLL(None).setns(file, _NETWORK) == 0)


def enter_groups(folders: List[str]) -> bool:
    """Go into these control groups, for which memory and processes are counted, and which end.

    False where there are none, or they are closed to us.
    """
    entered = bool(folders)
    for folder in folders:
        try:
            with open(os.path.join(folder, "cgroup.procs"), "w", encoding="ascii") as file:
                file.write(str(os.getpid()))
        except OSError:
            entered = False
    return entered


def become(program: Program) -> None:
    """Be the program's user, where that is another and we may. ECS Exec comes as root."""
    if os.geteuid() != 0 or program.user == 0:
        return
    os.setgroups(program.groups)
    os.setgid(program.group)
    os.setuid(program.user)


def _only_starts(words: List[bytes]) -> bool:
    return os.path.basename(words[0]) in _INITS or any(_RUNTIME in word for word in words)


def _program(pid: int, environ: Dict[bytes, bytes]) -> Optional[Program]:
    try:
        folder = os.readlink(f"/proc/{pid}/cwd")
        ids = {name: words for name, words in _status(pid) if name in ("Uid", "Gid", "Groups")}
    except OSError:
        return None
    text = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
    return Program(pid, text, folder, ids["Uid"][1], ids["Gid"][1], ids.get("Groups", []))


def _status(pid: int) -> Iterator[tuple[str, List[int]]]:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("Uid", "Gid", "Groups"):
                yield name, [int(word) for word in rest.split()]


def _words(pid: int) -> List[bytes]:
    return _read(f"/proc/{pid}/cmdline").split(b"\0")


def _environ(pid: int) -> Dict[bytes, bytes]:
    entries = _read(f"/proc/{pid}/environ").split(b"\0")
    return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
