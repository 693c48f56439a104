"""How the generations of a run ended: a generation is all ranks from their start to their end.

The record outlives attempts, so a program that crashes again and again is given up. Pure, except
for `CheckpointWatch`, which looks for checkpoints, and `RestartHistory`, which keeps the record.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from batchml.runtime.checkpoint import newest_step
from batchml.runtime.checkpoint.layout import REMOVING, SAVING
from batchml.runtime.protocol.exit_codes import CRASH_LOOP, CRASH_LOOP_STARTS
from batchml.runtime.storage.files import write_atomically
from batchml.runtime.storage.store import Store, StoreError

# How a generation ended. OPEN: no end was recorded, because the main node was lost.
OPEN, DONE, STOPPED, EXIT, SIGNAL, LOST, HANG = (
    "open", "done", "stopped", "exit", "signal", "lost", "hang",
)  # fmt: skip
KEPT = 20  # generations in the record
_PIECE = 4096  # bytes of a sample of a file; there are three
_MOST = 500  # files that are sampled
_IGNORED = (".batchml", SAVING, REMOVING)  # our own files; checkpoints being made or removed
KEY = "generations"
FILE = ".batchml-generations.json"


class RestartRecord(NamedTuple):
    """One generation in the record."""

    generation: int  # from 1, over all attempts of the run
    attempt: int
    kind: str = OPEN
    code: int = 0  # the first failing rank's, below 0 for a signal
    why: str = ""
    progressed: bool = False  # a newer checkpoint existed at its end


class RunEnd(NamedTuple):
    """The run ends with this code; `by_runtime`: the runtime chose it, not the program."""

    code: int
    why: str
    by_runtime: bool


def without_progress(past: Sequence[RestartRecord]) -> List[RestartRecord]:
    """The latest generations that failed without a new checkpoint. Stopped ones do not count."""
    found: List[RestartRecord] = []
    for each in reversed(past):
        if each.progressed or each.kind == DONE:
            break
        if each.kind != STOPPED:
            found.append(each)
    return found[::-1]


def decide_end(past: Sequence[RestartRecord], has_saved: bool) -> Optional[RunEnd]:
    """How a run ends whose last generation failed; None where it goes on.

    `has_saved`: any generation has saved a checkpoint. A program that ends twice with the same code
    before it ever saved anything ends the run with that code: the mistake is its own. Otherwise the
    third generation in a row without a new checkpoint ends the run as a crash loop.
    """
    failed = without_progress(past)
    last = failed[-2:]
    codes = {each.code for each in last if each.kind == EXIT}
    if not has_saved and len(last) == 2 and all(e.kind == EXIT for e in last) and len(codes) == 1:
        return RunEnd(last[-1].code, f"{last[-1].why} The start before it ended so, too", False)
    if len(failed) < CRASH_LOOP_STARTS:
        return None
    numbers = ", ".join(str(each.generation) for each in failed[-CRASH_LOOP_STARTS:])
    return RunEnd(
        CRASH_LOOP,
        f"a crash loop: the last {CRASH_LOOP_STARTS} starts (generations {numbers}) made no new "
        f"checkpoint. "
        f"The last of them: {failed[-1].why}",
        True,
    )


def close_last(past: Sequence[RestartRecord], progressed: bool) -> Tuple[RestartRecord, ...]:
    """The record with an end for the last generation, where a lost main node left it open."""
    if not past or past[-1].kind != OPEN:
        return tuple(past)
    why = "The main node was lost."
    return (*past[:-1], past[-1]._replace(kind=LOST, why=why, progressed=progressed))


class NewestCheckpoint(NamedTuple):
    """The newest checkpoint of a folder: its step, or a digest of the files; falsy without one."""

    step: int = -1
    files: str = ""

    def __bool__(self) -> bool:
        return self.step >= 0 or bool(self.files)

    def is_after(self, other: NewestCheckpoint) -> bool:
        if self.step >= 0 and other.step >= 0:
            return self.step > other.step
        return bool(self) and self != other

    def describe(self) -> str:
        """The end of the line that announces a generation."""
        if self.step >= 0:
            return f", from step {self.step}"
        return ", from what was saved" if self.files else ""


class CheckpointWatch:
    """Looks for the newest checkpoint of a folder repeatedly; each look takes milliseconds."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._known: Dict[Tuple[str, int, int], str] = {}  # path, size, time -> sample
        self.last = NewestCheckpoint()  # at the latest look
        self.files: List[Tuple[str, int, str]] = []  # at that look: path, size, sample of each file

    def newest(self) -> NewestCheckpoint:
        self.last = self._look() if self._folder else NewestCheckpoint()
        return self.last

    def _look(self) -> NewestCheckpoint:
        step = newest_step(self._folder)
        if step is not None:
            return NewestCheckpoint(step)
        self.sample_files()
        every = repr(self.files).encode()
        return NewestCheckpoint(files=hashlib.sha256(every).hexdigest()[:16] if self.files else "")

    def to_message(self) -> Dict[str, Any]:
        """The latest look, for a node that needs the same files (`checkpoint_fetch.py`)."""
        return {"step": self.last.step, "files": [] if self.last.step >= 0 else self.files}

    def sample_files(self) -> None:
        """Sample the files of a program that does not save with `batchml.runtime.checkpoint`.

        The content counts, not the time: a file that was fetched from a store, or written again
        with the same content, is not new.
        """
        found: List[Tuple[str, int, str]] = []
        known, self._known = self._known, {}
        for path in _paths(self._folder):
            try:
                state = os.stat(path)
                key = (path, state.st_size, state.st_mtime_ns)
                self._known[key] = known.get(key) or _sample(path, state.st_size)
            except OSError:
                continue
            found.append((os.path.relpath(path, self._folder), key[1], self._known[key]))
        self.files = sorted(found)


def _paths(folder: str) -> List[str]:
    found: List[str] = []
    for below, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(_IGNORED)]
        for name in names:
            path = os.path.join(below, name)
            if not name.startswith(_IGNORED) and not name.endswith(".tmp"):
                found.append(path)
        if len(found) > _MOST:
            break
    return [path for path in found[:_MOST] if os.path.isfile(path)]


def _sample(path: str, size: int) -> str:
    """A digest of its beginning, middle and end: training changes a file everywhere."""
    sums = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for start in sorted({0, max(0, size // 2 - _PIECE // 2), max(0, size - _PIECE)}):
            sums.update(os.pread(descriptor, _PIECE, start))
    finally:
        os.close(descriptor)
    return sums.hexdigest()


class RestartHistory:
    """The record, kept in the run's store, or beside the checkpoints without a store."""

    def __init__(self, store: Optional[Store], folder: str) -> None:
        self._store = store
        self._folder = folder

    def read(self) -> Tuple[Tuple[RestartRecord, ...], NewestCheckpoint]:
        """The generations, and the newest checkpoint at the start of the last one.

        Both are empty where the record cannot be read.
        """
        try:
            found = json.loads(self._get() or b"{}")
            past = tuple(RestartRecord(**each) for each in found.get("past", ()))
            return past, NewestCheckpoint(**found.get("newest", {}))
        except (StoreError, OSError, TypeError, AttributeError, ValueError):
            return (), NewestCheckpoint()

    def write(self, past: Sequence[RestartRecord], began_with: NewestCheckpoint) -> None:
        """Raises OSError (StoreError among them)."""
        kept: Dict[str, Any] = {
            "past": [each._asdict() for each in past[-KEPT:]], "newest": began_with._asdict()
        }  # fmt: skip
        data = json.dumps(kept).encode()
        if self._store is not None:
            self._store.put(KEY, data)
        elif self._folder:
            write_atomically(os.path.join(self._folder, FILE), data, 0o644)

    def _get(self) -> Optional[bytes]:
        if self._store is not None:
            return self._store.get(KEY)
        try:
            with open(os.path.join(self._folder, FILE), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
