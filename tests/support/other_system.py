"""Python as on macOS, for a child process: what only Linux has is taken away.

`environment()` gives the variables of such a child. Its interpreter then imports this file as
`sitecustomize`, which removes the names that Python has on Linux only, and files below /proc and
/sys. Sources: the notes "Availability" of Python's library reference. Its pace is AWS's, so each
long pause is cut short, and taken for a whole one.
"""

import os
import sys
import time
import types
from typing import Any

LINUX_ONLY = {
    "os": (
        "copy_file_range eventfd eventfd_read eventfd_write fdatasync getrandom getxattr listxattr "
        "memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate posix_openpt removexattr "
        "sched_getaffinity sched_setaffinity sched_getparam sched_getscheduler sched_setparam "
        "sched_setscheduler setns setxattr splice unshare getresuid setresuid getresgid setresgid "
        "O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_RSYNC O_TMPFILE P_PIDFD POSIX_FADV_DONTNEED "
        "POSIX_FADV_SEQUENTIAL MFD_CLOEXEC EFD_CLOEXEC GRND_NONBLOCK"
    ),
    "select": "epoll EPOLLIN EPOLLOUT EPOLLERR EPOLLHUP EPOLLET EPOLLONESHOT",
    "socket": (
        "AF_NETLINK AF_PACKET AF_VSOCK AF_ALG SO_PEERCRED SO_PASSCRED SO_BINDTODEVICE SO_MARK "
        "SOCK_CLOEXEC SOCK_NONBLOCK MSG_CMSG_CLOEXEC TCP_USER_TIMEOUT TCP_DEFER_ACCEPT TCP_QUICKACK"
    ),
    "fcntl": "F_OFD_GETLK F_OFD_SETLK F_OFD_SETLKW F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS "
    "F_GET_SEALS F_NOTIFY F_SETLEASE F_GETLEASE F_SETSIG F_GETSIG",
    "resource": "prlimit RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_OFILE RLIMIT_RTPRIO RLIMIT_RTTIME "
    "RLIMIT_SIGPENDING RUSAGE_THREAD",
    "signal": "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGSTKFLT SIGPWR "
    "SIGPOLL SIGCLD",
    "time": "CLOCK_BOOTTIME CLOCK_TAI CLOCK_PROF CLOCK_HIGHRES pthread_getcpuclockid",
    "termios": "TCGETX TCSETX",
}

LONGEST_PAUSE = 0.2


def environment(folder: str) -> dict[str, str]:
    """The variables of a child process whose Python is as on macOS. `folder` is an empty one."""
    os.symlink(os.path.abspath(__file__), os.path.join(folder, "sitecustomize.py"))
    return {"PYTHONPATH": folder}


def hide() -> None:
    for module, names in LINUX_ONLY.items():
        found = __import__(module)
        inner = sys.modules.get(f"_{module}")
        for name in names.split():
            for each in filter(None, (found, inner)):
                if hasattr(each, name):
                    delattr(each, name)
    proxies = types.ModuleType("_scproxy")  # urllib asks macOS for its proxies
    proxies._get_proxy_settings = proxies._get_proxies = dict  # type: ignore[attr-defined]
    sys.modules["_scproxy"] = proxies
    sys.platform = "darwin"
    uname = os.uname()
    os.uname = lambda: os.uname_result(("Darwin", *uname[1:]))
    sys.addaudithook(_refuse)
    stat = os.stat

    def stat_without(path: Any, *args: Any, **named: Any) -> os.stat_result:
        _refuse("open", (path,))
        return stat(path, *args, **named)

    os.stat = stat_without


def hurry() -> None:
    ahead = [0.0]
    sleep, now, monotonic = time.sleep, time.time, time.monotonic

    def sleep_less(seconds: float) -> None:
        sleep(min(seconds, LONGEST_PAUSE))
        ahead[0] += max(0.0, seconds - LONGEST_PAUSE)

    vars(time)["sleep"] = sleep_less
    time.time = lambda: now() + ahead[0]
    time.monotonic = lambda: monotonic() + ahead[0]


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("open", "os.listdir", "os.scandir") or not arguments:
        return
    path = arguments[0]
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    if isinstance(text, str) and f"{text}/".startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", text)


if __name__ == "sitecustomize":
    hide()
    hurry()
