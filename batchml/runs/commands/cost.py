"""batchml cost: what a run will cost, costs now, or has cost; what many runs have cost."""

from typing import Annotated

import typer
from msgspec.structs import replace

from batchml.cli.app import app
from batchml.cli.options import (
    AllProjects,
    Env,
    Json,
    Project,
    choose_offline,
    open_context,
    read_seconds,
)
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import job_title
from batchml.config.project import project_name
from batchml.context import Context
from batchml.cost.bill import usual_duration
from batchml.cost.render import (
    FREE,
    bill_json,
    bill_lines,
    quote_json,
    quote_lines,
    spending_json,
    spending_lines,
)
from batchml.cost.service import is_free, list_spending, quote_of_job
from batchml.errors import NotFound, ServiceError, UsageError
from batchml.jobs.find import find_job, find_source, load_job
from batchml.jobs.gpus import resolve_gpus
from batchml.model.names import to_name
from batchml.runs.find import select
from batchml.runs.groups.members import group_bill
from batchml.runs.metrics.usage import read_unused_part


@app.command(epilog="Example: batchml cost @last")
def cost(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Job id, prefix, name or @last.")
    ] = None,
    quote: Annotated[
        str | None, typer.Option(metavar="JOB", help="Show what a run of this job would cost.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help='Without RUN: sum the runs of the last "24h", "30d"; default: 7d.',
        ),
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Sum only runs of this queue; with --quote: use this queue."
        ),
    ] = None,
    all_: AllProjects = False,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Show what a run costs or has cost; without RUN, the cost of the project's last runs."""
    if run and (quote or since or queue or all_):
        raise UsageError("RUN cannot be combined with --quote, --since, --queue and --all.")
    if quote and (since or all_):
        raise UsageError("--quote cannot be combined with --since and --all.")
    context = open_context(env, project, all_projects=all_)
    if run:
        _show_bill(context, run, json_)
    elif quote:
        _show_quote(context, quote, queue, json_)
    else:
        _show_spending(context, since or "7d", queue, "" if all_ else context.project, json_)


def _show_bill(context: Context, word: str, json_: bool) -> None:
    try:
        (job_id,) = select(context, [word])
    except NotFound:
        if not _is_job(context, word):
            raise
        say(f"No run is named {word}. A run of the job {word} would cost:")
        _show_quote(context, word, None, json_)
        return
    found, bill = group_bill(context, job_id)
    unused = read_unused_part(context, found)
    if json_:
        print_json(bill_json(found, bill, unused))
    else:
        lines = bill_lines(found, bill, unused)
        print_line("\n".join([f"{job_title(found)} {found.status.value}", *lines]))


def _is_job(context: Context, word: str) -> bool:
    try:
        return bool(find_job(word, context.job_folders, context.folder))
    except NotFound:
        return False


def _show_quote(context: Context, job: str, queue: str | None, json_: bool) -> None:
    folder = find_job(job, context.job_folders, context.folder)
    spec = load_job(folder, context.image_folders)
    spec = replace(spec, queue=queue or spec.queue)
    source = find_source(spec.image, context.image_folders, folder)
    context = choose_offline(context, False, True, "--quote")
    found = quote_of_job(context, resolve_gpus(context, spec, source, None, []))
    recent = context.history.recent(context.env)
    own = [each for each in recent if each.project in ("", context.project)]
    before = usual_duration(own, to_name(spec.name))
    if json_:
        print_json(quote_json(found, before))
    else:
        print_line("\n".join(quote_lines(found, before)))


def _check_queue(context: Context, queue: str, name: str) -> None:
    """Raise NotFound for a queue that does not exist. `name` is the one that it has in AWS."""
    known = context.queues()
    if name not in known:
        hint = "Without --queue the runs of all queues are summed."
        raise NotFound("Job queue", queue, map(context.bare, known), hint)


def _show_spending(
    context: Context, since: str, queue: str | None, project: str, json_: bool
) -> None:
    seconds = read_seconds(since, "--since") or 0
    start = int(context.clock.now() * 1000) - seconds * 1000
    name = context.queue(queue) if queue else ""
    try:
        spent, rates = list_spending(context, start, name, project)
    except ServiceError as error:
        if queue and error.operation == "ListJobs":
            _check_queue(context, queue, name)
        raise
    if json_:
        print_json(spending_json(spent, rates, start, project))
    elif project and not spent:
        print_line(f"No runs of the project {project_name(project)} in the last {since}.")
    else:
        print_line("\n".join(spending_lines(spent, rates, since)))
        if is_free(context):
            say(FREE)
