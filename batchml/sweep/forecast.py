"""What a sweep comes to, before anything is sent: `sweep check`. Pure."""

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct

from batchml.model.job import JobSpec
from batchml.model.names import spelled
from batchml.model.shell import join
from batchml.model.sweep import Params, SweepSpec, count_points
from batchml.model.sweepjob import notices
from batchml.sweep.cutoffs import levels
from batchml.sweep.plan import rung_size
from batchml.sweep.report.subject import words
from batchml.sweep.sampling import suggestions

SAMPLES = 3  # commands that are shown
_SHORT = 27  # steps of a full training, up to which `early_stop.min` is 1 unless it is given


class Leg(Struct, frozen=True):
    """The way to one rung: who sets out on it, and the steps that they run together."""

    until: int  # the step at which it ends
    trials: int  # as many as are expected to set out
    at_worst: int  # as many as may
    steps: int
    steps_at_worst: int


class Forecast(Struct, frozen=True):
    """None: nobody can tell."""

    points: int | None  # of a finite space, `where` aside
    trials: int | None
    parallel: int
    confirming: int  # trials that run the best again
    legs: tuple[Leg, ...]  # none where `max` is not known
    steps: int | None
    steps_at_worst: int | None
    steps_in_full: int | None  # if every trial were trained fully
    trainings: float | None  # the longest it takes at this width, in full trainings
    trial_hours: float | None  # at worst: the job's timeout, or the limit of hours, bounds it
    cost: float | None  # USD at worst
    commands: tuple[str, ...]
    notices: tuple[str, ...]
    spec: SweepSpec


def forecast(
    spec: SweepSpec,
    job: JobSpec | None = None,
    *,
    hourly: float | None = None,
    samples: Sequence[Params] | None = None,
) -> Forecast:
    """`hourly`: USD of a running trial. `samples` are the first trials' parameters, for commands;
    they are drawn as the sweep draws them unless they are given."""
    trials = spec.limits.trials
    legs = tuple(_legs(spec, trials)) if trials and spec.early_stop.max else ()
    confirming = (
        min(spec.confirm.top, trials or spec.confirm.top) * spec.confirm.seeds
        if spec.confirm
        else 0
    )
    more = confirming * spec.early_stop.max
    hours = _trial_hours(spec, job, trials, confirming)
    if samples is None and job is not None:
        samples = [params for params, _ in suggestions(spec, [], range(SAMPLES))]
    return Forecast(
        points=count_points(spec.space),
        trials=trials,
        parallel=spec.limits.parallel,
        confirming=confirming,
        legs=legs,
        steps=sum(leg.steps for leg in legs) + more if legs else None,
        steps_at_worst=sum(leg.steps_at_worst for leg in legs) + more if legs else None,
        steps_in_full=(trials or 0) * spec.early_stop.max + more if legs else None,
        trainings=_trainings(spec, legs, trials, confirming),
        trial_hours=hours,
        cost=_cost(spec, hours, hourly),
        commands=tuple(_commands(job, samples or ())),
        notices=tuple(notices(spec, job)),
        spec=spec,
    )


def lines(found: Forecast) -> list[str]:
    """The forecast in words."""
    return [*_size(found), *_rungs(found), *_bounds(found), *_shown_commands(found), *found.notices]


def _legs(spec: SweepSpec, trials: int) -> Iterator[Leg]:
    """asha stops who is not good enough: at worst each is, being better than those before it.
    `halving` and promotions let a fixed share go on."""
    stop = spec.early_stop
    judged = stop.method in ("asha", "halving")
    before = 0
    for rung, step in enumerate(levels(spec) if judged else (stop.max,)):
        expected = rung_size(trials, rung, stop.eta)
        is_fixed = stop.method == "halving" or stop.resume
        worst = expected if is_fixed else trials
        length = step - before
        yield Leg(step, expected, worst, expected * length, worst * length)
        before = step


def _trainings(
    spec: SweepSpec, legs: Sequence[Leg], trials: int | None, confirming: int
) -> float | None:
    """Rounds of `parallel` trials, the last one not full; of `halving`, rung by rung."""
    if trials is None:
        return None
    width = spec.limits.parallel
    more = math.ceil(confirming / width)
    if spec.early_stop.method == "halving" or spec.early_stop.resume:
        full, before, rounds = spec.early_stop.max, 0, 0.0
        for leg in legs:
            rounds += math.ceil(leg.at_worst / width) * (leg.until - before) / full
            before = leg.until
        return round(rounds + more, 2)
    return float(math.ceil(trials / width) + more)


def _trial_hours(
    spec: SweepSpec, job: JobSpec | None, trials: int | None, confirming: int
) -> float | None:
    """Containers' hours, all together: each may run into its timeout, and be tried again."""
    bounds = []
    timeout = job.timeout_seconds if job else None
    if job is not None and timeout is not None and trials is not None:
        ends_at_rungs = spec.early_stop.method == "halving" or spec.early_stop.resume
        starts = trials
        if ends_at_rungs:
            starts = sum(leg.at_worst for leg in _legs(spec, trials))
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
            yield join(words(job, params))


def _size(found: Forecast) -> Iterator[str]:
    spec = found.spec
    points = "infinitely many" if found.points is None else f"{found.points:,}"
    seed = f"method {spec.method}, seed {spec.seed}"
    condition = ", before `where`" if spec.where and found.points is not None else ""
    named = "1 parameter" if len(spec.space) == 1 else f"{len(spec.space)} parameters"
    counted = "1 point" if found.points == 1 else f"{points} points"
    yield f"Space: {named}, {counted}{condition}; {seed}."
    trials = "as many as the limits allow" if found.trials is None else f"{found.trials:,}"
    more = f", then {found.confirming} more to confirm the best" if found.confirming else ""
    at_once = min(found.parallel, found.trials or found.parallel)
    yield f"Trials: {trials}, {at_once:,} at once{more}."


def _rungs(found: Forecast) -> Iterator[str]:
    stop = found.spec.early_stop
    if not found.legs or found.steps is None or found.steps_in_full is None:
        return
    if len(found.legs) > 1:
        yield f"Rungs: {stop.method}, eta {stop.eta}, counted in {stop.step}."
        yield f"  {'until':>8} {'trials':>8} {'at worst':>9} {'steps':>10}"
        for leg in found.legs:
            yield f"  {leg.until:>8,} {leg.trials:>8,} {leg.at_worst:>9,} {leg.steps:>10,}"
        if stop.method == "asha" and stop.min == 1 and stop.max <= _SHORT:
            yield f"  Judged after 1 {stop.step}: raise early_stop.min where that says little."
    if found.steps_at_worst != found.steps or found.steps != found.steps_in_full:
        share = 100 * found.steps / found.steps_in_full
        worst = (
            f", {found.steps_at_worst:,} at worst" if found.steps_at_worst != found.steps else ""
        )
        full = f"{share:.0f} % of {found.steps_in_full:,} without early stopping"
        yield f"Steps: about {found.steps:,}{worst}: {full}."
    else:
        yield f"Steps: {found.steps:,}."


def _bounds(found: Forecast) -> Iterator[str]:
    limits = found.spec.limits
    if found.trainings is not None:
        yield f"At longest: {found.trainings:g} full trainings one after the other."
    if found.trial_hours is not None:
        yield f"Time of all containers: {spelled(3600 * found.trial_hours)} at worst."
    if found.cost:
        yield f"Cost: {found.cost:,.2f} USD at worst."
    elif found.cost is None and found.trial_hours is None:
        yield "Cost: not bounded; a timeout in job.toml, limits.hours or limits.cost bounds it."
    ends = [
        *([spelled(3600 * limits.hours)] if limits.hours is not None else []),
        *([f"{limits.cost:,.2f} USD"] if limits.cost is not None else []),
        *([f"{found.spec.goal.metric} {limits.target:g}"] if limits.target is not None else []),
        *([f"more than {limits.failed_count} failed"] if limits.failed_count is not None else []),
        *(
            [f"more than {limits.failed_share:.0%} failed"]
            if limits.failed_share is not None
            else []
        ),
    ]
    if ends:
        yield f"Ends early at: {', '.join(ends)}."


def _shown_commands(found: Forecast) -> Iterator[str]:
    if found.commands:
        yield "The first trials:"
        yield from (f"  {command}" for command in found.commands)
