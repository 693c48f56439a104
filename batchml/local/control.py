"""Start, find and stop the server of a state folder, and say why it does not answer."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import msgspec

from batchml import errors
from batchml.clock import Clock
from batchml.errors import LocalServerError, StateFolderBusy
from batchml.local.home import Home, ServerEndpoint
from batchml.runtime.processes import state_of

PROBE_LIMIT = 2.0  # seconds for one small request
NOTICE = 5.0  # seconds without an answer until the user gets a message
START_LIMIT = 60.0  # seconds until a starting server must answer
STOP_LIMIT = 15.0


def check_system(system: str = sys.platform) -> None:
    """Raise LocalServerError on a system other than Linux.

    The server and the runners of jobs, with either executor, use process file descriptors, /proc,
    abstract sockets and control groups.
    """
    if system != "linux":
        name = "macOS" if system == "darwin" else system
        raise LocalServerError(
            f"The environment `local` needs Linux, and this system is {name}. Use an environment "
            "in AWS (batchml init describes one; --env names it), or install batchml in a Linux "
            'container: docker run -it -v "$PWD":/work -w /work python:3.11 bash'
        )


def find_server(home: Home) -> ServerEndpoint | None:
    """The endpoint of the live server, or None.

    A recorded port proves nothing: only a live server holds the folder's lock, and it answers at
    the endpoint that the lock's holder wrote itself.
    """
    endpoint = home.endpoint()
    if endpoint is None or not home.is_held() or home.holder() != endpoint.pid:
        return None
    return endpoint


def ensure_server(
    home: Home, clock: Clock, notify: Callable[[str], None] = lambda _: None
) -> ServerEndpoint:
    """The endpoint of a live server, which is started if there is none.

    `notify` gets a message when that takes long. Raises LocalServerError, with the server's own
    message, when it cannot start.
    """
    return _find_serving(home) or start_server(home, clock, notify=notify)


def _find_serving(home: Home) -> ServerEndpoint | None:
    """The endpoint of a live server that accepts connections: a server that is stopping does not
    accept them.

    A server whose connection times out is returned, too: the caller's next request then shows that
    it does not answer.
    """
    endpoint = find_server(home)
    if endpoint is None:
        return None
    # socket.create_connection would import Python's tables of Unicode first.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.settimeout(NOTICE)
        try:
            connection.connect(("127.0.0.1", endpoint.port))
        except TimeoutError:
            return endpoint
        except OSError:
            return None
    return endpoint


def start_server(
    home: Home,
    clock: Clock,
    port: int = 0,
    idle: float | None = None,
    options: Sequence[str] = (),
    notify: Callable[[str], None] = lambda _: None,
) -> ServerEndpoint:
    """Start a server that outlives this process, and wait until it answers.

    `options` are further options of the daemon, such as `--executor docker`. `notify` gets a
    message when the start takes long.

    Raises LocalServerError; StateFolderBusy names the process that holds the folder.
    """
    check_system()
    began = clock.monotonic()
    noticed = False
    while True:
        try:
            return _start(home, port, idle, options, notify)
        except StateFolderBusy:
            if port or options:
                raise
        # Another process started a server at the same moment, or a server is about to end.
        while home.is_held():
            endpoint = _find_serving(home)
            if endpoint is not None:
                return endpoint
            waited = clock.monotonic() - began
            if waited > NOTICE and not noticed:
                noticed = True
                notify(describe_silence(home))
            if waited > START_LIMIT:
                raise LocalServerError(
                    f"Another process holds {home.root} and has not begun to serve within "
                    f"{START_LIMIT:.0f} s. {describe_silence(home)}"
                )
            clock.sleep(0.05)


def _start(
    home: Home,
    port: int,
    idle: float | None,
    options: Sequence[str],
    notify: Callable[[str], None],
) -> ServerEndpoint:
    try:
        home.prepare()
        log = open(home.log, "ab")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise LocalServerError(
            f"The state folder {home.root} cannot be used: {error.strerror}."
        ) from error
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "batchml.local.server.daemon", "--home", str(home.root)]
    command += ["--port", str(port), "--ready-fd", str(write_end)]
    command += [] if idle is None else ["--idle", str(idle)]
    command += options
    _reap_ended()
    with log:
        pid = launch(command, log, write_end)
    _started.append(pid)
    os.close(write_end)
    message = _read_message(read_end, pid, home, notify)
    if "port" in message:
        return msgspec.convert(message, ServerEndpoint)
    kind = getattr(errors, message.get("kind", ""), LocalServerError)
    if kind is StateFolderBusy:
        raise StateFolderBusy(str(home.root), home.holder())
    text = message.get("error", f"The server ended without a message. Its log: {home.log}")
    failure: LocalServerError = kind.__new__(kind)  # the parameters of its __init__ are unknown
    Exception.__init__(failure, text)
    raise failure


def launch(command: list[str], log: BinaryIO, ready: int) -> int:
    """Start a process that may outlive this one, and that inherits the descriptor `ready`."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", pass_fds=[ready],
        start_new_session=True,
    )  # fmt: skip
    process.returncode = 0  # Popen does not wait for it
    return process.pid


_started: list[int] = []  # process ids of servers that this process started


def _reap_ended() -> None:
    """Collect servers that have ended: the kernel keeps a dead child until its parent asks."""
    _started[:] = [pid for pid in _started if _is_running(pid)]


def _is_running(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] == 0
    except ChildProcessError:  # it was collected before
        return False


def _read_message(pipe: int, pid: int, home: Home, notify: Callable[[str], None]) -> dict[str, Any]:
    """The new server's message: that it serves, or why it cannot. Empty if it died before."""
    received = b""
    with os.fdopen(pipe, "rb", buffering=0) as file:
        if not select.select([file], [], [], NOTICE)[0]:
            notify(f"The embedded AWS Batch (process {pid}) is still starting. Its log: {home.log}")
        while not received.endswith(b"\n"):
            if not select.select([file], [], [], START_LIMIT)[0]:
                facts = describe_process(pid, state_of(pid), home.log)
                raise LocalServerError(f"No start within {START_LIMIT:.0f} s. {facts}")
            data = file.read(65_536)
            if not data:
                break
            received += data
    message: dict[str, Any] = json.loads(received) if received else {}
    return message


def stop_server(home: Home, clock: Clock) -> bool:
    """Stop the server; its jobs go on without it. False when none was running."""
    endpoint = find_server(home)
    if endpoint is None:
        return False
    try:
        os.kill(endpoint.pid, signal.SIGTERM)
        os.kill(endpoint.pid, signal.SIGCONT)  # a stopped process ends only then
    except ProcessLookupError:
        pass  # it has ended already
    end = clock.monotonic() + STOP_LIMIT
    while home.is_held() and home.holder() == endpoint.pid:
        if clock.monotonic() > end:
            letter = state_of(endpoint.pid)
            raise LocalServerError(
                f"The server (process {endpoint.pid}) has not ended within {STOP_LIMIT:.0f} s; it "
                f"is {describe_state(letter)} (state {letter}). Its log: {home.log}. "
                f"To kill it: kill -9 {endpoint.pid}; jobs and their logs survive that."
            )
        clock.sleep(0.02)
    return True


# --- A server that does not answer ----------------------------------------------------------------

# The states of proc(5) that a process holding the state folder can be in.
_STATES = {
    "T": "stopped",
    "t": "stopped by a debugger",
    "D": "waiting for a disk or a file system",
    "Z": "ended, but not collected by its parent",
    "R": "running",
    "S": "running",
}


def is_answering(endpoint: ServerEndpoint, limit: float = PROBE_LIMIT) -> bool:
    """True when the server answers an unsigned request within `limit` seconds.

    A connection alone proves nothing: the kernel accepts it for a stopped process, too.
    """
    if state_of(endpoint.pid) in ("T", "t", "Z", ""):
        return False
    try:
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=limit) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return bool(connection.recv(1))
    except OSError:
        return False


def describe_state(letter: str) -> str:
    """Describe the state of a process: `describe_state("D")`."""
    return _STATES.get(letter, "in an unknown state")


def describe_process(pid: int, letter: str, log: object) -> str:
    """Say why a server's process does not answer, and what to do next."""
    if not letter:
        return f"The embedded AWS Batch (process {pid}) has ended. Its log: {log}"
    words = f"The embedded AWS Batch (process {pid}) does not answer; "
    words += f"it is {describe_state(letter)} (state {letter}). "
    if letter == "T":
        return words + f"To let it go on: kill -CONT {pid}"
    if letter == "Z":
        return words + "End its parent process, or wait until the parent collects it."
    if letter == "t":
        return words + "It goes on when the debugger lets it."
    if letter == "D":
        return words + "It goes on when the disk answers; `dmesg` may say what is wrong with it."
    return words + (
        f"It may be busy. Its log: {log}. If this lasts, kill -9 {pid}: jobs and their logs "
        f"survive that, and the next command starts it again."
    )


def describe_silence(home: Home) -> str:
    """Name the process that does not answer, its state, and what to do next."""
    pid = home.holder() if home.is_held() else None
    if pid is None:
        return f"No embedded AWS Batch runs for {home.root}. `batchml local start` starts it."
    return describe_process(pid, state_of(pid), home.log)
