"""Enter runs in AWS: ECS Exec for commands and shells, Session Manager for ports.

ECS Exec alone passes no exit code and no terminal size. So it starts batchml's own program in the
container, and both sides exchange lines of text (`runtime/exec/relay.py`). An image without that
program gets a plain shell.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from batchml.aws.exec import EcsTask, ExecApi, SsmSession, plugin_arguments
from batchml.errors import BatchmlError, ExecUnavailable, NotRunning, ServiceUnreachable
from batchml.model.run import JobStatus
from batchml.runtime.exec.command import RUN_ENDED, ExecRequest
from batchml.sessions.exec.session_manager import (
    PluginStream,
    SessionManagerPlugin,
    find_plugin,
    mark_command,
    run_command,
    run_shell,
)
from batchml.sessions.exec.target import ExecResult, ExecTarget, describe_attempt_end, find_task
from batchml.sessions.forward.aws import PluginForward, free_port
from batchml.sessions.terminal import ExecOutcome, attach, collect_output, reset_display

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.sessions.forward.listener import PortForward

T = TypeVar("T")

_PROGRAM = "python3 -m batchml.runtime.exec.main"
_STARTUP = 60.0  # seconds after the start of a run in which ECS Exec may not work yet
_END_LIMIT = 20.0  # seconds for AWS Batch to report the end of a run
_PAUSE = 2.0  # seconds between two tries


class EcsExec:
    """The exec backend of an environment in AWS."""

    def __init__(self, context: "Context") -> None:
        self._context = context
        self._api = ExecApi(context.connect())

    def run(self, target: ExecTarget, command: tuple[str, ...], tty: bool) -> int:
        plugin, task = self._prepare(target)
        columns, lines = os.get_terminal_size() if tty else (0, 0)
        request = ExecRequest(
            command, stream="relay", text=True, size=[lines, columns] if tty else [],
            term=os.environ.get("TERM", "") if tty else "",
        )  # fmt: skip
        stream = self._open(target, plugin, task, f"{_PROGRAM} {request.encode()}")
        try:
            outcome = attach(stream, tty)
        finally:
            stream.close()
        if outcome.code == RUN_ENDED or outcome.code is None:
            if tty:
                reset_display()
            self._raise_if_ended(target, task)
        if not outcome.began and outcome.code is None:
            return self._run_plain(target, task, plugin, command, tty, stream.noise)
        return self._exit_code(outcome)

    def capture(
        self, target: ExecTarget, command: tuple[str, ...], limit: float | None
    ) -> ExecResult:
        plugin, task = self._prepare(target)
        request = ExecRequest(command, stream="relay", text=True)
        stream = self._open(target, plugin, task, f"{_PROGRAM} {request.encode()}")
        try:
            outcome, out = collect_output(stream, limit, command[0])
        finally:
            stream.close()
        if outcome.code is None:
            self._raise_if_ended(target, task)
            if not outcome.began:
                raise ExecUnavailable(
                    "This needs batchml.runtime.exec in the run's image, which was built by an "
                    f"older batchml, or not by batchml. {_quote(stream.noise)}"
                )
        return ExecResult(self._exit_code(outcome), out)

    def forward(self, target: ExecTarget, port: int, local_port: int | None) -> "PortForward":
        plugin, task = self._prepare(target)
        chosen = free_port(port, local_port)

        def open_session() -> SsmSession:
            return self._api.open_forward(self._api.find(task.arn), port, chosen)

        def start() -> tuple[list[str], dict[str, str]]:
            return self._plugin_call(plugin, self._retry_early(target, open_session))

        return PluginForward(port, chosen, start, self._end_reason(target, task))

    # --- Opening a session ------------------------------------------------------------------------

    def _prepare(self, target: ExecTarget) -> tuple[SessionManagerPlugin, EcsTask]:
        """Find the plugin and the task; without the plugin nothing is started."""
        plugin = find_plugin(os.environ)

        def find() -> EcsTask:
            return self._api.find(find_task(self._context, target.run))

        return plugin, self._retry_early(target, find)

    def _retry_early(self, target: ExecTarget, call: Callable[[], T]) -> T:
        """Call; repeat in the first minute of a run, when ECS Exec may not be ready yet."""
        clock = self._context.clock
        while True:
            try:
                return call()
            except ExecUnavailable as error:
                age = clock.now() - (target.run.started_at or 0) / 1000
                if not error.is_early or age > _STARTUP:
                    raise
            clock.sleep(_PAUSE)

    def _plugin_call(
        self, plugin: SessionManagerPlugin, session: SsmSession
    ) -> tuple[list[str], dict[str, str]]:
        profile = self._context.settings.environment.profile
        return plugin_arguments(plugin.path, session, profile, plugin.version)

    def _open(
        self, target: ExecTarget, plugin: SessionManagerPlugin, task: EcsTask, command: str
    ) -> PluginStream:
        session = self._retry_early(target, lambda: self._api.open_command(task, command))
        try:
            return PluginStream(*self._plugin_call(plugin, session))
        except OSError as error:
            self._end_session(session)
            text = f"{plugin.path} cannot be run: {error}. Reinstall it."
            raise ExecUnavailable(text) from error

    def _end_session(self, session: SsmSession) -> None:
        """End a session that is not used, as the AWS CLI does."""
        with suppress(BatchmlError):  # it ends by itself after some minutes
            self._api.end(session)

    # --- The end of a run -------------------------------------------------------------------------

    def _exit_code(self, outcome: ExecOutcome) -> int:
        """Return the exit code. Raises ServiceUnreachable if the connection ended before it."""
        if outcome.code is not None:
            return outcome.code
        raise ServiceUnreachable(
            "The session ended before the command's exit code arrived. The command may go on."
        )

    def _raise_if_ended(self, target: ExecTarget, task: EcsTask, limit: float = _END_LIMIT) -> None:
        reason = self._describe_end(target, task, limit)
        if reason:
            raise NotRunning(reason)

    def _end_reason(self, target: ExecTarget, task: EcsTask) -> Callable[[], str]:
        """Return a function that says why the run has ended; it limits its own calls to AWS."""
        clock, pace = self._context.clock, self._context.pace
        last = clock.monotonic()

        def end_reason() -> str:
            nonlocal last
            if clock.monotonic() < last + pace.longest:
                return ""
            last = clock.monotonic()
            try:
                return self._describe_end(target, task, 0.0)
            except ServiceUnreachable:
                return ""

        return end_reason

    def _describe_end(self, target: ExecTarget, task: EcsTask, limit: float) -> str:
        """Say how the attempt ended, "" if it goes on; wait `limit` seconds for its end."""
        clock = self._context.clock
        end = clock.monotonic() + limit
        name, job_id = target.run.name, target.run.job_id
        while True:
            try:
                if find_task(self._context, target.run) != task.arn:
                    return f"This attempt of {name} has ended, and the run is retried."
            except NotRunning as error:
                run = self._context.describe([job_id]).get(job_id, target.run)
                return str(error) if run.status is JobStatus.RUNNING else describe_attempt_end(run)
            except ExecUnavailable:
                pass  # the next attempt is starting
            if clock.monotonic() >= end:
                return ""
            clock.sleep(_PAUSE)

    # --- Images without batchml -------------------------------------------------------------------

    def _run_plain(
        self,
        target: ExecTarget,
        task: EcsTask,
        plugin: SessionManagerPlugin,
        command: Sequence[str],
        tty: bool,
        noise: str,
    ) -> int:
        """Run a plain shell, as root, with the container's own variables."""
        print(
            "batchml: this image has no batchml.runtime.exec, so this is ECS Exec's plain shell.",
            file=sys.stderr,
            flush=True,
        )
        if not command:
            if not tty:
                text = f"Without a terminal give a command, after --. {_quote(noise)}"
                raise ExecUnavailable(text)
            session = self._api.open_command(task, "/bin/sh")
            code = run_shell(*self._plugin_call(plugin, session))
            self._raise_if_ended(target, task, 0.0)
            return code
        mark = os.urandom(8).hex()
        stream = self._open(target, plugin, task, mark_command(command, mark))
        try:
            exit_code = run_command(stream, mark)
        finally:
            stream.close()
        if exit_code is None:
            self._raise_if_ended(target, task)
            raise ServiceUnreachable(
                f"The session ended before the command's exit code arrived. {_quote(stream.noise)}"
            )
        return exit_code


def _quote(noise: str) -> str:
    return f"AWS says: {noise[-300:]}" if noise else ""
