"""Access to an attempt that runs on this machine: find it, and run a program in its container."""

import inspect
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from batchml.local.executors import docker, record
from batchml.local.executors.choice import CONTAINER
from batchml.local.executors.container_spec import container_name
from batchml.local.executors.record import mark_of
from batchml.local.executors.runner.link import EngineFrames
from batchml.local.home import Home
from batchml.local.store import identity
from batchml.runtime.exec.command import ExecRequest
from batchml.runtime.exec.relay import Frame, FrameParser


class LocalAttempt(Struct, frozen=True):
    """A running attempt. `container` is its name in the Docker engine, "" for a process."""

    task_id: str
    mark: str  # the value of BATCHML_TASK in the environment of its processes
    runner: int  # the runner's process id
    groups: tuple[str, ...]  # control groups
    record: str  # the path of the attempt's runner.json, which is removed with the attempt
    container: str = ""

    def request(self, command: Sequence[str], **more: object) -> ExecRequest:
        """A request for `batchml.runtime.exec.main`, on this machine or in the container."""
        if self.container:
            return ExecRequest(list(command), **more)  # type: ignore[arg-type]
        return ExecRequest(
            list(command), root=self.runner, task=self.mark, groups=list(self.groups),
            record=self.record, **more,  # type: ignore[arg-type]
        )  # fmt: skip


def find_attempt(home: Home, task_id: str) -> LocalAttempt | None:
    """The attempt of a task id; None before its program begins and after its end."""
    folder = home.attempt(task_id)
    runner = record.read(folder)
    # None for a copy: its records name the processes of another folder.
    own = identity.read_identity(home)
    if runner is None or own is None or not runner.is_alive:
        return None
    is_container = runner.kind == CONTAINER
    return LocalAttempt(
        task_id,
        mark_of(own.id, task_id),
        runner.pid,
        () if is_container else tuple(runner.groups),
        str(folder / "runner.json"),
        container_name(own.id, task_id) if is_container else "",
    )


# --- batchml's program in a container -------------------------------------------------------------
# The sources of the program are sent with the exec itself: they always have this version, and the
# image needs only a Python. An image without Python gets the engine's plain exec.

_BLOCK = 65_536
_MODULES = (  # of `batchml.runtime`: the program and its imports
    "processes", "storage.files", "exec.presence", "exec.run_process", "exec.command",
    "exec.relay", "exec.main",
)  # fmt: skip

# Reads the sources of batchml's modules, makes modules of them, and runs
# `batchml.runtime.exec.main`.
_BOOT = """
import os, sys, types
def take(n):
    d = b""
    while len(d) < n:
        m = os.read(0, n - len(d))
        if not m: os._exit(75)
        d += m
    return d
for n in ("batchml", "batchml.runtime", "batchml.runtime.storage", "batchml.runtime.exec"):
    m = sys.modules[n] = types.ModuleType(n); m.__path__ = []
for _ in range(int(sys.argv[2])):
    n = take(int(take(8))).decode(); t = take(int(take(8)))
    m = sys.modules[n] = types.ModuleType(n)
    exec(compile(t, n, "exec"), m.__dict__)
sys.argv[1:] = sys.argv[1:2]
sys.modules["batchml.runtime.exec.main"].main()
"""


class ExecRefused(Exception):
    """The engine refuses, or does not answer; the text gives the reason."""


class ContainerExec(Struct):
    """A program that was started in a container: its exec id, and the stream to it."""

    exec_id: str
    stream: socket.socket

    def receive(self, until: float | None = None) -> bytes:
        """Receive some bytes, b"" at the end. Raises TimeoutError after `until` (monotonic)."""
        if until is not None:
            self.stream.settimeout(max(0.001, until - time.monotonic()))
        try:
            return self.stream.recv(_BLOCK)
        except TimeoutError:
            raise
        except OSError:
            return b""

    def close(self) -> None:
        self.stream.close()


def has_python(container: str) -> bool:
    """Whether batchml's program can run in a container; False, too, if the engine refuses a
    test.
    """

    def test(api: Any) -> bool:
        exec_id = api.exec_create(container, ["python3", "-c", "import fcntl, pty"])["Id"]
        api.exec_start(exec_id)
        return not api.exec_inspect(exec_id)["ExitCode"]

    try:
        return bool(_ask(test))
    except ExecRefused:
        return False


def start_program(container: str, request: ExecRequest) -> ContainerExec:
    """Start batchml's program in a container. Raises ExecRefused."""
    words = ["python3", "-c", _BOOT, request.encode(), str(len(_MODULES))]
    started = _start(container, words, tty=False)
    started.stream.sendall(b"".join(_encode_modules()))
    return started


def start_command(
    container: str, words: Sequence[str], *, tty: bool, term: str = ""
) -> ContainerExec:
    """Start a command without batchml's program. With a terminal its output has no frames. Raises
    ExecRefused.
    """
    return _start(container, words, tty=tty, env={"TERM": term} if term else {})


def resize(exec_id: str, lines: int, columns: int) -> None:
    _ask(lambda api: api.exec_resize(exec_id, height=lines, width=columns))


def exit_code(exec_id: str) -> int | None:
    """The exit code; None while the program runs."""
    found = _ask(lambda api: api.exec_inspect(exec_id))
    return None if found["Running"] else int(found["ExitCode"] or 0)


def pid_of(exec_id: str) -> int:
    """The process id on this machine; 0 once the program has ended."""
    return int(_ask(lambda api: api.exec_inspect(exec_id)).get("Pid") or 0)


def process_of(container: str) -> int:
    """The process id of a container's first process on this machine; 0 where it is unknown."""
    return int(_ask(lambda api: api.inspect_container(container))["State"].get("Pid") or 0)


def address_of(container: str) -> str:
    """The IP address at which this machine reaches the container; "" if it has none."""
    networks = _ask(lambda api: api.inspect_container(container))["NetworkSettings"]["Networks"]
    return next((each["IPAddress"] for each in networks.values() if each.get("IPAddress")), "")


class RelayFrames:
    """Decodes the output of batchml's program: its frames, and lines on standard error for the
    user.
    """

    def __init__(self) -> None:
        self._engine, self._ours = EngineFrames(), FrameParser()

    def feed(self, data: bytes) -> Iterator[Frame]:
        for is_error, content in self._engine.feed(data):
            if is_error:
                yield b"", content
            else:
                yield from self._ours.feed(content)


def _encode_modules() -> Iterator[bytes]:
    """The names and the sources of the modules, each text preceded by its length in eight
    digits.
    """
    from importlib import import_module

    for name in _MODULES:
        module = import_module(f"batchml.runtime.{name}")
        for text in (module.__name__.encode(), inspect.getsource(module).encode()):
            yield b"%08d" % len(text) + text


def _start(
    container: str, words: Sequence[str], *, tty: bool, env: dict[str, str] | None = None
) -> ContainerExec:
    def begin(api: Any) -> ContainerExec:
        exec_id = api.exec_create(
            container, list(words), stdin=True, tty=tty, environment=env or None
        )["Id"]
        response = api.exec_start(exec_id, tty=tty, socket=True)
        stream = getattr(response, "_sock", response)
        stream.settimeout(None)
        return ContainerExec(exec_id, stream)

    started: ContainerExec = _ask(begin)
    return started


def _ask(call: Any) -> Any:
    """The engine's answer to a call. Raises ExecRefused."""
    try:
        return docker.once("", call)
    except docker.EngineRefused as error:
        raise ExecRefused(str(error)) from error
    except docker.EngineUnreachable as error:
        raise ExecRefused(f"the Docker engine does not answer: {error}") from error
