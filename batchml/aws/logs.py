"""Log events of a stream, in order, none lost and none twice."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from batchml.aws.errors import translated
from batchml.aws.session import Session
from batchml.errors import ServiceError
from batchml.model.logcheck import HEADER, LogCheck, read_header


class LogLine(NamedTuple):
    timestamp: int  # ms
    message: str


class Page(NamedTuple):
    """What one call brought. `missing` says what is not there: "", "group" or "stream".

    `check` comes from the embedded server alone, once the attempt has ended.
    """

    lines: list[LogLine]
    caught_up: bool  # there is nothing more for now
    missing: str = ""
    check: LogCheck | None = None

    def is_end(self, is_promised: bool) -> bool:
        """Whether to read no more for now; `is_promised` says that the log's end mark is met."""
        if self.check is not None:
            return self.check.is_final
        return self.caught_up or is_promised


class StreamReader:
    """Reads a stream from its start, or from `since` (ms since the epoch).

    A position is CloudWatch's own token, never a time: lines that share a millisecond stay apart.
    Where a token is not taken any more, which lives for 24 hours, reading goes on at the last
    timestamp without the lines of it that were seen.
    """

    def __init__(
        self,
        session: Callable[[], Session],
        group: str,
        stream: str,
        since: int | None = None,
    ) -> None:
        self._session = session  # asked for each page: it may be a new one after a lost contact
        self.group = group
        self.stream = stream
        self._since = since
        self._start = since  # of the calls now: a token goes with what it was made for
        self.missing = ""  # what was not there at the last call: "", "group" or "stream"
        self.check: LogCheck | None = None  # how the embedded server found the log
        self._token: str | None = None
        self._last = 0  # the greatest timestamp seen
        self._at_last: Counter[str] = Counter()  # messages with that timestamp
        self._to_skip: Counter[str] = Counter()

    def again(self, since: int | None = None) -> "StreamReader":
        """A reader of the same stream, from `since` or from where this one began."""
        start = self._since if since is None else since
        return StreamReader(self._session, self.group, self.stream, start)

    def read(self) -> Iterator[LogLine]:
        """Yield new lines until there is nothing more for now.

        A page may be empty before the end; only a token that comes back unchanged says "caught
        up". A stream that is not there yet has no lines.
        """
        while True:
            page = self.page()
            yield from page.lines
            if page.caught_up:
                return

    def page(self) -> Page:
        """The lines of one call. They count as seen: to call it again gives the next ones."""
        try:
            found = self._call()
        except ServiceError as error:
            if self._is_missing(error):
                return Page([], True, self.missing)
            if error.code != "InvalidParameterException" or self._token is None:
                raise
            self._resume()
            return Page([], False)
        self.missing = ""
        events, token = found
        caught_up = token == self._token and not self._is_unchecked
        self._token = token
        return Page(self._new(events), caught_up, check=self.check)

    @property
    def _is_unchecked(self) -> bool:
        return self.check is not None and not self.check.is_final

    def finish_check(self) -> None:
        """After a reading backwards: have the rest of a large log checked."""
        while self._is_unchecked:
            self._ask(limit=1)

    def backwards(self) -> Iterator[LogLine]:
        """Yield what there is now, the newest line first; independent of where `read` is."""
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

    def _is_missing(self, error: ServiceError) -> bool:
        if error.code != "ResourceNotFoundException":
            return False
        self.missing = "group" if "log group" in error.message else "stream"
        return True

    def _resume(self) -> None:
        """The token is too old: the next page begins at the last timestamp."""
        self._token = None
        self._start = self._last or self._since
        self._to_skip = self._at_last.copy()

    def _new(self, lines: list[LogLine]) -> list[LogLine]:
        """Of a page those that were not seen before the token was too old."""
        if self._to_skip:
            lines = [line for line in lines if not self._was_seen(line)]
        last = max((line.timestamp for line in lines), default=0)
        if last > self._last:
            self._last, self._at_last = last, Counter()
            self._to_skip.clear()
        self._at_last.update(line.message for line in lines if line.timestamp == self._last)
        return lines

    def _was_seen(self, line: LogLine) -> bool:
        if line.timestamp != self._last or self._to_skip[line.message] <= 0:
            return False
        self._to_skip[line.message] -= 1
        return True

    def _call(self) -> tuple[list[LogLine], str]:
        arguments: dict[str, Any] = {"startFromHead": True}
        if self._token is not None:
            arguments["nextToken"] = self._token
        if self._start:
            arguments["startTime"] = self._start
        page = self._ask(**arguments)
        return _lines(page), page["nextForwardToken"]

    def _ask(self, **arguments: Any) -> dict[str, Any]:
        with translated("GetLogEvents"):
            page = (
                self._session()
                .client("logs")
                .get_log_events(logGroupName=self.group, logStreamName=self.stream, **arguments)
            )
            headers = page.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            self.check = read_header(headers.get(HEADER)) or self.check
            members = ("events", "nextForwardToken", "nextBackwardToken")
            return {name: page[name] for name in members}


def _lines(page: dict[str, Any]) -> list[LogLine]:
    return [LogLine(event["timestamp"], event["message"]) for event in page["events"]]
