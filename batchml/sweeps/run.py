"""Control a sweep in this process, or detach it: let a run in AWS Batch control it."""

from collections.abc import Generator
from contextlib import closing

from msgspec import Struct

from batchml.context import Context, Notify
from batchml.errors import BatchmlError, SweepHasController
from batchml.runs.send import user_name
from batchml.sweeps.control.controller import Controller
from batchml.sweeps.control.intervals import AWS, LOCAL
from batchml.sweeps.control.lease import LeaseOwner, refuse_second_controller, this_process
from batchml.sweeps.control.ledger import SweepLedger
from batchml.sweeps.control.plan import SubmitMode, count_trials
from batchml.sweeps.detached import submit_controller
from batchml.sweeps.jobs import BatchJobs
from batchml.sweeps.started import StartedSweep
from batchml.sweeps.stores import SweepStore
from batchml.sweeps.summary import SweepSnapshot, SweepSummary


class ControlledSweep(Struct):
    """A sweep that is controlled by this process. `summary` is its result once `snapshots` ends."""

    sweep: StartedSweep
    controller: Controller

    def snapshots(self) -> Generator[SweepSnapshot, None, None]:
        """A snapshot after each round, until the sweep has ended.

        Closing the generator lets another controller continue at once. Raises what
        `Controller.rounds` raises, for example ControllerReplaced.
        """
        yield from self.controller.rounds()

    @property
    def summary(self) -> SweepSummary:
        return self.controller.summary


def control_sweep(
    context: Context,
    sweep: StartedSweep,
    store: SweepStore,
    tell: Notify = lambda _: None,
    owner: LeaseOwner | None = None,
    lost: Notify | None = None,
) -> ControlledSweep:
    """The controller of a sweep. It begins with the first of its snapshots.

    `owner` describes the controller to others: this process unless given. `tell` is called with
    progress of long operations, and with the controller's notices. Callers that show snapshots,
    which have all notices, give `lost`: then `lost` is called with errors of services that cannot
    be reached, and `tell` not with notices.
    """
    intervals = LOCAL if context.settings.is_local else AWS
    jobs = BatchJobs(context, sweep, store, tell)
    owner = owner or this_process(user_name())
    tell_notice = tell if lost is None else lambda _: None
    controller = Controller(
        sweep.spec, store, jobs, context.clock, intervals, owner, tell_notice, lost=lost or tell
    )
    return ControlledSweep(sweep, controller)


def needs_controller(sweep: StartedSweep) -> bool:
    """Whether a sweep without a controller stands still, or lacks early stopping or other limits.

    An array needs none: AWS Batch runs it, its trials keep the limit of hours, and their messages
    wait in the store. But cut-offs, a target and confirming runs need a controller, and so does a
    cost limit that the rungs of `halving` can exceed.
    """
    spec = sweep.spec
    if sweep.mode is SubmitMode.BATCHES:
        return True
    return (
        spec.early_stop.method in ("asha", "median")
        or spec.limits.target is not None
        or spec.confirm is not None
        or (spec.limits.cost is not None and sweep.mode is SubmitMode.RUNGS)
    )


def gains_from_controller(sweep: StartedSweep) -> bool:
    """Whether a controller could stop the sweep early if its first trials all fail."""
    count = count_trials(sweep.spec)
    return count is None or count > sweep.spec.limits.parallel


def detach_sweep(
    context: Context, sweep: StartedSweep, store: SweepStore, tell: Notify = lambda _: None
) -> None:
    """Let a sweep run without this process: by itself, or with a controller that is a run.

    Trials that need no controller are submitted first, and run even if the controller cannot be
    submitted. Raises SweepHasController, and what `submit_controller` raises for a sweep that needs
    a controller.
    """
    refuse_second_controller(store, context.clock, store.key)
    is_needed = needs_controller(sweep)
    if sweep.mode is not SubmitMode.BATCHES:
        with closing(control_sweep(context, sweep, store, tell).snapshots()) as snapshots:
            is_over = next(p.ended for p in snapshots if p.ended or _is_submitted(store))
        if is_over or not (is_needed or gains_from_controller(sweep)):
            return
    try:
        submit_controller(context, sweep, store, tell)
    except SweepHasController:
        raise
    except BatchmlError as error:
        if is_needed:
            raise
        tell(f"Without a controller, failing trials do not stop the sweep. {error}")


def _is_submitted(store: SweepStore) -> bool:
    """Whether all trials are submitted: after the first round, unless an error delayed it."""
    state = SweepLedger(store).load()
    return bool(state.batches) and not state.open_batches
