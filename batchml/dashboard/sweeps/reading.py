"""What the pages of sweeps know: each sweep as plain values, read once for all tabs.

A sweep's state is an object that changes while it is read. So it is read under a lock, and pages
get values that never change.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.client import Client
from batchml.dashboard.server.workers import Workers
from batchml.errors import BatchmlError
from batchml.model.job import Scalar
from batchml.model.sweep import SweepSpec, Trial, TrialState
from batchml.sweeps.handle import SweepHandle
from batchml.sweeps.results import rank_key
from batchml.sweeps.summary import SweepSnapshot

_READERS = 4  # sweeps that are read at once
_MOMENT = 0.02  # seconds
_ENDED_PACE = 10.0  # seconds after which an ended sweep is read again: a top-up reopens it
_WHOLE_PACE = 4.0  # seconds after which times and costs are new, though nothing has happened
_CONTROL_PACE = 15.0  # seconds between two rounds of a sweep that has no controller of its own


class SweepLine(Struct, frozen=True):
    """A sweep in the list. Without `snapshot` it was not read yet, or `trouble` says why not."""

    key: str
    name: str
    created_at: float = 0.0  # seconds since the epoch
    project: str = ""
    spec: SweepSpec | None = None
    snapshot: SweepSnapshot | None = None  # its `best` is left out
    best: tuple[int, tuple[float, ...]] | None = None  # the number and the values of the best trial
    by: str = ""  # what ended it: see SweepSummary
    trouble: str = ""


class TrialLine(Struct, frozen=True):
    """A trial in the table. `rank`: 0 for the best; None without a result that counts."""

    number: int
    state: TrialState
    rank: int | None
    values: tuple[float, ...]
    step: int
    ran: float  # seconds
    params: dict[str, Scalar]
    job_id: str = ""
    origin: str = ""
    confirms: int | None = None
    why: str = ""


class SweepReading(Struct, frozen=True):
    """All of a sweep. `version` is another one if something has happened."""

    line: SweepLine
    document: dict[str, Any]  # of `SweepHandle.document`
    trials: tuple[TrialLine, ...]
    controller: str
    confirm: tuple[int, int]  # trials and seeds that a confirmation runs by default
    version: str
    hourly: float | None = None  # USD for an hour of one trial


class _SweepEntry:
    """A sweep with its lock, and what was read of it last."""

    def __init__(self, handle: SweepHandle) -> None:
        self.handle = handle
        self.lock = threading.Lock()
        self.line = SweepLine(handle.key, "")
        self.reading: SweepReading | None = None
        self.line_at = self.reading_at = self.whole_at = self.controlled_at = -1e9


class SweepReader:
    """All sweeps of an environment. Its methods may be called by several threads."""

    def __init__(
        self, client: Client, now: Callable[[], float], *, pace: float, read_only: bool = False
    ) -> None:
        """`pace`: the least seconds between two readings. `now`: a clock that runs forwards."""
        self._client, self._now, self._pace, self._read_only = client, now, pace, read_only
        self._lock = threading.Lock()
        self._entries: dict[str, _SweepEntry] = {}
        self._listed: list[_SweepEntry] = []
        self._listed_at = -1e9
        self._pool = Workers(_READERS, "sweeps")

    def handle(self, word: str) -> SweepHandle:
        """A handle of its own for an action. Raises NotFound."""
        return self._client.sweeps(self._find(word).handle.key)

    # --- the list ---------------------------------------------------------------------------

    def lines(self, most: int, patience: float) -> tuple[list[SweepLine], int]:
        """The newest `most` sweeps, and the number of all.

        After `patience` seconds what is known already is returned. Raises what the client raises.
        """
        entries = self._list()
        shown = entries[:most]
        due = [
            self._pool.submit(partial(self._read_line, each))
            for each in shown
            if self._is_due(each)
        ]
        wait(due, patience)
        return [each.line for each in shown], len(entries)

    def _list(self) -> list[_SweepEntry]:
        if self._now() - self._listed_at >= self._pace:
            handles = self._client.sweeps(all_projects=True)
            with self._lock:
                self._listed = [self._note(each) for each in handles]
                self._listed_at = self._now()
        return self._listed

    def _note(self, handle: SweepHandle) -> _SweepEntry:
        return self._entries.setdefault(handle.key, _SweepEntry(handle))

    def _is_due(self, entry: _SweepEntry) -> bool:
        snapshot = entry.line.snapshot
        pace = _ENDED_PACE if snapshot and snapshot.ended else self._pace
        return self._now() - entry.line_at >= pace

    def _read_line(self, entry: _SweepEntry) -> None:
        with entry.lock:
            if self._is_due(entry):
                try:
                    entry.line = read_line(entry.handle)
                except BatchmlError as error:
                    old = entry.line
                    entry.line = SweepLine(old.key, old.name or old.key, old.created_at,
                                           old.project, trouble=str(error))  # fmt: skip
                entry.line_at = self._now()

    # --- one sweep --------------------------------------------------------------------------

    def read(self, word: str, patience: float | None = None) -> SweepReading | None:
        """The sweep that a word names; None if it takes longer than `patience` seconds. A former
        reading is returned after a moment: the page's script asks for a newer one.

        Raises NotFound, and what the handle raises.
        """
        entry = self._find(word)
        future: Future[SweepReading] = self._pool.submit(partial(self._read, entry))
        if patience is not None and entry.reading is not None:
            patience = min(patience, _MOMENT)
        if not wait([future], patience).done:
            return entry.reading
        return future.result()

    def _find(self, word: str) -> _SweepEntry:
        with self._lock:
            entry = self._entries.get(word)
        if entry is None:
            handle = self._client.sweeps(word)
            with self._lock:
                entry = self._note(handle)
        return entry

    def _read(self, entry: _SweepEntry) -> SweepReading:
        with entry.lock:
            if entry.reading is None or self._now() - entry.reading_at >= self._pace:
                control = self._now() - entry.controlled_at >= _CONTROL_PACE
                if control:
                    entry.controlled_at = self._now()
                line = read_line(entry.handle, control=control and not self._read_only)
                controller = entry.handle.controller()
                old, is_old = entry.reading, self._now() - entry.whole_at >= _WHOLE_PACE
                if (
                    old is None
                    or version_of(line, controller) != old.version
                    or (is_old and not (line.snapshot and line.snapshot.ended))
                ):
                    entry.reading = read_whole(entry.handle, line, controller)
                    entry.whole_at = self._now()
                entry.line = line
                entry.reading_at = entry.line_at = self._now()
            assert entry.reading is not None
            return entry.reading


# --- Reading a handle -----------------------------------------------------------------------------


def read_line(handle: SweepHandle, *, control: bool = False) -> SweepLine:
    """A sweep for the list. Raises what the handle raises."""
    summary, started = handle.describe(control=control), handle.started
    snapshot, best = summary.snapshot, summary.snapshot.best
    return SweepLine(
        handle.key, started.name, started.created_at, started.project, started.spec,
        _without_best(snapshot), (best.number, best.values or ()) if best else None, summary.by,
    )  # fmt: skip


def read_whole(handle: SweepHandle, line: SweepLine, controller: str) -> SweepReading:
    """All of a sweep of which the rest was just read. Raises what the handle raises."""
    document = handle.document()
    trials = handle.trials()
    keyed = ((rank_key(each, handle.spec), each.number) for each in trials)
    ranked = sorted((key, number) for key, number in keyed if key is not None)
    rank_of = {number: rank for rank, (_, number) in enumerate(ranked)}
    now = document["head"]["written"]
    lines = tuple(trial_line(each, rank_of.get(each.number), now) for each in trials)
    confirm = handle.spec.confirm
    return SweepReading(
        line, document, lines, controller, (confirm.top, confirm.seeds) if confirm else (3, 3),
        version_of(line, controller), handle.started.hourly,
    )  # fmt: skip


def version_of(line: SweepLine, controller: str) -> str:
    """A text that differs if a trial has begun, reported or ended, or the sweep's state changed."""
    seen = line.snapshot
    if seen is None:
        return line.trouble
    counts = ",".join(f"{state.value}{many}" for state, many in seen.counts.items() if many)
    limits = (seen.wanted, seen.parallel, seen.hours_limit, seen.cost_limit)
    return "|".join(map(str, (counts, seen.steps, seen.status, *limits, line.best, controller,
                              len(seen.notices), seen.confirming)))  # fmt: skip


def _without_best(snapshot: SweepSnapshot) -> SweepSnapshot:
    return replace(snapshot, best=None)


def trial_line(trial: Trial, rank: int | None, now: float) -> TrialLine:
    return TrialLine(
        trial.number, trial.state, rank, tuple(trial.values or ()), trial.step, trial.ran(now),
        dict(trial.params), trial.job_id, trial.origin, trial.confirms, trial.why,
    )  # fmt: skip
