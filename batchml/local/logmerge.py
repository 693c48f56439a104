"""Thousands of log streams as one, by time: what FilterLogEvents reads.

The order is (time, stream name, place in the stream), and a `Place` in it is all that a next page
needs: every stream is taken up again at its first event behind that place, which is found by its
time. So each event of a finished stream comes exactly once. In a stream that still grows, or that
appears between two pages, an event is left out when its time lies before the place; it comes in
the next listing, which is how clients follow: by `startTime`, dropping event ids that they know.
"""

import heapq
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from batchml.local.logstore import NO_TIME, Cursor, Line, first_and_last, first_at
from batchml.local.store import Stream
from batchml.runtime.storage.files import open_regular

_BLOCKS = 4 * 1_048_576  # bytes of blocks in memory, of all streams together
_MOST_KNOWN = 65_536  # files whose times are kept in mind


class Place(NamedTuple):
    """In the merge: all before it has been read. `offset` is into the stream that is named."""

    time: int
    stream: str
    offset: int


class _Times(NamedTuple):
    size: int
    span: tuple[int, int] | None  # the times of the first and the last event


class LogFiles:
    """The files of streams, and what is known of their times: asked again only when they grow."""

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        self.path_of = path_of
        self._paths: dict[str, str] = {}
        self._times: dict[str, _Times] = {}

    def path(self, task_id: str) -> str:
        path = self._paths.get(task_id)
        if path is None:
            path = str(self.path_of(task_id))
            if len(self._paths) >= _MOST_KNOWN:
                self._paths.clear()
                self._times.clear()
            self._paths[task_id] = path
        return path

    def span(self, task_id: str) -> tuple[int, int] | None:
        """The times of a stream's first and last event, or None when it has none."""
        path = self.path(task_id)
        try:
            size = os.stat(path).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        known = self._times.get(task_id)
        if known is None or known.size != size:
            known = self._times[task_id] = _Times(size, first_and_last(Path(path)))
        return known.span


def merge(
    streams: Iterable[Stream], files: LogFiles, after: Place
) -> Iterator[tuple[Line, Stream, Place]]:
    """The lines of all streams behind `after`, in order, each with the place behind it.

    A line without a time comes right behind the event before it. A stream's file is first opened
    when its turn comes.
    """
    heap: list[tuple[int, str, Stream, Cursor | None]] = []
    for stream in streams:
        span = files.span(stream.task_id)
        if span is not None and span[1] >= after.time:
            heap.append((max(span[0], after.time), stream.name, stream, None))
    heapq.heapify(heap)
    block = min(256 * 1024, max(1024, _BLOCKS // max(1, len(heap))))
    while heap:
        time, name, stream, cursor = heap[0]
        if cursor is None:
            cursor = Cursor(files.path(stream.task_id), _offset(stream, files, after), block)
        else:
            assert cursor.line is not None
            yield cursor.line, stream, Place(time, name, cursor.line.end)
        cursor.advance()
        while cursor.line is not None and cursor.line.timestamp == NO_TIME:
            yield cursor.line, stream, Place(time, name, cursor.line.end)
            cursor.advance()
        if cursor.line is None:
            heapq.heappop(heap)
        else:
            # A time that has gone back, in a file that a job has spoilt, must not lead back.
            heapq.heapreplace(heap, (max(time, cursor.line.timestamp), name, stream, cursor))


def _offset(stream: Stream, files: LogFiles, after: Place) -> int:
    """Where a stream goes on behind `after`."""
    if stream.name == after.stream:
        return after.offset
    wanted = after.time + (stream.name < after.stream)
    span = files.span(stream.task_id)
    if span is None or span[0] >= wanted:
        return 0
    with open_regular(files.path(stream.task_id)) as file:
        return first_at(file, wanted)
