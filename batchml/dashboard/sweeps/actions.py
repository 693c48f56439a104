"""Stop, resume, top up, confirm and rerun: the buttons of a sweep's page, and what they do."""

import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from batchml.dashboard.act import (
    ActionField,
    Body,
    PageAction,
    action_button,
    action_buttons,
    done,
    read_flag,
    read_number,
    shell,
)
from batchml.dashboard.html import Child, Html
from batchml.dashboard.sweeps.reading import SweepLine, SweepReading, TrialLine
from batchml.dashboard.sweeps.table import money
from batchml.errors import BatchmlError, SweepHasController
from batchml.model.names import short_id
from batchml.model.sweep import TrialState
from batchml.sweeps.control.state import RESUMABLE
from batchml.sweeps.handle import SweepHandle

_PATIENCE = 5.0  # seconds in which an error of a stop is still shown in its confirmation


def actions_panel(reading: SweepReading, env_option: str, *, read_only: bool) -> Html:
    """The buttons for the present state of a sweep."""
    line, seen = reading.line, reading.line.snapshot
    assert seen is not None, "a reading has it"
    actions = []
    if not seen.ended and not seen.stopping:
        actions.append(stop_action(line, env_option))
    if line.by in RESUMABLE or seen.status in ("paused", "stopping"):
        actions.append(resume_action(line, env_option))
    actions.append(top_up_action(reading, env_option))
    if line.best is not None:
        actions.append(confirm_action(reading, env_option))
    if seen.count(TrialState.FAILED, TrialState.LOST):
        actions.append(rerun_action(line, env_option))
    return action_buttons(actions, read_only=read_only)


def stop_action(line: SweepLine, env_option: str) -> PageAction:
    return PageAction(
        label="Stop", question=f"Stop the sweep {who(line)}?", path=_path(line, "stop"),
        command=_command("stop", line, env_option), confirm="Stop the sweep", back="Leave it",
        is_destructive=True,
        notes=("Its trials save and end, and no other begins. It can be resumed.", _cost(line)),
        fields=(ActionField(name="now", label="At once, without time to save", flag="--now",
                            is_flag=True),),
    )  # fmt: skip


def resume_action(line: SweepLine, env_option: str) -> PageAction:
    return PageAction(
        label="Resume", question=f"Resume the sweep {who(line)}?", path=_path(line, "resume"),
        command=_command("resume", line, env_option) + " --detach", confirm="Resume the sweep",
        notes=("It continues where it was, with a run as its controller.", _cost(line)),
    )  # fmt: skip


def top_up_action(reading: SweepReading, env_option: str) -> PageAction:
    line, spec, seen = reading.line, reading.line.spec, reading.line.snapshot
    assert spec is not None and seen is not None, "a reading has both"
    fields = [
        _limit("trials", "Trials in all", seen.wanted, f"{seen.planned} so far"),
        _limit("hours", "Hours in all", seen.hours_limit, f"{seen.hours:.2g} h so far"),
        _limit("parallel", "Trials at once", seen.parallel, ""),
    ]
    if seen.spent is not None:
        spent = f"{money(seen.spent)} so far"
        fields.insert(2, _limit("cost", "Cost in all, USD", seen.cost_limit, spent))
    if spec.early_stop.method == "halving":
        fields = fields[1:]  # its rungs are planned for the trials that it began with
    return PageAction(
        label="Top up", question=f"Change the limits of the sweep {who(line)}?",
        path=_path(line, "top-up"), command=_command("top-up", line, env_option) + " --detach",
        confirm="Change the limits", fields=tuple(fields),
        notes=("The limits count all trials of the sweep. It continues by itself.", _cost(line)),
    )  # fmt: skip


def confirm_action(reading: SweepReading, env_option: str) -> PageAction:
    line, (top, seeds) = reading.line, reading.confirm
    ended = [each.ran for each in reading.trials if each.state is TrialState.DONE]
    hourly = reading.hourly
    notes: list[Child] = ["The best trials run again, each with other seeds.", _cost(line)]
    if ended and hourly:
        each = sum(ended) / len(ended) / 3600 * hourly
        notes.append(f"A run takes about {money(each)}, as the trials so far.")
    return PageAction(
        label="Confirm", question=f"Confirm the best trials of the sweep {who(line)}?",
        path=_path(line, "confirm"), command=_command("confirm", line, env_option) + " --detach",
        confirm="Run them again", notes=tuple(notes),
        fields=(
            ActionField(name="top", label="Best trials", value=str(top), flag="--top",
                        is_number=True),
            ActionField(name="seeds", label="Seeds for each", value=str(seeds), flag="--seeds",
                        is_number=True),
        ),
    )  # fmt: skip


def rerun_action(line: SweepLine, env_option: str) -> PageAction:
    seen = line.snapshot
    assert seen is not None, "a reading has it"
    failed = seen.count(TrialState.FAILED, TrialState.LOST)
    return PageAction(
        label="Rerun failed", question=f"Run {failed} failed trials of {who(line)} again?",
        path=_path(line, "rerun"),
        command=_command("rerun", line, env_option) + " --failed --detach",
        confirm="Run them again", notes=(_cost(line),),
        fields=(ActionField(name="code", label="With the code as it is now", flag="--code",
                            is_flag=True),),
    )  # fmt: skip


class TrialStops(Struct, frozen=True):
    """The buttons that stop single trials, in the table of trials."""

    env_option: str = ""
    read_only: bool = False

    def can_stop(self, trial: TrialLine) -> bool:
        return bool(trial.job_id) and trial.state in (TrialState.WAITING, TrialState.RUNNING)

    def button(self, line: SweepLine, trial: TrialLine) -> Html:
        """Cancels the run of the trial, which then counts as ended."""
        word = short_id(trial.job_id)
        action = PageAction(
            label="Stop", question=f"Stop trial {trial.number} of {who(line)}?",
            path="/act/cancel", body={"run": trial.job_id}, confirm="Stop the trial",
            command=shell("batchml", "cancel", word) + self.env_option, back="Leave it",
            cost=f"/run/{quote(trial.job_id)}/cost", is_destructive=True,
            notes=("It saves and ends, and counts as ended. The sweep continues.",),
        )  # fmt: skip
        return action_button(action, read_only=self.read_only)


def who(line: SweepLine) -> str:
    """The name and the short key of a sweep: `lenet-tune 2bcdefgh`."""
    return f"{line.name} {line.key[:8]}"


def _path(line: SweepLine, verb: str) -> str:
    return f"/act/sweep/{line.key}/{verb}"


def _command(verb: str, line: SweepLine, env_option: str) -> str:
    return shell("batchml", "sweeps", verb, line.key[:8]) + env_option


def _cost(line: SweepLine) -> str:
    """What the sweep has cost, and will cost with its trials in flight."""
    seen = line.snapshot
    if seen is None or seen.spent is None:
        return "Its cost is unknown, or it is free: this machine has no usd_per_hour."
    more = ""
    if seen.committed and not seen.ended:
        more = f", up to {money(seen.spent + seen.committed)} with the trials in flight"
    return f"Its cost so far: {money(seen.spent)}{more}."


def _limit(name: str, label: str, value: float | None, hint: str) -> ActionField:
    return ActionField(name=name, label=label, value="" if value is None else f"{value:g}",
                       flag=f"--{name}", hint=hint, is_number=True)  # fmt: skip


# --- What they do ---------------------------------------------------------------------------------


def stop(handle: SweepHandle, body: Body) -> dict[str, Any]:
    """Without a controller a stop takes until all trials have saved: it goes on by itself then."""
    now = read_flag(body, "now")
    _begin(lambda: handle.stop(now=now))
    return done(f"The sweep {handle.name} is stopping.")


def resume(handle: SweepHandle, body: Body) -> dict[str, Any]:
    handle.resume()
    return done(f"The sweep {handle.name} continues. {_go_on(handle)}")


def top_up(handle: SweepHandle, body: Body) -> dict[str, Any]:
    handle.top_up(
        trials=read_number(body, "trials"), hours=read_number(body, "hours", float),
        cost=read_number(body, "cost", float), parallel=read_number(body, "parallel"),
    )  # fmt: skip
    return done(f"The sweep {handle.name} has other limits. {_go_on(handle)}")


def confirm(handle: SweepHandle, body: Body) -> dict[str, Any]:
    handle.confirm(read_number(body, "top"), read_number(body, "seeds"))
    return done(f"The best trials of {handle.name} run again. {_go_on(handle)}")


def rerun(handle: SweepHandle, body: Body) -> dict[str, Any]:
    if not handle.rerun(code=read_flag(body, "code")):
        return done(f"No trial of {handle.name} has failed. Nothing was done.")
    return done(f"The failed trials of {handle.name} run again. {_go_on(handle)}")


VERBS: dict[str, Callable[[SweepHandle, Body], dict[str, Any]]] = {
    "stop": stop, "resume": resume, "top-up": top_up, "confirm": confirm, "rerun": rerun,
}  # fmt: skip


def _go_on(handle: SweepHandle) -> str:
    """Let the sweep continue: by its controller, or by one that is a run."""
    try:
        handle.detach()
    except SweepHasController:
        return "Its controller carries it out."
    return "A run is its controller now."


def _begin(work: Callable[[], None]) -> None:
    """Work that may take minutes. Raises its error if it fails soon."""
    errors: list[BatchmlError] = []

    def go() -> None:
        try:
            work()
        except BatchmlError as error:
            errors.append(error)

    thread = threading.Thread(target=go, name="sweep-stop", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if errors:
        raise errors[0]
