"""The end of a sweep that was asked for: its trials save and end, and none begins."""

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from batchml.client.submission import Tell
from batchml.client.sweeping.freezing import Frozen
from batchml.client.sweeping.steering import until
from batchml.errors import BatchmlError
from batchml.sweep.ledger import Ledger
from batchml.sweep.signals import call_off

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.boards import Board
    from batchml.sweep.state import SweepState
    from batchml.sweep.summary import Picture, Summary


class Stop:
    """One stop of a sweep. `begin` asks for it; where nobody else sees to it, `pictures` does."""

    def __init__(
        self, place: "Place", frozen: Frozen, board: "Board", tell: Tell = lambda _: None
    ) -> None:
        self._place = place
        self._frozen = frozen
        self._board = board
        self._tell = tell
        self.had_ended = False
        self.summary: Summary | None = None  # of one that ended here

    def begin(self, why: str, *, now: bool = False) -> bool:
        """Ask for the end; whether nothing is left to do for whoever asked. Raises StoreError."""
        state = Ledger(self._board).load()
        if state.ended is not None:
            self.had_ended = True
            self._tell(f"It had ended already: {state.ended.why}.")
            return True
        call_off(self._board, why)
        if now:
            self._terminate(state, why)
        found = until(self._place, self._board, self._is_stopping)
        if found is None:
            return False
        grace = self._frozen.job_spec.checkpoint.grace_seconds
        soon = "it ends at once" if now else f"its trials have {grace} s to save and end"
        self._tell(f"Stopping: {soon}. Its controller, {found.holder.words}, sees to it.")
        return True

    def pictures(self) -> "Iterator[Picture]":
        """Be the controller until the sweep has ended: one a round."""
        from batchml.client.sweeping.running import attend

        attended = attend(self._place, self._frozen, self._board, self._tell)
        with closing(attended.pictures()) as pictures:
            yield from pictures
        self.summary = attended.summary

    def _is_stopping(self) -> bool:
        state = Ledger(self._board).load()
        return state.stopping is not None or state.ended is not None

    def _terminate(self, state: "SweepState", why: str) -> None:
        """End the jobs of all waves that go on; those that have ended stay as they are."""
        first: BatchmlError | None = None
        for job_id in going_on(state):
            try:
                self._place.batch.terminate(job_id, why)
            except BatchmlError as error:
                first = first or error
        if first is not None:
            raise first


def going_on(state: "SweepState") -> list[str]:
    """The jobs of the waves that have a trial which has not ended. Those without trials of their
    own, rungs of `halving`, count: they wait for others."""
    waves = {trial.wave for trial in state.trials.values() if not trial.state.is_ended}
    waves |= {number for number, wave in state.waves.items() if not wave.trials}
    return [job_id for number, job_id in sorted(state.jobs.items()) if number in waves]
