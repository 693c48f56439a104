"""View a sweep: its state, snapshots, and its row in the list of sweeps.

A sweep that needs a controller for its next trials is only read. One whose trials run by themselves
is controlled while it is viewed: so its limits are kept, and its end is recorded.
"""

from collections.abc import Generator
from contextlib import closing, suppress

from msgspec import Struct
from msgspec.structs import replace

from batchml.context import Context
from batchml.errors import BatchmlError
from batchml.model.sweep import Trial, TrialState
from batchml.runtime.protocol.sweep import INBOX, decode_message
from batchml.sweeps.control.events import MessageReceived
from batchml.sweeps.control.lease import IN_AWS, ON_LOCAL, find_holder
from batchml.sweeps.control.ledger import SweepLedger
from batchml.sweeps.control.plan import SubmitMode, count_trials
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.control.totals import SweepTotals, estimate_money, limits_now
from batchml.sweeps.results import best_trial
from batchml.sweeps.run import control_sweep
from batchml.sweeps.started import StartedSweep, read_started
from batchml.sweeps.stores import ListedSweep, SweepStore, open_sweep_store
from batchml.sweeps.summary import (
    SweepSnapshot,
    SweepSummary,
    make_snapshot,
    make_summary,
    status_word,
)

_PAGE = 1000  # messages that are read at once


class SweepRow(Struct, frozen=True):
    """A row of the list of sweeps. `trouble`: why the rest is missing."""

    listed: ListedSweep
    sweep: StartedSweep | None = None
    state: SweepState | None = None
    status: str = ""  # see `status_word`
    trouble: str = ""

    @property
    def best(self) -> Trial | None:
        return best_trial(self.state, self.sweep.spec) if self.state and self.sweep else None


def make_row(context: Context, listed: ListedSweep) -> SweepRow:
    """The row of a listed sweep. An error is put into the row, and so does not hide other rows."""
    try:
        store = open_sweep_store(context, listed.key)
        sweep = read_started(store)
        if sweep is None:
            return SweepRow(listed)
        view = SweepView(context, sweep, store)
        status = view.status()
        return SweepRow(listed, sweep, view.state, status)
    except BatchmlError as error:
        return SweepRow(listed, trouble=str(error).partition("\n")[0])


class SweepView:
    """A view of a sweep: its ledger, and the messages that no controller has read yet.

    Methods raise the errors of the store.
    """

    def __init__(self, context: Context, sweep: StartedSweep, store: SweepStore) -> None:
        self._context = context
        self._sweep = sweep
        self._store = store
        self._ledger = SweepLedger(store)
        self._state: SweepState | None = None
        self._applied: set[str] = set()  # keys of messages in the inbox that were applied

    @property
    def state(self) -> SweepState:
        """The present state. The same object is brought up to date each time."""
        if self._state is None:
            self._state = self._ledger.load()
        else:
            self._ledger.follow(self._state)
        self._apply_messages(self._state)
        return self._state

    def holder(self) -> str:
        """The sweep's controller, for people; empty where there is none."""
        found = find_holder(self._store, self._context.clock)
        return found.holder.description if found else ""

    def snapshot(self) -> SweepSnapshot:
        """A snapshot. A sweep whose trials run by themselves is brought up to date first."""
        if self._needs_no_controller():
            with closing(self._control()) as snapshots:
                found = next(snapshots, None)
                if found is not None:
                    return found
        return self._snapshot()

    def status(self) -> str:
        """The status in one word. If all trials have ended, the sweep is ended first."""
        state = self.state
        in_flight = state.counts[TrialState.WAITING] + state.counts[TrialState.RUNNING]
        if not state.ended and not in_flight and self._needs_no_controller():
            with suppress(BatchmlError):  # no server, or another controller was faster
                return self.snapshot().status
        return status_word(
            is_ended=state.ended is not None,
            is_paused=self._is_paused(state),
            is_stopping=state.stopping is not None,
        )

    def _snapshot(self) -> SweepSnapshot:
        state = self.state
        found = snapshot_of(self._sweep, state, self._context.clock.now())
        return replace(found, is_paused=self._is_paused(state))

    def _is_paused(self, state: SweepState) -> bool:
        """Whether no trial runs, or none begins, until there is a controller."""
        is_idle = self._sweep.mode is SubmitMode.BATCHES or not state.batches or state.open_batches
        return bool(is_idle) and state.ended is None and not self.holder()

    @property
    def summary(self) -> SweepSummary:
        """The result of the sweep, or its present state."""
        snapshot = snapshot_of(self._sweep, self.state, self._context.clock.now())
        return make_summary(SweepTotals(self._sweep.spec, self.state), snapshot)

    def snapshots(self) -> Generator[SweepSnapshot, None, None]:
        """A snapshot after each round, until the sweep has ended."""
        intervals = ON_LOCAL if self._context.settings.is_local else IN_AWS
        while True:
            if self._needs_no_controller():
                yield from self._control()
            snapshot = self._snapshot()
            yield snapshot
            if snapshot.ended:
                return
            self._context.clock.sleep(intervals.poll)

    def _needs_no_controller(self) -> bool:
        """Whether trials run by themselves, and no controller reads their messages.

        Then a viewer reads them, keeps the limits and records the end. To view a sweep whose
        controller chooses the next trials must not begin trials.
        """
        if self._sweep.mode is SubmitMode.BATCHES:
            return False
        state = self.state
        return bool(state.batches) and not state.ended and not self.holder()

    def _control(self) -> Generator[SweepSnapshot, None, None]:
        try:
            yield from control_sweep(self._context, self._sweep, self._store).snapshots()
        except BatchmlError:
            if not self.holder():  # with a holder, another controller was faster: only view then
                raise

    def _apply_messages(self, state: SweepState) -> None:
        waiting = self._store.keys(INBOX)
        self._applied.intersection_update(waiting)
        new = [key for key in waiting if key not in self._applied]
        for first in range(0, len(new), _PAGE):
            keys = new[first : first + _PAGE]
            for data in self._store.get_many(keys):
                message = decode_message(data) if data else None
                if message is not None:
                    state.apply(MessageReceived(message))
            self._applied.update(keys)


def snapshot_of(sweep: StartedSweep, state: SweepState, now: float) -> SweepSnapshot:
    """A snapshot made from all trials of a state."""
    spec, totals = sweep.spec, SweepTotals(sweep.spec, state)
    timeout = sweep.job_spec.timeout_seconds
    until = state.ended.at if state.ended else now
    money = estimate_money(totals.tally, state, sweep.hourly, timeout, until)
    wanted = count_trials(replace(spec, limits=limits_now(state, spec)))
    return make_snapshot(totals, wanted, money, now)
