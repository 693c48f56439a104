"""An attempt that runs on this machine, seen by who wants to get into it: what and where it is."""

import inspect
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from batchml.local.executors import docker, record
from batchml.local.executors.container_spec import container_name
from batchml.local.executors.record import CONTAINER, mark_of
from batchml.local.home import Home
from batchml.local.store import identity
from batchml.runtime.exec.main import Order
from batchml.runtime.exec.relay import Frame, Frames


class Sitting(Struct, frozen=True):
    """Where an attempt is. `container` is its name in the engine, "" for a process."""

    task_id: str
    mark: str  # of its processes
    runner: int  # the process that looks after it
    groups: tuple[str, ...]  # control groups
    record: str  # a file that goes away with the attempt
    container: str = ""

    def order(self, command: Sequence[str], **more: object) -> Order:
        """What is asked of `batchml.runtime.exec.main`, on this machine or in the container."""
        if self.container:
            return Order(list(command), **more)  # type: ignore[arg-type]
        return Order(
            list(command), root=self.runner, task=self.mark, groups=list(self.groups),
            record=self.record, **more,  # type: ignore[arg-type]
        )  # fmt: skip


def find(home: Home, task_id: str) -> Sitting | None:
    """The attempt of this task id; None once it has ended, or before it began."""
    folder = home.attempt(task_id)
    found = record.read(folder)
    own = identity.of(home)  # None for a copy: its records name the processes of another folder
    if found is None or own is None or not found.is_alive:
        return None
    is_container = found.kind == CONTAINER
    return Sitting(
        task_id,
        mark_of(own.id, task_id),
        found.pid,
        () if is_container else tuple(found.groups),
        str(folder / "runner.json"),
        container_name(own.id, task_id) if is_container else "",
    )


# --- inside a container ---------------------------------------------------------------------------
# Our own program beside another in a container of this machine: sent there, started, talked to.
#
# It is sent with the exec itself, as text, so that it is this version's whatever the image has; all
# the image needs is a Python. What has none gets the engine's plain exec.


_HEAD = 8  # of the engine's frames: stream, three zeros, length
_BLOCK = 65_536
_ERRORS = 2
_PARTS = (
    "processes", "storage.files", "exec.prompt", "exec.program", "exec.relay", "exec.main",
)  # fmt: skip

# Reads the texts of our modules, makes them modules, and goes on as `batchml.runtime.exec.main`.
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


class Refusal(Exception):
    """The engine says no, or does not answer; the text says why."""


class Started(Struct):
    """Something that was started in a container: its id there, and the stream to it."""

    exec_id: str
    stream: socket.socket

    def close(self) -> None:
        self.stream.close()


def has_python(container: str) -> bool:
    """Whether our own program can be run there. Raises Refusal."""
    return _asked(container, ["python3", "-c", "import fcntl, pty"]) == 0


def start(container: str, order: Order) -> Started:
    """Start our program in a container with an order. Raises Refusal."""
    words = ["python3", "-c", _BOOT, order.coded(), str(len(_PARTS))]
    started = _start(container, words, tty=False)
    started.stream.sendall(b"".join(_parts()))
    return started


def start_plain(container: str, words: Sequence[str], *, tty: bool, term: str = "") -> Started:
    """Start a command as it is. With a terminal its output has no frames. Raises Refusal."""
    return _start(container, words, tty=tty, env={"TERM": term} if term else {})


def resize(exec_id: str, lines: int, columns: int) -> None:
    _ask(lambda api: api.exec_resize(exec_id, height=lines, width=columns))


def exit_code(exec_id: str) -> int | None:
    """None while it runs."""
    found = _ask(lambda api: api.exec_inspect(exec_id))
    return None if found["Running"] else int(found["ExitCode"] or 0)


def pid_of(exec_id: str) -> int:
    """What was started, as this machine numbers it; 0 once it has ended."""
    return int(_ask(lambda api: api.exec_inspect(exec_id)).get("Pid") or 0)


def process_of(container: str) -> int:
    """The first process of a container as this machine numbers it; 0 where that is not known."""
    return int(_ask(lambda api: api.inspect_container(container))["State"].get("Pid") or 0)


def address_of(container: str) -> str:
    """Where this machine reaches it; empty where it has no address."""
    networks = _ask(lambda api: api.inspect_container(container))["NetworkSettings"]["Networks"]
    return next((each["IPAddress"] for each in networks.values() if each.get("IPAddress")), "")


class Reading:
    """The engine's frames in: (is it of the errors, bytes)."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bool, bytes]]:
        self._rest += data
        while len(self._rest) >= _HEAD:
            end = _HEAD + int.from_bytes(self._rest[4:_HEAD], "big")
            if len(self._rest) < end:
                return
            content, is_error = bytes(self._rest[_HEAD:end]), self._rest[0] == _ERRORS
            del self._rest[:end]
            yield is_error, content


class Relayed:
    """What our program there says: its frames, and lines of its own that are for people."""

    def __init__(self) -> None:
        self._engine, self._ours = Reading(), Frames()

    def feed(self, data: bytes) -> Iterator[Frame]:
        for is_error, content in self._engine.feed(data):
            if is_error:
                yield b"", content
            else:
                yield from self._ours.feed(content)


def _parts() -> Iterator[bytes]:
    """Modules by name and text, each with its length in eight digits."""
    from importlib import import_module

    for name in _PARTS:
        module = import_module(f"batchml.runtime.{name}")
        for text in (module.__name__.encode(), inspect.getsource(module).encode()):
            yield b"%08d" % len(text) + text


def _start(
    container: str, words: Sequence[str], *, tty: bool, env: dict[str, str] | None = None
) -> Started:
    def begin(api: Any) -> Started:
        made = api.exec_create(
            container, list(words), stdin=True, tty=tty, environment=env or None
        )["Id"]
        taken = api.exec_start(made, tty=tty, socket=True)
        stream = getattr(taken, "_sock", taken)
        stream.settimeout(None)
        return Started(made, stream)

    started: Started = _ask(begin)
    return started


def _asked(container: str, words: Sequence[str]) -> int:
    def ask(api: Any) -> int:
        made = api.exec_create(container, list(words))["Id"]
        api.exec_start(made)
        return int(api.exec_inspect(made)["ExitCode"] or 0)

    try:
        return int(_ask(ask))
    except Refusal:
        return 127


def _ask(call: Any) -> Any:
    """Raises Refusal."""
    try:
        return docker.once("", call)
    except docker.Refused as error:
        raise Refusal(str(error)) from error
    except docker.Unreachable as error:
        raise Refusal(f"the Docker engine does not answer: {error}") from error
