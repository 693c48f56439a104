"""Job output as CloudWatch log streams.

A stream is a file that the attempt's runner appends to, one event a line: the time in ms, a space,
the message. So it can be read while the job runs and while no server does, by `grep` as well; a
position is a byte offset; and there is no second copy that could miss a line. A last line without
its newline is still being written and is not an event yet.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MAX_EVENTS = 10_000  # of one page; CloudWatch Logs, GetLogEvents
MAX_BYTES = 1_048_576  # of one page
_BLOCK = 256 * 1024
_STAMP_DIGITS = 15


class LogEvent(NamedTuple):
    timestamp: int  # ms
    message: str
    start: int  # byte offset of this event
    end: int  # byte offset of the next


class Page(NamedTuple):
    events: list[LogEvent]
    start: int
    end: int


def read_forward(
    path: Path, offset: int, limit: int = MAX_EVENTS, since: int = 0, until: int | None = None
) -> Page:
    """Up to `limit` events from `offset` on, with `since <= timestamp < until`, at most 1 MiB."""
    events: list[LogEvent] = []
    size = 0
    end = offset
    for event in iterate(path, offset):
        if until is not None and event.timestamp >= until:
            break
        if event.timestamp >= since:
            size += event.end - event.start
            if len(events) >= limit or (size > MAX_BYTES and events):
                break
            events.append(event)
        end = event.end
    return Page(events, offset, end)


def read_backward(path: Path, offset: int | None, limit: int = MAX_EVENTS) -> Page:
    """The last `limit` events before `offset` (None: the end), oldest first, at most 1 MiB."""
    if not path.exists():
        return Page([], 0, 0)
    end = _last_newline(path) if offset is None else offset
    start = end
    # The first line of a window may be cut, so the window grows until it holds enough whole ones.
    window = _BLOCK
    while True:
        low = max(0, end - window)
        found = [e for e in iterate(path, low, whole=low == 0) if e.end <= end]
        if len(found) >= limit or low == 0 or (found and window > 2 * MAX_BYTES):
            break
        window *= 4
    size = 0
    kept: list[LogEvent] = []
    for event in reversed(found[-limit:]):
        size += event.end - event.start
        if size > MAX_BYTES and kept:
            break
        kept.append(event)
        start = event.start
    return Page(kept[::-1], start, end)


def iterate(path: Path, offset: int, *, whole: bool = True) -> Iterator[LogEvent]:
    """Events from `offset` on, in memory that does not grow with the file.

    With `whole` false, `offset` may lie within a line, which is passed over.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115  (closed below, once the caller stops)
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        if not whole:
            offset += len(file.readline())
        for line in file:
            if not line.endswith(b"\n"):
                return
            stamp, _, message = line[:-1].partition(b" ")
            end = offset + len(line)
            # An offset that a client made up may lie within a line of digits.
            if stamp.isdigit() and len(stamp) <= _STAMP_DIGITS:
                yield LogEvent(int(stamp), message.decode("utf-8", "replace"), offset, end)
            offset = end


def _last_newline(path: Path) -> int:
    """The end of the last whole line."""
    with open(path, "rb") as file:
        end = file.seek(0, 2)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            place = file.read(end - start).rfind(b"\n")
            if place >= 0:
                return start + place + 1
            end = start
    return 0


def first_and_last(path: Path) -> tuple[int, int] | None:
    """The times of the first and the last event, in ms, or None when there is none."""
    first = next(iter(iterate(path, 0)), None)
    last = read_backward(path, None, 1).events
    return (first.timestamp, last[0].timestamp) if first and last else None


def as_output(event: LogEvent) -> dict[str, Any]:
    """An OutputLogEvent of GetLogEvents."""
    return {
        "timestamp": event.timestamp,
        "message": event.message,
        "ingestionTime": event.timestamp,
    }
