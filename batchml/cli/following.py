"""A run that a command works on: find it, follow it, detach from it."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from batchml.cli.output import print_json, say

if TYPE_CHECKING:
    from batchml.cli.wiring import Place
    from batchml.model.run import Run


def follow(
    place: "Place",
    job_id: str,
    *,
    json_: bool,
    from_start: bool,
    cancel_on_interrupt: bool = False,
    patterns: Mapping[str, str] | None = None,
) -> None:
    """Show a run to its end and exit with its code."""
    from batchml.cli.live import open_view
    from batchml.cli.live import show as show_live
    from batchml.cli.render import run_json
    from batchml.model.run import classify
    from batchml.ops import watch
    from batchml.ops.metrics import Metrics

    metrics = Metrics(patterns or {})

    with (
        detaching(place, [job_id], cancel=cancel_on_interrupt),
        open_view(place.clock, to_stderr=json_) as view,
    ):
        happenings = watch.follow(
            place.describe, place.open_log, job_id, clock=place.clock, pace=place.pace
        )
        run = show_live(metrics.watch(happenings), view, from_start=from_start)
    outputs = place.outputs(job_id)
    if json_:
        found = str(outputs) if outputs else None
        ours = {"env": place.env, "metrics": metrics.values, "outputs": found}
        print_json({**run_json(run), **ours})
        raise typer.Exit(classify(run).exit_code)
    if metrics.values:
        say("Metrics: " + ", ".join(f"{name} {value:g}" for name, value in metrics.values.items()))
    if outputs is not None and any(outputs.iterdir()):
        say(f"Outputs: {outputs}")
    raise typer.Exit(classify(run).exit_code)


@contextmanager
def detaching(place: "Place", job_ids: list[str], *, cancel: bool = False) -> Iterator[None]:
    """On Ctrl-C leave the runs alone, and say how to come back; a second one leaves at once.

    With `cancel`, stop them instead.
    """
    from batchml.errors import INTERRUPTED
    from batchml.model.run import EXIT_CODES, OutcomeClass

    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if job_ids and not cancel:
            say("\nDetached: the job goes on.")
        for job_id in job_ids:
            if cancel:
                place.batch.terminate(job_id, "Cancelled by the user (Ctrl-C)")
                say(f"Cancelled job {job_id}.")
            else:
                say_how_to_go_on(place, job_id)
        raise typer.Exit(EXIT_CODES[OutcomeClass.CANCELLED] if cancel else INTERRUPTED) from None


def say_how_to_go_on(place: "Place", job_id: str) -> None:
    option = "" if place.settings.is_local else f" --env {place.env}"
    say(f"  follow:  batchml logs -f {job_id}{option}")
    say(f"  cancel:  batchml cancel {job_id}{option}")


@contextmanager
def finishing_first(what: str) -> Iterator[None]:
    """Hold the first Ctrl-C back until a short step is over; a second one leaves at once."""
    interrupted = False

    def hold(_number: int, _frame: object) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        say(f"\nFinishing {what} first. Ctrl-C again leaves at once.")

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        signal.raise_signal(signal.SIGINT)


def select(place: "Place", words: Sequence[str]) -> list[str]:
    """The job ids that the words mean, in their order; the runs are listed once at most.

    Raises NotFound, UsageError.
    """
    if not words:
        return []
    from functools import cache

    from batchml.ops.select import select_run

    @cache
    def known() -> list[tuple[str, str]]:
        runs = [run for queue in place.batch.queues() for run in place.batch.list_recent(queue)]
        runs.sort(key=lambda run: run.created_at or 0, reverse=True)
        return [(run.job_id, run.name) for run in runs]

    history = place.history.newest_first(place.env)
    return [select_run(word, history, known) for word in words]


def described(place: "Place", job_ids: Sequence[str]) -> "dict[str, Run]":
    """The runs of these ids, in their order, a hundred a call.

    Raises NotFound for the first that the environment does not know.
    """
    from batchml.errors import NotFound

    asked = list(dict.fromkeys(job_ids))
    found = place.describe(asked)
    for job_id in asked:
        if job_id not in found:
            hint = f"Environment {place.env} does not know it. `batchml ls` shows the runs."
            raise NotFound("Run", job_id, [], hint)
    return {job_id: found[job_id] for job_id in asked}
