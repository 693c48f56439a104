"""What can be done next with a sweep, as it is typed."""

import sys
from typing import TYPE_CHECKING

from batchml.cli.render import pad
from batchml.sweep.budgets import failures

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.freezing import Frozen
    from batchml.model.sweep import Trial
    from batchml.sweep.state import SweepState
    from batchml.sweep.summary import Picture

_FAILED = 3  # trials whose logs are named


def log_of(place: "Place", trial: "Trial") -> str:
    """The command that shows all that the trial printed in its last container; "" for none yet."""
    return f"batchml logs {trial.job_id}{place.option}" if trial.job_id else ""


def is_server_down(place: "Place") -> bool:
    """On `local` all that a sweep does is done by the server, its controller among it."""
    from batchml.local import control

    return place.settings.is_local and control.running(place.home) is None


def failed_trials(state: "SweepState", most: int) -> "list[Trial]":
    """The first of those that failed."""
    if not failures(state):
        return []
    found = (trial for trial in state.trials.values() if trial.state.is_failure)
    return sorted(found, key=lambda trial: trial.number)[:most]


def ways_on(
    place: "Place", frozen: "Frozen", state: "SweepState", picture: "Picture", holder: str
) -> str:
    """Who attends to it, and what can be done next, each with its command."""
    from batchml.client.sweeping.running import is_better_watched, needs_controller
    from batchml.sweep.shape import Shape

    lines, word = [], f"{frozen.key}{place.option}"
    failed = failed_trials(state, _FAILED)
    ways = [(f"trial {each.number} failed", log_of(place, each)) for each in failed]
    if failed:
        ways.append(("run again", f"batchml sweeps rerun {word} --failed"))
    if picture.ended:
        if state.stopping is not None and state.stopping.by in ("user", "failures"):
            ways.append(("go on", f"batchml sweeps resume {word}"))
    elif holder:
        lines.append(f"Its controller: {holder}.")
    elif needs_controller(frozen) or is_better_watched(frozen):
        is_idle = frozen.shaped.shape is Shape.WAVES
        lines.append(
            "Nobody attends to it: trials that were submitted go on, and nothing new begins."
            if is_idle
            else "Nobody attends to it: its trials go on, limits and cut-offs wait."
        )
        ways.append(("go on", f"batchml sweeps resume {word}"))
    if not picture.ended and is_server_down(place):
        lines.append("The local server does not run: what runs goes on, and nothing new begins.")
        ways.append(("bring back", "batchml local start"))
    if not picture.ended and sys.stdout.isatty():
        ways.append(("follow", f"batchml sweeps show --follow {word}"))
    if picture.best is not None:
        ways.append(("the best", f"batchml sweeps best {word}"))
        ways.append(("its log", log_of(place, picture.best)))
    ways.append(("report", f"batchml sweeps report {word}"))
    ways = [(f"{name}:", way) for name, way in ways if way]
    width = max(len(name) for name, _ in ways)
    return "\n".join([*lines, *(f"  {pad(name, width)}  {way}" for name, way in ways)])
