"""What a trial of a sweep adds to a run: its claim, manifest, messages and pruner decision.

Compared with the same program as a plain run. Both go through `batchml.runtime`, with a folder as
their store.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from batchml.runtime.protocol.sweep import (
    ASHA,
    CONTRACT,
    TrialContract,
    TrialEntry,
    batch_key,
    encode,
)
from batchml.runtime.storage.folder import FolderStore
from benchmarks.pairs import Compared, row, sample

PAIRS = 40
GOAL = 15.0  # ms of wall time on top of a plain run
_PROGRAM = ("sh", "-c", "echo epoch=1 val_accuracy={lr}")
_RUN = (sys.executable, "-m", "batchml.runtime.run", *_PROGRAM)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trial = _trial(folder)
        plain = {**_places(folder), "BATCHML_STORE": f"{folder}/store", "BATCHML_KEY": "k"}
        work = f"{folder}/work"
        os.mkdir(work)
        for environ in (trial, plain):
            sample(_RUN, environ, work)
        taken = [(sample(_RUN, trial, work), sample(_RUN, plain, work)) for _ in range(PAIRS)]
    walls = sorted(a.wall - b.wall for a, b in taken)
    found = Compared(
        _middle([a.wall for a, _ in taken]),
        _middle([b.wall for _, b in taken]),
        _middle([a.wall / b.wall for a, b in taken]),
        _middle([a.cpu / b.cpu for a, b in taken]),
    )
    print(row("a trial that prints a line", "the same as a plain run", found, "1.4"))
    print(f"{'':<28} {walls[len(walls) // 2] * 1000:7.1f} ms more (goal {GOAL:.0f})", flush=True)


def _trial(folder: str) -> Mapping[str, str]:
    store = FolderStore(f"{folder}/store")
    contract = TrialContract(
        "k", (("val_accuracy", "max"),), _PROGRAM, {}, {}, method=ASHA, rungs=(1, 3), max=9
    )
    store.put(CONTRACT, contract.to_json())
    data, width = encode("k", 1, [TrialEntry(0, {"lr": 0.1}, 1)])
    store.put(batch_key(1), data)
    sweep = {"BATCHML_WAVE": "1", "BATCHML_WAVE_WIDTH": str(width)}
    return {**_places(folder), "BATCHML_SWEEP": f"{folder}/store", **sweep}


def _places(folder: str) -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return {"PYTHONPATH": root, "TMPDIR": folder, "AWS_BATCH_JOB_ID": "job"}


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
