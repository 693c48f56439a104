"""Find all processes of an attempt, signal them, and make sure that they have ended.

A process group misses a child that calls setsid, so this searches for descendants. Children whose
parent has died become children of the process that watches them, because it is their reaper.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Optional

# Programs that a container engine may start as process 1, with the entry as their only child.
INITS = frozenset(["docker-init", "tini", "catatonit", "dumb-init", "podman-init"])
SPARE = "batchml-spare"  # the name of a process that prepares the next start of a rank, and then
WAITING_SPARE = f"{SPARE}-w"  # waits for it
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_IN_MODIFY = 2  # linux/inotify.h
_IS_LINUX = sys.platform.startswith("linux")
_SIGNAL_SIZE = 128  # bytes of one signalfd_siginfo
_DEFAULTS = [int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}]


def become_reaper() -> bool:
    """Let orphaned descendants become children of this process. False if that is impossible."""
    if not _IS_LINUX:
        return False
    return bool(_libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


@lru_cache(maxsize=None)
def _libc() -> Any:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def spawn(
    command: Sequence[str],
    environ: Mapping[str, str],
    output: int,
    mask: Optional[Collection[int]] = None,
) -> int:
    """Start a program in its own session, with no signal ignored; its pid. It is searched for on
    the PATH in `environ`. Its standard output and errors go to the descriptor `output`. It inherits
    the other files of this process that are inheritable: see `keep_files`.

    `mask`: the signals that it blocks, by default those of this thread. Raises OSError, ValueError,
    and NotImplementedError if this Python was built for a C library that cannot make sessions.
    """
    more: dict[str, Any] = {} if mask is None else {"setsigmask": mask}
    actions: list[Any] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output, 2),
    ]
    before = os.environ.get("PATH")
    _set_path(environ.get("PATH"))  # the C library searches on it, and not on the program's
    try:
        return os.posix_spawnp(
            command[0], list(command), environ, file_actions=actions, setsid=True,
            setsigdef=_DEFAULTS, **more,
        )  # fmt: skip
    finally:
        _set_path(before)


def _set_path(path: Optional[str]) -> None:
    if path is None:
        os.environ.pop("PATH", None)
    elif os.environ.get("PATH") != path:
        os.environ["PATH"] = path


def keep_files() -> None:
    """Let no program that this process starts inherit a file that is open now, but 0, 1 and 2: who
    started this process may have left some open, such as locks.
    """
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        if int(name) > 2:
            with suppress(OSError):  # it was the descriptor of the list itself
                os.set_inheritable(int(name), False)


def die_with_parent(parent: int) -> Callable[[], None]:
    """A function that a new process calls, so that it is killed when its parent `parent` dies."""
    if not _IS_LINUX:
        return lambda: None
    libc = _libc()

    def request_kill() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it has died already
            os._exit(1)

    return request_kill


def signal_file(*numbers: int) -> int:
    """A descriptor that is readable when one of these signals has come. They must be blocked.

    It needs no handler, so it works in any thread.
    """
    import ctypes

    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (1024 // bits))()
    for number in numbers:
        mask[(number - 1) // bits] |= 1 << (number - 1) % bits
    file = _libc().signalfd(-1, mask, os.O_NONBLOCK | os.O_CLOEXEC)
    if file < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(file)


def signals_in(file: int) -> set[int]:
    """The signals that have come since the last call. `file` is a descriptor of `signal_file`."""
    found: set[int] = set()
    while True:
        try:
            data = os.read(file, 16 * _SIGNAL_SIZE)
        except BlockingIOError:
            return found
        starts = range(0, len(data), _SIGNAL_SIZE)
        found |= {int.from_bytes(data[at : at + 4], sys.byteorder) for at in starts}
        if len(data) < 16 * _SIGNAL_SIZE:
            return found


def changes_of(path: str) -> int:
    """Make a file, and return a descriptor that is readable once the file has changed.

    Raises OSError if the system cannot watch files: the caller must poll then. Source: inotify(7).
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644))
    import ctypes

    libc = _libc()
    watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC) if _IS_LINUX else -1
    if watch >= 0 and libc.inotify_add_watch(watch, os.fsencode(path), _IN_MODIFY) >= 0:
        return int(watch)
    if watch >= 0:
        os.close(watch)
    raise OSError(ctypes.get_errno(), "files cannot be watched for changes")


def descendants(*roots: int, but: Collection[int] = ()) -> list[int]:
    """Every live descendant of the processes `roots`, parents before children.

    `but`: processes that are left out, with their descendants.
    """
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if entry.isdigit():
            parent = _parent(entry)
            if parent is not None and int(entry) not in but:
                children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    queue = list(roots)
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def _parent(pid: str) -> int | None:
    """The parent's process id; None for a zombie, or without such a process."""
    fields = _stat(pid)
    return None if not fields or fields[0] == b"Z" else int(fields[1])


def _stat(pid: int | str) -> list[bytes]:
    """The fields of /proc/PID/stat after the name; empty without such a process.

    The name, in parentheses, may contain anything, so the fields are counted after it.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()
    except OSError:
        return []


def state_of(pid: int) -> str:
    """The letter of a process's state, as in proc(5); empty without such a process."""
    return b"".join(_stat(pid)[:1]).decode("ascii", "replace")


def send(pids: list[int], number: int) -> None:
    """Signal each process that still lives and that this process may signal."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def shell_code(code: int) -> int:
    """The exit code of a process as a shell reports it: 128 + N after signal N.

    `code`: the code as `subprocess` reports it, -N after signal N.
    """
    return 128 - code if code < 0 else code


def kill_descendants(limit: float = 30.0, but: Collection[int] = ()) -> bool:
    """Kill and reap every descendant of this process, which is their reaper. True if none is left.

    A search of /proc proves nothing: new processes may appear, and a parent may die after the
    search has read its child and before it reads the parent. But a reaper has a child as long as it
    has a descendant. So this repeats until there is no child, or until `limit` seconds have passed:
    a process stuck in the kernel, or of another user, cannot be killed.

    `but`: children that are left alone, with their descendants.
    """
    end = time.monotonic() + limit
    while not reap(but):  # first, because it is cheap, and most programs leave no process
        left = descendants(os.getpid(), but=but)
        send(left, signal.SIGSTOP)  # a stopped process cannot fork while the others are killed
        send(left, signal.SIGKILL)
        if time.monotonic() > end:
            return reap(but)
        time.sleep(0.001)
    return True


def reap(but: Collection[int] = ()) -> bool:
    """Collect the exits of all children that have ended. True if no child is left but `but`.

    While some of those live, a search has to show that no other child does. It is right if no child
    has ended meanwhile: a child that lived all the time has been seen.
    """
    has_searched = False
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid:
            has_searched = False
        elif not but or has_searched:
            return has_searched
        elif descendants(os.getpid(), but=but):
            return False
        else:
            has_searched = True


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot. With pid and boot id this is unique."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def boot_id() -> str:
    """The id of this boot of the machine; empty if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


_attempt_start: float | None = None


def note_attempt_start() -> float:
    """Let an attempt begin now in this process, which may have served others before: for
    `process_age`. Return the time, in seconds of CLOCK_MONOTONIC.
    """
    global _attempt_start
    _attempt_start = time.monotonic()
    return _attempt_start


def process_age() -> float:
    """Seconds since this process, or its attempt, started; 0 if the system does not say.

    Source: proc(5), /proc/pid/stat, field 22.
    """
    if _attempt_start is not None:
        return time.monotonic() - _attempt_start
    try:
        started = int(_stat("self")[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def read(path: str) -> str:
    """The text of a file; empty without the file. Fast, because it is called for every process."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        data = b""
        while True:
            more = os.read(descriptor, 65_536)
            data += more
            if not more:
                return data.decode("utf-8", "replace")
    except OSError:  # the process has ended meanwhile
        return ""
    finally:
        os.close(descriptor)
