"""What the pages know: all runs of an environment, and a numbered stream of their changes.

One thread asks the client; all tabs share its answers. Every change has a revision number. The
stream says which runs have changed; a tab asks for the columns that it shows, since the revision
that it has, so it misses nothing however long it was away.
"""

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.client import Client
from batchml.cluster.snapshot import ClusterSnapshot
from batchml.dashboard.html import visible
from batchml.errors import BatchmlError
from batchml.model.run import Run
from batchml.runs.search import FoundRun

MOST_RUNS = 20_000  # of a history; older runs are found with `batchml ls`
_KEPT = 500  # changes that a tab may have missed
NEWEST = 60  # runs that are read again if something has happened
_ANYWAY = 20  # polls after which the newest runs are read although nothing seems to have happened
_KEEP_ALIVE = 15.0  # seconds without an event, after which one says that the stream is alive
QUIET_PACE = 60.0  # seconds between two polls while no page is in view


class Change(Struct, frozen=True):
    """The runs that are new or different since the revision before."""

    revision: int
    runs: tuple[FoundRun, ...] = ()


class RunTable:
    """All runs by job id, the newest first, and the latest changes. Not thread-safe."""

    def __init__(self, revision: int = 0) -> None:
        """`revision`: the first one, which differs from those of other dashboards."""
        self.runs: dict[str, FoundRun] = {}
        self.revision = revision
        self._changes: deque[Change] = deque(maxlen=_KEPT)

    def take(self, found: Iterable[FoundRun]) -> Change | None:
        """Note these runs. Returns the change, or None if all were known as they are."""
        changed = tuple(each for each in found if self.runs.get(each.job_id) != each)
        if not changed:
            return None
        self.runs |= {each.job_id: each for each in changed}
        self.revision += 1
        change = Change(self.revision, changed)
        self._changes.append(change)
        return change

    def forget_changes(self) -> None:
        """Let every tab that has an older revision read all runs again."""
        self._changes.clear()

    def since(self, revision: int) -> list[Change] | None:
        """The changes after a revision; None if some of them are forgotten."""
        missed = self.revision - revision
        if missed < 0 or missed > len(self._changes):
            return None
        return list(self._changes)[len(self._changes) - missed :]

    def newest_first(self) -> list[FoundRun]:
        return sorted(self.runs.values(), key=lambda each: (-each.created_at, each.job_id))


def runs_to_read(before: Mapping[str, Run], after: Mapping[str, Run]) -> tuple[set[str], bool]:
    """The runs that have ended or whose state changed, and True if a run is new."""
    gone = set(before) - set(after)
    moved = {each for each, run in after.items() if each in before and run != before[each]}
    return gone | moved, bool(set(after) - set(before))


def is_different(before: ClusterSnapshot, after: ClusterSnapshot) -> bool:
    """Whether something has happened in the cluster; the time goes on in any case."""
    one, other = (replace(each, at=0, calls=0, machine_cpu=None) for each in (before, after))
    return one != other


class Hub:
    """Polls the client on a thread of its own, and hands changes to the tabs."""

    def __init__(self, client: Client, now: Callable[[], float], *, pace: float) -> None:
        """`pace`: seconds between two polls. `now`: seconds of a clock that only runs forwards."""
        self._client = client
        self._now = now
        self._pace = pace
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()  # ends the pause between two polls
        self._fresh = threading.Event()  # not set: the answers are of before a long pause
        self._fresh.set()
        self._asked_at = now()
        self._loaded = threading.Event()
        # A tab that comes from another dashboard finds that it has missed too much.
        self._table = RunTable(secrets.randbelow(900_000) * 1000)
        self._live: dict[str, Run] = {}
        self._size = -1  # of the history at the last poll
        self._polls = 0
        self._listeners: set[Callable[[dict[str, Any]], None]] = set()
        self.cluster: ClusterSnapshot | None = None
        self.trouble = ""  # why the last poll failed
        self.polled_at: float | None = None  # of the last poll that succeeded, by `now`

    def load(self, limit: int = MOST_RUNS) -> None:
        """Read the newest runs, or all of them. Raises what the client raises."""
        handles = self._client.runs(limit=limit, all_projects=True)
        with self._lock:
            self._table.take(each.seen for each in handles if each.seen)
            if limit >= MOST_RUNS or len(handles) < limit:
                # A tab that had only the newest runs reads all, which is shorter than the change.
                self._table.forget_changes()
                self._loaded.set()
        self.polled_at = self._now()

    @property
    def is_loaded(self) -> bool:
        """Whether all runs were read, not only the newest."""
        return self._loaded.is_set()

    def wait_until_loaded(self, seconds: float = 30.0) -> None:
        self._loaded.wait(seconds)

    def wait_until_fresh(self, seconds: float = 0.3) -> None:
        """After a long pause, wait for a poll, but only as long as a first paint may take."""
        self._fresh.wait(seconds)

    def snapshot(self) -> tuple[int, list[FoundRun]]:
        """The revision, and all runs, the newest first."""
        with self._lock:
            return self._table.revision, self._table.newest_first()

    def changed_since(self, revision: int) -> tuple[int, list[FoundRun], bool]:
        """The revision now, the runs that have changed since, and whether these are all runs."""
        with self._lock:
            missed = self._table.since(revision)
            if missed is None:
                return self._table.revision, self._table.newest_first(), True
            ids = dict.fromkeys(run.job_id for change in missed for run in change.runs)
            return self._table.revision, [self._table.runs[each] for each in ids], False

    def run(self, job_id: str) -> FoundRun | None:
        with self._lock:
            return self._table.runs.get(job_id)

    # --- polling ----------------------------------------------------------------------------

    def poll_until_stopped(self) -> None:
        while not self._stop.is_set():
            try:
                self.poll()
            except Exception as error:  # the next poll may succeed
                self._fail(f"This is a fault of batchml: {type(error).__name__}: {error}")
            self._fresh.set()
            self._wake.wait(self._pace)
            if not self.is_watched:
                self._wake.wait(QUIET_PACE - self._pace)
            self._wake.clear()

    @property
    def is_watched(self) -> bool:
        """Whether a page is in view, or was a moment ago; else polls are rare."""
        return self.has_listeners or self._now() - self._asked_at < QUIET_PACE

    def touch(self) -> None:
        """Note that a page asks for something: after a long pause it is polled at once."""
        if not self.is_watched:
            self._fresh.clear()
            self._wake.set()
        self._asked_at = self._now()

    def poll(self) -> None:
        """Ask once; an error is kept in `trouble`, and the old answers stay."""
        try:
            if not self.is_loaded:
                self.load()
            snapshot = self._client.cluster(all_projects=True)
            live = {row.run.job_id: row.run for row in snapshot.runs}
            changed, has_new = runs_to_read(self._live, live)
            # A run may begin and end between two polls: the history tells of those of this machine.
            size, self._polls = self._client.history_size, self._polls + 1
            has_new = has_new or size != self._size or self._polls % _ANYWAY == 0
            self._size = size
            found: list[FoundRun] = []
            if has_new or changed:
                newest = self._client.runs(limit=NEWEST, all_projects=True)
                found = [each.seen for each in newest if each.seen]
                found += self._describe(changed - {each.job_id for each in found})
        except BatchmlError as error:
            self._fail(str(error))
            return
        is_new = self.cluster is None or is_different(self.cluster, snapshot)
        self.cluster, self._live, self.polled_at = snapshot, live, self._now()
        if is_new:
            self._send({"event": "cluster"})
        if self.trouble:
            self.trouble = ""
            self._send({"event": "trouble"})
        with self._lock:
            change = self._table.take(found)
        if change is not None:
            self._send({"event": "runs", "change": change})

    def _fail(self, text: str) -> None:
        if text != self.trouble:
            self.trouble = text
            self._send({"event": "trouble"})

    def _describe(self, job_ids: set[str]) -> list[FoundRun]:
        with self._lock:
            known = [self._table.runs[each] for each in job_ids if each in self._table.runs]
        if not known:
            return []
        described = self._client.describe([each.job_id for each in known])
        return [replace(each, run=run) for each, run in zip(known, described, strict=True)]

    # --- events -----------------------------------------------------------------------------

    @property
    def has_listeners(self) -> bool:
        """Whether a tab is open."""
        return bool(self._listeners)

    def stop(self) -> None:
        """End the polling and all streams."""
        self._stop.set()
        self._wake.set()
        self._send({"event": "end"})

    def _send(self, message: dict[str, Any]) -> None:
        for listener in tuple(self._listeners):
            listener(message)

    async def events(self) -> AsyncIterator[bytes]:
        """The stream of one browser, as server-sent events. It begins with the present revision."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()

        def listen(message: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, message)

        self._listeners.add(listen)
        try:
            yield b"retry: 1000\n\n"
            yield event("hello", {"revision": self.snapshot()[0], **self._trouble()})
            # One that comes after the end gets no message.
            while not self._stop.is_set():
                try:
                    message = await asyncio.wait_for(queue.get(), _KEEP_ALIVE)
                except TimeoutError:
                    yield event("alive", {})
                    continue
                if message["event"] == "runs":
                    yield event("runs", change_document(message["change"]))
                elif message["event"] == "trouble":
                    yield event("trouble", self._trouble())
                elif message["event"] == "cluster":
                    yield event("cluster", {})
            yield event("end", {})
        finally:
            self._listeners.discard(listen)

    def _trouble(self) -> dict[str, Any]:
        """Why the last poll failed, and how old, in seconds, the answers are that pages show."""
        age = None if self.polled_at is None else round(self._now() - self.polled_at, 1)
        return {"text": visible(self.trouble), "age": age}


def change_document(change: Change) -> dict[str, Any]:
    """Which runs have changed, and which of them have ended."""
    return {
        "revision": change.revision,
        "ids": [each.job_id for each in change.runs],
        "ended": [each.run is None or each.run.status.is_terminal for each in change.runs],
    }


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """A server-sent event. The data is JSON in one line, so no text in it can end the event."""
    return f"event: {name}\ndata: {msgspec.json.encode(data).decode()}\n\n".encode()
