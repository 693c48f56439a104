"""A command inside a run: the request of the client, the start of the command, and its end."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from typing import Dict, List, NamedTuple, Sequence

from batchml.runtime.processes import descendants, kill_descendants, send, shell_code

NO_PROGRAM = 69  # exit code if the run's program is not running
RUN_ENDED = 75  # exit code if the run or the connection ended before the command

PAUSE = 0.05  # seconds between two checks

_SHELLS = ("bash", "sh")
_HANG_UP_LIMIT = 0.3  # seconds between HUP and KILL
_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)


class ExecRequest(NamedTuple):
    """The command to run, and where. The encoded form is one word, which needs no shell quotes."""

    command: Sequence[str] = ()  # empty: a shell
    root: int = 1  # the run's program is this process or a descendant of it
    task: str = ""  # the attempt to enter, if several attempts run below `root`
    groups: Sequence[str] = ()  # control groups to enter
    record: str = ""  # a file that is removed with the attempt
    lifeline: int = -1  # a descriptor that becomes readable when the client ends; -1: none
    term: str = ""  # TERM of the client's terminal
    # "relay": input and output are frames (`relay.py`); "port": frames relay a port's connection;
    # "": no frames
    stream: str = ""
    size: Sequence[int] = ()  # lines and columns of the terminal; empty: no terminal
    port: int = 0  # of this container, for "port"
    text: bool = False  # frames are lines of text, because the connection contains a terminal

    def encode(self) -> str:
        document = {k: v for k, v in self._asdict().items() if v != self._field_defaults[k]}
        return base64.urlsafe_b64encode(json.dumps(document).encode()).decode("ascii")

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> ExecRequest:
        """Parse the arguments of a command line. Raises ValueError."""
        if arguments[:1] == ["--"] or not arguments:
            return cls(command=list(arguments[1:]))
        if len(arguments) > 1:
            raise ValueError("usage: python -m batchml.runtime.exec.main [-- COMMAND...]")
        try:
            return cls(**json.loads(base64.urlsafe_b64decode(arguments[0])))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a request: {error}") from None


class ExecFailed(Exception):
    """The command cannot be started. `code`: the exit code that tells why."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def resolve_command(request: ExecRequest, environ: Dict[str, str]) -> List[str]:
    """Return the command to run: the requested one, or a shell. Raises ExecFailed."""
    if request.command:
        return list(request.command)
    for shell in filter(None, (environ.get("SHELL"), *_SHELLS)):
        path = shutil.which(shell, path=environ.get("PATH") or os.defpath)
        if path:
            return [path]
    raise ExecFailed(127, "this image has no shell: name one of its programs after --.")


def start(
    command: List[str], environ: Dict[str, str], folder: str, **more: object
) -> subprocess.Popen[bytes]:
    """Start a command in `folder`; in the current folder if `folder` does not exist.

    `more`: further arguments of Popen. Raises ExecFailed with the exit codes that a shell uses.
    """
    cwd = folder if os.path.isdir(folder) else None
    try:
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            command, env=environ, cwd=cwd, **more
        )
    except FileNotFoundError:
        raise ExecFailed(127, f"{command[0]!r}: this run has no such command.") from None
    except (OSError, ValueError) as error:
        raise ExecFailed(126, f"{command[0]!r} cannot be run: {error}") from None


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process; return its exit code as a shell reports it."""
    return shell_code(process.wait())


def kill_children() -> None:
    """End all processes that this one started: first HUP, then KILL."""
    processes = descendants(os.getpid())
    send(processes, signal.SIGHUP)
    send(processes, signal.SIGCONT)  # a stopped process would not receive HUP
    end = time.monotonic() + _HANG_UP_LIMIT
    while time.monotonic() < end and descendants(os.getpid()):
        select.select([], [], [], PAUSE)
    kill_descendants(limit=5.0)


def open_signal_pipe() -> int:
    """Return a descriptor from which the numbers of the signals that came can be read.

    The handlers do nothing. Ignoring the signals would make the command ignore them, too.
    """
    wake, signals = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda *_: None)
    return wake


def handle_signals(wake: int, process: subprocess.Popen[bytes]) -> bool:
    """Pass TERM on to the command. Return True after HUP: the client has gone.

    A terminal itself sends its signals, such as INT, to the command.
    """
    numbers = os.read(wake, 64)
    if signal.SIGTERM in numbers:
        process.terminate()
    return signal.SIGHUP in numbers
