"""What a run waits for, told ever more seldom: by a run that is held, and where logs are kept."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from batchml.errors import BatchmlError

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.clock import Clock


class Whys:
    """Asks `why` after `first` seconds of waiting, and again after twice as long each time, up to
    `most` seconds; tells what it answers. The same words again only with `repeats`.
    """

    def __init__(
        self,
        clock: "Clock",
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
        self._said = ""
        self._pause = 0.0
        self._next = float("inf")  # while nothing waits

    def see(self, waits: bool) -> None:
        """Whether it waits now; called at each look."""
        now = self._clock.monotonic()
        if not waits:
            self._next = float("inf")
        elif self._next == float("inf"):
            self._pause, self._next = self._first, now + self._first
        elif now >= self._next:
            self._pause = min(self._pause * 2, self._most)
            self._next = now + self._pause
            words = self._why()
            if words and (self._repeats or words != self._said):
                self._said = words
                self._tell(words)


def verdict(place: "Place", job_id: str) -> str:
    """What a run waits for, as `explain` says it; empty where that cannot be had."""
    from batchml.client.explaining import explain_run

    try:
        return explain_run(place, job_id).explanation.verdict
    except BatchmlError:  # an extra
        return ""
