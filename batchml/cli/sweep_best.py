"""What the best trials are, as text, as a command, as a job, as files."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import pad, printable
from batchml.cli.sweep_running import trial_json
from batchml.cli.sweep_table import best_words
from batchml.errors import NotFound
from batchml.runtime.protocol.variables import text
from batchml.sweep.report.subject import SEED, command_line, words
from batchml.sweep.standings import confirmed, pareto, ranked

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.boards import Board
    from batchml.client.sweeping.freezing import Frozen
    from batchml.model.sweep import Trial
    from batchml.sweep.standings import Confirmed
    from batchml.sweep.state import SweepState

_FRONT = 40  # trials of it that are named


def best_json(
    frozen: "Frozen", trials: "Sequence[Trial]", state: "SweepState"
) -> list[dict[str, Any]]:
    again = {each.trial.number: each for each in confirmed(state, frozen.spec)}
    front = pareto(state, frozen.spec) if len(frozen.spec.goals) > 1 else []
    ahead = {trial.number for trial in front}
    found = []
    for trial in trials:
        told = {**(trial_json(frozen, trial) or {})}
        told["command"] = words(frozen.job_spec, trial.params)
        told["confirmed"] = again_json(again.get(trial.number))
        found.append(told | ({"isPareto": trial.number in ahead} if front else {}))
    return found


def again_json(again: "Confirmed | None") -> dict[str, Any] | None:
    if again is None:
        return None
    return {"mean": again.mean, "deviation": again.deviation, "values": list(again.values)}


def leaders(frozen: "Frozen", state: "SweepState") -> "list[Trial]":
    """The trials with a result, best first; of several goals, those that no other beats first."""
    found = ranked(state, frozen.spec)
    if len(frozen.spec.goals) == 1:
        return found
    front = pareto(state, frozen.spec)
    ahead = {trial.number for trial in front}
    return [*front, *(trial for trial in found if trial.number not in ahead)]


def best_text(frozen: "Frozen", trials: "Sequence[Trial]", state: "SweepState") -> str:
    """Each with its parameters, one below the other, and the command that runs it again."""
    blocks = [_block(frozen, trial) for trial in trials]
    front = pareto(state, frozen.spec) if len(frozen.spec.goals) > 1 else []
    told = [*again_lines(confirmed(state, frozen.spec)), *front_lines(front)]
    if front and len(trials) > 1:
        told.append("They come first, by the first goal; the others follow.")
    return "\n\n".join([*blocks, *(["\n".join(told)] if told else [])])


def again_lines(again: "Sequence[Confirmed]") -> list[str]:
    """What trials came to that were run again with other seeds."""
    return [
        f"Run again: trial {each.trial.number} came to {each.mean:.6g} ± {each.deviation:.2g} "
        f"over {len(each.values)} runs."
        for each in again
    ]


def front_lines(front: "Sequence[Trial]") -> list[str]:
    """Of several goals: the trials between which only their user can choose."""
    if len(front) < 2:
        return []
    shown = ", ".join(str(trial.number) for trial in front[:_FRONT])
    more = f", and {len(front) - _FRONT} more" if len(front) > _FRONT else ""
    return [f"Pareto front: no other trial beats these in every goal: {shown}{more}."]


def _block(frozen: "Frozen", trial: "Trial") -> str:
    lines = [best_words(frozen, trial)]
    width = max(map(len, trial.params), default=0)
    for name, value in trial.params.items():
        lines.append(printable(f"  {pad(name, width)}  {text(value)}"))
    return "\n".join([*lines, f"  {command_line(frozen.job_spec, trial)}"])


def job_file(frozen: "Frozen", trial: "Trial", code: "str | bool | None" = None) -> str:
    """A job.toml with the trial's parameters and seed. `code` takes the place of the job's own."""
    from msgspec.structs import replace

    from batchml.client.sweeping.jobfile import job_file
    from batchml.client.sweeping.leftover import MADE

    job = frozen.job_spec
    job = replace(job, env={**job.env, SEED: str(trial.seed)})
    if code is not None:
        job = replace(job, code=code)
    head = f"# {frozen.name} with the parameters of {best_words(frozen, trial)}"
    made = f"{MADE}{frozen.key}."
    return "\n".join([*map(printable, (head, made)), job_file(job, trial.params)])


def nothing_yet(frozen: "Frozen", state: "SweepState") -> NotFound:
    """Why there is no best trial."""
    failed = sum(many for each, many in state.counts.items() if each.is_failure)
    if failed:
        hint = f"{failed} trials failed: batchml sweeps report {frozen.key} groups them by why."
    else:
        hint = "No trial has reported its metric yet."
    return NotFound("Best trial of sweep", frozen.name, [], hint)


def fetch(
    place: "Place",
    frozen: "Frozen",
    board: "Board",
    trial: "Trial",
    state: "SweepState",
    dest: Path,
    *,
    json_: bool,
) -> None:
    """Make a job of the trial, its code and a job.toml with its parameters, and copy what it left:
    its outputs and its checkpoint."""
    from batchml.client.sweeping.leftover import JOB, fetch_trial

    found = fetch_trial(place, frozen, board, trial, dest)
    code = "." if frozen.code else None
    (dest / JOB).write_text(job_file(frozen, trial, code) + "\n", "utf-8")
    if json_:
        print_json(
            best_json(frozen, [trial], state)[0]
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
        say("It has left nothing in BATCHML_OUTPUT_DIR, and no checkpoint.")
    if not frozen.code or found.code:
        from batchml.model.shell import join

        command = join(["batchml", "submit", str(dest)])
        say(f"  run it:  {command}{place.option}")


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"
