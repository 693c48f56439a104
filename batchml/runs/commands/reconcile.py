"""reconcile: settle submissions whose answers were lost; attend: the watcher of `--fallback`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app
from batchml.cli.options import Env, Json, open_context
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import printable
from batchml.clock import SystemClock
from batchml.config.settings import load_settings
from batchml.errors import NotFound
from batchml.model.environment import LOCAL
from batchml.runs.controllers import ControllerContext, context_in_aws
from batchml.runs.reconcile import SettledSubmission
from batchml.runs.reconcile import reconcile as settle
from batchml.runs.send import make_submitter

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.runs.fallback.move import FallbackPlan


@app.command(epilog="Example: batchml reconcile")
def reconcile(
    key: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]...", help="Keys of submissions; default: all."),
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Find out what became of submissions that were interrupted.

    Each submission is looked up by its key. If AWS Batch has its run, the run is kept, and a second
    run with the same key is stopped. If AWS Batch has no run, you can submit it again. This command
    submits nothing, except the missing workers of a group run whose head exists. Exit code 74: a
    submission is still in progress.
    """
    context = open_context(env)
    waiting = {key for record in context.history.unconfirmed(context.env) for key in record.keys}
    unknown = [each for each in key or () if each not in waiting]
    if unknown:
        hint = "It is settled already, or was made elsewhere: batchml ls."
        raise NotFound("Open submission", unknown[0], waiting, hint)
    settled: list[SettledSubmission] = []
    if waiting:
        say("Looking for the runs; one that is not listed yet is waited for, a minute at most.")
        settled = settle(make_submitter(context, say), context.env, keys=key)
    if json_:
        print_json([_as_json(one) for one in settled])
    elif not settled:
        say("No submission is open: the outcome of each is known.")
    else:
        for one in settled:
            print_line(_sentence(one))
    if any(one.is_open for one in settled):
        raise typer.Exit(74)


def _as_json(one: SettledSubmission) -> dict[str, str | None]:
    state = "open" if one.is_open else "submitted" if one.job_id else "never-submitted"
    name = one.record.name
    return {"key": one.record.key, "name": name, "state": state, "jobId": one.job_id or None}


def _sentence(one: SettledSubmission) -> str:
    title = f"[{printable(one.record.name)} - {one.record.key}]"
    if one.is_open:
        return f"{title} is being submitted by another process; look again when it is done."
    if one.job_id:
        return f"{title} was submitted: job {one.job_id}."
    return f"{title} was never submitted; it can be submitted again."


# --- The watcher of a run that may move to another queue ------------------------------------------


@app.command(hidden=True, epilog="Example: batchml attend KEY")
def attend(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of the run that may move.")],
    env: Env = None,
    region: Annotated[str, typer.Option(help="Use this AWS Region, without a batchml.toml.")] = "",
    job: Annotated[str, typer.Option(help="Use this job id of the run.")] = "",
    plan: Annotated[str, typer.Option(help="Read the plan of the move from this address.")] = "",
    digest: Annotated[str, typer.Option(help="Expect this digest of the plan.")] = "",
) -> None:
    """Watch a run that may move; `submit --fallback` starts a run with this command."""
    from batchml.runs.fallback.watch import watch_until_moved

    context, found, job_id = _aws_plan(env, region, plan, digest) if plan else _local_plan(key)
    if found is None or not (job or job_id):
        return say("There is nothing to watch: the run has moved, or it was never submitted.")
    final_id = watch_until_moved(context, found, job or job_id, say)
    say(f"The run is the job {final_id}.")


def _local_plan(key: str) -> "tuple[Context, FallbackPlan | None, str]":
    from batchml.runs.fallback.watch import job_id_of, plans_of

    settings = load_settings(os.environ, Path.cwd(), LOCAL)
    context = ControllerContext(settings, SystemClock(), Path.cwd(), say)
    return context, plans_of(context).find(key), job_id_of(context, key)


def _aws_plan(
    env: str | None, region: str, address: str, digest: str
) -> "tuple[Context, FallbackPlan | None, str]":
    from batchml.runs.fallback.watch import fetch_plan

    home = Path.home() / ".batchml"
    context = context_in_aws(env or "", region, home, SystemClock(), source="the plan")
    context.home.prepare()
    return context, fetch_plan(context, address, digest), ""
