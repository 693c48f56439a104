"""A command that is started inside a run: the request for it, its start and its end."""

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

from batchml.runtime.processes import descendants, kill_descendants, send

NO_PROGRAM = 69  # exit code: the run has no program to join
RUN_ENDED = 75  # exit code: the run ended before the command

PAUSE = 0.05  # seconds between two checks

_SHELLS = ("bash", "sh")
_HANG_UP = 0.3  # seconds between HUP and KILL
_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)


class ExecRequest(NamedTuple):
    """What to run and where. Its encoded form is one word, which needs no quotes in a shell."""

    command: Sequence[str] = ()  # empty: a shell
    root: int = 1  # the run's program is a descendant of this process
    task: str = ""  # the attempt, where other attempts may run below `root`
    groups: Sequence[str] = ()  # control groups to enter
    record: str = ""  # a file that is removed with the attempt
    lifeline: int = -1  # a descriptor that ends with the client
    term: str = ""  # TERM of the client's terminal
    stream: str = ""  # "": none; "relay": frames; "port": frames to and from a port
    size: Sequence[int] = ()  # of the terminal, lines and columns; empty: no terminal
    port: int = 0
    text: bool = False  # frames as lines of text: the connection has a terminal of its own

    def encode(self) -> str:
        given = {k: v for k, v in self._asdict().items() if v != self._field_defaults[k]}
        return base64.urlsafe_b64encode(json.dumps(given).encode()).decode("ascii")

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
    """The command cannot be started; `code` is the exit code for that."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def resolve_command(request: ExecRequest, environ: Dict[str, str]) -> List[str]:
    """Return the command to run: the requested one, or a shell. Raises ExecFailed."""
    if request.command:
        return list(request.command)
    own = environ.get("SHELL", "")
    for shell in (own, *_SHELLS):
        found = shutil.which(shell, path=environ.get("PATH") or os.defpath) if shell else None
        if found:
            return [found]
    raise ExecFailed(127, "this image has no shell: name a program that it has, after --.")


def start(command: List[str], **more: object) -> subprocess.Popen[bytes]:
    """Start a command. Raises ExecFailed with the exit codes that a shell uses."""
    try:
        return subprocess.Popen(command, **more)  # type: ignore[call-overload,no-any-return]
    except FileNotFoundError:
        raise ExecFailed(127, f"{command[0]!r}: this run has no such command.") from None
    except (OSError, ValueError) as error:
        raise ExecFailed(126, f"{command[0]!r} cannot be run: {error}") from None


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process; return its exit code as a shell would, 128 + N after signal N."""
    code = process.wait()
    return 128 - code if code < 0 else code


def kill_children() -> None:
    """End all processes that this one started: first HUP, then KILL."""
    below = descendants(os.getpid())
    send(below, signal.SIGHUP)
    send(below, signal.SIGCONT)
    end = time.monotonic() + _HANG_UP
    while time.monotonic() < end and descendants(os.getpid()):
        select.select([], [], [], PAUSE)
    kill_descendants(limit=5.0)


def open_signal_pipe() -> int:
    """Return a descriptor on which the numbers of arriving signals can be read.

    The handlers do nothing. Ignoring the signals would make the started program ignore them, too.
    """
    wake, signals = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda *_: None)
    return wake
