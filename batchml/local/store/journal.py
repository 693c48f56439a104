"""The journal on disk: SQLite, write-ahead log, synchronous=FULL.

A commit that has returned survives a power cut. In simulated power cuts FULL lost nothing, and
NORMAL lost more than half of the acknowledged commits (docs/durability.md). One connection writes
and checkpoints; others only read.
"""

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from immutables import Map

from batchml.errors import DiskFull, DiskReadOnly, JournalBusy, LocalServerError, StateDamaged
from batchml.local.batch.events import (
    NO_PROOF,
    BeginAttempt,
    DropRecord,
    Effect,
    LogEnd,
    PrepareAttempt,
    SaveJob,
    SaveLogEnd,
    SaveRecord,
    SaveSpec,
)
from batchml.local.batch.state import RECORDS, BatchState, Job, SubmittedSpec, empty_state
from batchml.local.machine import MachineCapacity
from batchml.local.store import write_log
from batchml.local.store.identity import FolderIdentity, JournalFacts, JournalPosition
from batchml.runtime.storage.files import is_read_only

SCHEMA = 3

# `owner` is where a job is listed: its queue, or the array or multi-node job of which it is a part.
_TABLES = """
CREATE TABLE records (kind TEXT, key TEXT, body BLOB, PRIMARY KEY (kind, key)) WITHOUT ROWID;
CREATE TABLE specs (id TEXT PRIMARY KEY, body BLOB) WITHOUT ROWID;
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, sequence INTEGER, owner TEXT, name TEXT COLLATE NOCASE,
    definition TEXT, share TEXT, status TEXT, created_at INTEGER, live INTEGER, spec TEXT, body BLOB
) WITHOUT ROWID;
CREATE INDEX jobs_live ON jobs (sequence) WHERE live;
CREATE INDEX jobs_by_status ON jobs (owner, status, sequence);
CREATE INDEX jobs_by_age ON jobs (owner, sequence);
CREATE INDEX jobs_by_name ON jobs (name, sequence);
CREATE TABLE streams (
    log_group TEXT, stream TEXT, task_id TEXT, created_at INTEGER, PRIMARY KEY (log_group, stream)
) WITHOUT ROWID;
CREATE TABLE calls (key TEXT PRIMARY KEY, digest TEXT, answer BLOB, at INTEGER) WITHOUT ROWID;
"""

# Tables of format 3. `identity` has one row: the state folder of the journal.
_ADDED = """
CREATE TABLE IF NOT EXISTS log_ends (task_id TEXT PRIMARY KEY, body BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS identity (one INTEGER PRIMARY KEY CHECK (one = 1), body BLOB);
"""

_KINDS = {record.kind: record for record in RECORDS}
_DECODERS = {kind: msgspec.json.Decoder(struct) for kind, struct in _KINDS.items()}
_JOB = msgspec.json.Decoder(Job)
_SPEC = msgspec.json.Decoder(SubmittedSpec)
_encode = msgspec.json.Encoder().encode
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)
_POSITION_SIZE = 128  # bytes
_MOST_SORTED = 2000  # jobs of a list that are sorted by age
_KEPT_SPECS = 1024  # decoded specs: the children of an array, which are read together, share one


WhyReadOnly = Callable[[JournalFacts], str]


class LogStream(NamedTuple):
    log_group: str
    name: str
    task_id: str
    created_at: int  # ms


class RememberedCall(NamedTuple):
    """The answer to a call, kept so that the same call gets the same answer again."""

    key: str
    digest: str
    answer: bytes
    at: int  # ms


class JobFilter(NamedTuple):
    """Which jobs of a list to return. Names and definitions that end with `*` are prefixes."""

    status: str | None = None
    names: Sequence[str] = ()
    definitions: Sequence[str] = ()
    share: str | None = None
    before: int | None = None  # ms, like `after`; both exclude the time itself
    after: int | None = None

    def condition(self) -> tuple[str, list[Any]]:
        """SQL to append to a WHERE clause, and its values."""
        parts: list[str] = []
        values: list[Any] = []
        for test, value in (
            ("status = ?", self.status),
            ("share = ?", self.share),
            ("created_at < ?", self.before),
            ("created_at > ?", self.after),
        ):
            if value is not None:
                parts.append(test)
                values.append(value)
        for column, patterns in (("name", self.names), ("definition", self.definitions)):
            if patterns:
                tests = [_like(column, pattern, values) for pattern in patterns]
                parts.append(f"({' OR '.join(tests)})")
        return "".join(f" AND {part}" for part in parts), values


def _like(column: str, pattern: str, values: list[Any]) -> str:
    """A condition that the index can answer; its values are appended to `values`."""
    if not pattern.endswith("*"):
        values.append(pattern)
        return f"{column} = ?"
    start = pattern[:-1]
    values += [start, start + "\U0010ffff"]
    return f"({column} >= ? AND {column} < ?)"


class Journal:
    """The open journal: `commit` in one thread, read in another. A missing or empty file is created
    if `may_be_new`.

    `why_read_only` inspects an existing journal before anything is written to it. Its result,
    `read_only`, is the reason why the journal may only be read, or empty.

    Raises StateDamaged when the file is not a journal, DiskFull when there is no space, and
    LocalServerError when a newer batchml wrote it.
    """

    def __init__(
        self,
        path: Path,
        *,
        may_be_new: bool = True,
        why_read_only: WhyReadOnly = lambda journal: "",
    ) -> None:
        self.path = path
        self._specs: dict[str, SubmittedSpec] = {}
        self._live: dict[str, Job] | None = None  # read during the check, for `load`
        self._position = JournalPosition()
        self._position_file = -1
        try:
            self.read_only = _check(path, may_be_new, why_read_only, self._read_ahead)
            if not self.read_only:
                self._writer = self._open(path)
                self._open_position(path)
            self._reader = open_reader(path)
        except sqlite3.Error as error:
            raise _translate(error, path) from error

    def _read_ahead(self) -> None:
        """Read the unfinished jobs for `load`, which reads them again if that fails here."""
        try:
            with closing(open_reader(self.path)) as db:
                self._live = self._live_jobs(db)
        except Exception:  # whatever a damaged journal causes
            pass

    def _open(self, path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        path.chmod(0o600)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA:
            raise LocalServerError(
                f"{path} was written by a newer batchml (format {version}, this one reads "
                f"{SCHEMA}). Update batchml, or set BATCHML_HOME to another folder."
            )
        if version == 0:
            db.executescript(f"BEGIN; {_TABLES} {_ADDED} PRAGMA user_version = {SCHEMA}; COMMIT;")
        elif version < SCHEMA:
            _upgrade(db, path, version)
        return db

    def _open_position(self, path: Path) -> None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._position_file = os.open(path.with_name("position"), flags, 0o600)
        except OSError:
            return  # only the check for a restored journal needs it
        (last,) = self._writer.execute("SELECT coalesce(max(sequence), 0) FROM jobs").fetchone()
        self._position = JournalPosition(last)

    def close(self) -> None:
        self._reader.close()
        if not self.read_only:
            self._writer.close()
        if self._position_file >= 0:
            os.close(self._position_file)

    # --- Identity ---------------------------------------------------------------------------

    def identity(self) -> FolderIdentity | None:
        """The state folder that the journal belongs to."""
        return read_identity(self._reader)

    def facts(self) -> JournalFacts:
        return _read_facts(self._reader)

    def set_identity(self, identity: FolderIdentity) -> None:
        """Record the state folder of the journal. Raises what `commit` raises."""
        try:
            write_identity(self._writer, identity)
        except sqlite3.Error as error:
            raise _translate(error, self.path) from error

    # --- Writing ----------------------------------------------------------------------------

    def commit(self, effects: Sequence[Effect], calls: Sequence[RememberedCall] = ()) -> None:
        """Write everything that the effects save, atomically, and return once it is on disk.

        Raises LocalServerError, such as DiskFull or JournalBusy; then nothing was written.
        """
        self._live = None  # as it was before this commit
        db = self._writer
        jobs: dict[str, tuple[Job, bool]] = {}  # a job that changes twice is written once
        try:
            db.execute("BEGIN IMMEDIATE")
            for effect in effects:
                match effect:
                    case SaveJob(job, live):
                        jobs[job.id] = (job, live)
                    case _:
                        _write(db, effect)
            db.executemany(_SAVE_JOB, (job_row(job, live) for job, live in jobs.values()))
            if calls:
                db.executemany("INSERT OR REPLACE INTO calls VALUES (?, ?, ?, ?)", calls)
            db.execute("COMMIT")
            self._note_position(effects, jobs.values())
        except BaseException as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise _translate(error, self.path) from error
            raise

    def _note_position(self, effects: Sequence[Effect], jobs: Iterable[tuple[Job, bool]]) -> None:
        """Write the newest job and start beside the journal, after the commit and so never ahead of
        it.
        """
        sequence, task_id = self._position.sequence, self._position.task_id
        for job, _ in jobs:
            sequence = max(sequence, job.sequence)
        for effect in effects:
            if isinstance(effect, BeginAttempt):
                task_id = effect.task_id
        position = JournalPosition(sequence, task_id)
        if position != self._position and self._position_file >= 0:
            self._position = position
            try:
                # Each text has the same length, so that it overwrites the whole text before.
                os.pwrite(self._position_file, _encode(position).ljust(_POSITION_SIZE), 0)
            except OSError:
                pass  # full disk

    def forget_calls(self, before: int) -> None:
        """Delete the answers to old calls. Raises what `commit` raises."""
        try:
            self._writer.execute("DELETE FROM calls WHERE at < ?", (before,))
        except sqlite3.Error as error:
            raise _translate(error, self.path) from error

    # --- Reading ----------------------------------------------------------------------------

    def load(self, machine: MachineCapacity) -> BatchState:
        """The state as of the last commit, without its indexes (see `engine.restore`).

        Raises StateDamaged when a record cannot be read.
        """
        try:
            return self._load(machine)
        except sqlite3.Error as error:
            raise _translate(error, self.path) from error
        except _UNREADABLE as error:
            raise StateDamaged(_damage_message(self.path, str(error))) from error

    def _load(self, machine: MachineCapacity) -> BatchState:
        records: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
        for kind, key, body in self._reader.execute("SELECT kind, key, body FROM records"):
            records[kind][key] = _DECODERS[kind].decode(body)
        jobs, self._live = self._live, None
        if jobs is None:
            jobs = self._live_jobs(self._reader)
        (last,) = self._reader.execute("SELECT coalesce(max(sequence), 0) FROM jobs").fetchone()
        revisions: dict[str, int] = {}
        for record in records["definition"].values():
            revisions[record.name] = max(record.revision, revisions.get(record.name, 0))
        return msgspec.structs.replace(
            empty_state(machine),
            **{record.field: Map(records[record.kind]) for record in RECORDS},
            revisions=Map(revisions),
            jobs=Map(jobs),
            sequence=last,
            counts=Map({job.id: self._ended_counts(job) for job in jobs.values() if job.is_array}),
        )

    def _ended_counts(self, array: Job) -> dict[str, int]:
        rows = self._reader.execute(  # not by `live`, which is not in the index
            "SELECT status, count(*) FROM jobs WHERE owner = ? "
            "AND status IN ('SUCCEEDED', 'FAILED') GROUP BY status", (array.id,),
        )  # fmt: skip
        return dict(rows.fetchall())

    def _live_jobs(self, db: sqlite3.Connection) -> dict[str, Job]:
        return {job.id: job for job in self._jobs("WHERE live ORDER BY sequence", db=db)}

    def _jobs(
        self, where: str, values: Sequence[Any] = (), db: sqlite3.Connection | None = None
    ) -> Iterator[Job]:
        # The spec of each job comes with it: a query for each spec took most of the time.
        rows = (db or self._reader).execute(
            "SELECT jobs.spec, jobs.body, specs.body FROM jobs LEFT JOIN specs "
            f"ON specs.id = jobs.spec {where}",
            values,
        )
        try:
            for spec_id, body, spec in rows:
                yield msgspec.structs.replace(_JOB.decode(body), spec=self._spec(spec_id, spec))
        except sqlite3.Error as error:
            raise _translate(error, self.path) from error
        except _UNREADABLE as error:
            raise StateDamaged(_damage_message(self.path, str(error))) from error

    def _spec(self, spec_id: str, body: bytes | None) -> SubmittedSpec:
        spec = self._specs.get(spec_id)
        if spec is None:
            if body is None:
                raise StateDamaged(_damage_message(self.path, f"the spec {spec_id} is missing"))
            spec = _SPEC.decode(body)
            if len(self._specs) >= _KEPT_SPECS:
                self._specs.clear()
            self._specs[spec_id] = spec
        return spec

    def jobs(self, ids: Sequence[str]) -> dict[str, Job]:
        """The jobs of `ids` that exist."""
        marks = ",".join("?" * len(ids))
        return {job.id: job for job in self._jobs(f"WHERE jobs.id IN ({marks})", tuple(ids))}

    def ended_children(self, parent: str) -> dict[str, str]:
        """The children of an array that have ended, each with its status."""
        try:
            rows = self._reader.execute(
                "SELECT id, status FROM jobs WHERE owner = ? AND NOT live", (parent,)
            )
            return dict(rows.fetchall())
        except sqlite3.Error as error:
            raise _translate(error, self.path) from error

    def list_jobs(
        self, owner: str, filter_: "JobFilter", below: int | None, limit: int
    ) -> list[Job]:
        """Jobs of a queue, an array or a multi-node job, newest first, with a sequence below
        `below`.
        """
        conditions, values = filter_.condition()
        where = f"sequence < ?{conditions} ORDER BY sequence DESC LIMIT ?"
        if self._are_rare(filter_.names):
            # With the plus sign SQLite begins with the names, and not with the newest of all jobs.
            where = (
                f"WHERE jobs.id IN (SELECT id FROM jobs WHERE +owner = ? AND {where}) "
                "ORDER BY sequence DESC"
            )
        else:
            where = f"WHERE owner = ? AND {where}"
        return list(
            self._jobs(where, (owner, below if below is not None else 2**62, *values, limit))
        )

    def _are_rare(self, names: Sequence[str]) -> bool:
        """Say whether few jobs have one of the names or prefixes."""
        if not names:
            return False
        condition, values = JobFilter(names=names).condition()
        found = self._reader.execute(
            f"SELECT 1 FROM jobs WHERE TRUE{condition} LIMIT ?", (*values, _MOST_SORTED)
        )
        return len(found.fetchall()) < _MOST_SORTED

    def remembered_call(self, key: str) -> RememberedCall | None:
        row = self._reader.execute("SELECT * FROM calls WHERE key = ?", (key,)).fetchone()
        return None if row is None else RememberedCall(*row)


def read_identity(db: sqlite3.Connection) -> FolderIdentity | None:
    """The state folder that a journal belongs to; None if it has none yet."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    row = db.execute("SELECT body FROM identity").fetchone() if version >= 3 else None
    return None if row is None else msgspec.json.decode(row[0], type=FolderIdentity)


def write_identity(db: sqlite3.Connection, identity: FolderIdentity) -> None:
    db.execute("INSERT OR REPLACE INTO identity VALUES (1, ?)", (_encode(identity),))


def _read_facts(db: sqlite3.Connection) -> JournalFacts:
    (last,) = db.execute("SELECT coalesce(max(sequence), 0) FROM jobs").fetchone()
    tasks = db.execute("SELECT task_id FROM streams")
    return JournalFacts(read_identity(db), last, frozenset(task_id for (task_id,) in tasks))


# The other columns of a job never change: with REPLACE their indexes would be written again.
_SAVE_JOB = """INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id)
DO UPDATE SET status = excluded.status, live = excluded.live, body = excluded.body"""


def job_row(job: Job, live: bool) -> tuple[Any, ...]:
    """A job as a row. It has only the id of the job's spec, which never changes and has a table of
    its own.
    """
    spec = job.spec
    return (
        job.id, job.sequence, job.parent or job.queue, spec.name, spec.definition, spec.share,
        job.status.value, spec.created_at, live, spec.id,
        _encode(msgspec.structs.replace(job, spec=SubmittedSpec(spec.id))),
    )  # fmt: skip


def _write(db: sqlite3.Connection, effect: Effect) -> None:
    match effect:
        case SaveSpec(spec):
            db.execute("INSERT INTO specs VALUES (?, ?)", (spec.id, _encode(spec)))
        case SaveRecord(kind, key, record):
            db.execute(
                "INSERT OR REPLACE INTO records VALUES (?, ?, ?)",
                (kind, key, _encode(record)),
            )
        case SaveLogEnd(task_id, end):
            db.execute("INSERT OR REPLACE INTO log_ends VALUES (?, ?)", (task_id, _encode(end)))
        case DropRecord(kind, key):
            db.execute("DELETE FROM records WHERE kind = ? AND key = ?", (kind, key))
        case PrepareAttempt(job, attempt):
            db.execute(
                "INSERT OR IGNORE INTO streams VALUES (?, ?, ?, ?)",
                (attempt.log_group, attempt.log_stream, attempt.task_id, job.created_at),
            )


def _translate(error: sqlite3.Error, path: Path) -> LocalServerError:
    """The error of batchml for an error of SQLite."""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE")):
        return DiskFull(
            f"No space left to keep the journal {path}: {error}. Free some space on that disk; "
            f"running jobs go on meanwhile."
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return JournalBusy(f"Another program holds the journal {path}: {error}. Let it finish.")
    if name.startswith(("SQLITE_IOERR", "SQLITE_READONLY")) and is_read_only(str(path.parent)):
        return DiskReadOnly(
            f"The file system of the journal {path} is read-only: {error}. Nothing is accepted or "
            f"started until it can be written again; running jobs go on meanwhile."
        )
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_PERM", "SQLITE_READONLY")):
        return LocalServerError(
            f"The journal {path} cannot be used: {error}. Look at the disk, the space on it, and "
            f"who may write there; nothing in it was changed."
        )
    return StateDamaged(_damage_message(path, str(error)))


def _check(
    path: Path, may_be_new: bool, why_read_only: WhyReadOnly, read_ahead: Callable[[], None]
) -> str:
    """Raise StateDamaged when an existing journal is not intact; else return what `why_read_only`
    returns. Changes nothing. `read_ahead` is called meanwhile, if the journal can be read.

    The check uses a read-only connection: the last writing connection moves the log into the main
    file as it closes, and deletes it. Any connection rebuilds the log's index (`-shm`);
    if the check fails, the previous one is put back.
    """
    log, index = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))
    logged, indexed = (file.read_bytes() if file.exists() else None for file in (log, index))
    try:
        damage, read_only = _damage(
            path, logged or b"", indexed or b"", may_be_new, why_read_only, read_ahead
        )
        if damage:
            raise StateDamaged(_damage_message(path, damage))
        return read_only
    except (StateDamaged, sqlite3.Error):
        if logged is None:
            log.unlink(missing_ok=True)
        if indexed is None:
            index.unlink(missing_ok=True)
        else:
            index.write_bytes(indexed)
        raise


def _damage(
    path: Path, log: bytes, index: bytes, may_be_new: bool, why_read_only: WhyReadOnly,
    read_ahead: Callable[[], None],
) -> tuple[str, str]:  # fmt: skip
    """The damage of a journal, and why it may only be read; each may be empty. Raises
    sqlite3.Error.
    """
    if not path.exists() or not path.stat().st_size:
        return "it is gone or empty, and its write-ahead log is not" if log else "", ""
    new_index = path.with_name(path.name + "-shm")
    # A server that was killed while it created the journal leaves changes that must be rolled back.
    mode = "rw" if path.with_name(path.name + "-journal").exists() else "ro"
    name = f"file:{path}?mode={mode}"
    with (
        closing(sqlite3.connect(name, uri=True, check_same_thread=False)) as db,
        ThreadPoolExecutor(1) as thread,
    ):
        # Not quick_check, which does not notice jobs that an index hides. It takes 3 ms for each
        # thousand jobs, so another thread does it.
        checking = thread.submit(db.execute, "PRAGMA integrity_check(1)")
        if mode == "ro":
            read_ahead()
        (verdict,) = checking.result().fetchone()
        if verdict != "ok":
            return str(verdict), ""
        now = write_log.read_index(new_index.read_bytes() if new_index.exists() else b"")
        recovered = now.frames if now else 0
        (version,) = db.execute("PRAGMA user_version").fetchone()
        read_only = why_read_only(_read_facts(db)) if version else ""
    if not version and not may_be_new:
        return "it holds nothing, though a server has served from it", ""
    return write_log.missing(log, write_log.read_index(index), recovered), read_only


def _damage_message(path: Path, what: str) -> str:
    return (
        f"The journal {path} cannot be read: {what}. Nothing was changed. Keep a copy of the "
        f"folder {path.parent} if its jobs matter, then `batchml local reset` starts afresh."
    )


def open_reader(path: Path) -> sqlite3.Connection:
    """A read-only connection, for a thread of its own. Close it before the `Journal`."""
    db = sqlite3.connect(
        f"file:{path}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
    )
    db.execute("PRAGMA wal_autocheckpoint = 0")
    return db


# --- Older journals -------------------------------------------------------------------------------

_IN_SPEC = (
    "name", "queue", "definition", "container", "needs", "created_at", "retry", "timeout",
    "parameters", "depends_on", "propagate_tags",
)  # fmt: skip


def _upgrade(db: sqlite3.Connection, path: Path, version: int) -> None:
    """Bring a journal to this format, atomically; with a copy of format 1 beside it."""
    if version == 1:
        with closing(sqlite3.connect(path.with_suffix(".v1"))) as copy:
            db.backup(copy)
        path.with_suffix(".v1").chmod(0o600)
    try:
        db.execute("BEGIN IMMEDIATE")
        if version == 1:
            _divide_jobs(db)
        _add_tables(db)
        db.execute("COMMIT")
    except BaseException as error:
        if db.in_transaction:
            db.execute("ROLLBACK")
        if isinstance(error, (*_UNREADABLE, KeyError, TypeError)):
            raise StateDamaged(_damage_message(path, str(error))) from error
        raise


def _divide_jobs(db: sqlite3.Connection) -> None:
    """Format 1 kept the spec in each job; later formats keep it in the table `specs`."""
    rows = db.execute("SELECT body, live FROM jobs").fetchall()
    db.execute("DROP TABLE jobs")
    for statement in _TABLES.split(";"):
        if "specs" in statement or " jobs" in statement:
            db.execute(statement)
    for body, live in rows:
        old = msgspec.json.decode(body)
        spec = {"id": old["id"], **{name: old.pop(name) for name in _IN_SPEC if name in old}}
        job = msgspec.convert({**old, "spec": spec}, Job)
        db.execute("INSERT INTO specs VALUES (?, ?)", (job.id, _encode(job.spec)))
        db.execute(_SAVE_JOB, job_row(job, bool(live)))


def _add_tables(db: sqlite3.Connection) -> None:
    """Add the tables of format 3. An attempt that has ended under an older format has no log
    proof.
    """
    for statement in filter(str.strip, _ADDED.split(";")):
        db.execute(statement)
    jobs = [_JOB.decode(body) for (body,) in db.execute("SELECT body FROM jobs WHERE live")]
    live = {job.attempt.task_id for job in jobs if job.attempt is not None}
    doubt = _encode(LogEnd(doubt=NO_PROOF))
    for (task_id,) in db.execute("SELECT task_id FROM streams").fetchall():
        if task_id not in live:
            db.execute("INSERT OR IGNORE INTO log_ends VALUES (?, ?)", (task_id, doubt))
    db.execute(f"PRAGMA user_version = {SCHEMA}")
