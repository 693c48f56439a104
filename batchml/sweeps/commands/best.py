"""The best trials of a sweep, and one trial in detail: as text, JSON, a command or a job."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import duration, pad, printable
from batchml.context import Context
from batchml.errors import NotFound
from batchml.model.names import join_shell
from batchml.model.sweep import Trial
from batchml.runtime.protocol.variables import format_value
from batchml.sweeps.artifacts import JOB, MARK, fetch_trial, job_file
from batchml.sweeps.commands.next_commands import log_of
from batchml.sweeps.commands.render import (
    confirmed_json,
    confirmed_lines,
    describe_best,
    front_lines,
    trial_json,
)
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.report.data import SEED, command_line, command_words
from batchml.sweeps.results import confirmed_trials, pareto_front, rank_trials
from batchml.sweeps.started import StartedSweep
from batchml.sweeps.stores import SweepStore


def best_json(
    sweep: StartedSweep, trials: Sequence[Trial], state: SweepState
) -> list[dict[str, Any]]:
    again = {each.trial.number: each for each in confirmed_trials(state, sweep.spec)}
    front = pareto_front(state, sweep.spec) if len(sweep.spec.goals) > 1 else []
    ahead = {trial.number for trial in front}
    found = []
    for trial in trials:
        details = {**(trial_json(sweep, trial) or {})}
        details["command"] = command_words(sweep.job_spec, trial.params)
        details["confirmed"] = confirmed_json(again.get(trial.number))
        found.append(details | ({"isPareto": trial.number in ahead} if front else {}))
    return found


def best_first(sweep: StartedSweep, state: SweepState) -> list[Trial]:
    """The trials with a result, best first; with several goals the Pareto front comes first."""
    found = rank_trials(state, sweep.spec)
    if len(sweep.spec.goals) == 1:
        return found
    front = pareto_front(state, sweep.spec)
    ahead = {trial.number for trial in front}
    return [*front, *(trial for trial in found if trial.number not in ahead)]


def best_text(sweep: StartedSweep, trials: Sequence[Trial], state: SweepState) -> str:
    """The trials, each with its parameters and the command that runs it again."""
    blocks = [_block(sweep, trial) for trial in trials]
    front = pareto_front(state, sweep.spec) if len(sweep.spec.goals) > 1 else []
    more = [*confirmed_lines(confirmed_trials(state, sweep.spec)), *front_lines(front)]
    if front and len(trials) > 1:
        more.append("They come first, sorted by the first goal; the others follow.")
    return "\n\n".join([*blocks, *(["\n".join(more)] if more else [])])


def _block(sweep: StartedSweep, trial: Trial) -> str:
    lines = [describe_best(sweep, trial)]
    width = max(map(len, trial.params), default=0)
    for name, value in trial.params.items():
        lines.append(printable(f"  {pad(name, width)}  {format_value(value)}"))
    return "\n".join([*lines, f"  {command_line(sweep.job_spec, trial)}"])


def trial_job_file(sweep: StartedSweep, trial: Trial, code: "str | bool | None" = None) -> str:
    """A job.toml with the trial's parameters and seed. `code` replaces the job's own."""
    job = sweep.job_spec
    job = replace(job, env={**job.env, SEED: str(trial.seed)})
    if code is not None:
        job = replace(job, code=code)
    head = f"# {sweep.name} with the parameters of {describe_best(sweep, trial)}"
    made = f"{MARK}{sweep.key}."
    return "\n".join([*map(printable, (head, made)), job_file(job, trial.params)])


def no_best_trial(sweep: StartedSweep, state: SweepState) -> NotFound:
    """The error for a sweep without a best trial."""
    failed = sum(many for each, many in state.counts.items() if each.is_failure)
    if failed:
        hint = f"{failed} trials failed: batchml sweeps report {sweep.key} groups the reasons."
    else:
        hint = "No trial has reported its metric yet."
    return NotFound("Best trial of sweep", sweep.name, [], hint)


def fetch_as_job(
    context: Context,
    sweep: StartedSweep,
    store: SweepStore,
    trial: Trial,
    state: SweepState,
    dest: Path,
    *,
    json_: bool,
) -> None:
    """Fetch a trial as a job: its code, a job.toml with its parameters, outputs and checkpoint."""
    found = fetch_trial(context, sweep, store, trial, dest)
    code = "." if sweep.code else None
    (dest / JOB).write_text(trial_job_file(sweep, trial, code) + "\n", "utf-8")
    if json_:
        print_json(
            best_json(sweep, [trial], state)[0]
            | {"folder": str(dest.absolute()), "code": found.code, "outputs": found.outputs,
               "checkpoint": found.checkpoint}
        )  # fmt: skip
        return
    print_line(printable(str(dest)))
    kinds = {"code": found.code, "outputs": found.outputs, "checkpoint": found.checkpoint}
    parts = [f"{_files(many)} of its {kind}" for kind, many in kinds.items() if many]
    say(f"Trial {trial.number}: {', '.join([*parts, 'job.toml with its parameters'])}.")
    for why in found.missing:
        say(printable(why))
    if not found.outputs + found.checkpoint and not found.missing:
        say("It has written no outputs to BATCHML_OUTPUT_DIR and no checkpoint.")
    if not sweep.code or found.code:
        command = join_shell(["batchml", "submit", str(dest)])
        say(f"  run it:  {command}{context.option}")


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


# --- One trial: its state, and why it ended -------------------------------------------------------


def find_trial(sweep: StartedSweep, state: SweepState, number: int) -> Trial:
    """The trial of a number. Raises NotFound."""
    trial = state.trials.get(number)
    if trial is None:
        last = max(state.trials, default=-1)
        hint = f"Trials are 0 to {last}." if last >= 0 else "It has no trials yet."
        raise NotFound(f"Trial of sweep {sweep.name}", str(number), [], hint)
    return trial


def trial_details_json(sweep: StartedSweep, trial: Trial, state: SweepState) -> dict[str, Any]:
    return best_json(sweep, [trial], state)[0] | {
        "exitCode": trial.exit_code,
        "why": trial.why or None,
        "attempt": trial.attempt or None,
        "seconds": trial.seconds,
        "lastLines": list(trial.tail),
    }


def describe_trial(context: Context, sweep: StartedSweep, trial: Trial, now: float) -> str:
    """One fact a line, the last lines of output of a failed trial, and the next commands."""
    facts = [(name, value) for name, value in _facts(sweep, trial, now) if value]
    commands = [
        (name, command) for name, command in _next_commands(context, sweep, trial) if command
    ]
    width = max(len(name) for name, _ in (*facts, *commands))
    lines = [f"{pad(name, width)}  {printable(value)}" for name, value in facts]
    if trial.tail:
        lines += ["its last lines:", *(f"  {printable(line)}" for line in trial.tail)]
    return "\n".join([*lines, *(f"{pad(name, width)}  {command}" for name, command in commands)])


def _facts(sweep: StartedSweep, trial: Trial, now: float) -> Iterator[tuple[str, str]]:
    code = f"exit code {trial.exit_code}"
    is_plain = trial.exit_code in (None, 0) or code in trial.why
    yield "trial", f"{trial.number} of {sweep.name}"
    yield "state", trial.state.value + ("" if is_plain else f", {code}")
    yield "why", trial.why
    yield "result", describe_best(sweep, trial) if trial.values else ""
    for name, value in trial.params.items():
        yield name, format_value(value)
    yield "confirms", f"trial {trial.confirms}" if trial.confirms is not None else ""
    yield "ran", duration(trial.ran(now)) if trial.started_at is not None else ""
    yield "job", trial.job_id
    yield "command", command_line(sweep.job_spec, trial)


def _next_commands(
    context: Context, sweep: StartedSweep, trial: Trial
) -> Iterator[tuple[str, str]]:
    yield "log", log_of(context, trial)
    if trial.state.is_failure and trial.job_id:
        yield "explain", f"batchml explain {trial.job_id}{context.option}"
    if trial.state.is_ended:
        again = f"batchml sweeps rerun {sweep.key} --trial {trial.number}{context.option}"
        yield "run again", again
