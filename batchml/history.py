"""The history: the runs that this machine submitted, in a file of JSON lines that only grows.

A run has a line before it is sent, a line with its job id (or the reason why it has none), and a
line when its end was read. The lines with the same key together are the record of the run; lines of
the first version have no key, but a job id. The torn line of a killed client is skipped. A line can
also forget an environment: its lines before that do not count. `history_index` finds the lines of a
run.
"""

import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.clock import Clock
from batchml.errors import StateDamaged
from batchml.model.run import MetricRange, Record, Run, RunName, classify
from batchml.runtime.storage.files import sync_path

_RECENT = 500  # runs
_MOST_ALIKE = 300  # runs of one name
_MOST = 1024 * 1024  # bytes of a line

# The index has the runs in the order of environment and project: each step seeks the next pair.
_PROJECTS = """
    WITH RECURSIVE envs (env) AS (
        SELECT min(env) FROM runs UNION ALL
        SELECT (SELECT min(env) FROM runs WHERE env > envs.env) FROM envs WHERE env IS NOT NULL
    ), pairs (env, project) AS (
        SELECT env, '' FROM envs WHERE env IS NOT NULL UNION ALL
        SELECT env, (
            SELECT min(project) FROM runs WHERE env = pairs.env AND project > pairs.project
        ) FROM pairs WHERE project IS NOT NULL
    )
    SELECT project FROM pairs WHERE project != '' GROUP BY project ORDER BY max(
        (SELECT max(place) FROM runs WHERE env = pairs.env AND project = pairs.project)
    ) DESC
"""

if TYPE_CHECKING:
    from batchml.history_index import IndexedRun, RunIndex

    _Rows = Iterator[IndexedRun]


class History:
    """The file at `path`. Its folder exists and is private to the user.

    `report` gets the number of bytes that the index has taken in, and of all bytes. Its errors are
    ignored; it must not read the history, which waits for its end.
    """

    def __init__(self, path: Path, report: Callable[[int, int], None] = lambda *_: None) -> None:
        self.path = path
        self._report = report
        self._lock = threading.RLock()
        self._index: RunIndex | None = None

    @property
    def size(self) -> int:
        """Bytes of the file; 0 if there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def intend(self, *records: Record) -> None:
        """Write records of runs that are about to be submitted. On return they are on disk.

        Raises OSError; then no request may be sent.
        """
        self._append(map(_to_json_line, records), durable=True)

    def add(self, record: Record) -> None:
        """Write the record of a submitted run."""
        self._append([_to_json_line(record)])

    def add_job_id(self, key: str, job_id: str) -> None:
        """Write that the submission has made this job."""
        self._add(key=key, job_id=job_id)

    def add_refusal(self, key: str, why: str) -> None:
        """Write that the submission made no job, and the reason."""
        self._add(key=key, refused=why or "refused")

    def add_end(
        self,
        run: Run,
        metrics: Mapping[str, float] | None = None,
        cost: float | None = None,
        ranges: Mapping[str, MetricRange] | None = None,
    ) -> None:
        """Write the end of a run. A run that has not ended, a child and a node are ignored.

        `metrics` has the last value of each metric in the whole log, `ranges` the first, least and
        greatest; None if the log was not read.
        """
        self._append_observed([end_record(run, metrics, cost, ranges)] if _has_end(run) else [])

    def add_ends(self, runs: Iterable[Run]) -> None:
        """Call `add_end` for runs whose logs were not read."""
        self._append_observed([end_record(run) for run in runs if _has_end(run)])

    def add_lost(self, job_ids: Iterable[str]) -> None:
        """Write that AWS Batch has forgotten these jobs."""
        self._append_observed([Record(job_id=job_id, lost=True) for job_id in job_ids])

    def add_starts(self, starts: Mapping[str, int]) -> None:
        """Write the start times of arrays, in ms by job id: AWS Batch has none for arrays."""
        self._append_observed([Record(job_id=each, started_at=at) for each, at in starts.items()])

    def forget(self, env: str) -> None:
        """Forget all runs that were submitted to an environment so far."""
        if self.path.exists():
            self._add(forgotten=env)

    def unconfirmed(self, env: str) -> list[Record]:
        """The submissions that may or may not have reached AWS, the oldest first."""
        history = self._opened()
        rows = history.find("env = ? AND job_id = '' AND refused = ''", [env], "unconfirmed")
        return [record for record in history.records(rows) if record.is_open][::-1]

    def newest_first(self, env: str | None = None) -> list[Record]:
        """All submissions to an environment, or to all environments, and refused submissions."""
        history = self._opened()
        return list(history.records(history.walk(_scope(env), "1")))

    def since(self, env: str, at: int) -> Iterator[Record]:
        """The records of `newest_first` whose submission was at a time (ms) or later."""
        history = self._opened()
        return history.records(history.find("env = ? AND at >= ?", [env, at]))

    def recent(self, env: str | None = None) -> list[Record]:
        """The newest few hundred records of `newest_first`."""
        history = self._opened()
        return list(islice(history.records(history.walk(_scope(env), "1")), _RECENT))

    def names(self, env: str) -> "HistoryNames":
        """The names of the runs of `newest_first`. Each is read when it is used."""
        return HistoryNames(self._opened(), env)

    def group(self, env: str, key: str) -> list[RunName]:
        """The run with this key, and the workers of which it is the head."""
        history = self._opened()
        rows = history.find(
            """+env = ? AND place IN (
                SELECT place FROM runs WHERE key != '' AND key = ?
                UNION SELECT place FROM runs WHERE gang != '' AND gang = ?
            )""",
            [env, key, key],
        )
        return list(history.names(rows))

    def projects(self) -> list[str]:
        """The projects of all runs, those of the newest runs first."""
        return [project for (project,) in self._opened().query(_PROJECTS)]

    def metric_names(self, env: str) -> set[str]:
        """The names of the metrics of the runs of an environment; of children without a number."""
        rows = self._opened().query(
            "SELECT name FROM metric_names WHERE EXISTS (SELECT 1 FROM metrics m JOIN runs r"
            " ON r.place = m.place WHERE m.metric = number AND r.env = ?)",
            [env],
        )
        return {name for (name,) in rows}

    def column_names(self, env: str, project: str = "") -> dict[str, set[str]]:
        """The names of parameters ("param") and metrics ("metric") of the runs that `ls` lists.

        Metrics also of patterns of `job.toml`, and of children: `loss:3`. `project`: "" for all.
        """
        found: dict[str, set[str]] = {"param": set(), "metric": set()}
        for kind, name in self._opened().query(
            "SELECT kind, name FROM column_names WHERE env = ? AND ? IN ('', project)",
            (env, project),
        ):
            found[kind].add(name)
        return found

    def records(self, env: str | None = None) -> "HistoryRecords":
        """The records of `newest_first` that have a job id. Each is decoded when it is used."""
        return HistoryRecords(self._opened(), env)

    def find(self, env: str, job_id: str) -> Record | None:
        """The record of a run of an environment; None if it was not submitted from here."""
        return self.records(env).get(job_id)

    def _opened(self) -> "_OpenHistory":
        """The file and its index, which takes in new lines first. Raises StateDamaged."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return _OpenHistory(None, None)
        except OSError as error:
            raise self._unreadable(error) from error
        with self._lock:
            if self._index is None:
                # Imported late: a program that only submits needs no database.
                from batchml.history_index import RunIndex

                self._index = RunIndex(self.path, self._report)
            history = _OpenHistory(descriptor, self._index)
            try:
                self._index.take_in(descriptor)
            except OSError as error:
                raise self._unreadable(error) from error
        return history

    def _unreadable(self, error: OSError) -> StateDamaged:
        return StateDamaged(
            f"The history {self.path} cannot be read: {error.strerror}. It has the names and "
            "parameters of the runs that this machine submitted, not the runs themselves. Make "
            "it readable or move it away, then repeat the command."
        )

    def _append_observed(self, records: list[Record]) -> None:
        """Write what AWS Batch has answered. This creates no state folder."""
        if records and self.path.parent.is_dir():
            self._append(map(_to_json_line, records))

    def _add(self, **values: Any) -> None:
        self._append([_to_json_line(values)])

    def _append(self, lines: Iterable[bytes], durable: bool = False) -> None:
        data = b"".join(line + b"\n" for line in lines)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            if not size:  # before the first line, so that the file of any line survives a power cut
                sync_path(str(self.path.parent))
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data  # the last writer was killed: begin a new line
            while data:
                data = data[os.write(descriptor, data) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _to_json_line(value: Any) -> bytes:
    """One line of JSON. Lone surrogates become "?"."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_replace_surrogates(msgspec.to_builtins(value)))


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {
            _replace_surrogates(name): _replace_surrogates(each) for name, each in value.items()
        }
    return (
        [_replace_surrogates(each) for each in value] if isinstance(value, list | tuple) else value
    )


_NAME = msgspec.json.Decoder(RunName)
_RECORD = msgspec.json.Decoder(Record)


def _decode_record(lines: Iterable[bytes]) -> Record | None:
    """The record of a run's lines: if two lines have a field, the later value counts."""
    members = b",".join(body for line in lines if (body := line.strip()[1:-1].strip()))
    try:
        return _RECORD.decode(b"{" + members + b"}")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # damaged, or of another version


class _OpenHistory:
    """The open file with an index that has all its lines; both None if there is no file."""

    def __init__(self, descriptor: int | None, index: "RunIndex | None") -> None:
        self._descriptor = descriptor
        self._index = index

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def walk(
        self,
        scope: Mapping[str, str],
        condition: str,
        values: Sequence[Any] = (),
        *,
        by_place: bool = False,
    ) -> "_Rows":
        """The runs for which an SQL condition holds, the newest first; see `RunIndex.walk`."""
        if self._index is None:
            return iter(())
        return self._index.walk(scope, condition, values, by_place=by_place)

    def find(self, condition: str, values: Sequence[Any] = (), by: str = "") -> "_Rows":
        return self._index.find(condition, values, by) if self._index else iter(())

    def query(self, text: str, values: Sequence[Any] = ()) -> list[Any]:
        return self._index.query(text, values) if self._index else []

    def records(self, rows: "_Rows") -> Iterator[Record]:
        return (record for row in rows if (record := self.record(row)) is not None)

    def record(self, row: "IndexedRun") -> Record | None:
        return _decode_record(self._read(place, size) for place, size in row.spans())

    def names(self, rows: "_Rows") -> Iterator[RunName]:
        return map(self._name, rows)

    def _name(self, row: "IndexedRun") -> RunName:
        first = next((size for place, size in row.spans() if place == row.place), None)
        line = self._read(row.place, first or _MOST).partition(b"\n")[0]
        try:
            head = _NAME.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):  # the file was edited a moment ago
            head = RunName(row.key, name=row.name, project=row.project)
        return replace(head, job_id=row.job_id, refused=row.refused, moved=row.moved)

    def _read(self, place: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, place) if self._descriptor is not None else b""


class IndexNotice:
    """Says that the index takes in a long history: after a second, then every ten."""

    def __init__(self, clock: Clock, tell: Callable[[str], None]) -> None:
        self._clock = clock
        self._tell = tell
        self._next = 0.0

    def __call__(self, read: int, size: int) -> None:
        now = self._clock.monotonic()
        if not read:
            self._next = now + 1.0
        elif now >= self._next and read < size:
            self._next = now + 10.0
            self._tell(f"Making the index of the history: {read / size:.0%} of {size >> 20} MiB")


class HistoryNames:
    """The names of an environment's runs, the newest first."""

    def __init__(self, history: _OpenHistory, env: str) -> None:
        self._history = history
        self._env = env

    def __iter__(self) -> Iterator[RunName]:
        return self._history.names(self._history.walk(_scope(self._env), "1"))

    def named(self, word: str, project: str = "") -> list[RunName]:
        """The runs that have this key or name, or a job id that begins so.

        Of a name, the newest of the project and of no project, and one of other projects; without
        `project` the newest of all.
        """
        start, end = word.lower(), f"{word.lower()}\U0010ffff"
        key = word.rpartition("-")[2]  # of a name in AWS
        alike = "SELECT place FROM runs INDEXED BY by_name WHERE env = ? AND name = ?"
        newest = f"{alike} %s LIMIT {_MOST_ALIKE}"
        by_name = [(newest % "ORDER BY place DESC", [self._env, word])]
        if project:
            of_project = newest % "AND project = ? ORDER BY place DESC"
            by_name = [(of_project, [self._env, word, each]) for each in (project, "")]
            values = [self._env, word, project]
            by_name += [
                (f"{alike} AND project {sign} ? AND project != '' LIMIT 1", values) for sign in "<>"
            ]
        parts = [
            ("SELECT place FROM runs WHERE key != '' AND key IN (?, ?)", [word, key]),
            ("SELECT place FROM runs WHERE job_name != '' AND job_name = ?", [word]),
            ("SELECT place FROM runs WHERE job_id != '' AND job_id BETWEEN ? AND ?", [start, end]),
            ("SELECT place FROM runs WHERE moved != '' AND moved BETWEEN ? AND ?", [start, end]),
            *((f"SELECT place FROM ({text})", values) for text, values in by_name),
        ]
        rows = self._history.find(
            f"+env = ? AND place IN ({' UNION '.join(text for text, _ in parts)})",
            [self._env, *(value for _, values in parts for value in values)],
        )
        return list(self._history.names(rows))

    def newest(self, project: str, count: int) -> list[RunName]:
        """The newest `count` runs of a project, "" for all, that `ls` lists and that were sent."""
        condition = "is_listed AND (job_id != '' OR refused = '')"
        rows = self._history.walk(_scope(self._env, project), condition)
        return list(islice(self._history.names(rows), count))


class MetricBound(NamedTuple):
    """A condition for one of several values of a metric; `columns` of the index's `metrics`."""

    name: str
    columns: tuple[str, ...]
    sign: str
    bound: float

    def to_sql(self) -> tuple[str, list[Any]]:
        """The condition, also true of runs whose metrics have to be read."""
        least_known = 2 if self.columns != ("last",) else 1
        holds = " OR ".join(f"{each} IS NULL OR {each} {self.sign} ?" for each in self.columns)
        text = f"""place IN (
            SELECT place FROM runs WHERE metrics_known < 2 AND status != 'lost'
                AND metrics_known < {least_known}
            UNION ALL SELECT place FROM metrics WHERE ({holds})
                AND metric = (SELECT number FROM metric_names WHERE name = ?)
        )"""
        return text, [*(self.bound for _ in self.columns), self.name]


class RunQuery(Struct, frozen=True):
    """Runs with a job id; a field with its default matches all. Some runs may not match.

    `statuses`: of AWS Batch, of runs whose end is known. Runs that have moved match all of them.
    `params`: values as on a command line. Runs whose end is not known match all tags, parameters
    and commits, and those of sweeps all parameters if they are `with_sweeps`.
    """

    project: str = ""
    queue: str = ""
    name: str = ""
    since: int = 0
    statuses: frozenset[str] = frozenset()
    metrics: tuple[MetricBound, ...] = ()
    tags: dict[str, str] = {}
    params: dict[str, str] = {}
    commit: str = ""
    with_sweeps: bool = False

    @property
    def is_of_places(self) -> bool:
        """Whether the condition has a list of the places of the runs that may match."""
        return bool(self.metrics) or (bool(self.statuses) and not self._ends)

    @property
    def _ends(self) -> list[str]:
        return [each for each in ("SUCCEEDED", "FAILED") if each in self.statuses]

    def to_sql(self) -> tuple[str, list[Any]]:
        """The condition for all fields but the project."""
        parts, values = ["job_id != ''"], list[Any]()
        if self.since:
            parts.append("at >= ?")
            values.append(self.since)
        if self.queue:
            parts.append("(queue = ? OR moved != '')")
            values.append(self.queue)
        if self.name:
            parts.append("(name = ? OR key = ? OR substr(job_name, 1, length(?)) = ?)")
            values += [self.name, self.name.rpartition("-")[2], self.name, self.name]
        if self.statuses:
            marks = ", ".join("?" * len(self._ends))
            parts.append(
                f"(status IN ('', {marks}) OR moved != '')"
                if self._ends
                else "place IN (SELECT place FROM runs WHERE status = ''"
                " UNION ALL SELECT place FROM runs WHERE moved != '')"
            )
            values += self._ends
        for bound in self.metrics:
            text, needed = bound.to_sql()
            parts.append(text)
            values += needed
        for some in self._marks():
            others = "OR NOT is_listed" if self.with_sweeps else ""
            has_one = " OR ".join(["instr(marks, ?)"] * len(some))
            parts.append(f"(status = '' OR moved != '' {others} OR {has_one})")
            values += some
        return " AND ".join(parts), values

    def _marks(self) -> list[list[bytes]]:
        if not (self.tags or self.params or self.commit):
            return []
        from batchml.history_index import marks_to_find  # late, as in `History`

        return marks_to_find(self.tags, self.params, self.commit)


class HistoryRecords:
    """Records by job id, the newest first. Each is decoded when it is used."""

    def __init__(self, history: _OpenHistory, env: str | None) -> None:
        self._history = history
        self._env = env

    def get(self, job_id: str) -> Record | None:
        condition, values = "job_id != '' AND job_id = ?", [job_id]
        if self._env is not None:
            condition, values = f"{condition} AND +env = ?", [job_id, self._env]
        row = next(self._history.find(condition, values), None)
        return self._history.record(row) if row else None

    def __iter__(self) -> Iterator[Record]:
        return self.matching(RunQuery())

    def matching(self, query: RunQuery) -> Iterator[Record]:
        """The records that match, the newest first, and perhaps some that do not."""
        scope = _scope(self._env, query.project)
        rows = self._history.walk(scope, *query.to_sql(), by_place=query.is_of_places)
        return self._history.records(rows)

    def nth_value(self, query: RunQuery, metric: MetricBound, number: int) -> float | None:
        """The value of a metric that so many of the runs that may match reach, as the index knows.

        `metric`: one column, with the sign ">=" for the greatest values, "<=" for the least. None
        if fewer runs have a value.
        """
        (column,), (condition, values) = metric.columns, query.to_sql()
        scope = _scope(self._env, query.project)
        parts = [*(f"{name} = ?" for name in scope), f"({condition})", f"{column} IS NOT NULL"]
        parts += [] if query.with_sweeps else ["is_listed"]
        rows = self._history.query(
            f"SELECT {column} FROM metrics CROSS JOIN runs USING (place)"
            " WHERE metric = (SELECT number FROM metric_names WHERE name = ?)"
            f" AND {' AND '.join(parts)}"
            f" ORDER BY {column} {'DESC' if metric.sign == '>=' else ''} LIMIT 1 OFFSET ?",
            (metric.name, *scope.values(), *values, number - 1),
        )
        return rows[0][0] if rows else None

    def of_others(self, query: RunQuery) -> dict[str, int]:
        """The number of runs that match and that `ls` lists, by project, of other projects."""
        condition, values = query.to_sql()
        found = dict[str, int]()
        for sign in "<>":
            found |= self._history.query(
                "SELECT project, count(*) FROM runs INDEXED BY by_project WHERE env = ?"
                f" AND project {sign} ? AND is_listed AND {condition} GROUP BY project",
                (self._env, query.project, *values),
            )
        return found


def _scope(env: str | None, project: str = "") -> dict[str, str]:
    """The scope for `RunIndex.walk`. A project needs an environment."""
    return {} if env is None else {"env": env, **({"project": project} if project else {})}


def _has_end(run: Run) -> bool:
    """Whether the history keeps the end of this job: not of children (ID:3) and nodes (ID#3)."""
    return run.status.is_terminal and ":" not in run.job_id and "#" not in run.job_id


def end_record(
    run: Run,
    metrics: Mapping[str, float] | None = None,
    cost: float | None = None,
    ranges: Mapping[str, MetricRange] | None = None,
) -> Record:
    """Make a record with the end of a run."""
    return Record(
        key=run.key,
        job_id=run.job_id,
        status=run.status.value,
        outcome=classify(run).outcome.value,
        exit_code=run.exit_code,
        reason=run.status_reason,
        container_reason=run.reason,
        created_at=run.created_at,
        started_at=run.started_at,
        stopped_at=run.stopped_at,
        attempts=run.attempts,
        max_attempts=run.max_attempts,
        children=run.children,
        failures=run.failures,
        log_group=run.log_group,
        # JSON has neither NaN nor infinity, and a line that holds them cannot be read.
        metrics={name: value for name, value in (metrics or {}).items() if isfinite(value)},
        ranges=dict(ranges or {}),
        measured=metrics is not None,
        cost=cost,
    )
