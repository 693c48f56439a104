"""batchml queue list, show, create, update and delete."""

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from batchml.aws.batch.resources import queue_request
from batchml.aws.naming import Site
from batchml.cli.app import command_group
from batchml.cli.options import AllProjects, Env, Json, open_context, read_pairs
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import narrow_columns, printable, run_json, table
from batchml.cli.terminal import screen
from batchml.cluster.service import open_poller, poll_queues
from batchml.cluster.snapshot import ClusterSnapshot, QueueRow, RunRow
from batchml.cluster.tables import (
    age_text,
    compute_json,
    host_or_reason,
    missing_line,
    position_json,
    queue_json,
    queue_table,
)
from batchml.config.environments import read_queue
from batchml.context import Context
from batchml.errors import UsageError
from batchml.model.environment import Queue
from batchml.model.names import bare_name, short_id
from batchml.model.run import describe_state
from batchml.runs.commands.usage import memory, number
from batchml.setup.commands.shared import (
    Enable,
    Name,
    Yes,
    compute_api,
    compute_order,
    create_resources,
    delete_resource,
    described_environment,
    drop_none,
    find_resource,
    override,
    print_table,
    refuse_existing,
    report_update,
)

queue_app = command_group(
    "queue",
    "Manage job queues: which runs wait for which hosts, and in which order.",
    "batchml queue list",
)

Priority = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Set the priority, 0 to 1000; the highest queue is served first."
    ),
]
Computes = Annotated[
    list[str] | None,
    typer.Option(
        "--compute",
        metavar="COMPUTE",
        help="Use this compute environment. Repeat it in order of use.",
    ),
]
TimeLimits = Annotated[
    list[str] | None,
    typer.Option(
        "--time-limit", metavar="WHY=TIME",
        help="Cancel runs stuck for this time: no-capacity=6h, too-large-for-compute=30m, "
        "too-large-for-instances=30m.",
    ),
]  # fmt: skip


@queue_app.command("list", epilog="Example: batchml queue list --env dev")
def queue_list(all_: AllProjects = False, env: Env = None, json_: Json = False) -> None:
    """List the job queues, the highest priority first, with their running and waiting runs.

    VCPUS 12+40: held by running runs, and requested by waiting runs. On `local`, the queues that
    other projects have set up are listed with --all.
    """
    context = open_context(env)
    snapshot, refused = poll_queues(context)
    queues = snapshot.queues if all_ else _own_queues(context, snapshot.queues)
    if refused:
        say(f"Runs are not counted: {refused}")
    if json_:
        listed = {row.name for row in queues}
        runs = {row.name: queue_json(row) for row in queues if row.counts}
        details = compute_api(context).queues()
        return print_json(
            [each | runs.get(name, {}) for name, each in details.items() if name in listed]
        )
    rows = queue_table(queues, context.bare)
    gives_way = ("ORDER", "GPUS", "VCPUS", "COMPUTE", "REASON", "STATE")
    print_table(
        narrow_columns(rows, screen().width, gives_way),
        "No job queues. `batchml setup` makes them.",
    )


def _own_queues(context: Context, rows: Iterable[QueueRow]) -> list[QueueRow]:
    """The queues that the project's runs can name: its own, and shared ones of other names."""
    if not context.settings.is_local:
        return list(rows)
    own = [row for row in rows if row.state is None or row.state.project in ("", context.project)]
    taken = {context.bare(row.name) for row in own if context.bare(row.name) != row.name}
    return [row for row in own if row.name not in taken]


@queue_app.command("create", epilog="Example: batchml queue create urgent --compute gpu")
def queue_create(
    name: Name,
    priority: Priority = None,
    compute: Computes = None,
    share: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=WEIGHT", help="Add a fair share. Twice the weight gets twice the vCPUs."
        ),
    ] = None,
    time_limit: TimeLimits = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Create a job queue, without flags as batchml.toml describes it."""
    context = open_context(env)
    _refuse_lists(compute)
    table = drop_none(priority=priority, compute=compute, **_queue_tables(share, time_limit))
    described = described_environment(context).queues.get(name)
    queue = read_queue(name, override(described, table), f"queue create {name}")
    refuse_existing(context, "queue", name, compute_api(context).queues())
    shared = _shared_computes(context, queue)
    create_resources(context, {}, {name: queue}, json_, shared)


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
    """Change a job queue now. If setup made it, the next setup changes it back."""
    context = open_context(env)
    aws_name, detail = find_resource(context, name, "Job queue", compute_api(context).queues())
    _refuse_lists(compute)
    table = drop_none(priority=priority, compute=compute, **_queue_tables(None, time_limit))
    if not table and enable is None:
        raise UsageError("Nothing to change was given: see batchml queue update --help.")
    present = {
        "priority": detail["priority"],
        "compute": [context.bare(bare_name(arn)) for arn in compute_order(detail)],
    }
    queue = read_queue(name, {**present, **table}, f"queue update {name}")
    project = context.project if context.settings.is_local else ""
    site = Site(env=context.env, project=project, shared=_shared_computes(context, queue))
    full = queue_request(site, name, queue)
    members = {
        "priority": "priority",
        "compute": "computeEnvironmentOrder",
        "time_limits": "jobStateTimeLimitActions",
    }
    request: dict[str, Any] = {"jobQueue": aws_name}
    if enable is not None:
        request["state"] = "ENABLED" if enable else "DISABLED"
    request |= {members[key]: full[members[key]] for key in table}
    compute_api(context).update_queue(request)
    report_update(context, "job queue", request, json_)


@queue_app.command("delete", epilog="Example: batchml queue delete urgent --yes")
def queue_delete(name: Name, yes: Yes = False, env: Env = None, json_: Json = False) -> None:
    """Delete a job queue. AWS Batch terminates its runs: `JobQueue deleted`."""
    context = open_context(env)
    api = compute_api(context)
    aws_name, _ = find_resource(context, name, "Job queue", api.queues())
    count = api.unfinished(aws_name)
    if count:
        say(f"{count} run{'s' if count > 1 else ''} in it will be terminated.")
    delete_resource(context, "job queue", aws_name, yes, json_)


def _refuse_lists(compute: list[str] | None) -> None:
    """Raise UsageError for `--compute a,b`."""
    for text in compute or ():
        if "," in text:
            flags = " ".join(f"--compute {name.strip()}" for name in text.split(","))
            raise UsageError(f"--compute {text}: repeat the flag instead: {flags}.")


def _queue_tables(share: list[str] | None, time_limit: list[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if share:
        pairs = read_pairs(share, "--share")
        found["fair_share"] = {"shares": {name: _number(text) for name, text in pairs.items()}}
    if time_limit:
        found["time_limits"] = read_pairs(time_limit, "--time-limit")
    return found


def _number(text: str) -> float | str:
    """A number, or the text, about which read_queue complains."""
    try:
        return float(text)
    except ValueError:
        return text


def _shared_computes(context: Context, queue: Queue) -> frozenset[str]:
    """The compute environments of a queue that batchml did not make for this environment.

    Raises NotFound if one does not exist.
    """
    known = compute_api(context).environments()
    names = {
        each: find_resource(context, each, "Compute environment", known)[0]
        for each in queue.compute
    }
    return frozenset(each for each, name in names.items() if each == name)


# --- queue show -----------------------------------------------------------------------------


# Columns that a narrow window leaves out, the first one first.
_GIVES_WAY = ("MEMORY", "GPUS", "VCPUS", "HOST (REASON)", "FOR")


@queue_app.command("show", epilog="Example: batchml queue show default")
def queue_show(name: Name, env: Env = None, json_: Json = False) -> None:
    """Show a queue with its running runs, then its waiting runs in their order.

    (#1) is next, with the reason why it waits. Positions count containers: behind an array of 100
    a run is at #101.
    """
    context = open_context(env)
    aws_name, _ = find_resource(context, name, "Job queue", compute_api(context).queues())
    snapshot = open_poller(context).poll([aws_name], with_usage=False)
    if json_:
        return print_json(_json(snapshot))
    print_line("\n".join(_lines(context, snapshot)))


def _lines(context: Context, snapshot: ClusterSnapshot) -> list[str]:
    on = screen()
    rows = queue_table(snapshot.queues, context.bare)
    lines = [table(narrow_columns(rows, on.width, ("ORDER", "COMPUTE", "REASON", "STATE")), on), ""]
    if snapshot.runs:
        lines.append(table(narrow_columns(_run_rows(snapshot), on.width, _GIVES_WAY), on))
    else:
        lines.append("Nothing runs and nothing waits.")
    missing = missing_line(snapshot)
    return [*lines, *([missing] if missing else [])]


def _run_rows(snapshot: ClusterSnapshot) -> list[list[str]]:
    rows = [["ID", "NAME", "STATUS", "FOR", "VCPUS", "MEMORY", "GPUS", "HOST (REASON)"]]
    for row in snapshot.runs:
        run, nodes = row.run, max(1, row.run.nodes)
        rows.append(
            [
                short_id(run.job_id),
                printable(run.name),
                describe_state(run),
                age_text(run, snapshot.at),
                number(run.vcpus * nodes),
                memory(run.memory_mib * nodes),
                number(run.gpus * nodes),
                host_or_reason(row),
            ]
        )
    return rows


def _json(snapshot: ClusterSnapshot) -> dict[str, Any]:
    (queue,) = snapshot.queues
    state = queue.state
    return {
        "jobQueue": queue.name,
        "priority": state.priority if state else None,
        "state": ("ENABLED" if state.is_enabled else "DISABLED") if state else None,
        "status": state.status if state else None,
        **queue_json(queue),
        "computeEnvironments": [compute_json(row) for row in snapshot.computes],
        "runs": [_run_json(row) for row in snapshot.runs],
        "missing": list(snapshot.missing),
    }


def _run_json(row: RunRow) -> dict[str, Any]:
    run = row.run
    needs = {"vcpus": run.vcpus, "memory": run.memory_mib, "gpus": run.gpus}
    return {**run_json(run), **position_json(row), "needs": needs if run.vcpus else None}
