"""A sweep's ledger: how long it takes to read it, to write a round, and to pack it, in a folder.

Each trial reports 27 times, each time in a message of its own, which is the most that a trial does.
A process of its own reads the ledger, and its memory is printed, too.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from batchml.runtime.protocol import sweep as messages
from batchml.runtime.protocol.sweep import MessageSender
from batchml.runtime.storage.folder import FolderStore
from batchml.sweeps.control.events import MessageReceived, PlannedTrial, TrialBatch
from batchml.sweeps.control.ledger import SweepLedger

STEPS = 27
SIZES = (100, 1_000, 10_000)
ROUNDS = 5


def main() -> None:
    if sys.argv[1:2] == ["load"]:
        _load(sys.argv[2])
        return
    print(
        f"{'trials':>7} {'MB':>6} {'CPU s':>7} {'MB of memory':>13} {'pack s':>7} {'round ms':>9}"
    )
    for trials in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            print(_figures(folder, trials), flush=True)


def _figures(folder: str, trials: int) -> str:
    ledger = SweepLedger(FolderStore(folder))
    ledger.take_over()
    planned = tuple(
        PlannedTrial(n, {"lr": 0.01, "optimizer": "sgd"}, n, "random") for n in range(trials)
    )
    ledger.append([TrialBatch(1, 1.0, "key", planned)])
    for step in range(1, STEPS + 1):
        ledger.append(MessageReceived(_message(number, step)) for number in range(trials))
    pack = _timed(ledger.pack)
    size = sum(os.path.getsize(f"{folder}/{key}") for key in FolderStore(folder).keys(""))
    loads = [_read_elsewhere(folder) for _ in range(ROUNDS)]
    events = [MessageReceived(_message(number, STEPS)) for number in range(min(trials, 1000))]
    appends = [_timed(lambda: ledger.append(events)) for _ in range(ROUNDS)]
    took, memory = (statistics.median(each) for each in zip(*loads, strict=True))
    append = statistics.median(appends) * 1000
    return f"{trials:7} {size / 1e6:6.1f} {took:7.2f} {memory:13.0f} {pack:7.2f} {append:9.1f}"


def _message(number: int, step: int) -> dict[str, object]:
    job = f"6b0e1111-1111-4111-8111-111111111111:{number}"
    found = messages.make_message(
        MessageSender(1, number, 1, number, job, 10.0), step, messages.REPORT, 10.0 + step,
        [[step, [1 / (number + step)], 10.0 + step]], metrics={"loss": 1 / step},
    )  # fmt: skip
    return messages.add_end(found, messages.DONE, 0) if step == STEPS else found


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _read_elsewhere(folder: str) -> tuple[float, float]:
    """CPU seconds and MB of a process that reads the ledger."""
    command = [sys.executable, "-m", "benchmarks.sweep_ledger", "load", folder]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    took, memory = said.split()
    return float(took), float(memory)


def _load(folder: str) -> None:
    before = _peak()
    began = time.process_time()
    SweepLedger(FolderStore(folder)).load()
    took = time.process_time() - began
    print(took, _peak() - before)


def _peak() -> float:
    """MB that this process had at most. `getrusage` would count its parent's, from before exec."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1000 for line in file if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
