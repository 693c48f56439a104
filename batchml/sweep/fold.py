"""What one message, or one look of AWS Batch's, makes of a trial. The rules are `state.py`'s.

Each rule takes the better of two by an order of its own, so that neither repeating nor reordering
changes what comes out: a join semilattice (Shapiro et al. 2011, "Conflict-free Replicated Data
Types", section 2.3).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from batchml.model.sweep import Decision, Report, Trial, TrialState
from batchml.sweep.events import Seen, Wave

Message = Mapping[str, Any]
Rank = tuple[int, int, int]  # wave, attempt, number of the message
Attempt = tuple[int, int]  # wave, attempt

# Ends after which AWS Batch does not try again: what another attempt says later does not count.
_GOOD = frozenset(("DONE", "PRUNED", "DIVERGED", "PAUSED"))
_NOTHING = (0, 0, 0)


class Span(Struct, gc=False):
    """When an attempt ran, as far as it was heard of."""

    start: float
    last: float  # the newest that it said, or its end
    is_over: bool = False


class Past(Struct):
    """What is known of a trial beside what it shows: by what order it came to show that."""

    since: int = 0  # the wave in which it last began anew
    standing: tuple[int, ...] = ()  # the order of `said`
    said: dict[str, Any] = {}  # the message that says most about its state, of the last wave
    seen: dict[int, Seen] = {}  # by wave
    spans: dict[Attempt, Span] = {}
    current: Attempt = (0, 0)  # the one that runs, with its span
    running: Span | None = None
    metrics: dict[str, Rank] = {}  # by name
    decisions: dict[int, Rank] = {}  # by step


def plan(trial: Trial, past: Past, wave: Wave, index: int) -> None:
    """The trial is in this wave from now on, unless it is in a later one."""
    if wave.number < trial.wave:
        return
    if wave.number > trial.wave:
        _enter(trial, past, wave.number)
    trial.index, trial.target = index, wave.target
    planned = wave.trials[index]
    trial.seed = planned.seed
    if not planned.resumes:
        past.since = wave.number
        trial.reports, trial.decisions, trial.metrics = [], [], {}
        past.metrics, past.decisions = {}, {}
    _settle(trial, past)


def name_jobs(trials: Mapping[int, Trial], wave: Wave | None, job_id: str) -> None:
    """The job of a wave is known; a wave of one trial is a plain job."""
    planned = wave.trials if wave else ()
    for index, each in enumerate(planned):
        trial = trials[each.number]
        if wave is not None and trial.wave == wave.number:
            trial.job_id = f"{job_id}:{index}" if len(planned) > 1 else job_id


def fold_told(trial: Trial, past: Past, message: Message, waves: Mapping[int, Wave]) -> None:
    """What a trial says of itself."""
    wave, attempt, kind = message["wave"], message["attempt"], message["kind"]
    running = past.running
    if running is not None and kind == "report" and past.current == (wave, attempt):
        # Nearly all messages of a large sweep: the attempt that is known to run goes on.
        if message["at"] > running.last:
            running.last = message["at"]
        _take_up(trial, past, message)
        return
    _heard(past, (wave, attempt), message)
    if wave > trial.wave:  # of `halving`, which trials a rung has is known when they say so
        _join(trial, past, wave, message["index"], waves)
    if wave >= past.since:
        _take_up(trial, past, message)
    if wave == trial.wave and (order := _order(message)) > past.standing:
        past.standing, past.said = order, dict(message)
    _settle(trial, past)


def fold_seen(trial: Trial, past: Past, seen: Seen, waves: Mapping[int, Wave]) -> None:
    """What AWS Batch says of a trial."""
    if seen.wave > trial.wave:
        index = seen.job_id.rpartition(":")[2] if ":" in seen.job_id else "0"
        _join(trial, past, seen.wave, int(index), waves)
    before = past.seen.get(seen.wave)
    if before is None or _seen_order(seen) > _seen_order(before):
        past.seen[seen.wave] = seen
    _settle(trial, past)


def leave_behind(trial: Trial) -> None:
    """The sweep is over, and a trial still waits at a rung: others went on."""
    trial.state = TrialState.PRUNED
    trial.why = trial.why or "others did better at its rung, and the sweep is over"


def take_back(trial: Trial, past: Past) -> bool:
    """The sweep goes on: whether the trial was left behind, and waits again."""
    if past.said.get("state") != TrialState.PAUSED:
        return False
    _settle(trial, past)
    return True


def _take_up(trial: Trial, past: Past, message: Message) -> None:
    """The numbers in a message."""
    if "points" in message:
        _report(trial.reports, message["points"])
    decisions, metrics = message.get("decisions"), message.get("metrics")
    if decisions or metrics:
        rank: Rank = (message["wave"], message["attempt"], message["seq"])
        for name, value in (metrics or {}).items():
            if rank > past.metrics.get(name, _NOTHING):
                past.metrics[name] = rank
                trial.metrics[name] = value
        for step, value, cutoff, version, goes_on in decisions or ():
            if rank > past.decisions.get(step, _NOTHING):
                past.decisions[step] = rank
                _decide(trial.decisions, Decision(step, value, cutoff, version, goes_on))


def _report(reports: list[Report], points: Sequence[Any]) -> None:
    for step, values, at in points:
        new = Report(step, tuple(values), at)
        if not reports or step > reports[-1].step:
            reports.append(new)
            continue
        place = bisect_left(reports, step, key=_step)
        if reports[place].step != step:
            reports.insert(place, new)
        elif (new.at, new.values) < (reports[place].at, reports[place].values):
            reports[place] = new


def _decide(decisions: list[Decision], new: Decision) -> None:
    place = bisect_left(decisions, new.step, key=_step)
    if place < len(decisions) and decisions[place].step == new.step:
        decisions[place] = new
    else:
        decisions.insert(place, new)


def _step(each: Report | Decision) -> int:
    return each.step


def _heard(past: Past, attempt: Attempt, message: Message) -> None:
    """Note when an attempt ran."""
    at, began, is_end = message["at"], message["began"], message["kind"] == "end"
    span = past.spans.get(attempt)
    if span is None:
        past.spans[attempt] = Span(began, at, is_end)
        return
    if is_end:  # the first, should there be two
        span.last = min(span.last, at) if span.is_over else at
        span.is_over = True
    elif not span.is_over and at > span.last:
        span.last = at
    span.start = min(span.start, began)


def _newest(past: Past) -> Attempt:
    return max(past.spans, default=(0, 0))


def _order(message: Message) -> tuple[int, ...]:
    """Of two messages about one wave, the greater says what the trial's state is."""
    attempt, is_end = message["attempt"], message["kind"] == "end"
    if is_end and message["state"] in _GOOD:
        return (2, -attempt, -message["seq"])
    return (1, attempt, int(is_end), -message["seq"])


def _seen_order(seen: Seen) -> tuple[bool, float, str]:
    return (TrialState(seen.state).is_ended, seen.at, seen.state)


def _enter(trial: Trial, past: Past, wave: int) -> None:
    """Another wave: nothing is known of the trial there."""
    trial.wave = wave
    trial.job_id = ""
    trial.index = trial.target = trial.attempt = 0
    past.standing, past.said = (), {}


def _join(trial: Trial, past: Past, wave: int, index: int, waves: Mapping[int, Wave]) -> None:
    """The trial is in a wave that did not name it."""
    _enter(trial, past, wave)
    trial.index = index
    trial.target = waves[wave].target if wave in waves else 0


def _settle(trial: Trial, past: Past) -> None:
    """The state, and all that goes with it, from what is known of the last wave."""
    said, seen = past.said, past.seen.get(trial.wave)
    trial.exit_code, trial.why, trial.tail, trial.stopped_at = None, "", (), None
    if said:
        trial.attempt, trial.index = said["attempt"], said["index"]
        trial.job_id = said.get("job") or trial.job_id
    if said and said["kind"] == "end" and (not said.get("again") or _is_over(seen)):
        trial.state = TrialState(said["state"])
        trial.exit_code, trial.why = said.get("code"), said.get("why", "")
        trial.tail, trial.stopped_at = tuple(said.get("tail") or ()), said["at"]
    elif seen and (not said or _is_over(seen)):
        trial.state, trial.job_id = TrialState(seen.state), seen.job_id or trial.job_id
        trial.exit_code, trial.why = seen.exit_code, seen.why
        if trial.state.is_ended:
            trial.stopped_at = seen.stopped_at if seen.stopped_at is not None else seen.at
    else:
        is_between = said and said["kind"] == "end"  # attempts of AWS Batch's
        trial.state = TrialState.RUNNING if said and not is_between else TrialState.WAITING
    _measure(trial, past)


def _is_over(seen: Seen | None) -> bool:
    return seen is not None and TrialState(seen.state).is_ended


def _measure(trial: Trial, past: Past) -> None:
    """How long its containers ran. One that was lost ran until it was last heard of."""
    newest, starts, seconds = _newest(past), [], 0.0
    heard = sorted(past.spans)
    last = {wave: (wave, attempt) for wave, attempt in heard}
    first = {wave: (wave, attempt) for wave, attempt in reversed(heard)}
    trial.resumed_at = past.running = None
    for (wave, attempt), span in past.spans.items():
        seen = past.seen.get(wave) if (wave, attempt) == last[wave] else None
        start, end = span.start, span.last
        is_over = span.is_over or (wave, attempt) != newest or trial.wave > wave
        if seen is not None:
            # AWS Batch says when a job began to run, not when its last attempt did.
            if seen.started_at is not None and (wave, attempt) == first[wave]:
                start = min(start, seen.started_at)
            if not span.is_over and _is_over(seen):
                end, is_over = max(end, seen.stopped_at or end), True
        starts.append(start)
        if is_over:
            seconds += max(0.0, end - start)
        else:
            trial.resumed_at = start
            past.current, past.running = (wave, attempt), span
    for wave, seen in past.seen.items():
        if wave not in last and seen.started_at is not None:
            starts.append(seen.started_at)
            if seen.stopped_at is not None:
                seconds += max(0.0, seen.stopped_at - seen.started_at)
            elif wave == trial.wave and not _is_over(seen):
                trial.resumed_at = seen.started_at
    trial.seconds, trial.started_at = seconds, min(starts, default=None)
