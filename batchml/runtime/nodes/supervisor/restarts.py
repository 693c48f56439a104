"""The record of a run's generations, each of which is one start of all ranks, and how they ended.

The record outlives attempts, so that a program that crashes again and again is not started forever.
All is pure, except for `CheckpointWatch`, which looks for checkpoints, and `RestartHistory`, which
stores the record.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from batchml.runtime.checkpoint import newest_step
from batchml.runtime.checkpoint.layout import REMOVING, SAVING
from batchml.runtime.protocol.exit_codes import CRASH_LOOP, CRASH_LOOP_STARTS
from batchml.runtime.storage.files import write_atomically
from batchml.runtime.storage.store import Store, StoreError

# How a generation ended. OPEN: no end was recorded, because the main node was lost.
# MEMORY: the kernel killed a rank because the memory of its container was full.
OPEN, DONE, STOPPED, EXIT, SIGNAL, MEMORY, LOST, HANG = (
    "open", "done", "stopped", "exit", "signal", "memory", "lost", "hang",
)  # fmt: skip
KEPT = 20  # generations in the record
_SAMPLE = 4096  # bytes of each of the three samples of a file
_MAX_FILES = 500  # files that are sampled
_IGNORED = (".batchml", SAVING, REMOVING)  # our own files; checkpoints being made or removed
KEY = "generations"  # of the record in the run's store
FILE = ".batchml-generations.json"  # the record in the checkpoint folder, without a store


class RestartRecord(NamedTuple):
    """One generation in the record."""

    generation: int  # from 1, over all attempts of the run
    attempt: int
    kind: str = OPEN
    code: int = 0  # exit code of the rank that failed first; -N after signal N
    why: str = ""
    progressed: bool = False  # it saved a newer checkpoint


class RunEnd(NamedTuple):
    """The run ends with this code. `by_runtime`: the runtime chose the code, not the program."""

    code: int
    why: str
    by_runtime: bool


def without_progress(past: Sequence[RestartRecord]) -> List[RestartRecord]:
    """The generations that failed since the last new checkpoint; stopped ones are left out."""
    failed: List[RestartRecord] = []
    for record in reversed(past):
        if record.progressed or record.kind == DONE:
            break
        if record.kind != STOPPED:
            failed.append(record)
    return failed[::-1]


def decide_end(past: Sequence[RestartRecord], has_saved: bool) -> Optional[RunEnd]:
    """Decide after a failed generation how the run ends; None: another generation starts.

    `has_saved`: any generation has saved a checkpoint. If the program ends twice in a row with the
    same exit code, or for lack of memory, before it ever saved a checkpoint, the run ends so,
    because the program itself is at fault. Otherwise the third generation in a row without a new
    checkpoint ends the run: as a crash loop, or by SIGKILL if it lacked memory, which the executor
    reports as out of memory.
    """
    failed = without_progress(past)
    last = failed[-2:]
    is_repeated = len(last) == 2 and len({(record.kind, record.code) for record in last}) == 1
    if not has_saved and is_repeated and last[-1].kind in (EXIT, MEMORY):
        why = f"{last[-1].why} The start before it ended the same way"
        return RunEnd(last[-1].code, why, by_runtime=False)
    if len(failed) < CRASH_LOOP_STARTS:
        return None
    numbers = ", ".join(str(record.generation) for record in failed[-CRASH_LOOP_STARTS:])
    why = (
        f"a crash loop: the last {CRASH_LOOP_STARTS} starts (generations {numbers}) made no new "
        f"checkpoint. The last of them: {failed[-1].why}"
    )
    if failed[-1].kind == MEMORY:
        return RunEnd(-signal.SIGKILL, why, by_runtime=False)
    return RunEnd(CRASH_LOOP, why, by_runtime=True)


def close_last(past: Sequence[RestartRecord], progressed: bool) -> Tuple[RestartRecord, ...]:
    """The record with an end for the last generation, if the loss of the main node left it open."""
    if not past or past[-1].kind != OPEN:
        return tuple(past)
    why = "The main node was lost."
    return (*past[:-1], past[-1]._replace(kind=LOST, why=why, progressed=progressed))


class NewestCheckpoint(NamedTuple):
    """The newest checkpoint of a folder; false if there is none."""

    step: int = -1  # -1: none with a step
    files: str = ""  # a digest of the files, if they have no step

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
        return ", from the saved files" if self.files else ""


class CheckpointWatch:
    """Looks repeatedly for the newest checkpoint of a folder. Each look takes milliseconds."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._samples: Dict[Tuple[str, int, int], str] = {}  # path, size, time -> sample
        self.last = NewestCheckpoint()  # the result of the latest look
        self.files: List[Tuple[str, int, str]] = []  # path, size, sample of each file at that look

    def newest(self) -> NewestCheckpoint:
        self.last = self._look() if self._folder else NewestCheckpoint()
        return self.last

    def _look(self) -> NewestCheckpoint:
        step = newest_step(self._folder)
        if step is not None:
            return NewestCheckpoint(step)
        self.sample_files()
        digest = hashlib.sha256(repr(self.files).encode()).hexdigest()[:16]
        return NewestCheckpoint(files=digest if self.files else "")

    def to_message(self) -> Dict[str, Any]:
        """The result of the latest look, for a node that fetches the same files
        (`checkpoint_fetch.py`).
        """
        return {"step": self.last.step, "files": [] if self.last.step >= 0 else self.files}

    def sample_files(self) -> None:
        """Sample the files of a program that does not save with `batchml.runtime.checkpoint`.

        The content counts, not the time: a file that was fetched from a store, or written again
        with the same content, is not new.
        """
        files: List[Tuple[str, int, str]] = []
        earlier, self._samples = self._samples, {}
        for path in _paths(self._folder):
            try:
                state = os.stat(path)
                key = (path, state.st_size, state.st_mtime_ns)
                self._samples[key] = earlier.get(key) or _sample(path, state.st_size)
            except OSError:
                continue
            files.append((os.path.relpath(path, self._folder), key[1], self._samples[key]))
        self.files = sorted(files)


def _paths(folder: str) -> List[str]:
    found: List[str] = []
    for below, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(_IGNORED)]
        for name in names:
            path = os.path.join(below, name)
            if not name.startswith(_IGNORED) and not name.endswith(".tmp"):
                found.append(path)
        if len(found) > _MAX_FILES:
            break
    return [path for path in found[:_MAX_FILES] if os.path.isfile(path)]


def _sample(path: str, size: int) -> str:
    """A digest of a file's beginning, middle and end: training changes a file everywhere."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for start in sorted({0, max(0, size // 2 - _SAMPLE // 2), max(0, size - _SAMPLE)}):
            digest.update(os.pread(file.fileno(), _SAMPLE, start))
    return digest.hexdigest()


class RestartHistory:
    """Stores the record: in the run's store or, without a store, beside the checkpoints."""

    def __init__(self, store: Optional[Store], folder: str) -> None:
        self._store = store
        self._folder = folder

    def read(self) -> Tuple[Tuple[RestartRecord, ...], NewestCheckpoint]:
        """The generations, and the newest checkpoint at the start of the last one.

        Both are empty if the record cannot be read.
        """
        try:
            found = json.loads(self._get() or b"{}")
            past = tuple(RestartRecord(**record) for record in found.get("past", ()))
            return past, NewestCheckpoint(**found.get("newest", {}))
        except (StoreError, OSError, TypeError, AttributeError, ValueError):
            return (), NewestCheckpoint()

    def write(self, past: Sequence[RestartRecord], began_with: NewestCheckpoint) -> None:
        """Store the last generations. Raises OSError, of which StoreError is a kind."""
        document = {
            "past": [record._asdict() for record in past[-KEPT:]], "newest": began_with._asdict()
        }  # fmt: skip
        data = json.dumps(document).encode()
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
