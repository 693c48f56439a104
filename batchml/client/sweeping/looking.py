"""Looking at a sweep without being its controller: nothing is written."""

from collections.abc import Generator
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from batchml.client.sweeping.freezing import Frozen, read_frozen
from batchml.errors import BatchmlError
from batchml.model.sweep import Trial, TrialState
from batchml.runtime.protocol.messages import read
from batchml.runtime.protocol.sweep_store import INBOX
from batchml.sweep import budgets
from batchml.sweep.book import Book
from batchml.sweep.events import Told
from batchml.sweep.ledger import Ledger
from batchml.sweep.many import get_many
from batchml.sweep.pace import AWS, LOCAL
from batchml.sweep.picturing import picture, summary
from batchml.sweep.shape import Shape, countable
from batchml.sweep.standings import best
from batchml.sweep.state import SweepState
from batchml.sweep.summary import Picture, Summary, status

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.boards import Board, Listed

_AT_ONCE = 1000  # messages that are fetched together


class Glance(Struct, frozen=True):
    """A line of the list of sweeps; `trouble` says why there is no more of it."""

    listed: "Listed"
    frozen: Frozen | None = None
    state: SweepState | None = None
    status: str = ""  # in a word, as of a Picture
    trouble: str = ""

    @property
    def best(self) -> Trial | None:
        return best(self.state, self.frozen.spec) if self.state and self.frozen else None


def glance(place: "Place", listed: "Listed") -> Glance:
    """How one of the list stands. What is wrong with it does not hide the others."""
    from batchml.client.sweeping.boards import open_board

    try:
        board = open_board(place, listed.key)
        frozen = read_frozen(board)
        if frozen is None:
            return Glance(listed)
        onlooker = Onlooker(place, frozen, board)
        status = onlooker.glance()
        return Glance(listed, frozen, onlooker.state, status)
    except BatchmlError as error:
        return Glance(listed, trouble=str(error).partition("\n")[0])


class Onlooker:
    """Reads a sweep's ledger, and what its trials have said since, which no controller took yet.

    Methods raise what the board raises.
    """

    def __init__(self, place: "Place", frozen: Frozen, board: "Board") -> None:
        self._place = place
        self._frozen = frozen
        self._board = board
        self._ledger = Ledger(board)
        self._state: SweepState | None = None
        self._taken: set[str] = set()  # keys of messages that are in the state

    @property
    def state(self) -> SweepState:
        """The sweep as it is now; the same object is brought up to date each time."""
        if self._state is None:
            self._state = self._ledger.load()
        else:
            self._ledger.follow(self._state)
        self._take_messages(self._state)
        return self._state

    def holder(self) -> str:
        """Who attends to it; empty while nobody does."""
        from batchml.client.sweeping.holding import holder

        found = holder(self._place, self._board)
        return found.holder.words if found else ""

    def look(self) -> Picture:
        """How it stands. One that goes on without a controller is brought up to date on the way."""
        if self._goes_on_by_itself():
            with closing(self._attended()) as pictures:
                found = next(pictures, None)
                if found is not None:
                    return found
        return self._picture()

    def glance(self) -> str:
        """How it stands in a word; one of which all seems over is looked at, so that it ends."""
        state = self.state
        in_flight = state.counts[TrialState.WAITING] + state.counts[TrialState.RUNNING]
        if not state.ended and not in_flight and self._goes_on_by_itself():
            with suppress(BatchmlError):  # its server is away, or somebody else attends to it
                return self.look().status
        return status(
            is_ended=state.ended is not None,
            is_paused=self._is_paused(state),
            is_stopping=state.stopping is not None,
        )

    def _picture(self) -> Picture:
        state = self.state
        found = picture_of(self._frozen, state, self._place.clock.now())
        return replace(found, is_paused=self._is_paused(state))

    def _is_paused(self, state: SweepState) -> bool:
        """Whether nothing goes on, or nothing new begins, until somebody attends to it."""
        is_idle = self._frozen.shaped.shape is Shape.WAVES or not state.waves or state.open_waves
        return bool(is_idle) and state.ended is None and not self.holder()

    @property
    def summary(self) -> Summary:
        """What came of it, or how it stands."""
        shown = picture_of(self._frozen, self.state, self._place.clock.now())
        return summary(Book(self._frozen.spec, self.state), shown)

    def pictures(self) -> Generator[Picture, None, None]:
        """One a round, until the sweep has ended."""
        pace = LOCAL if self._place.settings.is_local else AWS
        while True:
            if self._goes_on_by_itself():
                yield from self._attended()
            shown = self._picture()
            yield shown
            if shown.ended:
                return
            self._place.clock.sleep(pace.poll)

    def _goes_on_by_itself(self) -> bool:
        """Whether its trials need nobody, and nobody is there to take what they say.

        Who looks then takes it, keeps the limits and writes down the end. Of a sweep whose
        controller decides what is tried next, looking alone must not begin trials.
        """
        if self._frozen.shaped.shape is Shape.WAVES:
            return False
        state = self.state
        return bool(state.waves) and not state.ended and not self.holder()

    def _attended(self) -> Generator[Picture, None, None]:
        from batchml.client.sweeping.running import attend

        try:
            yield from attend(self._place, self._frozen, self._board).pictures()
        except BatchmlError:
            if not self.holder():  # else somebody was faster, and this one goes on looking
                raise

    def _take_messages(self, state: SweepState) -> None:
        waiting = self._board.keys(INBOX)
        self._taken.intersection_update(waiting)
        new = [key for key in waiting if key not in self._taken]
        for first in range(0, len(new), _AT_ONCE):
            keys = new[first : first + _AT_ONCE]
            for data in get_many(self._board, keys):
                message = read(data) if data else None
                if message is not None:
                    state.fold(Told(message))
            self._taken.update(keys)


def picture_of(frozen: Frozen, state: SweepState, now: float) -> Picture:
    """How a sweep stands, from all of its trials; a controller keeps the sums as it goes."""
    spec, book = frozen.spec, Book(frozen.spec, state)
    timeout = frozen.job_spec.timeout_seconds
    until = state.ended.at if state.ended else now
    purse = budgets.money(book.tally, state, frozen.hourly, timeout, until)
    wanted = countable(replace(spec, limits=budgets.limits(state, spec)))
    return picture(book, wanted, purse, now)
