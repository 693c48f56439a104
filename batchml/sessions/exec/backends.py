"""Run commands inside a running attempt and forward its ports, with the environment's exec backend.

No keys and no open ports are needed: processes and containers of this machine are reached through
/proc and the Docker engine, runs in AWS through ECS Exec and Session Manager.
"""

import sys
from typing import TYPE_CHECKING, Protocol

from batchml.sessions.exec.target import ExecResult, ExecTarget

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.sessions.forward.listener import PortForward

OUTPUT_LIMIT = 60.0  # seconds for a command whose output a program waits for


class ExecBackend(Protocol):
    """Access to the runs of one environment."""

    def run(self, target: ExecTarget, command: tuple[str, ...], tty: bool) -> int: ...

    def capture(
        self, target: ExecTarget, command: tuple[str, ...], limit: float | None
    ) -> ExecResult: ...

    def forward(self, target: ExecTarget, port: int, local_port: int | None) -> "PortForward": ...


def open_backend(context: "Context") -> ExecBackend:
    """Open the exec backend of the environment."""
    if context.settings.is_local:
        from batchml.sessions.exec.local import LocalExec

        return LocalExec(context)
    from batchml.sessions.exec.aws import EcsExec

    return EcsExec(context)


def run_inside(
    context: "Context", target: ExecTarget, command: tuple[str, ...], *, tty: bool | None = None
) -> int:
    """Run a command, or without one a shell, on this process's terminal; return its exit code.

    Without a terminal (`tty` False, or none here) input and output are passed on unchanged. Raises
    NotRunning when the run ends meanwhile, ExecUnavailable if the run cannot be entered.
    """
    if tty is None:
        tty = sys.stdin.isatty() and sys.stdout.isatty()
    return open_backend(context).run(target, command, tty)


def capture_output(
    context: "Context",
    target: ExecTarget,
    command: tuple[str, ...],
    limit: float | None = OUTPUT_LIMIT,
) -> ExecResult:
    """Run a command and return its standard output and exit code.

    Raises NotRunning, ExecUnavailable, and ServiceUnreachable after `limit` seconds (None: never).
    """
    return open_backend(context).capture(target, command, limit)


def open_port_forward(
    context: "Context", target: ExecTarget, port: int, local_port: int | None = None
) -> "PortForward":
    """Forward a port of 127.0.0.1, by default any free one, to a port of the run.

    The run's program may open its port later: connections are refused until then. Raises UsageError
    if `local_port` is taken, NotRunning, ExecUnavailable.
    """
    return open_backend(context).forward(target, port, local_port)
