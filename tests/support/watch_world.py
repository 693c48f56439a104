"""A scripted AWS for followers: CloudWatch Logs that is late, busy, forgetful and out of order.

The clock is the test's. A token is a place in the stream as it is sorted, as CloudWatch's is: what
is taken in later and lies before that place is not given to who goes on from there.
"""

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, cast

from botocore.exceptions import ClientError, EndpointConnectionError
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.logs import StreamReader
from batchml.aws.session import Session
from batchml.errors import AccessError, ServiceUnreachable
from batchml.model.run import Attempt, JobStatus, Run
from batchml.runtime.protocol.log_marks import end_mark
from tests.support.fakes import FakeClock


class Event(Struct, frozen=True):
    timestamp: int  # ms
    number: int  # among those of one timestamp, as CloudWatch orders them
    message: str
    visible_at: float  # seconds


class Try(Struct, frozen=True):
    """One attempt; seconds on the world's clock."""

    stream: str
    start: float
    stop: float
    exit_code: int | None
    lines: tuple[str, ...]
    events: tuple[Event, ...]
    created_at: float  # when the stream is there


class Trouble(Struct, frozen=True):
    """How likely each is, of each call; the longest `late` is in seconds."""

    throttled: float = 0.0
    unreachable: float = 0.0
    empty: float = 0.0
    late: float = 0.0
    shuffled: bool = False
    token_life: float = 86_400.0
    page: int = 10_000
    lag: float = 0.0  # DescribeJobs tells how things were so long ago
    signed_out: tuple[float, float] = (0.0, 0.0)  # from, until


CALM = Trouble()


class Job(Struct, frozen=True):
    """One part of a run: what it is at any time follows from its tries."""

    job_id: str
    tries: tuple[Try, ...]

    def run(self, now: float, **more: Any) -> Run:
        over = [each for each in self.tries if each.stop <= now]
        begun = [each for each in self.tries if each.start <= now]
        attempts = tuple(
            Attempt(
                started_at=_ms(each.start),
                stopped_at=_ms(each.stop) if each in over else None,
                exit_code=each.exit_code if each in over else None,
                log_stream=each.stream,
            )
            for each in begun
        )
        status = JobStatus.RUNNING if len(begun) > len(over) else JobStatus.RUNNABLE
        stopped_at = exit_code = None
        if len(over) == len(self.tries):
            exit_code = self.tries[-1].exit_code
            status = JobStatus.FAILED if exit_code else JobStatus.SUCCEEDED
            stopped_at = _ms(self.tries[-1].stop)
        return Run(
            self.job_id, "n", "q", status, attempts=attempts, stopped_at=stopped_at,
            exit_code=exit_code, **more,
        )  # fmt: skip

    @property
    def end(self) -> float:
        return self.tries[-1].stop


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


class World:
    """`jobs` are the parts of run "j": one of its own id, or children, or nodes."""

    def __init__(
        self, jobs: Sequence[Job], trouble: Trouble, random: Random, sep: str = ""
    ) -> None:
        self.clock = FakeClock()
        self.jobs = {job.job_id: job for job in jobs}
        self.calls: list[tuple[str, float]] = []
        self._trouble = trouble
        self._random = random
        self._sep = sep
        self._streams = {each.stream: each for job in jobs for each in job.tries}
        self._nonce = 0
        self._was_in = False  # who never was is told at once

    # --- AWS Batch ----------------------------------------------------------------------------

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        assert 0 < len(job_ids) <= 100
        self.calls.append(("DescribeJobs", self.clock.time))
        self._maybe_fail("DescribeJobs")
        now = self.clock.time - self._trouble.lag
        found = {job_id: self._describe(job_id, now) for job_id in job_ids}
        return {job_id: run for job_id, run in found.items() if run is not None}

    def _describe(self, job_id: str, now: float) -> Run | None:
        if job_id in self.jobs:
            found = self.jobs[job_id].run(now)
            if self._sep == "#" and found.attempts and found.attempts[-1].stopped_at is not None:
                # A node has ended, whether its job runs it again or not.
                return (
                    found
                    if found.status.is_terminal
                    else replace(found, status=JobStatus.FAILED, exit_code=1)
                )
            return found
        if job_id != "j" or not self._sep:
            return None
        parts = [job.run(now) for job in self.jobs.values()]
        failed = any(part.status is JobStatus.FAILED for part in parts)
        over = all(part.status.is_terminal for part in parts)
        status = JobStatus.PENDING if self._sep == ":" else JobStatus.RUNNING
        if over:
            status = JobStatus.FAILED if failed else JobStatus.SUCCEEDED
        if self._sep == "#":
            return Run("j", "n", "q", status, nodes=len(parts))
        counts: dict[str, int] = {}
        for part in parts:
            counts[part.status] = counts.get(part.status, 0) + 1
        return Run("j", "n", "q", status, array_size=len(parts), children=counts)

    # --- CloudWatch Logs ----------------------------------------------------------------------

    def open_log(self, run: Run, stream: str) -> StreamReader:
        return StreamReader(lambda: cast(Session, self), run.log_group, stream)

    def client(self, service: str) -> "World":
        assert service == "logs"
        return self

    def get_log_events(
        self,
        logStreamName: str,
        startFromHead: bool = False,
        nextToken: str | None = None,
        startTime: int = 0,
        **_: Any,
    ) -> dict[str, Any]:
        now = self.clock.time
        self.calls.append(("GetLogEvents", now))
        self._maybe_fail("GetLogEvents")
        stream = self._streams[logStreamName]
        if stream.created_at > now:
            raise _refusal("ResourceNotFoundException", "The specified log stream does not exist.")
        assert startFromHead
        place = self._place(nextToken)
        visible = sorted(
            (event.timestamp, event.number, event.message)
            for event in stream.events
            if event.visible_at <= now and event.timestamp >= startTime
        )
        new = [event for event in visible if event[:2] > place]
        page = new[: self._trouble.page]
        if new and self._random.random() < self._trouble.empty:
            page = []
        if page:
            place = page[-1][:2]
        token = nextToken
        if new or nextToken is None:
            self._nonce += 1
            token = f"f/{now}/{place[0]}/{place[1]}/{self._nonce}"
        return {
            "events": [{"timestamp": at, "message": message} for at, _, message in page],
            "nextForwardToken": token,
            "nextBackwardToken": "b/0",
        }

    def filter_log_events(
        self, logStreamNames: list[str], nextToken: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """All streams by time; a page may be empty, and what is late lies behind its token."""
        now = self.clock.time
        self.calls.append(("FilterLogEvents", now))
        self._maybe_fail("FilterLogEvents")
        assert 0 < len(logStreamNames) <= 100
        if any(self._streams[name].created_at > now for name in logStreamNames):
            raise _refusal("ResourceNotFoundException", "The specified log stream does not exist.")
        time, place_in, after = (nextToken or "-1/0/").split("/", 2)
        place = (int(time), after, int(place_in))
        new = sorted(
            (event.timestamp, name, event.number, event.message)
            for name in logStreamNames
            for event in self._streams[name].events
            if event.visible_at <= now and (event.timestamp, name, event.number) > place
        )
        page = new[: self._trouble.page]
        if new and self._random.random() < self._trouble.empty:
            page = []
        found: dict[str, Any] = {
            "events": [
                {"timestamp": at, "message": message, "logStreamName": name}
                for at, name, _, message in page
            ]
        }
        if len(page) < len(new):
            at, name, number = page[-1][:3] if page else place
            found["nextToken"] = f"{at}/{number}/{name}"
        return found

    def _place(self, token: str | None) -> tuple[int, int]:
        if token is None:
            return (-1, 0)
        _, issued, timestamp, number, _ = token.split("/")
        if self.clock.time - float(issued) > self._trouble.token_life:
            raise _refusal("InvalidParameterException", "The specified nextToken has expired.")
        return int(timestamp), int(number)

    def _maybe_fail(self, operation: str) -> None:
        signed_out = self._trouble.signed_out
        if self._was_in and signed_out[0] <= self.clock.time < signed_out[1]:
            if operation == "DescribeJobs":
                raise AccessError("signed out", code="ExpiredTokenException")
            raise _refusal("ExpiredTokenException", "signed out")
        drawn = self._random.random()
        if drawn < self._trouble.throttled:
            if operation == "DescribeJobs":
                raise ServiceUnreachable("too busy")
            raise _refusal("ThrottlingException", "Rate exceeded")
        if drawn < self._trouble.throttled + self._trouble.unreachable:
            if operation == "DescribeJobs":
                raise ServiceUnreachable("gone")
            raise EndpointConnectionError(endpoint_url="https://logs")
        self._was_in = True


def _refusal(code: str, message: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "GetLogEvents")


def attempt(
    stream: str,
    start: float,
    lines: Iterable[tuple[float, str]],
    stop: float,
    *,
    marked: bool = True,
    exit_code: int | None = 0,
    trouble: Trouble = CALM,
    random: Random | None = None,
    created: float = 0.0,
) -> Try:
    """An attempt that prints `lines`, each with its time; the end mark follows them."""
    random = random or Random(0)
    printed = sorted(lines, key=lambda line: line[0])
    all_lines = list(printed)
    if marked:
        all_lines.append((stop, end_mark(exit_code or 0, len(printed))))
    events, latest = [], 0.0
    for number, (at, message) in enumerate(all_lines):
        shown = max(at, created + start) + random.uniform(0, trouble.late)
        # A log driver sends its batches in order, unless the world is a shuffled one.
        latest = shown if trouble.shuffled else max(latest, shown)
        events.append(Event(_ms(at), number, message, latest))
    return Try(
        stream, start, stop, exit_code, tuple(message for _, message in printed), tuple(events),
        start + created,
    )  # fmt: skip
