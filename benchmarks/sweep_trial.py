"""What a trial of a sweep adds to a run: its claim, manifest, messages and pruner decision.

Compared with the same program as a plain run. Both go through `batchml.runtime`, with a folder as
their store.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
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
from benchmarks.pairs import rows, sample
from benchmarks.rows import Finding, alone
from benchmarks.running import main

PAIRS = 40
GOAL = 15.0  # ms of wall time on top of a plain run
_PROGRAM = ("sh", "-c", "echo epoch=1 val_accuracy={lr}")
_RUN = (sys.executable, "-m", "batchml.runtime.run", *_PROGRAM)


def measure(full: bool) -> Iterator[Finding]:
    pairs = PAIRS if full else PAIRS // 3
    with tempfile.TemporaryDirectory() as folder:
        trial = _trial(folder)
        plain = {**_places(folder), "BATCHML_STORE": f"{folder}/store", "BATCHML_KEY": "k"}
        work = f"{folder}/work"
        os.mkdir(work)
        for environ in (trial, plain):
            sample(_RUN, environ, work)
        taken = [(sample(_RUN, trial, work), sample(_RUN, plain, work)) for _ in range(pairs)]
    yield from rows(
        "sweep_trial/line", "a trial that prints a line", taken,
        beside="the same as a plain run", goal=1.4,
    )  # fmt: skip
    more = [(ours.wall - theirs.wall) * 1000 for ours, theirs in taken]
    yield alone("sweep_trial/more", "what a trial adds to a run", "ms", more, goal=GOAL)


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


if __name__ == "__main__":
    main(measure)
