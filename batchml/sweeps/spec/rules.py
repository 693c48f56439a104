"""Rules that concern several sections of a sweep file, or the file and its job. Pure."""

import re
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from random import Random

from msgspec.structs import replace

from batchml.errors import did_you_mean
from batchml.model.conditions import satisfies
from batchml.model.job import JobSpec
from batchml.model.params import is_seed, new_name_mistakes
from batchml.model.run import MAX_ARRAY
from batchml.model.sweep import (
    MODELS,
    Params,
    SweepLimits,
    SweepSpec,
    count_levels,
    count_points,
    draw_point,
    every_point,
)
from batchml.runtime.protocol.variables import SEED, placeholders, takes, takes_all, takes_by_name
from batchml.sweeps.spec.sections import MAX_TRIALS

MAX_GP = 500  # trials; with more, one suggestion of a Gaussian process takes seconds
MAX_SOBOL = 40  # parameters for which sweeps/samplers/sequences.py has direction numbers
SAMPLES = 1000  # random points on which conditions are tested
ACCEPTED = SAMPLES // 100  # points that must meet them; with fewer, drawing points takes too long

_SEVERAL_GOALS = ("random", "sobol", "grid", "list", "nsga2")  # methods for several goals


def bound_trials(spec: SweepSpec) -> tuple[SweepSpec, list[str]]:
    """Limit the trials to the number of points of a grid or a list.

    Returns the sweep and its mistakes: too many or no points, conditions that almost no point
    satisfies.
    """
    if spec.method == "list":
        if not spec.points:
            return spec, ["points: missing. `list` tries each table of [[points]]."]
        return _limit_trials(len(spec.points), spec), []
    points = list(_test_points(spec)) if spec.where else []
    mistakes = list(_condition_mistakes(spec, points))
    if spec.method != "grid" or mistakes:
        return spec, mistakes
    count = count_points(spec.space)
    if count is not None and spec.where and count <= MAX_TRIALS:
        count = sum(satisfies(spec.where, point) for point in points)
    if count is None:  # `method_mistakes` names the parameter
        return spec, []
    spec = _limit_trials(count, spec)
    if (spec.limits.trials or 0) > MAX_TRIALS:
        return spec, [f"method: the grid has {count:,} points; a sweep has up to {MAX_TRIALS:,}."]
    return spec, []


def _limit_trials(count: int, spec: SweepSpec) -> SweepSpec:
    trials = min(count, spec.limits.trials or count)
    return replace(spec, limits=replace(spec.limits, trials=trials))


def _test_points(spec: SweepSpec) -> Iterator[Params]:
    """The points on which conditions are tested: all points of a grid, otherwise random points."""
    if spec.method != "grid":
        random = Random(0)
        yield from (draw_point(spec.space, random) for _ in range(SAMPLES))
    elif count_points(spec.space) is not None:
        yield from islice(every_point(spec.space), MAX_TRIALS)


def _condition_mistakes(spec: SweepSpec, points: Sequence[Params]) -> Iterator[str]:
    """Conditions that accept almost no point, each alone or all together."""
    if not points:
        return
    is_grid = spec.method == "grid"
    least, kind = (1, "points") if is_grid else (ACCEPTED, "samples")
    words = f"of {len(points):,} {kind}"
    is_reported = False
    for index, text in enumerate(spec.where):
        count = sum(satisfies((text,), point) for point in points)
        if count < least:
            is_reported = True
            yield f"where[{index}]: {text!r} accepts {count} {words}."
    if not is_reported and len(spec.where) > 1:
        count = sum(satisfies(spec.where, point) for point in points)
        if count < least:
            yield f"where: accepts {count} {words}."


def method_mistakes(spec: SweepSpec) -> Iterator[str]:
    """The mistakes of a sweep that its method does not support: goals, space, limits, stopping."""
    method, space = spec.method, spec.space
    if len(spec.goals) > 1 and method not in _SEVERAL_GOALS:
        several = f"{', '.join(_SEVERAL_GOALS[:-1])} or {_SEVERAL_GOALS[-1]}"
        yield f"method: {method} has one goal; several need {several}."
    searched = {name: each for name, each in space.items() if each.kind != "constant"}
    for name, dimension in searched.items():
        if method == "grid" and count_levels(dimension) is None:
            yield f"space.{name}: grid needs a list or a step for {name}."
        elif dimension.kind == "normal" and method not in ("tpe", "random", "list"):
            yield f"space.{name}: {method} has no normal distribution; tpe and random have."
    if method == "sobol" and len(searched) > MAX_SOBOL:
        yield f"method: sobol takes at most {MAX_SOBOL} parameters, the space has {len(searched)}."
    if method == "gp" and not 0 < (spec.limits.trials or 0) <= MAX_GP:
        yield f"limits.trials: gp is for up to {MAX_GP} trials; set a number, or use tpe."
    if spec.early_stop.method == "halving":
        yield from _halving_mistakes(spec)


def _halving_mistakes(spec: SweepSpec) -> Iterator[str]:
    if spec.method in ("gp", "cmaes", "nsga2"):
        yield f"early_stop.method: halving begins all trials at once: {spec.method} cannot learn."
    if spec.limits.trials is None and spec.method not in ("grid", "list"):
        yield "limits.trials: missing. halving needs the number of trials that begin."
    elif (spec.limits.trials or 0) > MAX_ARRAY:
        yield f"limits.trials: halving begins at most {MAX_ARRAY:,} trials: they are one array."


# --- The sweep and its job ------------------------------------------------------------------------


# Variables that batchml sets for each trial. A job may not set them for all trials.
_OWN_VARIABLES = ("BATCHML_TRIAL", "BATCHML_SEED", "BATCHML_STEPS", "BATCHML_CHECKPOINT_DIR")

# A name that runtime/sweep/readings.py recognizes before a value.
_METRIC_NAME = re.compile(r"[A-Za-z_][\w./|-]*")


def check_with_job(spec: SweepSpec, job: JobSpec, of_program: Container[str] = ()) -> list[str]:
    """The mistakes of a sweep together with its job.

    A parameter may be in the job and in the space: then the space defines its values. The job takes
    other names as `submit -p` does; its program has flags of the names in `of_program`.
    """
    mistaken = _mistaken_names(spec, job, of_program)
    return [
        *map(as_mistake_of_space, mistaken.values()),
        *_unused_parameters(spec, job, mistaken),
        *_variable_mistakes(spec, job),
        *_node_mistakes(spec, job),
    ]


def new_names(spec: SweepSpec, job: JobSpec) -> list[str]:
    """The parameters of the space that are neither under [params] of the job nor in its command."""
    known, command = job.params, job.command
    return [
        name
        for name in spec.space
        if name not in known and not takes_by_name(command, name, spec.space)
    ]


def as_mistake_of_space(mistake: str) -> str:
    """A mistake in `-p NAME=...` as one in [space]."""
    return f"space.{mistake.removeprefix('-p ').replace('=...:', ':', 1)}"


def _mistaken_names(spec: SweepSpec, job: JobSpec, of_program: Container[str]) -> dict[str, str]:
    if not job.params and not takes_all(job.command, spec.space):
        return {}  # the program may read BATCHML_PARAMS; a notice says so
    return new_name_mistakes(new_names(spec, job), job, of_program=of_program)


def notices(spec: SweepSpec, job: JobSpec | None = None) -> list[str]:
    """Notices: no mistakes, but facts that may be unexpected, in one or two sentences each."""
    of_job = () if job is None else _job_notices(spec, job)
    return [*_search_notices(spec), *_limit_notices(spec), *_length_notices(spec), *of_job]


def _uses_any_parameter(spec: SweepSpec, job: JobSpec) -> bool:
    return any(takes(job.command, name, spec.space) for name in spec.space)


def _unused_parameters(spec: SweepSpec, job: JobSpec, mistaken: Container[str]) -> Iterator[str]:
    if not _uses_any_parameter(spec, job):
        return  # the program may read BATCHML_PARAMS; a notice says so
    params = {**job.params, **dict.fromkeys(spec.space, "")}
    used = {name for word in job.command for name in placeholders(word, params)}
    for name in spec.space:
        if name not in mistaken and not takes(job.command, name, spec.space):
            meant = did_you_mean(name, used - set(spec.space))
            yield (
                f"space.{name}: the job's command never uses {{{name}}}; add it, "
                f"or {{params}} for all of them.{meant}"
            )


def _variable_mistakes(spec: SweepSpec, job: JobSpec) -> Iterator[str]:
    for name in _OWN_VARIABLES:
        if name in job.env:
            yield f"{spec.job}: env.{name}: batchml sets it for each trial; remove it from the job."


def _node_mistakes(spec: SweepSpec, job: JobSpec) -> Iterator[str]:
    """Trials are children of array jobs, and in AWS Batch a child of an array has one node."""
    if job.nodes > 1:
        yield f"{spec.job}: nodes = {job.nodes}: a trial is one container. Set nodes = 1."
    if job.groups:
        yield f"{spec.job}: groups: a trial is one container. Remove them from the job."


def _search_notices(spec: SweepSpec) -> Iterator[str]:
    limits, stop = spec.limits, spec.early_stop
    if spec.method in MODELS and stop.method == "halving":
        yield f"With halving all trials begin before any ends, so {spec.method} draws at random."
    elif spec.method in MODELS and stop.method == "none" and _is_mostly_parallel(limits):
        at_once = min(limits.parallel, limits.trials or limits.parallel)
        yield (
            f"{spec.method} learns nothing when {at_once} of {limits.trials} trials start at "
            f"once: set limits.parallel = {max(1, (limits.trials or 0) // 4)}, or early stopping."
        )
    if spec.method == "cmaes" and any(each.kind == "choice" for each in spec.space.values()):
        yield "cmaes searches numbers only; choices are drawn at random."
    if spec.method in ("gp", "cmaes") and any(each.when for each in spec.space.values()):
        yield f"{spec.method} ignores `when`; parameters that have it are drawn at random."


def _is_mostly_parallel(limits: SweepLimits) -> bool:
    return limits.trials is not None and limits.parallel * 4 > limits.trials > 1


def _limit_notices(spec: SweepSpec) -> Iterator[str]:
    points, trials = count_points(spec.space), spec.limits.trials
    if points is None or trials is None:
        return
    if spec.method == "grid" and trials < points and not spec.where:
        yield f"The grid has {points:,} points; limits.trials allows {trials:,} of them."
    elif spec.method not in ("grid", "list") and trials > points:
        yield f"The space has only {points:,} points, fewer than limits.trials, {trials:,}."


def _job_notices(spec: SweepSpec, job: JobSpec) -> Iterator[str]:
    if job.fallback.queue:
        yield (
            "The job's [fallback] does not apply to trials: they are children of an array, which "
            "cannot move. Use a queue whose `compute` names both (docs/capacity.md)."
        )
    if not _uses_any_parameter(spec, job):
        yield (
            "The job's command uses no parameter of the space, so the program must read "
            "BATCHML_PARAMS. If it does not, add {params} to the command."
        )
    new = new_names(spec, job) if job.params else []
    if new:
        yield (
            f"The job's [params] has no {', '.join(new)}: {{params}} passes "
            f"{'them' if len(new) > 1 else 'it'} to the program."
        )
    yield from _seed_notices(spec, job)
    if spec.early_stop.ends_at_rungs:
        yield (
            "Trials end at rungs and continue later: the program must save to "
            "$BATCHML_CHECKPOINT_DIR and continue from the checkpoint there."
        )
    for metric in (goal.metric for goal in spec.goals if goal.metric not in job.metrics):
        meant = did_you_mean(metric, job.metrics)
        if meant:
            yield f"The job's [metrics] has no {metric}.{meant}"
        elif not _METRIC_NAME.fullmatch(metric):
            yield f"{metric!r} cannot be printed as name=value; it needs a pattern under [metrics]."
        elif job.metrics:
            known = ", ".join(job.metrics)
            yield (
                f"The job's [metrics] has no {metric}, only {known}. "
                f"Trials must print {metric}=VALUE."
            )


def _seed_notices(spec: SweepSpec, job: JobSpec) -> Iterator[str]:
    """Notices for a seed of the program that is not the seed of the trial, BATCHML_SEED."""
    for name, value in job.params.items():
        if is_seed(name) and name not in spec.space and f"{{{SEED}}}" not in str(value):
            yield (
                f"All trials run with {name} = {value}. For a seed of each trial's own "
                f'write {name} = "{{{SEED}}}" below [params] of job.toml.'
            )
    for name in spec.space if spec.confirm else ():
        if is_seed(name):
            yield (
                f"[confirm] runs the best again with the same {name}, because [space] has it. "
                f'Write {name} = "{{{SEED}}}" below [params] of job.toml instead.'
            )


def with_full_length(spec: SweepSpec, job: JobSpec) -> tuple[JobSpec, list[str]]:
    """The job whose own number of steps, such as `epochs`, is `early_stop.max`; notices about it.

    So a trial that is not stopped early ends by itself, and has written its results. A number that
    the space has stays.
    """
    stop, notices, params = spec.early_stop, [], dict(job.params)
    for name, value in job.params.items():
        is_length = _step_word(name) == _step_word(stop.step) and name not in spec.space
        if not is_length or not isinstance(value, int) or isinstance(value, bool):
            continue
        if 0 < stop.max != value > 0:
            params[name] = stop.max
            notices.append(
                f"Trials run with {name} = {stop.max}, which is early_stop.max; the job has "
                f"{value}. To choose another number, write {name} below [space]."
            )
    return replace(job, params=params), notices


def _length_notices(spec: SweepSpec) -> Iterator[str]:
    """A notice if a number of steps in the space and `early_stop.max` contradict each other."""
    stop = spec.early_stop
    for name, dimension in spec.space.items():
        if not stop.max or _step_word(name) != _step_word(stop.step):
            continue
        values = [value for value in dimension.values if isinstance(value, int)]
        longest = int(max(values, default=dimension.high))
        # A program that counts from 0 to its number, both included, has one step more.
        if 0 < longest < stop.max - 1:
            yield (
                f"early_stop.max is {stop.max}, but {name} is at most {longest}: no trial comes to "
                f"{stop.step} {stop.max}. Write max = {longest}."
            )
        elif longest > stop.max and stop.method != "none":
            yield (
                f"early_stop.max is {stop.max}, but {name} is up to {longest}: trials are stopped "
                f"after {stop.step} {stop.max}, before they end by themselves. "
                f"Write max = {longest}."
            )


def _step_word(name: str) -> str:
    """The unit that a parameter or a step counts: `epoch` of n_epochs, `iter` of max-iterations."""
    word = re.sub(r"^((n|num|max|total|train)_)+", "", name.lower().replace("-", "_"))
    return re.sub(r"(ation)?s?$", "", word)
