"""Manage a started sweep: resume, top up, rerun, confirm, stop.

Only a controller writes the ledger. So a request is written to the sweep's store, and the running
controller carries it out; if none runs, the process that wrote the request becomes the controller.
"""

from collections.abc import Callable, Iterator
from contextlib import closing

from msgspec.structs import replace

from batchml.context import Context, Notify
from batchml.errors import UsageError
from batchml.model.names import new_key
from batchml.model.sweep import ConfirmSettings
from batchml.runtime.storage.store import Store
from batchml.sweeps.control import inbox
from batchml.sweeps.control.inbox import (
    ConfirmRequest,
    RerunRequest,
    ResumeRequest,
    SweepRequest,
    TopUpRequest,
    read_stop_signal,
    signal_stop,
)
from batchml.sweeps.control.lease import AWS_INTERVALS, LOCAL_INTERVALS, LeaseHeld, find_holder
from batchml.sweeps.control.ledger import SweepLedger
from batchml.sweeps.control.state import RESUMABLE, SweepState
from batchml.sweeps.control.totals import limits_now
from batchml.sweeps.jobs import terminate_all
from batchml.sweeps.results import failed_trials, rank_trials
from batchml.sweeps.run import control_sweep
from batchml.sweeps.started import StartedSweep
from batchml.sweeps.stores import SweepStore
from batchml.sweeps.summary import SweepSnapshot

_POLLS = 4  # polls of a controller, within which it reads a request


# --- Requests -------------------------------------------------------------------------------------


def make_resume(store: SweepStore) -> ResumeRequest | None:
    """A request to resume a sweep. None for a sweep that only needs a controller.

    Raises UsageError for a sweep that has ended by itself, with what can be done instead.
    """
    state = SweepLedger(store).load()
    by = state.stopping.by if state.stopping else ""
    if state.ended is not None and by not in RESUMABLE:
        raise UsageError(
            f"This sweep has ended: {state.ended.why}. For more trials: batchml sweeps top-up "
            f"{store.key} --trials N. To run failed trials again: batchml sweeps rerun "
            f"{store.key} --failed."
        )
    is_stopped = bool(by in RESUMABLE or read_stop_signal(store))
    return ResumeRequest(new_key()) if is_stopped else None


def make_top_up(
    sweep: StartedSweep,
    store: Store,
    *,
    trials: int | None = None,
    hours: float | None = None,
    cost: float | None = None,
    parallel: int | None = None,
) -> TopUpRequest:
    """A request for other limits, as totals. Raises UsageError with every mistake in the limits."""
    state = SweepLedger(store).load()
    before = limits_now(state, sweep.spec)
    changes = {"trials": trials, "hours": hours, "cost": cost, "parallel": parallel}
    if all(value is None for value in changes.values()):
        raise UsageError("top-up: give at least one of --trials, --hours, --cost, --parallel.")
    mistakes = [
        f"--{name} {value:g}: it must be above 0."
        for name, value in changes.items()
        if value is not None and value <= 0
    ]
    planned = _count_planned(state)
    if trials is not None and 0 < trials <= planned:
        mistakes.append(
            f"--trials {trials}: there are {planned} trials already. The limit counts all trials, "
            f"so give a greater number."
        )
    elif trials is not None and sweep.spec.early_stop.method == "halving":
        mistakes.append(
            f"--trials {trials}: halving plans its rungs for the trials that it begins with. For "
            f"more of them start a new sweep: batchml sweep FILE --trials {trials}."
        )
    if cost is not None and sweep.hourly is None:
        mistakes.append("--cost: the price of a trial was unknown when the sweep was started.")
    if mistakes:
        raise UsageError("top-up: " + " ".join(mistakes))
    if replace(before, **{name: value for name, value in changes.items() if value}) == before:
        raise UsageError("top-up: the sweep has these limits already.")
    return TopUpRequest(new_key(), trials=trials, hours=hours, cost=cost, parallel=parallel)


def make_rerun(store: Store, numbers: tuple[int, ...] = ()) -> RerunRequest | None:
    """A request to run trials again from their beginning; without numbers, all failed ones.

    None if no trial has failed. Raises UsageError for trials that do not exist or have not ended.
    """
    state = SweepLedger(store).load()
    if not numbers:
        return RerunRequest(new_key()) if failed_trials(state) else None
    unknown = [number for number in numbers if number not in state.trials]
    going_on = [
        number
        for number in numbers
        if number in state.trials and not state.trials[number].state.is_ended
    ]
    if unknown or going_on:
        raise UsageError(
            "rerun:"
            + (f" no such trial: {_join_numbers(unknown)}." if unknown else "")
            + (f" not ended yet: {_join_numbers(going_on)}." if going_on else "")
        )
    return RerunRequest(new_key(), numbers)


def make_confirm(
    sweep: StartedSweep, store: Store, top: int | None = None, seeds: int | None = None
) -> ConfirmRequest:
    """A request to run the best trials again with other seeds.

    The defaults are those of the sweep file. Raises UsageError if no trial has a result.
    """
    defaults = sweep.spec.confirm or ConfirmSettings()
    top = defaults.top if top is None else top
    seeds = defaults.seeds if seeds is None else seeds
    if top < 1 or seeds < 1:
        raise UsageError("confirm: --top and --seeds must be above 0.")
    if not rank_trials(SweepLedger(store).load(), sweep.spec):
        raise UsageError("confirm: no trial of this sweep has a result yet.")
    return ConfirmRequest(new_key(), top=top, seeds=seeds)


def _count_planned(state: SweepState) -> int:
    return sum(1 for trial in state.trials.values() if trial.confirms is None)


def _join_numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "")


# --- Giving requests to the controller ------------------------------------------------------------


def hand_over(context: Context, store: Store, request: SweepRequest) -> LeaseHeld | None:
    """Write a request to the store. The controller that carries it out; None if none runs.

    Raises StoreError.
    """
    inbox.put_request(store, request)
    (key,) = inbox.request_keys([request])
    return wait_for_controller(context, store, lambda: store.get(key) is None)


def wait_for_controller(
    context: Context, store: Store, is_done: Callable[[], bool]
) -> LeaseHeld | None:
    """Wait until the running controller has done something. None where no controller runs.

    After a few polls it returns also for a slow controller, which will do it later.
    """
    intervals = LOCAL_INTERVALS if context.settings.is_local else AWS_INTERVALS
    end = context.clock.monotonic() + _POLLS * intervals.poll
    while (lease := find_holder(store, context.clock)) is not None:
        if is_done() or context.clock.monotonic() >= end:
            return lease
        context.clock.sleep(min(1.0, intervals.poll))
    return None


# --- Stopping -------------------------------------------------------------------------------------


def stop_sweep(
    context: Context,
    sweep: StartedSweep,
    store: SweepStore,
    *,
    now: bool = False,
    tell: Notify = lambda _: None,
) -> None:
    """Have every trial save and end, and begin no other; with `now`, without the grace period.

    Waits a few polls for a controller to read the stop signal; if none runs, for the sweep's end.
    """
    stopping = SweepStop(context, sweep, store, tell)
    if not stopping.begin("stopped by the user", now=now):
        for _ in stopping.snapshots():
            pass


class SweepStop:
    """The stop of a sweep. `begin` requests it; without a controller, `snapshots` completes it."""

    def __init__(
        self,
        context: Context,
        sweep: StartedSweep,
        store: SweepStore,
        tell: Notify = lambda _: None,
    ) -> None:
        self._context = context
        self._sweep = sweep
        self._store = store
        self._tell = tell
        self.had_ended = False

    def begin(self, why: str, *, now: bool = False) -> bool:
        """Request the stop. False where the caller must complete it. Raises StoreError."""
        state = SweepLedger(self._store).load()
        if state.ended is not None:
            self.had_ended = True
            self._tell(f"The sweep had ended already: {state.ended.why}.")
            return True
        signal_stop(self._store, why)
        if now:
            terminate_all(self._context, running_jobs(state), why)
        lease = wait_for_controller(self._context, self._store, self._is_stopping)
        if lease is None:
            return False
        grace = self._sweep.job_spec.checkpoint.grace_seconds
        end = "it ends at once" if now else f"its trials have {grace} s to save and end"
        self._tell(f"Stopping: {end}. The controller is {lease.holder.description}.")
        return True

    def snapshots(self) -> Iterator[SweepSnapshot]:
        """Control the sweep until it has ended; a snapshot after each round."""
        controller = control_sweep(self._context, self._sweep, self._store, self._tell)
        with closing(controller.snapshots()) as snapshots:
            yield from snapshots

    def _is_stopping(self) -> bool:
        state = SweepLedger(self._store).load()
        return state.stopping is not None or state.ended is not None


def running_jobs(state: SweepState) -> list[str]:
    """The jobs of the batches that have an unfinished trial, and of batches that name no trials:
    rungs of `halving`, which wait for others."""
    unfinished = {trial.wave for trial in state.trials.values() if not trial.state.is_ended}
    unfinished |= {number for number, batch in state.batches.items() if not batch.trials}
    return [job_id for number, job_id in sorted(state.jobs.items()) if number in unfinished]
