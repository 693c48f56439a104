"""The folder that TensorBoard reads while runs go on: their curves, and what they wrote themselves.

    FOLDER/lenet-0cd3aa84/                    curves of its metrics, as they come
    FOLDER/lenet-0cd3aa84/3/                  of its child 3, or of a node
    FOLDER/lenet-0cd3aa84/tb/                 event files below its outputs/tb
    FOLDER/lenet-0cd3aa84/checkpoints/        and below its checkpoints

On this machine event files are links, so that what is added shows at once. From a bucket those that
have changed are fetched, and what is new of them is added: a file that were replaced would be read
no further.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from batchml.errors import BatchmlError, NotFound
from batchml.ops.metrics import Metrics, Sample
from batchml.ops.tensorboard import Value, beginning, file_name, records, started
from batchml.ops.watch import Happening, Line

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.submission import Tell
    from batchml.ops.outputs import Entry, Source
    from batchml.ops.search import Found

EVENTS = "tfevents"  # what is in the name of an event file

_Part = tuple[str, str]  # child, metric


class EventFile(NamedTuple):
    """An event file of this machine: where it lies, and its folder below that of its run."""

    path: Path
    folder: str


# --- curves of metrics ----------------------------------------------------------------------------


class Points(Metrics):
    """Metrics that keep, beside their series, what has come since it was asked last."""

    def __init__(self, patterns: dict[str, str], now: Callable[[], float]) -> None:
        super().__init__(patterns)
        self._now = now
        self._fresh: list[tuple[str, Value | None, int]] = []  # child, the point or a way back
        self._counts: dict[_Part, int] = {}
        self._reached: dict[str, int] = {}  # of each child the highest step
        self._is_new: set[str] = set()  # children of which a new attempt has begun
        self._at = 0.0  # the time of the last line, for points that do not tell theirs
        self._lock = threading.Lock()

    def watch(self, happenings: Iterable[Happening]) -> Iterator[Happening]:
        return super().watch(map(self._timed, happenings))

    def _timed(self, happening: Happening) -> Happening:
        if isinstance(happening, Line):
            self._at = happening.timestamp / 1000
        return happening

    def new_attempt(self, child: str = "") -> None:
        super().new_attempt(child)
        self._is_new.add(child)

    def _add(self, name: str, child: str, sample: Sample) -> None:
        super()._add(name, child, sample)
        count = self._counts[child, name] = self._counts.get((child, name), 0) + 1
        step = count if sample.step is None else int(sample.step)
        time = sample.time or self._at or self._now()
        with self._lock:
            if child in self._is_new and sample.step is not None:
                self._is_new.discard(child)
                if step <= self._reached.get(child, -1):
                    self._fresh.append((child, None, step))
            self._reached[child] = max(step, self._reached.get(child, step))
            self._fresh.append((child, Value(name, step, sample.value, time), step))

    def taken(self) -> dict[str, bytes]:
        """What has come since the last call, as records of an event file, by child."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
        found: dict[str, list[bytes]] = {}
        for child, value, step in fresh:
            data = started(step, self._now()) if value is None else records([value])
            found.setdefault(child, []).append(data)
        return {child: b"".join(parts) for child, parts in found.items()}


class Curves:
    """The event files of one run's metrics, to which is added."""

    def __init__(self, folder: Path, points: Points, now: Callable[[], float]) -> None:
        self._folder = folder
        self._points = points
        self._now = now
        self._files: dict[str, Path] = {}

    def write(self) -> None:
        for child, data in self._points.taken().items():
            path = self._files.get(child)
            if path is None:
                path = self._files[child] = self._folder / safe(child) / file_name(self._now())
                path.parent.mkdir(parents=True, exist_ok=True)
                # The first start is no return: without it TensorBoard would pass over the second.
                data = beginning(self._now()) + started(0, self._now()) + data
            with open(path, "ab") as file:
                file.write(data)


# --- event files that the program wrote -----------------------------------------------------------


def files_here(place: "Place", job_id: str) -> Iterator[EventFile]:
    """Those of a run of this machine, and of its children and nodes."""
    runs = place.home.runs
    for folder in [runs / job_id, *sorted(runs.glob(f"{job_id}[:#]*"))]:
        part = safe(folder.name.removeprefix(job_id).lstrip(":#"))
        for kind, below in (("output", "outputs"), ("checkpoints", "checkpoints")):
            for path in event_files(folder / kind):
                where = str(path.parent.relative_to(folder / kind))
                yield EventFile(path, os.path.join(part, folder_for(below, where)))


def event_files(root: Path) -> Iterator[Path]:
    """Below a folder; no link is followed."""
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in sorted(names) if EVENTS in name)


def folder_for(kind: str, where: str) -> str:
    """Of a file in `where` below a run's outputs or checkpoints. What lies in neither's folders
    gets one of its own: TensorBoard draws a folder as one run, with the curves of the metrics."""
    own = "" if where in ("", ".") else where
    return (own or kind) if kind == "outputs" else os.path.join(kind, own)


def link(found: EventFile, folder: Path) -> bool:
    """Show a file in the run's folder; whether it is new there."""
    target = folder / found.folder / found.path.name
    if os.path.lexists(target):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(found.path)
    return True


def fetch(source: "Source", folder: Path) -> int:
    """Bring what is new of a run's event files in a bucket; how many files had something."""
    count = 0
    for entry in source.entries():
        if EVENTS in entry.name and _bring(source, entry, folder):
            count += 1
    return count


def _bring(source: "Source", entry: "Entry", folder: Path) -> bool:
    from batchml.ops.outputs import PART, Unreadable, refusal

    if refusal(entry.name):
        return False
    where, _, name = entry.name.rpartition("/")
    target = folder / folder_for("outputs", where) / name
    if target.exists() and target.stat().st_size == entry.size:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name("." + name.replace(EVENTS, "events") + PART)
    part.unlink(missing_ok=True)
    try:
        source.fetch(entry, part)
        return append(part, target)
    except Unreadable:
        return False
    finally:
        part.unlink(missing_ok=True)


def append(newer: Path, target: Path) -> bool:
    """Add to a file what `newer` has beyond it; one that has become shorter is another, and
    replaces it. Whether anything was done."""
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
    """Show the event files below a folder of the workspace."""
    for path in event_files(folder):
        where = path.parent.relative_to(workspace.resolve())
        link(EventFile(path, str(Path("workspace", where))), root)


# --- the folder -----------------------------------------------------------------------------------


@contextmanager
def scratch(place: "Place") -> Iterator[Path]:
    """A folder for TensorBoard to read, which goes with the command; so do those of commands that
    were killed."""
    import fcntl
    import tempfile

    above = place.home.root / "tensorboard"
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
    import shutil

    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)  # links in it, not what they lead to
    for ending in (".log", ".token"):
        lock.with_suffix(ending).unlink(missing_ok=True)
    lock.unlink(missing_ok=True)


# --- a run that is shown --------------------------------------------------------------------------


class Shown:
    """One run in TensorBoard's folder, followed by a thread of its own until it has ended."""

    def __init__(self, place: "Place", found: "Found", root: Path, tell: "Tell") -> None:
        from batchml.model.names import short_id

        self.name = safe(f"{found.name}-{short_id(found.job_id)}")
        self.job_id = found.job_id
        self.has_files = False
        self._place = place
        self._found = found
        self._folder = root / self.name
        self._tell = tell
        patterns = dict(found.record.patterns) if found.record else {}
        self._points = Points(patterns, place.clock.now)
        self._curves = Curves(self._folder, self._points, place.clock.now)
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether its log has been read to its end."""
        return not self._thread.is_alive()

    @property
    def is_empty(self) -> bool:
        return not (self.has_files or self._points.series)

    def look(self) -> None:
        """Write what has come, and find files that are new. Raises BatchmlError, OSError."""
        self._curves.write()
        if self._place.settings.is_local:
            new = [link(each, self._folder) for each in files_here(self._place, self.job_id)]
            self.has_files = self.has_files or bool(new)
        else:
            with suppress(NotFound):
                from batchml.client.fetching import source_of

                self.has_files |= fetch(source_of(self._place, self._found), self._folder) > 0

    def _follow(self) -> None:
        """A session of its own: the SDK's are not to be made in several threads at once."""
        from batchml.client.waiting import follow

        run = self._found.run
        known = run if run is not None and run.status.is_terminal else None
        place = self._place.with_settings(self._place.settings)
        try:
            for _ in self._points.watch(follow(place, self.job_id, known=known)):
                pass
        except BatchmlError as error:
            self._tell(f"{self.name} is not followed any more: {error}")


def safe(name: str) -> str:
    """A name of a folder, for a part of a run's id that TensorBoard shows."""
    return re.sub(r"[^\w.@+-]+", "-", name)
