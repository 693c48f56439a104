"""top: queues and runs as they are now, again and again."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchml.cli.app import app
from batchml.cli.flags import Env, Json
from batchml.cli.output import print_json, print_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchml.cli.colour import Screen
    from batchml.cli.keys import Rest
    from batchml.model.run import Run
    from batchml.ops.top import Poller, RunRow, Snapshot

FEW = 20  # runs that are shown where there is no window to fill
LONGEST = 32  # characters of a name
NODES = 8  # of one run that have a line
HINT = "q leaves"

_QUEUE_GIVES_WAY = ("SUBMITTED", "PENDING", "MEMORY", "STARTING", "VCPUS", "GPUS")
_RUN_GIVES_WAY = ("QUEUE", "GPU MEM", "OUT", "IN", "MEMORY", "CPU", "GPU", "ID")


@app.command(epilog="Example: batchml top --queue gpu")
def top(
    queue: Annotated[
        list[str] | None, typer.Option(help="Only this queue; may be repeated.")
    ] = None,
    every: Annotated[float, typer.Option(min=1, help="Seconds between two looks.")] = 3.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once and exit.")] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Show queues and runs live, and what they use.

    q or Ctrl-C ends it. Without a terminal, and with --json, it is printed once.
    """
    from batchml.aws.live import LiveApi
    from batchml.cli.wiring import open_place
    from batchml.client.finding import check_queues
    from batchml.ops.top import Poller

    place = open_place(env)
    queues = [place.queue(name) for name in queue or ()]
    check_queues(place.batch, queues)
    poller = Poller(place.batch, LiveApi(place.connect()), place.clock.now)
    if json_:
        print_json(_json(poller.look(queues), place.env))
    elif once or not sys.stdout.isatty():
        from batchml.cli.colour import screen

        print_line(_view(poller.look(queues), place.env, screen(), FEW))
    else:
        from batchml.cli.keys import reading_keys

        with reading_keys(place.clock.sleep) as rest:
            _live(poller, queues, place.env, every, rest)


def _live(poller: "Poller", queues: "Sequence[str]", env: str, every: float, rest: "Rest") -> None:
    """Until `rest`, which sleeps between two looks, says that the user has enough, or Ctrl-C."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from batchml.cli.colour import screen
    from batchml.errors import ServiceError, ServiceUnreachable
    from batchml.ops.top import Snapshot, pause

    console, found = Console(), Snapshot(0)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                trouble = ""
                try:
                    found = poller.look(queues)
                except (ServiceError, ServiceUnreachable) as error:
                    if not found.at:  # what is wrong from the start is no passing trouble
                        raise
                    trouble = f"No contact; this is how it was. Still trying: {error}"
                room = console.size.height - len(found.queues) - 6 - bool(trouble)
                on = screen()._replace(width=console.size.width)
                text = Text.from_ansi(_view(found, env, on, max(1, room), trouble, HINT))
                text.no_wrap, text.overflow = True, "ellipsis"
                live.update(text, refresh=True)
                if rest(pause(found.calls, every)) == "q":
                    return
    except KeyboardInterrupt:
        return


def _view(
    found: "Snapshot", env: str, on: "Screen", most: int, trouble: str = "", hint: str = ""
) -> str:
    """One screen of text, no wider than it if it can be."""
    from batchml.cli.render import printable, table, timestamp

    top = f"{env}  {timestamp(found.at)[:19].replace('T', ' ')}Z"
    lines = [f"{top}  {hint}".rstrip()]
    lines += [printable(trouble.replace("\n", " ")), ""] if trouble else [""]
    lines.append(table(narrowed(_queue_rows(found), on.width, _QUEUE_GIVES_WAY), on))
    lines.append("")
    if found.runs:
        shown = _fitting(found.runs, most)
        rows = _run_rows(shown, found.at)
        lines.append(table(narrowed(rows, on.width, _RUN_GIVES_WAY), on))
        if len(found.runs) > len(shown):
            lines.append(f"and {len(found.runs) - len(shown)} more")
    else:
        lines.append("Nothing runs and nothing waits.")
    return "\n".join(lines)


def narrowed(
    rows: "Sequence[Sequence[str]]", width: int, gives_way: "Sequence[str]"
) -> list[list[str]]:
    """Without columns that are empty, and without those that a narrow window has no room for.

    `gives_way` names columns, the first to go first; others stay.
    """
    from batchml.cli.colour import Screen
    from batchml.cli.render import cells, shorter_names, table

    kept = [i for i, name in enumerate(rows[0]) if i < 2 or any(row[i] for row in rows[1:])]
    for name in ("", *gives_way):
        kept = [i for i in kept if rows[0][i] != name]
        columns = [[row[i] for row in rows] for i in kept]
        columns = shorter_names(columns, width) if width else columns
        found = [list(row) for row in zip(*columns, strict=True)]
        if not width or max(map(cells, table(found, Screen()).splitlines())) <= width:
            break
    return found


def _queue_rows(found: "Snapshot") -> "list[list[str]]":
    from batchml.aws.live import LIVE
    from batchml.cli.render import printable
    from batchml.cli.using import memory, number

    states = list(reversed(LIVE))
    rows = [["QUEUE", *(state.value for state in states), "VCPUS", "MEMORY", "GPUS"]]
    for queue in found.queues:
        counts = [number(queue.counts[state]) for state in states]
        held = [number(queue.vcpus), memory(queue.memory_mib), number(queue.gpus)]
        rows.append([printable(queue.name)[:LONGEST], *counts, *held])
    return rows


def _fitting(runs: "Sequence[RunRow]", most: int) -> "list[RunRow]":
    """As many as `most` lines have room for; where that is little, their nodes have none."""
    from msgspec import structs

    if len(runs) + sum(_node_lines(row) for row in runs) > most:
        runs = [structs.replace(row, nodes=()) for row in runs]
    return list(runs[:most])


def _node_lines(row: "RunRow") -> int:
    """With the one that says how many more there are."""
    return min(len(row.nodes), NODES) + (row.run.nodes > min(len(row.nodes), NODES) > 0)


def _run_rows(runs: "Iterable[RunRow]", now_ms: int) -> "list[list[str]]":
    from batchml.cli.render import printable
    from batchml.cli.using import USED, cells_of
    from batchml.model.array import state_text
    from batchml.model.names import short_id

    rows = [["ID", "NAME", "QUEUE", "STATUS", "FOR", *USED]]
    for row in runs:
        run = row.run
        rows.append(
            [
                short_id(run.job_id),
                ("  " if row.head else "") + printable(run.name)[:LONGEST],
                printable(run.queue)[:LONGEST],
                state_text(run),
                _for(run, now_ms),
                *cells_of(run, row.usage),
            ]
        )
        for node in row.nodes[:NODES]:
            name = f"  node {node.run.node_index}"
            rows.append(["", name, "", state_text(node.run), "", *cells_of(run, node.usage)])
        left = run.nodes - min(len(row.nodes), NODES)
        if row.nodes and left:
            rows.append(["", f"  and {left} more nodes", *[""] * (len(rows[0]) - 2)])
    return rows


def _for(run: "Run", now_ms: int) -> str:
    from batchml.cli.render import duration

    since = run.started_at or run.created_at
    return duration((now_ms - since) / 1000) if since else ""


def _json(found: "Snapshot", env: str) -> dict[str, Any]:
    from batchml.cli.render import run_json

    return {
        "env": env,
        "at": found.at,
        "queues": [
            {
                "jobQueue": queue.name,
                "counts": {state.value: count for state, count in queue.counts.items()},
                "held": {"vcpus": queue.vcpus, "memory": queue.memory_mib, "gpus": queue.gpus},
            }
            for queue in found.queues
        ],
        "runs": [
            {**run_json(row.run), "usage": row.usage or None, **_head_json(row), **_nodes_json(row)}
            for row in found.runs
        ],
    }


def _head_json(row: "RunRow") -> dict[str, str]:
    """Nothing for a run that is no gang's workers."""
    return {"head": row.head} if row.head else {}


def _nodes_json(row: "RunRow") -> dict[str, Any]:
    """Nothing for a run that has no nodes."""
    return {"nodes": [_node_json(node) for node in row.nodes]} if row.nodes else {}


def _node_json(row: "RunRow") -> dict[str, Any]:
    return {
        "jobId": row.run.job_id,
        "status": row.run.status.value,
        "usage": row.usage or None,
    }
