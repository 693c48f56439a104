"""View a sweep: its state, snapshots, and its row in the list of sweeps.

A sweep whose controller chooses the next trials is only read. A sweep whose trials run without a
controller is controlled while it is viewed: so its limits are kept, and its end is recorded.
"""

from collections.abc import Generator
from contextlib import closing, suppress

from msgspec import Struct
from msgspec.structs import replace

from batchml.context import Context
from batchml.errors import BatchmlError
from batchml.model.sweep import Trial
from batchml.runtime.protocol.sweep import INBOX, decode_message
from batchml.sweeps.control.events import MessageReceived
from batchml.sweeps.control.lease import AWS_INTERVALS, LOCAL_INTERVALS, find_expected, find_holder
from batchml.sweeps.control.ledger import SweepLedger
from batchml.sweeps.control.plan import SubmitMode, count_trials
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.control.totals import (
    SweepTotals,
    count_in_flight,
    estimate_money,
    limits_now,
)
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
    """A row of the list of sweeps. `trouble`: why the other fields are missing."""

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
        return SweepRow(listed, sweep, status=view.status(), state=view.state)
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
        """The sweep's controller, for people; empty where there is none and none was submitted."""
        lease = find_holder(self._store, self._context.clock)
        if lease is not None:
            return lease.holder.description
        expected = find_expected(self._store, self._context.clock)
        return f"{expected.description}, which is starting" if expected else ""

    def snapshot(self) -> SweepSnapshot:
        """A snapshot. A sweep whose trials run without a controller is controlled for one round."""
        if self._runs_without_controller():
            with closing(self._control()) as snapshots:
                snapshot = next(snapshots, None)
                if snapshot is not None:
                    return snapshot
        return self._snapshot()

    def status(self) -> str:
        """The status in one word. If all trials have ended, the sweep's end is recorded first."""
        state = self.state
        if not state.ended and not count_in_flight(state) and self._runs_without_controller():
            with suppress(BatchmlError):  # no server, or another process has become the controller
                return self.snapshot().status
        return status_word(
            is_ended=state.ended is not None,
            is_paused=self._is_paused(state),
            is_stopping=state.stopping is not None,
        )

    def _snapshot(self) -> SweepSnapshot:
        state = self.state
        snapshot = snapshot_of(self._sweep, state, self._context.clock.now())
        return replace(snapshot, is_paused=self._is_paused(state))

    def _is_paused(self, state: SweepState) -> bool:
        """Whether no trial begins until the sweep has a controller."""
        is_idle = self._sweep.mode is SubmitMode.BATCHES or not state.batches or state.open_batches
        return bool(is_idle) and state.ended is None and not self.holder()

    @property
    def summary(self) -> SweepSummary:
        """The result of the sweep, or its present state."""
        state = self.state
        snapshot = snapshot_of(self._sweep, state, self._context.clock.now())
        return make_summary(SweepTotals(self._sweep.spec, state), snapshot)

    def describe(self) -> SweepSummary:
        """The present state with its status, or the result of the sweep. A sweep that has trials
        in flight is only read; the end of others is recorded, as by `status`."""
        self.status()
        return replace(self.summary, snapshot=self._snapshot())

    def snapshots(self) -> Generator[SweepSnapshot, None, None]:
        """A snapshot after each round, until the sweep has ended."""
        intervals = LOCAL_INTERVALS if self._context.settings.is_local else AWS_INTERVALS
        while True:
            if self._runs_without_controller():
                yield from self._control()
            snapshot = self._snapshot()
            yield snapshot
            if snapshot.ended:
                return
            self._context.clock.sleep(intervals.poll)

    def _runs_without_controller(self) -> bool:
        """Whether all trials are planned already, and no controller reads their messages.

        Then the viewer reads the messages, keeps the limits and records the end. But the viewer of
        a sweep whose controller chooses the next trials must not begin trials.
        """
        if self._sweep.mode is SubmitMode.BATCHES:
            return False
        state = self.state
        return bool(state.batches) and not state.ended and not self.holder()

    def _control(self) -> Generator[SweepSnapshot, None, None]:
        try:
            yield from control_sweep(self._context, self._sweep, self._store).snapshots()
        except BatchmlError:
            if not self.holder():  # if another process has become the controller, only view
                raise

    def _apply_messages(self, state: SweepState) -> None:
        """Apply the messages in the inbox, which no controller has written to the ledger yet."""
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
    """A snapshot of a sweep in this state."""
    spec, totals = sweep.spec, SweepTotals(sweep.spec, state)
    timeout = sweep.job_spec.timeout_seconds
    until = state.ended.at if state.ended else now
    money = estimate_money(totals.tally, state, sweep.hourly, timeout, until)
    wanted = count_trials(replace(spec, limits=limits_now(state, spec)))
    return make_snapshot(totals, wanted, money, now)
