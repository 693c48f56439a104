"""What goes on in queues now, in few calls: runs that have not ended, and what they use.

Sources: AWS Batch API Reference, ListJobs (`jobQueue` with `jobStatus`); CloudWatch Logs API
Reference, FilterLogEvents (up to 100 streams a call).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from batchml.aws.failures import translated
from batchml.aws.responses import to_summary
from batchml.aws.session import Session
from batchml.errors import ServiceError
from batchml.model.run import Run
from batchml.model.status import JobStatus

LIVE = tuple(status for status in JobStatus if not status.is_terminal)
_MAX_STREAMS = 100  # of one FilterLogEvents
USAGE, RANKS = "usage", "ranks"  # kinds of marks
_MARK = "::batchml "  # how our runtime begins a line that is for its clients


class Mark(NamedTuple):
    """A line of our runtime's in a log; `at` in ms since the epoch."""

    stream: str
    at: int
    message: str


class LiveApi:
    """`calls` counts what was asked of AWS."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.calls = 0

    def runs(self, queue: str, status: JobStatus) -> list[Run]:
        """Every run of a queue in a state, as far as ListJobs tells; a thousand a call."""
        found: list[Run] = []
        with translated("ListJobs"):
            pages = self._session.client("batch").get_paginator("list_jobs")
            for page in pages.paginate(jobQueue=queue, jobStatus=status.value):
                self.calls += 1
                found += [to_summary(summary, queue) for summary in page["jobSummaryList"]]
        return found

    def marked(
        self, group: str, streams: Sequence[str], since: int, kinds: Sequence[str] = (USAGE,)
    ) -> Iterator[Mark]:
        """What our runtime said of some kinds since a time, in ms; by time."""
        any_of = "?" if len(kinds) > 1 else ""
        pattern = " ".join(f'{any_of}"{_MARK}{kind}"' for kind in kinds)
        return self.matching(group, streams, since, pattern)

    def matching(
        self,
        group: str,
        streams: Sequence[str],
        since: int,
        pattern: str,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Iterator[Mark]:
        """Lines by a filter pattern of CloudWatch Logs, for as long as `goes_on`.

        Of a long log many answers are empty.
        """
        for start in range(0, len(streams), _MAX_STREAMS):
            some = streams[start : start + _MAX_STREAMS]
            try:
                yield from self._matching(group, some, since, pattern, goes_on)
            except ServiceError as error:
                if error.code != "ResourceNotFoundException":  # a stream that nobody wrote to yet
                    raise

    def _matching(
        self,
        group: str,
        streams: Sequence[str],
        since: int,
        pattern: str,
        goes_on: Callable[[], bool],
    ) -> Iterator[Mark]:
        with translated("FilterLogEvents"):
            pages = self._session.client("logs").get_paginator("filter_log_events")
            for page in pages.paginate(
                logGroupName=group,
                logStreamNames=list(streams),
                startTime=since,
                filterPattern=pattern,
            ):
                self.calls += 1
                for event in page["events"]:
                    yield Mark(event["logStreamName"], event["timestamp"], event["message"])
                if not goes_on():
                    return
