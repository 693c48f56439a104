"""Enter containers of this machine through the Docker engine's exec.

batchml's own program runs the command in the container (`runtime/exec/main.py`): it makes a
terminal of the right size, and reports the exit code. An image without Python gets the engine's
plain exec.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchml.errors import ExecUnavailable, ServiceUnreachable
from batchml.local import exec as engine
from batchml.local.exec import ContainerExec, ExecRefused, LocalAttempt, RelayFrames
from batchml.local.executors.runner.link import EngineFrames
from batchml.runtime.exec.command import RUN_ENDED
from batchml.runtime.exec.relay import Frame, frame
from batchml.runtime.package import package_root
from batchml.sessions.exec.target import ExecResult
from batchml.sessions.terminal import (
    attach,
    collect_output,
    lend_terminal,
    nonblocking_pipe,
    notify_resizes,
    raw_mode,
    write_out,
)

_BLOCK = 65_536
_NO_SHELL = (126, 127)  # the engine's exit codes for a missing command


def run_in_container(
    attempt: LocalAttempt, command: tuple[str, ...], tty: bool
) -> tuple[int, bool]:
    """Run a command; return its exit code, and whether the run may have ended meanwhile.

    Raises ExecUnavailable.
    """
    columns, lines = os.get_terminal_size() if tty else (0, 0)
    term = os.environ.get("TERM", "") if tty else ""
    size = [lines, columns] if tty else []
    try:
        if not engine.has_python(attempt.container):
            return _run_plain(attempt, command, tty, term)
        started = engine.start_program(
            attempt.container, attempt.request(command, stream="relay", size=size, term=term)
        )
    except ExecRefused as error:
        raise ExecUnavailable(f"The container cannot be entered: {error}") from error
    try:
        outcome = attach(_RelayStream(started), tty)
    finally:
        started.close()
    return (RUN_ENDED, True) if outcome.code is None else (outcome.code, False)


def capture_in_container(
    attempt: LocalAttempt, command: tuple[str, ...], limit: float | None
) -> ExecResult:
    """Run a command; return its output and exit code."""
    end = None if limit is None else time.monotonic() + limit
    try:
        if not engine.has_python(attempt.container):
            return _capture_plain(attempt, command, end)
        started = engine.start_program(attempt.container, attempt.request(command, stream="relay"))
    except ExecRefused as error:
        raise ExecUnavailable(f"The container cannot be entered: {error}") from error
    try:
        outcome, out = collect_output(_RelayStream(started), limit, command[0])
    finally:
        started.close()
    return ExecResult(RUN_ENDED if outcome.code is None else outcome.code, out)


class _RelayStream:
    """The connection to batchml's program in a container, as an `ExecStream`."""

    def __init__(self, started: ContainerExec) -> None:
        self._started = started
        self._frames = RelayFrames()

    def frames(self, until: float | None = None) -> Iterator[list[Frame]]:
        while data := self._started.receive(until):
            yield list(self._frames.feed(data))

    def send(self, kind: bytes, content: bytes = b"") -> None:
        self._started.stream.sendall(frame(kind, content))

    def cut(self) -> None:
        with suppress(OSError):
            self._started.stream.shutdown(socket.SHUT_RDWR)


# --- Images without Python ------------------------------------------------------------------------


def _run_plain(
    attempt: LocalAttempt, command: tuple[str, ...], tty: bool, term: str
) -> tuple[int, bool]:
    """Run a command with the container's own variables, on the engine's terminal."""
    words = command or ("/bin/sh",)
    started = engine.start_command(attempt.container, words, tty=tty, term=term)
    plain = _PlainStream(started, tty)
    try:
        with (
            guard_command(attempt.container, started) as release,
            lend_terminal(plain.cut, gets_ctrl_c=tty),
            raw_mode(tty),
            notify_resizes(plain.wake_write),
        ):
            plain.relay()
            if not plain.cut_by:
                release()
        code = None if plain.cut_by else engine.exit_code(started.exec_id)
    except ExecRefused:
        code = None
    finally:
        started.close()
    if plain.cut_by:
        return 128 + plain.cut_by, False
    if code in _NO_SHELL and not command:
        raise ExecUnavailable("This image has no shell: name a program that it has, after --.")
    return code if code is not None else RUN_ENDED, code is None or code == 128 + signal.SIGKILL


class _PlainStream:
    """The engine's stream, copied from and to this process's input and output."""

    def __init__(self, started: ContainerExec, tty: bool) -> None:
        self._started, self._stream, self._tty = started, started.stream, tty
        self._wake, self.wake_write = nonblocking_pipe()
        self.cut_by = 0  # the signal to this process that cut the stream; 0: none

    def cut(self, number: int) -> None:
        self.cut_by = number
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def relay(self) -> None:
        threading.Thread(target=self._relay_input, daemon=True).start()
        os.write(self.wake_write, b"w")  # send the size, now that the command runs
        frames = EngineFrames()
        while data := self._started.receive():
            if self._tty:
                write_out(1, data)
                continue
            for is_error, content in frames.feed(data):
                write_out(2 if is_error else 1, content)

    def _relay_input(self) -> None:
        with suppress(OSError, ValueError, ExecRefused):
            while True:
                ready, _, _ = select.select([0, self._wake], [], [])
                if self._wake in ready:
                    os.read(self._wake, 64)
                    if self._tty:
                        columns, lines = os.get_terminal_size()
                        engine.resize(self._started.exec_id, lines, columns)
                if 0 in ready:
                    data = os.read(0, _BLOCK)
                    if not data:
                        return self._stream.shutdown(socket.SHUT_WR)
                    self._stream.sendall(data)


def _capture_plain(
    attempt: LocalAttempt, command: tuple[str, ...], end: float | None
) -> ExecResult:
    started = engine.start_command(attempt.container, command, tty=False)
    frames, out = EngineFrames(), bytearray()
    try:
        started.stream.shutdown(socket.SHUT_WR)
        while data := started.receive(end):
            for is_error, content in frames.feed(data):
                if not is_error:
                    out += content
    except TimeoutError:
        raise ServiceUnreachable(f"{command[0]} did not end in time inside the run.") from None
    finally:
        started.close()
    code = engine.exit_code(started.exec_id)
    return ExecResult(RUN_ENDED if code is None else code, bytes(out))


# --- Cleanup after a killed client ----------------------------------------------------------------
# The engine does not end a plain exec when its client is killed. So a guard process waits for the
# end of the client, and then ends the command.


_START = (
    "import sys; sys.path[0] = sys.argv.pop(1); from batchml.sessions.exec.container import main; "
)


@contextmanager
def guard_command(container: str, started: ContainerExec) -> Iterator[Callable[[], None]]:
    """End the command after the block, even if this process is killed in it.

    The yielded function cancels that: call it when the command has ended by itself.
    """
    words = [sys.executable, "-c", f"{_START}main()", package_root(), container, started.exec_id]
    null = subprocess.DEVNULL
    guard = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True
    )
    assert guard.stdin is not None
    with guard, guard.stdin as line:

        def release() -> None:
            with suppress(OSError):
                line.write(b"done")

        yield release


def main() -> None:
    """The guard process, with arguments CONTAINER EXEC: its input ends with the client."""
    if os.read(0, 1):
        return
    container, exec_id = sys.argv[1:]
    with suppress(ExecRefused, OSError, ValueError):
        inside = _pid_in_container(engine.pid_of(exec_id))
        # HUP goes to its session, and so to the programs in its foreground.
        script = f"kill -HUP -{inside}; kill -KILL -{inside} {inside}"
        engine.start_command(container, ["/bin/sh", "-c", script], tty=False).close()


def _pid_in_container(pid: int) -> int:
    """Translate a process id of this machine. Raises OSError, ValueError."""
    for line in Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    raise ValueError(pid)
