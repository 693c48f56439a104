"""Who saves: of two generations of a run that live at once, the later one alone may.

The fence is a file beside the checkpoints. A generation writes its number there when it looks for
the checkpoint to go on from, or at its first save; an earlier one that still lives, cut off from
the others say, reads it before each save and lets it be. Between its last look and its rename are
microseconds; nothing more is promised without a lock, which shared file systems often lack.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from batchml.runtime.storage.files import read_json, write_json

FENCE = ".batchml-fence.json"
GENERATION = "BATCHML_GENERATION"


class Term(NamedTuple):
    """A generation of the processes of a run."""

    run: str  # the job's id, the same on its nodes; empty outside a run
    attempt: int
    generation: int  # of this attempt
    began: float = 0.0  # seconds since the epoch

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Term:
        run = environ.get("BATCHML_RUN") or environ.get("AWS_BATCH_JOB_ID", "")
        attempt = environ.get("BATCHML_ATTEMPT") or environ.get("AWS_BATCH_JOB_ATTEMPT", "")
        return cls(
            run.partition("#")[0], _number(attempt, 1), _number(environ.get(GENERATION, ""), 0),
            _began(),
        )  # fmt: skip

    def is_before(self, other: Term) -> bool:
        """Whether `other` is later. Two jobs, of waves of a sweep say, have only the clock."""
        if self.run == other.run:
            return (self.attempt, self.generation) < (other.attempt, other.generation)
        return self.began < other.began

    def words(self) -> str:
        return f"attempt {self.attempt}, generation {self.generation} of run {self.run or '(none)'}"


def take(folder: str, term: Term) -> str:
    """Claim a folder for a generation. Empty, or why it may not save: the words of a later one.

    Raises OSError where the fence can be neither read nor written.
    """
    path = os.path.join(folder, FENCE)
    holder = _holder(path)
    if holder is not None:
        if term.is_before(holder):
            return f"{holder.words()} saves here by now"
        if term[:3] == holder[:3]:
            return ""
    write_json(path, term._asdict())
    return ""


def _holder(path: str) -> Term | None:
    found = read_json(path)
    try:
        return Term(
            str(found["run"]), int(found["attempt"]), int(found["generation"]),
            float(found["began"]),
        )  # fmt: skip
    except (TypeError, KeyError, ValueError):
        return None  # not there, or not ours


def _number(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default


def _began() -> float:
    from batchml.runtime.telemetry.budget import process_age

    return time.time() - process_age()
