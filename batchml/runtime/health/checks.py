"""What is asked of a host itself: memory, disks, clock, limits. Each answer is one `Check`.

The numbers are those below which nothing of ours could work: a check that is strict by taste keeps
good hosts from working.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

from batchml.runtime.protocol.variables import RuntimeEnv

OK, NOT_CHECKED, MONITOR, RETRY, REPLACE = range(5)
WORDS = ("ok", "not checked", "monitor", "retry", "replace")

LIMIT = 10.0  # seconds for one group of checks: a mount or a driver that hangs never answers
LEAST_MEMORY = 32 << 20  # bytes that the kernel could give
LEAST_DISK = 64 << 20  # bytes free, below which it is said
LEAST_SHARED = 128 << 20  # bytes of /dev/shm: a loader with worker processes needs more than 64 MiB
LEAST_FILES = 1024
EARLIEST = 1_767_225_600.0  # 2026-01-01: this code is no older
SKEW = 300.0  # seconds: AWS refuses signatures that are further off (SigV4)
PROBE = 65_536  # bytes that are written and read back

_HOSTS_OWN = (errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.EHOSTDOWN, errno.ETIMEDOUT)
_FULL = (errno.ENOSPC, errno.EDQUOT)


NOTICE = "batchml notice: "  # "batchml: " is why a run could not begin


class NoFitHost(OSError):
    """More hosts were unfit than `tries`: no other one would do better."""


class Check(NamedTuple):
    """One question to a host, and how bad the answer is."""

    name: str
    severity: int = OK
    text: str = ""

    def words(self) -> str:
        return f"{self.name}: {self.text}" if self.text else self.name


def worst(checks: Sequence[Check]) -> int:
    return max((check.severity for check in checks), default=OK)


def within(
    name: str, limit: float, severity: int, ask: Callable[..., List[Check]], *of: Any
) -> List[Check]:
    """What `ask(*of)` answers, or `severity` when it did not within `limit` seconds.

    What hangs in the kernel cannot be ended, so it is left behind in a thread of its own. A check
    that fails by a mistake of ours says so, and keeps no run from a host.
    """
    found: List[Check] = []

    def work() -> None:
        try:
            found.extend(ask(*of))
        except Exception as error:
            words = " ".join(str(error).split()) or type(error).__name__
            found.append(Check(name, NOT_CHECKED, words[:200]))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        return [Check(name, severity, f"no answer within {limit:g} s")]
    return found


def quick(env: RuntimeEnv, environ: Mapping[str, str], shares_memory: bool) -> List[Check]:
    """All that needs no GPU; about a millisecond and two writes to disk.

    `shares_memory`: the run has several processes, or a GPU: they want a larger /dev/shm.
    """
    # A variable, and not `tempfile`: that would look for a folder that works.
    scratch = environ.get("TMPDIR") or "/tmp"
    checks = [memory(_read("/proc/meminfo")), clock(time.time()), files(_file_limit())]
    if shares_memory:
        checks.append(shared_memory(_space("/dev/shm")))
    checks += within(f"scratch ({scratch})", LIMIT, REPLACE, folder, "scratch", scratch, True)
    kept = env.checkpoint_dir
    if kept:
        checks += within(f"checkpoints ({kept})", LIMIT, RETRY, folder, "checkpoints", kept, False)
    return checks


def memory(text: str) -> Check:
    """From /proc/meminfo: proc(5)."""
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            left = int(line.split()[1]) << 10
            if left < LEAST_MEMORY:
                return Check("memory", RETRY, f"{left >> 20} MiB are left on this host")
            return Check("memory")
    return Check("memory", NOT_CHECKED, "/proc/meminfo does not say")


def clock(now: float) -> Check:
    if now >= EARLIEST:
        return Check("clock")
    told = time.strftime("%Y-%m-%d %H:%M", time.gmtime(max(0.0, now)))
    return Check("clock", REPLACE, f"it says {told} UTC")


def files(limit: int) -> Check:
    """`limit` below 0: none."""
    if 0 <= limit < LEAST_FILES:
        return Check("open files", MONITOR, f"a process may have {limit}; programs expect 1024")
    return Check("open files")


def shared_memory(space: Optional[Tuple[int, int]]) -> Check:
    """`space`: bytes in all and bytes free."""
    if space is None:
        return Check("/dev/shm", NOT_CHECKED, "there is none")
    if space[0] < LEAST_SHARED:
        told = f"{space[0] >> 20} MiB; worker processes may need more: `shm` in [resources]"
        return Check("/dev/shm", MONITOR, told)
    return Check("/dev/shm")


def folder(
    name: str, path: str, is_hosts: bool, now: Callable[[], float] = time.time
) -> List[Check]:
    """Write there, read it back, compare times: a mount alone does not count.

    `is_hosts`: the disk is the host's own. Others may be a file server's, whose troubles are not
    the host's to be taken out of service for.
    """
    place = f"{name} ({path})"
    own = os.path.join(path, f".batchml-health-{os.urandom(6).hex()}")
    data = os.urandom(PROBE)
    try:
        try:
            with open(own, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            with open(own, "rb") as file:
                back = file.read()
            written = os.stat(own).st_mtime
        finally:
            _remove(own)
    except OSError as error:
        return [trouble(place, error, is_hosts)]
    if back != data:
        broken = REPLACE if is_hosts else RETRY
        return [Check(place, broken, "what was written there is read back as something else")]
    checks = [_free(place, _space(path))]
    # On a network file system the time is its server's.
    off = abs(now() - written)
    if off > SKEW:
        told = f"this host's clock and that of {path} are {off:.0f} s apart"
        checks.append(Check("clock", RETRY, told))
    return checks


def trouble(place: str, error: OSError, is_hosts: bool) -> Check:
    """What it means that nothing could be written there."""
    words = error.strerror or str(error)
    if error.errno in _HOSTS_OWN:
        return Check(place, REPLACE if is_hosts else RETRY, words)
    if error.errno in _FULL and is_hosts:
        return Check(place, RETRY, words)
    # Read-only images, rights, a shared file system that is full: no other host does better.
    return Check(place, MONITOR if error.errno in _FULL else NOT_CHECKED, words)


def _free(place: str, space: Optional[Tuple[int, int]]) -> Check:
    if space is not None and space[1] < LEAST_DISK:
        return Check(place, MONITOR, f"{space[1] >> 20} MiB are free")
    return Check(place)


def _space(path: str) -> Optional[Tuple[int, int]]:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _file_limit() -> int:
    import resource

    soft: Any = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return -1 if soft == resource.RLIM_INFINITY else int(soft)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
