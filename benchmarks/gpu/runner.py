"""Run the checks one after the other, each in a process of its own with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks import Check
from benchmarks.gpu.machine import environment
from benchmarks.gpu.report import FAILED, NOT_DONE, TIMED_OUT, Result, read_record, unmet

_GRACE = 5.0  # seconds from SIGTERM to SIGKILL
_SHORTEST = 5.0  # seconds that have to be left for a check to begin

Wait = Callable[["subprocess.Popen[bytes]", float], object]
"""Waits so many seconds for the end of a process; raises TimeoutExpired."""


def wait_for_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    process.wait(seconds)


class Runner:
    """Runs checks within a common time. `results` has those that ended, also after an interrupt."""

    def __init__(
        self,
        python: str,
        scratch: Path,
        facts: Mapping[str, Any],
        *,
        device: str,
        small: bool,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        wait: Wait = wait_for_end,
        module: str = "benchmarks.gpu.{name}",
        clean_up: Callable[[], object] = lambda: None,
    ) -> None:
        """`seconds` are those of all checks together. `module` is the module of a check `name`.
        `clean_up` ends processes that a check left outside of its process group.
        """
        self.results: list[Result] = []
        self._python, self._scratch, self._facts = python, scratch, facts
        self._device, self._small, self._module = device, small, module
        self._clock, self._wait, self._clean_up = clock, wait, clean_up
        self._end = clock() + seconds

    def run(
        self, checks: Sequence[Check], lacks: Mapping[str, str], say: Callable[[str], object]
    ) -> None:
        """Run the checks that this machine can do. `lacks` has a reason for each unmet need."""
        for check in checks:
            reason = unmet(check, lacks, self._device)
            left = self._end - self._clock()
            if not reason and left < _SHORTEST:
                reason = "the time of all checks together was used up"
            if reason:
                result = Result(check, NOT_DONE, reason)
            else:
                say(f"{check.name}: {check.title}, at most {min(left, check.seconds):.0f} s ...")
                result = self._run(check, min(left, check.seconds))
            self.results.append(result)
            say(f"{check.name}: {result.state}{f': {result.reason}' if result.reason else ''}")

    def _run(self, check: Check, seconds: float) -> Result:
        folder = self._scratch / check.name
        folder.mkdir()
        facts, record, log = folder / "facts.json", folder / "record.jsonl", folder / "log.txt"
        facts.write_text(json.dumps({**self._facts, "figures": self._figures()}))
        record.touch()
        module = self._module.format(name=check.name)
        command = [
            self._python, "-m", "benchmarks.gpu.child", "--module", module,
            "--facts", str(facts), "--record", str(record), "--seconds", str(seconds),
            "--device", self._device, *(["--small"] if self._small else []),
        ]  # fmt: skip
        began = self._clock()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=environment(os.environ, str(folder)),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            in_time = True
            try:
                self._wait(process, seconds)
            except subprocess.TimeoutExpired:
                in_time = False
            finally:
                end_group(process)
                self._clean_up()
        took = self._clock() - began
        end, fields = read_record(record.read_text("utf-8").splitlines())
        if end is not None:
            state = end
        elif not in_time:
            state, fields["reason"] = TIMED_OUT, f"it did not end within {seconds:.0f} s"
        else:
            state, fields["reason"] = FAILED, _last_words(process.returncode, log)
        if state == FAILED:
            fields["details"]["log"] = _tail(log, 60)
        return Result(check, state, seconds=took, **fields)

    def _figures(self) -> dict[str, dict[str, float]]:
        return {
            result.check.name: {each["name"]: each["value"] for each in result.figures}
            for result in self.results
        }


def end_group(process: subprocess.Popen[bytes], grace: float = _GRACE) -> None:
    """End the process and those that it started in its group, and wait for it."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def _tail(log: Path, count: int) -> list[str]:
    return log.read_text("utf-8", "replace").splitlines()[-count:]


def _last_words(code: int, log: Path) -> str:
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
    last = next((line for line in reversed(_tail(log, 20)) if line.strip()), "")
    return f"its process ended with {how}{f': {last}' if last else ''}"
