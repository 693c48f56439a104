"""Book: what a controller keeps of a sweep beside its ledger, so that no round asks all trials."""

from collections.abc import Iterable, Mapping
from typing import Any

from batchml.model.sweep import SweepSpec
from batchml.sweep.budgets import Tally
from batchml.sweep.cutoffs import Rungs
from batchml.sweep.events import Ended, Event, Reopened, Seen, Told, Wave
from batchml.sweep.standings import Leader
from batchml.sweep.state import SweepState


class Book:
    """Sums, rungs and the best trial of a state; `fold` keeps all of them together."""

    def __init__(self, spec: SweepSpec, state: SweepState) -> None:
        self.spec = spec
        self.state = state
        self.tally = Tally(spec, state.trials.values())
        self.rungs = Rungs(spec)
        self.leader = Leader(spec)
        for trial in state.trials.values():
            self.rungs.note(trial)
            self.leader.note(trial)

    def fold(self, event: Event) -> None:
        """Take an event into the state, and what it changes into the rest."""
        self.state.fold(event)
        for number in self._changed(event):
            trial = self.state.trials.get(number)
            if trial is None:
                continue
            self.tally.note(trial)
            self.rungs.note(trial)
            if not self.leader.note(trial):
                self.leader.restart(self.state.trials.values())

    def _changed(self, event: Event) -> Iterable[int]:
        if isinstance(event, Ended | Reopened):  # those that wait at rungs are left behind, or back
            return self.state.trials
        return touched(event, self.state)


def touched(event: Event, state: SweepState) -> tuple[int, ...]:
    """The numbers of the trials that an event is about."""
    match event:
        case Told():
            return (_teller(event.message, state),)
        case Seen():
            return (event.trial,)
        case Wave():
            return tuple(planned.number for planned in event.trials)
    return ()


def _teller(message: Mapping[str, Any], state: SweepState) -> int:
    """Whose message it is. A child that could not learn which trial it is says its place alone."""
    number: int = message["trial"]
    wave, index = state.waves.get(message["wave"]), message.get("index", -1)
    if number >= 0 or wave is None or not 0 <= index < len(wave.trials):
        return number
    return int(wave.trials[index].number)
