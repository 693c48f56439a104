"""What `wait` shows meanwhile: a line at the bottom of a terminal, or words now and then."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from batchml.cli.bottom import Above, Bottom
from batchml.cli.colour import is_dumb, paint, screen, window_width
from batchml.cli.render import duration, printable
from batchml.cli.statusline import HINT, Board, entered, status_line
from batchml.clock import Clock
from batchml.model.names import short_id
from batchml.model.run import IN_QUEUE, JobStatus, Run, shown_state, state_text
from batchml.ops.select import bare_id

if TYPE_CHECKING:
    from typing import TextIO

    from batchml.client.place import Place

_WHY_AFTER = 30.0  # seconds in a queue after which it is said why,
_WHY_MOST = 3600.0  # and said again ever more seldom, up to so many seconds


class Waited:
    """What has been seen of the runs that are waited for. `hint` says what Ctrl-C does."""

    def __init__(self, clock: Clock, runs: Sequence[Run], hint: str = HINT) -> None:
        self._hint = hint
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
                hint=self._hint,
            )
        order = [str(each) for each in JobStatus]
        counts = Counter(map(shown_state, runs))
        states = sorted(counts.items(), key=lambda each: -order.index(each[0]))
        return Board(
            f"{len(runs)} runs",
            states=(("waiting", self._since),),
            children=", ".join(f"{count} {state}" for state, count in states),
            hint=self._hint,
        )


def is_shown() -> bool:
    """Whether stdout can have such a line."""
    return sys.stdout.isatty() and not is_dumb()


class Words:
    """What runs in a queue wait for, said on stderr now and then: for a log, where no line is kept
    at the bottom. The first time after half a minute, then ever more seldom.
    """

    def __init__(
        self,
        place: "Place",
        asked: Iterable[str],
        say: Callable[[str], None],
        why: Callable[[str], str] | None = None,
    ) -> None:
        """`asked` are the ids of the runs that are waited for. `why` says what one of them waits
        for; `explain` does unless given."""
        from batchml.client.whywait import Whys, verdict

        self._why = why or (lambda job_id: verdict(place, job_id))
        self._clock = place.clock
        self._asked = frozenset(asked)
        self._runs: dict[str, Run] = {}
        self._whys = Whys(
            place.clock, say, self._words, first=_WHY_AFTER, most=_WHY_MOST, repeats=True
        )

    def see(self, told: Mapping[str, Run]) -> None:
        """As these runs are now; children and nodes of one that is waited for do not count."""
        for job_id, run in told.items():
            whole = bare_id(job_id)
            if job_id in self._asked or job_id == whole:
                # One that has moved to another queue is the same run.
                self._runs[(run.key or whole) + job_id[len(whole) :]] = run
        self._whys.see(bool(self._waiting()))

    def _waiting(self) -> list[Run]:
        return [run for run in self._runs.values() if shown_state(run) in IN_QUEUE]

    def _words(self) -> str:
        waiting = self._waiting()
        run, many = waiting[0], len(self._runs)
        after = self._clock.now() - (run.created_at or 0) / 1000
        said = f" after {duration(after)}" if run.created_at else ""
        why = self._why(run.job_id)
        words = f"{run.name} {short_id(run.job_id)} is {run.status}{said}{why and ': '}{why}"
        return printable(f"{len(waiting)} of {many} runs wait. {words}" if many > 1 else words)


@contextmanager
def shown(waited: Waited, clock: Clock, is_wanted: bool) -> Iterator[None]:
    """Keep the line below all that is printed meanwhile; nothing where there is no terminal."""
    if not is_wanted or not is_shown():
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
