"""How a sweep stands: a Picture at each round of its controller, a Summary when that ends."""

from collections.abc import Mapping

from msgspec import Struct

from batchml.model.sweep import Trial, TrialState
from batchml.sweep.standings import Confirmed


def status(*, is_ended: bool, is_paused: bool, is_stopping: bool) -> str:
    """How a sweep stands, in the one word that is used for it everywhere."""
    if is_ended or is_paused:
        return "ended" if is_ended else "paused"
    return "stopping" if is_stopping else "running"


class Picture(Struct, frozen=True):
    """A sweep at one moment. `best` is the fold's own: read it at once, or copy it."""

    at: float  # seconds since the epoch
    counts: Mapping[TrialState, int]  # trials by state; a state without any may be missing
    planned: int  # trials so far, those that confirm left out
    wanted: int | None  # trials that there will be; None: as many as the other limits allow
    parallel: int  # trials at once
    best: Trial | None
    began_at: float | None  # when the first wave was planned
    hours: float  # since then
    hours_limit: float | None
    spent: float | None  # USD so far; None where nobody pays
    committed: float | None  # USD that what runs now is expected to cost still
    cost_limit: float | None
    eta: float | None  # seconds until the end, as far as can be told
    steps: int  # of training done
    steps_saved: int  # steps not run, against running the same trials in full
    notices: tuple[str, ...]  # lines, the oldest first
    stopping: str  # why nothing new begins; empty: it goes on
    ended: str  # why it is over; empty: it goes on
    is_paused: bool = False  # nobody attends to it, and it needs that to go on

    @property
    def status(self) -> str:
        return status(
            is_ended=bool(self.ended), is_paused=self.is_paused, is_stopping=bool(self.stopping)
        )

    def __str__(self) -> str:
        """`12 of 64 trials: 8 done, 4 pruned, 3 running; best 0.98 (trial 17)`"""
        counts = ", ".join(f"{many} {state.lower()}" for state, many in self.counts.items() if many)
        of = "" if self.wanted is None else f" of {self.wanted}"
        best = ""
        if self.best is not None and self.best.values:
            values = ", ".join(f"{value:.6g}" for value in self.best.values)
            best = f"; best {values} (trial {self.best.number})"
        end = f"; {self.ended or self.stopping}" if self.ended or self.stopping else ""
        return f"{self.over}{of} trials: {counts or 'none yet'}{best}{end}"

    def count(self, *states: TrialState) -> int:
        return sum(self.counts.get(state, 0) for state in states)

    @property
    def confirming(self) -> int:
        """Runs that confirm the best: they are counted by state, but no trials of their own."""
        return max(0, sum(self.counts.values()) - self.planned)

    @property
    def in_flight(self) -> int:
        """Trials that are queued or run."""
        return self.count(TrialState.WAITING, TrialState.RUNNING)

    @property
    def over(self) -> int:
        """Trials that have ended; a paused one has not."""
        return sum(many for state, many in self.counts.items() if state.is_ended)


class Summary(Struct, frozen=True):
    """What came of a sweep, or how it stands where its controller ends before it.

    `by`: what ended it: "done" (all trials are over), "limit", "user", "failures"; empty while it
    is not over.
    """

    picture: Picture
    by: str
    why: str  # in words
    first_failure: Trial | None = None  # the first trial that failed, if any did
    pareto: tuple[Trial, ...] = ()  # of several goals: those that no other beats in all
    confirmed: tuple[Confirmed, ...] = ()  # trials that were run again, the best mean first

    @property
    def is_over(self) -> bool:
        return bool(self.by)
