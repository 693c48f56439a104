"""Follow a run to its end for a command, and exit with its code."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import typer

from batchml.cli.app import find_cause
from batchml.cli.output import print_json, say
from batchml.cli.render import printable, run_json
from batchml.model.numbering import shown_id
from batchml.model.run import JobStatus, MetricRange, Record, Run, classify
from batchml.runs.commands.interrupt import detaching
from batchml.runs.commands.live import TerminalView, WaitingText, open_view, show_live
from batchml.runs.commands.next_commands import needs_explanation, say_explain_command
from batchml.runs.metrics.conditions import best_values, first_values
from batchml.runs.metrics.series import Metrics, describe_unmatched, metric_texts, shown_values
from batchml.runs.outputs import describe_checkpoints
from batchml.runs.watch import wait
from batchml.runs.watch.events import CUT, DAMAGED, LogClosed, OutputLine, RunEvent

if TYPE_CHECKING:
    from batchml.context import Context

_KEPT = 200  # last lines of output that are searched for the cause of a failure


def follow(
    context: "Context",
    job_id: str,
    *,
    json_: bool,
    from_start: bool,
    cancel_on_interrupt: bool = False,
    patterns: Mapping[str, str] | None = None,
    directions: Mapping[str, str] | None = None,
    ended: Run | None = None,
    pick: Callable[[OutputLine], bool] | None = None,
) -> None:
    """Show a run to its end and exit with its code.

    `patterns` and `directions` are those of metrics; by default as in the history. `ended` is the
    run if it has ended. `pick` selects the lines to show. The history keeps the end.
    """
    record = _find_record(context, job_id)
    metrics = Metrics(patterns or (record.patterns if record else {}))
    log = _LogFilter(pick)
    with (
        detaching(context, [job_id], cancel=cancel_on_interrupt),
        open_view(context.clock, metrics, to_stderr=json_) as view,
    ):
        on_states = (
            None
            if isinstance(view, TerminalView)
            else WaitingText(context, [job_id], view.note).see
        )
        followed = wait.follow(context, job_id, ended=ended, on_states=on_states)
        events = log.watch(metrics.watch(followed))
        run = show_live(events, view, from_start=from_start)
    values = metrics.values if log.is_read else None
    if record is not None and not (record.has_ended and record.measured):
        _keep_end(context, run, values, metrics.ranges)
    best = best_values(metrics.ranges, directions or (record.directions if record else {}))
    _say_the_end(context, run, metrics, best, json_=json_, is_complete=log.is_complete)
    if needs_explanation(run) and not json_:
        cause = find_cause(context, record, run, log.last_lines)
        if cause:
            say(f"Why: {printable(cause)}")
        say_explain_command(context, run)
    is_other = record is not None and record.other
    if log.is_read and run.status is JobStatus.SUCCEEDED and not (json_ or is_other):
        words = describe_unmatched(metrics.patterns, metrics.series)
        if words:
            say(printable(words))
    raise typer.Exit(classify(run).exit_code)


class _LogFilter:
    """Passes events on, without the lines that `pick` excludes.

    `is_complete` is for the output of all attempts together; None if it is unknown. `last_lines`
    are lines of all nodes or children.
    """

    def __init__(self, pick: Callable[[OutputLine], bool] | None) -> None:
        self._pick = pick
        self.is_read = True
        self.last_lines: deque[str] = deque(maxlen=_KEPT)
        self._closed: set[bool | None] = set()

    def watch(self, events: Iterator[RunEvent]) -> Iterator[RunEvent]:
        for event in events:
            if isinstance(event, OutputLine):
                self.last_lines.append(event.text)
                if self._pick is not None and not self._pick(event):
                    continue
            elif isinstance(event, LogClosed):
                self.is_read = self.is_read and event.proof not in (CUT, DAMAGED)
                self._closed.add(event.is_complete)
            yield event

    @property
    def is_complete(self) -> bool | None:
        if False in self._closed:
            return False
        return True if self._closed == {True} else None


def _find_record(context: "Context", job_id: str) -> Record | None:
    known = context.history.recent(context.env)
    return next((record for record in known if record.job_id == job_id), None)


def _keep_end(
    context: "Context",
    run: Run,
    metrics: Mapping[str, float] | None,
    ranges: Mapping[str, MetricRange],
) -> None:
    """Keep the end in the history. A full disk must not change the exit code."""
    try:
        context.history.add_end(run, metrics, ranges=ranges if metrics is not None else None)
    except OSError as error:
        say(f"The end of this run could not be written to the history: {error}")


def _say_the_end(
    context: "Context",
    run: Run,
    metrics: Metrics,
    best: Mapping[str, float],
    *,
    json_: bool,
    is_complete: bool | None,
) -> None:
    outputs = context.outputs(run.job_id)
    stored = _stored_outputs(run)
    if json_:
        found = str(outputs) if outputs else stored or None
        about = {
            "env": context.env,
            "metrics": metrics.values,
            "metricsFirst": first_values(metrics.ranges),
            "metricsBest": best,
            "outputs": found,
            "logComplete": is_complete,
        }
        print_json({**run_json(run), **about})
        return
    shown = shown_values(metrics.series)
    if shown:
        texts = metric_texts(shown, best)
        said = (f"{printable(name)} {value}" for name, value in texts)
        say("Metrics: " + ", ".join(said))
    if outputs is not None and any(outputs.iterdir()):
        say(f"Outputs: {outputs}")
    elif stored:
        say(f"Outputs, if there are any: batchml get {shown_id(run)}{context.env_option}")
    saved = describe_checkpoints(context, run.job_id, shown_id(run))
    if saved:
        say(f"Checkpoints: {printable(saved)}")


def _stored_outputs(run: Run) -> str:
    """The S3 folder of the run's outputs, for a run that has one."""
    store = run.environment.get("BATCHML_STORE", "")
    return f"{store}/output" if store.startswith("s3://") else ""
