"""Forecast the trials, steps, hours and cost of a sweep before it starts: `sweep check`. Pure."""

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from random import Random

from msgspec import Struct, field

from batchml.model.job import JobSpec
from batchml.model.names import join_shell, long_duration
from batchml.model.sweep import MODELS, Params, SweepSpec, count_points
from batchml.runtime.protocol.sweep import default_first_rung
from batchml.sweeps.control.plan import rung_size
from batchml.sweeps.control.pruning import rung_ends
from batchml.sweeps.samplers.choose import suggest_trials
from batchml.sweeps.spec.rules import notices
from batchml.sweeps.started import command_words

SAMPLES = 3  # first trials whose commands are shown
_DRAWN = 2000  # trials that are drawn to find how many of them go on at each rung


class RungForecast(Struct, frozen=True):
    """The trials that run to one rung, and the steps that they run after the rung before it."""

    until: int  # the step of the rung
    trials: int  # the expected number
    at_worst: int  # the greatest number
    steps: int
    steps_at_worst: int


class Forecast(Struct, frozen=True):
    """The expected size of a sweep. None: unknown."""

    points: int | None  # of a finite space, without the conditions of `where`
    trials: int | None
    parallel: int
    confirming: int  # runs that confirm the best
    rungs: tuple[RungForecast, ...] = field(name="legs")  # empty if `early_stop.max` is unknown
    steps: int | None
    steps_at_worst: int | None
    steps_in_full: int | None  # if every trial were trained fully
    trainings: float | None  # the longest duration, in full trainings one after the other
    trial_hours: float | None  # at worst, by the job's timeout or the limit of hours
    cost: float | None  # USD at worst
    commands: tuple[str, ...]
    notices: tuple[str, ...]
    spec: SweepSpec


def make_forecast(
    spec: SweepSpec,
    job: JobSpec | None = None,
    *,
    hourly: float | None = None,
    samples: Sequence[Params] | None = None,
) -> Forecast:
    """Forecast a sweep.

    `hourly`: USD for an hour of one trial. `samples`: parameters for the commands that are shown;
    by default the parameters of the first trials.
    """
    trials = spec.limits.trials
    rungs = tuple(_rungs(spec, trials)) if trials and spec.early_stop.max else ()
    confirm = spec.confirm
    confirming = min(confirm.top, trials or confirm.top) * confirm.seeds if confirm else 0
    more = confirming * spec.early_stop.max
    hours = _trial_hours(spec, job, trials, confirming)
    if samples is None and job is not None:
        samples = [params for params, _ in suggest_trials(spec, [], range(SAMPLES))]
    return Forecast(
        points=count_points(spec.space),
        trials=trials,
        parallel=spec.limits.parallel,
        confirming=confirming,
        rungs=rungs,
        steps=sum(rung.steps for rung in rungs) + more if rungs else None,
        steps_at_worst=sum(rung.steps_at_worst for rung in rungs) + more if rungs else None,
        steps_in_full=(trials or 0) * spec.early_stop.max + more if rungs else None,
        trainings=_trainings(spec, rungs, trials, confirming),
        trial_hours=hours,
        cost=_cost(spec, hours, hourly),
        commands=tuple(_commands(job, samples or ())),
        notices=tuple(notices(spec, job)),
        spec=spec,
    )


def describe(forecast: Forecast) -> list[str]:
    """The forecast as lines of text."""
    return [
        *_describe_size(forecast),
        *_describe_rungs(forecast),
        *_describe_bounds(forecast),
        *_describe_commands(forecast),
        *forecast.notices,
    ]


def _rungs(spec: SweepSpec, trials: int) -> Iterator[RungForecast]:
    """The rungs of `trials` trials.

    At worst each trial is better than all before it: then `asha` stops none, and promotes all
    except the worst `eta` - 1, which are never among the best 1/eta. `halving` lets a fixed share
    of the trials continue.
    """
    stop, before = spec.early_stop, 0
    ends = rung_ends(spec)
    expected = at_worst = [rung_size(trials, rung, stop.eta) for rung in range(len(ends))]
    if stop.method != "halving":
        expected = _mean_counts(trials, len(ends), stop.eta, stop.resume)
        lost = stop.eta - 1 if stop.resume else 0
        at_worst = [max(1, trials - lost * rung) for rung in range(len(ends))]
    for step, count, worst in zip(ends, expected, at_worst, strict=True):
        length = step - before
        yield RungForecast(step, count, worst, count * length, worst * length)
        before = step


def _mean_counts(trials: int, ends: int, eta: int, resume: bool) -> list[int]:
    """The trials of `asha` that run to each rung, the mean over sweeps with trials in random order.

    A trial has the same rank at all rungs, and they run one after the other: in parallel a few more
    go on. Of the trials after the first _DRAWN, 1/eta go on.
    """
    random, drawn = Random(0), min(trials, _DRAWN)
    repeats = -(-_DRAWN // drawn)
    counts = [0] * ends
    for _ in range(repeats):
        rungs = [_Rung(eta, resume) for _ in range(ends)]
        for _ in range(drawn):
            arriving = [random.random()]
            for number, rung in enumerate(rungs):
                counts[number] += len(arriving)
                arriving = [each for loss in arriving for each in rung.add(loss)]
        if resume:  # the best paused trial is trained in full if no other was
            for number, rung in enumerate(rungs):
                counts[number] += not rung.losses
    rest = trials - drawn
    return [round(count / repeats + rest / eta**rung) for rung, count in enumerate(counts)]


class _Rung:
    """The losses of the trials that have arrived at a rung, and those that it has promoted."""

    def __init__(self, eta: int, resume: bool) -> None:
        self.losses: list[float] = []
        self._promoted: set[float] = set()
        self._eta, self._resume = eta, resume

    def add(self, loss: float) -> list[float]:
        """The trials that go on because a trial with this loss has arrived."""
        losses, known = self.losses, len(self.losses)
        if not self._resume:
            goes_on = known < self._eta or loss <= losses[max(1, known // self._eta) - 1]
            insort(losses, loss)
            return [loss] if goes_on else []
        insort(losses, loss)
        best = (known + 1) // self._eta
        if not best:
            return []
        # Only two can be new among the best 1/eta: this one, and the last of them.
        last = losses[best - 1]
        found = {min(loss, last), last} - self._promoted
        self._promoted |= found
        return sorted(found)


def _trainings(
    spec: SweepSpec, rungs: Sequence[RungForecast], trials: int | None, confirming: int
) -> float | None:
    """The longest duration, in full trainings: rounds of up to `parallel` trials.

    Where trials end at rungs, each rung has its own rounds.
    """
    if trials is None:
        return None
    width = spec.limits.parallel
    more = math.ceil(confirming / width)
    if spec.early_stop.ends_at_rungs:
        full, before, rounds = spec.early_stop.max, 0, 0.0
        for rung in rungs:
            rounds += math.ceil(rung.at_worst / width) * (rung.until - before) / full
            before = rung.until
        return round(rounds + more, 2)
    return float(math.ceil(trials / width) + more)


def _trial_hours(
    spec: SweepSpec, job: JobSpec | None, trials: int | None, confirming: int
) -> float | None:
    """The hours of all containers: each may run into its timeout, and be retried."""
    bounds = []
    timeout = job.timeout_seconds if job else None
    if job is not None and timeout is not None and trials is not None:
        starts = trials
        if spec.early_stop.ends_at_rungs:
            starts = sum(rung.at_worst for rung in _rungs(spec, trials))
        bounds.append((starts + confirming) * job.retry.attempts * timeout / 3600)
    if spec.limits.hours is not None:
        bounds.append(spec.limits.hours * spec.limits.parallel)
    return min(bounds, default=None)


def _cost(spec: SweepSpec, hours: float | None, hourly: float | None) -> float | None:
    bounds = [hours * hourly] if hours is not None and hourly is not None else []
    if spec.limits.cost is not None:
        bounds.append(spec.limits.cost)
    return min(bounds, default=None)


def _commands(job: JobSpec | None, samples: Sequence[Params]) -> Iterator[str]:
    if job is not None:
        for params in samples[:SAMPLES]:
            yield join_shell(command_words(job, params))


def _describe_size(forecast: Forecast) -> Iterator[str]:
    spec = forecast.spec
    points = "infinitely many" if forecast.points is None else f"{forecast.points:,}"
    seed = f"method {spec.method}, seed {spec.seed}"
    condition = ", before `where`" if spec.where and forecast.points is not None else ""
    parameters = "1 parameter" if len(spec.space) == 1 else f"{len(spec.space)} parameters"
    size = "1 point" if forecast.points == 1 else f"{points} points"
    yield f"Space: {parameters}, {size}{condition}; {seed}."
    trials = "as many as the limits allow" if forecast.trials is None else f"{forecast.trials:,}"
    more = f", then {forecast.confirming} more to confirm the best" if forecast.confirming else ""
    at_once = min(forecast.parallel, forecast.trials or forecast.parallel)
    yield f"Trials: {trials}, {at_once:,} at once{more}."


def _describe_rungs(forecast: Forecast) -> Iterator[str]:
    stop = forecast.spec.early_stop
    if not forecast.rungs or forecast.steps is None or forecast.steps_in_full is None:
        return
    if len(forecast.rungs) > 1:
        yield f"Rungs: {stop.method}, eta {stop.eta}, counted in {stop.step}."
        yield f"  {'until':>8} {'trials':>8} {'at worst':>9} {'steps':>10}"
        for rung in forecast.rungs:
            yield f"  {rung.until:>8,} {rung.trials:>8,} {rung.at_worst:>9,} {rung.steps:>10,}"
        if stop.method == "asha" and stop.min == 1 == default_first_rung(stop.max):
            after = f"Trials are compared after 1 {stop.step}"
            yield f"  {after}: raise early_stop.min if that is too early."
    if forecast.steps_at_worst != forecast.steps or forecast.steps != forecast.steps_in_full:
        share = 100 * forecast.steps / forecast.steps_in_full
        worst = ""
        if forecast.steps_at_worst != forecast.steps:
            worst = f", {forecast.steps_at_worst:,} at worst"
        full = f"{share:.0f} % of {forecast.steps_in_full:,} without early stopping"
        yield f"Steps: about {forecast.steps:,}{worst}: {full}."
        if stop.method == "asha" and forecast.spec.method in MODELS:
            yield (
                "  That is for trials in random order. The better trials that "
                f"{forecast.spec.method} finds run on: two or three times as many are possible."
            )
    else:
        yield f"Steps: {forecast.steps:,}."


def _describe_bounds(forecast: Forecast) -> Iterator[str]:
    limits = forecast.spec.limits
    if forecast.trainings is not None:
        yield f"At longest: {forecast.trainings:g} full trainings one after the other."
    if forecast.trial_hours is not None:
        yield f"Time of all containers: {long_duration(3600 * forecast.trial_hours)} at worst."
    if forecast.cost:
        yield f"Cost: {forecast.cost:,.2f} USD at worst."
    elif forecast.cost is None and forecast.trial_hours is None:
        yield "Cost: not bounded; a timeout in job.toml, limits.hours or limits.cost bounds it."
    ends = []
    if limits.hours is not None:
        ends.append(long_duration(3600 * limits.hours))
    if limits.cost is not None:
        ends.append(f"{limits.cost:,.2f} USD")
    if limits.target is not None:
        ends.append(f"{forecast.spec.goal.metric} {limits.target:g}")
    if limits.failed_count is not None:
        ends.append(f"more than {limits.failed_count} failed")
    if limits.failed_share is not None:
        ends.append(f"more than {limits.failed_share:.0%} failed")
    if ends:
        yield f"Ends early at: {', '.join(ends)}."


def _describe_commands(forecast: Forecast) -> Iterator[str]:
    if forecast.commands:
        yield "The first trials:"
        yield from (f"  {command}" for command in forecast.commands)
