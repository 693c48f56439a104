"""The entry of the images that batchml builds: `python -m batchml.runtime.run COMMAND ...`.

It fetches the code, starts the command, passes its output on line by line, passes a stop signal on
to every process, and ends with a line that says how many lines there were, so that a client can
prove that it has them all. It exits with the command's own code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Optional

from batchml.runtime.code import BadArchive, unpack
from batchml.runtime.env import RuntimeEnv
from batchml.runtime.lines import LineSplitter, end_mark
from batchml.runtime.processes import become_reaper, descendants, kill_descendants, send

CONFIGURATION_ERROR = 78
PROGRESS_EVERY = 10.0  # seconds between two looks at a progress bar
_READ = 65_536


class Output:
    """Whole lines to the log, counted."""

    def __init__(self, stream: BinaryIO, progress_every: float) -> None:
        self._stream = stream
        self._every = progress_every
        self._last = time.monotonic()
        self.lines = 0

    def write(self, lines: Sequence[bytes]) -> None:
        if lines:
            self._stream.write(b"".join(line + b"\n" for line in lines))
            self._stream.flush()
            self.lines += len(lines)
            self._last = time.monotonic()

    def until_progress(self) -> float:
        """Seconds until a progress bar is to be looked at, when no line comes before."""
        return max(0.0, self._last + self._every - time.monotonic())

    def say(self, text: str) -> None:
        self.write([text.encode("utf-8", "replace")])


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    stream: BinaryIO,
    progress_every: float = PROGRESS_EVERY,
) -> int:
    """Run one attempt and return its exit code."""
    env = RuntimeEnv.read(environ)
    output = Output(stream, progress_every)
    code = _attempt(list(command), env, environ, output)
    if env.log_marks:
        stream.write(end_mark(code, output.lines).encode() + b"\n")
        stream.flush()
    return code


def _attempt(
    command: list[str], env: RuntimeEnv, environ: Mapping[str, str], output: Output
) -> int:
    if not command:
        output.say("batchml: no command was given. Name one in job.toml, or after --.")
        return CONFIGURATION_ERROR
    try:
        for folder in (env.output_dir, env.checkpoint_dir):
            if folder:
                os.makedirs(folder, exist_ok=True)
        if env.code:
            unpack(env.code, _own_folder())
    except (BadArchive, OSError) as error:
        output.say(f"batchml: {error}")
        return CONFIGURATION_ERROR
    try:
        return _run_command(command, environ, output)
    except FileNotFoundError:
        output.say(f"batchml: cannot run {command[0]!r}: no such command in this image.")
        return 127
    except OSError as error:
        output.say(f"batchml: cannot run {command[0]!r}: {error.strerror}")
        return 126


def _own_folder() -> str:
    """The folder that the run's code goes into, which is the working directory.

    An image that names none works in `/`, where a job's `bin/` or `etc/` would lie over its own.
    """
    folder = os.getcwd()
    if folder == os.sep:
        folder = tempfile.mkdtemp(prefix="job-")
        os.chdir(folder)
    return folder


def _run_command(command: list[str], environ: Mapping[str, str], output: Output) -> int:
    become_reaper()
    asked: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        """To every process of the run, whatever sessions they are in."""
        asked.append(number)
        send(descendants(os.getpid()), number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wake = _wake_on_signals()
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    for early in asked:  # before the command was there to hear it
        send([process.pid], early)
    code = _copy(process, wake, output)
    return 128 - code if code < 0 else code


def _wake_on_signals() -> int:
    """A descriptor that can be read once a signal has arrived."""
    wake, wake_end = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_end, False)
    signal.set_wakeup_fd(wake_end)
    return wake


def _copy(process: subprocess.Popen[bytes], wake: int, output: Output) -> int:
    """Copy until the command has ended, end what it leaves behind, and return its code."""
    import selectors

    assert process.stdout is not None
    pipe = process.stdout.fileno()
    os.set_blocking(pipe, False)
    splitter = LineSplitter(escape=True)
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while not _has_ended(process):
            for key, _ in selector.select(output.until_progress() or None):
                data = _read(key.fd)
                if key.fd == pipe:
                    output.write(splitter.feed(data or b""))
                    if data == b"":
                        selector.unregister(pipe)
            if output.until_progress() == 0:
                output.write(splitter.progress())
    kill_descendants()
    while True:  # not to the end of the stream: whom we may not kill could keep it open for ever
        data = _read(pipe)
        if not data:
            break
        output.write(splitter.feed(data))
    output.write(splitter.finish())
    process.stdout.close()
    return process.returncode


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the command has; other children that have are orphans, and are collected here."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            found = None
        if found is None or found.si_pid == process.pid:
            return process.poll() is not None
        os.waitpid(found.si_pid, os.WNOHANG)


def _read(pipe: int) -> Optional[bytes]:
    """What can be read now; None when that is nothing yet, empty at the end."""
    try:
        return os.read(pipe, _READ)
    except BlockingIOError:
        return None


def main() -> int:
    return run(sys.argv[1:], os.environ, sys.stdout.buffer)


if __name__ == "__main__":
    sys.exit(main())
