"""batchml jobdef list, register, delete and gc."""

from typing import Annotated, Any

import typer

from batchml.aws.batch.jobs import DefinitionApi, DefinitionRevision
from batchml.cli.app import command_group
from batchml.cli.options import Env, Json, open_context, read_seconds
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import table
from batchml.context import Context
from batchml.errors import UsageError
from batchml.jobs.find import load_job
from batchml.runs import job_images
from batchml.setup.definitions import deregister, find_definitions, find_old, unused
from batchml.setup.definitions import register as register_one

jobdef_app = command_group(
    "jobdef",
    "Manage job definitions in AWS Batch.",
    "batchml jobdef list",
)


@jobdef_app.command("list", epilog="Example: batchml jobdef list --job lenet")
def list_(
    job: Annotated[
        str | None, typer.Option(metavar="JOB", help="List only definitions of this job.")
    ] = None,
    all_: Annotated[
        bool,
        typer.Option("--all", help="Also list definitions of other programs and environments."),
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """List the active job definitions."""
    context = open_context(env)
    found = [
        each
        for each in _definitions(context).active()
        if (all_ or (each.job and each.env == context.env)) and job in (None, each.job)
    ]
    if json_:
        print_json([_to_json(each) for each in found])
    elif found:
        rows = [["DEFINITION", "JOB", "REGISTERED", "IMAGE"]]
        rows += [[each.full_name, each.job, each.registered, each.image] for each in found]
        print_line(table(rows))
    else:
        say("No job definitions. `batchml submit` and `batchml jobdef register` make them.")


@jobdef_app.command(epilog="Example: batchml jobdef register lenet")
def register(
    jobs: Annotated[
        list[str], typer.Argument(metavar="JOB...", help="Job folders, or their names.")
    ],
    env: Env = None,
    json_: Json = False,
) -> None:
    """Register the definitions of jobs, for other clients of AWS Batch."""
    context = open_context(env)
    found, missing = job_images.resolve_jobs(context, jobs)
    for name, error in missing:
        if name not in {each.name for each in found}:
            raise error
        say(f"{name}: not registered for its other image. {error}")
    platform = job_images.read_platform(context)
    requests = [each.request(platform) for each in found]  # raises mistakes before the first call
    context.connect()
    results = []
    for each, request in zip(found, requests, strict=True):
        job_images.publish_image(context, each.image_source)
        name, job = request["jobDefinitionName"], each.spec.name
        is_new = register_one(context.batch, request, context.clock.now())
        results.append({"job": job, "jobDefinitionName": name, "isNew": is_new})
        if not json_:
            done = "is registered" if is_new else "exists already, with the same content"
            print_line(f"Job definition [{name}] of [{job}] {done}.")
    if json_:
        print_json(results)


@jobdef_app.command(epilog="Example: batchml jobdef delete lenet-0123456789:1")
def delete(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME[:REV]...", help="Definitions, as `jobdef list` shows them."),
    ],
    env: Env = None,
    json_: Json = False,
) -> None:
    """Deregister definitions: all active revisions, or one.

    Runs that use them continue.
    """
    context = open_context(env)
    definitions = _definitions(context)
    found = {each.full_name: each for name in names for each in find_definitions(definitions, name)}
    _deregister(context, list(found.values()), json_)


@jobdef_app.command(epilog="Example: batchml jobdef gc --older-than 30d --dry-run")
def gc(
    older_than: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="Choose definitions neither registered nor used for this time."
        ),
    ] = "30d",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the definitions and change nothing.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Deregister old definitions that batchml registered and no run needs.

    Definitions of unfinished runs, of runs within the time, and the newest of each job in this
    folder stay.
    """
    seconds = read_seconds(older_than, "--older-than")
    if seconds is None:
        raise UsageError("--older-than: write a duration such as 30d.")
    context = open_context(env)
    definitions, now = _definitions(context), context.clock.now()
    old = find_old(definitions.active(), context.env, _jobs_here(context), now, seconds)
    queues = context.batch.queues() if old else []
    since = now - seconds
    found = list(unused(old, lambda each: definitions.is_used(each, queues, since)))
    if not dry_run:
        _deregister(context, found, json_)
    elif json_:
        print_json([_to_json(each) for each in found])
    else:
        for each in found:
            print_line(f"Job definition [{each.full_name}] would be deregistered.")
        say(f"{len(found)} would be deregistered.")


def _definitions(context: Context) -> Any:
    return DefinitionApi(context.connect())


def _jobs_here(context: Context) -> set[str]:
    """The names of the jobs in the current folder, whose newest definitions stay.

    Raises ConfigError for a job.toml with mistakes, because its definition would be deregistered.
    """
    folders = [path.parent for path in sorted((context.folder / "jobs").glob("*/job.toml"))]
    if (context.folder / "job.toml").is_file():
        folders.append(context.folder)
    return {load_job(folder).name for folder in folders}


def _deregister(context: Context, chosen: list[DefinitionRevision], json_: bool) -> None:
    done = []
    for each in deregister(_definitions(context).deregister, chosen, context.clock):
        done.append(each)
        if not json_:
            print_line(f"Job definition [{each.full_name}] is deregistered.")
    if json_:
        print_json([_to_json(each) for each in done])
    else:
        say(f"{len(done)} deregistered.")


def _to_json(each: DefinitionRevision) -> dict[str, Any]:
    return {
        "jobDefinitionName": each.name,
        "revision": each.revision,
        "job": each.job or None,
        "registered": each.registered or None,
        "image": each.image or None,
    }
