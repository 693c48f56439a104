"""Checks that need no GPU, for the tests of `benchmarks.gpu`. The name says what happens."""

import os
import signal
import subprocess
import sys
from typing import NoReturn

from benchmarks.gpu.checks import CheckRun


def measure(run: CheckRun) -> None:
    run.figure("speed", 2.5, "images/s", "of nothing")
    run.finding("It is slow.")
    run.detail("shape", [1, 2])
    BEHAVIOURS[run.folder.name](run)


def reads(run: CheckRun) -> None:
    """Report what the runner tells of the check before, and of the machine."""
    run.figure("before", run.before("good", "speed") or 0)
    run.detail("option", run.option("prices"))
    run.detail("circumstances", [run.device, run.small, 0 < run.left() <= 60])


def hangs(run: CheckRun) -> NoReturn:
    """Start a process that does not end by itself, and wait for it."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    run.detail("child", child.pid)
    while True:
        signal.pause()


def breaks(run: CheckRun) -> NoReturn:
    raise ValueError("3 is not 4\nsecond line")


BEHAVIOURS = {
    "good": lambda run: None,
    "reads": reads,
    "leaves": lambda run: run.leave("there is one GPU, and it needs two"),
    "breaks": breaks,
    "dies": lambda run: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": hangs,
}
