"""Into runs in AWS: ECS Exec for commands and shells, Session Manager for ports.

Our program inside is started by ECS Exec and talks in lines of text (`runtime/exec/relay`), so
that exit codes, the terminal's size and every byte arrive, which ECS Exec alone does not see to. An
image without it has a plain shell.
"""

import os
import shlex
from typing import TYPE_CHECKING, TypeVar

from batchml.aws.exec import ExecApi, Opened, Task, plugin_call
from batchml.client.doors import Asked, Seat, ending, task_of
from batchml.client.plugin import Plugin, find_plugin
from batchml.errors import BatchmlError, NoDoor, NotRunning, ServiceUnreachable
from batchml.model.run import JobStatus
from batchml.runtime.exec.main import ENDED, Order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchml.client.place import Place
    from batchml.client.plugin_line import PluginLine
    from batchml.client.talk import Said
    from batchml.client.tunnel import Tunnel

T = TypeVar("T")

_INSIDE = "python3 -m batchml.runtime.exec.main"
_YOUNG = 60.0  # seconds after its start in which a run's door may not be open yet
_SETTLING = 20.0  # seconds until AWS Batch says that a run has ended whose container has
_PAUSE = 2.0


class AwsDoors:
    """Doors of an environment in AWS."""

    def __init__(self, place: "Place") -> None:
        self._place = place
        self._api = ExecApi(place.connect())

    def run(self, seat: Seat, command: tuple[str, ...], tty: bool) -> int:
        from batchml.client.talk import talk
        from batchml.client.terminal import quiet

        plugin, task = self._way(seat)
        columns, lines = os.get_terminal_size() if tty else (0, 0)
        order = Order(
            command, stream="relay", text=True, size=[lines, columns] if tty else [],
            term=os.environ.get("TERM", "") if tty else "",
        )  # fmt: skip
        line = self._open(seat, plugin, task, f"{_INSIDE} {order.coded()}")
        try:
            said = talk(line, tty)
        finally:
            line.close()
        if said.code == ENDED or said.code is None:
            if tty:
                quiet()
            self._raise_if_over(seat, task)
        if not said.began and said.code is None:
            return self._run_plain(seat, task, plugin, command, tty, line.noise)
        return self._code(said)

    def ask(self, seat: Seat, command: tuple[str, ...], limit: float | None) -> Asked:
        from batchml.client.talk import listen

        plugin, task = self._way(seat)
        order = Order(command, stream="relay", text=True)
        line = self._open(seat, plugin, task, f"{_INSIDE} {order.coded()}")
        try:
            said, out = listen(line, limit, command[0])
        finally:
            line.close()
        if said.code is None:
            self._raise_if_over(seat, task)
            if not said.began:
                raise NoDoor(
                    "The run's image has no batchml.runtime.exec, which this needs: it was built "
                    f"by an older batchml, or not by batchml. {_quoted(line.noise)}"
                )
        return Asked(self._code(said), out)

    def tunnel(self, seat: Seat, port: int, local_port: int | None) -> "Tunnel":
        from batchml.client.tunnel_aws import PluginTunnel, free_port

        plugin, task = self._way(seat)
        chosen = free_port(port, local_port)

        def opened() -> Opened:
            return self._api.open_forward(self._api.find(task.arn), port, chosen)

        def start() -> "tuple[list[str], dict[str, str]]":
            return self._call(plugin, self._once_open(seat, opened))

        return PluginTunnel(port, chosen, start, self._over(seat, task))

    # --- the way in ---------------------------------------------------------------------------

    def _way(self, seat: Seat) -> tuple[Plugin, Task]:
        """The plugin first: without it nothing is started."""
        plugin = find_plugin(os.environ)
        task = self._once_open(seat, lambda: self._api.find(task_of(self._place, seat.run)))
        return plugin, task

    def _once_open(self, seat: Seat, enter: "Callable[[], T]") -> "T":
        """What `enter` gives. ECS opens its door some seconds after a run is RUNNING: while the
        run is young it is tried again."""
        clock = self._place.clock
        while True:
            try:
                return enter()
            except NoDoor as error:
                age = clock.now() - (seat.run.started_at or 0) / 1000
                if not error.is_early or age > _YOUNG:
                    raise
            clock.sleep(_PAUSE)

    def _call(self, plugin: Plugin, opened: Opened) -> "tuple[list[str], dict[str, str]]":
        profile = self._place.settings.environment.profile
        return plugin_call(plugin.path, opened, profile, plugin.version)

    def _open(self, seat: Seat, plugin: Plugin, task: Task, command: str) -> "PluginLine":
        from batchml.client.plugin_line import PluginLine

        opened = self._once_open(seat, lambda: self._api.open_command(task, command))
        try:
            return PluginLine(*self._call(plugin, opened))
        except OSError as error:
            self._end(opened)
            raise NoDoor(f"{plugin.path} cannot be run: {error}. Install it anew.") from error

    def _end(self, opened: Opened) -> None:
        """As the AWS CLI does, so that no session stays open that nobody took up."""
        try:
            self._api.end(opened)
        except BatchmlError:
            pass  # it ends by itself after some minutes

    # --- how it ended -------------------------------------------------------------------------

    def _code(self, said: "Said") -> int:
        if said.code is not None:
            return said.code
        raise ServiceUnreachable(
            "The session ended before the command said its exit code. It was ended inside with it."
        )

    def _raise_if_over(self, seat: Seat, task: Task, patience: float = _SETTLING) -> None:
        why = self._ended(seat, task, patience)
        if why:
            raise NotRunning(why)

    def _over(self, seat: Seat, task: Task) -> "Callable[[], str]":
        """Asked seldom: by a tunnel that has gone, and once a look."""
        clock, pace = self._place.clock, self._place.pace
        asked = clock.monotonic()

        def over() -> str:
            nonlocal asked
            if clock.monotonic() < asked + pace.most:
                return ""
            asked = clock.monotonic()
            try:
                return self._ended(seat, task, 0.0)
            except ServiceUnreachable:
                return ""

        return over

    def _ended(self, seat: Seat, task: Task, patience: float) -> str:
        """How the attempt ended that somebody was in; empty while it goes on."""
        clock = self._place.clock
        end = clock.monotonic() + patience
        while True:
            try:
                if task_of(self._place, seat.run) != task.arn:
                    return f"This attempt of {seat.run.name} has ended, and the run is tried again."
            except NotRunning as error:
                run = self._place.describe([seat.run.job_id]).get(seat.run.job_id, seat.run)
                if run.status.is_terminal:
                    return f"{run.name} has ended: {ending(run)}."
                if run.status is not JobStatus.RUNNING:
                    return (
                        f"This attempt of {run.name} has ended, and the run is {run.status.value}: "
                        "it is tried again."
                    )
                return str(error)
            except NoDoor:
                pass  # what takes its place has only started
            if clock.monotonic() >= end:
                return ""
            clock.sleep(_PAUSE)

    # --- images that are not ours -------------------------------------------------------------

    def _run_plain(
        self, seat: Seat, task: Task, plugin: Plugin, command: "Sequence[str]", tty: bool, why: str
    ) -> int:
        """A plain shell, as root, with the container's own variables."""
        import sys

        from batchml.client.plain_aws import run_command, run_shell

        print(
            "batchml: this image has no batchml.runtime.exec: the container's own shell, as ECS "
            "Exec gives it.", file=sys.stderr, flush=True,
        )  # fmt: skip
        if not command:
            if not tty:
                raise NoDoor(f"Without a terminal give a command, after --. {_quoted(why)}")
            code = run_shell(*self._call(plugin, self._api.open_command(task, "/bin/sh")))
            self._raise_if_over(seat, task, 0.0)
            return code
        mark = os.urandom(8).hex()
        line = self._open(seat, plugin, task, marked(command, mark))
        try:
            found = run_command(line, mark)
        finally:
            line.close()
        if found is None:
            self._raise_if_over(seat, task)
            raise ServiceUnreachable(
                f"The session ended before the command said its exit code. {_quoted(line.noise)}"
            )
        return found


def marked(command: "Sequence[str]", mark: str) -> str:
    """A command for a plain shell, between two lines by which its output and code are known."""
    script = f"echo {mark} begin; {shlex.join(command)}; c=$?; echo; echo {mark} end $c"
    return shlex.join(["/bin/sh", "-c", script])


def _quoted(noise: str) -> str:
    return f"AWS says: {noise[-300:]}" if noise else ""
