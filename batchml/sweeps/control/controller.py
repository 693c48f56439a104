"""The controller of a sweep: plans its trials, reads their messages, and ends the sweep.

Each round observes jobs, reads the messages in the inbox, decides (`decide.py`), and acts. Events
and intentions are written to the ledger before anything is done. So the controller can be killed at
any point: the next one finds the intentions in the ledger and does what is missing. A job is
submitted exactly once, because its name is searched for; to write a manifest or a stop signal again
changes nothing.
"""

from collections.abc import Callable, Generator, Iterator, Set
from contextlib import contextmanager

from msgspec.structs import replace

from batchml.clock import Clock
from batchml.errors import (
    AccessError,
    BatchmlError,
    ConfigError,
    ControllerReplaced,
    ServiceError,
    ServiceUnreachable,
    SweepStoreError,
)
from batchml.model.names import new_key
from batchml.model.sweep import SweepLimits, SweepSpec
from batchml.runtime.protocol import sweep as manifest
from batchml.runtime.protocol.sweep import (
    CONTRACT,
    CUTOFFS,
    BadTrialContract,
    Cutoffs,
    TrialContract,
    batch_key,
)
from batchml.runtime.storage.store import Store, StoreError
from batchml.sweeps.control import decide, inbox, plan
from batchml.sweeps.control.decide import (
    BeginTrials,
    ConfirmBest,
    DecisionInputs,
    EndSweep,
    PlanRungs,
    PromoteTrials,
    ReopenSweep,
    SignalStop,
    StopSweep,
    TerminateJobs,
)
from batchml.sweeps.control.events import (
    DONE,
    FAILURES,
    USER,
    BatchSubmitted,
    Event,
    MessageReceived,
    NoticeGiven,
    SweepEnded,
    SweepStopping,
    TrialBatch,
)
from batchml.sweeps.control.inbox import events_of_request
from batchml.sweeps.control.lease import ControllerIntervals, Lease, LeaseHeld, LeaseOwner
from batchml.sweeps.control.ledger import SweepLedger
from batchml.sweeps.control.plan import SubmitMode, count_trials
from batchml.sweeps.control.totals import (
    Money,
    SweepTotals,
    began_at,
    count_in_flight,
    estimate_money,
    find_deadline,
    limits_now,
    trials_of_event,
)
from batchml.sweeps.control.watch import JobWatch, SweepJobs
from batchml.sweeps.summary import SweepSnapshot, SweepSummary, make_snapshot, make_summary

# --- Fault tolerance ------------------------------------------------------------------------------


_TOO_MANY = 429  # the HTTP status of a call that was throttled


@contextmanager
def _store_errors_translated() -> Iterator[None]:
    """Raise ServiceUnreachable in place of the errors of the sweep's store."""
    try:
        yield
    except (StoreError, SweepStoreError) as error:
        raise _store_unreachable(error) from error


def _store_unreachable(error: Exception) -> ServiceUnreachable:
    return ServiceUnreachable(f"The sweep's store cannot be reached: {error}")


class FaultTolerance:
    """Tolerates temporary errors for at most `patience` seconds without a success."""

    def __init__(self, clock: Clock, patience: float) -> None:
        self._clock = clock
        self._patience = patience
        self._since: float | None = None
        self._has_succeeded = False

    def succeeded(self) -> None:
        self._since, self._has_succeeded = None, True

    def failed(self, error: BatchmlError | StoreError) -> bool:
        """Tolerate an error, or raise it as a BatchmlError. True for the first after a success."""
        now = self._clock.monotonic()
        is_first = self._since is None
        self._since = now if self._since is None else self._since
        if not self._is_temporary(error) or now - self._since >= self._patience:
            if isinstance(error, BatchmlError):
                raise error
            raise _store_unreachable(error) from error
        return is_first

    def _is_temporary(self, error: BatchmlError | StoreError) -> bool:
        """Whether the same call may succeed later. Credentials that worked once can be renewed."""
        match error:
            case StoreError() | SweepStoreError():
                return error.temporary
            case ServiceError():
                return error.status >= 500 or error.status == _TOO_MANY
            case AccessError():
                return self._has_succeeded
        return isinstance(error, ServiceUnreachable)


# --- The controller -------------------------------------------------------------------------------


_READS = 10  # reads of the inbox in one round, at most
_GRACE = 30.0  # seconds after the trials' own grace period until jobs are terminated


class Controller:
    """The one controller of a sweep.

    `tell` is called with notices for people, and `lost` (by default `tell` too) with errors of a
    service that cannot be reached.

    `snapshots` raises ControllerReplaced, which names the other controller, if another one has the
    sweep; ConfigError if the store has no trial contract; otherwise the BatchmlError that ends the
    controller. Running trials continue then, and the next controller continues from the ledger.
    """

    def __init__(
        self,
        spec: SweepSpec,
        store: Store,
        jobs: SweepJobs,
        clock: Clock,
        intervals: ControllerIntervals,
        owner: LeaseOwner,
        tell: Callable[[str], None] = lambda _: None,
        make_key: Callable[[], str] = new_key,
        lost: Callable[[str], None] | None = None,
    ) -> None:
        self._spec, self._store, self._jobs = spec, store, jobs
        self._clock, self._intervals, self._tell, self._make_key = clock, intervals, tell, make_key
        self._lost = lost or tell
        self._lease = Lease(store, clock, owner, intervals.lease)
        self._ledger = SweepLedger(store, owner.description)
        self._faults = FaultTolerance(clock, intervals.patience)
        self._unwritten: list[Event] = []  # applied to the state, and not in the ledger yet
        self._is_exhausted = False  # the sampler has no more parameters
        self._terminated: dict[int, float] = {}  # number of a batch -> when its job was terminated
        self._deadline: float | None = None  # as last published
        self._over_since: float | None = None  # since when nothing is left to do
        self._none_since: float | None = None  # since when no trial waits or runs
        self._running_limit: int | None = None  # trials at once, as last set by this controller
        self._counted_trials: tuple[SweepLimits | None, int | None] = None, None

    def snapshots(self) -> Generator[SweepSnapshot, None, None]:
        """A snapshot after each round, until the sweep has ended. Sleeps between rounds.

        Closing the generator releases the lease: the next controller may take it at once.
        """
        self._take_lease()
        try:
            self._read()
            while True:
                self._try_round()
                yield self._snapshot()
                if self._is_over:
                    return
                self._clock.sleep(self._pause())
        finally:
            self._release_lease()

    @property
    def summary(self) -> SweepSummary:
        """The result of the sweep, or its present state."""
        return make_summary(self._totals, self._snapshot())

    # --- One round --------------------------------------------------------------------------------

    @_store_errors_translated()
    def _take_lease(self) -> None:
        held = self._lease.take()
        if isinstance(held, LeaseHeld):
            raise ControllerReplaced(held.holder.description)

    @_store_errors_translated()
    def _read(self) -> None:
        """Read the trial contract and the ledger, before the first round."""
        data = self._store.get(CONTRACT)
        try:
            self._contract = TrialContract.from_json(data or b"{}")
        except BadTrialContract as error:
            raise ConfigError("The sweep's store", [str(error)]) from error
        self._mode = SubmitMode(self._contract.shape)
        self._cutoffs_version = Cutoffs.from_json(self._store.get(CUTOFFS)).version
        self._watch = JobWatch(self._jobs, self._intervals, self._mode)
        self._totals = SweepTotals(self._spec, self._ledger.take_over())
        self._totals.rungs.is_changed = True
        self._is_over = False

    def _try_round(self) -> None:
        """One round. Steps that fail with a temporary error are repeated in the next round."""
        try:
            self._lease.renew()
            self._run_round(self._clock.now())
        except (StoreError, BatchmlError) as error:
            if isinstance(error, ControllerReplaced | ConfigError):
                raise
            if self._faults.failed(error):
                self._lost(str(error))
        else:
            self._faults.succeeded()

    def _run_round(self, now: float) -> None:
        totals = self._totals
        # Jobs are observed before messages are read: then all messages that trials sent before an
        # observed end of their job are read in this round.
        self._watch.observe(totals, now)
        read, is_inbox_empty = self._read_messages()
        done = self._carry_out(inbox.pending_requests(self._store), now)
        if is_inbox_empty:
            for observed in self._watch.observe_silent(totals, now):
                self._apply(observed)
        inputs = self._inputs(now, self._watch.ended_batches if is_inbox_empty else frozenset())
        actions = decide.decide(totals, inputs)
        for action in actions:
            self._record(action, now)
        for notice in decide.due_notices(
            totals, now, self._intervals.patience, self._watch.is_starting
        ):
            self._give_notice(notice)
        self._write()
        if read or done:
            self._store.delete(*read, *done)
        for action in actions:
            self._act(action, now)
        self._limit_running()
        self._publish_deadline(now)
        self._submit()
        self._publish_cutoffs()
        self._is_over = totals.state.ended is not None and not self._has_other_requests(done)

    def _read_messages(self) -> tuple[list[str], bool]:
        """Apply the messages in the inbox. Returns the keys to delete once the ledger has them, and
        whether the inbox was read to its end."""
        for _ in range(_READS):
            read = inbox.read_inbox(self._store)
            for message in read.messages:
                self._apply(MessageReceived(message))
            if len(read.keys) < inbox.MAX_MESSAGES:
                return read.keys, True
            self._write()
            self._store.delete(*read.keys)
            self._lease.renew()
        return [], False

    def _inputs(self, now: float, ended_batches: Set[int]) -> DecisionInputs:
        return DecisionInputs(
            now=now,
            mode=self._mode,
            wanted=self._wanted,
            money=self._money(now),
            between_batches=self._intervals.between_batches,
            grace=self._contract.grace + _GRACE,
            stop_signal=None if self._totals.state.ended else inbox.read_stop_signal(self._store),
            is_exhausted=self._is_exhausted,
            ended_batches=ended_batches,
        )

    @property
    def _wanted(self) -> int | None:
        """The number of trials in all, by the present limits."""
        limits = limits_now(self._totals.state, self._spec)
        if limits is not self._counted_trials[0]:  # counting the points of a grid takes time
            self._counted_trials = limits, count_trials(replace(self._spec, limits=limits))
        return self._counted_trials[1]

    def _money(self, now: float) -> Money | None:
        tally, jobs = self._totals.tally, self._jobs
        return estimate_money(tally, self._totals.state, jobs.hourly, jobs.timeout, now)

    def _apply(self, event: Event) -> None:
        """Apply an event to the state now. `_write` writes it to the ledger, before any action."""
        self._totals.apply(event)
        self._unwritten.append(event)

    def _write(self) -> None:
        if self._unwritten:
            self._ledger.append(self._unwritten)
            self._unwritten = []

    def _give_notice(self, notice: NoticeGiven) -> None:
        self._apply(notice)
        for line in notice.words.splitlines():
            self._tell(line)

    # --- Decisions: first their events are recorded -----------------------------------------------

    def _record(self, action: decide.Action, now: float) -> None:
        totals = self._totals
        match action:
            case BeginTrials(count):
                batches = plan.plan_new(totals, self._mode, count, now, self._make_key)
                self._is_exhausted = sum(len(batch.trials) for batch in batches) < count
                self._apply_all(batches)
            case PlanRungs(count):
                self._apply_all(plan.plan_rungs(totals, count, now, self._make_key))
                self._is_exhausted = not totals.state.batches
            case PromoteTrials(trials):
                self._apply_all(plan.plan_promotions(totals, trials, now, self._make_key))
            case ConfirmBest(trials):
                self._apply_all(plan.plan_confirmations(totals, trials, now, self._make_key))
            case StopSweep(by, why):
                self._stop(by, why, now)
            case ReopenSweep(why):
                inbox.clear_stop_signal(self._store)
                # For confirming runs. Failures before an earlier reopening still do not count.
                self._apply(replace(totals.state.last_reopening, why=why, at=now, paused=0.0))
            case EndSweep(by, why):
                # Before the end event, because no controller comes back to a sweep that has ended.
                if not self._remove_limit(now):
                    return
                for notice in decide.confirmation_notices(totals, now):
                    self._give_notice(notice)
                if totals.state.stopping is None and by != DONE:
                    self._apply(SweepStopping(by, why, now))
                self._apply(SweepEnded(why, now))

    def _remove_limit(self, now: float) -> bool:
        """Delete the consumable resource. False: try again in the next round.

        Jobs end a moment after their trials have reported their ends, and require it until then.
        """
        self._over_since = now if self._over_since is None else self._over_since
        is_patient = now - self._over_since < self._intervals.silence
        return self._jobs.remove_limit(is_patient=is_patient) or not is_patient

    def _apply_all(self, batches: list[TrialBatch]) -> None:
        for batch in batches:
            self._apply(batch)

    def _stop(self, by: str, why: str, now: float) -> None:
        self._apply(SweepStopping(by, why, now))
        failed = self._totals.tally.first_failure
        # Of a metric that was never printed there is a notice already, with the last lines.
        if by == FAILURES and failed is not None and decide.NEVER_PRINTED not in failed.why:
            reopenings = len(self._totals.state.reopened)  # each may be followed by a new notice
            kind = f"failures-{reopenings}" if reopenings else "failures"
            self._give_notice(
                NoticeGiven(kind, decide.describe_failure(failed), now, failed.number)
            )

    # --- Then the actions -------------------------------------------------------------------------

    def _act(self, action: decide.Action, now: float) -> None:
        match action:
            case StopSweep(by, why) if by != USER:
                inbox.signal_stop(self._store, why)
            case SignalStop(why):
                inbox.signal_stop(self._store, why)
            case TerminateJobs(batches, why):
                self._terminate(batches, why, now)

    def _terminate(self, batches: tuple[int, ...], why: str, now: float) -> None:
        """Terminate the jobs of batches, and again if they have not ended after a while."""
        jobs = self._totals.state.jobs
        due = [
            number
            for number in batches
            if number in jobs
            and number not in self._watch.ended_batches
            and now - self._terminated.get(number, float("-inf")) >= self._intervals.silence
        ]
        if due:
            self._terminated.update(dict.fromkeys(due, now))
            self._jobs.terminate([jobs[number] for number in due], why)

    def _limit_running(self) -> None:
        """Have AWS Batch limit the running trials, if more are in flight than may run at once."""
        state, spec = self._totals.state, self._spec
        parallel = limits_now(state, spec).parallel
        at_start = parallel if self._mode is SubmitMode.BATCHES else spec.limits.parallel
        # Batches of rungs name no trials, so their children are counted.
        unsent = (plan.count_children(batch, state, spec) for batch in state.open_batches)
        most = max(count_in_flight(state), *unsent, 0)
        limit = self._running_limit
        if limit != parallel and most > min(parallel, at_start, limit or parallel):
            self._jobs.limit_running(parallel)
            self._running_limit = parallel

    def _publish_deadline(self, now: float) -> None:
        """Publish when all trials end by themselves, also without a controller."""
        end = find_deadline(self._totals.state, self._spec, now)
        if end is not None and end != self._deadline and self._totals.state.batches:
            inbox.publish_deadline(self._store, end)
            self._deadline = end

    def _submit(self) -> None:
        """Submit the batches without a known job id; `SweepJobs.submit` finds submitted ones."""
        state = self._totals.state
        for batch in state.open_batches:
            if self._is_too_wide(batch):
                continue
            after = state.jobs[batch.after] if batch.after else ""
            size = plan.count_children(batch, state, self._spec)
            width = self._write_manifest(batch)
            job_id = self._jobs.submit(batch, size, width, after)
            self._apply(BatchSubmitted(batch.number, job_id, self._clock.now()))
            self._write()

    def _is_too_wide(self, batch: TrialBatch) -> bool:
        """Whether a batch has more trials than may begin now, so that it must wait for others.

        A request to run many failed trials again can plan such a batch.
        """
        state, in_flight = self._totals.state, self._totals.tally.in_flight
        sent = sum(count for number, count in in_flight.items() if number in state.jobs)
        free = limits_now(state, self._spec).parallel - sent
        return self._mode is SubmitMode.BATCHES and sent > 0 and free < len(batch.trials)

    def _write_manifest(self, batch: TrialBatch) -> int:
        """Write a batch's manifest, for a deeper rung the one of rung 0. Returns a line's width."""
        if batch.rung:
            batch = self._totals.state.batches[batch.number - batch.rung]
        lines = plan.manifest_entries(batch, self._contract.params)
        data, width = manifest.encode(self._contract.key, batch.number, lines)
        self._store.put(batch_key(batch.number), data)
        return width

    def _publish_cutoffs(self) -> None:
        """Publish the cut-offs by which running trials decide whether to stop early."""
        stop, rungs = self._spec.early_stop, self._totals.rungs
        if not rungs.is_changed or stop.resume or stop.method not in ("asha", "median"):
            return
        self._store.put(CUTOFFS, rungs.cutoffs(self._cutoffs_version + 1).to_json())
        self._cutoffs_version += 1
        rungs.is_changed = False

    # --- Requests of users ------------------------------------------------------------------------

    def _carry_out(self, pending: list[inbox.SweepRequest], now: float) -> list[str]:
        """Carry out requests; the keys of the finished ones. A stopping sweep must end first."""
        state = self._totals.state
        if not pending or (state.stopping is not None and state.ended is None):
            return []
        for request in pending:
            events = events_of_request(self._totals, self._mode, request, now, self._make_key)
            trials = [trial for event in events for trial in trials_of_event(event, state)]
            if events:
                inbox.clear_stop_signal(self._store, trials)
            for event in events:
                self._apply(event)
        self._is_exhausted, self._over_since = False, None
        return inbox.request_keys(pending)

    def _has_other_requests(self, done: list[str]) -> bool:
        """Whether a request came while the sweep ended."""
        pending = inbox.request_keys(inbox.pending_requests(self._store))
        return any(key not in done for key in pending)

    # --- The snapshot and the pause between rounds ------------------------------------------------

    def _snapshot(self) -> SweepSnapshot:
        now = self._clock.now()
        return make_snapshot(self._totals, self._wanted, self._money(now), now)

    def _pause(self) -> float:
        intervals, now = self._intervals, self._clock.now()
        begun = began_at(self._totals.state)
        is_young = begun is None or now - begun < intervals.first_period
        pause = intervals.poll_at_first if is_young else intervals.poll
        if count_in_flight(self._totals.state):
            self._none_since = None
            return pause
        # The jobs end soon, unless their next rung waits for a free machine.
        self._none_since = now if self._none_since is None else self._none_since
        return min(pause, max(intervals.at_end, now - self._none_since))

    def _release_lease(self) -> None:
        try:
            self._lease.release()
        except (StoreError, SweepStoreError):
            pass  # it expires by itself
