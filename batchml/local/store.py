"""The journal on disk: SQLite, write-ahead log, synchronous=FULL.

What `commit` has returned from survives a power cut: measured against a simulated one, FULL lost
nothing and NORMAL lost more than half of what had been acknowledged (docs/durability.md). One
connection writes and checkpoints; reads go through a second one, which does neither.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from immutables import Map

from batchml.errors import DiskFull, JournalBusy, LocalServerError, StateDamaged
from batchml.local.messages import DropRecord, Effect, Launch, SaveJob, SaveRecord
from batchml.local.state import Definition, Environment, Job, Machine, Queue, State
from batchml.local.state import empty as empty_state

SCHEMA = 1

_TABLES = """
CREATE TABLE records (kind TEXT, key TEXT, body BLOB, PRIMARY KEY (kind, key)) WITHOUT ROWID;
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, sequence INTEGER, queue TEXT, name TEXT, status TEXT,
    created_at INTEGER, live INTEGER, body BLOB
) WITHOUT ROWID;
CREATE INDEX jobs_live ON jobs (sequence) WHERE live;
CREATE INDEX jobs_by_status ON jobs (queue, status, sequence);
CREATE INDEX jobs_by_age ON jobs (queue, sequence);
CREATE TABLE streams (
    log_group TEXT, stream TEXT, task_id TEXT, created_at INTEGER, PRIMARY KEY (log_group, stream)
) WITHOUT ROWID;
CREATE TABLE calls (key TEXT PRIMARY KEY, digest TEXT, answer BLOB, at INTEGER) WITHOUT ROWID;
"""

_KINDS: dict[str, Any] = {"environment": Environment, "queue": Queue, "definition": Definition}
_DECODERS = {kind: msgspec.json.Decoder(struct) for kind, struct in _KINDS.items()}
_JOB = msgspec.json.Decoder(Job)


class Stream(NamedTuple):
    log_group: str
    name: str
    task_id: str
    created_at: int  # ms


class RememberedCall(NamedTuple):
    """The answer to a call, kept so that the same call sent again gets the same answer."""

    key: str
    digest: str
    answer: bytes
    at: int  # ms


class Store:
    """Open it once; `commit` from one thread, read from another.

    Raises StateDamaged when the file is not a journal, DiskFull when there is no space, and
    LocalServerError when a newer batchml wrote it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._writer = self._open(path)
            self._reader = sqlite3.connect(
                f"file:{path}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
            )
            self._reader.execute("PRAGMA wal_autocheckpoint = 0")
        except sqlite3.Error as error:
            raise _translated(error, path) from error

    def _open(self, path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        path.chmod(0o600)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise StateDamaged(_damaged(path, verdict))
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA:
            raise LocalServerError(
                f"{path} was written by a newer batchml (format {version}, this one reads "
                f"{SCHEMA}). Update batchml, or set BATCHML_HOME to another folder."
            )
        if version == 0:
            db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {SCHEMA}; COMMIT;")
        return db

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    # --- writing ----------------------------------------------------------------------------

    def commit(self, effects: Iterable[Effect], calls: Sequence[RememberedCall] = ()) -> None:
        """Write what the effects ask to keep, all or nothing, and return once it is on disk.

        Raises DiskFull or StateDamaged; then nothing was written.
        """
        db = self._writer
        try:
            db.execute("BEGIN IMMEDIATE")
            for effect in effects:
                _write(db, effect)
            if calls:
                db.executemany("INSERT OR REPLACE INTO calls VALUES (?, ?, ?, ?)", calls)
            db.execute("COMMIT")
        except BaseException as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise _translated(error, self.path) from error
            raise

    def forget_calls(self, before: int) -> None:
        """Raises what `commit` raises."""
        try:
            self._writer.execute("DELETE FROM calls WHERE at < ?", (before,))
        except sqlite3.Error as error:
            raise _translated(error, self.path) from error

    # --- reading ----------------------------------------------------------------------------

    def load(self, machine: Machine) -> State:
        """The state as of the last commit, without its indexes (see `engine.restore`).

        Raises StateDamaged when a record cannot be read.
        """
        try:
            return self._load(machine)
        except sqlite3.Error as error:
            raise _translated(error, self.path) from error
        except msgspec.MsgspecError as error:
            raise StateDamaged(_damaged(self.path, str(error))) from error

    def _load(self, machine: Machine) -> State:
        found: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
        for kind, key, body in self._reader.execute("SELECT kind, key, body FROM records"):
            found[kind][key] = _DECODERS[kind].decode(body)
        live = self._reader.execute("SELECT body FROM jobs WHERE live ORDER BY sequence")
        jobs = {job.id: job for job in (_JOB.decode(body) for (body,) in live)}
        (last,) = self._reader.execute("SELECT coalesce(max(sequence), 0) FROM jobs").fetchone()
        revisions: dict[str, int] = {}
        for record in found["definition"].values():
            revisions[record.name] = max(record.revision, revisions.get(record.name, 0))
        return msgspec.structs.replace(
            empty_state(machine),
            environments=Map(found["environment"]),
            queues=Map(found["queue"]),
            definitions=Map(found["definition"]),
            revisions=Map(revisions),
            jobs=Map(jobs),
            sequence=last,
        )

    def jobs(self, ids: Sequence[str]) -> dict[str, Job]:
        """The jobs of `ids` that exist."""
        marks = ",".join("?" * len(ids))
        rows = self._reader.execute(f"SELECT body FROM jobs WHERE id IN ({marks})", tuple(ids))
        return {job.id: job for job in (_JOB.decode(body) for (body,) in rows)}

    def listed(
        self, queue: str, status: str | None, below: int | None, limit: int
    ) -> Iterator[Job]:
        """Jobs of a queue, newest first, with a sequence below `below`."""
        where, values = "queue = ?", [queue, below if below is not None else 2**62]
        if status is not None:
            where, values = "queue = ? AND status = ?", [queue, status, values[1]]
        rows = self._reader.execute(
            f"SELECT body FROM jobs WHERE {where} AND sequence < ? ORDER BY sequence DESC LIMIT ?",
            (*values, limit),
        )
        for (body,) in rows:
            yield _JOB.decode(body)

    def remembered(self, key: str) -> RememberedCall | None:
        row = self._reader.execute("SELECT * FROM calls WHERE key = ?", (key,)).fetchone()
        return None if row is None else RememberedCall(*row)

    def streams(self, log_group: str, prefix: str = "") -> list[Stream]:
        """Log streams of a group whose name starts with `prefix`, by name."""
        rows = self._reader.execute(
            "SELECT log_group, stream, task_id, created_at FROM streams"
            " WHERE log_group = ? AND stream >= ? ORDER BY stream",
            (log_group, prefix),
        )
        found = []
        for row in rows:
            if not row[1].startswith(prefix):
                break
            found.append(Stream(*row))
        return found

    def stream(self, log_group: str, name: str) -> Stream | None:
        row = self._reader.execute(
            "SELECT log_group, stream, task_id, created_at FROM streams"
            " WHERE log_group = ? AND stream = ?",
            (log_group, name),
        ).fetchone()
        return None if row is None else Stream(*row)

    def log_groups(self) -> dict[str, int]:
        """Each log group with the time of its first stream, in ms."""
        rows = self._reader.execute(
            "SELECT log_group, min(created_at) FROM streams GROUP BY log_group"
        )
        return dict(rows.fetchall())


def _write(db: sqlite3.Connection, effect: Effect) -> None:
    match effect:
        case SaveJob(job):
            db.execute(
                "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    job.id, job.sequence, job.queue, job.name, job.status.value,
                    job.created_at, not job.status.is_terminal, msgspec.json.encode(job),
                ),
            )  # fmt: skip
        case SaveRecord(kind, key, record):
            db.execute(
                "INSERT OR REPLACE INTO records VALUES (?, ?, ?)",
                (kind, key, msgspec.json.encode(record)),
            )
        case DropRecord(kind, key):
            db.execute("DELETE FROM records WHERE kind = ? AND key = ?", (kind, key))
        case Launch(job, attempt):
            db.execute(
                "INSERT OR IGNORE INTO streams VALUES (?, ?, ?, ?)",
                (attempt.log_group, attempt.log_stream, attempt.task_id, job.created_at),
            )


def _translated(error: sqlite3.Error, path: Path) -> LocalServerError:
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE")):
        return DiskFull(
            f"No space left to keep the journal {path}: {error}. Free some space on that disk; "
            f"running jobs go on meanwhile."
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return JournalBusy(f"Another program holds the journal {path}: {error}. Let it finish.")
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_PERM", "SQLITE_READONLY")):
        return LocalServerError(
            f"The journal {path} cannot be used: {error}. Look at the disk, the space on it, and "
            f"who may write there; nothing in it was changed."
        )
    return StateDamaged(_damaged(path, str(error)))


def _damaged(path: Path, what: str) -> str:
    return (
        f"The journal {path} cannot be read: {what}. Nothing was changed. Keep a copy of the "
        f"folder {path.parent} if its jobs matter, then `batchml local reset` starts afresh."
    )
