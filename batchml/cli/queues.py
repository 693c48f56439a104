"""queue list, create, update, delete."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchml.cli.app import command_group
from batchml.cli.flags import Env, Json, read_pairs
from batchml.cli.output import print_json, say
from batchml.cli.single import (
    Enable,
    Name,
    Yes,
    bare,
    compute_api,
    described_environment,
    find_one,
    given,
    make,
    print_table,
    refuse_existing,
    say_settled,
    table_of,
    unmake,
    used,
)
from batchml.errors import UsageError

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.model.environment import Queue

queue_app = command_group(
    "queue",
    "Job queues: who waits for which machines, and who comes first.",
    "batchml queue list",
)

Priority = Annotated[int | None, typer.Option(help="0 to 1000; the highest is served first.")]
Computes = Annotated[
    list[str] | None,
    typer.Option("--compute", help="May be repeated: the next takes what this one cannot."),
]
TimeLimits = Annotated[
    list[str] | None,
    typer.Option(
        "--time-limit", metavar="WHY=TIME",
        help="Cancel runs stuck so long: no-capacity=6h, too-large-for-compute=30m, "
        "too-large-for-instances=30m.",
    ),
]  # fmt: skip


@queue_app.command("list", epilog="Example: batchml queue list --env dev")
def queue_list(env: Env = None, json_: Json = False) -> None:
    """List the job queues, the highest priority first, with what runs and waits in them.

    VCPUS 12+40: held by runs that run, and asked for by those that wait.
    """
    from batchml.cli.cluster import queue_json, queue_table
    from batchml.cli.colour import screen
    from batchml.cli.top import narrowed
    from batchml.cli.wiring import open_place
    from batchml.client.cluster import look_at_queues

    place = open_place(env)
    found, refused = look_at_queues(place)
    if refused:
        say(f"Runs are not counted: {refused}")
    if json_:
        known = {row.name: queue_json(row) for row in found.queues if row.counts}
        details = compute_api(place).queues()
        return print_json([each | known.get(name, {}) for name, each in details.items()])
    rows = queue_table(found.queues, lambda name: bare(place, name))
    gives_way = ("ORDER", "GPUS", "VCPUS", "COMPUTE", "REASON", "STATE")
    print_table(
        narrowed(rows, screen().width, gives_way), "No job queues. `batchml setup` makes them."
    )


@queue_app.command("create", epilog="Example: batchml queue create urgent --compute gpu")
def queue_create(
    name: Name,
    priority: Priority = None,
    compute: Computes = None,
    share: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=WEIGHT", help="Fair share: twice the weight, twice the share."),
    ] = None,
    time_limit: TimeLimits = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Create a job queue. Without flags, the one that batchml.toml describes."""
    from batchml.cli.wiring import open_place
    from batchml.model.description import read_queue

    place = open_place(env)
    _refuse_lists(compute)
    table = given(priority=priority, compute=compute, **_queue_tables(share, time_limit))
    described = described_environment(place).queues.get(name)
    if described is not None and not table:
        queue = described
    else:
        table = {**(table_of(described) if described else {}), **table}
        queue = read_queue(name, table, f"queue create {name}")
    refuse_existing(place, "queue", name, compute_api(place).queues())
    make(place, {}, {name: _on_known(place, queue)}, json_)


@queue_app.command("update", epilog="Example: batchml queue update urgent --priority 500")
def queue_update(
    name: Name,
    priority: Priority = None,
    compute: Computes = None,
    time_limit: TimeLimits = None,
    enable: Enable = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Change a job queue now. What setup made, setup changes back."""
    from batchml.aws.batch.resources import queue as queue_request
    from batchml.aws.naming import Site
    from batchml.cli.wiring import open_place
    from batchml.model.description import read_queue
    from batchml.model.names import bare_name

    place = open_place(env)
    there, detail = find_one(place, name, "Job queue", compute_api(place).queues())
    _refuse_lists(compute)
    table = given(priority=priority, compute=compute, **_queue_tables(None, time_limit))
    if not table and enable is None:
        raise UsageError("Nothing to change was given: see batchml queue update --help.")
    known = {
        "priority": detail["priority"],
        "compute": [bare(place, bare_name(arn)) for arn in used(detail)],
    }
    queue = _on_known(place, read_queue(name, {**known, **table}, f"queue update {name}"))
    full = queue_request(Site(env=place.env), name, queue)
    members = {
        "priority": "priority",
        "compute": "computeEnvironmentOrder",
        "time_limits": "jobStateTimeLimitActions",
    }
    request: dict[str, Any] = {"jobQueue": there}
    if enable is not None:
        request["state"] = "ENABLED" if enable else "DISABLED"
    request |= {members[key]: full[members[key]] for key in table}
    compute_api(place).update_queue(request)
    say_settled(place, "job queue", request, json_)


@queue_app.command("delete", epilog="Example: batchml queue delete urgent --yes")
def queue_delete(name: Name, yes: Yes = False, env: Env = None, json_: Json = False) -> None:
    """Delete a job queue. Runs in it are terminated: `JobQueue deleted`."""
    from batchml.cli.wiring import open_place

    place = open_place(env)
    api = compute_api(place)
    there, _ = find_one(place, name, "Job queue", api.queues())
    count = api.unfinished(there)
    if count:
        say(f"{count} run{'s' if count > 1 else ''} in it will be terminated.")
    unmake(place, "job queue", there, yes, json_)


def _refuse_lists(compute: list[str] | None) -> None:
    for text in compute or ():
        if "," in text:
            flags = " ".join(f"--compute {name.strip()}" for name in text.split(","))
            raise UsageError(f"--compute {text}: one at a time: {flags}.")


def _queue_tables(share: list[str] | None, time_limit: list[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if share:
        pairs = read_pairs(share, "--share")
        found["fair_share"] = {"shares": {name: _number(text) for name, text in pairs.items()}}
    if time_limit:
        found["time_limits"] = read_pairs(time_limit, "--time-limit")
    return found


def _number(text: str) -> float | str:
    """A number, or the text for the reader to complain about."""
    try:
        return float(text)
    except ValueError:
        return text


def _on_known(place: "Place", queue: "Queue") -> "Queue":
    """The queue, after a look whether its compute environments exist. Raises NotFound."""
    known = compute_api(place).environments()
    for each in queue.compute:
        find_one(place, each, "Compute environment", known)
    return queue
