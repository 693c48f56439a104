"""How often to ask, how long to wait, and when a log is at its end."""

from collections.abc import Iterator

from msgspec import Struct

from batchml.clock import Clock


class Pace(Struct, frozen=True):
    """Seconds, unless said otherwise.

    A log without an end mark is complete by the quiet rule: the run has ended, `quiet` ago, and two
    reads at least `settle` apart brought nothing.
    """

    first: float = 2.0  # between two looks, growing by half while nothing changes, up to `most`
    most: float = 15.0
    most_log: float = 4.0  # the same for the log of a run that goes on
    quiet: float = 10.0
    settle: float = 2.0
    # An end mark that counts more lines than came: they are looked for so long after the end.
    late: float = 30.0
    # How long a job may be invisible after its submission, or the service be out of reach at first.
    patience: float = 60.0
    # How long it may be out of reach once it was reached, or the user be signed out.
    absence: float = 900.0
    # How long the log may be out of reach once the run has ended.
    no_log: float = 300.0
    # A stream that is not there is told of, so long after its attempt has begun.
    no_stream: float = 120.0
    # Calls a second: DescribeJobs, which wants to be shared by many, and GetLogEvents, of which AWS
    # allows 10 to an account in a region. None: as fast as it goes.
    looks: float | None = 1.0
    reads: float | None = 8.0


LOCAL_PACE = Pace(
    first=0.05,
    most=0.5,
    most_log=0.5,
    quiet=0.0,
    settle=0.0,
    late=0.0,
    patience=20.0,
    no_log=20.0,
    looks=None,
    reads=None,
)


def backoff(pace: Pace) -> Iterator[float]:
    """Seconds between polls: from `first`, half as much again each time, up to `most`."""
    delay = pace.first
    while True:
        yield delay
        delay = min(delay * 1.5, pace.most)


class Cadence:
    """When something is due next: soon after news, ever less often while there is none."""

    def __init__(self, first: float, most: float) -> None:
        self._first = first
        self._most = most
        self._delay = first
        self._earliest = 0.0
        self.next = 0.0  # on the monotonic clock; at once

    def done(self, now: float, *, news: bool, rest: float = 0.0) -> None:
        """It was done: not again for `rest` seconds, whatever happens."""
        if news:
            self._delay = self._first
        self._earliest = now + rest
        self.next = max(now + self._delay, self._earliest)
        self._delay = min(self._delay * 1.5, self._most)

    def hurry(self, now: float) -> None:
        """Something has happened: be due at once, and often again."""
        self._delay = self._first
        self.next = max(now, self._earliest)


_SLOWEST = 0.25  # calls a second
_GROW_AFTER = 20  # calls that went well


class Limiter:
    """Spreads calls over time, and slows down for a service that is too busy.

    A failure halves the rate, those of one second together; twenty calls without one, where the
    limit was felt, raise it by a fifth, up to where it began.
    """

    def __init__(self, clock: Clock, rate: float | None) -> None:
        self._clock = clock
        self._top = rate
        self._rate = rate
        self._next = 0.0
        self._well = 0
        self._held_back = False
        self._failed_at = float("-inf")

    def take(self) -> None:
        """Wait for the next call's turn."""
        if self._rate is None:
            return
        wait = self._next - self._clock.monotonic()
        if wait > 0:
            self._held_back = True
            self._clock.sleep(wait)
        self._next = self._clock.monotonic() + 1 / self._rate

    def went_well(self) -> None:
        self._well += 1
        if self._rate is None or self._top is None:
            return
        if self._well >= _GROW_AFTER and self._held_back:
            self._well, self._held_back = 0, False
            self._rate = min(self._rate * 1.2, self._top)

    def failed(self) -> None:
        now = self._clock.monotonic()
        self._well = 0
        if self._rate is not None and now - self._failed_at >= 1:
            self._failed_at = now
            self._rate = max(self._rate / 2, min(_SLOWEST, self._rate))
