"""Log events of a stream, in order, none lost and none twice."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from batchml.aws.failures import translated
from batchml.aws.session import Session
from batchml.errors import ServiceError


class LogLine(NamedTuple):
    timestamp: int  # ms
    message: str


class StreamReader:
    """Reads a stream from its start. `read` gives what has come since the last call.

    A position is CloudWatch's own token, never a time: lines that share a millisecond stay apart.
    """

    def __init__(self, session: Callable[[], Session], group: str, stream: str) -> None:
        self._session = session  # asked for each page: it may be a new one after a lost contact
        self._group = group
        self.stream = stream
        self._token: str | None = None

    def read(self) -> Iterator[LogLine]:
        """Yield new lines until there is nothing more for now.

        A page may be empty before the end; only a token that comes back unchanged says "caught
        up". A stream that is not there yet has no lines.
        """
        while True:
            page = self._page()
            if page is None:
                return
            for event in page["events"]:
                yield LogLine(event["timestamp"], event["message"])
            caught_up = page["nextForwardToken"] == self._token
            self._token = page["nextForwardToken"]
            if caught_up:
                return

    def _page(self) -> dict[str, Any] | None:
        arguments: dict[str, Any] = {
            "logGroupName": self._group,
            "logStreamName": self.stream,
            "startFromHead": True,
        }
        if self._token is not None:
            arguments["nextToken"] = self._token
        try:
            with translated("GetLogEvents"):
                page = self._session().client("logs").get_log_events(**arguments)
                return {key: page[key] for key in ("events", "nextForwardToken")}
        except ServiceError as error:
            if error.code == "ResourceNotFoundException":
                return None
            raise
