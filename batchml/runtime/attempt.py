"""One attempt while it runs: what its companions are given, and how it is asked to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Callable, List, Optional

from batchml.runtime.env import RuntimeEnv
from batchml.runtime.output import Output
from batchml.runtime.processes import descendants, send
from batchml.runtime.stopping import STOPS, Signals, make_stop_file
from batchml.runtime.store import Store

_SENDING = 10.0  # seconds of the grace that are kept for the outputs, or a fifth of it


class Running:
    """The `Attempt` of companions.py."""

    def __init__(
        self,
        env: RuntimeEnv,
        environ: Mapping[str, str],
        output: Output,
        signals: Signals,
        store: Optional[Store],
        sends_outputs: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.env = env
        self.environ = environ
        self.store = store
        self.forced: Optional[int] = None  # the exit code, when a companion ended the run
        self._output = output
        self._signals = signals
        self._sends_outputs = sends_outputs
        self._clock = clock
        self._stopping = False
        self._kill_at = float("inf")

    def pids(self) -> List[int]:
        return descendants(os.getpid())

    def mark(self, text: str) -> None:
        self._output.mark(text)

    def say(self, text: str) -> None:
        self._output.say(text)

    def stop(self, reason: str, code: int) -> None:
        if not self._stopping:
            self.forced = code
            self.say(f"batchml: {reason}")
            self._begin_stop(self.env.grace)
            send(self.pids(), signal.SIGTERM)

    def ask(self) -> None:
        """Let the program end by itself, if it looks: no signal is sent."""
        if self.env.stop_file:
            make_stop_file(self.env.stop_file)

    def hear(self) -> None:
        """Pass on the signals that have come, to every process whatever its session."""
        for number in self._signals.take():
            if number in STOPS:
                # Whoever sent it ends the container after the grace, outputs or not.
                keep = min(_SENDING, self.env.grace / 5) if self._sends_outputs else -float("inf")
                self._begin_stop(self.env.grace - keep)
            send(self.pids(), number)

    def until_kill(self) -> float:
        """Seconds; infinite while no end is due."""
        return max(0.0, self._kill_at - self._clock())

    def kill_when_due(self) -> None:
        if self._clock() >= self._kill_at:
            send(self.pids(), signal.SIGKILL)

    def _begin_stop(self, grace: float) -> None:
        self._stopping = True
        self._kill_at = min(self._kill_at, self._clock() + grace)
        self.ask()
