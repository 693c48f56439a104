"""Collaborators that tests own."""


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
