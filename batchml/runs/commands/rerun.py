"""rerun: submit a run again, or let it go on from its checkpoint."""

from typing import Annotated

import typer

from batchml.cli.app import app
from batchml.cli.options import DryRun, Env, Json, OneRun, Project, Wait, open_context
from batchml.cli.output import print_json, say
from batchml.errors import UsageError
from batchml.runs.commands.hints import CommandAfterOptions
from batchml.runs.commands.options import takes_options
from batchml.runs.commands.submit import send
from batchml.runs.find import load_runs, select
from batchml.runs.options import SubmitOptions, to_request
from batchml.runs.rerun.resubmit import prepare_again
from batchml.runs.rerun.rules import CHANGEABLE


@app.command(cls=CommandAfterOptions, epilog="Example: batchml rerun @last -p lr=0.01 --wait")
@takes_options(
    CHANGEABLE,
    texts={
        "image": "Use this image, not the run's.",
        "include_secrets": "With --code: also send files that look like secrets.",
    },
)
def rerun(
    *,
    ctx: typer.Context,
    run: OneRun,
    failed: Annotated[
        bool, typer.Option("--failed", help="Submit only the children of an array that failed.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the checkpoint of the run, or of each child."),
    ] = False,
    code: Annotated[
        bool, typer.Option("--code", help="Send the code as it is in its folder now.")
    ] = False,
    options: SubmitOptions,
    wait: Wait = False,
    dry_run: DryRun = False,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Submit a run again: the same code, image and command.

    The code is the code that was sent then; with --code it is the code of now. Options replace
    values of the run, and a command after -- its command; the rest stays. RUN:3 is one child of an
    array.

    With --resume the run must have ended. The new run gets a copy of its checkpoint folder before
    its command starts.
    """
    context = open_context(env, project)
    if ctx.obj == []:
        raise UsageError("Nothing follows the --: give a command, or leave the -- out.")
    (found,) = load_runs(context, select(context, [run]))
    prepared = prepare_again(
        context, found, failed=failed, resume=resume, code=code,
        request=to_request(options={**options, "command": ctx.obj}), dry_run=dry_run,
    )  # fmt: skip
    if prepared is None:
        say(f"Nothing of {found.name} {found.shown_id} has failed: nothing was submitted.")
        if json_:
            print_json(None)
        return
    send(context, prepared, dry_run=dry_run, wait=wait, json_=json_)
