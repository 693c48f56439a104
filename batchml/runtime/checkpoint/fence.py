"""The fence: of two generations of a run that live at once, only the later one may save.

The fence is a file beside the checkpoints. A generation writes its number there when it searches
for the checkpoint to continue from, or at its first save. An earlier generation that still lives,
for example without network, reads the fence before each save, and does not save. Microseconds lie
between that read and the rename of a save; without a lock, which shared file systems often do not
have, more is not possible.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from batchml.runtime.processes import process_age
from batchml.runtime.storage.files import read_json, write_json

FENCE = ".batchml-fence.json"
GENERATION = "BATCHML_GENERATION"


class FenceTerm(NamedTuple):
    """A generation of the processes of a run."""

    run: str  # the job's id, the same on all nodes; empty outside a run
    attempt: int
    generation: int  # of this attempt
    began: float = 0.0  # seconds since the epoch

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> FenceTerm:
        run = environ.get("BATCHML_RUN") or environ.get("AWS_BATCH_JOB_ID", "")
        attempt = environ.get("BATCHML_ATTEMPT") or environ.get("AWS_BATCH_JOB_ATTEMPT", "")
        return cls(
            run.partition("#")[0], _number(attempt, 1), _number(environ.get(GENERATION, ""), 0),
            _began(),
        )  # fmt: skip

    def is_before(self, other: FenceTerm) -> bool:
        """Whether `other` is later. Of two jobs, as in batches of a sweep, only the clock tells."""
        if self.run == other.run:
            return (self.attempt, self.generation) < (other.attempt, other.generation)
        return self.began < other.began

    def describe(self) -> str:
        return f"attempt {self.attempt}, generation {self.generation} of run {self.run or '(none)'}"


def claim_folder(folder: str, term: FenceTerm) -> str:
    """Claim a folder for a generation. Return "", or that a later generation saves there.

    Raises OSError if the fence can be neither read nor written.
    """
    path = os.path.join(folder, FENCE)
    holder = _holder(path)
    if holder is not None:
        if term.is_before(holder):
            return f"{holder.describe()} saves here now"
        if term[:3] == holder[:3]:
            return ""
    write_json(path, term._asdict())
    return ""


def _holder(path: str) -> FenceTerm | None:
    found = read_json(path)
    try:
        return FenceTerm(
            str(found["run"]), int(found["attempt"]), int(found["generation"]),
            float(found["began"]),
        )  # fmt: skip
    except (TypeError, KeyError, ValueError):
        return None  # missing or invalid


def _number(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default


def _began() -> float:
    return time.time() - process_age()
