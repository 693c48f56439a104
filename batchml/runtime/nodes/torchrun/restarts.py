"""What became of the generations of a run: one is all its ranks from their start to their end.

It outlives attempts, so that a program that only ever crashes is found out. Pure, but for `Looker`,
which finds checkpoints, and `History`, which keeps it.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from batchml.runtime.checkpoint.layout import REMOVING, SAVING
from batchml.runtime.protocol.exit_codes import CRASH_LOOP, CRASH_LOOP_STARTS
from batchml.runtime.storage.files import write_atomically
from batchml.runtime.storage.store import Store, StoreError

# How a generation ended. OPEN: nobody wrote it down, so its main node is gone.
OPEN, DONE, STOPPED, EXIT, SIGNAL, LOST, HANG = (
    "open", "done", "stopped", "exit", "signal", "lost", "hang",
)  # fmt: skip
AGAIN = "It begins again in place"  # after the cause, in the log of the main node
KEPT = 20  # generations that are remembered
_PIECE = 4096  # bytes of a file, three times
_MOST = 500  # files that are looked at
_PASSED_OVER = (".batchml", SAVING, REMOVING)  # ours, and what is no checkpoint yet or any more
KEY = "generations"
FILE = ".batchml-generations.json"


class Past(NamedTuple):
    """A generation, as it is remembered."""

    generation: int  # from 1, over all attempts of the run
    attempt: int
    kind: str = OPEN
    code: int = 0  # the first failing rank's, below 0 for a signal
    why: str = ""
    progressed: bool = False  # a new newest checkpoint was there at its end


class Verdict(NamedTuple):
    """The run ends here, with this code; `by_runtime` unless it is the program's own."""

    code: int
    why: str
    by_runtime: bool


def without_progress(past: Sequence[Past]) -> List[Past]:
    """The latest generations that failed without a new checkpoint; stopped ones do not count."""
    found: List[Past] = []
    for each in reversed(past):
        if each.progressed or each.kind == DONE:
            break
        if each.kind != STOPPED:
            found.append(each)
    return found[::-1]


def judge(past: Sequence[Past], has_saved: bool) -> Optional[Verdict]:
    """Whether a run whose last generation failed goes on (None), and how it ends if not.

    `has_saved`: there was a checkpoint, of whatever generation. A program that twice ends by itself
    with one code before it ever saved anything ends with that code: it is its own mistake, and
    soon. Else the third generation in a row without a new checkpoint ends it as a crash loop.
    """
    failed = without_progress(past)
    last = failed[-2:]
    codes = {each.code for each in last if each.kind == EXIT}
    if not has_saved and len(last) == 2 and all(e.kind == EXIT for e in last) and len(codes) == 1:
        return Verdict(last[-1].code, f"{last[-1].why} The start before it ended so, too", False)
    if len(failed) < CRASH_LOOP_STARTS:
        return None
    numbers = ", ".join(str(each.generation) for each in failed[-CRASH_LOOP_STARTS:])
    return Verdict(
        CRASH_LOOP,
        f"a crash loop: the last {CRASH_LOOP_STARTS} starts (generations {numbers}) made no new "
        f"checkpoint. "
        f"The last of them: {failed[-1].why}",
        True,
    )


def closed(past: Sequence[Past], progressed: bool) -> Tuple[Past, ...]:
    """With the last one's end, where it was left open by a main node that was lost."""
    if not past or past[-1].kind != OPEN:
        return tuple(past)
    why = "The main node was lost."
    return (*past[:-1], past[-1]._replace(kind=LOST, why=why, progressed=progressed))


class Newest(NamedTuple):
    """The newest checkpoint of a folder: a step, or the state of the files there; falsy: none."""

    step: int = -1
    files: str = ""

    def __bool__(self) -> bool:
        return self.step >= 0 or bool(self.files)

    def is_after(self, other: Newest) -> bool:
        if self.step >= 0 and other.step >= 0:
            return self.step > other.step
        return bool(self) and self != other

    def words(self) -> str:
        """As the end of a line that says what begins."""
        if self.step >= 0:
            return f", from step {self.step}"
        return ", from what was saved" if self.files else ""


class Looker:
    """Looks for the newest checkpoint of a folder, again and again: milliseconds each time."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._known: Dict[Tuple[str, int, int], str] = {}  # path, size, time -> sample
        self.last = Newest()  # as it was at the latest look
        self.files: List[Tuple[str, int, str]] = []  # then: path, size, sample, of plain files

    def newest(self) -> Newest:
        self.last = self._look() if self._folder else Newest()
        return self.last

    def _look(self) -> Newest:
        from batchml.runtime.checkpoint import newest_step

        step = newest_step(self._folder)
        if step is not None:
            return Newest(step)
        self.look_at_files()
        every = repr(self.files).encode()
        return Newest(files=hashlib.sha256(every).hexdigest()[:16] if self.files else "")

    def told(self) -> Dict[str, Any]:
        """The latest look, for a node that has to have the same (`checkpoint_fetch.py`)."""
        return {"step": self.last.step, "files": [] if self.last.step >= 0 else self.files}

    def look_at_files(self) -> None:
        """Those of a program that saves in a way of its own.

        Of each a sample of its content counts, not its time: one that was brought back from a
        store, or written again as it was, is nothing new.
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
        folders[:] = [name for name in folders if not name.startswith(_PASSED_OVER)]
        for name in names:
            path = os.path.join(below, name)
            if not name.startswith(_PASSED_OVER) and not name.endswith(".tmp"):
                found.append(path)
        if len(found) > _MOST:
            break
    return [path for path in found[:_MOST] if os.path.isfile(path)]


def _sample(path: str, size: int) -> str:
    """Of its begin, middle and end: what training changes, it changes everywhere."""
    sums = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for start in sorted({0, max(0, size // 2 - _PIECE // 2), max(0, size - _PIECE)}):
            sums.update(os.pread(descriptor, _PIECE, start))
    finally:
        os.close(descriptor)
    return sums.hexdigest()


class History:
    """Where it is kept: in the run's store, else beside its checkpoints. Best effort."""

    def __init__(self, store: Optional[Store], folder: str) -> None:
        self._store = store
        self._folder = folder

    def read(self) -> Tuple[Tuple[Past, ...], Newest]:
        """The generations, and the newest checkpoint when the last one began."""
        try:
            found = json.loads(self._get() or b"{}")
            past = tuple(Past(**each) for each in found.get("past", ()))
            return past, Newest(**found.get("newest", {}))
        except (StoreError, OSError, TypeError, AttributeError, ValueError):
            return (), Newest()

    def write(self, past: Sequence[Past], began_with: Newest) -> None:
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
