"""Enter runs of this machine, which are processes or containers."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from batchml.errors import ExecUnavailable, NotRunning, ServiceUnreachable
from batchml.local.exec import LocalAttempt, find_attempt
from batchml.local.store import identity
from batchml.model.run import JobStatus
from batchml.runtime.exec.command import NO_PROGRAM, RUN_ENDED
from batchml.runtime.package import package_root
from batchml.sessions.exec.container import capture_in_container, run_in_container
from batchml.sessions.exec.target import ExecResult, ExecTarget, describe_attempt_end, find_task
from batchml.sessions.forward.listener import Connect, PortForward, PortRelay, open_listener
from batchml.sessions.forward.local import (
    connect_here,
    connect_to_container,
    connect_to_process,
)
from batchml.sessions.terminal import lend_terminal, reset_display

if TYPE_CHECKING:
    from batchml.context import Context

# This installation comes first on the path: the user's folder may contain any module.
_START = (
    "import sys; sys.path[0] = sys.argv.pop(1); from batchml.runtime.exec.main import main; main()"
)
_END_LIMIT = 5.0  # seconds for the state of a run to show that its program has ended
_PAUSE = 0.05  # seconds between two looks at the state


class AttemptAccess(NamedTuple):
    """How attempts of one kind are entered.

    `run` returns the exit code, and whether the run may have ended during the command. `connect`
    returns how to connect to a port, or None for a port of this machine itself.
    """

    run: Callable[[LocalAttempt, tuple[str, ...], bool], tuple[int, bool]]
    capture: Callable[[LocalAttempt, tuple[str, ...], float | None], ExecResult]
    connect: Callable[[LocalAttempt, int], Connect | None]


class LocalExec:
    """The exec backend of the environment `local`."""

    def __init__(self, context: "Context") -> None:
        self._context = context

    def run(self, target: ExecTarget, command: tuple[str, ...], tty: bool) -> int:
        attempt = self._attempt(target)
        code, may_have_ended = access_to(attempt).run(attempt, command, tty)
        if may_have_ended and self._has_ended(attempt):
            reset_display()
            raise self._end_error(target)
        return code

    def capture(
        self, target: ExecTarget, command: tuple[str, ...], limit: float | None
    ) -> ExecResult:
        attempt = self._attempt(target)
        result = access_to(attempt).capture(attempt, command, limit)
        if result.code in (RUN_ENDED, NO_PROGRAM) and self._has_ended(attempt):
            raise self._end_error(target)
        return result

    def forward(self, target: ExecTarget, port: int, local_port: int | None) -> PortForward:
        attempt = self._attempt(target)

        def end_reason() -> str:
            return "" if self._is_alive(attempt) else str(self._end_error(target))

        connect = access_to(attempt).connect(attempt, port)
        if connect is None and local_port in (None, port):
            return PortForward(port, port, end_reason, is_direct=True)
        listener = open_listener(port, local_port)
        return PortRelay(port, listener, connect or connect_here(port), end_reason)

    def _attempt(self, target: ExecTarget) -> LocalAttempt:
        """Find the running attempt of a target. Raises NotRunning."""
        home = self._context.home
        if identity.read_identity(home) is None:
            raise NotRunning(
                f"{home.root} is a copy or a restored backup, which is read-only: the programs of "
                "its runs belong to the original folder. To use the copy: batchml local adopt"
            )
        task = find_task(self._context, target.run).rpartition("/")[2]
        found = find_attempt(home, task)
        if found is None:
            raise self._end_error(target)
        return found

    def _has_ended(self, attempt: LocalAttempt) -> bool:
        """Say whether the attempt has ended; wait a little while its end is recorded."""
        clock, end = self._context.clock, self._context.clock.monotonic() + _END_LIMIT
        while self._is_alive(attempt):
            if clock.monotonic() > end:
                return False
            clock.sleep(_PAUSE)
        return True

    def _is_alive(self, attempt: LocalAttempt) -> bool:
        """A process ends with its runner; a container outlives it and gets another runner."""
        if attempt.container:
            return os.path.exists(attempt.record)
        return find_attempt(self._context.home, attempt.task_id) is not None

    def _end_error(self, target: ExecTarget) -> NotRunning:
        """Make the error that says how the run ended, once its state shows that."""
        clock, end = self._context.clock, self._context.clock.monotonic() + _END_LIMIT
        job_id = target.run.job_id
        while True:
            run = self._context.describe([job_id]).get(job_id, target.run)
            if run.status is not JobStatus.RUNNING or clock.monotonic() > end:
                return NotRunning(describe_attempt_end(run))
            clock.sleep(_PAUSE)


# --- Processes ------------------------------------------------------------------------------------


def _run_in_process(attempt: LocalAttempt, command: tuple[str, ...], tty: bool) -> tuple[int, bool]:
    """Run a command on this process's own terminal, or with its own input and output.

    The command ends when all writing ends of its pipe `lifeline` are closed: here, or by the kernel
    when this process is killed.
    """
    lifeline, ours = os.pipe()
    os.set_inheritable(lifeline, True)
    signals: list[int] = []  # received by this process

    def cut(number: int) -> None:
        signals.append(number)
        if len(signals) == 1:
            os.close(ours)

    term = os.environ.get("TERM", "") if tty else ""
    try:
        with lend_terminal(cut):
            sys.stdout.flush()
            words = _arguments(attempt, command, lifeline, term)
            code = subprocess.Popen(words, pass_fds=[lifeline]).wait()
    finally:
        os.close(lifeline)
        if not signals:
            os.close(ours)
    if signals:
        return 128 + signals[0], False
    if code == NO_PROGRAM:
        raise ExecUnavailable("The command was not started.")
    return (128 - code if code < 0 else code), code in (RUN_ENDED, -signal.SIGKILL)


def _capture_in_process(
    attempt: LocalAttempt, command: tuple[str, ...], limit: float | None
) -> ExecResult:
    lifeline, ours = os.pipe()
    os.set_inheritable(lifeline, True)
    try:
        done = subprocess.run(
            _arguments(attempt, command, lifeline, ""), pass_fds=[lifeline], timeout=limit,
            check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ServiceUnreachable(
            f"{command[0]} did not end within {limit:.0f} s inside the run."
        ) from None
    finally:
        os.close(ours)
        os.close(lifeline)
    code = RUN_ENDED if done.returncode == -signal.SIGKILL else done.returncode
    return ExecResult(128 - code if code < 0 else code, done.stdout)


def _arguments(
    attempt: LocalAttempt, command: tuple[str, ...], lifeline: int, term: str
) -> list[str]:
    request = attempt.request(command, lifeline=lifeline, term=term)
    return [sys.executable, "-c", _START, package_root(), request.encode()]


_PROCESS = AttemptAccess(_run_in_process, _capture_in_process, connect_to_process)
_CONTAINER = AttemptAccess(run_in_container, capture_in_container, connect_to_container)


def access_to(attempt: LocalAttempt) -> AttemptAccess:
    return _CONTAINER if attempt.container else _PROCESS
