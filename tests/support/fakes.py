"""Collaborators that tests own."""

from batchml.clock import SystemClock


class FakeClock:
    """Time that moves only when someone sleeps, or when the test says so."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.time = now
        self.naps: list[float] = []

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.time += seconds


class FastClock(FakeClock):
    """The real time, a thousand times as fast: what takes AWS minutes takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self._began = SystemClock().monotonic()

    def now(self) -> float:
        self.time = 1_000_000.0 + (SystemClock().monotonic() - self._began) * 1000
        return self.time
