"""All that a report's page shows, thinned, as one JSON document."""

from collections.abc import Sequence
from typing import Any

from batchml.model.sweep import Limits, SweepSpec, Trial, TrialState
from batchml.sweep.importance import importances
from batchml.sweep.report.axes import axes, places
from batchml.sweep.report.curves import curves
from batchml.sweep.report.failures import failures
from batchml.sweep.report.history import Came, in_order, incumbents
from batchml.sweep.report.numbers import Frame, even, frame, short
from batchml.sweep.report.rungs import rung_table, saved_steps, steps_of_rungs
from batchml.sweep.report.spending import spending
from batchml.sweep.report.subject import Subject, command_line
from batchml.sweep.report.timeline import timeline
from batchml.sweep.standings import confirmed, pareto, ranked
from batchml.sweep.state import SweepState

SHOWN = 2_000  # trials that are drawn one by one
BEST, SAMPLED = 200, 300  # lines of the parallel coordinates
_ENOUGH = 8  # trained trials that are worth a look without all others
_ROWS = 40  # of the table of trials
_CELLS = 26_000  # numbers in the table of shown trials: many parameters leave fewer trials


def sheet(subject: Subject, state: SweepState, now: float, most: int = SHOWN) -> dict[str, Any]:
    """The document, with at most `most` trials one by one. Times in seconds since the beginning."""
    spec = subject.spec
    limits = state.limits or spec.limits
    trials = list(state.trials.values())
    candidates = [trial for trial in trials if trial.confirms is None]
    began = min((trial.planned_at for trial in trials), default=subject.created_at)
    end = state.ended.at if state.ended else now
    best_first = ranked(state, spec)
    came = in_order(candidates, began)
    across = axes(spec.space, [trial.params for trial in candidates])
    shown = _shown(candidates, best_first, most, len(across))
    saved, in_full = saved_steps(candidates, spec.early_stop)
    done = [trial for trial in best_first if trial.state is TrialState.DONE]
    return {
        "head": _head(subject, state, began, end, now),
        "goals": [{"metric": goal.metric, "direction": goal.direction} for goal in spec.goals],
        "counts": {each.value: count for each, count in state.counts.items() if count},
        "limits": _limits(
            limits, trials, max(0.0, end - began - state.paused) / 3600, end, subject.hourly
        ),
        "best": _best(subject, best_first, state),
        "axes": across,
        "shown": _columns(shown, came, across, best_first, spec),
        "frame": _frame(best_first, spec),
        "best_frame": _frame(best_first[:BEST], spec),
        "trained": _frame(done, spec) if _ENOUGH <= len(done) < len(best_first) else None,
        "incumbents": incumbents(came, spec.goal),
        "curves": curves(best_first, candidates),
        "curve_frame": _ends(_curve_frame(best_first, candidates, spec)),
        "step": spec.early_stop.step,
        "max": spec.early_stop.max,
        "rung_steps": steps_of_rungs(spec.early_stop),
        "rungs": rung_table(candidates, spec.early_stop),
        "stop": spec.early_stop.method,
        "saved": [saved, in_full],
        "importances": importances(spec.space, [trial.params for trial in best_first]),
        "timeline": timeline(trials, began, end, limits.parallel),
        "failures": failures(trials),
        "cost": spending(trials, spec.early_stop, subject.hourly, began, end),
        "pareto": [trial.number for trial in pareto(state, spec)] if len(spec.goals) > 1 else [],
        "table": [_row(trial, end) for trial in best_first[:_ROWS]],
        "parameters": list(spec.space),
    }


def _head(
    subject: Subject, state: SweepState, began: float, end: float, now: float
) -> dict[str, Any]:
    status = "ended" if state.ended else "stopping" if state.stopping else "as of now"
    stopping = state.stopping.why if state.stopping else ""
    return {
        "key": subject.key,
        "name": subject.name,
        "env": subject.env,
        "queue": subject.queue,
        "image": subject.image,
        "commit": subject.commit,
        "user": subject.user,
        "job": subject.spec.job,
        "method": subject.spec.method,
        "seed": subject.spec.seed,
        "status": status,
        "why": state.ended.why if state.ended else stopping,
        "began": began,
        "took": short(max(0.0, end - began), 5),
        "written": now,
        "trials": len(state.trials),
        "notices": [notice.words for notice in state.notices.values()],
    }


def _limits(
    limits: Limits, trials: Sequence[Trial], hours: float, end: float, hourly: float | None
) -> list[dict[str, Any]]:
    """How much of each limit is used. `hours`: without those for which it was over in between."""
    ended = [trial for trial in trials if trial.state.is_ended]
    failed = sum(trial.state.is_failure for trial in ended)
    found: list[tuple[str, float | None, float | None]] = [
        ("trials", sum(trial.confirms is None for trial in trials), limits.trials),
        ("hours", hours, limits.hours),
    ]
    if hourly is not None:
        spent = sum(trial.ran(end) for trial in trials) / 3600 * hourly
        found.append(("USD", spent, limits.cost))
    if limits.failed_count is not None:
        found.append(("failed", failed, limits.failed_count))
    elif limits.failed_share is not None and ended:
        found.append(("failed %", 100 * failed / len(ended), 100 * limits.failed_share))
    return [
        {"name": name, "used": short(used, 4), "limit": short(limit)} for name, used, limit in found
    ]


def _best(subject: Subject, best_first: Sequence[Trial], state: SweepState) -> dict[str, Any]:
    """The best trial, with what runs it again; and those that were run again."""
    if not best_first:
        return {}
    trial = best_first[0]
    again = [
        {
            "n": each.trial.number,
            "mean": short(each.mean),
            "deviation": short(each.deviation, 3),
            "runs": len(each.values),
        }
        for each in confirmed(state, subject.spec)
    ]
    command = command_line(subject.job_spec, trial)
    return {**_row(trial, 0.0), "seed": trial.seed, "command": command, "confirmed": again}


def _row(trial: Trial, now: float) -> dict[str, Any]:
    return {
        "n": trial.number,
        "state": trial.state.value,
        "values": [short(value) for value in trial.values or ()],
        "step": trial.step,
        "ran": short(trial.ran(now), 5),
        "params": {
            name: short(value, 7) if isinstance(value, float) else value
            for name, value in trial.params.items()
        },
    }


def _shown(
    trials: Sequence[Trial], best_first: Sequence[Trial], most: int, width: int
) -> list[Trial]:
    """The best, and an even choice of all others with a result."""
    most = max(BEST + SAMPLED, min(most, _CELLS // max(1, width + 6)))
    best = list(best_first[:BEST])
    chosen = {trial.number for trial in best}
    others = [trial for trial in trials if trial.values and trial.number not in chosen]
    return best + even(others, most - len(best))


def _columns(
    shown: Sequence[Trial],
    came: Sequence[Came],
    across: Sequence[dict[str, Any]],
    best_first: Sequence[Trial],
    spec: SweepSpec,
) -> dict[str, Any]:
    """A column for each thing that is drawn. `order` 0: it has not ended."""
    ends = {each.trial.number: each for each in came}
    ranks = {trial.number: rank for rank, trial in enumerate(best_first)}
    states = [state.value for state in TrialState]
    found = [ends.get(trial.number) for trial in shown]
    lines = [trial.number in ranks for trial in shown]
    drawn = [place for place, is_ranked in enumerate(lines) if is_ranked]
    best = [place for place in drawn if ranks[shown[place].number] < BEST]
    rest = [place for place in drawn if ranks[shown[place].number] >= BEST]
    params = [trial.params for trial in shown]
    return {
        "n": [trial.number for trial in shown],
        "state": [states.index(trial.state.value) for trial in shown],
        "states": states,
        "rank": [ranks.get(trial.number, -1) for trial in shown],
        "step": [trial.step for trial in shown],
        "values": [
            [short((trial.values or ())[place], 5) if trial.values else None for trial in shown]
            for place in range(len(spec.goals))
        ],
        "order": [each.order if each else 0 for each in found],
        "seconds": [short(each.seconds, 5) if each else 0 for each in found],
        "steps": [each.steps if each else 0 for each in found],
        "params": [places(axis, params) for axis in across],
        "best": best,
        "rest": even(rest, SAMPLED),
    }


def _curve_frame(
    best_first: Sequence[Trial], trials: Sequence[Trial], spec: SweepSpec
) -> Frame | None:
    values = [
        report.values[0]
        for trial in (*best_first[:BEST], *even(trials, 500))
        for report in trial.reports
        if report.values
    ]
    return frame(values, spec.goal.direction)


def _frame(trials: Sequence[Trial], spec: SweepSpec) -> dict[str, Any] | None:
    """Where the last values of these lie."""
    return _ends(frame([each.values[0] for each in trials if each.values], spec.goal.direction))


def _ends(found: Frame | None) -> dict[str, Any] | None:
    if found is None:
        return None
    low, high = short(found.low), short(found.high)
    return {"low": low, "high": high, "log": found.log, "beyond": found.beyond}
