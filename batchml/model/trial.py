"""Trial: one set of parameters of a sweep, and what came of it."""

from enum import StrEnum

from msgspec import Struct, field

from batchml.model.sweep import Params


class TrialState(StrEnum):
    """A trial's state. The first three go on; the rest are ends."""

    WAITING = "WAITING"  # planned or queued
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"  # ended at a rung; may be promoted and resume
    DONE = "DONE"
    PRUNED = "PRUNED"  # stopped early: others do better
    FAILED = "FAILED"  # its program failed, or never printed the metric
    DIVERGED = "DIVERGED"  # its metric was NaN or infinite
    KILLED = "KILLED"  # stopped by a limit, or by the user
    LOST = "LOST"  # AWS Batch says that it ended; the trial itself never said how

    @property
    def is_ended(self) -> bool:
        return self not in _GOING_ON

    @property
    def is_failure(self) -> bool:
        return self in (TrialState.FAILED, TrialState.LOST)


_GOING_ON = frozenset((TrialState.WAITING, TrialState.RUNNING, TrialState.PAUSED))


class Report(Struct, frozen=True, array_like=True, gc=False):
    """The goals' metrics at one step; `at` in seconds since the epoch."""

    step: int
    values: tuple[float, ...]
    at: float = 0.0


class Decision(Struct, frozen=True, array_like=True, gc=False):
    """What a trial decided about itself at a rung, and by which version of the cut-offs."""

    step: int
    value: float
    cutoff: float | None  # None: too few results were known to judge
    version: int
    goes_on: bool


class Trial(Struct):
    """A trial as the ledger tells it. Mutable: the fold's own, changed by nothing else."""

    number: int  # from 0
    params: Params
    seed: int
    origin: str = ""  # "tpe", "random", "sobol", "grid", "list", "confirm", ...
    confirms: int | None = None  # the trial whose parameters this one runs again
    state: TrialState = TrialState.WAITING
    wave: int = 0  # the last one that it was in
    index: int = 0  # its place there
    target: int = 0  # the step at which this wave ends it; 0: none
    attempt: int = 0  # Batch's, from 1
    job_id: str = ""  # of the last wave, with `:INDEX` for the child of an array
    reports: list[Report] = field(default_factory=list)  # by rising step, one for each
    decisions: list[Decision] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # the last of all others it printed
    planned_at: float = 0.0  # seconds since the epoch, as all times here
    started_at: float | None = None  # of its first container
    stopped_at: float | None = None
    seconds: float = 0.0  # of containers that have ended, all waves and attempts together
    resumed_at: float | None = None  # since when the one that runs now does
    exit_code: int | None = None
    why: str = ""  # of the end, in words
    tail: tuple[str, ...] = ()  # last lines of output, of one that failed

    @property
    def step(self) -> int:
        """The deepest step with a report; 0 before the first."""
        return self.reports[-1].step if self.reports else 0

    @property
    def values(self) -> tuple[float, ...] | None:
        """The goals' metrics at the deepest step."""
        return self.reports[-1].values if self.reports else None

    def ran(self, now: float) -> float:
        """Seconds that its containers have run until `now`."""
        running = max(0.0, now - self.resumed_at) if self.resumed_at is not None else 0.0
        return self.seconds + running
