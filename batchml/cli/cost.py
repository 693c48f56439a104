"""cost: what a run will cost, costs now, or has cost; what many have."""

from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app
from batchml.cli.flags import Env, Json, read_seconds
from batchml.cli.output import print_json, print_line, say
from batchml.errors import NotFound, UsageError

if TYPE_CHECKING:
    from batchml.client.place import Place


@app.command(epilog="Example: batchml cost @last")
def cost(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Job id, prefix, name or @last.")
    ] = None,
    quote: Annotated[
        str | None, typer.Option(metavar="JOB", help="What a run of a job would cost.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help='Without RUN: the runs of the last "24h", "30d"; 7d.')
    ] = None,
    queue: Annotated[
        str | None, typer.Option(help="Of this queue's runs; for --quote, in this queue.")
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Show what a run costs so far or has cost; without RUN, what the last runs have."""
    from batchml.cli.wiring import open_place

    if run and (quote or since or queue):
        raise UsageError("RUN goes without --quote, --since and --queue.")
    if quote and since:
        raise UsageError("--quote goes without --since.")
    place = open_place(env)
    if run:
        _one(place, run, json_)
    elif quote:
        _quote(place, quote, queue, json_)
    else:
        _many(place, since or "7d", queue, json_)


def _one(place: "Place", word: str, json_: bool) -> None:
    from batchml.cli.bills import bill_json, bill_lines
    from batchml.cli.render import job_title
    from batchml.client.gang_parts import gang_bill
    from batchml.client.runs import select

    try:
        (job_id,) = select(place, [word])
    except NotFound:
        if not _is_job(place, word):
            raise
        say(f"No run is named {word}. This is what one of the job would cost:")
        _quote(place, word, None, json_)
        return
    found, bill = gang_bill(place, job_id)
    if json_:
        print_json(bill_json(found, bill))
    else:
        print_line(
            "\n".join([f"{job_title(found)} {found.status.value}", *bill_lines(found, bill)])
        )


def _is_job(place: "Place", word: str) -> bool:
    from batchml.ops.jobs import find_job

    try:
        return bool(find_job(word, place.job_folders, place.here))
    except NotFound:
        return False


def _quote(place: "Place", job: str, queue: str | None, json_: bool) -> None:
    from batchml.cli.bills import quote_json, quote_lines
    from batchml.client.costs import quote_of_job
    from batchml.model.names import to_name
    from batchml.ops.jobs import find_job, load_job
    from batchml.ops.spending import usual

    spec = load_job(find_job(job, place.job_folders, place.here), place.image_folders)
    found = quote_of_job(place, spec, queue)
    before = usual(place.history.recent(place.env), to_name(spec.name))
    if json_:
        print_json(quote_json(found, before))
    else:
        print_line("\n".join(quote_lines(found, before)))


def _many(place: "Place", since: str, queue: str | None, json_: bool) -> None:
    from batchml.cli.bills import FREE, spending_json, spending_lines
    from batchml.client.costs import spending

    seconds = read_seconds(since, "--since") or 0
    start = int(place.clock.now() * 1000) - seconds * 1000
    spent, rates = spending(place, start, place.queue(queue) if queue else "")
    if json_:
        print_json(spending_json(spent, rates, start))
    else:
        print_line("\n".join(spending_lines(spent, rates, since)))
        if place.settings.is_local and not place.settings.environment.usd_per_hour:
            say(FREE)
