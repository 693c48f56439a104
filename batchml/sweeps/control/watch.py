"""Observe a sweep's jobs in AWS Batch, for trials that cannot send messages themselves.

A trial reports to the sweep's store. AWS Batch knows more only about a trial whose container was
lost or never started; so jobs are observed seldom, a hundred in one call. `wave` is the number of a
batch of trials, as in `events.py`.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Protocol

from msgspec import Struct

from batchml.model.run import JobStatus
from batchml.model.sweep import Trial, TrialState
from batchml.runtime.protocol.exit_codes import DUPLICATE
from batchml.sweeps.control.events import TrialBatch, TrialObserved
from batchml.sweeps.control.lease import ControllerIntervals
from batchml.sweeps.control.plan import SubmitMode, trials_in
from batchml.sweeps.control.totals import SweepTotals, count_in_flight

# --- The jobs of a sweep --------------------------------------------------------------------------


MAX_OBSERVED = 100  # job ids in one call of DescribeJobs


class JobObservation(Struct, frozen=True):
    """The job of a batch of trials in AWS Batch. Times are seconds since the epoch."""

    status: JobStatus
    children: Mapping[str, int] = {}  # of an array job: the number of children by JobStatus
    started_at: float | None = None
    stopped_at: float | None = None
    exit_code: int | None = None  # None for an array job
    reason: str = ""  # why the job ended or cannot run, in AWS's words


class FailedChild(Struct, frozen=True):
    """A child of an array that FAILED, after all its attempts."""

    index: int
    job_id: str  # with `:INDEX`
    exit_code: int | None = None
    reason: str = ""
    started_at: float | None = None
    stopped_at: float | None = None


class SweepJobs(Protocol):
    """The calls to AWS Batch for one sweep (`sweeps/jobs.py`). All raise BatchmlError.

    `hourly`: USD for an hour of one trial; None where it is free or unknown. `timeout`: seconds
    after which AWS Batch ends one attempt of a trial; None: never.
    """

    hourly: float | None
    timeout: float | None

    def submit(self, batch: TrialBatch, size: int, width: int, after: str = "") -> str:
        """Submit the job of a batch exactly once; its id.

        The key of the batch is in the job's name: a job that any controller submitted before is
        found and not submitted again. `size`: its number of children; 1 makes a plain job without
        an index. `width`: bytes of a line of the manifest, which is in the store already. `after`:
        the id of the job that must succeed before this one starts.
        """

    def observe(self, job_ids: Sequence[str]) -> dict[str, JobObservation]:
        """Describe at most MAX_OBSERVED jobs in one call. Unknown ones are left out."""

    def failed_children(self, job_id: str) -> list[FailedChild]:
        """The children of an array that have FAILED so far; a call for each 1,000."""

    def terminate(self, job_ids: Sequence[str], why: str) -> None:
        """Terminate jobs with all their children. Jobs that have ended are left as they are."""

    def limit_running(self, quantity: int) -> None:
        """Let at most `quantity` children run at once, of all jobs submitted from now on.

        The controller may call it again with the same quantity.
        """

    def remove_limit(self, *, is_patient: bool = False) -> bool:
        """Delete the consumable resource of `limit_running`, if any, after the last trial.

        False if a job whose last container is just ending still requires it. `is_patient`: the
        caller will try again; otherwise the user is told.
        """


# --- Observing the jobs ---------------------------------------------------------------------------


# After a container that found its trial claimed by another job, the trial's message is awaited for
# so many times `silence`: the other job may still report.
_DUPLICATE_FACTOR = 12


class _Silent(Struct, frozen=True):
    """A child that failed and whose trial has not reported an end."""

    wave: int
    since: float  # seconds since the epoch
    child: FailedChild

    def is_of(self, trial: Trial) -> bool:
        """Whether the trial is still at this index of this batch, and has not ended."""
        is_same = (trial.wave, trial.index) == (self.wave, self.child.index)
        return is_same and trial.state.is_in_flight


class JobWatch:
    """The jobs of one sweep, as observed since this controller started."""

    def __init__(self, jobs: SweepJobs, intervals: ControllerIntervals, mode: SubmitMode) -> None:
        self._jobs, self._intervals, self._mode = jobs, intervals, mode
        self.is_starting = False  # a container was STARTING at the last observation
        self._observed_at: dict[int, float] = {}  # by number of the batch
        self._last_observed = float("-inf")  # when jobs were last observed
        self._last_listed = float("-inf")  # when failed children were last listed
        self._missing: dict[int, float] = {}  # since when AWS Batch does not know a batch's job
        # By batch: when the end of its job was observed, and the job.
        self._ended: dict[int, tuple[float, JobObservation]] = {}
        self._failed: dict[int, int] = {}  # by batch: failed children when they were last listed
        self._silent: dict[int, _Silent] = {}  # by trial

    @property
    def ended_batches(self) -> Set[int]:
        """The numbers of the batches whose job has ended."""
        return self._ended.keys()

    def observe(self, totals: SweepTotals, now: float) -> None:
        """Observe the unfinished jobs with one call, if it is due. Raises BatchmlError."""
        is_any_in_flight = count_in_flight(totals.state) > 0
        interval = self._intervals.observe if is_any_in_flight else self._intervals.at_end
        if now - self._last_observed < interval:
            return
        waves = self._due(totals)
        if not waves:
            return
        self._last_observed = now
        ids = [totals.state.jobs[wave] for wave in waves]
        observed = self._jobs.observe(ids)
        self.is_starting = any(map(_is_starting, observed.values()))
        for wave, job_id in zip(waves, ids, strict=True):
            self._observed_at[wave] = now
            self._note_job(totals, wave, observed.get(job_id), now)
        children = {
            wave: observed[job_id].children
            for wave, job_id in zip(waves, ids, strict=True)
            if job_id in observed
        }
        self._observe_failures(totals, children, now)

    def observe_silent(self, totals: SweepTotals, now: float) -> list[TrialObserved]:
        """Observations of the trials whose job has ended and that have not reported an end.

        Call it when all messages were read. Raises BatchmlError.
        """
        found: list[TrialObserved] = []
        for wave in sorted(totals.tally.in_flight.keys() & self._ended.keys()):
            ended_at, job = self._ended[wave]
            found += self._silent_of_ended(totals, wave, ended_at, job, now)
            if found and job.children:
                break  # one call to AWS Batch a round; the other batches follow in later rounds
        for number, silent in list(self._silent.items()):
            trial = totals.state.trials[number]
            if not silent.is_of(trial):
                del self._silent[number]
            elif self._has_waited_enough(trial, silent.since, silent.child.exit_code, now):
                found.append(_observation(trial, _end_state(totals), now, silent.child))
        return found

    def _due(self, totals: SweepTotals) -> list[int]:
        """The numbers of the batches to observe; those not observed for longest come first."""
        state = totals.state
        chosen: Iterable[int] = (
            totals.tally.in_flight if self._mode is SubmitMode.BATCHES else state.jobs
        )
        open_batches = [wave for wave in chosen if wave in state.jobs and wave not in self._ended]
        open_batches.sort(key=lambda wave: (self._observed_at.get(wave, 0.0), wave))
        return open_batches[:MAX_OBSERVED]

    def _note_job(
        self, totals: SweepTotals, wave: int, job: JobObservation | None, now: float
    ) -> None:
        """Note a batch's job that has ended, or that AWS Batch no longer knows."""
        if job is None:
            since = self._missing.setdefault(wave, now)
            is_old = now - totals.state.batches[wave].at >= self._intervals.patience
            if is_old and (now > since or not totals.tally.in_flight.get(wave)):
                reason = "AWS Batch no longer knows its job"
                self._ended[wave] = (now, JobObservation(JobStatus.FAILED, reason=reason))
            return
        self._missing.pop(wave, None)
        if job.status.is_terminal:
            self._ended[wave] = (now, job)

    def _observe_failures(
        self, totals: SweepTotals, counts: Mapping[int, Mapping[str, int]], now: float
    ) -> None:
        """Note the failed children of one array that still runs, if they have not reported an end.

        `counts`: the children by JobStatus, for each batch.
        """
        if now - self._last_listed < self._intervals.observe_failures:
            return
        for wave, children in counts.items():
            failed = children.get(JobStatus.FAILED, 0)
            if wave in self._ended or failed <= self._failed.get(wave, 0):
                continue
            self._last_listed = now
            self._failed[wave] = failed
            trials = {
                trial.index: trial for trial in trials_in(totals.state.batches[wave], totals.state)
            }
            for child in self._jobs.failed_children(totals.state.jobs[wave]):
                trial = trials.get(child.index)
                if trial is not None and trial.state.is_in_flight:
                    self._wait_for(trial, now, child)
            return  # one array at a time: each may take a call for every 1,000 children

    def _silent_of_ended(
        self, totals: SweepTotals, wave: int, ended_at: float, job: JobObservation, now: float
    ) -> list[TrialObserved]:
        trials = [
            trial
            for trial in trials_in(totals.state.batches[wave], totals.state)
            if trial.state.is_in_flight
            and not self._is_run_by_another(trial)
            and self._is_given_up(totals, trial, ended_at, job, now)
        ]
        if not trials:
            return []
        children: dict[int, FailedChild] = {}
        if job.children:
            failed = self._jobs.failed_children(totals.state.jobs[wave])
            children = {child.index: child for child in failed}
        # For a plain job, and for children of which AWS Batch lists no failure.
        default = FailedChild(0, "", job.exit_code, job.reason, job.started_at, job.stopped_at)
        if job.children:
            default = FailedChild(0, "", None, job.reason)
        state = _end_state(totals)
        found: list[TrialObserved] = []
        for trial in trials:
            child = children.get(trial.index, default)
            if child.exit_code == DUPLICATE and job.children and state is TrialState.LOST:
                self._wait_for(trial, ended_at, child)
            else:
                found.append(_observation(trial, state, now, child))
        return found

    def _wait_for(self, trial: Trial, since: float, child: FailedChild) -> None:
        silent = self._silent.get(trial.number)
        if silent is None or not silent.is_of(trial):
            self._silent[trial.number] = _Silent(trial.wave, since, child)

    def _is_run_by_another(self, trial: Trial) -> bool:
        """Whether the trial's container ended because another job had claimed the trial."""
        silent = self._silent.get(trial.number)
        return silent is not None and silent.is_of(trial) and silent.child.exit_code == DUPLICATE

    def _is_given_up(
        self, totals: SweepTotals, trial: Trial, ended_at: float, job: JobObservation, now: float
    ) -> bool:
        """Whether no message is expected from a trial whose job has ended."""
        if totals.state.stopping is not None and trial.state is TrialState.WAITING:
            return True  # it has never begun
        return self._has_waited_enough(trial, ended_at, job.exit_code, now)

    def _has_waited_enough(
        self, trial: Trial, since: float, exit_code: int | None, now: float
    ) -> bool:
        """Whether the message of a trial whose container has ended was awaited long enough."""
        if exit_code != DUPLICATE:
            return now - since >= self._intervals.silence
        last_message = max(trial.started_at or 0.0, trial.reports[-1].at if trial.reports else 0.0)
        return now - max(since, last_message) >= self._intervals.silence * _DUPLICATE_FACTOR


def _is_starting(job: JobObservation) -> bool:
    return job.status is JobStatus.STARTING or job.children.get(JobStatus.STARTING, 0) > 0


def _end_state(totals: SweepTotals) -> TrialState:
    return TrialState.KILLED if totals.state.stopping is not None else TrialState.LOST


def _observation(trial: Trial, state: TrialState, now: float, child: FailedChild) -> TrialObserved:
    return TrialObserved(
        trial.number, trial.wave, state, now, child.job_id or trial.job_id, child.exit_code,
        _why(state, child), child.started_at, child.stopped_at,
    )  # fmt: skip


def _why(state: TrialState, child: FailedChild) -> str:
    if state is TrialState.KILLED:
        return "the sweep was stopped"
    if child.reason:
        return child.reason
    if child.exit_code == 0:
        return (
            "its container ended with exit code 0 and never reported: is batchml in its image, and "
            "is the entry point unchanged?"
        )
    return "its container ended, and the trial never reported how"
