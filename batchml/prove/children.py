"""Run the commands that users type, as processes, and note when each line is printed."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any

from msgspec import Struct

from batchml.clock import Clock
from batchml.runtime.processes import die_with_parent

GRACE = 20.0  # seconds in which an interrupted command must end
_MOST_SHOWN = 80  # characters of an argument in a message
LIMIT = 1800.0  # seconds: no command takes longer; the longest is `setup`


class CommandResult(Struct, frozen=True):
    """The output of a command. `lines` are those of stdout, with seconds since the epoch."""

    words: tuple[str, ...]
    code: int
    lines: tuple[tuple[float, str], ...]
    err: str
    seconds: float
    program: str = "batchml"

    @property
    def out(self) -> str:
        return "".join(line for _, line in self.lines)

    @property
    def document(self) -> Any:
        """What it printed with --json; an empty document if it printed none."""
        try:
            return json.loads(self.out)
        except ValueError:
            return {}

    def describe(self) -> str:
        """The command and the end of its messages, for a claim that does not hold."""
        messages = [line for line in self.err.splitlines() if line.strip()]
        said = next(
            (i for i, line in enumerate(messages) if line.startswith("batchml: ")),
            max(len(messages) - 3, 0),
        )
        words = " ".join(
            w if len(w) <= _MOST_SHOWN else f"{w[:_MOST_SHOWN]}..." for w in self.words
        )
        shown = " | ".join(messages[said:][:8])
        return f"{self.program} {words} ended with exit code {self.code}: {shown}"


class CommandInterrupted(Exception):
    """The user has interrupted the proof, and with it this command."""


class CommandOverdue(Exception):
    """A command would go on, or begin, after the time that `limit_to` gave."""


class Commands:
    """Runs one command at a time, in a folder, and ends it when the proof is interrupted.

    A command is in a session of its own, so that Ctrl-C at a terminal reaches the proof alone,
    which decides what happens to the command. It dies with the proof.
    """

    def __init__(self, environ: Mapping[str, str], folder: Path, clock: Clock) -> None:
        self.environ = dict(environ)
        self.codes: list[int] = []
        self._folder = folder
        self._clock = clock
        self._running: subprocess.Popen[str] | None = None
        self._is_interrupted = False
        self._deadline = inf  # by the clock's monotonic time
        self._is_overdue = False

    def limit_to(self, seconds: float) -> None:
        """Kill a command that still runs after this time, and let none begin then."""
        self._deadline = self._clock.monotonic() + seconds
        self._is_overdue = False

    def run(
        self, *words: str, limit: float = LIMIT, watch: Callable[[str], object] | None = None,
        environ: Mapping[str, str] | None = None, module: str = "batchml",
    ) -> CommandResult:  # fmt: skip
        """Run `batchml WORDS`, or another program of ours. `watch` gets each line of stdout.

        Raises CommandInterrupted if `interrupt` was called, before or meanwhile, and CommandOverdue
        at the end of the time that `limit_to` gave.
        """
        self._check()
        began = self._clock.monotonic()
        left = self._deadline - began
        if left <= 0:
            raise CommandOverdue
        lines = []
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *words], cwd=self._folder, text=True,
                env={**self.environ, **(environ or {})}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=err, errors="replace", start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )  # fmt: skip
            self._running = process
            if self._is_interrupted:  # the signal came while the process was being started
                self.interrupt()
            timer = threading.Timer(min(limit, left), self._end, [process, left <= limit])
            timer.daemon = True
            timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    lines.append((self._clock.now(), line))
                    if watch is not None:
                        watch(line)
                code = process.wait()
            finally:
                timer.cancel()
                self._running = None
                _kill(process)
                process.wait()
            err.seek(0)
            messages = err.read()
        self.codes.append(code)
        self._check()
        seconds = self._clock.monotonic() - began
        program = "batchml" if module == "batchml" else f"python -m {module}"
        return CommandResult(words, code, tuple(lines), messages, seconds, program)

    def _end(self, process: "subprocess.Popen[str]", is_overdue: bool) -> None:
        self._is_overdue = is_overdue
        _kill(process)

    def _check(self) -> None:
        if self._is_interrupted:
            raise CommandInterrupted
        if self._is_overdue:
            raise CommandOverdue

    def beside(self) -> "Commands":
        """Commands that run while one of these does."""
        return Commands(self.environ, self._folder, self._clock)

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)

    def resume(self) -> None:
        """Let commands run again after an interruption, to take away what was made."""
        self._is_interrupted = False

    def interrupt(self) -> None:
        """Interrupt the running command, as Ctrl-C does; kill it if it goes on too long.

        A signal handler may call this.
        """
        self._is_interrupted = True
        process = self._running
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGINT)
        except ProcessLookupError:
            return
        timer = threading.Timer(GRACE, _kill, [process])
        timer.daemon = True
        timer.start()


def _kill(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has just ended
