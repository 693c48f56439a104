"""Start attempts with batchml's runtime by a fork of the runner, without a new interpreter.

An interpreter that starts and imports the runtime takes 50 ms of CPU, a fork 3 ms. The runtime uses
the standard library only, so the runner's Python runs it for every image. The runtime searches for
the program on the attempt's PATH and starts it with `exec`, so the program inherits nothing of the
runner.

The child sets up what a new interpreter would get: its own session, `/dev/null` and the pipe, none
of the runner's descriptors (neither the lock of the attempt's record nor the server's socket), no
signal blocked or handled, only the attempt's variables, and its place in the runner's slot.
Orphans, timers and pending signals are not inherited: fork(2), prctl(2).

Runs in a runner. Standard library only.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import NoReturn

RUNTIME = ("-m", "batchml.runtime.run")
_TASK = "BATCHML_TASK"  # marks the processes of an attempt: record.py
# Fields of /proc/pid/stat after the name: env_start and env_end (proc(5), 50 and 51).
_START, _END = 47, 48


class EnvironMark:
    """The memory of this process that /proc/PID/environ shows: that of its first variables.

    A forked child must be found by its attempt's variable in /proc/PID/environ from its first
    moment on, like a child with a new interpreter. So the runner sets the variable during the fork.
    """

    def __init__(self) -> None:
        """Raises OSError where the system does not show this memory, or does not allow the
        change.
        """
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        self._at, end = int(fields[_START]), int(fields[_END])
        self._size = end - self._at
        for name, value in list(os.environ.items()):
            os.environ[name] = value  # moves them in memory, because the C library still reads them
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

    def put(self, value: str) -> bool:
        """Set the mark; False where it is too long."""
        data = f"{_TASK}={value}\0".encode()
        if len(data) > self._size:
            return False
        self._write(data)
        return True

    def clear(self) -> None:
        self._write(b"")

    def _write(self, data: bytes) -> None:
        os.pwrite(self._memory, data.ljust(self._size, b"\0"), self._at)


class ForkServer:
    """The forks of one runner."""

    def __init__(self) -> None:
        self._mark: EnvironMark | None = None
        self._is_possible = sys.platform.startswith("linux")

    def start(self, command: list[str], env: dict[str, str], output: int) -> int | None:
        """Start a command of batchml's runtime; its pid. None where a fork is impossible.

        Standard output and errors go to the descriptor `output`. Raises OSError while the system
        has no room for another process.
        """
        can_fork = is_ours(command) and _TASK in env and _can_exec(command, env)
        mark = self._ready() if can_fork else None
        if mark is None or not mark.put(env[_TASK]):
            return None
        try:
            pid = os.fork()
            if pid == 0:
                _become(command, env, output)
        finally:
            mark.clear()
        return pid

    def _ready(self) -> EnvironMark | None:
        """The mark, once the runtime is imported; None where a fork is impossible."""
        if self._mark is None and self._is_possible:
            try:
                self._mark = EnvironMark()
                _load()
            except (OSError, ImportError):  # ImportError: this installation is being replaced
                self._mark, self._is_possible = None, False
        return self._mark


def is_ours(command: list[str]) -> bool:
    """Whether a command starts batchml's runtime."""
    return tuple(command[1:3]) == RUNTIME


def _can_exec(command: list[str], env: dict[str, str]) -> bool:
    """Whether exec would accept these strings; if not, exec is called, and reports the error
    itself.
    """
    words = (*command, *env, *env.values())
    return not any("\0" in word for word in words) and not any("=" in name for name in env)


def _load() -> None:
    """Import the modules of an attempt before the first fork, also those imported in functions.

    The start of the runner does not import them: the first attempt waits for that start, and its
    command may not use the runtime.
    """
    import selectors  # noqa: F401

    from batchml.runtime import run  # noqa: F401
    from batchml.runtime.sweep import trial  # noqa: F401
    from batchml.runtime.telemetry import budget, usage  # noqa: F401


def _become(command: list[str], env: dict[str, str], output: int) -> NoReturn:
    """Become `python -m batchml.runtime.run`, in the child. Never returns."""
    try:
        gc.freeze()  # no object of the runner may be collected here, and close its descriptors
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

        _reset_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        main()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(70)


def _reset_signals() -> None:
    """Reset ignored signals, except Python's own: the process that started the server may ignore
    some, as nohup does.
    """
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _close_others() -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.close(int(name))
            except OSError:
                pass  # it was the descriptor of the list itself
