"""The line that `wait` keeps at the bottom of a terminal: what the runs do meanwhile."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from batchml.cli.bottom import Above, Bottom
from batchml.cli.colour import is_dumb, paint, screen, window_width
from batchml.cli.statusline import Board, entered, status_line
from batchml.clock import Clock
from batchml.model.array import shown_state, state_text
from batchml.model.names import short_id
from batchml.model.run import Run
from batchml.model.status import JobStatus

if TYPE_CHECKING:
    from typing import TextIO


class Waited:
    """What has been seen of the runs that are waited for."""

    def __init__(self, clock: Clock, runs: Sequence[Run]) -> None:
        self._clock = clock
        self._since = clock.monotonic()
        self._states: tuple[tuple[str, float], ...] = ()
        self._runs: dict[str, Run] = {}
        self.see({run.job_id: run for run in runs})

    def see(self, told: Mapping[str, Run]) -> None:
        """As these runs are now; others are as they were."""
        self._runs |= told
        if len(self._runs) == 1:
            (run,) = self._runs.values()
            now = self._clock.now(), self._clock.monotonic()
            self._states = entered(self._states, run, *now)

    def board(self, now: float) -> Board:
        from batchml.cli.live import waiting_words

        runs = list(self._runs.values())
        if len(runs) == 1:
            (run,) = runs
            return Board(
                f"{run.name} {short_id(run.job_id)}",
                states=self._states,
                children=state_text(run) if run.children else "",
                text=waiting_words(run, now - self._states[-1][1]),
            )
        order = [str(each) for each in JobStatus]
        counts = Counter(map(shown_state, runs))
        states = sorted(counts.items(), key=lambda each: -order.index(each[0]))
        return Board(
            f"{len(runs)} runs",
            states=(("waiting", self._since),),
            children=", ".join(f"{count} {state}" for state, count in states),
        )


@contextmanager
def shown(waited: Waited, clock: Clock, is_wanted: bool) -> Iterator[None]:
    """Keep the line below all that is printed meanwhile; nothing where there is no terminal."""
    if not is_wanted or not sys.stdout.isatty() or is_dumb():
        yield
        return
    stream, colour = sys.stdout, screen().colour

    def draw(width: int) -> str:
        now = clock.monotonic()
        parts = status_line(waited.board(now), now, width)
        return "  ".join(paint(each.text, each.kind) if colour else each.text for each in parts)

    bottom = Bottom(stream, draw, lambda: window_width(stream))
    bottom.start()
    sys.stdout = cast("TextIO", Above(bottom, stream))
    try:
        yield
    finally:
        sys.stdout = stream
        bottom.stop()
