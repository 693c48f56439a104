"""queue show: the runs of one queue in their order."""

from typing import TYPE_CHECKING, Any

from batchml.cli.flags import Env, Json
from batchml.cli.output import print_json, print_line
from batchml.cli.queues import queue_app
from batchml.cli.single import Name, bare, compute_api, find_one

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.ops.top import RunRow, Snapshot

_GIVES_WAY = ("MEMORY", "GPUS", "VCPUS", "HOST (REASON)", "FOR")


@queue_app.command("show", epilog="Example: batchml queue show default")
def queue_show(name: Name, env: Env = None, json_: Json = False) -> None:
    """Show a queue with its runs: those that run, then those that wait, whose turn it is first.

    (#1) is next, and is told with the reason why it waits. Places are counted in containers: an
    array of 100 before a run puts it at #101.
    """
    from batchml.cli.wiring import open_place
    from batchml.client.cluster import poller

    place = open_place(env)
    there, _ = find_one(place, name, "Job queue", compute_api(place).queues())
    found = poller(place).look([there], with_usage=False)
    if json_:
        return print_json(_json(found))
    print_line("\n".join(_lines(place, found)))


def _lines(place: "Place", found: "Snapshot") -> list[str]:
    from batchml.cli.cluster import missing_line, queue_table
    from batchml.cli.colour import screen
    from batchml.cli.render import table
    from batchml.cli.top import narrowed

    on = screen()
    rows = queue_table(found.queues, lambda name: bare(place, name))
    lines = [table(narrowed(rows, on.width, ("ORDER", "COMPUTE", "REASON", "STATE")), on), ""]
    if found.runs:
        lines.append(table(narrowed(_run_rows(found), on.width, _GIVES_WAY), on))
    else:
        lines.append("Nothing runs and nothing waits.")
    missing = missing_line(found)
    return [*lines, *([missing] if missing else [])]


def _run_rows(found: "Snapshot") -> list[list[str]]:
    from batchml.cli.cluster import place_text
    from batchml.cli.render import printable
    from batchml.cli.top import since
    from batchml.cli.using import memory, number
    from batchml.model.names import short_id
    from batchml.model.run import state_text

    rows = [["ID", "NAME", "STATUS", "FOR", "VCPUS", "MEMORY", "GPUS", "HOST (REASON)"]]
    for row in found.runs:
        run = row.run
        rows.append(
            [
                short_id(run.job_id),
                printable(run.name),
                state_text(run),
                since(run, found.at),
                number(run.vcpus * max(1, run.nodes)),
                memory(run.memory_mib * max(1, run.nodes)),
                number(run.gpus * max(1, run.nodes)),
                place_text(row),
            ]
        )
    return rows


def _json(found: "Snapshot") -> dict[str, Any]:
    from batchml.cli.cluster import compute_json, queue_json

    (queue,) = found.queues
    state = queue.state
    return {
        "jobQueue": queue.name,
        "priority": state.priority if state else None,
        "state": ("ENABLED" if state.is_enabled else "DISABLED") if state else None,
        "status": state.status if state else None,
        **queue_json(queue),
        "computeEnvironments": [compute_json(row) for row in found.computes],
        "runs": [_run_json(row) for row in found.runs],
        "missing": list(found.missing),
    }


def _run_json(row: "RunRow") -> dict[str, Any]:
    from batchml.cli.cluster import placed_json
    from batchml.cli.render import run_json

    run = row.run
    needs = {"vcpus": run.vcpus, "memory": run.memory_mib, "gpus": run.gpus}
    return {**run_json(run), **placed_json(row), "needs": needs if run.vcpus else None}
