"""The folder that TensorBoard reads: curves of the runs' metrics, and event files that they wrote.

    FOLDER/lenet-0cd3aa84/                    curves of its metrics
    FOLDER/lenet-0cd3aa84/3/                  curves of its child 3, or of a node
    FOLDER/lenet-0cd3aa84/tb/                 event files below its outputs/tb
    FOLDER/lenet-0cd3aa84/checkpoints/        event files below its checkpoints

Event files of this machine are linked, so that TensorBoard sees additions at once. Event files in a
bucket are fetched when they have changed, and their new part is appended, because TensorBoard stops
reading a file that is replaced.
"""

import fcntl
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from batchml.errors import BatchmlError, NotFound
from batchml.model.names import short_id
from batchml.runs.metrics.event_files import (
    CurvePoint,
    file_header,
    file_name,
    point_records,
    session_start,
)
from batchml.runs.metrics.series import Metrics, Sample
from batchml.runs.outputs import (
    PARTIAL_SUFFIX,
    OutputEntry,
    OutputSource,
    Unreadable,
    name_problem,
    open_outputs,
)
from batchml.runs.watch.events import OutputLine, RunEvent
from batchml.runs.watch.wait import follow

if TYPE_CHECKING:
    from batchml.context import Context, Notify
    from batchml.runs.search import FoundRun

EVENTS = "tfevents"  # a part of the name of every event file


class EventFile(NamedTuple):
    """An event file of this machine, and its folder below the folder of its run."""

    path: Path
    folder: str


# --- Curves of metrics ----------------------------------------------------------------------------


class PointBuffer(Metrics):
    """Metrics that also keep the points that are not written yet.

    `patterns` are those of [metrics] in job.toml, `now` returns the time of day.
    """

    def __init__(self, patterns: dict[str, str], now: Callable[[], float]) -> None:
        super().__init__(patterns)
        self._now = now
        # Child, point (None: the child restarted at this step), step.
        self._unwritten: list[tuple[str, CurvePoint | None, int]] = []
        self._counts: dict[tuple[str, str], int] = {}  # points by (child, metric)
        self._reached: dict[str, int] = {}  # highest step by child
        self._retried: set[str] = set()  # children with a new attempt, whose first step is unknown
        self._line_time = 0.0  # of the last line, for points without a time
        self._lock = threading.Lock()

    def watch(self, happenings: Iterable[RunEvent]) -> Iterator[RunEvent]:
        return super().watch(map(self._timed, happenings))

    def _timed(self, happening: RunEvent) -> RunEvent:
        if isinstance(happening, OutputLine):
            self._line_time = happening.timestamp / 1000
        return happening

    def new_attempt(self, child: str = "") -> None:
        super().new_attempt(child)
        self._retried.add(child)

    def _add(self, name: str, child: str, sample: Sample) -> None:
        super()._add(name, child, sample)
        count = self._counts[child, name] = self._counts.get((child, name), 0) + 1
        step = count if sample.step is None else int(sample.step)
        time = sample.time or self._line_time or self._now()
        with self._lock:
            if child in self._retried and sample.step is not None:
                self._retried.discard(child)
                if step <= self._reached.get(child, -1):
                    self._unwritten.append((child, None, step))
            self._reached[child] = max(step, self._reached.get(child, step))
            self._unwritten.append((child, CurvePoint(name, step, sample.value, time), step))

    def take_records(self) -> dict[str, bytes]:
        """Return the points since the last call, as records of an event file, by child."""
        with self._lock:
            taken, self._unwritten = self._unwritten, []
        records: dict[str, bytes] = {}
        for child, point, step in taken:
            data = session_start(step, self._now()) if point is None else point_records([point])
            records[child] = records.get(child, b"") + data
        return records


class CurveWriter:
    """Appends the metrics of one run to its event files."""

    def __init__(self, folder: Path, points: PointBuffer, now: Callable[[], float]) -> None:
        self._folder = folder
        self._points = points
        self._now = now
        self._files: dict[str, Path] = {}

    def write(self) -> None:
        for child, data in self._points.take_records().items():
            path = self._files.get(child)
            if path is None:
                path = self._files[child] = self._folder / safe_name(child) / file_name(self._now())
                path.parent.mkdir(parents=True, exist_ok=True)
                # TensorBoard ignores a file's first session start, so write one before a restart.
                data = file_header(self._now()) + session_start(0, self._now()) + data
            with open(path, "ab") as file:
                file.write(data)


# --- Event files that the program wrote -----------------------------------------------------------


def local_event_files(context: "Context", job_id: str) -> Iterator[EventFile]:
    """Yield the event files of a run of this machine, and of its children and nodes."""
    runs = context.home.runs
    for folder in [runs / job_id, *sorted(runs.glob(f"{job_id}[:#]*"))]:
        part = safe_name(folder.name.removeprefix(job_id).lstrip(":#"))
        for source, kind in (("output", "outputs"), ("checkpoints", "checkpoints")):
            for path in event_files(folder / source):
                where = str(path.parent.relative_to(folder / source))
                yield EventFile(path, os.path.join(part, folder_for(kind, where)))


def event_files(root: Path) -> Iterator[Path]:
    """Yield the event files below a folder, without following links."""
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in sorted(names) if EVENTS in name)


def folder_for(kind: str, where: str) -> str:
    """Return the folder for an event file that is in the folder `where` of outputs or checkpoints.

    Files directly in outputs get a folder of their own: TensorBoard draws a folder as one run, and
    the run's folder already has the curves of its metrics.
    """
    subfolder = "" if where in ("", ".") else where
    return (subfolder or kind) if kind == "outputs" else os.path.join(kind, subfolder)


def link_file(found: EventFile, folder: Path) -> bool:
    """Link a file into the run's folder; return whether it is new there."""
    target = folder / found.folder / found.path.name
    if os.path.lexists(target):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(found.path)
    return True


def fetch_files(source: "OutputSource", folder: Path) -> int:
    """Fetch the new parts of a run's event files from a bucket; return how many files changed."""
    entries = (entry for entry in source.entries() if EVENTS in entry.name)
    return sum(_fetch_file(source, entry, folder) for entry in entries)


def _fetch_file(source: "OutputSource", entry: "OutputEntry", folder: Path) -> bool:
    if name_problem(entry.name):
        return False
    where, _, name = entry.name.rpartition("/")
    target = folder / folder_for("outputs", where) / name
    if target.exists() and target.stat().st_size == entry.size:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name("." + name.replace(EVENTS, "events") + PARTIAL_SUFFIX)
    part.unlink(missing_ok=True)
    try:
        source.fetch(entry, part)
        return append_new(part, target)
    except Unreadable:
        return False
    finally:
        part.unlink(missing_ok=True)


def append_new(newer: Path, target: Path) -> bool:
    """Append the part of `newer` after the size of `target`; a smaller `newer` replaces `target`.

    Return whether `target` changed.
    """
    have = target.stat().st_size if target.exists() else 0
    size = newer.stat().st_size
    if size < have:
        os.replace(newer, target)
        return True
    with open(newer, "rb") as source, open(target, "ab") as file:
        source.seek(have)
        while block := source.read(1 << 20):
            file.write(block)
    return size > have


def show_folder(folder: Path, workspace: Path, root: Path) -> None:
    """Link the event files below a folder of the workspace."""
    for path in event_files(folder):
        where = path.parent.relative_to(workspace.resolve())
        link_file(EventFile(path, str(Path("workspace", where))), root)


# --- The folder -----------------------------------------------------------------------------------


@contextmanager
def scratch_folder(context: "Context") -> Iterator[Path]:
    """Make a folder for TensorBoard, and remove it after the block.

    Folders of commands that were killed are removed first.
    """
    above = context.home.root / "tensorboard"
    above.mkdir(mode=0o700, exist_ok=True)
    for each in above.glob("*.lock"):
        with open(each, "a", encoding="ascii") as file, suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(each)
    folder = Path(tempfile.mkdtemp(prefix="runs-", dir=above))
    lock = folder.with_name(folder.name + ".lock")
    with open(lock, "a", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            _remove(lock)


def _remove(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)  # links, not their targets
    for ending in (".log", ".token"):
        lock.with_suffix(ending).unlink(missing_ok=True)
    lock.unlink(missing_ok=True)


# --- A shown run ----------------------------------------------------------------------------------


class ShownRun:
    """One run in TensorBoard's folder. A thread follows its log until the run has ended."""

    def __init__(self, context: "Context", found: "FoundRun", root: Path, notify: "Notify") -> None:
        self.name = safe_name(f"{found.name}-{short_id(found.shown_id)}")
        self.job_id = found.job_id
        self.has_files = False
        self._context = context
        self._found = found
        self._folder = root / self.name
        self._notify = notify
        patterns = dict(found.record.patterns) if found.record else {}
        self._points = PointBuffer(patterns, context.clock.now)
        self._curves = CurveWriter(self._folder, self._points, context.clock.now)
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Say whether the run's log was read to its end."""
        return not self._thread.is_alive()

    @property
    def is_empty(self) -> bool:
        return not (self.has_files or self._points.series)

    def update(self) -> None:
        """Write new points, and find new event files. Raises BatchmlError, OSError."""
        self._curves.write()
        if self._context.settings.is_local:
            for each in local_event_files(self._context, self.job_id):
                link_file(each, self._folder)
                self.has_files = True
        else:
            with suppress(NotFound):
                self.has_files |= (
                    fetch_files(open_outputs(self._context, self._found), self._folder) > 0
                )

    def _follow(self) -> None:
        """Follow the run until its end."""
        run = self._found.run
        known = run if run is not None and run.status.is_terminal else None
        # A copy with its own SDK session: threads must not create clients of one session.
        context = self._context.with_settings(self._context.settings)
        try:
            for _ in self._points.watch(follow(context, self.job_id, ended=known)):
                pass
        except BatchmlError as error:
            self._notify(f"{self.name} is no longer followed: {error}")


def safe_name(name: str) -> str:
    """Return a name that is safe as a folder name."""
    return re.sub(r"[^\w.@+-]+", "-", name)
