"""Sweeps as rows of a table, and as JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from batchml.cli.render import duration, printable, table
from batchml.cli.sweep_running import results_json, trial_json
from batchml.cli.sweep_ways import failed_trials

if TYPE_CHECKING:
    from batchml.client.sweeping.freezing import Frozen
    from batchml.client.sweeping.looking import Glance
    from batchml.sweep.state import SweepState
    from batchml.sweep.summary import Picture, Summary

_FAILED = 20  # trials that are named


def listed_table(found: "Sequence[Glance]", now: float) -> str:
    rows = [["SWEEP", "NAME", "STATUS", "METHOD", "TRIALS", "BEST", "AGE"]]
    for each in found:
        age = duration(now - each.listed.created_at)
        rows.append([each.listed.key[:8], each.listed.name, *_middle(each), age])
    return table([[printable(cell) for cell in row] for row in rows])


def _middle(glance: "Glance") -> list[str]:
    if glance.frozen is None or glance.state is None:
        return [glance.trouble or "Not started", "", "", ""]
    spec, best = glance.frozen.spec, glance.best
    stop = f"+{spec.early_stop.method}" if spec.early_stop.method != "none" else ""
    over = sum(many for state, many in glance.state.counts.items() if state.is_ended)
    limits = glance.state.limits or spec.limits
    total = max(len(glance.state.trials), limits.trials or 0)
    value = f"{spec.goal.metric} {best.values[0]:.5g}" if best and best.values else ""
    return [glance.status, f"{spec.method}{stop}", f"{over}/{total}", value]


def listed_json(glance: "Glance") -> dict[str, Any]:
    found: dict[str, Any] = {
        "sweepId": glance.listed.key,
        "name": glance.listed.name,
        "createdAt": round(glance.listed.created_at * 1000),
    }
    if glance.frozen is None or glance.state is None:
        return found | {"status": None, "trouble": glance.trouble or None}
    return found | {
        "status": glance.status,
        "method": glance.frozen.spec.method,
        "trials": len(glance.state.trials),
        "counts": {each.value: many for each, many in glance.state.counts.items() if many},
        "best": trial_json(glance.frozen, glance.best),
    }


def shown_json(
    frozen: "Frozen", state: "SweepState", picture: "Picture", summary: "Summary", holder: str
) -> dict[str, Any]:
    return {
        "sweepId": frozen.key,
        "name": frozen.name,
        "env": frozen.env,
        "status": picture.status,
        "why": picture.ended or picture.stopping or None,
        "controller": holder or None,
        "trials": picture.planned,
        "wanted": picture.wanted,
        "parallel": picture.parallel,
        "counts": {each.value: many for each, many in picture.counts.items() if many},
        "best": trial_json(frozen, picture.best),
        **results_json(frozen, summary),
        "hours": picture.hours,
        "cost": picture.spent,
        "committed": picture.committed,
        "secondsLeft": picture.eta,
        "steps": picture.steps,
        "stepsSaved": picture.steps_saved,
        "failed": [
            {
                "trial": each.number,
                "why": each.why,
                "exitCode": each.exit_code,
                "jobId": each.job_id or None,
            }
            for each in failed_trials(state, _FAILED)
        ],
        "notices": list(picture.notices),
        "jobIds": [state.jobs[wave] for wave in sorted(state.jobs)],
    }
