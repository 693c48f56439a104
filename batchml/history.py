"""The history: submissions of this machine, in one file of lines to which lines are only added.

A run has one line before it is sent, one with its job id (or the reason why it has none), and one
when its end was seen. They are reduced by the run's key; lines of the first version have no key and
are reduced by their job id. A torn line of a killed client is skipped. A line may also say that an
environment is forgotten: lines before it do not count.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from batchml.errors import StateDamaged
from batchml.model.run import Record, Run, RunName, classify
from batchml.runtime.storage.files import sync_folder

TAIL = 512 * 1024  # bytes: some hundreds of the newest runs


class History:
    """The file at `path`. Its folder exists and is private to the user."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def intend(self, *records: Record) -> None:
        """Keep an intent to submit. On return it is on disk.

        Raises OSError; then nothing may be sent.
        """
        self._append(map(_line, records), durable=True)

    def add(self, record: Record) -> None:
        """Keep a run that was submitted."""
        self._append([_line(record)])

    def add_job_id(self, key: str, job_id: str) -> None:
        self._add(key=key, job_id=job_id)

    def add_refusal(self, key: str, why: str) -> None:
        """Keep that the submission has left no run."""
        self._add(key=key, refused=why or "refused")

    def add_end(
        self, run: Run, metrics: Mapping[str, float] | None = None, cost: float | None = None
    ) -> None:
        """Keep the outcome of a run; nothing for a run that goes on, or for a child or node.

        `metrics` are the last value of each, from the whole log; None where the log was not read.
        """
        self._keep_ends([end_record(run, metrics, cost)] if _is_kept(run) else [])

    def add_ends(self, runs: Iterable[Run]) -> None:
        """`add_end` for several whose logs were not read."""
        self._keep_ends([end_record(run) for run in runs if _is_kept(run)])

    def add_lost(self, job_ids: Iterable[str]) -> None:
        """Keep that AWS Batch does not know these jobs any more."""
        self._keep_ends([Record(job_id=job_id, lost=True) for job_id in job_ids])

    def add_starts(self, starts: Mapping[str, int]) -> None:
        """Keep the start times of arrays, which AWS Batch returns for children only; in ms."""
        self._keep_ends([Record(job_id=each, started_at=at) for each, at in starts.items()])

    def forget(self, env: str) -> None:
        """Forget all runs that were submitted to an environment so far."""
        if self.path.exists():
            self._add(forgotten=env)

    def unconfirmed(self, env: str) -> list[Record]:
        """Submissions whose outcome is unknown; the oldest first."""
        return [
            record
            for run in _runs(self._lines())
            if run.env == env and not run.job_id and not run.refused
            if (record := run.read()) and record.is_open
        ]

    def newest_first(self, env: str | None = None) -> list[Record]:
        """The runs submitted to an environment, or to all; with refused ones."""
        return _of(env, self._lines())

    def recent(self, env: str | None = None) -> list[Record]:
        """The newest few hundred runs: read from the file's end, however long it is."""
        return _of(env, self._lines(TAIL))

    def names(self, env: str) -> list[RunName]:
        """The names of the runs of `newest_first`, without the other fields, which take long to
        read.
        """
        return [run.name() for run in reversed(_runs(self._lines())) if run.env == env]

    def records(self, env: str | None = None) -> "HistoryRecords":
        """The runs of `newest_first` that have a job id; each is decoded when it is used."""
        return HistoryRecords(run for run in _runs(self._lines()) if env is None or run.env == env)

    def _keep_ends(self, ends: list[Record]) -> None:
        if ends and self.path.parent.is_dir():  # reading creates no state folder
            self._append(map(_line, ends))

    def _add(self, **values: Any) -> None:
        self._append([_line(values)])

    def _append(self, lines: Iterable[bytes], durable: bool = False) -> None:
        data = b"".join(line + b"\n" for line in lines)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            if not size:  # before the first line, so that an existing line implies it
                sync_folder(str(self.path.parent))  # its name survives a power cut, too
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data  # the last writer was killed: begin a new line
            while data:
                data = data[os.write(descriptor, data) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _lines(self, last: int | None = None) -> list[bytes]:
        """Every line, or those that begin in the last `last` bytes."""
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if last is None or size <= last:
                    return file.read().splitlines()
                file.seek(size - last)
                return file.read().splitlines()[1:]  # the first may be the rest of a line
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StateDamaged(
                f"The history {self.path} cannot be read: {error.strerror}. It holds the names "
                f"and parameters of what was submitted from here, not the runs themselves. Make it "
                f"readable, or move it away; batchml goes on then."
            ) from error


def _line(what: Any) -> bytes:
    """One line of JSON. Lone surrogates become "?"."""
    try:
        return msgspec.json.encode(what)
    except UnicodeEncodeError:
        return msgspec.json.encode(_as_text(msgspec.to_builtins(what)))


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_as_text(name): _as_text(each) for name, each in value.items()}
    return [_as_text(each) for each in value] if isinstance(value, list | tuple) else value


class _Head(RunName, frozen=True, gc=False):
    """The part of a line that identifies its run; the rest is skipped."""

    env: str = ""
    forgotten: str = ""


class _Lines(Struct, gc=False):
    """The lines of one run, and the fields that are known without decoding them whole."""

    head: _Head
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
            head.fallback,
        )  # fmt: skip

    def add(self, head: _Head, line: bytes) -> None:
        if head.moved:  # the run goes on as another job: the end of the first job is not its end
            self.moved, self.refused, self.lines = head.moved, "", []
        elif self.moved and head.job_id == self.moved:
            return
        self.job_id = head.job_id or self.job_id
        self.refused = head.refused or self.refused
        self.lines.append(line)

    def read(self) -> Record | None:
        """The record that the lines add up to: of a field in two lines, the later value counts."""
        members = b",".join(body for line in self.lines if (body := line.strip()[1:-1].strip()))
        try:
            return _RECORD.decode(b"{" + members + b"}")
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None  # of another version, or damaged


_HEAD = msgspec.json.Decoder(_Head)
_RECORD = msgspec.json.Decoder(Record)


def _runs(lines: Iterable[bytes]) -> list[_Lines]:
    """The lines by run, in the order of each run's first line.

    Other lines, and lines of a run without a first line, are skipped.
    """
    found: dict[str, _Lines] = {}
    key_of: dict[str, str] = {}  # job id -> key, for lines that know only the id
    for line in lines:
        try:
            head = _HEAD.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if head.forgotten:
            found = {name: run for name, run in found.items() if run.env != head.forgotten}
            continue
        if head.key and head.job_id:
            key_of[head.job_id] = head.key
        name = head.key or key_of.get(head.job_id, head.job_id)
        run = found.get(name)
        if run is not None:
            run.add(head, line)
        elif head.env and name:
            found[name] = _Lines(head, head.job_id, head.refused, [line])
    return list(found.values())


def _of(env: str | None, lines: Iterable[bytes]) -> list[Record]:
    """The records of these lines, the newest first."""
    chosen = [run for run in _runs(lines) if env is None or run.env == env]
    return [record for run in reversed(chosen) if (record := run.read())]


class HistoryRecords:
    """Runs by their job ids, the newest first. A run is decoded when it is used, and once."""

    def __init__(self, runs: Iterable[_Lines]) -> None:
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


def _is_kept(run: Run) -> bool:
    return run.status.is_terminal and ":" not in run.job_id and "#" not in run.job_id


def end_record(
    run: Run, metrics: Mapping[str, float] | None = None, cost: float | None = None
) -> Record:
    """The fields of a record that describe a run's end."""
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
        measured=metrics is not None,
        cost=cost,
    )
