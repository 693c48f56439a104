"""batchml adopt: propose a job.toml for a Python program."""

from typing import Annotated

import typer

from batchml.adopt.observe import Observation, describe_files
from batchml.adopt.propose import check_script
from batchml.adopt.service import (
    JOB_FILE,
    AdoptedProgram,
    AttemptWatch,
    add_metrics,
    list_outputs,
    prepare_attempt,
    read_adopted,
    read_proposed,
    stop_attempt,
)
from batchml.cli.app import app
from batchml.cli.options import open_context, read_seconds
from batchml.cli.output import print_line, say
from batchml.cli.render import printable
from batchml.context import Context
from batchml.errors import UsageError
from batchml.model.environment import LOCAL
from batchml.model.names import long_duration, short_id
from batchml.runs.commands.interrupt import detaching, finish_submission
from batchml.runs.commands.live import open_view, show_live
from batchml.runs.metrics.series import Metrics
from batchml.runs.prepare import PreparedRun
from batchml.runs.submit import submit_run
from batchml.runs.watch.wait import follow
from batchml.setup.init import write_files

_USAGE = "batchml adopt --for 60s train.py"
_FLAGS = ("--dry-run", "--force", "--for")


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Example: batchml adopt train.py --epochs 1",
)
def adopt(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python program.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARG]...", help="Arguments of the program, as you start it."),
    ] = None,
    for_: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="Stop the attempt after this time.")
    ] = "60s",
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files; write and run nothing.")
    ] = False,
) -> None:
    """Propose a job.toml for a Python program, after one short attempt on this machine.

    It writes job.toml and, if no image has the packages, requirements.txt. Options of adopt stand
    before SCRIPT.
    """
    seconds = read_seconds(for_, "--for")
    if not seconds:
        raise UsageError('--for: give a time such as "60s" or "5m".')
    if script.startswith("-"):
        raise UsageError(f"No such option: {script}. Options stand before SCRIPT: {_USAGE}")
    context = open_context(LOCAL)
    given = [*(arguments or ()), *(ctx.obj or ())]
    program = read_adopted(context, script, given)
    check_script(script, arguments or (), _FLAGS, program.source)
    if dry_run:
        for name, text in program.files(None).items():
            print_line(f"# --- {name}\n{text}")
        return
    for path in write_files(program.folder, program.files(None), force=force):
        say(f"Wrote {path.name}.")
    unpinned = program.image.describe_unpinned()
    if unpinned:
        say(unpinned)
    prepared = prepare_attempt(context, program.folder)
    seen, has_failed = _attempt(context, prepared, seconds)
    files = program.files(seen)
    write_files(program.folder, files, force=True)
    add_metrics(context, prepared.record, read_proposed(files[JOB_FILE]))
    _say_end(program, seen, has_failed=has_failed)
    if has_failed:
        raise typer.Exit(1)


def _attempt(context: Context, prepared: PreparedRun, seconds: float) -> tuple[Observation, bool]:
    """Make the attempt, and show its output; what was seen, and whether it failed by itself."""
    sent: list[str] = []
    with detaching(context, sent, cancel=True):
        with finish_submission(sent):
            job_id = submit_run(context, prepared, say)
            sent.append(job_id)
        say(f"Attempt {short_id(job_id)}: it is stopped after {long_duration(seconds)}.")
        watch = AttemptWatch(seconds, context.clock, lambda: stop_attempt(context, job_id), say)
        with open_view(context.clock, Metrics(), to_stderr=True) as view:
            show_live(watch.watch(follow(context, job_id)), view, from_start=True)
    return watch.observe(list_outputs(context, job_id)), watch.has_failed


def _say_end(program: AdoptedProgram, seen: Observation, *, has_failed: bool) -> None:
    metrics = ", ".join(metric.name for metric in seen.metrics) or "no metrics"
    files = describe_files((*seen.files, *seen.placed)) or "no files"
    say(printable(f"It printed {metrics}, and wrote {files}."))
    say(f"Read {program.folder / JOB_FILE}: its comments say where each value comes from.")
    if has_failed:
        say(f"The attempt failed: {printable(seen.end)}")
        say("  why:  batchml explain @last")
    else:
        say("  run:  batchml submit --wait .")
