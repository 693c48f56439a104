"""Job output as CloudWatch log streams: the files, and the journal's index of them.

A stream is a file to which the attempt's runner appends one event per line: the time in ms, a
space, the message. A position is a byte offset. The file can be read while the job runs, without a
server, and by programs such as `grep`. A last line without its newline is still being written and
is not an event yet.

The runner never writes decreasing times, so a time is found by bisection. In a file that a job has
changed, events may come in any order, but reading stays bounded.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from batchml.local.batch.events import LogEnd, LogProof
from batchml.local.store.journal import LogStream, open_reader
from batchml.runtime.storage.files import open_regular

MAX_EVENTS = 10_000  # of one page; CloudWatch Logs, GetLogEvents
MAX_BYTES = 1_048_576  # of one page
MAX_SCAN = 8 * 1_048_576  # bytes that one page may read
NO_TIME = -1  # the time of a line that is not an event
_BLOCK = 64 * 1024
_NEAR = 1024  # bytes; a shorter range is read through instead of bisected
_STAMP_DIGITS = 15


class LogEvent(NamedTuple):
    timestamp: int  # ms
    message: str
    start: int  # byte offset of this event
    end: int  # byte offset of the next


class LogFilePage(NamedTuple):
    events: list[LogEvent]
    start: int
    end: int


class StreamLine(NamedTuple):
    """A whole line of a file, not decoded yet: most lines are skipped."""

    timestamp: int  # ms, or NO_TIME
    message: bytes
    start: int
    end: int


def read_forward(
    path: Path, offset: int, limit: int = MAX_EVENTS, since: int = 0, until: int | None = None
) -> LogFilePage:
    """Up to `limit` events from `offset` on, with `since <= timestamp < until`, at most 1 MiB.

    A page ends after `MAX_SCAN` bytes, even if it has fewer events or none then; `end` shows how
    far it has read.
    """
    events: list[LogEvent] = []
    size = 0
    file = _open(path)
    if file is None:
        return LogFilePage(events, offset, offset)
    with file:
        start = max(offset, first_at(file, since)) if since else offset
        end = start
        for line in _lines(file, start):
            if line.timestamp != NO_TIME:
                if until is not None and line.timestamp >= until:
                    break
                size += line.end - line.start
                if len(events) >= limit or (size > MAX_BYTES and events):
                    break
                events.append(as_event(line))
            end = line.end
    return LogFilePage(events, offset, end)


def read_backward(
    path: Path,
    offset: int | None,
    limit: int = MAX_EVENTS,
    since: int = 0,
    until: int | None = None,
) -> LogFilePage:
    """The last `limit` events before `offset` (None: the end), oldest first, at most 1 MiB."""
    file = _open(path)
    if file is None:
        return LogFilePage([], 0, 0)
    with file:
        end = _line_end(file, offset)
        if until is not None:
            end = min(end, first_at(file, until))
        floor = first_at(file, since) if since else 0
        start = end if offset is None else offset
        kept: list[LogEvent] = []
        size = scanned = 0
        for line in _lines_before(file, end, floor):
            scanned += line.end - line.start
            if line.timestamp != NO_TIME:
                size += line.end - line.start
                if len(kept) >= limit or (size > MAX_BYTES and kept):
                    break
                kept.append(as_event(line))
                start = line.start
            elif scanned > MAX_SCAN:
                start = line.start
                break
    return LogFilePage(kept[::-1], start, end)


def first_and_last(path: Path) -> tuple[int, int] | None:
    """The times of the first and the last event, in ms, or None when there is none."""
    file = _open(path)
    if file is None:
        return None
    with file:
        first = _first_event(_lines(file, 0))
        last = _first_event(_lines_before(file, _line_end(file, None), 0))
    return (first.timestamp, last.timestamp) if first and last else None


def first_at(file: BinaryIO, since: int) -> int:
    """The offset of the first event at or after `since`; else the end of the last line."""
    # Events that start below `low` are earlier than `since`, those from `high` on are not.
    low, high = 0, file.seek(0, os.SEEK_END)
    while high - low > _NEAR:
        middle = (low + high) // 2
        event = _first_event(_lines(file, _line_start(file, middle), block=_NEAR))
        if event is None or event.start >= high or event.timestamp >= since:
            high = middle
        else:
            low = event.end
    for line in _lines(file, low, block=_NEAR):
        if line.timestamp >= since:
            return line.start
        low = line.end
    return low


def as_event(line: StreamLine) -> LogEvent:
    return LogEvent(line.timestamp, line.message.decode("utf-8", "replace"), line.start, line.end)


def as_output(event: LogEvent) -> dict[str, Any]:
    """An OutputLogEvent of GetLogEvents."""
    return {
        "timestamp": event.timestamp,
        "message": event.message,
        "ingestionTime": event.timestamp,
    }


class LogCursor:
    """The events of one stream, one after the other; `line` is the current one, None at the end.

    Made for thousands at once: each has one block in memory, and opens its file only to read a
    block.
    """

    def __init__(self, path: str, offset: int, block: int) -> None:
        self._path = path
        self._offset = offset
        self._block = block
        self._ahead: list[bytes] = []  # lines, in reverse order
        self.line: StreamLine | None = None

    def advance(self) -> None:
        """Go to the next whole line, which may have no time."""
        if not self._ahead:
            self._read()
        if not self._ahead:
            self.line = None
            return
        text = self._ahead.pop()
        start = self._offset
        self._offset = start + len(text) + 1
        self.line = _parse(text, start, self._offset)

    def _read(self) -> None:
        file = _open(self._path)
        if file is None:
            return
        with file:
            size = self._block
            while True:
                data = _read_at(file, self._offset, size)
                end = data.rfind(b"\n")
                if end >= 0:
                    self._ahead = data[:end].split(b"\n")[::-1]
                    return
                if len(data) < size or size > MAX_SCAN:
                    return
                size *= 4


def _open(path: Path | str) -> BinaryIO | None:
    try:
        return open_regular(str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _lines(file: BinaryIO, offset: int, block: int = _BLOCK) -> Iterator[StreamLine]:
    """Whole lines from `offset` on, until `MAX_SCAN` bytes have been read."""
    last = offset + MAX_SCAN
    while offset < last:
        data = _read_at(file, offset, block)
        last_newline = data.rfind(b"\n")
        if last_newline < 0:
            if len(data) < block or block > MAX_SCAN:
                return
            block *= 4
            continue
        for text in data[:last_newline].split(b"\n"):
            end = offset + len(text) + 1
            yield _parse(text, offset, end)
            offset = end


def _line_start(file: BinaryIO, offset: int) -> int:
    """The first offset from `offset` on at which a line begins."""
    position = offset - 1
    while True:
        data = _read_at(file, position, _NEAR)
        newline = data.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        if len(data) < _NEAR or position - offset > MAX_SCAN:
            return position + len(data)
        position += len(data)


def _lines_before(file: BinaryIO, end: int, floor: int) -> Iterator[StreamLine]:
    """The lines between the line ends `floor` and `end`, newest first."""
    low = end
    data = b""  # the bytes from `low` to `end`
    size = _BLOCK
    while low > floor:
        step = min(size, low - floor)
        low -= step
        data = _read_at(file, low, step) + data
        cut = 0 if low == floor else data.find(b"\n") + 1
        if low > floor and cut in (0, len(data)):  # no whole line yet
            if size > MAX_SCAN:
                return
            size *= 2
            continue
        for text in reversed(data[cut:-1].split(b"\n")):
            start = end - len(text) - 1
            yield _parse(text, start, end)
            end = start
        data = data[:cut]


def _parse(text: bytes, start: int, end: int) -> StreamLine:
    stamp, _, message = text.partition(b" ")
    # A client's invalid offset may lie within a line of digits.
    if stamp.isdigit() and len(stamp) <= _STAMP_DIGITS:
        return StreamLine(int(stamp), message, start, end)
    return StreamLine(NO_TIME, text, start, end)


def _first_event(lines: Iterator[StreamLine]) -> StreamLine | None:
    scanned = 0
    for line in lines:
        scanned += line.end - line.start
        if line.timestamp != NO_TIME:
            return line
        if scanned > MAX_SCAN:
            break
    return None


def _line_end(file: BinaryIO, offset: int | None) -> int:
    """The end of the last whole line at or before `offset` (None: the end of the file)."""
    size = file.seek(0, os.SEEK_END)
    end = size if offset is None else min(offset, size)
    while end > 0:
        start = max(0, end - _BLOCK)
        position = _read_at(file, start, end - start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
        end = start
    return 0


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    return os.pread(file.fileno(), size, offset)


# --- The index of log streams ---------------------------------------------------------------------

_SELECT_STREAMS = "SELECT log_group, stream, task_id, created_at FROM streams WHERE log_group = ?"
_LAST = "\U0010ffff"
_LOG_END = msgspec.json.Decoder(LogEnd)


class StreamIndex:
    """The log streams in the journal, by name, read by a connection of its own. For one thread,
    which must not be the thread that commits.
    """

    def __init__(self, journal: Path) -> None:
        self._db = open_reader(journal)

    def close(self) -> None:
        self._db.close()

    def one(self, group: str, name: str) -> LogStream | None:
        row = self._db.execute(f"{_SELECT_STREAMS} AND stream = ?", (group, name)).fetchone()
        return None if row is None else LogStream(*row)

    def log_end(self, task_id: str) -> LogEnd | None:
        """The record of a log at its attempt's end; None while the attempt runs."""
        row = self._db.execute("SELECT body FROM log_ends WHERE task_id = ?", (task_id,)).fetchone()
        return None if row is None else _LOG_END.decode(row[0])

    def log_ends(self, streams: Sequence[LogStream]) -> dict[str, LogEnd]:
        """The same of at most a hundred streams, by task id."""
        tasks = [stream.task_id for stream in streams]
        rows = self._db.execute(
            f"SELECT task_id, body FROM log_ends WHERE task_id IN ({_marks(tasks)})", tasks
        )
        return {task_id: _LOG_END.decode(body) for task_id, body in rows}

    def short_logs(self) -> Iterator[tuple[str, LogProof]]:
        """The proofs that contain their logs, by task id."""
        rows = self._db.execute("SELECT task_id, body FROM log_ends WHERE instr(body, '\"text\":')")
        for task_id, body in rows:
            if (proof := _LOG_END.decode(body).proof) is not None:
                yield task_id, proof

    def some(self, group: str, names: Sequence[str]) -> list[LogStream]:
        """Those of at most a hundred streams that exist, in the order of their names here."""
        rows = self._db.execute(
            f"{_SELECT_STREAMS} AND stream IN ({_marks(names)})", (group, *names)
        )
        found = {row[1]: LogStream(*row) for row in rows}
        return [found[name] for name in names if name in found]

    def all(self, group: str, prefix: str = "") -> list[LogStream]:
        """The streams whose names start with `prefix`."""
        rows = self._db.execute(
            f"{_SELECT_STREAMS} AND stream BETWEEN ? AND ? ORDER BY stream",
            (group, prefix, prefix + _LAST),
        )
        return [LogStream(*row) for row in rows]

    def page(
        self, group: str, prefix: str, after: str | None, limit: int, *, descending: bool = False
    ) -> list[LogStream]:
        """The next `limit` streams after the stream `after`, in either direction."""
        low, high = prefix, prefix + _LAST
        beyond = f"AND stream {'<' if descending else '>'} ?" if after is not None else ""
        rows = self._db.execute(
            f"{_SELECT_STREAMS} AND stream BETWEEN ? AND ? {beyond}"
            f" ORDER BY stream {'DESC' if descending else ''} LIMIT ?",
            (group, low, high, *([after] if after is not None else []), limit),
        )
        return [LogStream(*row) for row in rows]

    def groups(self) -> dict[str, int]:
        """Each log group with the time of its first stream, in ms."""
        rows = self._db.execute("SELECT log_group, min(created_at) FROM streams GROUP BY log_group")
        return dict(rows.fetchall())


def _marks(values: Sequence[str]) -> str:
    """The placeholders of so many values in a statement."""
    return ",".join("?" * len(values))
