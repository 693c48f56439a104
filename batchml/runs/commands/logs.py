"""logs: print the output of a run."""

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchml.cli.app import app
from batchml.cli.options import Env, Json, OneRun, Project, open_context, read_seconds
from batchml.cli.output import print_json, say
from batchml.cli.render import output_line, printable, time_json, without_colours
from batchml.cli.terminal import screen
from batchml.errors import NotFound, UsageError
from batchml.model.numbering import shown_id
from batchml.model.run import NOT_KNOWN_WORDS, JobStatus, Run, effective_state
from batchml.runs.commands import follow as following
from batchml.runs.commands.next_commands import short_word
from batchml.runs.find import load_runs, select
from batchml.runs.rerun.rules import numbering
from batchml.runs.watch.logs import AttemptOutput, read_output

if TYPE_CHECKING:
    from batchml.clock import Clock
    from batchml.context import Context
    from batchml.runs.watch.events import OutputLine


@app.command(epilog="Example: batchml logs -f @last")
def logs(
    run: OneRun,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Print new lines until the run ends; exit with its code."
        ),
    ] = False,
    attempt: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Print only this attempt; the first is 1."),
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option("--tail", "-n", metavar="N", min=0, help="Print only the last N lines."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help='Print only lines since "10m" ago, or since 2026-11-21T19:00Z.'
        ),
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN", help="Print only lines that match this regular expression."
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Print only the workers of this group of a group run."),
    ] = None,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Print a run's output: every attempt, every node and every child of an array.

    RUN:3 is one child of an array.
    """
    if follow and (attempt is not None or tail is not None):
        raise UsageError(
            "--follow shows every attempt from its start: leave out --attempt and --tail."
        )
    wanted = _line_filter(grep)
    context = open_context(env, project)
    start = None if since is None else _read_time(since, context.clock)
    (job_id,) = select(context, [run])
    (found,) = load_runs(context, [job_id])
    if group is not None:
        from batchml.runs.groups.members import member_id

        job_id = member_id(context, found, group)
        (found,) = load_runs(context, [job_id])
    if found.run is None:
        raise NotFound("Output of run", job_id, [], NOT_KNOWN_WORDS)
    if follow:
        ended = found.run if found.run.status.is_terminal else None
        pick = None if start is None and grep is None else _event_filter(start, wanted)
        following.follow(context, job_id, json_=json_, from_start=False, ended=ended, pick=pick)
    parts = read_output(
        context.describe, context.open_log, found.run, clock=context.clock, pace=context.pace,
        attempt=attempt, since=start, last=tail,
    )  # fmt: skip
    entries: list[dict[str, Any]] = []
    show = _line_printer()
    is_empty, is_damaged = True, False
    for part in numbering(context, job_id, found.run).renumber_output(parts):
        mine: list[dict[str, Any]] = []
        for line in part.lines:
            is_empty = False
            if not wanted(line.message):
                continue
            if json_:
                mine.append(_entry(part, line.timestamp, line.message))
            else:
                show(part, line.timestamp, line.message)
        if part.note:
            is_empty = False
            sys.stdout.flush()
            say(part.note)
        is_damaged = is_damaged or part.is_damaged
        entries += _with_check(part, mine)
    if json_:
        print_json(entries)
    elif is_empty:
        say(_no_output_text(context, found.run))
    if is_damaged:
        raise typer.Exit(1)


def _no_output_text(context: "Context", run: Run) -> str:
    """Why there are no lines: the run ended without output, it runs, or it waits."""
    said = f"{printable(run.name)} has printed nothing"
    if run.status.is_terminal:
        return f"{said}."
    state = JobStatus(effective_state(run))
    why = f" Why: batchml explain {short_word(context, shown_id(run))}"
    return f"{said} yet: it is {state}.{'' if state.holds_resources else why}"


def _line_filter(pattern: str | None) -> Callable[[str], bool]:
    """A function that selects lines by a regular expression. Raises UsageError."""
    if pattern is None:
        return lambda _: True
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--grep {pattern}: not a regular expression: {error}.") from error
    return lambda message: compiled.search(without_colours(message)) is not None


def _read_time(text: str, clock: "Clock") -> int:
    """Parse `--since`, `10m` or a time, to ms since the epoch. Raises UsageError."""
    from datetime import datetime

    if "-" not in text:
        seconds = read_seconds(text, "--since") or 0
        return max(0, int((clock.now() - seconds) * 1000))
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        hint = 'write "10m", "2h", or a time such as 2026-11-21T19:00Z.'
        raise UsageError(f"--since {text}: {hint}") from error


def _event_filter(
    start: int | None, wanted: Callable[[str], bool]
) -> "Callable[[OutputLine], bool]":
    return lambda line: line.timestamp >= (start or 0) and wanted(line.text)


def _with_check(part: AttemptOutput, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries with `logComplete`. A damaged log without lines gets an entry, too."""
    if part.is_damaged and not entries:
        entries = [_entry(part, None, None)]
    is_complete = part.check.is_complete if part.check is not None else None
    return [{**entry, "logComplete": is_complete} for entry in entries]


def _entry(part: AttemptOutput, timestamp: int | None, message: str | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "logStreamName": part.stream,
        "timestamp": time_json(timestamp),
        "message": message,
        "attempt": part.number,
    }
    return {**entry, "child": part.child.partition("/")[0]} if part.child else entry


def _line_printer() -> Callable[[AttemptOutput, int, str], None]:
    """A function that prints a line, without a flush for each line."""
    from batchml.cli.render import timestamp

    write, is_screen, colour = sys.stdout.write, sys.stdout.isatty(), screen().colour

    def show(part: AttemptOutput, at: int, message: str) -> None:
        text = output_line(message, colour=colour) if is_screen else message
        who = f"{part.child} | " if part.child else ""
        write(f"{who}[{timestamp(at)}] {text}\n")

    return show
