"""The command of an attempt: start it, copy its output, and wait until all of it has ended."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Optional

from batchml.runtime.entry.attempt import AttemptPlugins, Output, RunningAttempt
from batchml.runtime.processes import kill_descendants, spawn
from batchml.runtime.protocol.log_marks import LineSplitter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.sweep.trial import TrialAttempt

_READ = 65_536


class Program:
    """A program in a session of its own. `output` is a pipe with its standard output and errors."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it. Raises OSError, and ValueError for words that no program can get."""
        self.code: Optional[int] = None  # once it has ended; -N after signal N
        self._popen: Optional[subprocess.Popen[bytes]] = None
        self.output, write_end = os.pipe()
        try:
            self.pid = self._start(command, environ, write_end)
        except BaseException:
            os.close(self.output)
            raise
        finally:
            os.close(write_end)
        os.set_blocking(self.output, False)

    def _start(self, command: Sequence[str], environ: Mapping[str, str], output: int) -> int:
        try:
            return spawn(command, environ, output)
        except NotImplementedError:  # this Python was built for a C library without it
            self._popen = subprocess.Popen(  # kept: one that is deleted is waited for by others
                command, env=environ, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            return self._popen.pid

    def has_ended(self) -> bool:
        """Whether it has ended. Adopted children that have ended are reaped."""
        while self.code is None:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return False
            if pid == self.pid:
                was_killed = os.WIFSIGNALED(status)
                self.code = -os.WTERMSIG(status) if was_killed else os.WEXITSTATUS(status)
                if self._popen is not None:
                    self._popen.returncode = self.code  # or it warns on standard error
        return True

    def read(self) -> Optional[bytes]:
        """The bytes that have come; None if there are none yet, empty at the end."""
        return _read(self.output)


def copy_output(
    program: Program,
    wake: int,
    output: Output,
    running: RunningAttempt,
    plugins: AttemptPlugins,
    trial: Optional[TrialAttempt],
) -> int:
    """Copy the output until the program ends, kill the processes it leaves, return its code."""
    splitter = LineSplitter(escape=True)
    wait = select.poll()
    changes = -1 if trial is None else trial.changes
    for source in (program.output, wake, changes):
        if source >= 0:
            wait.register(source, select.POLLIN)
    while not program.has_ended():
        for source, _ in wait.poll(_pause(output, running, plugins)):
            if source == changes and trial is not None:
                trial.read_reports()
            elif source == wake:
                _read(wake)
            else:
                data = program.read()
                output.write(splitter.feed(data or b""))
                if data == b"":
                    wait.unregister(source)
        running.forward_signals()
        plugins.tick(time.monotonic())
        running.kill_when_due()
        if output.until_progress() == 0:
            output.write(splitter.progress())
    kill_descendants()
    # Not until end of file: a process that cannot be killed could keep the pipe open.
    while data := program.read():
        output.write(splitter.feed(data))
    output.write(splitter.finish())
    os.close(program.output)
    assert program.code is not None
    return program.code


def _pause(output: Output, running: RunningAttempt, plugins: AttemptPlugins) -> Optional[float]:
    """Milliseconds to wait for output or signals until a timer is due; None: without a limit."""
    due = [running.until_kill()]
    if plugins:
        due.append(plugins.until_tick(time.monotonic()))
    if output.until_progress():  # 0 after the bar was printed, until the next line
        due.append(output.until_progress())
    least = min(due)
    return None if least == float("inf") else least * 1000


def _read(pipe: int) -> Optional[bytes]:
    try:
        return os.read(pipe, _READ)
    except BlockingIOError:
        return None
