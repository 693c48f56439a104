"""How often AWS Batch is asked about runs, and how long batchml waits for an answer."""

from collections.abc import Iterator

from msgspec import Struct


class PollIntervals(Struct, frozen=True):
    """Seconds, unless said otherwise.

    A log without an end mark is complete by the quiet rule: the run has ended, `quiet` ago, and two
    reads at least `settle` apart brought nothing.
    """

    shortest: float = 2.0  # between two polls; it grows by half while nothing changes, up to `most`
    longest: float = 15.0
    longest_log: float = 4.0  # the longest interval between polls of the log of a running job
    quiet: float = 10.0
    settle: float = 2.0
    # How long after the end lines may come that the log's end mark counts.
    end_mark_wait: float = 30.0
    # How long a job may be invisible after its submission, or the service unreachable at first.
    startup_limit: float = 60.0
    # How long the service may be unreachable after the first answer, or the user signed out.
    outage_limit: float = 900.0
    # How long the log may be unreachable after the run has ended.
    log_outage_limit: float = 300.0
    # After this time without a log stream a running attempt is reported.
    stream_report_after: float = 120.0
    # Calls a second: DescribeJobs, whose limit all users of an account share, and GetLogEvents, of
    # which AWS allows 10 to an account in a region. None: no limit.
    describe_rate: float | None = 1.0
    log_rate: float | None = 8.0


LOCAL_INTERVALS = PollIntervals(
    shortest=0.05,
    longest=0.5,
    longest_log=0.5,
    quiet=0.0,
    settle=0.0,
    end_mark_wait=0.0,
    startup_limit=20.0,
    log_outage_limit=20.0,
    describe_rate=None,
    log_rate=None,
)


def backoff(pace: PollIntervals) -> Iterator[float]:
    """Seconds between polls: from `first`, half as much again each time, up to `most`."""
    delay = pace.shortest
    while True:
        yield delay
        delay = min(delay * 1.5, pace.longest)
