"""The index of the history, so that a command reads only the lines of the runs that it needs.

A SQLite database beside the history has for each run the places of its lines, and the values by
which commands find runs. Only the lines say what is true: the index is made from them, and says up
to which byte. Before each use it takes in the lines after that, in one transaction, so that a kill
or a power cut loses nothing but work. An index that is missing, damaged, of another version, or of
a file that was edited is made again; where none can be written, it is made in memory.

It uses a rollback journal: SQLite before 3.51.3 may damage a write-ahead log with several writers.
Source: sqlite.org, "Atomic Commit In SQLite", "Write-Ahead Logging" (the WAL-reset bug).
"""

import os
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
from msgspec import Struct, field

from batchml.model.group import is_listed
from batchml.model.run import MetricRange, RunName

_VERSION = 3  # of the tables, and of what their columns mean
_COMPARED = 256  # bytes before the new lines, which tell whether the file has only grown
_PART = 1024 * 1024  # bytes that are read at once
_SEEN = 4 * 1024 * 1024  # bytes that say which keys a new index has already
_MOST_KEPT = 20_000  # changed runs in memory
_BUSY_LIMIT = 20.0  # seconds for which another process may take in lines
_FIRST, _PAGE = 128, 16_384  # runs that are looked up at first, and at most, at once
_LINE = struct.Struct("<QI")  # place and length of a line

_TABLES = """
    CREATE TABLE read_part (inode INTEGER, size INTEGER, tail BLOB, changed_at INTEGER);
    CREATE TABLE runs (
        place INTEGER PRIMARY KEY, env TEXT, project TEXT, key TEXT, job_id TEXT, name TEXT,
        job_name TEXT, gang TEXT, moved TEXT, refused TEXT, fallback TEXT, is_listed INTEGER,
        queue TEXT, at INTEGER, status TEXT, metrics_known INTEGER, marks BLOB, lines BLOB
    );
    CREATE TABLE earlier_jobs (job_id TEXT PRIMARY KEY, key TEXT) WITHOUT ROWID;
    CREATE TABLE metric_names (name TEXT PRIMARY KEY, number INTEGER) WITHOUT ROWID;
    CREATE TABLE metrics (
        metric INTEGER, place INTEGER, last REAL, first REAL, least REAL, greatest REAL,
        PRIMARY KEY (metric, place)
    ) WITHOUT ROWID;
    CREATE TABLE column_names (
        env TEXT, project TEXT, kind TEXT, name TEXT, PRIMARY KEY (env, project, kind, name)
    ) WITHOUT ROWID;
"""

_INDEXES = """
    CREATE INDEX by_key ON runs (key) WHERE key != '';
    CREATE INDEX by_job_id ON runs (job_id) WHERE job_id != '';
"""

# Those that reading lines does not need. They are made last: sorted entries are written at once.
_LATE_INDEXES = """
    CREATE INDEX by_name ON runs (env, name, project, place);
    CREATE INDEX by_job_name ON runs (job_name) WHERE job_name != '';
    CREATE INDEX by_env ON runs (env, place);
    CREATE INDEX by_project ON runs (env, project, place);
    CREATE INDEX by_time ON runs (env, at);
    CREATE INDEX by_gang ON runs (gang) WHERE gang != '';
    CREATE INDEX unconfirmed ON runs (env, place) WHERE job_id = '' AND refused = '';
    CREATE INDEX not_ended ON runs (place) WHERE status = '';
    CREATE INDEX unmeasured ON runs (place) WHERE metrics_known < 2 AND status != 'lost';
    CREATE INDEX by_moved ON runs (moved) WHERE moved != '';
"""

# Values of `metrics_known`: what the history knows of the metrics in a run's log.
NOT_READ, ONLY_LAST, ALL_KNOWN = 0, 1, 2


class _LineFields(RunName, frozen=True, gc=False):
    """The fields of a line that identify its run; the decoder skips the other fields."""

    env: str = ""
    forgotten: str = ""


class _IndexedFields(_LineFields, frozen=True, gc=False):
    """The fields of a line that are in the index."""

    queue: str = ""
    at: int = 0
    status: str = ""
    lost: bool = False
    measured: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    ranges: dict[str, MetricRange] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    commit: str = ""
    patterns: dict[str, Any] = field(default_factory=dict)
    directions: dict[str, Any] = field(default_factory=dict)


class IndexedRun(Struct, gc=False):
    """A row of the table `runs`."""

    place: int  # of the run's first line in the file: runs are in the order of these
    env: str
    project: str
    key: str
    job_id: str
    name: str
    job_name: str  # "" if it is the name and the key
    gang: str
    moved: str
    refused: str
    fallback: str
    is_listed: int
    queue: str
    at: int
    status: str  # "" before the end was read, "lost" if AWS Batch has forgotten the run
    metrics_known: int
    marks: bytes  # of its tags, its parameters and its commit: see `marks_to_find`
    lines: bytes

    def spans(self) -> list[tuple[int, int]]:
        """The places and lengths of the lines that make the record."""
        return list(_LINE.iter_unpack(self.lines))


_COLUMNS = ", ".join(IndexedRun.__struct_fields__)
_PUT = f"INSERT OR REPLACE INTO runs VALUES ({', '.join('?' * len(IndexedRun.__struct_fields__))})"
_DECODER = msgspec.json.Decoder(_IndexedFields)
_IDENTITY = msgspec.json.Decoder(_LineFields)
_values = msgspec.structs.astuple

Report = Callable[[int, int], None]  # gets how many bytes have been read, and of how many


class RunIndex:
    """The index of the history at `path`. Threads may share it."""

    def __init__(self, path: Path, report: Report = lambda *_: None) -> None:
        self._path = path
        self._report = report
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._is_in_memory = False
        self._process = 0
        self._read_part: tuple[int, int, bytes, int] | None = None  # as `read_part` has it

    def take_in(self, descriptor: int) -> None:
        """Take in the lines that are new in the open file."""
        with self._lock:
            self._take_in(descriptor)

    def _take_in(self, descriptor: int) -> None:
        state = os.fstat(descriptor)
        if self._process != os.getpid():  # a connection must not be carried across a fork
            self._database, self._read_part, self._process = None, None, os.getpid()
        if self._is_current(descriptor, state):
            return
        try:
            self._update(descriptor, state)
        except (OSError, sqlite3.OperationalError):  # it is held for long, or cannot be written
            self._open_in_memory()
            self._update(descriptor, state)
        except sqlite3.DatabaseError:  # damaged, or no database
            self._delete()
            try:
                self._update(descriptor, state)
            except (OSError, sqlite3.DatabaseError):
                self._open_in_memory()
                self._update(descriptor, state)

    def walk(
        self,
        scope: Mapping[str, str],
        condition: str,
        values: Sequence[Any] = (),
        *,
        by_place: bool = False,
    ) -> Iterator[IndexedRun]:
        """The runs for which an SQL condition holds, the newest first, some at a time.

        `scope`: values of `env`, or of `env` and `project`. `by_place`: the condition has a list of
        places, so that only these rows are read.
        """
        indexes = ("NOT INDEXED", "INDEXED BY by_env", "INDEXED BY by_project")
        index = indexes[0 if by_place else len(scope)]
        parts = [*(f"{name} = ?" for name in scope), f"({condition})", "place < ?"]
        text = (
            f"SELECT {_COLUMNS} FROM runs {index} WHERE {' AND '.join(parts)} "
            "ORDER BY place DESC LIMIT ?"
        )
        below, size = 1 << 62, _FIRST  # most commands need few
        while True:
            rows = self.query(text, (*scope.values(), *values, below, size))
            yield from (IndexedRun(*row) for row in rows)
            if len(rows) < size:
                return
            below, size = rows[-1][0], min(_PAGE, 4 * size)

    def find(
        self, condition: str, values: Sequence[Any] = (), by: str = ""
    ) -> Iterator[IndexedRun]:
        """The runs for which an SQL condition holds, the newest first, all at once.

        `by`: an index of the database, which SQLite would not choose.
        """
        choice = f"INDEXED BY {by}" if by else ""
        text = f"SELECT {_COLUMNS} FROM runs {choice} WHERE {condition} ORDER BY place DESC"
        return (IndexedRun(*row) for row in self.query(text, values))

    def query(self, text: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            assert self._database is not None, "take_in was not called"
            try:
                return self._database.execute(text, values).fetchall()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):  # held for long, or cannot be read
                    self._open_in_memory()
                else:  # a page that is read now is damaged
                    self._delete()
                with open(self._path, "rb") as file:
                    self._take_in(file.fileno())
                return self._database.execute(text, values).fetchall()

    # --- The database -----------------------------------------------------------------------------

    def _is_current(self, descriptor: int, state: os.stat_result) -> bool:
        """Whether this object has taken in the whole file, as the file is now."""
        if self._database is None or self._read_part is None:
            return False
        inode, size, tail, changed_at = self._read_part
        # A file that was edited in place may have its size and its end again, but not its time.
        found = state.st_ino, state.st_size, state.st_ctime_ns
        return found == (inode, size, changed_at) and _has_tail(descriptor, size, tail)

    def _update(self, descriptor: int, state: os.stat_result) -> None:
        database = self._database or self._open()
        if self._is_missing_nothing(database, descriptor, state):
            return
        database.execute("BEGIN IMMEDIATE")
        try:
            self._change(database, descriptor, state)
        except BaseException:
            with suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            raise
        database.execute("COMMIT")

    def _is_missing_nothing(
        self, database: sqlite3.Connection, descriptor: int, state: os.stat_result
    ) -> bool:
        if database.execute("PRAGMA user_version").fetchone() != (_VERSION,):
            return False
        self._read_part = database.execute("SELECT * FROM read_part").fetchone()
        return self._is_current(descriptor, state)

    def _change(self, database: sqlite3.Connection, descriptor: int, state: os.stat_result) -> None:
        """Bring the tables up to date, within a transaction."""
        known: tuple[int, int, bytes, int] | None = None
        if database.execute("PRAGMA user_version").fetchone() == (_VERSION,):
            known = database.execute("SELECT * FROM read_part").fetchone()
        if known is not None:
            inode, size, tail, changed_at = known
            is_edited = state.st_size == size and state.st_ctime_ns != changed_at
            if is_edited or inode != state.st_ino or not _has_tail(descriptor, size, tail):
                known = None
        if known is None:
            for kind, name in database.execute(
                "SELECT type, name FROM sqlite_master WHERE type IN ('table', 'index') "
                "AND name NOT LIKE 'sqlite_%' ORDER BY type"
            ).fetchall():
                database.execute(f"DROP {kind} {name}")
            for statement in (_TABLES + _INDEXES).split(";"):
                database.execute(statement)
            taken = _Reader(database, self._report, is_new=True).read(descriptor, 0, b"")
            for statement in _LATE_INDEXES.split(";"):
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {_VERSION}")
        else:
            reader = _Reader(database, self._report, is_new=False)
            taken = reader.read(descriptor, known[1], known[2])
        self._read_part = (state.st_ino, *taken, os.fstat(descriptor).st_ctime_ns)
        database.execute("DELETE FROM read_part")
        database.execute("INSERT INTO read_part VALUES (?, ?, ?, ?)", self._read_part)

    @property
    def _index_path(self) -> Path:
        return self._path.with_suffix(".index")

    def _open(self) -> sqlite3.Connection:
        if not self._is_in_memory:
            # Private, as the history is.
            os.close(os.open(self._index_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._database = sqlite3.connect(
            ":memory:" if self._is_in_memory else str(self._index_path),
            timeout=_BUSY_LIMIT,
            isolation_level=None,
            check_same_thread=False,
        )
        self._database.execute("PRAGMA journal_mode = TRUNCATE")
        self._database.execute("PRAGMA cache_size = -32768")
        return self._database

    def _open_in_memory(self) -> None:
        self._close()
        self._is_in_memory = True
        self._open()

    def _close(self) -> None:
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()
        self._database = self._read_part = None

    def _delete(self) -> None:
        self._close()
        # The journal first: that of an index which another process makes now must stay.
        for path in (Path(f"{self._index_path}-journal"), self._index_path):
            with suppress(OSError):
                path.unlink()


# --- Taking in lines ------------------------------------------------------------------------------


def _has_tail(descriptor: int, size: int, tail: bytes) -> bool:
    """Whether these are the last of the file's first `size` bytes."""
    return os.pread(descriptor, len(tail), size - len(tail)) == tail


class _Reader:
    """Reads the lines after a place of the file into the tables, some runs at a time."""

    def __init__(self, database: sqlite3.Connection, report: Report, *, is_new: bool) -> None:
        self._database = database
        self._tell = report
        self._changed: dict[str, IndexedRun] = {}  # by key; runs of the first version by job id
        self._identity_of: dict[str, str] = {}  # job id -> key, of the changed runs
        self._metrics: dict[int, dict[str, tuple[float | None, ...]]] = {}  # by place of the run
        self._fetched: set[int] = set()  # places of the changed runs that are in the tables
        self._columns: set[tuple[str, ...]] = set()  # of which the names are known
        self._column_names: set[tuple[str, str, str, str]] = set()
        self._earlier: dict[str, str] = {}  # earlier job id of a run that has moved -> key
        # Of a new index: a 1 for each key in the tables, at a place that few keys share.
        self._seen: bytearray | None = bytearray(_SEEN) if is_new else None

    def _report(self, read: int, size: int) -> None:
        # An error of the report, such as a closed stderr, is none of the history.
        with suppress(Exception):
            self._tell(read, size)

    def read(self, descriptor: int, size: int, tail: bytes) -> tuple[int, bytes]:
        """Take in what comes after `size` bytes, the last of which are `tail`.

        Return both for the next time. A last line that is not whole yet is left for then.
        """
        rest, start = b"", size
        new = os.fstat(descriptor).st_size - start
        self._report(0, new)
        while part := os.pread(descriptor, _PART, size + len(rest)):
            data = rest + part
            end = data.rfind(b"\n") + 1
            place = size
            for line in data[:end].split(b"\n")[:-1]:
                self._add(line, place)
                place += len(line) + 1
            tail = (tail + data[max(0, end - _COMPARED) : end])[-_COMPARED:]
            size, rest = size + end, data[end:]
            self._report(size - start, new)
            if len(self._changed) > _MOST_KEPT:
                self._write()
        if rest and self._add(rest, size):  # whole, only without its newline
            size, tail = size + len(rest), (tail + rest)[-_COMPARED:]
        self._write()
        return size, tail

    def _add(self, line: bytes, place: int) -> bool:
        """Take in a line. Return False if it cannot be read."""
        head = _decode(line)
        if head is None:
            return False
        if head.forgotten:
            self._forget(head.forgotten)
            return True
        run = self._find(head)
        if run is None:
            if head.env and (head.key or head.job_id):
                self._keep(_first(head, place))
                run = self._changed[head.key or head.job_id]
                self._add_to(run, head, line, place)
            return True
        if head.moved:  # the run continues as another job, so the first job's end is not its end
            run.moved, run.refused, run.status, run.marks, run.lines = head.moved, "", "", b"", b""
            run.metrics_known, self._metrics[run.place] = NOT_READ, {}
        elif run.moved and head.job_id == run.moved:
            return True
        self._add_to(run, head, line, place)
        return True

    def _add_to(self, run: IndexedRun, head: _IndexedFields, line: bytes, place: int) -> None:
        """Add the values of a line: of two lines with the same field the later one counts."""
        if head.job_id and head.job_id != run.job_id:
            if run.job_id and run.key:
                self._earlier[run.job_id] = run.key
            run.job_id = head.job_id
            self._identity_of[run.job_id] = run.key or run.job_id
        run.refused = head.refused or run.refused
        run.queue, run.at = head.queue or run.queue, head.at or run.at
        if head.status in ("SUCCEEDED", "FAILED"):
            run.status = head.status
        elif head.lost and not run.status:
            run.status = "lost"
        if head.metrics or head.ranges:
            self._metrics[run.place] = _metric_rows(head)
        if head.metrics and (head.measured or run.metrics_known):
            run.metrics_known = ALL_KNOWN if head.ranges else ONLY_LAST
        elif head.measured and (head.ranges or not run.metrics_known):
            run.metrics_known = ALL_KNOWN
        run.lines += _LINE.pack(place, len(line))
        if head.tags or head.params or head.commit:
            run.marks += _marks_of(head)
        if run.is_listed:
            self._add_names(run, "param", (*head.params,))
            self._add_names(run, "metric", (*head.metrics, *head.patterns, *head.directions))

    def _add_names(self, run: IndexedRun, kind: str, names: tuple[str, ...]) -> None:
        known = (run.env, run.project, kind, *names)
        if names and known not in self._columns:
            self._columns.add(known)
            self._column_names.update((run.env, run.project, kind, each) for each in names)

    def _keep(self, run: IndexedRun) -> None:
        identity = run.key or run.job_id
        self._changed[identity] = run
        if run.job_id:
            self._identity_of[run.job_id] = identity

    def _find(self, head: _IndexedFields) -> IndexedRun | None:
        identity = head.key or self._identity_of.get(head.job_id, "")
        if identity in self._changed:
            return self._changed[identity]
        if head.key:
            return self._fetch("key", head.key)
        earlier = self._earlier.get(head.job_id, "") or self._earlier_key(head.job_id)
        return self._fetch("key", earlier) if earlier else self._fetch("job_id", head.job_id)

    def _earlier_key(self, job_id: str) -> str:
        row = self._database.execute(
            "SELECT key FROM earlier_jobs WHERE job_id = ?", (job_id,)
        ).fetchone()
        return str(row[0]) if row else ""

    def _fetch(self, column: str, value: str) -> IndexedRun | None:
        if value in self._changed:
            return self._changed[value]
        if column == "key" and self._seen is not None and not self._seen[hash(value) % _SEEN]:
            return None
        row = self._database.execute(
            f"SELECT {_COLUMNS} FROM runs WHERE {column} = ? AND {column} != '' "
            "ORDER BY place DESC LIMIT 1",
            (value,),
        ).fetchone()
        if row is None:
            return None
        self._keep(IndexedRun(*row))
        self._fetched.add(row[0])
        return self._changed[row[3] or row[4]]

    def _forget(self, env: str) -> None:
        self._write()
        places = "(SELECT place FROM runs WHERE env = ?)"
        self._database.execute(f"DELETE FROM metrics WHERE place IN {places}", (env,))
        self._database.execute("DELETE FROM runs WHERE env = ?", (env,))
        self._database.execute("DELETE FROM column_names WHERE env = ?", (env,))
        self._columns.clear()

    def _write(self) -> None:
        """Write the changed runs into the tables."""
        database = self._database
        database.executemany(_PUT, map(_values, self._changed.values()))
        if self._earlier:
            database.executemany(
                "INSERT OR REPLACE INTO earlier_jobs VALUES (?, ?)", self._earlier.items()
            )
        numbers: dict[str, int] = dict(database.execute("SELECT * FROM metric_names"))
        changed = self._fetched & self._metrics.keys()
        old = [(place, number) for place in changed for number in numbers.values()]
        database.executemany("DELETE FROM metrics WHERE place = ? AND metric = ?", old)
        for name in {name for rows in self._metrics.values() for name in rows} - set(numbers):
            numbers[name] = len(numbers)
            database.execute("INSERT INTO metric_names VALUES (?, ?)", (name, numbers[name]))
        database.executemany(
            "INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)",
            (
                (numbers[name], place, *values)
                for place, rows in self._metrics.items()
                for name, values in rows.items()
            ),
        )
        database.executemany(
            "INSERT OR IGNORE INTO column_names VALUES (?, ?, ?, ?)", self._column_names
        )
        if self._seen is not None:
            for key in self._changed:
                self._seen[hash(key) % _SEEN] = 1
        self._changed, self._identity_of, self._metrics, self._earlier = {}, {}, {}, {}
        self._fetched, self._column_names = set(), set()


def _decode(line: bytes) -> _IndexedFields | None:
    """The fields of a line; None if it cannot be read.

    A line whose other fields have another form, as one of another version, still belongs to its
    run, whose record then cannot be read.
    """
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        head = _IDENTITY.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return _IndexedFields(*_values(head))


def _first(head: _IndexedFields, place: int) -> IndexedRun:
    """The row of a run with the fields that its first line decides."""
    is_usual = head.key and head.job_name == f"{head.name}-{head.key}"
    return IndexedRun(
        place, head.env, head.project, head.key, head.job_id, head.name,
        "" if is_usual else head.job_name, head.gang, "", head.refused, head.fallback,
        int(is_listed(head)), "", 0, "", NOT_READ, b"", b"",
    )  # fmt: skip


def _metric_rows(head: _IndexedFields) -> dict[str, tuple[float | None, ...]]:
    """Last, first, least and greatest value by metric; None for values that are not known.

    For the metrics of children there is one row without values.
    """
    rows: dict[str, tuple[float | None, ...]] = {}
    for name in {**head.metrics, **head.ranges}:
        base = metric_base(name) if ":" in name else name
        span = head.ranges.get(name)
        if base != name or base in rows:
            rows[base] = (None,) * 4
        elif span is None:
            rows[name] = (head.metrics.get(name), None, None, None)
        else:
            rows[name] = (head.metrics.get(name), span.first, span.least, span.greatest)
    return rows


def metric_base(name: str) -> str:
    """The metric of a child's metric: `loss` for `loss:3`; other names are unchanged."""
    base, _, child = name.rpartition(":")
    return base if base and child.isascii() and child.isdecimal() else name


# --- Marks: four bytes for each tag, each parameter and the commit of a run -----------------------
# Two values may have the same mark, so that a run with a mark may match, and one without does not.

_KEY_TAG = "batchml:key"  # every run has another value, which is also its key
_COMMIT_TAG = "batchml:commit"
_ANY = "{"  # stands for values with a placeholder: what a run shows is another value
_COMMIT = 4  # first digits


@lru_cache(maxsize=4096)
def _mark(kind: str, name: str, value: str) -> bytes:
    return crc32(f"{kind}\0{name}\0{value}".encode(errors="replace")).to_bytes(4, "big")


def _marks_of(head: _IndexedFields) -> bytes:
    found = [_mark("tag", *each) for each in head.tags.items() if each[0] != _KEY_TAG]
    found += [_mark("param", name, _value_text(value)) for name, value in head.params.items()]
    if commit := head.commit or head.tags.get(_COMMIT_TAG, ""):
        found.append(_mark("commit", "", commit[:_COMMIT]))
    return b"".join(found)


def _value_text(value: object) -> str:
    """The same text for equal values: 1 is 1.0."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        try:
            return repr(float(value) + 0.0)  # without the sign of -0.0
        except OverflowError:
            return _ANY
    text = str(value)
    return _ANY if "{" in text else text


def marks_to_find(
    tags: Mapping[str, str], params: Mapping[str, str], commit: str
) -> list[list[bytes]]:
    """For each condition the marks of which a run that matches has one or more.

    `params`: values as on a command line. `commit`: four digits or more.
    """
    found = [[_mark("tag", *each)] for each in tags.items() if each[0] != _KEY_TAG]
    for name, text in params.items():
        texts = {text, text.lower(), _ANY}
        with suppress(ValueError):
            texts.add(repr(float(text) + 0.0))
        found.append([_mark("param", name, each) for each in sorted(texts)])
    return [*found, [_mark("commit", "", commit[:_COMMIT])]] if commit else found
