"""A sweep that a command attends to: shown while it runs, and what came of it."""

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import typer

from batchml.cli.output import print_json, print_line, say, say_lost
from batchml.cli.render import printable
from batchml.cli.sweep_leaving import Leaving, ways
from batchml.cli.sweep_ways import log_of

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.boards import Board
    from batchml.client.sweeping.freezing import Frozen
    from batchml.model.sweep import Trial
    from batchml.sweep.summary import Picture, Summary

CANCELLED = 143


def announcement(place: "Place", frozen: "Frozen") -> str:
    return f"Started sweep [{frozen.name} - {frozen.key}] in [{place.env}]"


def attend(place: "Place", frozen: "Frozen", board: "Board", *, json_: bool) -> None:
    """Be the sweep's controller until it is over, and exit with its code."""
    from batchml.client.sweeping.running import attend as controlled

    attended = controlled(place, frozen, board, say, lost=say_lost)
    leaving = Leaving(place, frozen, json_=json_)
    with leaving.told(), closing(attended.pictures()) as pictures:
        watched = leaving.watch(pictures)
        show(watched if json_ else brief_at_end(watched), frozen, to_stderr=json_)
    tell_end(place, frozen, attended.summary, json_=json_)


def detach(place: "Place", frozen: "Frozen", board: "Board", *, json_: bool) -> None:
    """Leave a sweep to itself, or to a controller that is a run of its own."""
    from batchml.client.sweeping.running import leave

    with Leaving(place, frozen, json_=json_).told():
        leave(place, frozen, board, say)
    if json_:
        print_json({"sweepId": frozen.key, "name": frozen.name, "env": place.env})
    else:
        say_how_to_go_on(place, frozen)


def show(pictures: "Iterator[Picture]", frozen: "Frozen", *, to_stderr: bool) -> None:
    """Draw each picture: as a table on a terminal, as lines elsewhere."""
    from batchml.cli.sweep_table import watching

    with watching(frozen, to_stderr=to_stderr) as view:
        for picture in pictures:
            view.show(picture)


def brief_at_end(pictures: "Iterator[Picture]") -> "Iterator[Picture]":
    """The last picture without the best trial: `end_lines` tell that, once and in full."""
    from msgspec.structs import replace

    for picture in pictures:
        yield replace(picture, best=None) if picture.ended else picture


def say_how_to_go_on(place: "Place", frozen: "Frozen") -> None:
    say(ways(f"{frozen.key}{place.option}"))


# --- the end --------------------------------------------------------------------------------


def tell_end(place: "Place", frozen: "Frozen", summary: "Summary", *, json_: bool) -> None:
    """Say what came of it, and exit with its code."""
    if json_:
        print_json(summary_json(frozen, summary))
    else:
        for line in end_lines(frozen, summary):
            print_line(printable(line))
        failed = summary.first_failure
        if failed is not None and (log := log_of(place, failed)):
            say(f"  trial {failed.number} failed:  {log}")
            word = f"{frozen.key}{place.option}"
            code = "--code " if frozen.code else ""
            say(f"  mended?  batchml sweeps rerun --failed {code}{word}")
        say(f"  report:  batchml sweeps report {frozen.key}{place.option}")
    raise typer.Exit(exit_code(summary))


def exit_code(summary: "Summary") -> int:
    """0 where there is a best trial; of one that stopped for its failures, the first one's."""
    if summary.by == "user":
        return CANCELLED
    if summary.by != "failures" and summary.picture.best is not None:
        return 0
    first = summary.first_failure
    return (first.exit_code or 1) if first else 1


def end_lines(frozen: "Frozen", summary: "Summary") -> list[str]:
    """How it ended, and the best trial with its parameters and its command."""
    from batchml.cli.sweep_best import again_lines, front_lines
    from batchml.cli.sweep_table import best_words
    from batchml.runtime.protocol.variables import text
    from batchml.sweep.report.subject import command_line

    picture, first, best = summary.picture, summary.first_failure, summary.picture.best
    counts = ", ".join(f"{many} {state}" for state, many in picture.counts.items() if many)
    title = f"Sweep [{frozen.name} - {frozen.key}]"
    found = [f"{title} has ended: {summary.why} ({counts or 'no trial'})"]
    if best is not None:
        found.append(f"Best: {best_words(frozen, best)}")
        found += [f"  {name} = {text(value)}" for name, value in best.params.items()]
        found.append(f"  {command_line(frozen.job_spec, best)}")
    elif first is not None:
        found.append(f"No trial has a result. The first failed: {first.why}")
    return [*found, *again_lines(summary.confirmed), *front_lines(summary.pareto)]


def summary_json(frozen: "Frozen", summary: "Summary") -> dict[str, Any]:
    picture = summary.picture
    return {
        "sweepId": frozen.key,
        "name": frozen.name,
        "env": frozen.env,
        "status": picture.status,
        "ended": summary.by or None,
        "why": summary.why,
        "trials": picture.planned,
        "counts": {str(state): many for state, many in picture.counts.items() if many},
        "best": trial_json(frozen, picture.best),
        **results_json(frozen, summary),
        "hours": picture.hours,
        "cost": picture.spent,
        "steps": picture.steps,
        "stepsSaved": picture.steps_saved,
        "notices": list(picture.notices),
        "exitCode": exit_code(summary),
    }


def results_json(frozen: "Frozen", summary: "Summary") -> dict[str, Any]:
    """What there is beside the best."""
    from batchml.cli.sweep_best import again_json

    return {
        "pareto": [trial_json(frozen, trial) for trial in summary.pareto],
        "confirmed": [
            {"trial": each.trial.number, **(again_json(each) or {})} for each in summary.confirmed
        ],
    }


def trial_json(frozen: "Frozen", trial: "Trial | None") -> dict[str, Any] | None:
    if trial is None:
        return None
    goals = zip(frozen.spec.goals, trial.values or (), strict=False)
    return {
        "trial": trial.number,
        "params": trial.params,
        "metrics": {**trial.metrics, **{goal.metric: value for goal, value in goals}},
        "step": trial.step,
        "state": trial.state.value,
        "seed": trial.seed,
        "jobId": trial.job_id,
    }
