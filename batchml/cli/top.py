"""top: queues, runs and hosts as they are now, again and again."""

import sys
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from batchml.cli.app import app
from batchml.cli.flags import Env, Json
from batchml.cli.output import print_json, print_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from batchml.cli.colour import Screen
    from batchml.cli.keys import Rest
    from batchml.model.run import Run
    from batchml.ops.top import RunRow, Snapshot

FEW = 20  # runs or hosts that are shown where there is no window to fill
LONGEST = 32  # characters of a name
NODES = 8  # of one run that have a line
SORTS = ("state", "age", "cpu", "gpu")  # of runs, in the order in which a key goes through them

_QUEUE_GIVES_WAY = (
    "SUBMITTED", "PENDING", "MEMORY", "PRIORITY", "STARTING", "GPUS", "VCPUS", "NEXT WAITS FOR",
)  # fmt: skip
_PLACE = "HOST (REASON)"
_LEAST_PLACE = 16  # cells of it, where others would have to go
_RUN_GIVES_WAY = ("QUEUE", "GPU MEM", "OUT", "IN", "MEMORY")  # then that is cut, and then:
_RUN_GIVES_WAY_LATER = ("GPU", "CPU", _PLACE, "ID")


class Shown(NamedTuple):
    """What of it is on the screen, as keys choose."""

    hosts: bool = False
    sort: str = SORTS[0]

    def after(self, key: str) -> "Shown":
        if key == "h":
            return self._replace(hosts=not self.hosts)
        if key == "s" and not self.hosts:
            return self._replace(sort=self.next_sort)
        return self

    @property
    def next_sort(self) -> str:
        return SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]

    @property
    def hint(self) -> str:
        if self.hosts:
            return "q leaves, h shows runs"
        return f"q leaves, h shows hosts, s sorts by {self.next_sort}"


@app.command(epilog="Example: batchml top --queue gpu")
def top(
    queue: Annotated[
        list[str] | None, typer.Option(help="Only this queue; may be repeated.")
    ] = None,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Compute environments and hosts instead of runs.")
    ] = False,
    every: Annotated[float, typer.Option(min=1, help="Seconds between two looks.")] = 3.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once and exit.")] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Show queues, runs and hosts live, and what they use.

    A run that waits has its place in the queue, (#1) is next, and the reason why. VCPUS 12+40: held
    by runs that run, and asked for by those that wait. Keys: h turns to compute environments and
    hosts and back, s sorts runs; q or Ctrl-C ends it. Without a terminal, and with --json, it is
    printed once.
    """
    from batchml.cli.wiring import open_place
    from batchml.client.cluster import HostPrices, poller
    from batchml.client.finding import check_queues

    place = open_place(env)
    queues = [place.queue(name) for name in queue or ()]
    check_queues(place.batch, queues)
    watched, priced, shown = poller(place), HostPrices(place).put, Shown(hosts)
    if json_:
        print_json(_json(priced(watched.look(queues)), place.env))
    elif once or not sys.stdout.isatty():
        from batchml.cli.colour import screen

        found = watched.look(queues)
        found = priced(found) if hosts else found
        print_line(_view(found, place.env, screen(), FEW, shown=shown))
    else:
        from batchml.cli.keys import reading_keys

        with reading_keys(place.clock.sleep) as rest:
            now = place.clock.now
            _live(lambda: watched.look(queues), priced, shown, place.env, every, rest, now)


def _live(
    look: "Callable[[], Snapshot]",
    priced: "Callable[[Snapshot], Snapshot]",
    shown: Shown,
    env: str,
    every: float,
    rest: "Rest",
    now: "Callable[[], float]",
) -> None:
    """Until `rest`, which sleeps between two looks, gives the key `q`, or Ctrl-C.

    What hosts cost is asked for, by `priced`, when they are shown.
    """
    from rich.console import Console
    from rich.live import Live

    from batchml.errors import ServiceError, ServiceUnreachable
    from batchml.ops.top import Snapshot, pause

    console, found = Console(), Snapshot(0)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                trouble = ""
                try:
                    found = look()
                except (ServiceError, ServiceUnreachable) as error:
                    if not found.at:  # what is wrong from the start is no passing trouble
                        raise
                    trouble = f"No contact; this is how it was. Still trying: {error}"
                until = now() + pause(found.calls, every)
                key = " "
                while key:  # a key changes at once how that is shown which is known
                    found = priced(found) if shown.hosts else found
                    _draw(live, console, found, env, trouble, shown)
                    key = rest(max(0.0, until - now()))
                    if key == "q":
                        return
                    shown = shown.after(key)
    except KeyboardInterrupt:
        return


def _draw(live: Any, console: Any, found: "Snapshot", env: str, trouble: str, shown: Shown) -> None:
    from rich.text import Text

    from batchml.cli.colour import screen

    tables = len(found.computes) if shown.hosts else len(found.queues)
    extra = bool(trouble) + (found.hosts is not None) + bool(found.missing)
    room = console.size.height - tables - 6 - extra
    on = screen()._replace(width=console.size.width)
    text = Text.from_ansi(_view(found, env, on, max(1, room), trouble, shown.hint, shown))
    text.no_wrap, text.overflow = True, "ellipsis"
    live.update(text, refresh=True)


def _view(
    found: "Snapshot",
    env: str,
    on: "Screen",
    most: int,
    trouble: str = "",
    hint: str = "",
    shown: Shown = Shown(),  # noqa: B008  (it does not change)
) -> str:
    """One screen of text, no wider than it if it can be."""
    from batchml.cli.cluster import host_lines, missing_line, total_line
    from batchml.cli.render import printable, table, timestamp

    top = f"{env}  {timestamp(found.at)[:19].replace('T', ' ')}Z"
    total = total_line(found)
    lines = [f"{top}  {hint}".rstrip(), *([total] if total else [])]
    lines += [printable(trouble.replace("\n", " ")), ""] if trouble else [""]
    if shown.hosts:
        lines += host_lines(found, on, most)
    else:
        rows = narrowed(_queue_rows(found), on.width, _QUEUE_GIVES_WAY)
        lines += [table(rows, on), "", *_run_lines(found, on, most, shown.sort)]
    missing = missing_line(found)
    return "\n".join([*lines, *([missing] if missing else [])])


def _run_lines(found: "Snapshot", on: "Screen", most: int, sort: str) -> list[str]:
    from batchml.cli.render import table

    if not found.runs:
        return ["Nothing runs and nothing waits."]
    shown = _fitting(_sorted(found.runs, sort), most)
    rows = narrowed(_run_rows(shown, found), on.width, _RUN_GIVES_WAY)
    rows = narrowed(_with_short_places(rows, on.width), on.width, _RUN_GIVES_WAY_LATER)
    more = len(found.runs) - len(shown)
    return [table(rows, on), *([f"and {more} more"] if more else [])]


def _with_short_places(rows: "list[list[str]]", width: int) -> "list[list[str]]":
    """Where a table is too wide, its last column gives way as far as it can."""
    from batchml.cli.colour import Screen
    from batchml.cli.render import cells, cut, table

    over = max(map(cells, table(rows, Screen()).splitlines())) - width
    if not width or over <= 0 or rows[0][-1] != _PLACE:
        return rows
    longest = max(cells(row[-1]) for row in rows)
    most = max(_LEAST_PLACE, longest - over)
    return [[*row[:-1], cut(row[-1], most)] for row in rows]


def _sorted(rows: "Sequence[RunRow]", sort: str) -> "Sequence[RunRow]":
    """By state, as they come; by age, the oldest first; else, who uses most first."""
    if sort == "age":
        return sorted(rows, key=lambda row: row.run.started_at or row.run.created_at or sys.maxsize)
    if sort in ("cpu", "gpu"):
        return sorted(rows, key=lambda row: -_use(row, sort))
    return rows


def _use(row: "RunRow", name: str) -> float:
    """Of a run or of all its nodes together; -1 where it is not known."""
    known = [each.usage[name] for each in (row, *row.nodes) if name in each.usage]
    return sum(known) if known else -1.0


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
    from batchml.aws.batch.jobs import LIVE
    from batchml.cli.cluster import held_and_asked, state_word
    from batchml.cli.render import printable
    from batchml.cli.using import memory, number

    states = list(reversed(LIVE))
    rows = [["QUEUE", *(state.value for state in states), "VCPUS", "MEMORY", "GPUS", "PRIORITY",
             "STATE", "NEXT WAITS FOR"]]  # fmt: skip
    for queue in found.queues:
        known = queue.state
        word = state_word(known.is_enabled, known.status) if known else ""
        rows.append(
            [
                printable(queue.name)[:LONGEST],
                *(number(queue.counts[state]) for state in states),
                held_and_asked(queue.vcpus, queue.asked_vcpus, queue.is_whole),
                memory(queue.memory_mib),
                held_and_asked(queue.gpus, queue.asked_gpus, queue.is_whole),
                str(known.priority) if known and len(found.queues) > 1 else "",
                "" if word == "ENABLED" else word,
                printable(queue.reason),
            ]
        )
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


def _run_rows(runs: "Iterable[RunRow]", found: "Snapshot") -> "list[list[str]]":
    from batchml.cli.cluster import place_text
    from batchml.cli.render import printable
    from batchml.cli.using import USED, cells_of
    from batchml.model.names import short_id
    from batchml.model.run import state_text

    is_one = len(found.hosts or ()) < 2  # then nobody asks on which
    rows = [["ID", "NAME", "QUEUE", "STATUS", "FOR", *USED, _PLACE]]
    for row in runs:
        run = row.run
        rows.append(
            [
                short_id(run.job_id),
                ("  " if row.head else "") + printable(run.name)[:LONGEST],
                printable(run.queue)[:LONGEST],
                state_text(run),
                since(run, found.at),
                *cells_of(run, row.usage),
                "" if is_one and row.hosts else place_text(row),
            ]
        )
        for node in row.nodes[:NODES]:
            name = f"  node {node.run.node_index}"
            where = "" if is_one else place_text(node)
            use = cells_of(run, node.usage)
            rows.append(["", name, "", state_text(node.run), "", *use, where])
        left = run.nodes - min(len(row.nodes), NODES)
        if row.nodes and left:
            rows.append(["", f"  and {left} more nodes", *[""] * (len(rows[0]) - 2)])
    return rows


def since(run: "Run", now_ms: int) -> str:
    """How long it has run, or waited."""
    from batchml.cli.render import duration

    began = run.started_at or run.created_at
    return duration((now_ms - began) / 1000) if began else ""


def _json(found: "Snapshot", env: str) -> dict[str, Any]:
    from batchml.cli.cluster import compute_json, host_json, placed_json, queue_json, total_json
    from batchml.cli.render import run_json

    return {
        "env": env,
        "at": found.at,
        "total": total_json(found),
        "queues": [{"jobQueue": queue.name, **queue_json(queue)} for queue in found.queues],
        "runs": [
            {
                **run_json(row.run),
                "usage": row.usage or None,
                **placed_json(row),
                **_head_json(row),
                **_nodes_json(row),
            }
            for row in found.runs
        ],
        "computeEnvironments": [compute_json(row) for row in found.computes],
        "hosts": None if found.hosts is None else [host_json(row) for row in found.hosts],
        "missing": list(found.missing),
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
