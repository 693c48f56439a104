"""Sweeps and trials as text and as JSON, and the commands that are useful next."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from batchml.cli.render import duration, pad, printable, table, time_json
from batchml.config.project import short_project
from batchml.context import Context
from batchml.local import control
from batchml.model.sweep import Trial, TrialState
from batchml.runtime.protocol.variables import format_value
from batchml.sweeps.control.events import FAILURES, USER
from batchml.sweeps.control.plan import SubmitMode
from batchml.sweeps.control.state import RESUMABLE, SweepState
from batchml.sweeps.control.totals import count_ended, limits_now
from batchml.sweeps.results import ConfirmedTrial, failed_trials
from batchml.sweeps.run import gains_from_controller, needs_controller
from batchml.sweeps.started import StartedSweep, command_line
from batchml.sweeps.summary import SweepSnapshot, SweepSummary
from batchml.sweeps.view import SweepRow

CANCELLED = 143  # the exit code of a sweep that its user stopped
_FRONT = 40  # trials of the Pareto front that are listed
_FAILED = 20  # failed trials that are listed


# --- The list of sweeps ---------------------------------------------------------------------------


def sweeps_table(rows: Sequence[SweepRow], now: float, *, has_projects: bool = False) -> str:
    known = [row.listed.project for row in rows]
    lines = [["SWEEP", "NAME", "STATUS", "METHOD", "TRIALS", "BEST", "AGE"]]
    lines[0] += ["PROJECT"] if has_projects else []
    for row in rows:
        age = duration(now - row.listed.created_at)
        lines.append([row.listed.key[:8], row.listed.name, *_row_cells(row), age])
        lines[-1] += [short_project(row.listed.project, known)] if has_projects else []
    return table([[printable(cell) for cell in line] for line in lines])


def _row_cells(row: SweepRow) -> list[str]:
    if row.sweep is None or row.state is None:
        return [row.trouble or "Not started", "", "", ""]
    spec, best = row.sweep.spec, row.best
    stop = f"+{spec.early_stop.method}" if spec.early_stop.method != "none" else ""
    total = max(len(row.state.trials), limits_now(row.state, spec).trials or 0)
    value = f"{spec.goal.metric} {best.values[0]:.5g}" if best and best.values else ""
    return [row.status, f"{spec.method}{stop}", f"{count_ended(row.state)}/{total}", value]


def row_json(row: SweepRow) -> dict[str, Any]:
    listed: dict[str, Any] = {
        "sweepId": row.listed.key,
        "name": row.listed.name,
        "project": row.listed.project or None,
        "createdAt": time_json(round(row.listed.created_at * 1000)),
    }
    if row.sweep is None or row.state is None:
        return listed | {"status": None, "trouble": row.trouble or None}
    return listed | {
        "status": row.status,
        "method": row.sweep.spec.method,
        "trials": len(row.state.trials),
        "counts": counts_json(row.state.counts),
        "best": trial_json(row.sweep, row.best),
    }


# --- One sweep ------------------------------------------------------------------------------------


def identity_json(sweep: StartedSweep) -> dict[str, Any]:
    return {
        "sweepId": sweep.key,
        "name": sweep.name,
        "env": sweep.env,
        "project": sweep.project or None,
    }


def counts_json(counts: Mapping[TrialState, int]) -> dict[str, int]:
    """The number of trials by state, for the states that trials have."""
    return {state.value: count for state, count in counts.items() if count}


def sweep_json(
    sweep: StartedSweep,
    state: SweepState,
    snapshot: SweepSnapshot,
    summary: SweepSummary,
    holder: str,
) -> dict[str, Any]:
    return {
        **identity_json(sweep),
        "status": snapshot.status,
        "why": snapshot.ended or snapshot.stopping or None,
        "controller": holder or None,
        "trials": snapshot.planned,
        "wanted": snapshot.wanted,
        "parallel": snapshot.parallel,
        "counts": counts_json(snapshot.counts),
        "best": trial_json(sweep, snapshot.best),
        **_results_json(sweep, summary),
        "hours": snapshot.hours,
        "cost": snapshot.spent,
        "committed": snapshot.committed,
        "secondsLeft": snapshot.eta,
        "steps": snapshot.steps,
        "stepsSaved": snapshot.steps_saved,
        "failed": [
            {
                "trial": each.number,
                "why": each.why,
                "exitCode": each.exit_code,
                "jobId": each.job_id or None,
            }
            for each in failed_trials(state)[:_FAILED]
        ],
        "notices": list(snapshot.notices),
        "jobIds": [state.jobs[number] for number in sorted(state.jobs)],
    }


def summary_json(sweep: StartedSweep, summary: SweepSummary) -> dict[str, Any]:
    snapshot = summary.snapshot
    return {
        **identity_json(sweep),
        "status": snapshot.status,
        "ended": summary.by or None,
        "why": summary.why,
        "trials": snapshot.planned,
        "counts": counts_json(snapshot.counts),
        "best": trial_json(sweep, snapshot.best),
        **_results_json(sweep, summary),
        "hours": snapshot.hours,
        "cost": snapshot.spent,
        "steps": snapshot.steps,
        "stepsSaved": snapshot.steps_saved,
        "notices": list(snapshot.notices),
        "exitCode": exit_code(summary),
    }


def _results_json(sweep: StartedSweep, summary: SweepSummary) -> dict[str, Any]:
    """The Pareto front and confirmed trials."""
    return {
        "pareto": [trial_json(sweep, trial) for trial in summary.pareto],
        "confirmed": [
            {"trial": each.trial.number, **(confirmed_json(each) or {})}
            for each in summary.confirmed
        ],
    }


def exit_code(summary: SweepSummary) -> int:
    """The exit code of a sweep: CANCELLED if its user stopped it; 0 if it has a best trial. If
    failures have stopped the sweep, the exit code of the first failed trial."""
    if summary.by == USER:
        return CANCELLED
    if summary.by != FAILURES and summary.snapshot.best is not None:
        return 0
    first = summary.first_failure
    return (first.exit_code or 1) if first else 1


def end_lines(sweep: StartedSweep, summary: SweepSummary) -> list[str]:
    """How a sweep ended, and the best trial with its parameters and its command."""
    snapshot, first, best = summary.snapshot, summary.first_failure, summary.snapshot.best
    counts = ", ".join(f"{count} {state}" for state, count in snapshot.counts.items() if count)
    title = f"Sweep [{sweep.name} - {sweep.key}]"
    lines = [f"{title} has ended: {summary.why} ({counts or 'no trial'})"]
    if best is not None:
        lines.append(f"Best: {describe_best(sweep, best)}")
        lines += [f"  {name} = {format_value(value)}" for name, value in best.params.items()]
        lines.append(f"  {command_line(sweep, best)}")
    elif first is not None:
        why = first.why.partition("; ")[0]  # the notices above have all of it
        lines.append(f"No trial has a result. The first failed: {why}")
    return [*lines, *confirmed_lines(summary.confirmed), *front_lines(summary.pareto)]


# --- Trials ---------------------------------------------------------------------------------------


def trial_json(sweep: StartedSweep, trial: Trial | None) -> dict[str, Any] | None:
    if trial is None:
        return None
    goals = zip(sweep.spec.goals, trial.values or (), strict=False)
    return {
        "trial": trial.number,
        "params": trial.params,
        "metrics": {**trial.metrics, **{goal.metric: value for goal, value in goals}},
        "step": trial.step,
        "state": trial.state.value,
        "seed": trial.seed,
        "jobId": trial.job_id,
    }


def describe_best(sweep: StartedSweep, best: Trial) -> str:
    """`val_accuracy 0.9813, trial 17, epoch 27`"""
    goals = zip(sweep.spec.goals, best.values or (), strict=False)
    values = ", ".join(f"{printable(goal.metric)} {value:.6g}" for goal, value in goals)
    step = f", {step_name(sweep, best)} {best.step}" if best.step else ""
    state = "" if best.state is TrialState.DONE else f", {best.state.value}"
    return f"{values}, trial {best.number}{step}{state}"


def step_name(sweep: StartedSweep, trial: Trial | None) -> str:
    """What the numbers of a trial's steps count, such as `epoch`."""
    learned = trial.counter if trial is not None else ""
    return printable(learned or sweep.spec.early_stop.step)


def confirmed_json(trial: ConfirmedTrial | None) -> dict[str, Any] | None:
    if trial is None:
        return None
    return {"mean": trial.mean, "deviation": trial.deviation, "values": list(trial.values)}


def confirmed_lines(confirmed: Sequence[ConfirmedTrial]) -> list[str]:
    """The results of trials that were run again with other seeds."""
    return [
        f"Confirmed: trial {each.trial.number} has {each.mean:.6g} ± {each.deviation:.2g} "
        f"over {len(each.values)} runs."
        for each in confirmed
    ]


def front_lines(front: Sequence[Trial]) -> list[str]:
    """With several goals: the trials of the Pareto front."""
    if len(front) < 2:
        return []
    numbers = ", ".join(str(trial.number) for trial in front[:_FRONT])
    more = f", and {len(front) - _FRONT} more" if len(front) > _FRONT else ""
    return [f"Pareto front: no other trial beats these in every goal: {numbers}{more}."]


# --- The commands that are useful next ------------------------------------------------------------


_FAILED_NAMED = 3  # failed trials whose logs are named


def sweep_word(context: Context, sweep: StartedSweep) -> str:
    """The argument and option that name the sweep in a command."""
    return f"{sweep.key}{context.env_option}"


def log_command(context: Context, trial: Trial) -> str:
    """The command that prints the log of a trial's last container; "" without a container."""
    return f"batchml logs {trial.job_id}{context.env_option}" if trial.job_id else ""


def is_server_down(context: Context) -> bool:
    """Whether the sweep needs the embedded server, which is not running."""
    return context.settings.is_local and control.find_server(context.home) is None


def describe_next_commands(
    context: Context,
    sweep: StartedSweep,
    state: SweepState,
    snapshot: SweepSnapshot,
    holder: str,
) -> str:
    """Lines that say which controller a sweep has, and which commands may be useful next."""
    lines, word = [], sweep_word(context, sweep)
    failed = failed_trials(state)[:_FAILED_NAMED]
    commands = [(f"trial {each.number} failed", log_command(context, each)) for each in failed]
    if failed:
        commands.append(("run again", f"batchml sweeps rerun {word} --failed"))
    if snapshot.ended:
        if state.stopping is not None and state.stopping.by in RESUMABLE:
            commands.append(("resume", f"batchml sweeps resume {word}"))
    elif holder:
        lines.append(f"Its controller: {holder}.")
    elif needs_controller(sweep) or gains_from_controller(sweep):
        if sweep.mode is SubmitMode.BATCHES:
            lines.append("It has no controller: submitted trials continue, and no other begins.")
        else:
            lines.append(
                "It has no controller: its trials continue without limits and early stopping."
            )
        commands.append(("resume", f"batchml sweeps resume {word}"))
    if not snapshot.ended and is_server_down(context):
        lines.append(
            "The local server is not running: running trials continue, and no other begins."
        )
        commands.append(("start it", "batchml local start"))
    if not snapshot.ended and sys.stdout.isatty():
        commands.append(("follow", f"batchml sweeps show --follow {word}"))
    if snapshot.best is not None:
        commands.append(("the best", f"batchml sweeps best {word}"))
        commands.append(("its log", log_command(context, snapshot.best)))
    commands.append(("report", f"batchml sweeps report {word}"))
    commands = [(f"{name}:", command) for name, command in commands if command]
    width = max(len(name) for name, _ in commands)
    return "\n".join([*lines, *(f"  {pad(name, width)}  {command}" for name, command in commands)])
