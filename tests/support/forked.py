"""Runs commands as forks of a Python that has imported what they need: `forge.py`.

A command is a process as before, and does all that it does; what it saves is the 0.2 s of CPU that
each of a thousand commands would spend on the same imports.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import BinaryIO, NamedTuple

from batchml.clock import SystemClock

CLOCK = SystemClock()
ROOT = Path(__file__).parents[2]
# What commands import when they need it. Not what registers commands: the root looks for that.
BATCHML = (
    *(
        f"batchml.{room}.*"
        for room in ("model", "config", "jobs", "runs", "cost", "cluster", "explain", "sessions",
                     "workspace", "setup", "sweeps")
    ),
    "batchml.client", "batchml.context", "batchml.history", "batchml.cli.app", "batchml.cli.render",
    "batchml.cli.options", "batchml.local.control", "batchml.local.server.daemon",
    "botocore.client", "botocore.httpsession", "botocore.session", "encodings.idna",
)  # fmt: skip
AWS_CLI = ("awscli.clidriver", "awscli.handlers", "encodings.idna")

# Read while Python starts, or by modules as they are imported: no fork can be given another value.
_AT_START = ("PYTHON", "LC_", "LANG", "MALLOC_", "LD_", "HOME")


class Asked(NamedTuple):
    """`python -m module arguments`, as typed in `folder`."""

    module: str
    arguments: Sequence[str]
    folder: Path
    environ: Mapping[str, str]


def _umask() -> str:
    """Ours; another thread may ask at the same time, so it is not set to be read."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Umask:"))


class Forked:
    """Runs commands as `subprocess.run` does."""

    def __init__(self, door: socket.socket, process: "subprocess.Popen[bytes]") -> None:
        self._door = door
        self._process = process

    def run(self, asked: Asked, timeout: float) -> "subprocess.CompletedProcess[str]":
        """With both outputs caught, and nothing to read. TimeoutExpired: it has been killed."""
        try:
            return self._run(asked, timeout)
        except ConnectionError:
            code = self._process.wait(10)
            raise AssertionError(f"forge.py has ended with {code}: see its stderr") from None

    def _run(self, asked: Asked, timeout: float) -> "subprocess.CompletedProcess[str]":
        told = {**asked._asdict(), "environ": dict(asked.environ), "umask": _umask()}
        words = [asked.module, *asked.arguments]
        ours, theirs = socket.socketpair()
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        with open(os.devnull) as nothing, theirs, open(out_end), open(err_end):
            files = [nothing.fileno(), out_end, err_end, theirs.fileno()]
            socket.send_fds(self._door, [b"+"], files)
        with ours, ours.makefile() as answers, open(out, "rb") as outs, open(err, "rb") as errs:
            ours.sendall(json.dumps(told, default=str).encode() + b"\n")
            pid = int(answers.readline())
            texts = _read_all([outs, errs], CLOCK.monotonic() + timeout)
            if texts is None:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(words, timeout)
            return subprocess.CompletedProcess(words, int(answers.readline()), *texts)


def _read_all(files: list[BinaryIO], end: float) -> list[str] | None:
    """What comes out of each until it is closed by all that write to it; None at `end`."""
    seen: dict[int, bytes] = {file.fileno(): b"" for file in files}
    poll = select.poll()
    for number in seen:
        poll.register(number, select.POLLIN)
    open_ones = len(files)
    while open_ones:
        ready = poll.poll(max(0.0, end - CLOCK.monotonic()) * 1000)
        if not ready:
            return None
        for number, _ in ready:
            part = os.read(number, 1 << 16)
            seen[number] += part
            if not part:
                poll.unregister(number)
                open_ones -= 1
    return [TextIOWrapper(BytesIO(part)).read() for part in seen.values()]


@contextmanager
def open_forge(modules: Sequence[str], environ: Mapping[str, str]) -> Iterator[Forked]:
    """For commands that need these modules; see forge.py. `environ` is what Python starts with."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forge", str(theirs.fileno()), *modules], cwd=ROOT,
            env=environ, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        with process, ours:
            yield Forked(ours, process)


@cache
def _forge(modules: Sequence[str], start: frozenset[tuple[str, str]]) -> Forked:
    """One for all who ask for it, until this session ends."""
    others = {name: text for name, text in os.environ.items() if not name.startswith(_AT_START)}
    opened = ExitStack()
    atexit.register(opened.close)
    return opened.enter_context(open_forge(modules, others | dict(start)))


def run_forked(
    modules: Sequence[str], asked: Asked, timeout: float = 60
) -> "subprocess.CompletedProcess[str]":
    """By a Python that was started with the same variables as the command is to have."""
    start = {pair for pair in asked.environ.items() if pair[0].startswith(_AT_START)}
    return _forge(tuple(modules), frozenset(start)).run(asked, timeout)


def can_share(environ: Mapping[str, str]) -> bool:
    """Whether others will ask for the same Python, so that starting it is worth the time."""
    here, there = (
        {name: text for name, text in each.items() if name.startswith(_AT_START)}
        for each in (os.environ, environ)
    )
    return here == there
