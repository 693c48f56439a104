"""reconcile: what became of submissions whose answers were lost."""

from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app
from batchml.cli.flags import Env, Json
from batchml.cli.output import print_json, print_line, say

if TYPE_CHECKING:
    from batchml.ops.reconcile import Settled


@app.command(epilog="Example: batchml reconcile")
def reconcile(
    key: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", help="Only these; all unless given.")
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Find out what became of submissions that were interrupted.

    Each is looked up by its key. It has a run, then that is kept, and a second one is stopped; or
    it never arrived, then it can be submitted again. Nothing is submitted here but the workers of a
    gang whose head is there. Exits with 74 when one is still open.
    """
    from batchml.cli.wiring import open_place
    from batchml.errors import NotFound
    from batchml.ops.reconcile import reconcile as settle

    place = open_place(env)
    waiting = {key for record in place.history.open(place.env) for key in record.keys}
    unknown = [each for each in key or () if each not in waiting]
    if unknown:
        hint = "It is settled already, or was made elsewhere: batchml ls."
        raise NotFound("Open submission", unknown[0], waiting, hint)
    settled: list[Settled] = []
    if waiting:
        say("Looking for them; a run that is not listed yet is waited for, a minute at most.")
        settled = settle(place.batch, place.history, place.env, place.clock, keys=key, tell=say)
    if json_:
        print_json([_as_json(one) for one in settled])
    elif not settled:
        say("Nothing is open: it is known of every submission what became of it.")
    else:
        for one in settled:
            print_line(_sentence(one))
    if any(one.is_open for one in settled):
        raise typer.Exit(74)


def _as_json(one: "Settled") -> dict[str, str | None]:
    state = "open" if one.is_open else "submitted" if one.job_id else "never-submitted"
    name = one.record.name
    return {"key": one.record.key, "name": name, "state": state, "jobId": one.job_id or None}


def _sentence(one: "Settled") -> str:
    from batchml.cli.render import printable

    title = f"[{printable(one.record.name)} - {one.record.key}]"
    if one.is_open:
        return f"{title} is being submitted by another process; look again when it is done."
    if one.job_id:
        return f"{title} was submitted: job {one.job_id}."
    return f"{title} was never submitted; it can be submitted again."
