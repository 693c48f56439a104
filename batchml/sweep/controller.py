"""The controller: what plans a sweep's trials, hears what they say, and knows when it is over.

Each round takes what trials said from the inbox, looks at their jobs, decides (`deciding.py`), and
acts: first everything that happened is in the ledger, then it is done. So it can be killed at any
point: the next one finds in the ledger what was meant, and does what is missing of it. A job is
sent exactly once by its name, a manifest is written again as it was, a stop is said again.
"""

from collections.abc import Callable, Generator
from os import urandom

from msgspec.structs import replace

from batchml.clock import Clock
from batchml.errors import BatchmlError, ConfigError
from batchml.model.names import new_key
from batchml.model.sweep import Limits, SweepSpec
from batchml.runtime.protocol import manifest
from batchml.runtime.protocol.rungs import Cutoffs
from batchml.runtime.protocol.sweep_store import COURSE, CUTOFFS, BadCourse, Course, wave_key
from batchml.runtime.storage.store import Store, StoreError
from batchml.sweep import asking, budgets, deciding, inbox, notices, plan, signals
from batchml.sweep.answering import answer
from batchml.sweep.bearing import Bearing, reached
from batchml.sweep.book import Book, touched
from batchml.sweep.deciding import (
    Begin,
    CallOff,
    Chain,
    Confirm,
    End,
    Facts,
    Promote,
    Reopen,
    Stop,
    Terminate,
)
from batchml.sweep.events import (
    Ended,
    Event,
    Noticed,
    Stopping,
    Submitted,
    Told,
    Wave,
)
from batchml.sweep.jobs import Jobs
from batchml.sweep.lease import Lease, Owner, Refused
from batchml.sweep.ledger import Fenced, Ledger
from batchml.sweep.pace import Pace
from batchml.sweep.picturing import picture, summary
from batchml.sweep.shape import Shape, countable
from batchml.sweep.summary import Picture, Summary
from batchml.sweep.watching import Watch

_TAKES = 10  # of the inbox, in one round
_GRACE = 30.0  # seconds beyond a trial's own grace until its job is ended


def draw_key() -> str:
    return new_key(urandom)


class Controller:
    """The one controller of a sweep. `tell` hears what people should know, in words; `lost`, where
    it is given, hears instead of it that something cannot be reached.

    `rounds` raises Fenced when another controller has the sweep, naming it; ConfigError for a board
    without a course; otherwise what BatchmlError the board or AWS Batch ends it with. Its ledger
    then says how far it came, and the trials that run go on.
    """

    def __init__(
        self,
        spec: SweepSpec,
        board: Store,
        jobs: Jobs,
        clock: Clock,
        pace: Pace,
        owner: Owner,
        tell: Callable[[str], None] = lambda _: None,
        draw: Callable[[], str] = draw_key,
        lost: Callable[[str], None] | None = None,
    ) -> None:
        self._spec, self._board, self._jobs = spec, board, jobs
        self._clock, self._pace, self._tell, self._draw = clock, pace, tell, draw
        self._lost = lost or tell
        self._lease = Lease(board, clock, owner, pace.lease)
        self._ledger = Ledger(board, owner.words)
        self._bearing = Bearing(clock, pace.patience)
        self._unwritten: list[Event] = []
        self._is_exhausted = False
        self._terminated: dict[int, float] = {}
        self._deadline: float | None = None  # as trials were told it
        self._over_since: float | None = None  # when nothing was left to do
        self._held: int | None = None  # the width, as this controller said it last
        self._counted: tuple[Limits | None, int | None] = None, None

    def rounds(self) -> Generator[Picture, None, None]:
        """How the sweep stands, after each round. Waits between them on the clock it was given.

        Whoever closes it gives the sweep back: the next controller may take it at once.
        """
        self._take()
        try:
            self._begin()
            while True:
                self._round()
                yield self._picture()
                if self._is_over:
                    return
                self._clock.sleep(self._pause())
        finally:
            self._give_back()

    @property
    def summary(self) -> Summary:
        """How the sweep stands; what came of it, once it is over."""
        return summary(self._book, self._picture())

    # -- one round --------------------------------------------------------------------------------

    def _take(self) -> None:
        with reached():
            held = self._lease.take()
        if isinstance(held, Refused):
            raise Fenced(held.holder.words)

    def _begin(self) -> None:
        with reached():
            self._read()

    def _read(self) -> None:
        data = self._board.get(COURSE)
        try:
            self._course = Course.from_json(data or b"{}")
        except BadCourse as error:
            raise ConfigError("The sweep's board", [str(error)]) from error
        self._shape = Shape(self._course.shape)
        self._version = Cutoffs.from_json(self._board.get(CUTOFFS)).version
        self._watch = Watch(self._jobs, self._pace, self._shape)
        self._book = Book(self._spec, self._ledger.take_over())
        self._book.rungs.is_changed = True
        self._is_over = False

    def _round(self) -> None:
        """Everything once. What fails for a while only is tried again in the next round."""
        try:
            self._lease.renew()
            self._turn(self._clock.now())
        except (StoreError, BatchmlError) as error:
            if isinstance(error, Fenced | ConfigError):
                raise
            if self._bearing.failed(error):
                self._lost(str(error))
        else:
            self._bearing.went_well()

    def _turn(self, now: float) -> None:
        book = self._book
        # Looked at first: what a job's trials said before its end is heard once the end is seen.
        self._watch.look(book, now)
        heard, is_all = self._hear()
        asked = self._answer(asking.pending(self._board), now)
        if is_all:
            for seen in self._watch.conclude(book, now):
                self._note(seen)
        facts = self._facts(now, self._watch.over if is_all else frozenset())
        actions = deciding.decide(book, facts)
        for action in actions:
            self._record(action, now)
        for notice in notices.due(book, now, self._pace.patience, self._watch.is_starting):
            self._notice(notice)
        self._write()
        if heard:
            inbox.discard(self._board, heard)
        if asked:
            self._board.delete(*asked)
        for action in actions:
            self._do(action, now)
        self._hold()
        self._say_deadline(now)
        self._submit()
        self._publish()
        self._is_over = book.state.ended is not None and not self._asked_again(asked)

    def _hear(self) -> tuple[list[str], bool]:
        """Take what trials said into the state; the keys to discard once the ledger has it, and
        whether nothing is unheard."""
        for _ in range(_TAKES):
            taken = inbox.take(self._board)
            for message in taken.messages:
                self._note(Told(message))
            if len(taken.keys) < inbox.MOST:
                return taken.keys, True
            self._write()
            inbox.discard(self._board, taken.keys)
            self._lease.renew()
        return [], False

    def _facts(self, now: float, over: frozenset[int]) -> Facts:
        return Facts(
            now=now,
            shape=self._shape,
            wanted=self._wanted,
            purse=self._purse(now),
            apart=self._pace.apart,
            grace=self._course.grace + _GRACE,
            called_off=None if self._book.state.ended else signals.called_off(self._board),
            is_exhausted=self._is_exhausted,
            over=over,
        )

    @property
    def _wanted(self) -> int | None:
        """How many trials there will be, by the limits as they are now."""
        limits = budgets.limits(self._book.state, self._spec)
        if limits is not self._counted[0]:  # to count the points of a grid takes time
            self._counted = limits, countable(replace(self._spec, limits=limits))
        return self._counted[1]

    def _purse(self, now: float) -> budgets.Money | None:
        tally, jobs = self._book.tally, self._jobs
        return budgets.money(tally, self._book.state, jobs.hourly, jobs.timeout, now)

    def _note(self, event: Event) -> None:
        """It happened: in the state at once, in the ledger before anything is done about it."""
        self._book.fold(event)
        self._unwritten.append(event)

    def _write(self) -> None:
        if self._unwritten:
            self._ledger.append(self._unwritten)
            self._unwritten = []

    def _notice(self, notice: Noticed) -> None:
        self._note(notice)
        for line in notice.words.splitlines():
            self._tell(line)

    # -- what was decided: first what the ledger says of it ---------------------------------------

    def _record(self, action: deciding.Action, now: float) -> None:
        book = self._book
        match action:
            case Begin(many):
                waves = plan.fresh(book, self._shape, many, now, self._draw)
                self._is_exhausted = sum(len(wave.trials) for wave in waves) < many
                self._plan(waves)
            case Chain(many):
                self._plan(plan.chain(book, many, now, self._draw))
                self._is_exhausted = not book.state.waves
            case Promote(trials):
                self._plan(plan.promoted(book, trials, now, self._draw))
            case Confirm(trials):
                self._plan(plan.confirming(book, trials, now, self._draw))
            case Stop(by, why):
                self._stop(by, why, now)
            case Reopen(why):
                signals.call_back(self._board)
                # To confirm: what was forgiven before stays forgiven.
                self._note(replace(book.state.forgiven, why=why, at=now, paused=0.0))
            case End(by, why):
                # Before it is over: nobody comes back to one that is.
                if not self._is_released(now):
                    return
                for notice in notices.of_confirming(book, now):
                    self._notice(notice)
                if book.state.stopping is None and by != deciding.DONE:
                    self._note(Stopping(by, why, now))
                self._note(Ended(why, now))

    def _is_released(self, now: float) -> bool:
        """Whether nothing is held any more, or that is no longer waited for: jobs whose trials have
        all told their ends may take a moment to come to their own."""
        self._over_since = now if self._over_since is None else self._over_since
        is_patient = now - self._over_since < self._pace.silence
        return self._jobs.release(is_patient=is_patient) or not is_patient

    def _plan(self, waves: list[Wave]) -> None:
        for wave in waves:
            self._note(wave)

    def _stop(self, by: str, why: str, now: float) -> None:
        self._note(Stopping(by, why, now))
        failed = self._book.tally.first_failure
        if by == deciding.FAILURES and failed is not None:
            again = len(self._book.state.reopened)  # each time that it went on has its own
            kind = f"failures-{again}" if again else "failures"
            self._notice(Noticed(kind, notices.last_lines(failed), now, failed.number))

    # -- then what is done about it ---------------------------------------------------------------

    def _do(self, action: deciding.Action, now: float) -> None:
        match action:
            case Stop(by, why) if by != deciding.USER:
                signals.call_off(self._board, why)
            case CallOff(why):
                signals.call_off(self._board, why)
            case Terminate(waves, why):
                self._terminate(waves, why, now)

    def _terminate(self, waves: tuple[int, ...], why: str, now: float) -> None:
        """Once, and again when nothing came of it for a while."""
        jobs = self._book.state.jobs
        due = [
            wave
            for wave in waves
            if wave in jobs
            and wave not in self._watch.over
            and now - self._terminated.get(wave, float("-inf")) >= self._pace.silence
        ]
        if due:
            self._terminated.update(dict.fromkeys(due, now))
            self._jobs.terminate([jobs[wave] for wave in due], why)

    def _hold(self) -> None:
        """Where more trials wait than may run at once, AWS Batch keeps their width."""
        state, spec = self._book.state, self._spec
        parallel = budgets.limits(state, spec).parallel
        before = parallel if self._shape is Shape.WAVES else spec.limits.parallel
        unsent = (plan.size(wave, state, spec) for wave in state.open_waves)  # rungs name no trials
        most = max(budgets.in_flight(state), *unsent, 0)
        if self._held != parallel and most > min(parallel, before, self._held or parallel):
            self._jobs.hold(parallel)
            self._held = parallel

    def _say_deadline(self, now: float) -> None:
        """Trials keep the hours by themselves, also while no controller is there."""
        end = budgets.deadline(self._book.state, self._spec, now)
        if end is not None and end != self._deadline and self._book.state.waves:
            signals.say_deadline(self._board, end)
            self._deadline = end

    def _submit(self) -> None:
        """Send what was planned and not sent, as far as is known; each at most once by its name."""
        for wave in self._book.state.open_waves:
            if self._is_too_wide(wave):
                continue
            after = self._book.state.jobs[wave.after] if wave.after else ""
            many, width = plan.size(wave, self._book.state, self._spec), self._manifest(wave)
            job_id = self._jobs.submit(wave, many, width, after)
            self._note(Submitted(wave.number, job_id, self._clock.now()))
            self._write()

    def _is_too_wide(self, wave: Wave) -> bool:
        """True while there are fewer free places than its trials want, and others run: only a
        wave by itself is held to its width. Many failed trials that are run again are such."""
        state, busy = self._book.state, self._book.tally.in_flight
        sent = sum(many for number, many in busy.items() if number in state.jobs)
        free = budgets.limits(state, self._spec).parallel - sent
        return self._shape is Shape.WAVES and sent > 0 and free < len(wave.trials)

    def _manifest(self, wave: Wave) -> int:
        """Write the wave's manifest; the width of a line. Deeper rungs read that of their first."""
        if wave.rung:
            wave = self._book.state.waves[wave.number - wave.rung]
        data, width = manifest.encode(self._course.key, wave.number, plan.entries(wave))
        self._board.put(wave_key(wave.number), data)
        return width

    def _publish(self) -> None:
        """Tell trials what they are judged by, where they judge themselves."""
        stop, rungs = self._spec.early_stop, self._book.rungs
        if not rungs.is_changed or stop.resume or stop.method not in ("asha", "median"):
            return
        self._board.put(CUTOFFS, rungs.published(self._version + 1).to_json())
        self._version += 1
        rungs.is_changed = False

    # -- what people ask of a sweep that exists ---------------------------------------------------

    def _answer(self, asked: list[asking.Ask], now: float) -> list[str]:
        """Do what was asked; the keys of what was done. What stops comes to its end first."""
        state = self._book.state
        if not asked or (state.stopping is not None and state.ended is None):
            return []
        events: list[Event] = []
        for each in asked:
            events = answer(self._book, self._shape, each, now, self._draw)
            again = [trial for event in events for trial in touched(event, state)]
            if events:
                signals.call_back(self._board, again)
            for event in events:
                self._note(event)
        self._is_exhausted, self._over_since = False, None
        return asking.places(asked)

    def _asked_again(self, done: list[str]) -> bool:
        """Something was asked while the sweep came to its end."""
        return any(key not in done for key in asking.places(asking.pending(self._board)))

    # -- around it --------------------------------------------------------------------------------

    def _picture(self) -> Picture:
        now = self._clock.now()
        return picture(self._book, self._wanted, self._purse(now), now)

    def _pause(self) -> float:
        begun = budgets.began_at(self._book.state)
        is_young = begun is None or self._clock.now() - begun < self._pace.youth
        return self._pace.young if is_young else self._pace.poll

    def _give_back(self) -> None:
        try:
            self._lease.release()
        except StoreError:
            pass  # it expires by itself
