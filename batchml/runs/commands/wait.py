"""wait: wait for runs to end. cancel: stop runs."""

from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app
from batchml.cli.options import Env, Json, Project, Runs, open_context, read_seconds
from batchml.cli.output import print_json, print_line, say, say_lost
from batchml.cli.render import job_title, printable
from batchml.errors import BatchmlError
from batchml.model.outcome import describe_outcome
from batchml.model.run import EXIT_CODES, NOT_KNOWN_WORDS, OutcomeClass, Run, classify
from batchml.runs.cancel import CancelledRun
from batchml.runs.cancel import cancel as stop
from batchml.runs.commands.interrupt import detaching
from batchml.runs.commands.list import found_json
from batchml.runs.commands.live import WaitingRuns, WaitingText, is_shown, status_line_below
from batchml.runs.commands.next_commands import needs_explanation, say_explain_command
from batchml.runs.find import load_runs, select
from batchml.runs.search import FoundRun, keep_ends
from batchml.runs.watch.wait import wait_for_runs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchml.context import Context


@app.command(epilog="Example: batchml wait @last")
def wait(
    runs: Runs,
    timeout: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help='Stop waiting after this time: "2h". The runs continue.'
        ),
    ] = None,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Wait for runs to end, and exit with the code of the first failed run.

    Of several failed runs, the first on the command line counts. The exit code is 0 if all
    succeeded.
    """
    context = open_context(env, project)
    limit = read_seconds(timeout, "--timeout")
    asked = select(context, runs)
    known = {found.job_id: found for found in load_runs(context, asked)}
    for found in known.values():
        if not json_ and _is_over(found):
            _print_end(found)
    going_on = [job_id for job_id, found in known.items() if not _is_over(found)]
    left = list(going_on)
    runs_known = [each.run for job_id in going_on if (each := known[job_id]).run]
    has_line = bool(left) and not json_ and is_shown()
    waited = WaitingRuns(context.clock, runs_known)
    see = waited.see if has_line else WaitingText(context, going_on, say).see
    with detaching(context, left), status_line_below(waited, context.clock, has_line):
        try:
            for run in wait_for_runs(context, going_on, limit, say_lost, see, say):
                asked_as = _requested_id(known, run)
                known[asked_as] = FoundRun(run, known[asked_as].record)
                left.remove(asked_as)
                if not json_:
                    _print_end(known[asked_as])
        except TimeoutError as error:
            raise BatchmlError(str(error)) from None
    if json_:
        print_json([found_json(context, known[job_id]) for job_id in asked])
    unknown = EXIT_CODES[OutcomeClass.UNKNOWN]
    ends = [known[job_id].run for job_id in asked]
    failed = next((end for end in ends if end and needs_explanation(end)), None)
    if failed is not None and not json_:
        say_explain_command(context, failed)
    codes = [classify(end).exit_code if end else unknown for end in ends]
    raise typer.Exit(next((code for code in codes if code), 0))


def _requested_id(known: "Mapping[str, FoundRun]", run: Run) -> str:
    """The id that the user gave for a run: the id before it moved to another queue."""
    if run.job_id in known:
        return run.job_id
    return next(job_id for job_id, each in known.items() if each.run and each.run.key == run.key)


def _is_over(found: FoundRun) -> bool:
    """True if the run has ended, and does not go on in another queue."""
    from batchml.model.fallback import moved_to

    return found.run is None or (found.run.status.is_terminal and not moved_to(found.run))


def _print_end(found: FoundRun) -> None:
    if found.run is None:
        name = printable(found.name)
        say(f"{name} {found.shown_id}: {NOT_KNOWN_WORDS}")
        return
    print_line(f"{printable(job_title(found.run))} {found.run.status}")
    say(printable(describe_outcome(found.run)))


@app.command(epilog="Example: batchml cancel @last")
def cancel(
    runs: Runs,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Record this reason with the run.")
    ] = "Cancelled by the user",
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Stop runs in any state.

    RUN:3 is one child of an array. A group run ends with all its jobs. The command fails, and names
    the runs, if it could not stop all of them.
    """
    from batchml.model.fallback import moved_to
    from batchml.runs.groups.members import with_workers

    context = open_context(env, project)
    asked = with_workers(context, load_runs(context, select(context, runs)))
    found = {each.job_id: each for each in asked}
    before = {job_id: each.run for job_id, each in found.items() if each.run}
    stopped = stop(context.batch, before, reason, context.clock)
    if any(moved_to(each.run) for each in stopped.values()):
        stopped |= _cancel_moved(context, stopped, reason)
    keep_ends(
        context.history,
        [each.record for each in found.values() if each.record],
        {job_id: each.run for job_id, each in stopped.items()},
    )
    told = {job_id: FoundRun(each.run, found[job_id].record) for job_id, each in stopped.items()}
    left = {job_id: each.left for job_id, each in stopped.items() if each.left}
    if json_:
        seen = found | told
        print_json(
            [found_json(context, each) | {"left": left.get(each.job_id)} for each in seen.values()]
        )
    else:
        for job_id, each in found.items():
            print_line(_describe_stop(each, stopped.get(job_id)))
    for job_id, why in left.items():
        say(f"Not stopped: {found[job_id].shown_id}: {why}")
    if left:
        errors = (stopped[job_id].error for job_id in left)
        raise typer.Exit(next((error.exit_code for error in errors if error), 1))


def _cancel_moved(
    context: "Context", stopped: "Mapping[str, CancelledRun]", reason: str
) -> dict[str, CancelledRun]:
    """Cancel runs that have just moved to another queue; the outcomes by their old ids."""
    from batchml.runs.fallback.watch import find_successors

    there = find_successors(context, [each.run for each in stopped.values()])
    ends = stop(context.batch, context.describe(list(there.values())), reason, context.clock)
    return {before: ends[now] for before, now in there.items() if now in ends}


def _describe_stop(found: FoundRun, stopped: CancelledRun | None) -> str:
    if stopped is None:
        return f"{printable(found.name)} {found.shown_id}: {NOT_KNOWN_WORDS}"
    run, title = stopped.run, printable(job_title(stopped.run))
    if stopped.had_ended:
        return f"{title} had ended already: {run.status}."
    if stopped.left:
        return f"{title} is still {run.status}."
    if run.status.is_terminal:
        return f"{title} is cancelled."
    if not run.status.holds_resources and not run.children:
        return f"{title} will not run; it ends when its dependencies end."
    return f"{title} is being stopped; it has some time to save and end."
