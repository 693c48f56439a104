"""Read the events of log streams of CloudWatch Logs: in order, each exactly once.

Sources: CloudWatch Logs API Reference, GetLogEvents, FilterLogEvents (up to 100 streams a call; its
events are sorted by their time, and by the time and the call with which they came).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from batchml.aws.errors import call
from batchml.aws.session import Session
from batchml.errors import ServiceError
from batchml.model.logcheck import (
    HEADER,
    HEADER_OF_MANY,
    LogCheck,
    parse_header,
    parse_header_of_many,
)

MAX_STREAMS = 100  # in one FilterLogEvents


class LogLine(NamedTuple):
    """An event of a log stream."""

    timestamp: int  # ms since the epoch
    message: str


class LogPage(NamedTuple):
    """The answer of one call."""

    lines: list[LogLine]
    caught_up: bool  # whether the stream has no more lines now
    missing: str = ""  # "group" or "stream" if that does not exist
    check: LogCheck | None = None  # only from the embedded server, after the attempt's end

    def is_end(self, has_end_mark: bool) -> bool:
        """Whether to stop reading. `has_end_mark`: the log's end mark was read."""
        if self.check is not None:
            return self.check.is_final
        return self.caught_up or has_end_mark


class StreamReader:
    """Reads a stream from its start, or from `since` (ms since the epoch).

    The position is CloudWatch's token and not a time, because several lines can have the same
    timestamp. A token is valid for 24 hours. After that, reading continues at the last timestamp,
    without the lines of that timestamp that were read before.
    """

    def __init__(
        self,
        session: Callable[[], Session],
        group: str,
        stream: str,
        since: int | None = None,
    ) -> None:
        self._session = session  # called for each page: after an outage it may return a new one
        self.group = group
        self.stream = stream
        self._since = since
        self._start = since  # the start time of calls: a token is only valid with its start time
        self.missing = ""  # "group" or "stream" if that did not exist at the last call
        self.check: LogCheck | None = None  # the embedded server's check of the log
        self._token: str | None = None
        self._last = 0  # the greatest timestamp read
        self._at_last: Counter[str] = Counter()  # messages with that timestamp
        self._to_skip: Counter[str] = Counter()  # messages with that timestamp to leave out

    def restart(self, since: int | None = None) -> "StreamReader":
        """Return a new reader of the same stream, from `since` or from this reader's start."""
        start = self._since if since is None else since
        return StreamReader(self._session, self.group, self.stream, start)

    def read(self) -> Iterator[LogLine]:
        """Yield new lines until the stream has no more.

        A page before the end may be empty: only an unchanged token means that the reader has caught
        up. A stream that does not exist yet has no lines.
        """
        while True:
            page = self.read_page()
            yield from page.lines
            if page.caught_up:
                return

    def read_page(self) -> LogPage:
        """Read the next lines in one call."""
        arguments: dict[str, Any] = {"startFromHead": True}
        if self._token is not None:
            arguments["nextToken"] = self._token
        if self._start:
            arguments["startTime"] = self._start
        try:
            page = self._ask(**arguments)
        except ServiceError as error:
            if self._is_missing(error):
                return LogPage([], True, self.missing)
            if error.code != "InvalidParameterException" or self._token is None:
                raise
            self._resume()
            return LogPage([], False)
        self.missing = ""
        events, token = _lines(page), page["nextForwardToken"]
        caught_up = token == self._token and not self._is_unchecked
        self._token = token
        return LogPage(self._without_repeats(events), caught_up, check=self.check)

    @property
    def _is_unchecked(self) -> bool:
        return self.check is not None and not self.check.is_final

    def finish_check(self) -> None:
        """Make the embedded server check the rest of a large log that was read backwards."""
        while self._is_unchecked:
            self._ask(limit=1)

    def read_backwards(self) -> Iterator[LogLine]:
        """Yield the present lines, the newest first, without moving the position of `read`."""
        token: str | None = None
        while True:
            arguments: dict[str, Any] = {"nextToken": token} if token else {}
            if self._since:
                arguments["startTime"] = self._since
            try:
                page = self._ask(**arguments)
            except ServiceError as error:
                if self._is_missing(error):
                    return
                raise
            yield from reversed(_lines(page))
            if page["nextBackwardToken"] == token:
                return
            token = page["nextBackwardToken"]

    @staticmethod
    def together(readers: "Sequence[StreamReader]") -> "StreamsReader":
        """A reader of the same streams, from their start. They have one group and session."""
        first = readers[0]
        return StreamsReader(first._session, first.group, [each.stream for each in readers])

    def _is_missing(self, error: ServiceError) -> bool:
        if error.code != "ResourceNotFoundException":
            return False
        self.missing = "group" if "log group" in error.message else "stream"
        return True

    def _resume(self) -> None:
        """Continue at the last timestamp, because the token is too old."""
        self._token = None
        self._start = self._last or self._since
        self._to_skip = self._at_last.copy()

    def _without_repeats(self, lines: list[LogLine]) -> list[LogLine]:
        """The lines of a page without those that were read before the token was too old."""
        if self._to_skip:
            lines = [line for line in lines if not self._was_read(line)]
        last = max((line.timestamp for line in lines), default=0)
        if last > self._last:
            self._last, self._at_last = last, Counter()
            self._to_skip.clear()
        self._at_last.update(line.message for line in lines if line.timestamp == self._last)
        return lines

    def _was_read(self, line: LogLine) -> bool:
        if line.timestamp != self._last or self._to_skip[line.message] <= 0:
            return False
        self._to_skip[line.message] -= 1
        return True

    def _ask(self, **arguments: Any) -> dict[str, Any]:
        names = {"logGroupName": self.group, "logStreamName": self.stream}
        page = call(self._session().client("logs"), "GetLogEvents", **names, **arguments)
        headers = page.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        self.check = parse_header(headers.get(HEADER)) or self.check
        return page


class StreamsReader:
    """Reads short streams whole, up to `MAX_STREAMS` in one call a page.

    Whether a log is whole is for its reader to prove: by its end mark, or by the check of the
    embedded server, which is only there for a complete log.
    """

    def __init__(self, session: Callable[[], Session], group: str, streams: Sequence[str]) -> None:
        self._session = session
        self._request: dict[str, Any] = {"logGroupName": group, "logStreamNames": list(streams)}
        self._lines: dict[str, list[LogLine]] = {stream: [] for stream in streams}
        self._checks: list[LogCheck | None] | None = None

    def read_page(self) -> bool:
        """Read the next events of all streams in one call; True if there were no more.

        Raises ServiceError, with the code ResourceNotFoundException if one of the streams does not
        exist.
        """
        page = call(self._session().client("logs"), "FilterLogEvents", **self._request)
        for event in page["events"]:
            line = LogLine(event["timestamp"], event["message"])
            self._lines[event["logStreamName"]].append(line)
        headers = page.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        self._checks = parse_header_of_many(headers.get(HEADER_OF_MANY))
        self._request["nextToken"] = page.get("nextToken")
        return not self._request["nextToken"]

    def pages(self) -> dict[str, LogPage]:
        """What was read, by stream; without the logs that the embedded server does not prove."""
        if self._checks is None:
            return {stream: LogPage(lines, True) for stream, lines in self._lines.items()}
        proven = zip(self._lines.items(), self._checks, strict=False)
        return {
            stream: LogPage(lines, True, check=check)
            for (stream, lines), check in proven
            if check is not None
        }


def _lines(page: dict[str, Any]) -> list[LogLine]:
    return [LogLine(event["timestamp"], event["message"]) for event in page["events"]]
