"""The CloudWatch Logs calls: GetLogEvents, FilterLogEvents, DescribeLogGroups, DescribeLogStreams.

A token of GetLogEvents is a byte offset (`f/1234`, `b/1234`). At the end of a stream the returned
forward token equals the sent one, as in CloudWatch Logs. Every other token is the position of the
last returned item, in the order of the answer.

A thread of its own answers these calls, and each call reads a bounded part of the output, so that
no reader delays the server or another reader for long. A page that ends early has a token.

When an attempt has ended, GetLogEvents compares its log with the proof in the journal. The page
that reaches the end has the result in a header, which AWS's clients ignore. The last page of a
FilterLogEvents that names its streams has a header with the results for small logs.
"""

import asyncio
import heapq
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from batchml.clock import Clock
from batchml.errors import LocalServerError
from batchml.local.batch import reads
from batchml.local.batch.events import LogEnd
from batchml.local.batch.state import ACCOUNT, DEFAULT_LOG_GROUP, REGION
from batchml.local.logs.check import LargeChecks, check_small
from batchml.local.logs.files import (
    MAX_BYTES,
    MAX_EVENTS,
    MAX_SCAN,
    NO_TIME,
    LogCursor,
    LogFilePage,
    StreamIndex,
    StreamLine,
    as_event,
    as_output,
    first_and_last,
    first_at,
    read_backward,
    read_forward,
)
from batchml.local.server.protocol import ApiError
from batchml.local.store.journal import Journal, LogStream
from batchml.model.logcheck import (
    HEADER,
    HEADER_OF_MANY,
    LogCheck,
    LogState,
    to_header_of_many,
)
from batchml.runtime.storage.files import open_regular

# --- Merged streams -------------------------------------------------------------------------------
# FilterLogEvents merges thousands of log streams by time.
#
# The order is (time, stream name, offset in the stream). A `LogPosition` in this order is all that
# the next page needs: each stream continues at its first event behind that position, which is found
# by its time. So each event of a finished stream is returned exactly once. In a stream that still
# grows, or that appears between two pages, events before the position are left out. The next
# listing returns them: clients follow by `startTime`, and drop event ids that they have received.

_BLOCKS = 4 * 1_048_576  # bytes of blocks in memory, of all streams together
_MAX_CACHED = 65_536  # files whose times are cached


class LogPosition(NamedTuple):
    """A position in the merge: all events before it have been read. `offset` is into the named
    stream.
    """

    time: int
    stream: str
    offset: int


class _Times(NamedTuple):
    """The times in a file that had this size."""

    size: int
    span: tuple[int, int] | None  # the times of the first and the last event


class LogFiles:
    """The files of streams, with cached times, which are read again only when a file has grown."""

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        self.path_of = path_of
        self._paths: dict[str, str] = {}
        self._times: dict[str, _Times] = {}

    def path(self, task_id: str) -> str:
        path = self._paths.get(task_id)
        if path is None:
            path = str(self.path_of(task_id))
            if len(self._paths) >= _MAX_CACHED:
                self._paths.clear()
                self._times.clear()
            self._paths[task_id] = path
        return path

    def size(self, task_id: str) -> int:
        """The size of a stream's file; -1 if there is none."""
        try:
            return os.stat(self.path(task_id)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return -1

    def span(self, task_id: str) -> tuple[int, int] | None:
        """The times of a stream's first and last event, or None when it has none."""
        size = self.size(task_id)
        if size < 0:
            return None
        times = self._times.get(task_id)
        if times is None or times.size != size:
            times = self._times[task_id] = _Times(size, first_and_last(Path(self.path(task_id))))
        return times.span


MergedLine = tuple[StreamLine, LogStream, LogPosition]


def merge(
    streams: Iterable[LogStream], files: LogFiles, after: LogPosition
) -> Iterator[MergedLine]:
    """The lines of all streams behind `after`, in order, each with the position behind it.

    A line without a time follows the event before it. A stream's file is opened only when its turn
    comes.
    """
    heap: list[tuple[int, str, LogStream, LogCursor | None]] = []
    for stream in streams:
        span = files.span(stream.task_id)
        if span is not None and span[1] >= after.time:
            heap.append((max(span[0], after.time), stream.name, stream, None))
    heapq.heapify(heap)
    block = min(256 * 1024, max(1024, _BLOCKS // max(1, len(heap))))
    while heap:
        time, name, stream, cursor = heap[0]
        if cursor is None:
            cursor = LogCursor(files.path(stream.task_id), _offset(stream, files, after), block)
        else:
            assert cursor.line is not None
            yield cursor.line, stream, LogPosition(time, name, cursor.line.end)
        cursor.advance()
        while cursor.line is not None and cursor.line.timestamp == NO_TIME:
            yield cursor.line, stream, LogPosition(time, name, cursor.line.end)
            cursor.advance()
        if cursor.line is None:
            heapq.heappop(heap)
        else:
            # Times may go back in a file that a job has changed; the merge must not.
            heapq.heapreplace(heap, (max(time, cursor.line.timestamp), name, stream, cursor))


def _offset(stream: LogStream, files: LogFiles, after: LogPosition) -> int:
    """The offset at which a stream continues behind `after`."""
    if stream.name == after.stream:
        return after.offset
    since = after.time + (stream.name < after.stream)
    span = files.span(stream.task_id)
    if span is None or span[0] >= since:
        return 0
    with open_regular(files.path(stream.task_id)) as file:
        return first_at(file, since)


# --- Calls ----------------------------------------------------------------------------------------

_Count = Annotated[int, Meta(ge=0, le=2**62)]
# Parameters with which FilterLogEvents returns only a part of the logs.
_SELECTING = frozenset({"startTime", "endTime", "filterPattern"})
_POSITION = tuple[_Count, str, _Count]  # the fields of a LogPosition
_KEPT_MERGE = 10.0  # seconds; a client asks for the next page within milliseconds
LogPath = Callable[[str], Path]


class _OpenMerge(NamedTuple):
    """The merge of a page that was not the last one."""

    streams: list[LogStream]
    sizes: list[int]  # of their files
    reached: LogPosition
    first: MergedLine  # behind `reached`
    rest: Iterator[MergedLine]  # behind `first`
    kept_at: float  # on the monotonic clock


class LogAnswer(NamedTuple):
    """The body and the additional headers of an answer."""

    body: dict[str, Any]
    headers: tuple[tuple[str, str], ...] = ()


class LogReads:
    """Answers the calls. `path_of` returns the file of an attempt's output for a task id."""

    def __init__(self, journal: Journal, path_of: LogPath, clock: Clock) -> None:
        self._clock = clock
        self._streams = StreamIndex(journal.path)
        self._files = LogFiles(path_of)
        self._open_merge: _OpenMerge | None = None
        self._thread = ThreadPoolExecutor(1, "logs")
        self._large = LargeChecks()
        self._large_thread = ThreadPoolExecutor(1, "log-checks")

    async def answer(self, operation: str, params: dict[str, Any]) -> LogAnswer:
        """The answer to one of LOG_OPERATIONS. Raises ApiError."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._thread, LOG_OPERATIONS[operation], self, params
            )
        except OSError as error:
            raise LocalServerError(f"A log cannot be read: {error}") from error
        if operation == "FilterLogEvents":
            body, checks = found
            if checks is None:
                return LogAnswer(body)
            return LogAnswer(body, ((HEADER_OF_MANY, to_header_of_many(checks)),))
        if operation != "GetLogEvents":
            return LogAnswer(found)
        body, check = found
        if isinstance(check, _Large):
            check = await loop.run_in_executor(self._large_thread, self._large.check, *check)
        return LogAnswer(body, ((HEADER, check.to_header()),) if check is not None else ())

    def close(self) -> None:
        """Close before the journal: the journal's last connection must be the one that cleans
        up.
        """
        self._large_thread.shutdown(cancel_futures=True)
        self._large.close()
        self._thread.shutdown(cancel_futures=True)
        self._streams.close()

    def get_log_events(
        self, params: dict[str, Any]
    ) -> "tuple[dict[str, Any], LogCheck | _Large | None]":
        """A page of a log, and the result of the log's check."""
        stream = self._streams.one(_group(params), params["logStreamName"])
        if stream is None:
            raise _not_found("The specified log stream does not exist.")
        # Read before the page: if the attempt ends in between, the page may lack the last lines.
        end = self._streams.log_end(stream.task_id)
        path = self._files.path(stream.task_id)
        direction, offset = _direction_and_offset(params)
        page = _read_page(Path(path), direction, offset, params)
        body = {
            "events": [as_output(event) for event in page.events],
            "nextForwardToken": f"f/{page.end}",
            "nextBackwardToken": f"b/{page.start}",
        }
        if end is None or (direction == "b" and offset is not None):
            return body, None
        if direction == "f" and not _is_at_end(path, offset, page.end):
            return body, LogCheck(LogState.UNCHECKED)
        return body, check_small(path, end) or _Large(stream.task_id, path, end)

    def filter_log_events(
        self, params: dict[str, Any]
    ) -> "tuple[dict[str, Any], list[LogCheck | None] | None]":
        """A page of the events of many streams, and for the whole logs of named streams the results
        of their checks, which come with the last page.
        """
        streams = self._select_streams(params)
        # Read before the page, as in `get_log_events`.
        is_whole = bool(params.get("logStreamNames")) and not params.keys() & _SELECTING
        ends = self._streams.log_ends(streams) if is_whole else {}
        matches = _parse_pattern(params.get("filterPattern", ""))
        limit = params.get("limit", MAX_EVENTS)
        since, until = params.get("startTime", 0), params.get("endTime")
        reached = max(LogPosition(since, "", 0), _read_position(params.get("nextToken")))
        events: list[dict[str, Any]] = []
        size = scanned = 0
        sizes = [self._files.size(stream.task_id) for stream in streams]
        first, rest = self._merge(streams, sizes, reached)
        for each in chain(first, rest):
            line, stream, position = each
            if until is not None and position.time >= until:
                break
            length = line.end - line.start
            is_match = line.timestamp != NO_TIME and matches(line.message)
            if (
                len(events) >= limit
                or scanned > MAX_SCAN
                or (is_match and events and size + length > MAX_BYTES)
            ):
                now = self._clock.monotonic()
                self._open_merge = _OpenMerge(streams, sizes, reached, each, rest, now)
                page = {"searchedLogStreams": [], "nextToken": reads.encode_token(reached)}
                return {"events": events, **page}, [] if is_whole else None
            if is_match:
                events.append(_to_filtered_event(line, stream))
                size += length
            scanned += length
            reached = position
        checks = self._check_streams(streams, ends) if is_whole else None
        return {"events": events, "searchedLogStreams": []}, checks

    def _merge(
        self, streams: list[LogStream], sizes: list[int], reached: LogPosition
    ) -> tuple[list[MergedLine], Iterator[MergedLine]]:
        """The lines behind `reached`, in two parts. To open every file again for each page would
        take ever longer the more streams there are, so the merge of the last page goes on where
        nothing has changed.
        """
        last, self._open_merge = self._open_merge, None
        if last is not None and last[:3] == (streams, sizes, reached):
            return [last.first], last.rest
        return [], merge(streams, self._files, reached)

    def forget_old_merge(self) -> None:
        """Free the blocks in memory, some MiB, of a client that has not asked for its next page."""
        last = self._open_merge
        if last is not None and self._clock.monotonic() - last.kept_at > _KEPT_MERGE:
            self._open_merge = None

    def _check_streams(
        self, streams: Iterable[LogStream], ends: Mapping[str, LogEnd]
    ) -> list[LogCheck | None]:
        """The results for logs of ended attempts that are small, also together."""
        found: list[LogCheck | None] = []
        size = 0
        for stream in streams:
            end = ends.get(stream.task_id)
            size += end.proof.size if end is not None and end.proof is not None else 0
            if end is None or size > MAX_SCAN:
                found.append(None)
            else:
                found.append(check_small(self._files.path(stream.task_id), end))
        return found

    def _select_streams(self, params: dict[str, Any]) -> list[LogStream]:
        group = _group(params)
        names = params.get("logStreamNames")
        prefix = params.get("logStreamNamePrefix", "")
        if names and prefix:
            raise _invalid("Give logStreamNames or logStreamNamePrefix, not both.")
        if not names:
            self._check_group(group)
            return self._streams.all(group, prefix)
        streams = self._streams.some(group, list(dict.fromkeys(names)))
        if len(streams) < len(set(names)):
            raise _not_found("The specified log stream does not exist.")
        return streams

    def _check_group(self, group: str) -> None:
        if group != DEFAULT_LOG_GROUP and group not in self._streams.groups():
            raise _not_found("The specified log group does not exist.")

    def describe_log_groups(self, params: dict[str, Any]) -> dict[str, Any]:
        groups = {DEFAULT_LOG_GROUP: 0, **self._streams.groups()}
        prefix = params.get("logGroupNamePrefix", "")
        pattern = params.get("logGroupNamePattern", "")
        after = _read_token(params.get("nextToken"), str)
        names = [
            name
            for name in sorted(groups)
            if name.startswith(prefix) and pattern in name and (after is None or name > after)
        ]
        limit = params.get("limit", 50)
        groups_found = [
            {
                "logGroupName": name,
                "creationTime": groups[name],
                "arn": f"{_group_arn(name)}:*",
                "logGroupArn": _group_arn(name),
                "metricFilterCount": 0,
                "storedBytes": 0,
                "logGroupClass": "STANDARD",
            }
            for name in names[:limit]
        ]
        more = {"nextToken": reads.encode_token(names[limit - 1])} if len(names) > limit else {}
        return {"logGroups": groups_found, **more}

    def describe_log_streams(self, params: dict[str, Any]) -> dict[str, Any]:
        group = _group(params)
        self._check_group(group)
        limit = params.get("limit", 50)
        if params.get("orderBy") == "LastEventTime":
            found, more = self._by_time(group, params, limit)
        else:
            found, more = self._by_name(group, params, limit)
        return {"logStreams": [self._describe(stream) for stream in found], **more}

    def _by_name(
        self, group: str, params: dict[str, Any], limit: int
    ) -> tuple[list[LogStream], dict[str, str]]:
        streams = self._streams.page(
            group,
            params.get("logStreamNamePrefix", ""),
            _read_token(params.get("nextToken"), str),
            limit + 1,
            descending=params.get("descending", False),
        )
        more = (
            {"nextToken": reads.encode_token(streams[limit - 1].name)}
            if len(streams) > limit
            else {}
        )
        return streams[:limit], more

    def _by_time(
        self, group: str, params: dict[str, Any], limit: int
    ) -> tuple[list[LogStream], dict[str, str]]:
        """Streams by their last event. For a stream without events the time is 0."""
        if "logStreamNamePrefix" in params:
            raise _invalid("Cannot order by LastEventTime with a logStreamNamePrefix.")
        after = _read_token(params.get("nextToken"), tuple[_Count, str])
        positions = []
        for stream in self._streams.all(group):
            span = self._files.span(stream.task_id)
            positions.append(((span[1] if span else 0, stream.name), stream))
        descending = params.get("descending", False)
        positions.sort(key=lambda pair: pair[0], reverse=descending)
        if after is not None:
            positions = [
                pair for pair in positions if pair[0] != after and (pair[0] < after) == descending
            ]
        more = {}
        if len(positions) > limit:
            more = {"nextToken": reads.encode_token(positions[limit - 1][0])}
        return [stream for _, stream in positions[:limit]], more

    def _describe(self, stream: LogStream) -> dict[str, Any]:
        detail: dict[str, Any] = {
            "logStreamName": stream.name,
            "creationTime": stream.created_at,
            "arn": f"{_group_arn(stream.log_group)}:log-stream:{stream.name}",
            "storedBytes": 0,
        }
        times = self._files.span(stream.task_id)
        if times:
            detail |= {
                "firstEventTimestamp": times[0],
                "lastEventTimestamp": times[1],
                "lastIngestionTime": times[1],
            }
        return detail


LOG_OPERATIONS: dict[str, Callable[[LogReads, dict[str, Any]], Any]] = {
    "GetLogEvents": LogReads.get_log_events,
    "FilterLogEvents": LogReads.filter_log_events,
    "DescribeLogGroups": LogReads.describe_log_groups,
    "DescribeLogStreams": LogReads.describe_log_streams,
}


class _Large(NamedTuple):
    """A log to be checked in the thread for large logs."""

    task_id: str
    path: str
    end: LogEnd


def _read_page(
    path: Path, direction: str, offset: int | None, params: dict[str, Any]
) -> LogFilePage:
    limit = params.get("limit", MAX_EVENTS)
    since, until = params.get("startTime", 0), params.get("endTime")
    if direction == "f":
        return read_forward(path, offset or 0, limit, since, until)
    return read_backward(path, offset, limit, since, until)


def _is_at_end(path: str, offset: int | None, end: int) -> bool:
    """True for a page from `offset` to `end` that reaches the end of its log."""
    try:
        return end == offset or end >= os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return True


def _to_filtered_event(line: StreamLine, stream: LogStream) -> dict[str, Any]:
    return {
        "logStreamName": stream.name,
        **as_output(as_event(line)),
        # Unique and ordered, as CloudWatch's are.
        "eventId": f"{line.timestamp:020d}{stream.task_id[:16]}{line.start:020d}",
    }


def _group(params: dict[str, Any]) -> str:
    name = params.get("logGroupName") or params.get("logGroupIdentifier")
    if not name:
        raise _invalid("logGroupName must be given.")
    return str(name).rpartition(":log-group:")[2].removesuffix(":*")


def _group_arn(name: str) -> str:
    return f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:{name}"


def _direction_and_offset(params: dict[str, Any]) -> tuple[str, int | None]:
    """The direction of GetLogEvents, f or b, and the offset to read from; None: the end."""
    token = params.get("nextToken")
    if not token:
        return ("f", 0) if params.get("startFromHead") else ("b", None)
    match = re.fullmatch(r"([fb])/(\d{1,18})", token)
    if not match:
        raise _invalid("The specified nextToken is invalid.")
    return match[1], int(match[2])


def _parse_pattern(text: str) -> Callable[[bytes], bool]:
    """A test for messages that match a plain pattern of CloudWatch Logs: they contain all terms, at
    least one of the terms `?term`, and none of the terms `-term`.
    """
    if text.lstrip().startswith(("{", "[", "%")):
        raise _invalid("Only plain terms are served in filterPattern, not JSON, fields or regex.")
    try:
        terms = shlex.split(text)
    except ValueError:
        raise _invalid("filterPattern has an open quotation mark.") from None
    words = [term.encode() for term in terms if term]
    every = [word for word in words if word[:1] not in b"?-"]
    some = [word[1:] for word in words if word[:1] == b"?"]
    none = [word[1:] for word in words if word[:1] == b"-"]

    def matches(message: bytes) -> bool:
        return (
            all(word in message for word in every)
            and (not some or any(word in message for word in some))
            and not any(word in message for word in none)
        )

    return matches


def _read_position(token: str | None) -> LogPosition:
    fields = _read_token(token, _POSITION)
    return LogPosition(0, "", 0) if fields is None else LogPosition(*fields)


def _read_token(token: str | None, kind: Any) -> Any:
    if not token:
        return None
    try:
        return reads.decode_token(token, kind)
    except ValueError:
        raise _invalid("The specified nextToken is invalid.") from None


def _invalid(text: str) -> ApiError:
    return ApiError("InvalidParameterException", text)


def _not_found(text: str) -> ApiError:
    return ApiError("ResourceNotFoundException", text)
