"""Check a host without its GPUs: memory, disks, clock, limits.

Below the limits no run could work. Stricter limits would refuse good hosts.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.processes import read
from batchml.runtime.protocol.log_marks import error_line
from batchml.runtime.protocol.variables import RuntimeEnv

# Severities: from RETRY on a host is refused, with REPLACE for good.
OK, NOT_CHECKED, MONITOR, RETRY, REPLACE = range(5)
WORDS = ("ok", "not checked", "monitor", "retry", "replace")

LIMIT = 10.0  # seconds for one group of checks, because a hanging mount or driver never answers
LEAST_MEMORY = 32 << 20  # bytes available
LEAST_DISK = 64 << 20  # bytes free; less is reported, but does not refuse the host
LEAST_SHARED = 128 << 20  # bytes of /dev/shm: a loader with worker processes needs more than 64 MiB
LEAST_FILES = 1024
EARLIEST = 1_767_225_600.0  # 2026-01-01: an earlier clock is wrong, because this code is newer
SKEW = 300.0  # seconds: AWS refuses requests with a larger clock error (SigV4)
PROBE = 65_536  # bytes that are written and read back

_FIT_FOR = 10.0  # seconds for which a disk counts as fit after a check: see `remember_disks`

# Errors that the host's hardware or its mounts cause.
_OF_HOST = (errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.EHOSTDOWN, errno.ETIMEDOUT)
_FULL = (errno.ENOSPC, errno.EDQUOT)

NOTICE = "batchml notice: "  # not "batchml: ", which begins the reason why a run did not start


class NoFitHost(OSError):
    """The run met unfit hosts more than `tries` times: another host would not help."""


class HostCheck(NamedTuple):
    """The result of one check of a host, and its severity."""

    name: str
    severity: int = OK
    text: str = ""
    # Whether the image, the AMI or the job's settings are as likely a cause as the host. If a
    # second host has the same fault, they are the cause.
    is_setup: bool = False

    def describe(self) -> str:
        return f"{self.name}: {self.text}" if self.text else self.name


def worst(checks: Sequence[HostCheck]) -> int:
    return max((check.severity for check in checks), default=OK)


def run_with_limit(
    name: str, limit: float, severity: int, check: Callable[..., List[HostCheck]], *arguments: Any
) -> List[HostCheck]:
    """The result of `check(*arguments)`, or `severity` if it takes longer than `limit` seconds.

    A call that hangs in the kernel cannot be ended, so it stays in a thread. An exception is an
    error of the check itself: it is reported, and refuses no host.
    """
    found: List[HostCheck] = []

    def work() -> None:
        try:
            found.extend(check(*arguments))
        except Exception as error:
            found.append(HostCheck(name, NOT_CHECKED, error_line(error, 200)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        return [HostCheck(name, severity, f"no answer within {limit:g} s")]
    return found


_fit_disks: Optional[Dict[str, float]] = None  # key of a disk -> until when, monotonic


def remember_disks() -> None:
    """Let this process, which serves several attempts, write to a fit disk only every 10 seconds,
    instead of for each attempt.
    """
    global _fit_disks
    _fit_disks = {}


def _check_disk(
    label: str, key: str, severity: int, path: str, belongs_to_host: bool
) -> List[HostCheck]:
    """As `check_folder`, within the limit; nothing for a disk that was fit a moment ago."""
    fit, now = _fit_disks, time.monotonic()
    if fit is not None and fit.get(key, 0.0) > now and os.access(path, os.W_OK):
        return []
    found = run_with_limit(label, LIMIT, severity, check_folder, label, path, belongs_to_host)
    if fit is not None and worst(found) == OK:
        fit[key] = now + _FIT_FOR
    return found


def _device_of(path: str) -> str:
    try:
        return f"device {os.stat(path).st_dev}"
    except OSError:
        return path


def quick_checks(
    env: RuntimeEnv, environ: Mapping[str, str], shares_memory: bool
) -> List[HostCheck]:
    """All checks without GPUs. They take about a millisecond and two writes to disk.

    `shares_memory`: the run has several processes, or a GPU, and so needs a larger /dev/shm.
    """
    # Not by `tempfile`, which would search for a folder that works.
    scratch = environ.get("TMPDIR") or "/tmp"
    checks = [
        check_memory(read("/proc/meminfo")), check_clock(time.time()),
        check_file_limit(_file_limit()),
    ]  # fmt: skip
    if shares_memory:
        checks.append(check_shared_memory(_space("/dev/shm")))
    checks += _check_disk(f"scratch ({scratch})", scratch, REPLACE, scratch, True)
    folder = env.checkpoint_dir
    if folder:  # exists already, so that a call for its device does not hang
        label = f"checkpoints ({folder})"
        checks += _check_disk(label, _device_of(folder), RETRY, folder, False)
    return checks


def check_memory(text: str) -> HostCheck:
    """Check that the host has memory left. `text` is /proc/meminfo: proc(5)."""
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            left = int(line.split()[1]) << 10
            if left < LEAST_MEMORY:
                return HostCheck("memory", RETRY, f"{left >> 20} MiB are left on this host")
            return HostCheck("memory")
    return HostCheck("memory", NOT_CHECKED, "/proc/meminfo has no MemAvailable")


def check_clock(now: float) -> HostCheck:
    """Check that the clock, in seconds since the epoch, is not before this code was written."""
    if now >= EARLIEST:
        return HostCheck("clock")
    text = time.strftime("%Y-%m-%d %H:%M", time.gmtime(max(0.0, now)))
    return HostCheck("clock", REPLACE, f"it says {text} UTC")


def check_file_limit(limit: int) -> HostCheck:
    """Check how many files a process may open: `limit`, or any number if it is below 0."""
    if 0 <= limit < LEAST_FILES:
        return HostCheck("open files", MONITOR, f"a process may have {limit}; programs expect 1024")
    return HostCheck("open files")


def check_shared_memory(space: Optional[Tuple[int, int]]) -> HostCheck:
    """Check the size of /dev/shm. `space`: all bytes and free bytes; None if it does not exist."""
    if space is None:
        return HostCheck("/dev/shm", NOT_CHECKED, "there is none")
    if space[0] < LEAST_SHARED:
        text = f"{space[0] >> 20} MiB; worker processes may need more: `shm` in [resources]"
        return HostCheck("/dev/shm", MONITOR, text)
    return HostCheck("/dev/shm")


def check_folder(
    label: str, path: str, belongs_to_host: bool, now: Callable[[], float] = time.time
) -> List[HostCheck]:
    """Write a file, read it back, and compare its time, because a mount alone proves nothing.

    `belongs_to_host`: as a local disk does. Another disk may belong to a file server, whose errors
    are no reason to replace the host. `label` is the name of the checks.
    """
    probe = os.path.join(path, f".batchml-health-{os.urandom(6).hex()}")
    data = os.urandom(PROBE)
    try:
        try:
            with open(probe, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            with open(probe, "rb") as file:
                back = file.read()
            written = os.stat(probe).st_mtime
        finally:
            _remove(probe)
    except OSError as error:
        return [classify_error(label, error, belongs_to_host)]
    if back != data:
        severity = REPLACE if belongs_to_host else RETRY
        return [HostCheck(label, severity, "other data was read back than was written")]
    checks = [_free(label, _space(path))]
    # On a network file system the file's time is the server's.
    off = abs(now() - written)
    if off > SKEW:
        text = f"this host's clock and that of {path} are {off:.0f} s apart"
        checks.append(HostCheck("clock", RETRY, text))
    return checks


def classify_error(label: str, error: OSError, belongs_to_host: bool) -> HostCheck:
    """The severity of an error that a write to a disk has raised."""
    words = error.strerror or str(error)
    if error.errno in _OF_HOST:
        return HostCheck(label, REPLACE if belongs_to_host else RETRY, words)
    if error.errno in _FULL and belongs_to_host:
        return HostCheck(label, RETRY, words)
    # A read-only image, missing permissions, a full shared file system: the same on other hosts.
    return HostCheck(label, MONITOR if error.errno in _FULL else NOT_CHECKED, words)


def _free(label: str, space: Optional[Tuple[int, int]]) -> HostCheck:
    if space is not None and space[1] < LEAST_DISK:
        return HostCheck(label, MONITOR, f"{space[1] >> 20} MiB are free")
    return HostCheck(label)


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
