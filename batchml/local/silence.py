"""Whether the server answers, and what is known of its process when it does not."""

import socket

from batchml.local.home import Endpoint, Home
from batchml.runtime.processes import state_of

PROBE_LIMIT = 2.0  # seconds for one small request
NOTICE = 5.0  # seconds of silence that a user is told of

# The states of proc(5), as far as a process that holds the state folder can be in them.
_STATES = {
    "T": "stopped",
    "t": "stopped by a debugger",
    "D": "waiting for a disk or a file system",
    "Z": "ended, but not collected by its parent",
    "R": "running",
    "S": "running",
}


def answers(endpoint: Endpoint, limit: float = PROBE_LIMIT) -> bool:
    """True when the server answers a request, which need not be signed, within `limit` seconds.

    A connection alone proves nothing: the kernel accepts it for a process that is stopped, too.
    """
    if state_of(endpoint.pid) in ("T", "t", "Z", ""):
        return False
    try:
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=limit) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return bool(connection.recv(1))
    except OSError:
        return False


def state_words(letter: str) -> str:
    """The state of a process in words."""
    return _STATES.get(letter, "in an unknown state")


def describe(pid: int, letter: str, log: object) -> str:
    """What is known of a server's process that does not answer, and what to do next."""
    if not letter:
        return f"The embedded AWS Batch (process {pid}) has ended. Its log: {log}"
    words = f"The embedded AWS Batch (process {pid}) does not answer; "
    words += f"it is {state_words(letter)} (state {letter}). "
    if letter == "T":
        return words + f"To let it go on: kill -CONT {pid}"
    if letter == "Z":
        return words + "End its parent process, or wait until that collects it."
    if letter == "t":
        return words + "It goes on when the debugger lets it."
    if letter == "D":
        return words + "It goes on when the disk answers; `dmesg` may say what is wrong with it."
    return words + (
        f"It may be busy. Its log: {log}. If this lasts, kill -9 {pid}: jobs and their logs "
        f"survive that, and the next command starts it again."
    )


def unanswered(home: Home) -> str:
    """Which process does not answer, in which state it is, and what to do next."""
    pid = home.holder() if home.is_held() else None
    if pid is None:
        return f"No embedded AWS Batch runs for {home.root}. `batchml local start` starts it."
    return describe(pid, state_of(pid), home.log)
