"""SweepHandle: one sweep, as `batchml.Client` gives it."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.submission import Tell
    from batchml.client.sweeping.boards import Board
    from batchml.client.sweeping.freezing import Frozen
    from batchml.model.sweep import Trial
    from batchml.sweep.asking import Ask
    from batchml.sweep.state import SweepState
    from batchml.sweep.summary import Picture, Summary


class SweepHandle:
    """One sweep. It holds the sweep's key and asks anew each time: nothing of it gets old.

    Every method may raise AccessError, ServiceError, ServiceUnreachable, and OSError for a board
    that cannot be read.
    """

    def __init__(self, place: "Place", key: str, tell: "Tell | None" = None) -> None:
        self._place = place
        self.key = key
        self._tell = tell or (lambda _words: None)
        self._board: Board | None = None
        self._frozen: Frozen | None = None

    def __repr__(self) -> str:
        return f"SweepHandle({self.key!r}, env={self._place.env!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SweepHandle):
            return NotImplemented
        return (self.key, self._place.env) == (other.key, other._place.env)

    def __hash__(self) -> int:
        return hash((self.key, self._place.env))

    # --- how it is --------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name that people see."""
        return self._what().name

    def best(self) -> "Trial | None":
        """The best trial so far; None while none has a result."""
        from batchml.sweep.standings import best

        return best(self._state(), self._what().spec)

    def trials(self) -> "list[Trial]":
        """All trials so far, by their number."""
        found = self._state().trials
        return [found[number] for number in sorted(found)]

    # --- what to do with it -----------------------------------------------------------------

    def wait(
        self,
        see: "Callable[[Picture], None] | None" = None,
        timeout: float | None = None,
    ) -> "Summary":
        """Be its controller until it is over, or look on where it has one; what came of it.

        `see` gets a picture each round. Raises TimeoutError after `timeout` seconds: then the
        trials that were submitted go on, and `wait` goes on with the sweep.
        """
        from batchml.client.sweeping.looking import Onlooker
        from batchml.client.sweeping.running import attend

        place = self._place
        end = None if timeout is None else place.clock.monotonic() + timeout
        onlooker = Onlooker(place, self._what(), self._at())
        attended = attend(place, self._what(), self._at(), self._tell)
        watched = onlooker if onlooker.holder() else attended
        with closing(watched.pictures()) as pictures:
            for picture in pictures:
                if see is not None:
                    see(picture)
                if end is not None and place.clock.monotonic() >= end and not picture.ended:
                    raise TimeoutError(f"Not over after {timeout:g} seconds. Its trials go on.")
        return watched.summary

    def detach(self) -> None:
        """Leave it to itself, or, where it needs a controller, to one that is a run of its own."""
        from batchml.client.sweeping.running import leave

        leave(self._place, self._what(), self._at(), self._tell)

    def stop(self, *, now: bool = False) -> None:
        """Have every trial save and end, and begin no other; with `now`, without the grace.

        Returns once its controller is seeing to it, or, where it has none, once it has ended.
        """
        from batchml.client.sweeping.steering import stop

        stop(self._place, self._what(), self._at(), now=now, tell=self._tell)

    def resume(self) -> None:
        """Take back a stop: what it left undone is begun once it is waited for, or left to itself.

        Raises UsageError for a sweep that came to its end.
        """
        from batchml.client.sweeping.steering import go_on

        self._ask(go_on(self._at()))

    def top_up(
        self,
        *,
        trials: int | None = None,
        hours: float | None = None,
        cost: float | None = None,
        parallel: int | None = None,
    ) -> None:
        """Give it other limits, in full: it goes on once it is waited for, or left to itself.

        Raises UsageError with all that is wrong with them.
        """
        from batchml.client.sweeping.steering import top_up

        self._ask(
            top_up(
                self._what(), self._at(), trials=trials, hours=hours, cost=cost, parallel=parallel
            )
        )

    def rerun(self, trials: Sequence[int] = (), *, code: bool = False) -> bool:
        """Have these trials, or all that failed, begin anew; False where none has failed.

        With `code` they and all later ones run the code as it is now. Raises UsageError for trials
        that there are not, or that have not ended, and for code that cannot be sent.
        """
        from batchml.client.sweeping.recoding import old_code, send_code
        from batchml.client.sweeping.steering import rerun

        asked = rerun(self._at(), tuple(trials))
        if asked is None:
            return False
        if code:
            send_code(self._place, self._what(), self._at(), tell=self._tell)
        elif words := old_code(self._place, self._what(), self._at()):
            self._tell(words)
        self._ask(asked)
        return True

    def confirm(self, top: int | None = None, seeds: int | None = None) -> None:
        """Have the best trials run again with other seeds; unless given, how often the file says.

        Raises UsageError while no trial has a result.
        """
        from batchml.client.sweeping.steering import confirm

        self._ask(confirm(self._what(), self._at(), top, seeds))

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the report: one HTML file that needs no network, with CSV and JSON beside it."""
        from batchml.sweep.report.writing import write_report

        write_report(self._what(), self._state(), Path(path), self._place.clock)
        return Path(path)

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write its trials as a journal for Optuna and its dashboard."""
        from batchml.sweep.export import write_journal

        frozen = self._what()
        now = self._place.clock.now()
        write_journal(Path(path), frozen.name, frozen.spec, self._state(), now)
        return Path(path)

    # --- inside -----------------------------------------------------------------------------

    def _ask(self, asked: "Ask | None") -> None:
        """Its controller, or the next one, does it. Raises NotFound where its code is gone."""
        from batchml.client.sweeping.recoding import check_code
        from batchml.sweep.asking import ask

        check_code(self._place, self._what(), self._at())
        if asked is not None:
            ask(self._at(), asked)

    def _at(self) -> "Board":
        if self._board is None:
            from batchml.client.sweeping.boards import open_board

            self._board = open_board(self._place, self.key)
        return self._board

    def _what(self) -> "Frozen":
        if self._frozen is None:
            from batchml.client.sweeping.freezing import read_frozen
            from batchml.errors import NotFound

            self._frozen = read_frozen(self._at())
            if self._frozen is None:
                raise NotFound("Sweep", self.key, [], "`batchml sweeps ls` shows them.")
        return self._frozen

    def _state(self) -> "SweepState":
        from batchml.client.sweeping.looking import Onlooker

        return Onlooker(self._place, self._what(), self._at()).state
