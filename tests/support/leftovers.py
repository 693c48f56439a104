"""End what the tests have started when pytest has ended, also if it was killed.

Servers outlive their clients, and attempts outlive servers: a program of a test that waits for a
file, and its runner, would stay for ever. `python -I -S leftovers.py FOLDER PID` waits for the end
of process PID, in a session of its own. Then it ends the processes of batchml that have files below
FOLDER. Standard library only.
"""

import os
import select
import signal
import sys
from pathlib import Path
from typing import NamedTuple

_OURS = (b"batchml", b"tests.support.forge")  # in the command line of a process
_RUNNER = b"batchml.local.executors.runner"
_GRACE = 40.0  # seconds; the grace period of an attempt is 30 s


def end_with(pid: int, folder: Path) -> int:
    """Let processes with files below `folder` end when process `pid` does; the watching process."""
    words = [sys.executable, "-I", "-S", __file__, str(folder), str(pid)]
    nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    return os.posix_spawn(words[0], words, os.environ, setsid=True, file_actions=nothing)


class Leftover(NamedTuple):
    pidfd: int
    is_runner: bool


def wait_for_end(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([pidfd], [], [])


def find_leftovers(folder: str) -> list[Leftover]:
    """The processes of batchml whose arguments, open files or working folder are below `folder`."""
    below = os.path.join(os.path.realpath(folder), "")
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        if int(name) == os.getpid():
            continue
        try:
            pidfd = os.pidfd_open(int(name))  # first: the number may be another process's later
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read()
            if any(word in command for word in _OURS) and _has_files(name, command, below):
                found.append(Leftover(pidfd, _RUNNER in command))
                continue
            os.close(pidfd)
        except OSError:
            continue  # it has ended, or is another user's
    return found


def _has_files(pid: str, command: bytes, below: str) -> bool:
    folder = f"/proc/{pid}/fd"
    links = [f"/proc/{pid}/cwd", *(f"{folder}/{number}" for number in os.listdir(folder))]
    words = [os.fsdecode(word) for word in command.split(b"\0")]
    return any(path.startswith(below) for path in (*words, *map(_target, links)))


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def end(found: list[Leftover]) -> None:
    """Kill servers and commands at once. Runners stop their attempts, and are killed if they need
    more than the grace period.
    """
    for each in sorted(found, key=lambda each: each.is_runner):
        _signal(each, signal.SIGTERM if each.is_runner else signal.SIGKILL)
    for each in found:
        if not select.select([each.pidfd], [], [], _GRACE)[0]:
            _signal(each, signal.SIGKILL)


def _signal(process: Leftover, number: int) -> None:
    try:
        signal.pidfd_send_signal(process.pidfd, number)
    except OSError:
        pass  # it has ended


if __name__ == "__main__":
    wait_for_end(int(sys.argv[2]))
    end(find_leftovers(sys.argv[1]))
