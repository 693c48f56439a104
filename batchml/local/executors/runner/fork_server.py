"""Attempts through our runtime without a new interpreter for each: the runner forks its own.

An interpreter that starts and imports the runtime needs 50 ms of CPU, a fork 3 ms. The runtime is
standard library only, so the runner's Python runs it for every image; the program is looked for on
the attempt's PATH as ever, and started by the runtime with `exec`, so nothing of the runner is in
it.

What a new interpreter would be given, the child gives itself: its own session, `/dev/null` and the
pipe, none of the runner's descriptors (so neither the lock of the attempt's record nor the server's
socket), no signal blocked or handled, the attempt's variables and no others, and its place in the
runner's slot. Orphans, timers and signals that wait are not inherited: fork(2), prctl(2).

Runs in a runner. Standard library only.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import NoReturn

RUNTIME = ("-m", "batchml.runtime.run")
_TASK = "BATCHML_TASK"  # finds what is left of an attempt: record.py
_START, _END = 47, 48  # of /proc/pid/stat after the name: env_start, env_end (proc(5), 50 and 51)

_loaded = False


class Mark:
    """The part of this process's memory that /proc/PID/environ shows: that of its first variables.

    A forked child is to be found by its attempt's variable there, as one with a new interpreter is,
    and from its first moment on. So the runner marks itself for the moment of the fork.
    """

    def __init__(self) -> None:
        """Raises OSError where the system shows no such thing, or takes no mark."""
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        self._at, end = int(fields[_START]), int(fields[_END])
        self._size = end - self._at
        for name, value in list(os.environ.items()):
            os.environ[name] = value  # elsewhere in memory: the C library still reads them
        self._memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._check()
        except BaseException:
            os.close(self._memory)
            raise

    def _check(self) -> None:
        if self._at <= 0 or not self.put("-"):
            raise OSError("the environment of this process cannot be marked")
        with open("/proc/self/environ", "rb") as file:
            if file.read() != f"{_TASK}=-".encode().ljust(self._size, b"\0"):
                raise OSError("the environment of this process does not show its mark")
        self.clear()

    def put(self, task_id: str) -> bool:
        """False where it is too long."""
        data = f"{_TASK}={task_id}\0".encode()
        if len(data) > self._size:
            return False
        self._write(data)
        return True

    def clear(self) -> None:
        self._write(b"")

    def _write(self, data: bytes) -> None:
        os.pwrite(self._memory, data.ljust(self._size, b"\0"), self._at)


class Forker:
    """Of one runner."""

    def __init__(self) -> None:
        self._mark: Mark | None = None
        self._is_possible = sys.platform.startswith("linux")

    def start(self, command: list[str], env: dict[str, str], output: int) -> int | None:
        """Start a command that is our runtime's; its pid. None where that cannot be done so.

        Standard output and errors go to the descriptor `output`. Raises OSError while the system
        has no room for another process.
        """
        is_wanted = is_ours(command) and _TASK in env and _can_be_given(command, env)
        mark = self._ready() if is_wanted else None
        if mark is None or not mark.put(env[_TASK]):
            return None
        try:
            pid = os.fork()
            if pid == 0:
                _become(command, env, output)
        finally:
            mark.clear()
        return pid

    def _ready(self) -> Mark | None:
        if self._mark is None and self._is_possible:
            try:
                self._mark = Mark()
                _load()
            except (OSError, ImportError):  # the second: this installation is being replaced
                self._mark, self._is_possible = None, False
        return self._mark


def is_ours(command: list[str]) -> bool:
    return tuple(command[1:3]) == RUNTIME


def _can_be_given(command: list[str], env: dict[str, str]) -> bool:
    """Whether the system would take these words; where not, it is asked, and says so itself."""
    words = (*command, *env, *env.values())
    return not any("\0" in word for word in words) and not any("=" in name for name in env)


def _load() -> None:
    """Import what an attempt needs, once, before the first fork: also what is imported where used.

    Not as a runner starts: a first attempt waits for that, and may be of another kind.
    """
    global _loaded
    if not _loaded:
        import selectors  # noqa: F401

        _loaded = True


def _become(command: list[str], env: dict[str, str], output: int) -> NoReturn:
    """In the child: be what `python -m batchml.runtime.run` would be. Never returns."""
    try:
        gc.freeze()  # nothing of the runner is to be collected here, and close what is not its own
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for number, source in enumerate((null, output, output)):
            os.dup2(source, number)
        _close_others()
        os.environ.clear()
        os.environ.update(env)
        sys.argv = list(command[2:])
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        from batchml.runtime.run import main

        _heed_all()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        main()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(70)


def _heed_all() -> None:
    """What started the server may ignore signals, as nohup does; a new interpreter only its own."""
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _close_others() -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.close(int(name))
            except OSError:
                pass  # it was that of the list itself
