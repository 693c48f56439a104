"""What early stopping did: trials at each rung, how many went on, and steps that were not run."""

from collections.abc import Iterable, Sequence
from typing import Any

from batchml.model.sweep import EarlyStop, Trial, TrialState
from batchml.sweep.report.numbers import short

_STOPPED = (TrialState.PRUNED, TrialState.PAUSED)


def steps_of_rungs(stop: EarlyStop) -> list[int]:
    """The steps at which trials are judged; empty for other ways to stop."""
    if stop.method not in ("asha", "halving") or not stop.max:
        return []
    from batchml.runtime.protocol.rungs import rung_steps

    return list(rung_steps(stop.min, stop.max, stop.eta))


def rung_table(trials: Sequence[Trial], stop: EarlyStop) -> list[dict[str, Any]]:
    """For each rung: trials `in`, those that went `on`, were stopped `out`, are there `now`.

    `saved` are the steps that those who were stopped there would have had until `max`; `cutoff` is
    the last one by which a trial judged itself, where one is kept.
    """
    steps = steps_of_rungs(stop)
    if not steps and stop.method == "median" and stop.max:
        steps = sorted({t.step for t in trials if t.state in _STOPPED and t.step < stop.max})
    cutoffs = _last_cutoffs(trials)
    found = []
    for step in steps:
        here = [trial for trial in trials if trial.step >= step]
        out = [trial for trial in here if trial.state in _STOPPED and trial.step == step]
        ended = sum(t.step == step and t.state.is_ended and t.state not in _STOPPED for t in here)
        on = sum(trial.step > step for trial in here)
        found.append(
            {
                "step": step,
                "in": len(here),
                "on": on,
                "out": len(out),
                "ended": ended,
                "now": len(here) - on - len(out) - ended,
                "saved": len(out) * (stop.max - step),
                "cutoff": short(cutoffs.get(step), 5),
            }
        )
    return found


def saved_steps(trials: Iterable[Trial], stop: EarlyStop) -> tuple[int, int]:
    """Steps that were not run because trials were stopped, and those of all of these in full.

    Against running the same trials to `max`. Trials that go on, failed or never began count in
    neither number.
    """
    judged = [t for t in trials if t.step and (t.state is TrialState.DONE or t.state in _STOPPED)]
    if not stop.max:
        return 0, 0
    saved = sum(max(0, stop.max - t.step) for t in judged if t.state in _STOPPED)
    return saved, len(judged) * stop.max


def _last_cutoffs(trials: Iterable[Trial]) -> dict[int, float]:
    found: dict[int, tuple[int, float]] = {}
    for trial in trials:
        for decision in trial.decisions:
            known = found.get(decision.step, (-1, 0.0))
            if decision.cutoff is not None and decision.version >= known[0]:
                found[decision.step] = decision.version, decision.cutoff
    return {step: cutoff for step, (_, cutoff) in found.items()}
