"""A sweep beside its job (pure): what cannot work, and what people should know."""

import re
from collections.abc import Iterator

from batchml.errors import did_you_mean
from batchml.model.job import JobSpec
from batchml.model.sweep import MODELS, Limits, SweepSpec, count_points
from batchml.runtime.protocol.variables import placeholders, takes

# What a trial is told by us: a job that says it itself would tell all trials the same.
_OURS = ("BATCHML_TRIAL", "BATCHML_SEED", "BATCHML_STEPS", "BATCHML_CHECKPOINT_DIR")

_PRINTED = re.compile(r"[A-Za-z_][\w./|-]*")  # what runtime/sweep/readings.py finds before a value


def check_with_job(spec: SweepSpec, job: JobSpec) -> list[str]:
    """The mistakes that need the job to be seen.

    A parameter of the job that is in the space too is no mistake: the space's takes its place.
    """
    return [*_unused(spec, job), *_variables(spec, job), *_nodes(spec, job)]


def notices(spec: SweepSpec, job: JobSpec | None = None) -> list[str]:
    """What is no mistake and yet not what people may expect; one sentence or two each."""
    found = [*_about_search(spec), *_about_limits(spec)]
    return found if job is None else [*found, *_about_job(spec, job)]


def _names_any(spec: SweepSpec, job: JobSpec) -> bool:
    return any(takes(job.command, name, spec.space) for name in spec.space)


def _unused(spec: SweepSpec, job: JobSpec) -> Iterator[str]:
    if not _names_any(spec, job):
        return  # the program may well read BATCHML_PARAMS; a notice says that it has to
    own = {**job.params, **dict.fromkeys(spec.space, "")}
    named = {name for word in job.command for name in placeholders(word, own)}
    for name in spec.space:
        if not takes(job.command, name, spec.space):
            meant = did_you_mean(name, named - set(spec.space))
            yield (
                f"space.{name}: the job's command never uses {{{name}}}; add it, "
                f"or {{params}} for all of them.{meant}"
            )


def _variables(spec: SweepSpec, job: JobSpec) -> Iterator[str]:
    for name in _OURS:
        if name in job.env:
            yield f"{spec.job}: env.{name}: each trial has its own; take it out of the job."


def _nodes(spec: SweepSpec, job: JobSpec) -> Iterator[str]:
    """The trials of a wave are the children of an array: AWS Batch has none of several nodes."""
    if job.nodes > 1:
        yield f"{spec.job}: nodes = {job.nodes}: a trial is one container. Set nodes = 1."
    if job.groups:
        yield f"{spec.job}: groups: a trial is one container. Take them out of the job."


def _about_search(spec: SweepSpec) -> Iterator[str]:
    limits, stop = spec.limits, spec.early_stop
    if spec.method in MODELS and stop.method == "halving":
        yield f"With halving all trials begin before the first ends: {spec.method} draws at random."
    elif spec.method in MODELS and stop.method == "none" and _is_wide(limits):
        at_once = min(limits.parallel, limits.trials or limits.parallel)
        yield (
            f"{spec.method} learns nothing when {at_once} of {limits.trials} trials start at "
            f"once: take limits.parallel = {max(1, (limits.trials or 0) // 4)}, or early stopping."
        )
    if spec.method == "cmaes" and any(each.kind == "choice" for each in spec.space.values()):
        yield "cmaes searches numbers only; choices are drawn at random."
    if spec.method in ("gp", "cmaes") and any(each.when for each in spec.space.values()):
        yield f"{spec.method} knows no `when`; parameters that have one are drawn at random."


def _is_wide(limits: Limits) -> bool:
    return limits.trials is not None and limits.parallel * 4 > limits.trials > 1


def _about_limits(spec: SweepSpec) -> Iterator[str]:
    points, trials = count_points(spec.space), spec.limits.trials
    if points is None or trials is None:
        return
    if spec.method == "grid" and trials < points and not spec.where:
        yield f"The grid has {points:,} points; limits.trials takes {trials:,} of them."
    elif spec.method not in ("grid", "list") and trials > points:
        yield f"The space has only {points:,} points, fewer than limits.trials, {trials:,}."


def _about_job(spec: SweepSpec, job: JobSpec) -> Iterator[str]:
    if job.fallback.queue:
        yield (
            "The job's [fallback] is not for trials: they are children of an array, which does not "
            "move. A queue whose `compute` names both does it for them (docs/capacity.md)."
        )
    if not _names_any(spec, job):
        yield (
            "The job's command names no parameter of the space, so the program has to read "
            "BATCHML_PARAMS. If it does not, add {params} to the command."
        )
    if spec.early_stop.resume or spec.early_stop.method == "halving":
        yield (
            "Trials end at rungs and go on later: the program has to save to "
            "$BATCHML_CHECKPOINT_DIR and to go on from what it finds there."
        )
    for metric in (goal.metric for goal in spec.goals if goal.metric not in job.metrics):
        meant = did_you_mean(metric, job.metrics)
        if meant:
            yield f"The job's [metrics] has no {metric}.{meant}"
        elif not _PRINTED.fullmatch(metric):
            yield f"{metric!r} is no name for name=value; it needs a pattern under [metrics]."
