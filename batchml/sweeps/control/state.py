"""SweepState: the state of a sweep, which follows from the events of its ledger.

Messages of trials may come twice, late, or in any order: the state is the same. Where two messages
contradict each other, a rule decides that does not depend on which came first:

- a step of a trial has the values that were reported earliest, by the trial's own clock;
- of a trial's batches the last counts; of its attempts the first with a good end, otherwise the
  last. Its own messages count more than the observations of AWS Batch; but the end of an attempt
  that may be followed by another counts only when AWS Batch reports that the job has ended;
- a batch in which a trial begins anew replaces all that the trial reported before.

So each rule takes the greater of two by an order of its own: a join semilattice (Shapiro et al.
2011, "Conflict-free Replicated Data Types", section 2.3).

A notice is kept while it is true: about a failure until the trial is run again or has reported a
better end; about waiting trials until a trial begins; about the best trials, which were not run
again, until the sweep continues.

A trial that is paused at a rung when the sweep ends by itself counts as PRUNED; it is paused again
if the sweep is reopened.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from msgspec import Struct

from batchml.model.sweep import RecordedDecision, SweepLimits, Trial, TrialReport, TrialState
from batchml.runtime.protocol.sweep import SIGNALLED
from batchml.sweeps.control.events import (
    FAILURES,
    USER,
    BatchSubmitted,
    Event,
    LimitsChanged,
    MessageReceived,
    NoticeGiven,
    SweepEnded,
    SweepReopened,
    SweepStopping,
    TrialBatch,
    TrialObserved,
)

# --- One event and one trial ----------------------------------------------------------------------


Message = Mapping[str, Any]
Rank = tuple[int, int, int]  # number of the batch, attempt, number of the message
Attempt = tuple[int, int]  # number of the batch, attempt

# Ends after which AWS Batch makes no other attempt: messages of later attempts do not count.
_GOOD_ENDS = frozenset(("DONE", "PRUNED", "DIVERGED", "PAUSED"))
_EXITED = "Essential container in task exited"  # AWS Batch's reason for any end of a program
_LOWEST: Rank = (0, 0, 0)
_step = attrgetter("step")


class AttemptSpan(Struct, gc=False):
    """When an attempt ran, as far as its messages tell."""

    start: float
    last: float  # the time of its newest message, or its end
    is_over: bool = False


class TrialHistory(Struct):
    """What is remembered of a trial to decide which later events change it."""

    since: int = 0  # number of the batch in which it last began anew
    order: tuple[int, ...] = ()  # of `message`: see `_message_order`
    message: dict[str, Any] = {}  # the message of the last batch that decides the trial's state
    observations: dict[int, TrialObserved] = {}  # by number of the batch
    spans: dict[Attempt, AttemptSpan] = {}
    current: Attempt = (0, 0)  # the running attempt, while `running` is set
    running: AttemptSpan | None = None  # its span; None: no attempt runs
    metrics: dict[str, Rank] = {}  # by name: the rank of the message with the metric's value
    decisions: dict[int, Rank] = {}  # by step: the rank of the message with the decision


def apply_batch(trial: Trial, history: TrialHistory, batch: TrialBatch, index: int) -> None:
    """Put the trial into a batch, unless it is in a later one."""
    if batch.number < trial.wave:
        return
    if batch.number > trial.wave:
        _enter_batch(trial, history, batch.number)
    trial.index, trial.target = index, batch.target
    planned = batch.trials[index]
    trial.seed = planned.seed
    if not planned.resumes:
        history.since = batch.number
        trial.reports, trial.decisions, trial.metrics = [], [], {}
        history.metrics, history.decisions = {}, {}
    _update_state(trial, history)


def name_jobs(trials: Mapping[int, Trial], batch: TrialBatch | None, job_id: str) -> None:
    """Set the job ids of a batch's trials. The job of a batch of one trial is no array."""
    planned = batch.trials if batch else ()
    for index, each in enumerate(planned):
        trial = trials[each.number]
        if batch is not None and trial.wave == batch.number:
            trial.job_id = f"{job_id}:{index}" if len(planned) > 1 else job_id


def apply_message(
    trial: Trial, history: TrialHistory, message: Message, batches: Mapping[int, TrialBatch]
) -> None:
    """Apply a message of the trial."""
    wave, attempt, kind = message["wave"], message["attempt"], message["kind"]
    running = history.running
    if running is not None and kind == "report" and history.current == (wave, attempt):
        # A short path for nearly all messages of a large sweep: the running attempt reports more.
        if message["at"] > running.last:
            running.last = message["at"]
        _take_values(trial, history, message)
        return
    _note_span(history, (wave, attempt), message)
    if wave > trial.wave:  # a rung of `halving`: its trials become known by their messages
        _join_batch(trial, history, wave, message["index"], batches)
    if wave >= history.since:
        _take_values(trial, history, message)
    if wave == trial.wave and (order := _message_order(message)) > history.order:
        history.order, history.message = order, dict(message)
    _update_state(trial, history)


def apply_observation(
    trial: Trial, history: TrialHistory, observed: TrialObserved, batches: Mapping[int, TrialBatch]
) -> None:
    """Apply an observation of AWS Batch."""
    if observed.wave > trial.wave:
        index = observed.job_id.rpartition(":")[2] if ":" in observed.job_id else "0"
        _join_batch(trial, history, observed.wave, int(index), batches)
    before = history.observations.get(observed.wave)
    if before is None or _observation_order(observed) > _observation_order(before):
        history.observations[observed.wave] = observed
    _update_state(trial, history)


def mark_left_behind(trial: Trial) -> None:
    """Mark a trial PRUNED that is paused at a rung when the sweep ends."""
    trial.state = TrialState.PRUNED
    trial.why = trial.why or "others did better at its rung, and the sweep has ended"


def restore_paused(trial: Trial, history: TrialHistory) -> bool:
    """Pause the trial again in a sweep that was reopened. False if it had not been paused."""
    if history.message.get("state") != TrialState.PAUSED:
        return False
    _update_state(trial, history)
    return True


def _take_values(trial: Trial, history: TrialHistory, message: Message) -> None:
    """Take the values, decisions and metrics of a message."""
    if "points" in message:
        _add_reports(trial.reports, message["points"])
    trial.counter = message.get("counter", trial.counter)
    trial.other = message.get("other", trial.other)
    decisions, metrics = message.get("decisions"), message.get("metrics")
    if decisions or metrics:
        rank: Rank = (message["wave"], message["attempt"], message["seq"])
        for name, value in (metrics or {}).items():
            if rank > history.metrics.get(name, _LOWEST):
                history.metrics[name] = rank
                trial.metrics[name] = value
        for step, value, cutoff, version, goes_on in decisions or ():
            if rank > history.decisions.get(step, _LOWEST):
                history.decisions[step] = rank
                decision = RecordedDecision(step, value, cutoff, version, goes_on)
                _put_decision(trial.decisions, decision)


def _add_reports(reports: list[TrialReport], points: Sequence[Any]) -> None:
    """Add points of a message; of two reports of one step the earlier one counts."""
    for step, values, at in points:
        new = TrialReport(step, tuple(values), at)
        if not reports or step > reports[-1].step:
            reports.append(new)
            continue
        index = bisect_left(reports, step, key=_step)
        if reports[index].step != step:
            reports.insert(index, new)
        elif (new.at, new.values) < (reports[index].at, reports[index].values):
            reports[index] = new


def _put_decision(decisions: list[RecordedDecision], new: RecordedDecision) -> None:
    index = bisect_left(decisions, new.step, key=_step)
    if index < len(decisions) and decisions[index].step == new.step:
        decisions[index] = new
    else:
        decisions.insert(index, new)


def _note_span(history: TrialHistory, attempt: Attempt, message: Message) -> None:
    """Note when an attempt ran."""
    at, began, is_end = message["at"], message["began"], message["kind"] == "end"
    span = history.spans.get(attempt)
    if span is None:
        history.spans[attempt] = AttemptSpan(began, at, is_end)
        return
    if is_end:  # of two ends the first counts
        span.last = min(span.last, at) if span.is_over else at
        span.is_over = True
    elif not span.is_over and at > span.last:
        span.last = at
    span.start = min(span.start, began)


def _message_order(message: Message) -> tuple[int, ...]:
    """Of two messages about one batch, the greater decides the state of the trial."""
    attempt, is_end = message["attempt"], message["kind"] == "end"
    if is_end and message["state"] in _GOOD_ENDS:
        return (2, -attempt, -message["seq"])
    return (1, attempt, int(is_end), -message["seq"])


def _observation_order(observed: TrialObserved) -> tuple[bool, float, str]:
    return (TrialState(observed.state).is_ended, observed.at, observed.state)


def _enter_batch(trial: Trial, history: TrialHistory, wave: int) -> None:
    """Begin another batch, in which nothing is known of the trial yet."""
    trial.wave = wave
    trial.job_id = ""
    trial.index = trial.target = trial.attempt = 0
    history.order, history.message = (), {}


def _join_batch(
    trial: Trial, history: TrialHistory, wave: int, index: int, batches: Mapping[int, TrialBatch]
) -> None:
    """Put the trial into a batch that did not name it."""
    _enter_batch(trial, history, wave)
    trial.index = index
    trial.target = batches[wave].target if wave in batches else 0


def _update_state(trial: Trial, history: TrialHistory) -> None:
    """Set the state, and what depends on it, by the messages and observations of the last batch."""
    message, observed = history.message, history.observations.get(trial.wave)
    trial.exit_code, trial.why, trial.tail, trial.stopped_at = None, "", (), None
    if message:
        trial.attempt, trial.index = message["attempt"], message["index"]
        trial.job_id = message.get("job") or trial.job_id
    if message and message["kind"] == "end" and (not message.get("again") or _is_over(observed)):
        trial.state = TrialState(message["state"])
        trial.exit_code, trial.why = message.get("code"), _why_it_ended(message, observed)
        trial.tail, trial.stopped_at = tuple(message.get("tail") or ()), message["at"]
    elif observed and (not message or _is_over(observed)):
        trial.state, trial.job_id = TrialState(observed.state), observed.job_id or trial.job_id
        trial.exit_code, trial.why = observed.exit_code, observed.why
        if trial.state.is_ended:
            trial.stopped_at = (
                observed.stopped_at if observed.stopped_at is not None else observed.at
            )
    else:
        is_between = message and message["kind"] == "end"  # between two attempts
        trial.state = TrialState.RUNNING if message and not is_between else TrialState.WAITING
    _update_times(trial, history)


def _why_it_ended(message: Message, observed: TrialObserved | None) -> str:
    """The trial's own words; but who stopped it with a signal is known to AWS Batch only."""
    why: str = message.get("why", "")
    if why == SIGNALLED and observed is not None and _is_over(observed) and observed.why:
        return why if observed.why.startswith(_EXITED) else observed.why
    return why


def _is_over(observed: TrialObserved | None) -> bool:
    return observed is not None and TrialState(observed.state).is_ended


def _update_times(trial: Trial, history: TrialHistory) -> None:
    """Set how long the trial's containers ran. A lost container ran until its last message."""
    attempts, starts, seconds = sorted(history.spans), [], 0.0
    newest = attempts[-1] if attempts else None
    last = {wave: (wave, attempt) for wave, attempt in attempts}
    first = {wave: (wave, attempt) for wave, attempt in reversed(attempts)}
    trial.resumed_at = history.running = None
    for (wave, attempt), span in history.spans.items():
        observed = history.observations.get(wave) if (wave, attempt) == last[wave] else None
        start, end = span.start, span.last
        is_over = span.is_over or (wave, attempt) != newest or trial.wave > wave
        if observed is not None:
            # AWS Batch tells when a job started, not when its last attempt did.
            if observed.started_at is not None and (wave, attempt) == first[wave]:
                start = min(start, observed.started_at)
            if not span.is_over and _is_over(observed):
                end, is_over = max(end, observed.stopped_at or end), True
        starts.append(start)
        if is_over:
            seconds += max(0.0, end - start)
        else:
            trial.resumed_at = start
            history.current, history.running = (wave, attempt), span
    for wave, observed in history.observations.items():
        if wave not in last and observed.started_at is not None:
            starts.append(observed.started_at)
            if observed.stopped_at is not None:
                seconds += max(0.0, observed.stopped_at - observed.started_at)
            elif wave == trial.wave and not _is_over(observed):
                trial.resumed_at = observed.started_at
    trial.seconds, trial.started_at = seconds, min(starts, default=None)


# --- All events and all trials --------------------------------------------------------------------


# Kinds of notices: no trial begins; the best trials were not run again.
WAITING, CONFIRM = "waiting", "confirm"
RESUMABLE = (USER, FAILURES)  # the causes of a stop after which a sweep can be resumed

_NEVER = SweepReopened("", 0.0)


class SweepState:
    """The state of a sweep, without its sweep file. Only `apply` changes the state."""

    def __init__(self) -> None:
        self.trials: dict[int, Trial] = {}
        self.batches: dict[int, TrialBatch] = {}  # by number
        self.jobs: dict[int, str] = {}  # number of a batch -> job id, once it is known
        self.limits: SweepLimits | None = None  # of the last top-up; None: the file's
        self.requested_limits: SweepLimits | None = None  # `limits` without changes `for_now`
        self.notices: dict[str, NoticeGiven] = {}  # by kind; the notices that are still true
        self.stopping: SweepStopping | None = None
        self.ended: SweepEnded | None = None
        self.reopened: dict[float, SweepReopened] = {}  # by time
        self.counts: dict[TrialState, int] = dict.fromkeys(TrialState, 0)
        self.segment = 0  # the last segment of the ledger that was applied
        self._open: dict[int, TrialBatch] = {}  # by number; see `open_batches`
        self._histories: dict[int, TrialHistory] = {}

    def apply(self, event: Event) -> None:
        """Apply one event. An event that was applied before changes nothing."""
        # A large ledger has tens of thousands of messages, and some hundreds of other events.
        if type(event) is MessageReceived:
            self._apply_message(event)
            return
        match event:
            case TrialObserved():
                self._apply_observation(event)
            case TrialBatch():
                self._apply_batch(event)
            case BatchSubmitted():
                self.jobs[event.wave] = event.job_id
                self._open.pop(event.wave, None)
                name_jobs(self.trials, self.batches.get(event.wave), event.job_id)
            case LimitsChanged():
                self.limits = event.limits
                if not event.for_now:
                    self.requested_limits = event.limits
            case NoticeGiven():
                if self._is_true(event):
                    self.notices.setdefault(event.kind, event)
            case SweepStopping():  # the first counts: its grace period has begun
                self.stopping = self.stopping or event
            case SweepEnded():
                self.ended = self.ended or event
                self._prune_paused()
            case SweepReopened():
                self.stopping = self.ended = None
                self.reopened[event.at] = event
                self.notices.pop(CONFIRM, None)
                self._restore_paused()

    @property
    def paused_seconds(self) -> float:
        """Seconds between ends of the sweep and its reopenings."""
        return sum(each.paused for each in self.reopened.values())

    @property
    def last_reopening(self) -> SweepReopened:
        """The last reopening; earlier failures no longer count."""
        return max(self.reopened.values(), key=lambda each: each.at, default=_NEVER)

    @property
    def open_batches(self) -> list[TrialBatch]:
        """The batches whose job id is unknown: they were intended, and may have been submitted."""
        return list(self._open.values())

    def sender_of(self, message: Message) -> int:
        """The number of the trial that sent a message; negative if it is unknown.

        A child that could not read its trial's number sends only its index.
        """
        number: int = message["trial"]
        batch, index = self.batches.get(message["wave"]), message["index"]
        if number < 0 and batch is not None and 0 <= index < len(batch.trials):
            return batch.trials[index].number
        return number

    def __eq__(self, other: object) -> bool:
        """Whether both describe the same sweep, however far each has read the ledger."""
        return isinstance(other, SweepState) and self._content() == other._content()

    __hash__ = None  # type: ignore[assignment]

    def _content(self) -> tuple[object, ...]:
        return (
            self.trials, self.batches, self.jobs, self.limits, self.requested_limits, self.notices,
            self.stopping, self.ended, self.reopened, self.counts,
        )  # fmt: skip

    def _apply_batch(self, batch: TrialBatch) -> None:
        if batch.number in self.batches:
            return
        self.batches[batch.number] = batch
        for index, planned in enumerate(batch.trials):
            trial = self.trials.get(planned.number)
            before = trial.state if trial else None
            if trial is None:
                trial = self.trials[planned.number] = Trial(
                    planned.number, planned.params, planned.seed, planned.origin, planned.confirms,
                    planned_at=batch.at,
                )  # fmt: skip
                self._histories[planned.number] = TrialHistory()
            apply_batch(trial, self._histories[planned.number], batch, index)
            self._update(trial, before)
        if batch.number in self.jobs:
            name_jobs(self.trials, batch, self.jobs[batch.number])
        else:
            self._open[batch.number] = batch

    def _apply_message(self, event: MessageReceived) -> None:
        message = event.message
        trial = self.trials.get(self.sender_of(message))
        if trial is None or message["wave"] not in self.batches:  # another sweep's message
            return
        before = trial.state
        apply_message(trial, self._histories[trial.number], message, self.batches)
        if trial.state is not before:
            self._update(trial, before)

    def _apply_observation(self, event: TrialObserved) -> None:
        trial = self.trials.get(event.trial)
        if trial is None:
            return
        before = trial.state
        apply_observation(trial, self._histories[trial.number], event, self.batches)
        self._update(trial, before)

    def _update(self, trial: Trial, before: TrialState | None) -> None:
        """Update counts and notices: a trial may be in another state, or in a later batch."""
        if trial.state is TrialState.PAUSED and self._has_ended_by_itself:
            mark_left_behind(trial)
        self._count(before, trial.state)
        if self.notices and trial.state is not before:
            for notice in list(self.notices.values()):
                if not _is_true(notice, trial):
                    del self.notices[notice.kind]

    def _is_true(self, notice: NoticeGiven) -> bool:
        return all(_is_true(notice, trial) for trial in self.trials.values())

    @property
    def _has_ended_by_itself(self) -> bool:
        """Whether no paused trial will continue, unless the sweep is reopened."""
        by = self.stopping.by if self.stopping else ""
        return self.ended is not None and by not in RESUMABLE

    def _prune_paused(self) -> None:
        if self._has_ended_by_itself and self.counts[TrialState.PAUSED]:
            for trial in self.trials.values():
                if trial.state is TrialState.PAUSED:
                    mark_left_behind(trial)
                    self._count(TrialState.PAUSED, trial.state)

    def _restore_paused(self) -> None:
        for trial in self.trials.values() if self.counts[TrialState.PRUNED] else ():
            if trial.state is TrialState.PRUNED and restore_paused(
                trial, self._histories[trial.number]
            ):
                self._count(TrialState.PRUNED, trial.state)

    def _count(self, before: TrialState | None, now: TrialState) -> None:
        if before is not None:
            self.counts[before] -= 1
        self.counts[now] += 1


def _is_true(notice: NoticeGiven, trial: Trial) -> bool:
    """Whether a notice is still true, as far as this trial is concerned."""
    if notice.kind == WAITING:
        return trial.started_at is None
    return notice.trial != trial.number or trial.state.is_failure
