"""jobdef list, register, delete, gc."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchml.cli.app import command_group
from batchml.cli.flags import Env, Json, read_seconds
from batchml.cli.output import print_json, print_line, say
from batchml.errors import UsageError

if TYPE_CHECKING:
    from batchml.aws.batch.definitions import Definition
    from batchml.client.place import Place


jobdef_app = command_group(
    "jobdef",
    "Job definitions: what of a job AWS Batch keeps.",
    "batchml jobdef list",
)


@jobdef_app.command("list", epilog="Example: batchml jobdef list --job lenet")
def list_(
    job: Annotated[str | None, typer.Option(help="Only those of this job.")] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Also those that batchml did not register here.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """List the active job definitions."""
    from batchml.cli.render import table
    from batchml.cli.wiring import open_place

    place = open_place(env)
    found = [
        each
        for each in _definitions(place).active()
        if (all_ or (each.job and each.env == place.env)) and job in (None, each.job)
    ]
    if json_:
        print_json([_as_json(each) for each in found])
    elif found:
        rows = [["DEFINITION", "JOB", "REGISTERED", "IMAGE"]]
        rows += [[each.full_name, each.job, each.registered, each.image] for each in found]
        print_line(table(rows))
    else:
        say("No job definitions. `batchml submit` and `batchml jobdef register` make them.")


@jobdef_app.command(epilog="Example: batchml jobdef register lenet")
def register(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Folders, or their names.")],
    env: Env = None,
    json_: Json = False,
) -> None:
    """Register the definitions of jobs, for other clients of AWS Batch."""
    from batchml.cli.wiring import open_place
    from batchml.client import submission
    from batchml.ops.definitions import register as register_one

    place = open_place(env)
    found = submission.resolve(place, jobs)
    platform = submission.read_platform(place)
    requests = [each.request(platform) for each in found]  # all mistakes before anything is sent
    place.connect()
    shown = []
    for each, request in zip(found, requests, strict=True):
        submission.publish(place, each.image_source)
        name, job = request["jobDefinitionName"], each.spec.name
        is_new = register_one(place.batch, request, place.clock.now())
        shown.append({"job": job, "jobDefinitionName": name, "isNew": is_new})
        if not json_:
            done = "is registered" if is_new else "exists already, with the same content"
            print_line(f"Job definition [{name}] of [{job}] {done}.")
    if json_:
        print_json(shown)


@jobdef_app.command(epilog="Example: batchml jobdef delete lenet-0123456789:1")
def delete(
    names: Annotated[list[str], typer.Argument(metavar="NAME[:REV]...", help="As list shows.")],
    env: Env = None,
    json_: Json = False,
) -> None:
    """Deregister definitions: all active revisions, or one.

    Runs that were submitted with them are not touched.
    """
    from batchml.cli.wiring import open_place
    from batchml.ops.definitions import find

    place = open_place(env)
    definitions = _definitions(place)
    found = {each.full_name: each for name in names for each in find(definitions, name)}
    _deregister(place, list(found.values()), json_)


@jobdef_app.command(epilog="Example: batchml jobdef gc --older-than 30d --dry-run")
def gc(
    older_than: Annotated[str, typer.Option(help="Neither registered nor used for so long.")] = (
        "30d"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List them, change nothing.")] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Deregister definitions that batchml registered and nobody needs.

    Kept are those of runs that are unfinished or that were submitted within the time, and the
    newest of each job here.
    """
    from batchml.cli.wiring import open_place
    from batchml.ops.definitions import collectable, unused

    seconds = read_seconds(older_than, "--older-than")
    if seconds is None:
        raise UsageError("--older-than: write a duration such as 30d.")
    place = open_place(env)
    definitions, now = _definitions(place), place.clock.now()
    old = collectable(definitions.active(), place.env, _jobs_here(place), now, seconds)
    queues = place.batch.queues() if old else []
    since = now - seconds
    found = list(unused(old, lambda each: definitions.is_used(each, queues, since)))
    if dry_run:
        _show(found, "would be deregistered", json_)
    else:
        _deregister(place, found, json_)


def _definitions(place: "Place") -> Any:
    from batchml.aws.batch.definitions import Definitions

    return Definitions(place.connect())


def _jobs_here(place: "Place") -> set[str]:
    """The names of the jobs in the current folder, whose newest definitions stay.

    Raises ConfigError for a job.toml that is wrong: its definition would be taken for nobody's.
    """
    from batchml.ops.jobs import load_job

    folders = [path.parent for path in sorted((place.here / "jobs").glob("*/job.toml"))]
    if (place.here / "job.toml").is_file():
        folders.append(place.here)
    return {load_job(folder).name for folder in folders}


def _deregister(place: "Place", chosen: "list[Definition]", json_: bool) -> None:
    from batchml.ops.definitions import deregister

    done = []
    for each in deregister(_definitions(place).deregister, chosen, place.clock):
        done.append(each)
        if not json_:
            print_line(f"Job definition [{each.full_name}] is deregistered.")
    if json_:
        print_json([_as_json(each) for each in done])
    else:
        say(f"{len(done)} deregistered.")


def _show(found: "list[Definition]", what: str, json_: bool) -> None:
    if json_:
        print_json([_as_json(each) for each in found])
        return
    for each in found:
        print_line(f"Job definition [{each.full_name}] {what}.")
    say(f"{len(found)} {what}.")


def _as_json(each: "Definition") -> dict[str, Any]:
    return {
        "jobDefinitionName": each.name,
        "revision": each.revision,
        "job": each.job or None,
        "registered": each.registered or None,
        "image": each.image or None,
    }
