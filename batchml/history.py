"""The history: the runs that this machine submitted, in a file of JSON lines that only grows.

A run has a line before it is sent, a line with its job id (or the reason why it has none), and a
line when its end was read. The lines with the same key together are the record of the run; lines of
the first version have no key, but a job id. The torn line of a killed client is skipped. A line can
also forget an environment: its lines before that do not count.
"""

import fcntl
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from batchml.errors import StateDamaged
from batchml.model.run import MetricRange, Record, Run, RunName, classify
from batchml.runtime.storage.files import sync_path

TAIL = 512 * 1024  # bytes: some hundreds of the newest runs
_COMPARED = 256  # bytes before the new lines, which tell whether the file has only grown


class History:
    """The file at `path`. Its folder exists and is private to the user."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._part: _ReadPart | None = None

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
        return [
            record
            for run in self._runs()
            if run.env == env and not run.job_id and not run.refused
            if (record := run.read()) and record.is_open
        ]

    def newest_first(self, env: str | None = None) -> list[Record]:
        """All submissions to an environment, or to all environments, and refused submissions."""
        return _newest_first(env, self._runs())

    def recent(self, env: str | None = None) -> list[Record]:
        """The newest few hundred records of `newest_first`, without reading the whole file."""
        return _newest_first(env, _group_by_run(self._lines(TAIL)))

    def names(self, env: str) -> list[RunName]:
        """The names of the runs of `newest_first`. To decode all fields would take longer."""
        return [run.name() for run in reversed(self._runs()) if run.env == env]

    def projects(self) -> list[str]:
        """The projects of all runs, those of the newest runs first."""
        runs = reversed(self._runs())
        return list(dict.fromkeys(run.head.project for run in runs if run.head.project))

    def records(self, env: str | None = None) -> "HistoryRecords":
        """The records of `newest_first` that have a job id. Each is decoded when it is used."""
        return HistoryRecords(run for run in self._runs() if env is None or run.env == env)

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

    def _runs(self) -> "list[_RunLines]":
        """The lines of all runs. Only lines that are new since the last call are read.

        The file only grows, unless somebody edits it: then its inode or its size differs, or the
        bytes before the new ones, and all of it is read again.
        """
        with self._lock, self._opened() as file:
            if file is None:
                return []
            inode, known = os.fstat(file.fileno()).st_ino, self._part
            if known is not None and known.inode == inode:
                file.seek(known.size - len(known.tail))
                if file.read(len(known.tail)) != known.tail:
                    known = None
            else:
                known = None
            if known is None:
                known = _ReadPart(_RunGroups(), inode, 0, b"")
                file.seek(0)
            data = file.read()
            known.groups.add(data.splitlines())
            known.size += len(data)
            known.tail = (known.tail + data)[-_COMPARED:]
            # A line that is not whole yet is read again when it is.
            self._part = known if known.tail.endswith(b"\n") else None
            return known.groups.runs()

    def _lines(self, last: int) -> list[bytes]:
        """The lines that begin in the last `last` bytes of the file."""
        with self._opened() as file:
            if file is None:
                return []
            size = os.fstat(file.fileno()).st_size
            if size <= last:
                return file.read().splitlines()
            file.seek(size - last)
            return file.read().splitlines()[1:]  # the first may be the rest of a line

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO | None]:
        """The file, or None if there is none. Raises StateDamaged."""
        try:
            with open(self.path, "rb") as file:
                yield file
        except FileNotFoundError:
            yield None
        except OSError as error:
            raise StateDamaged(
                f"The history {self.path} cannot be read: {error.strerror}. It has the names and "
                "parameters of the runs that this machine submitted, not the runs themselves. Make "
                "it readable or move it away, then repeat the command."
            ) from error


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


class _LineFields(RunName, frozen=True, gc=False):
    """The fields of a line that identify its run; the decoder skips the other fields."""

    env: str = ""
    forgotten: str = ""


class _RunLines(Struct, gc=False):
    """The lines of one run, and the fields of `_LineFields` of all of them together."""

    head: _LineFields
    job_id: str
    refused: str
    lines: list[bytes]
    moved: str = ""

    @property
    def env(self) -> str:
        return self.head.env

    def name(self) -> RunName:
        head = self.head
        return RunName(
            head.key, self.job_id, head.name, head.job_name, self.refused, head.gang, self.moved,
            head.fallback, head.project, head.tags,
        )  # fmt: skip

    def add(self, head: _LineFields, line: bytes) -> None:
        if head.moved:  # the run continues as another job, so the first job's end is not its end
            self.moved, self.refused, self.lines = head.moved, "", []
        elif self.moved and head.job_id == self.moved:
            return
        self.job_id = head.job_id or self.job_id
        self.refused = head.refused or self.refused
        self.lines.append(line)

    def read(self) -> Record | None:
        """Decode the record of the lines: if two lines have a field, the later value counts."""
        members = b",".join(body for line in self.lines if (body := line.strip()[1:-1].strip()))
        try:
            return _RECORD.decode(b"{" + members + b"}")
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None  # damaged, or of another version


_HEAD = msgspec.json.Decoder(_LineFields)
_RECORD = msgspec.json.Decoder(Record)


class _RunGroups:
    """Lines grouped by run, in the order of each run's first line.

    Lines that cannot be read, and lines of a run without a first line, are skipped.
    """

    def __init__(self) -> None:
        self._found: dict[str, _RunLines] = {}
        self._key_of: dict[str, str] = {}  # job id -> key, for lines that have only the job id

    def add(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            try:
                head = _HEAD.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if head.forgotten:
                self._found = {
                    each: run for each, run in self._found.items() if run.env != head.forgotten
                }
                continue
            if head.key and head.job_id:
                self._key_of[head.job_id] = head.key
            identity = head.key or self._key_of.get(head.job_id, head.job_id)
            run = self._found.get(identity)
            if run is not None:
                run.add(head, line)
            elif head.env and identity:
                self._found[identity] = _RunLines(head, head.job_id, head.refused, [line])

    def runs(self) -> list[_RunLines]:
        return list(self._found.values())


def _group_by_run(lines: Iterable[bytes]) -> list[_RunLines]:
    groups = _RunGroups()
    groups.add(lines)
    return groups.runs()


class _ReadPart(Struct, gc=False):
    """The part of the file that was read: its groups, its size, and its last bytes."""

    groups: _RunGroups
    inode: int
    size: int
    tail: bytes


def _newest_first(env: str | None, runs: Iterable[_RunLines]) -> list[Record]:
    """The records of these runs, the newest first."""
    chosen = [run for run in runs if env is None or run.env == env]
    return [record for run in reversed(chosen) if (record := run.read())]


class HistoryRecords:
    """Records by job id, the newest first. Each is decoded once, when it is first used."""

    def __init__(self, runs: Iterable[_RunLines]) -> None:
        self._lines = {run.job_id: run for run in runs if run.job_id}
        self._read: dict[str, Record | None] = {}

    def get(self, job_id: str) -> Record | None:
        if job_id not in self._read:
            lines = self._lines.get(job_id)
            self._read[job_id] = lines.read() if lines else None
        return self._read[job_id]

    def __iter__(self) -> Iterator[Record]:
        for job_id in reversed(self._lines):
            record = self.get(job_id)
            if record is not None:
                yield record


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
