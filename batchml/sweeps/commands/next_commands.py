"""The commands that are useful next for a sweep."""

import sys
from typing import TYPE_CHECKING

from batchml.cli.render import pad
from batchml.local import control
from batchml.sweeps.control.plan import SubmitMode
from batchml.sweeps.results import failed_trials
from batchml.sweeps.run import gains_from_controller, needs_controller

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.model.sweep import Trial
    from batchml.sweeps.control.state import SweepState
    from batchml.sweeps.started import StartedSweep
    from batchml.sweeps.summary import SweepSnapshot

_FAILED = 3  # failed trials whose logs are named


def log_of(context: "Context", trial: "Trial") -> str:
    """The command that prints the log of a trial's last container; "" without a container."""
    return f"batchml logs {trial.job_id}{context.option}" if trial.job_id else ""


def is_server_down(context: "Context") -> bool:
    """Whether the embedded server is not running; on `local` it runs trials and controllers."""
    return context.settings.is_local and control.find_server(context.home) is None


def describe_next(
    context: "Context",
    sweep: "StartedSweep",
    state: "SweepState",
    snapshot: "SweepSnapshot",
    holder: str,
) -> str:
    """The controller of a sweep, and the next commands."""
    lines, word = [], f"{sweep.key}{context.option}"
    failed = failed_trials(state)[:_FAILED]
    commands = [(f"trial {each.number} failed", log_of(context, each)) for each in failed]
    if failed:
        commands.append(("run again", f"batchml sweeps rerun {word} --failed"))
    if snapshot.ended:
        if state.stopping is not None and state.stopping.by in ("user", "failures"):
            commands.append(("resume", f"batchml sweeps resume {word}"))
    elif holder:
        lines.append(f"Its controller: {holder}.")
    elif needs_controller(sweep) or gains_from_controller(sweep):
        is_idle = sweep.mode is SubmitMode.BATCHES
        lines.append(
            "It has no controller: submitted trials continue, and no other begins."
            if is_idle
            else "It has no controller: its trials continue without limits and early stopping."
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
        commands.append(("its log", log_of(context, snapshot.best)))
    commands.append(("report", f"batchml sweeps report {word}"))
    commands = [(f"{name}:", command) for name, command in commands if command]
    width = max(len(name) for name, _ in commands)
    return "\n".join([*lines, *(f"  {pad(name, width)}  {command}" for name, command in commands)])
