"""The content of a report's page, thinned out, as one JSON document."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from batchml.model.job import Scalar
from batchml.model.sweep import (
    Dimension,
    EarlyStop,
    Goal,
    Params,
    Space,
    SweepLimits,
    SweepSpec,
    Trial,
    TrialState,
)
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.control.totals import limits_now
from batchml.sweeps.report.timeline import frame_values, make_timeline, round_off, thin_out
from batchml.sweeps.results import (
    BAD_STATES,
    confirmed_trials,
    importances,
    pareto_front,
    rank_trials,
)
from batchml.sweeps.started import StartedSweep, command_line

# --- Axes: one for each parameter -----------------------------------------------------------------


_MOST_NAMES = 40  # choices on an axis; further choices share the last name, "others"
_CHOICE_LENGTH = 60  # characters of a choice


def axes(space: Space, tried: Sequence[Params]) -> list[dict[str, Any]]:
    """An axis for each parameter that was tried with more than one value."""
    parameter_axes = []
    for name, dimension in space.items():
        values = [params[name] for params in tried if name in params]
        if len(set(map(repr, values))) > 1:
            parameter_axes.append({"name": name, **_axis(dimension, values)})
    return parameter_axes


def positions(axis: dict[str, Any], trials: Iterable[Params]) -> list[float | None]:
    """The positions of trials on an axis: numbers, or indexes of choices; None where inactive."""
    name = axis["name"]
    if "names" not in axis:
        return [round_off(float(each[name]), 5) if name in each else None for each in trials]
    indexes = {text: index for index, text in enumerate(axis["names"])}
    others = len(indexes) - 1
    return [indexes.get(label(each[name]), others) if name in each else None for each in trials]


def label(value: Scalar) -> str:
    """A choice as text, shortened if it is long."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _CHOICE_LENGTH else text[: _CHOICE_LENGTH - 1] + "\u2026"


def _axis(dimension: Dimension, values: Sequence[Scalar]) -> dict[str, Any]:
    numbers = [value for value in values if _is_number(value)]
    if dimension.kind in ("choice", "constant") or len(numbers) < len(values):
        names = list(dict.fromkeys(map(label, (*dimension.values, *values))))
        others = [*names[: _MOST_NAMES - 1], "others"]
        return {"names": names if len(names) <= _MOST_NAMES else others}
    low, high = float(min(numbers)), float(max(numbers))
    if dimension.kind != "normal":  # which has no limits: its axis ends at the values
        low, high = min(low, dimension.low), max(high, dimension.high)
    is_log, is_int = dimension.log and low > 0, dimension.kind == "int"
    return {"low": round_off(low), "high": round_off(high), "log": is_log, "int": is_int}


def _is_number(value: Scalar) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# --- Learning curves ------------------------------------------------------------------------------
# A choice of trials, each thinned out, that looks like all of them.


_BEST = 24  # the best trials, whose curves are always drawn
_MOST_CURVES = 240
_POINTS_OF_CURVE = 64


def curves(ranked: Sequence[Trial], trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """A curve for each drawn trial: `{"n": trial, "s": state, "p": [step, value, ...]}`.

    The best trials come last, so that they are drawn on top. Of the others each state has its
    share, and at least a few curves, so that rare states are visible.
    """
    best = [trial for trial in ranked[:_BEST] if trial.reports]
    chosen = {trial.number for trial in best}
    by_state: dict[TrialState, list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.reports and trial.number not in chosen:
            by_state[trial.state].append(trial)
    count = sum(map(len, by_state.values())) or 1
    others: list[Trial] = []
    for alike in by_state.values():
        others += thin_out(alike, max(12, _MOST_CURVES * len(alike) // count))
    return [_curve(trial) for trial in (*others, *reversed(best))]


def _curve(trial: Trial) -> dict[str, Any]:
    points: list[float | None] = []
    for report in thin_out(trial.reports, _POINTS_OF_CURVE):
        points += (report.step, round_off(report.values[0], 5) if report.values else None)
    return {"n": trial.number, "s": trial.state.value, "p": points}


# --- Failures, grouped by the last line of output -------------------------------------------------


_GROUPS = 24
_NAMED = 12  # trials of a group whose numbers are listed
_LINES = 20  # of the output of a group's first trial
_LINE_LENGTH = 240  # characters of a line

# Numbers and addresses may differ between failures for the same reason.
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def failures(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """The groups, the largest first. `line` and `tail` come from the first trial of a group."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        if trial.state in BAD_STATES:
            group = trial.state.value, _VARIABLE.sub("#", last_line(trial))
            groups.setdefault(group, []).append(trial)
    largest = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1][0].number))
    return [
        {
            "state": state,
            "line": last_line(alike[0])[:_LINE_LENGTH] or "(no output)",
            "why": alike[0].why[:_LINE_LENGTH],
            "count": len(alike),
            "trials": [trial.number for trial in alike[:_NAMED]],
            "tail": [line[:_LINE_LENGTH] for line in alike[0].tail[-_LINES:]],
        }
        for (state, _), alike in largest[:_GROUPS]
    ]


def last_line(trial: Trial) -> str:
    """The last line of output; without output, why the trial ended."""
    last = next((line.strip() for line in reversed(trial.tail) if line.strip()), "")
    return last or trial.why


# --- History: the results in their order, and the best trial so far (the incumbent) ---------------


_MOST_STEPS = 400  # steps of the incumbent's line


class EndedTrial(NamedTuple):
    """A trial that has ended, in the order of the sweep."""

    trial: Trial
    order: int  # the number of trials that had ended, this one included
    seconds: float  # since the sweep began
    steps: int  # of all trials that had ended


def in_order_of_end(trials: Sequence[Trial], began: float) -> list[EndedTrial]:
    """The trials that have ended, in the order of their ends."""
    ended = [trial for trial in trials if trial.state.is_ended]
    ended.sort(key=lambda trial: (trial.stopped_at or 0.0, trial.number))
    in_order, steps = [], 0
    for order, trial in enumerate(ended, 1):
        steps += trial.step
        at = trial.stopped_at or (trial.reports[-1].at if trial.reports else began)
        in_order.append(EndedTrial(trial, order, max(0.0, at - began), steps))
    return in_order


def incumbents(ended_trials: Sequence[EndedTrial], goal: Goal) -> list[list[Any]]:
    """`[order, seconds, steps, value, trial]` of the trials that were better than all before.

    Only completed trials count: the value of a trial that was stopped early may be better or worse
    than its value at the end would be. If no trial is complete, all count.
    """
    done = [each for each in ended_trials if each.trial.state is TrialState.DONE]
    best: float | None = None
    points: list[list[Any]] = []
    for each in done or ended_trials:
        value = each.trial.values[0] if each.trial.values else None
        if value is None or round_off(value) is None:
            continue
        if best is None or goal.loss(value) < goal.loss(best):
            best = value
            point = [each.order, round_off(each.seconds, 5), each.steps, round_off(value)]
            points.append([*point, each.trial.number])
    return thin_out(points, _MOST_STEPS)


# --- Rungs: trials at each rung, how many continued, and steps that were not run ------------------


_STOPPED = (TrialState.PRUNED, TrialState.PAUSED)


def rung_table(trials: Sequence[Trial], stop: EarlyStop) -> list[dict[str, Any]]:
    """For each rung the number of trials that reached it (`in`), continued (`on`), were stopped at
    it (`out`), ended at it for another reason (`ended`), or are running at it (`now`).

    `saved`: the steps until `max` that the stopped trials did not run. `cutoff`: the newest cut-off
    that a trial was compared with, if any.
    """
    steps: Sequence[int] = stop.rungs
    if stop.method == "median":
        steps = sorted({t.step for t in trials if t.state in _STOPPED and t.step < stop.max})
    cutoffs = _last_cutoffs(trials)
    rows = []
    for step in steps:
        reached = sum(trial.step >= step for trial in trials)
        on = sum(trial.step > step for trial in trials)
        last = [trial.state for trial in trials if trial.step == step]
        out = sum(state in _STOPPED for state in last)
        ended = sum(state.is_ended and state not in _STOPPED for state in last)
        rows.append(
            {
                "step": step,
                "in": reached,
                "on": on,
                "out": out,
                "ended": ended,
                "now": reached - on - out - ended,
                "saved": out * (stop.max - step),
                "cutoff": round_off(cutoffs.get(step), 5),
            }
        )
    return rows


def saved_steps(trials: Iterable[Trial], stop: EarlyStop) -> tuple[int, int]:
    """The steps that were not run because trials were stopped, and the steps of all counted trials
    in full.

    Trials that still run, failed, or never began do not count.
    """
    if not stop.max:
        return 0, 0
    counted = [t for t in trials if t.step and (t.state is TrialState.DONE or t.state in _STOPPED)]
    saved = sum(max(0, stop.max - t.step) for t in counted if t.state in _STOPPED)
    return saved, len(counted) * stop.max


def _last_cutoffs(trials: Iterable[Trial]) -> dict[int, float]:
    """The cut-off of the newest version that a trial was compared with, by step."""
    decisions = [decision for trial in trials for decision in trial.decisions]
    decisions.sort(key=lambda decision: decision.version)
    return {each.step: each.cutoff for each in decisions if each.cutoff is not None}


# --- Time and cost, by state of the trials and over time ------------------------------------------


_POINTS_OF_SPENDING = 240


def spending(
    trials: Sequence[Trial], stop: EarlyStop, hourly: float | None, began: float, now: float
) -> dict[str, Any]:
    """The hours that trials ran, or their cost in USD if the price is known: by state, in total.

    `over`: `[seconds, amount]`, counted when a trial ends. `saved` is an estimate: the steps that
    were not run, at the average duration of a step.
    """
    rate = hourly if hourly else 1.0
    parts: dict[str, float] = {}
    ends: list[tuple[float, float]] = []
    ran = 0.0
    for trial in trials:
        seconds = trial.ran(now)
        if seconds <= 0:
            continue
        ran += seconds
        parts[trial.state.value] = parts.get(trial.state.value, 0.0) + seconds / 3600 * rate
        ends.append((trial.stopped_at or now, seconds / 3600 * rate))
    steps = sum(trial.step for trial in trials)
    saved, _ = saved_steps(trials, stop)
    return {
        "unit": "USD" if hourly else "hours",
        "parts": {
            state.value: round_off(parts[state.value], 5) for state in TrialState if state in parts
        },
        "total": round_off(sum(parts.values()), 5),
        "over": _sum_over_time(ends, began),
        "saved": round_off(saved * ran / steps / 3600 * rate, 4) if steps else 0,
    }


def _sum_over_time(ends: list[tuple[float, float]], began: float) -> list[list[float | None]]:
    total, points = 0.0, []
    for at, amount in sorted(ends):
        total += amount
        points.append([round_off(max(0.0, at - began), 5), round_off(total, 5)])
    return thin_out([[0, 0], *points], _POINTS_OF_SPENDING) if points else []


# --- The document ---------------------------------------------------------------------------------


SHOWN = 2_000  # trials that are drawn one by one, at most
BEST, SAMPLED = 200, 300  # lines of the parallel coordinates: best trials, and others
_ENOUGH = 8  # completed trials, from which the page offers a view of them alone
_ROWS = 40  # rows of the table of trials
_CELLS = 26_000  # values of all drawn trials: with more parameters fewer trials are drawn


def make_document(
    sweep: StartedSweep, state: SweepState, now: float, most: int = SHOWN
) -> dict[str, Any]:
    """The document; at most `most` trials are drawn one by one. Times of trials are seconds since
    the sweep's beginning."""
    spec = sweep.spec
    limits = limits_now(state, spec)
    trials = list(state.trials.values())
    candidates = [trial for trial in trials if trial.confirms is None]
    began = min((trial.planned_at for trial in trials), default=sweep.created_at)
    end = state.ended.at if state.ended else now
    hours = max(0.0, end - began - state.paused_seconds) / 3600
    best_first = rank_trials(state, spec)
    ended_trials = in_order_of_end(candidates, began)
    parameter_axes = axes(spec.space, [trial.params for trial in candidates])
    drawn = _choose_trials(candidates, best_first, most, len(parameter_axes))
    saved, in_full = saved_steps(candidates, spec.early_stop)
    done = [trial for trial in best_first if trial.state is TrialState.DONE]
    return {
        "head": _head(sweep, state, began, hours, now),
        "goals": [{"metric": goal.metric, "direction": goal.direction} for goal in spec.goals],
        "counts": {each.value: count for each, count in state.counts.items() if count},
        "limits": _limits(limits, trials, hours, end, sweep.hourly),
        "best": _best(sweep, best_first, state),
        "axes": parameter_axes,
        "shown": _columns(drawn, ended_trials, parameter_axes, best_first, spec),
        "frame": _frame(best_first, spec),
        "best_frame": _frame(best_first[:BEST], spec),
        "trained": _frame(done, spec) if _ENOUGH <= len(done) < len(best_first) else None,
        "incumbents": incumbents(ended_trials, spec.goal),
        "curves": curves(best_first, candidates),
        "curve_frame": _curve_frame(best_first, candidates, spec),
        "step": next((t.counter for t in candidates if t.counter), spec.early_stop.step),
        "max": spec.early_stop.max,
        "rung_steps": list(spec.early_stop.rungs),
        "rungs": rung_table(candidates, spec.early_stop),
        "stop": spec.early_stop.method,
        "saved": [saved, in_full],
        "importances": importances(spec.space, [trial.params for trial in best_first]),
        "timeline": make_timeline(trials, began, end, limits.parallel),
        "failures": failures(trials),
        "cost": spending(trials, spec.early_stop, sweep.hourly, began, end),
        "pareto": [trial.number for trial in pareto_front(state, spec)],
        "table": [_row(trial, end) for trial in best_first[:_ROWS]],
        "parameters": list(spec.space),
    }


def _head(
    sweep: StartedSweep, state: SweepState, began: float, hours: float, now: float
) -> dict[str, Any]:
    status = "ended" if state.ended else "stopping" if state.stopping else "as of now"
    stopping = state.stopping.why if state.stopping else ""
    return {
        "key": sweep.key,
        "name": sweep.name,
        "env": sweep.env,
        "queue": sweep.queue,
        "image": sweep.image,
        "commit": sweep.commit,
        "user": sweep.user,
        "job": sweep.spec.job,
        "method": sweep.spec.method,
        "seed": sweep.spec.seed,
        "status": status,
        "why": state.ended.why if state.ended else stopping,
        "began": began,
        "took": round_off(hours * 3600, 5),
        "written": now,
        "trials": len(state.trials),
        "notices": [notice.words for notice in state.notices.values()],
    }


def _limits(
    limits: SweepLimits, trials: Sequence[Trial], hours: float, end: float, hourly: float | None
) -> list[dict[str, Any]]:
    """How much of each limit is used. `hours`: without the time between an end and a reopening."""
    ended = [trial for trial in trials if trial.state.is_ended]
    failed = sum(trial.state.is_failure for trial in ended)
    rows: list[tuple[str, float | None, float | None]] = [
        ("trials", sum(trial.confirms is None for trial in trials), limits.trials),
        ("hours", hours, limits.hours),
    ]
    if hourly is not None:
        spent = sum(trial.ran(end) for trial in trials) / 3600 * hourly
        rows.append(("USD", spent, limits.cost))
    if limits.failed_count is not None:
        rows.append(("failed", failed, limits.failed_count))
    elif limits.failed_share is not None and ended:
        rows.append(("failed %", 100 * failed / len(ended), 100 * limits.failed_share))
    return [
        {"name": name, "used": round_off(used, 4), "limit": round_off(limit)}
        for name, used, limit in rows
    ]


def _best(sweep: StartedSweep, best_first: Sequence[Trial], state: SweepState) -> dict[str, Any]:
    """The best trial with its command, and the trials with confirming runs."""
    if not best_first:
        return {}
    trial = best_first[0]
    confirmed = [
        {
            "n": each.trial.number,
            "mean": round_off(each.mean),
            "deviation": round_off(each.deviation, 3),
            "runs": len(each.values),
        }
        for each in confirmed_trials(state, sweep.spec)
    ]
    command = command_line(sweep, trial)
    return {**_row(trial, 0.0), "seed": trial.seed, "command": command, "confirmed": confirmed}


def _row(trial: Trial, now: float) -> dict[str, Any]:
    return {
        "n": trial.number,
        "state": trial.state.value,
        "values": [round_off(value) for value in trial.values or ()],
        "step": trial.step,
        "ran": round_off(trial.ran(now), 5),
        "params": {
            name: round_off(value, 7) if isinstance(value, float) else value
            for name, value in trial.params.items()
        },
    }


def _choose_trials(
    trials: Sequence[Trial], best_first: Sequence[Trial], most: int, width: int
) -> list[Trial]:
    """The trials to draw: the best, and an even choice of all others with a result."""
    most = max(BEST + SAMPLED, min(most, _CELLS // max(1, width + 6)))
    best = list(best_first[:BEST])
    chosen = {trial.number for trial in best}
    others = [trial for trial in trials if trial.values and trial.number not in chosen]
    return best + thin_out(others, most - len(best))


def _columns(
    drawn: Sequence[Trial],
    ended_trials: Sequence[EndedTrial],
    parameter_axes: Sequence[dict[str, Any]],
    best_first: Sequence[Trial],
    spec: SweepSpec,
) -> dict[str, Any]:
    """The columns of the drawn trials. `order` 0: the trial has not ended; `rank` -1: no result.

    `best` and `rest`: the indexes of the trials in the parallel coordinates.
    """
    ended = {each.trial.number: each for each in ended_trials}
    rank_of = {trial.number: rank for rank, trial in enumerate(best_first)}
    states = [state.value for state in TrialState]
    ends = [ended.get(trial.number) for trial in drawn]
    ranks = [rank_of.get(trial.number, -1) for trial in drawn]
    rest = [index for index, rank in enumerate(ranks) if rank >= BEST]
    params = [trial.params for trial in drawn]
    return {
        "n": [trial.number for trial in drawn],
        "state": [states.index(trial.state.value) for trial in drawn],
        "states": states,
        "rank": ranks,
        "step": [trial.step for trial in drawn],
        "values": [
            [round_off((trial.values or ())[index], 5) if trial.values else None for trial in drawn]
            for index in range(len(spec.goals))
        ],
        "order": [each.order if each else 0 for each in ends],
        "seconds": [round_off(each.seconds, 5) if each else 0 for each in ends],
        "steps": [each.steps if each else 0 for each in ends],
        "params": [positions(axis, params) for axis in parameter_axes],
        "best": [index for index, rank in enumerate(ranks) if 0 <= rank < BEST],
        "rest": thin_out(rest, SAMPLED),
    }


def _curve_frame(
    best_first: Sequence[Trial], trials: Sequence[Trial], spec: SweepSpec
) -> dict[str, Any] | None:
    """The range of the values of the learning curves."""
    values = [
        report.values[0]
        for trial in (*best_first[:BEST], *thin_out(trials, 500))
        for report in trial.reports
        if report.values
    ]
    return _frame_json(values, spec)


def _frame(trials: Sequence[Trial], spec: SweepSpec) -> dict[str, Any] | None:
    """The range of the last values of these trials."""
    return _frame_json([each.values[0] for each in trials if each.values], spec)


def _frame_json(values: Sequence[float], spec: SweepSpec) -> dict[str, Any] | None:
    frame = frame_values(values, spec.goal.direction)
    if frame is None:
        return None
    low, high = round_off(frame.low), round_off(frame.high)
    return {"low": low, "high": high, "log": frame.log, "beyond": frame.beyond}
