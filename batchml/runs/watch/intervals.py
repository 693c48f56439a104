"""When the next poll is due, and how many calls a second are made."""

from collections.abc import Callable

from batchml.clock import Clock


class PollCadence:
    """When a poll is due: soon after a change, less and less often while nothing changes."""

    def __init__(self, first: float, most: float) -> None:
        self._first = first
        self._most = most
        self._delay = first
        self._earliest = 0.0
        self.next = 0.0  # on the monotonic clock; at once

    def done(self, now: float, *, news: bool, rest: float = 0.0) -> None:
        """Note a poll; the next one is due after `rest` seconds at the earliest."""
        if news:
            self._delay = self._first
        self._earliest = now + rest
        self.next = max(now + self._delay, self._earliest)
        self._delay = min(self._delay * 1.5, self._most)

    def hurry(self, now: float) -> None:
        """Note a change: the next poll is due at once, and polls become frequent again."""
        self._delay = self._first
        self.next = max(now, self._earliest)


_SLOWEST = 0.25  # calls a second
_GROW_AFTER = 20  # calls that went well


class Limiter:
    """Spreads calls over time, and slows down for a service that throttles.

    A failure halves the rate; failures within one second count once. After twenty calls without a
    failure a reduced rate rises by a fifth, up to its first value.
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
        """Wait until the next call may be made."""
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


class ReasonReporter:
    """Reports why something waits, ever less often.

    It asks `why` after `first` seconds of waiting, then after pauses that double up to `most`
    seconds, and tells the answer. It repeats an answer only with `repeats`.
    """

    def __init__(
        self,
        clock: Clock,
        tell: Callable[[str], None],
        why: Callable[[], str],
        *,
        first: float,
        most: float,
        repeats: bool = False,
    ) -> None:
        self._clock = clock
        self._tell = tell
        self._why = why
        self._first, self._most = first, most
        self._repeats = repeats
        self._last = ""
        self._pause = 0.0
        self._next = float("inf")  # while nothing waits

    def see(self, waits: bool) -> None:
        """Take note at each poll whether it waits now."""
        now = self._clock.monotonic()
        if not waits:
            self._next = float("inf")
        elif self._next == float("inf"):
            self._pause, self._next = self._first, now + self._first
        elif now >= self._next:
            self._pause = min(self._pause * 2, self._most)
            self._next = now + self._pause
            words = self._why()
            if words and (self._repeats or words != self._last):
                self._last = words
                self._tell(words)
