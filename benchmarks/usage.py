"""What it costs to report a node's resource use: `python -m benchmarks.usage`. docs/seeing.md

A sample of a node with many processes, in CPU time, and so its share of a core at the pace of a
long run; and a call of `progress` in a training's step.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

from batchml.runtime.processes import descendants
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.telemetry.heartbeat import VARIABLE, progress
from batchml.runtime.telemetry.usage import EVERY, FIRST, UsageReporter
from benchmarks.rows import Finding, alone
from benchmarks.running import main

LOOKS = 40
CALLS = 100_000

# A rank with processes that load its data.
_RANK = """
import os, sys, time
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        break
print(flush=True)
time.sleep(600)
"""


class Attempt:
    """What the companion is given; it counts what would go to the log."""

    environ: Mapping[str, str] = {"AWS_BATCH_JOB_NODE_INDEX": "0"}
    last_output, notice, store = 0.0, "", None

    def __init__(self) -> None:
        self.env = RuntimeEnv.read({})
        self.size = 0

    def pids(self) -> list[int]:
        return descendants(os.getpid())

    def mark(self, text: str) -> None:
        self.size += len(text)


def look(ranks: int, loaders: int) -> tuple[int, float, float]:
    """Processes, CPU seconds of a look, and bytes of its lines."""
    started = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", _RANK, str(loaders)], stdout=subprocess.PIPE,
            env={**os.environ, "RANK": str(rank)}, start_new_session=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        for each in started:
            assert each.stdout is not None
            each.stdout.readline()
        attempt = Attempt()
        usage = UsageReporter(cast(Any, attempt))
        usage.tick(0.0)
        began = time.process_time()
        for number in range(LOOKS):
            usage.tick(FIRST + number * EVERY)
        took = time.process_time() - began
        return len(attempt.pids()), took / LOOKS, attempt.size / LOOKS
    finally:
        for each in started:
            os.killpg(each.pid, signal.SIGKILL)
            each.communicate()


def call() -> float:
    """Seconds of one `progress` in a step that takes no time."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = os.path.join(folder, "pulse")
        began = time.perf_counter()
        for step in range(CALLS):
            progress(step, waited=0.001)
        return (time.perf_counter() - began) / CALLS


def measure(full: bool) -> Iterator[Finding]:
    for ranks, loaders in ((1, 0), (4, 4), (8, 10)):
        found = [look(ranks, loaders) for _ in range(3 if full else 1)]
        processes = found[0][0]
        yield alone(
            f"usage/{processes}", f"the use of a node's {processes} processes", "% of a core",
            [100 * seconds / EVERY for _, seconds, _ in found], goal=0.1,
        )  # fmt: skip
    took = [call() * 1e6 for _ in range(3)]
    yield alone("usage/progress", "a call of progress() in a step", "us", took)


if __name__ == "__main__":
    main(measure)
