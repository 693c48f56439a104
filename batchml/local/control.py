"""Start, find and stop the server, from the client's side."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from batchml import errors
from batchml.clock import Clock
from batchml.errors import LocalServerError, StateFolderBusy
from batchml.local import silence
from batchml.local.home import Endpoint, Home
from batchml.runtime.processes import state_of

START_LIMIT = 60.0  # seconds until a starting server must answer
STOP_LIMIT = 15.0


def running(home: Home) -> Endpoint | None:
    """The endpoint of the live server, or None.

    A recorded port alone proves nothing: only a live server holds the folder's lock, and only
    the endpoint that the holder itself wrote is where it answers.
    """
    endpoint = home.endpoint()
    if endpoint is None or not home.is_held() or home.holder() != endpoint.pid:
        return None
    return endpoint


def ensure(home: Home, clock: Clock, tell: Callable[[str], None] = lambda _: None) -> Endpoint:
    """The endpoint of a live server, started now if there is none.

    `tell` is called when that takes long. Raises LocalServerError, in the server's words, when it
    cannot start.
    """
    return _serving(home) or start(home, clock, tell=tell)


def _serving(home: Home) -> Endpoint | None:
    """The endpoint of a live server that takes connections: not of one that is stopping.

    A server that is stuck is one: whoever sends it a request finds that it does not answer.
    """
    endpoint = running(home)
    if endpoint is None:
        return None
    try:
        socket.create_connection(("127.0.0.1", endpoint.port), timeout=silence.NOTICE).close()
    except TimeoutError:
        return endpoint
    except OSError:
        return None
    return endpoint


def start(
    home: Home,
    clock: Clock,
    port: int = 0,
    idle: float | None = None,
    options: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> Endpoint:
    """Start a server that outlives this process, and wait until it answers.

    `options` are the daemon's own: `--executor docker`. `tell` is called when it takes long.

    Raises LocalServerError; StateFolderBusy names the process that holds the folder.
    """
    began = clock.monotonic()
    noticed = False
    while True:
        try:
            return _start(home, port, idle, options, tell)
        except StateFolderBusy:
            if port or options:
                raise
        # Someone else started one at the same moment, or one is about to end.
        while home.is_held():
            endpoint = _serving(home)
            if endpoint is not None:
                return endpoint
            waited = clock.monotonic() - began
            if waited > silence.NOTICE and not noticed:
                noticed = True
                tell(silence.unanswered(home))
            if waited > START_LIMIT:
                raise LocalServerError(
                    f"Another process holds {home.root} and has not begun to serve within "
                    f"{START_LIMIT:.0f} s. {silence.unanswered(home)}"
                )
            clock.sleep(0.05)


def _start(
    home: Home,
    port: int,
    idle: float | None,
    options: Sequence[str],
    tell: Callable[[str], None],
) -> Endpoint:
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
    with log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
            pass_fds=[write_end], start_new_session=True,
        )  # fmt: skip
    process.returncode = 0  # it outlives us, and nobody here waits for it
    os.close(write_end)
    message = _told(read_end, process.pid, home, tell)
    if "port" in message:
        return msgspec.convert(message, Endpoint)
    kind = getattr(errors, message.get("kind", ""), LocalServerError)
    if kind is StateFolderBusy:
        raise StateFolderBusy(str(home.root), home.holder())
    text = message.get("error", f"The server ended without a word. Its log: {home.log}")
    failure: LocalServerError = kind.__new__(kind)
    Exception.__init__(failure, text)
    raise failure


def _told(pipe: int, pid: int, home: Home, tell: Callable[[str], None]) -> dict[str, Any]:
    """What the new server says once it serves or cannot; nothing when it died silently."""
    told = b""
    with os.fdopen(pipe, "rb", buffering=0) as file:
        if not select.select([file], [], [], silence.NOTICE)[0]:
            tell(f"The embedded AWS Batch (process {pid}) is still starting. Its log: {home.log}")
        while not told.endswith(b"\n"):
            if not select.select([file], [], [], START_LIMIT)[0]:
                facts = silence.describe(pid, state_of(pid), home.log)
                raise LocalServerError(f"No start within {START_LIMIT:.0f} s. {facts}")
            data = file.read(65_536)
            if not data:
                break
            told += data
    message: dict[str, Any] = json.loads(told) if told else {}
    return message


def stop(home: Home, clock: Clock) -> bool:
    """Stop the server; its jobs go on without it. False when none was running."""
    endpoint = running(home)
    if endpoint is None:
        return False
    try:
        os.kill(endpoint.pid, signal.SIGTERM)
        os.kill(endpoint.pid, signal.SIGCONT)  # one that was stopped can end, too
    except ProcessLookupError:
        pass  # it ended meanwhile
    end = clock.monotonic() + STOP_LIMIT
    while home.is_held() and home.holder() == endpoint.pid:
        if clock.monotonic() > end:
            letter = state_of(endpoint.pid)
            raise LocalServerError(
                f"The server (process {endpoint.pid}) has not ended within {STOP_LIMIT:.0f} s; it "
                f"is {silence.state_words(letter)} (state {letter}). Its log: {home.log}. "
                f"To kill it: kill -9 {endpoint.pid}; jobs and their logs survive that."
            )
        clock.sleep(0.02)
    return True
