"""One trial of a sweep: what became of it, and why."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from batchml.cli.render import duration, pad, printable
from batchml.cli.sweep_best import best_json
from batchml.cli.sweep_table import best_words
from batchml.cli.sweep_ways import log_of
from batchml.errors import NotFound
from batchml.runtime.protocol.variables import text
from batchml.sweep.report.subject import command_line

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.freezing import Frozen
    from batchml.model.sweep import Trial
    from batchml.sweep.state import SweepState


def trial_of(frozen: "Frozen", state: "SweepState", number: int) -> "Trial":
    """Raises NotFound."""
    trial = state.trials.get(number)
    if trial is None:
        last = max(state.trials, default=-1)
        hint = f"They are 0 to {last}." if last >= 0 else "It has none yet."
        raise NotFound(f"Trial of sweep {frozen.name}", str(number), [], hint)
    return trial


def told_json(frozen: "Frozen", trial: "Trial", state: "SweepState") -> dict[str, Any]:
    return best_json(frozen, [trial], state)[0] | {
        "exitCode": trial.exit_code,
        "why": trial.why or None,
        "attempt": trial.attempt or None,
        "seconds": trial.seconds,
        "lastLines": list(trial.tail),
    }


def told(place: "Place", frozen: "Frozen", trial: "Trial", now: float) -> str:
    """One fact a line, the last lines that it printed where it failed, and what to do next."""
    facts = [(name, value) for name, value in _facts(frozen, trial, now) if value]
    ways = [(name, way) for name, way in _ways(place, frozen, trial) if way]
    width = max(len(name) for name, _ in (*facts, *ways))
    lines = [f"{pad(name, width)}  {printable(value)}" for name, value in facts]
    if trial.tail:
        lines += ["its last lines:", *(f"  {printable(line)}" for line in trial.tail)]
    return "\n".join([*lines, *(f"{pad(name, width)}  {way}" for name, way in ways)])


def _facts(frozen: "Frozen", trial: "Trial", now: float) -> Iterator[tuple[str, str]]:
    code = f"exit code {trial.exit_code}"
    is_plain = trial.exit_code in (None, 0) or code in trial.why
    yield "trial", f"{trial.number} of {frozen.name}"
    yield "state", trial.state.value + ("" if is_plain else f", {code}")
    yield "why", trial.why
    yield "result", best_words(frozen, trial) if trial.values else ""
    for name, value in trial.params.items():
        yield name, text(value)
    yield "again", f"of trial {trial.confirms}" if trial.confirms is not None else ""
    yield "ran", duration(trial.ran(now)) if trial.started_at is not None else ""
    yield "job", trial.job_id
    yield "command", command_line(frozen.job_spec, trial)


def _ways(place: "Place", frozen: "Frozen", trial: "Trial") -> Iterator[tuple[str, str]]:
    yield "printed", log_of(place, trial)
    if trial.state.is_failure and trial.job_id:
        yield "explained", f"batchml explain {trial.job_id}{place.option}"
    if trial.state.is_ended:
        again = f"batchml sweeps rerun {frozen.key} --trial {trial.number}{place.option}"
        yield "run again", again
