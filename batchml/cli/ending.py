"""wait and cancel: until runs end, and ending them."""

from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli import following
from batchml.cli.app import app
from batchml.cli.flags import Env, Json, Runs, read_seconds
from batchml.cli.output import print_json, print_line, say, say_lost
from batchml.errors import BatchmlError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchml.client.place import Place
    from batchml.model.run import Run
    from batchml.ops.cancel import Stopped
    from batchml.ops.search import Found


@app.command(epilog="Example: batchml wait @last")
def wait(
    runs: Runs,
    timeout: Annotated[
        str | None, typer.Option(help='Give up after so long, such as "2h"; the runs go on.')
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Wait for runs to end; exit as the first that failed.

    The exit code is the first that is not 0, in the order in which the runs are given.
    """
    from batchml.cli.listing import found_json
    from batchml.cli.waitline import Waited, Words, is_shown, shown
    from batchml.cli.wiring import open_place
    from batchml.client.finding import recall
    from batchml.client.runs import select
    from batchml.client.waiting import wait_and_keep
    from batchml.model.run import EXIT_CODES, OutcomeClass, classify
    from batchml.ops.search import Found

    place = open_place(env)
    limit = read_seconds(timeout, "--timeout")
    asked = select(place, runs)
    known = {found.job_id: found for found in recall(place, asked)}
    for found in known.values():
        if not json_ and _is_over(found):
            _tell(found)
    going_on = [job_id for job_id, found in known.items() if not _is_over(found)]
    left = list(going_on)
    runs_known = [each.run for job_id in going_on if (each := known[job_id]).run]
    has_line = bool(left) and not json_ and is_shown()
    waited = Waited(place.clock, runs_known)
    see = waited.see if has_line else Words(place, going_on, say).see
    with following.detaching(place, left), shown(waited, place.clock, has_line):
        try:
            for run in wait_and_keep(place, going_on, limit, say_lost, see, say):
                asked_as = _asked_as(known, run)
                known[asked_as] = Found(run, known[asked_as].record)
                left.remove(asked_as)
                if not json_:
                    _tell(known[asked_as])
        except TimeoutError as error:
            raise BatchmlError(str(error)) from None
    if json_:
        print_json([found_json(place, known[job_id]) for job_id in asked])
    unknown = EXIT_CODES[OutcomeClass.UNKNOWN]
    ends = [known[job_id].run for job_id in asked]
    codes = [classify(end).exit_code if end else unknown for end in ends]
    raise typer.Exit(next((code for code in codes if code), 0))


def _asked_as(known: "Mapping[str, Found]", run: "Run") -> str:
    """Under which id a run was asked for: that of before, where it has moved to another queue."""
    if run.job_id in known:
        return run.job_id
    return next(job_id for job_id, each in known.items() if each.run and each.run.key == run.key)


def _is_over(found: "Found") -> bool:
    """False for one that was left for another queue: waiting has it submitted there."""
    from batchml.model.fallback import moved_to

    return found.run is None or (found.run.status.is_terminal and not moved_to(found.run))


def _tell(found: "Found") -> None:
    from batchml.cli.render import job_title, printable
    from batchml.model.outcome import describe_outcome
    from batchml.model.record import NOT_KNOWN_WORDS

    if found.run is None:
        name = printable(found.name)
        say(f"{name} {found.job_id}: {NOT_KNOWN_WORDS}")
        return
    print_line(f"{printable(job_title(found.run))} {found.run.status}")
    say(printable(describe_outcome(found.run)))


@app.command(epilog="Example: batchml cancel @last")
def cancel(
    runs: Runs,
    reason: Annotated[str, typer.Option(help="Kept with the run.")] = "Cancelled by the user",
    env: Env = None,
    json_: Json = False,
) -> None:
    """Stop runs, whatever state they are in.

    RUN:3 is one child of an array; a gang ends with all its jobs. Says what is left, if anything
    is, and then fails.
    """
    from batchml.cli.listing import found_json
    from batchml.cli.wiring import open_place
    from batchml.client.finding import recall
    from batchml.client.gang_parts import with_parts
    from batchml.client.runs import select
    from batchml.model.fallback import moved_to
    from batchml.ops.cancel import cancel as stop
    from batchml.ops.search import Found, remember

    place = open_place(env)
    asked = with_parts(place, recall(place, select(place, runs)))
    found = {each.job_id: each for each in asked}
    before = {job_id: each.run for job_id, each in found.items() if each.run}
    stopped = stop(place.batch, before, reason, place.clock)
    if any(moved_to(each.run) for each in stopped.values()):
        stopped |= _on_their_way(place, stopped, reason)
    remember(
        place.history,
        [each.record for each in found.values() if each.record],
        {job_id: each.run for job_id, each in stopped.items()},
    )
    told = {job_id: Found(each.run, found[job_id].record) for job_id, each in stopped.items()}
    left = {job_id: each.left for job_id, each in stopped.items() if each.left}
    if json_:
        seen = found | told
        print_json(
            [found_json(place, each) | {"left": left.get(each.job_id)} for each in seen.values()]
        )
    else:
        for job_id, each in found.items():
            print_line(_said(each, stopped.get(job_id)))
    for job_id, why in left.items():
        say(f"Left: {job_id}: {why}")
    if left:
        errors = (stopped[job_id].error for job_id in left)
        raise typer.Exit(next((error.exit_code for error in errors if error), 1))


def _on_their_way(
    place: "Place", stopped: "Mapping[str, Stopped]", reason: str
) -> "dict[str, Stopped]":
    """What became of runs that were moved to another queue in the same second, by their old ids."""
    from batchml.client.fallback import arrived
    from batchml.ops.cancel import cancel as stop

    there = arrived(place, [each.run for each in stopped.values()])
    ends = stop(place.batch, place.describe(list(there.values())), reason, place.clock)
    return {before: ends[now] for before, now in there.items() if now in ends}


def _said(found: "Found", stopped: "Stopped | None") -> str:
    from batchml.cli.render import job_title, printable
    from batchml.model.record import NOT_KNOWN_WORDS

    if stopped is None:
        return f"{printable(found.name)} {found.job_id}: {NOT_KNOWN_WORDS}"
    run, title = stopped.run, printable(job_title(stopped.run))
    if stopped.had_ended:
        return f"{title} had ended already: {run.status}."
    if stopped.left:
        return f"{title} is {run.status} still."
    if run.status.is_terminal:
        return f"{title} is cancelled."
    if not run.status.holds_resources and not run.children:
        return f"{title} will not run; it ends with what it waits for."
    return f"{title} is being stopped: it has its grace to save and end."
