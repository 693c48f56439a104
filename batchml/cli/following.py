"""A run that a command works on: follow it to its end, or detach from it."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from batchml.cli.output import print_json, say

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.model.record import Record
    from batchml.model.run import Run
    from batchml.ops.watch import Happening, Line


def follow(
    place: "Place",
    job_id: str,
    *,
    json_: bool,
    from_start: bool,
    cancel_on_interrupt: bool = False,
    patterns: Mapping[str, str] | None = None,
    known: "Run | None" = None,
    pick: "Callable[[Line], bool] | None" = None,
) -> None:
    """Show a run to its end and exit with its code.

    `patterns` are those of metrics; without them the run's own on record here. `known` is the run
    where it has ended. `pick` chooses the lines that are shown. The history keeps what came of it.
    """
    from batchml.cli.live import TerminalView, open_view
    from batchml.cli.live import show as show_live
    from batchml.cli.render import printable
    from batchml.cli.waitline import Words
    from batchml.client import waiting
    from batchml.model.run import JobStatus, classify
    from batchml.ops.metrics import Metrics, unmatched

    record = _record(place, job_id)
    metrics = Metrics(patterns or (record.patterns if record else {}))
    log = _Log(pick)
    with (
        detaching(place, [job_id], cancel=cancel_on_interrupt),
        open_view(place.clock, metrics, to_stderr=json_) as view,
    ):
        see = None if isinstance(view, TerminalView) else Words(place, [job_id], view.note).see
        happenings = log.watch(metrics.watch(waiting.follow(place, job_id, known=known, see=see)))
        run = show_live(happenings, view, from_start=from_start)
    values = metrics.values if log.is_read else None
    if record is not None and not (record.has_ended and record.measured):
        _keep(place, run, values)
    _say_the_end(place, run, metrics.values, json_=json_, is_complete=log.is_complete)
    is_other = record is not None and record.other
    if log.is_read and run.status is JobStatus.SUCCEEDED and not (json_ or is_other):
        words = unmatched(metrics.patterns, metrics.series)
        if words:
            say(printable(words))
    raise typer.Exit(classify(run).exit_code)


class _Log:
    """Passes on what happens, without the lines that are not picked; sees whether all was read.

    `is_complete` is for the output of all attempts together: None where nobody knows.
    """

    def __init__(self, pick: "Callable[[Line], bool] | None") -> None:
        self._pick = pick
        self.is_read = True
        self._closed: set[bool | None] = set()

    def watch(self, happenings: "Iterator[Happening]") -> "Iterator[Happening]":
        from batchml.ops.watch import CUT, DAMAGED, Closed, Line

        for happening in happenings:
            if isinstance(happening, Line):
                if self._pick is not None and not self._pick(happening):
                    continue
            elif isinstance(happening, Closed):
                self.is_read = self.is_read and happening.proof not in (CUT, DAMAGED)
                self._closed.add(happening.is_complete)
            yield happening

    @property
    def is_complete(self) -> bool | None:
        if False in self._closed:
            return False
        return True if self._closed == {True} else None


def _record(place: "Place", job_id: str) -> "Record | None":
    known = place.history.recent(place.env)
    return next((record for record in known if record.job_id == job_id), None)


def _keep(place: "Place", run: "Run", metrics: Mapping[str, float] | None) -> None:
    """Remember the end. A disk that is full is no reason to lose the run's exit code."""
    try:
        place.history.ended(run, metrics)
    except OSError as error:
        say(f"The end of this run could not be kept in the history: {error}")


def _say_the_end(
    place: "Place",
    run: "Run",
    metrics: Mapping[str, float],
    *,
    json_: bool,
    is_complete: bool | None,
) -> None:
    from batchml.cli.render import printable, run_json

    outputs = place.outputs(run.job_id)
    stored = _stored_outputs(run)
    if json_:
        found = str(outputs) if outputs else stored or None
        about = {"env": place.env, "metrics": metrics, "outputs": found, "logComplete": is_complete}
        print_json({**run_json(run), **about})
        return
    if metrics:
        from batchml.ops.children import metric_texts

        said = (f"{printable(name)} {value}" for name, value in metric_texts(metrics))
        say("Metrics: " + ", ".join(said))
    if outputs is not None and any(outputs.iterdir()):
        say(f"Outputs: {outputs}")
    elif stored:
        say(f"Outputs, if it left any: batchml get {run.job_id}{place.option}")


def _stored_outputs(run: "Run") -> str:
    """Where in S3 the runtime puts what the run leaves, for a run that has such a place."""
    store = run.environment.get("BATCHML_STORE", "")
    return f"{store}/output" if store.startswith("s3://") else ""


class Detached(typer.Exit):
    """Ctrl-C was answered: what is left is to end as it would have ended the command."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which nobody pressed."""


_MANY = 5  # jobs; of more it is not said one by one how to go on


@contextmanager
def detaching(place: "Place", job_ids: list[str], *, cancel: bool = False) -> Iterator[None]:
    """On Ctrl-C leave the runs alone, and say how to come back; a second one leaves at once.

    With `cancel`, stop them instead. SIGTERM is taken for Ctrl-C: a CI job that is cancelled.
    """
    from batchml.client.gang_parts import stop_all
    from batchml.errors import INTERRUPTED
    from batchml.model.run import EXIT_CODES, OutcomeClass

    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except KeyboardInterrupt as stop:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if job_ids and not cancel:
            say(f"\nDetached: the {'job goes' if len(job_ids) == 1 else 'jobs go'} on.")
        if not cancel and len(job_ids) > _MANY:
            say(f"  {len(job_ids)} of them:  batchml ls{place.option}")
            job_ids = []
        for job_id in job_ids:
            if cancel:
                stop_all(place, [job_id], "Cancelled by the user (Ctrl-C)")
                say(f"Cancelled job {job_id}.")
            else:
                say_how_to_go_on(place, job_id)
        code = EXIT_CODES[OutcomeClass.CANCELLED] if cancel else INTERRUPTED
        raise (typer.Exit if isinstance(stop, _Terminated) else Detached)(code) from None
    finally:
        if signal.getsignal(signal.SIGTERM) is _interrupt:
            signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: object) -> None:
    raise _Terminated


def say_how_to_go_on(place: "Place", job_id: str) -> None:
    if ":" in job_id:
        from batchml.client.numbering import typed

        job_id = typed(place, job_id)
    say(f"  follow:  batchml logs -f {job_id}{place.option}")
    say(f"  cancel:  batchml cancel {job_id}{place.option}")
