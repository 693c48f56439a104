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
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import NoReturn

from batchml.runtime.processes import note_attempt_start, reap, send

RUNTIME = ("-m", "batchml.runtime.run")
_TASK = "BATCHML_TASK"  # marks the processes of an attempt: record.py
# Fields of /proc/pid/stat after the name: env_start and env_end (proc(5), 50 and 51).
_START, _END = 47, 48

_SHORT = 1.0  # seconds: only a runtime whose attempt was as short serves another
_MOST_SERVED = 200  # attempts of one runtime, so that it does not grow
_MESSAGE_BYTES = 65_536  # of an attempt; one with more variables gets a runtime of its own
_CODE_BYTES = 16


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

    def put(self, value: str, memory: int | None = None) -> bool:
        """Set the mark; False where it is too long. `memory`: of a child that was forked."""
        data = f"{_TASK}={value}\0".encode()
        if len(data) > self._size:
            return False
        self._write(data, memory)
        return True

    def clear(self, memory: int | None = None) -> None:
        self._write(b"", memory)

    def _write(self, data: bytes, memory: int | None) -> None:
        file = self._memory if memory is None else memory
        os.pwrite(file, data.ljust(self._size, b"\0"), self._at)


class ForkServer:
    """The forks of one runner.

    A runtime that has served a child of an array serves the runner's next child of the same array,
    too: a fork and its end take as much time as everything else that a short child needs. Such a
    runtime waits only if nothing of the last child is left in it (`_is_reusable`), and is not used
    for any other job. While it serves, it is an attempt's process like any other: it has the
    attempt's mark before the message with the attempt reaches it, and whatever it does besides
    waiting, its end is the attempt's end.
    """

    def __init__(self) -> None:
        self._mark: EnvironMark | None = None
        self._is_possible = sys.platform.startswith("linux")
        self._runtime: _ArrayRuntime | None = None
        self.has_missed = False  # whether a runtime ended before it took its attempt

    @property
    def is_waiting(self) -> bool:
        """Whether a runtime waits for the next child of its array."""
        return self._runtime is not None and self._runtime.is_waiting

    @property
    def link(self) -> int:
        """A descriptor that is readable once the runtime has served its attempt; -1: none."""
        return -1 if self._runtime is None else self._runtime.link.fileno()

    def take(self, command: list[str], env: dict[str, str], output: int) -> int | None:
        """Have the waiting runtime serve an attempt in this working directory, with the processors
        of this thread; its pid. None where none waits for this attempt: `start` it then.

        Standard output and errors go to the descriptor `output`.
        """
        self.has_missed = False
        if self._runtime is None or not self._runtime.take(command, env, output):
            return None
        return self._runtime.pid

    def start(self, command: list[str], env: dict[str, str], output: int) -> int | None:
        """Start a command of batchml's runtime, as `take`; None where a fork is impossible.

        Raises OSError while the system has no room for another process.
        """
        self.dismiss()
        can_fork = is_ours(command) and _TASK in env and _can_exec(command, env)
        mark = self._ready() if can_fork else None
        if mark is None or not mark.put(env[_TASK]):
            return None
        array = _array_of(env)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            taken = mmap.mmap(-1, 1)
            try:
                pid = os.fork()
                if pid == 0:
                    _become(command, env, output, (theirs, taken) if array else None)
            finally:
                mark.clear()
            if array:
                self._runtime = _ArrayRuntime.of(pid, ours, taken, array, mark)
        return pid

    def receive_code(self) -> int | None:
        """The exit code of the attempt that the runtime has served; None if it ends instead: then
        its own end is the attempt's.
        """
        return None if self._runtime is None else self._runtime.receive_code()

    def note_end(self, pid: int) -> int | None:
        """This process has ended, and was waited for. Returns the exit code if it had served its
        attempt before.
        """
        if self._runtime is None or self._runtime.pid != pid:
            return None
        code = self.receive_code()
        self.has_missed = self._runtime.has_missed
        self._forget()
        return code

    def dismiss(self) -> None:
        """End a waiting runtime. One that does not wait has ended with its attempt."""
        if self._runtime is not None and self._runtime.is_waiting:
            send([self._runtime.pid], signal.SIGKILL)
            os.waitpid(self._runtime.pid, 0)  # nothing else waits for it
        self._forget()

    def _forget(self) -> None:
        if self._runtime is not None:
            self._runtime.close()
        self._runtime = None

    def _ready(self) -> EnvironMark | None:
        """The mark, once the runtime is imported; None where a fork is impossible."""
        if self._mark is None and self._is_possible:
            try:
                self._mark = EnvironMark()
                _load()
            except (OSError, ImportError):  # ImportError: this installation is being replaced
                self._mark, self._is_possible = None, False
        return self._mark


class _ArrayRuntime:
    """A forked runtime that may serve several children of one array.

    `taken` is memory that it shares: the number of attempts that it has read from `link`. A process
    that is being killed may still read a message, so that only this proves that it went on.
    """

    def __init__(
        self,
        pid: int,
        link: socket.socket,
        taken: mmap.mmap,
        array: str,
        mark: EnvironMark,
        memory: int,
    ) -> None:
        self.pid, self.link = pid, link
        self.is_waiting = False
        self._taken, self._sent = taken, 0
        self._array, self._mark, self._memory = array, mark, memory

    @classmethod
    def of(
        cls, pid: int, link: socket.socket, taken: mmap.mmap, array: str, mark: EnvironMark
    ) -> _ArrayRuntime | None:
        """None where its memory may not be changed: it then serves one attempt."""
        try:
            memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        return cls(pid, link.dup(), taken, array, mark, memory)

    @property
    def has_missed(self) -> bool:
        """Whether it has not taken the last attempt."""
        return self._taken[0] != self._sent

    def take(self, command: list[str], env: dict[str, str], output: int) -> bool:
        """Have it serve an attempt; False where it cannot, and has not begun to.

        The mark comes first: if this runner is killed, the attempt's processes are found by it.
        """
        is_its_child = is_ours(command) and _TASK in env and _array_of(env) == self._array
        if not (self.is_waiting and is_its_child and _can_exec(command, env)):
            return False
        processors = sorted(os.sched_getaffinity(0))
        message = json.dumps([command, env, os.getcwd(), processors]).encode()
        try:
            if len(message) > _MESSAGE_BYTES or not self._mark.put(env[_TASK], self._memory):
                return False
            socket.send_fds(self.link, [message], [output], socket.MSG_DONTWAIT)
        except OSError:  # it has been killed, or the message is too long
            return False
        self.is_waiting = False
        self._sent += 1
        return True

    def receive_code(self) -> int | None:
        """None where it ends, or has ended, without a message."""
        try:
            data = self.link.recv(_CODE_BYTES, socket.MSG_DONTWAIT)
            if not data:
                return None
            self._mark.clear(self._memory)
        except OSError:
            return None
        self.is_waiting = True
        return int(data)

    def close(self) -> None:
        self.link.close()
        self._taken.close()
        os.close(self._memory)


def _array_of(env: Mapping[str, str]) -> str:
    """The array of which the attempt runs a child; empty for any other job."""
    if not env.get("AWS_BATCH_JOB_ARRAY_INDEX"):
        return ""
    return env.get("AWS_BATCH_JOB_ID", "").rpartition(":")[0]


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
    import encodings.ascii  # noqa: F401
    import selectors  # noqa: F401

    from batchml.runtime import run  # noqa: F401
    from batchml.runtime.health import gate  # noqa: F401
    from batchml.runtime.sweep import trial  # noqa: F401
    from batchml.runtime.telemetry import budget, metrics, spot, usage  # noqa: F401


def _become(
    command: list[str],
    env: dict[str, str],
    output: int,
    more: tuple[socket.socket, mmap.mmap] | None,
) -> NoReturn:
    """Become `python -m batchml.runtime.run`, in the child. Never returns.

    `more`: the runtime may serve further attempts, which come from this socket; how many it has
    taken is noted in this memory.
    """
    try:
        gc.freeze()  # no object of the runner may be collected here, and close its descriptors
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        _use_output(null, output)
        _close_others(-1 if more is None else more[0].fileno())
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        _reset_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if more is None:
            from batchml.runtime.run import main

            _set_variables(command, env)
            main()
        else:
            _serve(command, env, *more)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(70)


def _serve(
    command: list[str], env: dict[str, str], link: socket.socket, taken: mmap.mmap
) -> NoReturn:
    """Serve an attempt, and further ones from `link` for as long as nothing of one is left."""
    from batchml.runtime.entry.stopping import Signals, signals_blocked
    from batchml.runtime.health.checks import remember_disks
    from batchml.runtime.run import run_once

    remember_disks()
    before: dict[str, str] = {}
    files = len(os.listdir("/proc/self/fd"))
    served = 0
    while True:
        began = note_attempt_start()
        _set_variables(command, env, before)
        before = env
        code = run_once(env)
        served += 1
        if code or not _is_reusable(files, began, served):
            os._exit(code)
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        _use_output(null, null)
        os.close(null)
        # A signal for the next attempt may come at once. It must end this process, as it ends one
        # that was just forked; `run_once` ignores signals at its end.
        with signals_blocked():
            try:
                link.send(b"%d" % code)
            except OSError:  # the runner has ended, or wants no other attempt
                os._exit(code)
            Signals.reset()
        data, received, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, 1)
        if not data:  # the runner has ended
            os._exit(0)
        taken[0] = served
        command, env, folder, processors = json.loads(data)
        os.chdir(folder)
        if processors != sorted(os.sched_getaffinity(0)):
            os.sched_setaffinity(0, processors)
        _use_output(0, received[0])
        os.close(received[0])


def _is_reusable(files: int, began: float, served: int) -> bool:
    """Whether nothing of an attempt is left in this process: no process, thread or file of it. One
    that took long may have left more memory, and the time of a fork does not matter to it.
    """
    return (
        time.monotonic() - began < _SHORT
        and served < _MOST_SERVED
        and threading.active_count() == 1
        and len(os.listdir("/proc/self/fd")) == files
        and reap()
    )


def _use_output(null: int, output: int) -> None:
    for number, source in enumerate((null, output, output)):
        os.dup2(source, number)


def _set_variables(
    command: list[str], env: dict[str, str], before: Mapping[str, str] | None = None
) -> None:
    """Set the command line and the variables. `before`: those that are set now, if known."""
    if not before:
        os.environ.clear()
        before = {}
    for name in before.keys() - env.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in env.items() if before.get(name) != value})
    sys.argv = list(command[2:])


def _reset_signals() -> None:
    """Reset ignored signals, except Python's own: the process that started the server may ignore
    some, as nohup does.
    """
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _close_others(kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # it was the descriptor of the list itself
