"""What AWS Batch says of a sweep's jobs: for trials that cannot say it themselves.

A trial tells its own story through the board. Only of one whose container was lost, or never
started, AWS Batch knows more; so its jobs are looked at seldom, a hundred in one call.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from batchml.model.run import JobStatus
from batchml.model.sweep import Trial, TrialState
from batchml.runtime.protocol.exit_codes import DUPLICATE
from batchml.sweep.book import Book
from batchml.sweep.events import Seen
from batchml.sweep.jobs import MAX_LOOK, Child, Jobs, Look
from batchml.sweep.pace import Pace
from batchml.sweep.plan import trials_of
from batchml.sweep.shape import Shape

_DOUBLED = 12  # silences: a job that came second leaves the word to the first for so long
_IN_FLIGHT = (TrialState.WAITING, TrialState.RUNNING)


class _Silent(Struct, frozen=True):
    """A child that failed, and of whose trial nothing was heard."""

    wave: int
    since: float
    child: Child

    def is_of(self, trial: Trial) -> bool:
        """Whether the trial is still the one that is waited for."""
        place = (trial.wave, trial.index)
        return trial.state in _IN_FLIGHT and place == (self.wave, self.child.index)


class Watch:
    """The jobs of one sweep, and what was seen of them since this controller began."""

    def __init__(self, jobs: Jobs, pace: Pace, shape: Shape) -> None:
        self._jobs, self._pace, self._shape = jobs, pace, shape
        self.is_starting = False  # a container of a job that was looked at last is being made
        self._looked: dict[int, float] = {}  # wave -> when
        self._last_look = float("-inf")
        self._last_failures = float("-inf")
        self._missing: dict[int, float] = {}  # waves that AWS Batch does not know, since when
        self._ended: dict[int, tuple[float, Look]] = {}  # when its end was seen
        self._failed: dict[int, int] = {}  # wave -> children that had failed when it was asked
        self._silent: dict[int, _Silent] = {}  # by trial

    @property
    def over(self) -> frozenset[int]:
        """Waves whose job has ended."""
        return frozenset(self._ended)

    def look(self, book: Book, now: float) -> None:
        """Look at the jobs that go on: one call, when it is time for one. Raises BatchmlError."""
        if now - self._last_look < self._pace.looks:
            return
        waves = self._due(book)
        if not waves:
            return
        self._last_look = now
        ids = [book.state.jobs[wave] for wave in waves]
        looks = self._jobs.look(ids)
        self.is_starting = any(map(_is_starting, looks.values()))
        for wave, job_id in zip(waves, ids, strict=True):
            self._looked[wave] = now
            self._take_in(book, wave, looks.get(job_id), now)
        failing = [wave for wave, job_id in zip(waves, ids, strict=True) if job_id in looks]
        self._look_at_failures(
            book, {wave: looks[book.state.jobs[wave]].children for wave in failing}, now
        )

    def conclude(self, book: Book, now: float) -> list[Seen]:
        """Trials that AWS Batch ended and that said nothing. To be asked when all that trials said
        was heard. Raises BatchmlError."""
        found: list[Seen] = []
        for wave, (ended_at, look) in self._ended.items():
            if book.tally.in_flight.get(wave):
                found += self._of_ended(book, wave, ended_at, look, now)
                if found and look.children:
                    break  # which took a call; the others are for the next round
        for number, silent in list(self._silent.items()):
            trial = book.state.trials[number]
            if not silent.is_of(trial):
                del self._silent[number]
            elif self._is_borne_out(trial, silent.since, silent.child.exit_code, now):
                found.append(_seen(trial, _end_state(book), now, silent.child))
        return found

    def _due(self, book: Book) -> list[int]:
        """The waves to look at, those first that were not for longest."""
        state = book.state
        chosen: Iterable[int] = book.tally.in_flight if self._shape is Shape.WAVES else state.jobs
        open_waves = [wave for wave in chosen if wave in state.jobs and wave not in self._ended]
        open_waves.sort(key=lambda wave: (self._looked.get(wave, 0.0), wave))
        return open_waves[:MAX_LOOK]

    def _take_in(self, book: Book, wave: int, look: Look | None, now: float) -> None:
        if look is None:
            since = self._missing.setdefault(wave, now)
            is_old = now - book.state.waves[wave].at >= self._pace.patience
            if is_old and (now > since or not book.tally.in_flight.get(wave)):
                reason = "AWS Batch does not know its job any more"
                self._ended[wave] = (now, Look(JobStatus.FAILED, reason=reason))
            return
        self._missing.pop(wave, None)
        if look.status.is_terminal:
            self._ended[wave] = (now, look)

    def _look_at_failures(
        self, book: Book, counts: Mapping[int, Mapping[str, int]], now: float
    ) -> None:
        """Of an array that goes on, note the children that failed and said nothing."""
        if now - self._last_failures < self._pace.failures:
            return
        for wave, children in counts.items():
            failed = children.get(JobStatus.FAILED, 0)
            if wave in self._ended or failed <= self._failed.get(wave, 0):
                continue
            self._last_failures = now
            self._failed[wave] = failed
            trials = {trial.index: trial for trial in trials_of(book.state.waves[wave], book.state)}
            for child in self._jobs.failed_children(book.state.jobs[wave]):
                trial = trials.get(child.index)
                if trial is not None and trial.state in _IN_FLIGHT:
                    self._await(trial, now, child)
            return  # one at a time: each may be a call for every 1,000 children

    def _of_ended(
        self, book: Book, wave: int, ended_at: float, look: Look, now: float
    ) -> list[Seen]:
        trials = [
            trial
            for trial in trials_of(book.state.waves[wave], book.state)
            if trial.state in _IN_FLIGHT
            and not self._is_left_to_another(trial)
            and self._is_given_up(book, trial, ended_at, look, now)
        ]
        if not trials:
            return []
        children: dict[int, Child] = {}
        if look.children:
            failed = self._jobs.failed_children(book.state.jobs[wave])
            children = {child.index: child for child in failed}
        whole = Child(0, "", look.exit_code, look.reason, look.started_at, look.stopped_at)
        other = Child(0, "", None, look.reason) if look.children else whole
        state = _end_state(book)
        found: list[Seen] = []
        for trial in trials:
            child = children.get(trial.index, other)
            if child.exit_code == DUPLICATE and look.children and state is TrialState.LOST:
                self._await(trial, ended_at, child)
            else:
                found.append(_seen(trial, state, now, child))
        return found

    def _await(self, trial: Trial, since: float, child: Child) -> None:
        known = self._silent.get(trial.number)
        if known is None or not known.is_of(trial):
            self._silent[trial.number] = _Silent(trial.wave, since, child)

    def _is_left_to_another(self, trial: Trial) -> bool:
        known = self._silent.get(trial.number)
        return known is not None and known.is_of(trial) and known.child.exit_code == DUPLICATE

    def _is_given_up(
        self, book: Book, trial: Trial, ended_at: float, look: Look, now: float
    ) -> bool:
        if book.state.stopping is not None and trial.state is TrialState.WAITING:
            return True  # it was never begun
        return self._is_borne_out(trial, ended_at, look.exit_code, now)

    def _is_borne_out(self, trial: Trial, since: float, exit_code: int | None, now: float) -> bool:
        """Whether the word of a trial whose container is gone was awaited for long enough."""
        if exit_code != DUPLICATE:
            return now - since >= self._pace.silence
        heard = max(trial.started_at or 0.0, trial.reports[-1].at if trial.reports else 0.0)
        return now - max(since, heard) >= self._pace.silence * _DOUBLED


def _is_starting(look: Look) -> bool:
    return look.status is JobStatus.STARTING or look.children.get(JobStatus.STARTING, 0) > 0


def _end_state(book: Book) -> TrialState:
    return TrialState.KILLED if book.state.stopping is not None else TrialState.LOST


def _seen(trial: Trial, state: TrialState, now: float, child: Child) -> Seen:
    return Seen(
        trial.number, trial.wave, state, now, child.job_id or trial.job_id, child.exit_code,
        _why(state, child), child.started_at, child.stopped_at,
    )  # fmt: skip


def _why(state: TrialState, child: Child) -> str:
    if state is TrialState.KILLED:
        return "the sweep was stopped"
    if child.reason:
        return child.reason
    if child.exit_code == 0:
        return (
            "its container ended with exit code 0 and never reported: is batchml in its image, and "
            "its entry left as it is?"
        )
    return "its container ended, and it never said how"
