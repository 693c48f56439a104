"""The table of the checks of a GPU machine, and what a check uses to report its figures.

How to add a check:

1. Write a module `benchmarks/gpu/NAME.py` with a function `measure(run: CheckRun) -> None`. It runs
   in a process of its own, with the Python that has PyTorch, in a scratch folder that is removed.
   It calls `run.figure(...)` for each number as soon as it is measured (numbers that were reported
   before a crash or the end of the time are kept), `run.finding(...)` for each sentence that says
   what the numbers mean, and `run.detail(...)` for values that only the JSON file shows.
2. Import what is not in the standard library in functions, never at the module's top level, unless
   `needs` asks for it.
3. Add a row to CHECKS. All limits and the probe's together are eight minutes at most (a test adds
   them up). A check that has done its work earlier leaves its time to nobody.
4. What cannot be done on this machine is no failure: call `run.leave(reason)`. `needs` does this
   before the process starts, see NEEDS. Any other exception is a failure of the check.
5. `run.small` asks for the smallest sizes. With `on_cpu=True` a row says that the check also runs
   with `--device cpu`, which is always small: the test suite does this.

Processes that a check starts end with it, at the latest by the runner's kill.
A check that types `batchml` commands uses `[run.batchml, "-m", "batchml", ...]`: the Python that
has batchml's dependencies, if `needs` has "batchml".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

SECONDS = 480  # of all checks together
PROBE_SECONDS = 30  # of the first look at the machine

NEEDS = {
    "torch": "a Python with PyTorch",
    "gpu": "a CUDA GPU that PyTorch sees (or --device cpu)",
    "nvml": "NVIDIA's management library",
    "batchml": "a Python with batchml's dependencies",
}
"""Name of a need -> its words. The probe (`machine.Machine`) says which are met, and if not why."""


class Check(NamedTuple):
    name: str  # also the module's, in this package
    title: str
    seconds: int  # it is stopped after this time
    needs: tuple[str, ...] = ("torch", "gpu")  # of NEEDS
    on_cpu: bool = True  # whether it also runs with --device cpu


CHECKS: tuple[Check, ...] = (
    Check("limits", "launch overhead, memory bandwidth, matrix products", 30),
    Check("lenet", "LeNet: an epoch of 60,000 images, data on the device; goal < 0.1 s", 80),
    Check("vit", "a vision transformer fed by 0, 4 and 12 CPU workers; price of a step", 90),
    Check("llama", "Llama at the size that fits: MFU; FSDP2, recomputation, compilation", 110),
    Check("nccl", "NCCL in a group of one process", 20),
    Check("health", "batchml's health checks, beside nvidia-smi", 30, ("torch", "nvml")),
    Check("checkpoint", "saving a model on the GPU: how long training stands still", 35),
    Check(
        "runs",
        "runs that share the machine's GPUs; top beside nvidia-smi",
        55,
        ("torch", "gpu", "batchml"),
    ),
)


class CannotRun(Exception):
    """The check, or the rest of it, cannot be done on this machine. The message says why."""


def first_line(error: BaseException) -> str:
    """The class of an error and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])


class CheckRun:
    """One run of one check: its circumstances, and its reports."""

    def __init__(
        self,
        record: TextIO,
        facts: Mapping[str, Any],
        *,
        device: str = "cuda",
        small: bool = False,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`record` gets a line of JSON for each report. `facts` are those of the runner: `machine`
        (the answer of the probe), `options`, and `figures` (check -> figure -> value of the checks
        before this one).
        """
        self.device = device  # "cuda" or "cpu"
        self.small = small
        self.facts = facts
        self._record, self._clock = record, clock
        self._end = clock() + seconds

    @property
    def batchml(self) -> str:
        """The Python that has batchml's dependencies; empty if there is none."""
        return str(self.facts.get("machine", {}).get("batchml", ""))

    @property
    def folder(self) -> Path:
        """The scratch folder of this check."""
        return Path.cwd()

    def left(self) -> float:
        """The seconds until the check is stopped."""
        return self._end - self._clock()

    def option(self, name: str) -> Any:
        """The value of an option of the command line, None if it was not given."""
        return self.facts.get("options", {}).get(name)

    def before(self, check: str, figure: str) -> float | None:
        """A figure of an earlier check, None if it was not measured."""
        value = self.facts.get("figures", {}).get(check, {}).get(figure)
        return None if value is None else float(value)

    def figure(self, name: str, value: float, unit: str = "", note: str = "") -> None:
        self._write(figure={"name": name, "value": value, "unit": unit, "note": note})

    def finding(self, sentence: str) -> None:
        self._write(finding=sentence)

    def detail(self, name: str, value: Any) -> None:
        """Keep a value of any shape that JSON has."""
        self._write(detail={name: value})

    def leave(self, reason: str) -> NoReturn:
        """End the check here: the rest cannot be done on this machine."""
        raise CannotRun(reason)

    def _write(self, **line: Any) -> None:
        print(json.dumps(line), file=self._record, flush=True)
