"""batchml top: a live view of queues, runs and hosts."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from msgspec.structs import replace

from batchml.aws.batch.jobs import IDLE, LIVE
from batchml.cli.app import app
from batchml.cli.options import AllProjects, Env, Json, Project, open_context
from batchml.cli.output import print_json, print_line
from batchml.cli.render import (
    cells,
    cut,
    narrow_columns,
    printable,
    run_json,
    table,
    time_json,
    timestamp,
)
from batchml.cli.terminal import Rest, Screen, reading_keys, screen
from batchml.cluster.service import HostPrices, narrow, open_poller, poll_pause
from batchml.cluster.snapshot import ClusterSnapshot, RunRow, with_queue_names
from batchml.cluster.tables import (
    LONGEST,
    age_text,
    compute_json,
    held_and_asked,
    host_json,
    host_lines,
    host_or_reason,
    missing_line,
    position_json,
    queue_json,
    state_word,
    total_json,
    total_line,
)
from batchml.errors import ServiceError, ServiceUnreachable
from batchml.local.machine import ProcessorMeter
from batchml.model.names import idle_text, short_id
from batchml.model.run import describe_state
from batchml.runs.commands.usage import USED, cells_of, memory, number
from batchml.runs.find import check_queues

_MEASURED = 0.25  # seconds in which the use of this machine is measured for a single view
FEW = 20  # the most runs or hosts to show without a terminal
NODES = 8  # the most lines for the nodes of a run
SORTS = ("state", "age", "cpu", "gpu")  # orders of runs; the key s takes the next

# Columns that a narrow window leaves out, the first one first.
_QUEUE_GIVES_WAY = (
    "SUBMITTED", "PENDING", "MEMORY", "PRIORITY", "STARTING", "GPUS", "VCPUS", "NEXT WAITS FOR",
)  # fmt: skip
_HOST = "HOST (REASON)"
_LEAST_HOST = 16  # cells to which the column _HOST may be cut
_RUN_GIVES_WAY = ("QUEUE", "GPU MEM", "OUT", "IN", "MEMORY")  # before _HOST is cut
_RUN_GIVES_WAY_LATER = ("GPU", "CPU", _HOST, "ID")  # after _HOST is cut


class TopView(NamedTuple):
    """The view that the user's keys choose: hosts or runs, and the order of runs."""

    hosts: bool = False
    sort: str = SORTS[0]

    def after(self, key: str) -> "TopView":
        """The view after a key is pressed."""
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
            return "q quits, h shows runs"
        return f"q quits, h shows hosts, s sorts by {self.next_sort}"


@app.command(epilog="Example: batchml top --queue gpu")
def top(
    queue: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Show only this queue. May be repeated."),
    ] = None,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Show compute environments and hosts, not runs.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Update at this interval.")
    ] = 3.0,
    once: Annotated[bool, typer.Option("--once", help="Print the tables once and exit.")] = False,
    all_: AllProjects = False,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Show queues, the project's runs, and hosts live, and their usage.

    A waiting run shows its position among all runs of the queue, (#1) is next, and the reason.
    VCPUS 12+40: held by running runs, and requested by waiting runs. Keys: h switches
    between runs and hosts, s sorts runs, q or Ctrl-C quits. Without a terminal, and with --json, it
    prints once.
    """
    context = open_context(env, project, all_projects=all_)
    queues = [context.queue(name) for name in queue or ()]
    check_queues(context.batch, queues)
    poller, add_prices, view = open_poller(context), HostPrices(context).add_to, TopView(hosts)
    only = "" if all_ else context.project

    def poll() -> ClusterSnapshot:
        snapshot = poller.poll(queues)
        return narrow(context, snapshot, only, queues) if only else snapshot

    is_once = once or not sys.stdout.isatty()
    meter = ProcessorMeter() if context.settings.is_local and not json_ else None

    def poll_for_people() -> ClusterSnapshot:
        if meter and is_once:  # before the poll, which is work of ours
            context.clock.sleep(_MEASURED)
        machine_cpu = meter.measure() if meter else None
        return replace(with_queue_names(poll(), context.resource_label), machine_cpu=machine_cpu)

    if json_:
        print_json(_json(add_prices(poll()), context.env, only))
    elif is_once:
        snapshot = poll_for_people()
        snapshot = add_prices(snapshot) if hosts else snapshot
        print_line(_view(snapshot, context.env, screen(), FEW, view=view))
    else:
        with reading_keys(context.clock.sleep) as rest:
            now = context.clock.now
            _live(poll_for_people, add_prices, view, context.env, every, rest, now)


def _live(
    poll: Callable[[], ClusterSnapshot],
    add_prices: Callable[[ClusterSnapshot], ClusterSnapshot],
    view: TopView,
    env: str,
    every: float,
    rest: Rest,
    now: Callable[[], float],
) -> None:
    """Draw snapshots until the user presses q or Ctrl-C. `rest` sleeps, and returns a pressed key.

    `add_prices` asks AWS for prices. It is called only when hosts are shown.
    """
    from rich.console import Console
    from rich.live import Live

    console, snapshot = Console(), ClusterSnapshot(0)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                trouble = ""
                try:
                    snapshot = poll()
                except (ServiceError, ServiceUnreachable) as error:
                    if not snapshot.at:  # an error of the first poll will not pass
                        raise
                    trouble = f"AWS does not answer; these are the last values. Retrying: {error}"
                until = now() + poll_pause(snapshot.calls, every)
                key = " "
                while key:  # a key changes the view at once
                    snapshot = add_prices(snapshot) if view.hosts else snapshot
                    _draw(live, console, snapshot, env, trouble, view)
                    key = rest(max(0.0, until - now()))
                    if key == "q":
                        return
                    view = view.after(key)
    except KeyboardInterrupt:
        return


def _draw(
    live: Any, console: Any, snapshot: ClusterSnapshot, env: str, trouble: str, view: TopView
) -> None:
    from rich.text import Text

    tables = len(snapshot.computes) if view.hosts else len(snapshot.queues)
    extra = bool(trouble) + (snapshot.hosts is not None) + bool(snapshot.missing)
    extra += bool(snapshot.others)
    room = console.size.height - tables - 6 - extra
    on = screen()._replace(width=console.size.width)
    text = Text.from_ansi(_view(snapshot, env, on, max(1, room), trouble, view.hint, view))
    text.no_wrap, text.overflow = True, "ellipsis"
    live.update(text, refresh=True)


def _view(
    snapshot: ClusterSnapshot,
    env: str,
    on: Screen,
    most: int,
    trouble: str = "",
    hint: str = "",
    view: TopView = TopView(),  # noqa: B008  (a TopView is immutable)
) -> str:
    """One screen of text, no wider than the window if possible."""
    top = f"{env}  {timestamp(snapshot.at)[:19].replace('T', ' ')}Z"
    total = total_line(snapshot)
    lines = [f"{top}  {hint}".rstrip(), *([total] if total else [])]
    lines += [printable(trouble.replace("\n", " ")), ""] if trouble else [""]
    if view.hosts:
        lines += host_lines(snapshot, on, most)
    else:
        rows = narrow_columns(_queue_rows(snapshot), on.width, _QUEUE_GIVES_WAY)
        lines += [table(rows, on), "", *_run_lines(snapshot, on, most, view.sort)]
    missing = missing_line(snapshot)
    return "\n".join([*lines, *([missing] if missing else [])])


def _run_lines(snapshot: ClusterSnapshot, on: Screen, most: int, sort: str) -> list[str]:
    runs = "1 run" if snapshot.others == 1 else f"{snapshot.others} runs"
    rest = [f"{runs} of other projects: --all shows them."] if snapshot.others else []
    if not snapshot.runs:
        return rest or ["Nothing runs and nothing waits."]
    first = _take_lines(_sort(snapshot.runs, sort), most)
    rows = narrow_columns(_run_rows(first, snapshot), on.width, _RUN_GIVES_WAY)
    rows = narrow_columns(_cut_hosts(rows, on.width), on.width, _RUN_GIVES_WAY_LATER)
    more = len(snapshot.runs) - len(first)
    return [table(rows, on), *([f"and {more} more"] if more else []), *rest]


def _cut_hosts(rows: list[list[str]], width: int) -> list[list[str]]:
    """Cut the last column of a table that is too wide."""
    over = max(map(cells, table(rows, Screen()).splitlines())) - width
    if not width or over <= 0 or rows[0][-1] != _HOST:
        return rows
    longest = max(cells(row[-1]) for row in rows)
    most = max(_LEAST_HOST, longest - over)
    return [[*row[:-1], cut(row[-1], most)] for row in rows]


def _sort(rows: Sequence[RunRow], sort: str) -> Sequence[RunRow]:
    """Sort runs by age, the oldest first, or by usage, the largest first.

    A snapshot's runs are already sorted by state.
    """
    if sort == "age":
        return sorted(rows, key=lambda row: row.run.started_at or row.run.created_at or sys.maxsize)
    if sort in ("cpu", "gpu"):
        return sorted(rows, key=lambda row: -_total_usage(row, sort))
    return rows


def _total_usage(row: RunRow, name: str) -> float:
    """The usage of a run, or of all its nodes together; -1 if unknown."""
    usage = [each.usage[name] for each in (row, *row.nodes) if name in each.usage]
    return sum(usage) if usage else -1.0


def _queue_rows(snapshot: ClusterSnapshot) -> list[list[str]]:
    statuses = list(reversed(LIVE))
    rows = [["QUEUE", *(status.value for status in statuses), "VCPUS", "MEMORY", "GPUS", "PRIORITY",
             "STATE", "NEXT WAITS FOR"]]  # fmt: skip
    for queue in snapshot.queues:
        state = queue.state
        word = state_word(state.is_enabled, state.status) if state else ""
        rows.append(
            [
                printable(queue.name)[:LONGEST],
                *(number(queue.counts[status]) for status in statuses),
                held_and_asked(queue.vcpus, queue.asked_vcpus, queue.is_exact),
                memory(queue.memory_mib),
                held_and_asked(queue.gpus, queue.asked_gpus, queue.is_exact),
                str(state.priority) if state and len(snapshot.queues) > 1 else "",
                "" if word == "ENABLED" else word,
                printable(queue.reason),
            ]
        )
    return rows


def _take_lines(runs: Sequence[RunRow], most: int) -> list[RunRow]:
    """The first runs, in at most `most` lines; without their nodes if these need too many lines."""
    lines = len(runs)
    for row in runs:
        nodes = min(len(row.nodes), NODES)
        lines += nodes + (row.run.nodes > nodes > 0)  # and the line "and N more nodes"
    if lines > most:
        runs = [replace(row, nodes=()) for row in runs]
    return list(runs[:most])


def _run_rows(runs: Iterable[RunRow], snapshot: ClusterSnapshot) -> list[list[str]]:
    is_one = len(snapshot.hosts or ()) < 2  # the name of an only host tells nothing
    rows = [["ID", "NAME", "QUEUE", "STATUS", "FOR", *USED, _HOST]]
    for row in runs:
        run = row.run
        rows.append(
            [
                short_id(run.job_id),
                ("  " if row.head else "") + printable(run.name)[:LONGEST],
                printable(run.queue)[:LONGEST],
                _state_text(row),
                age_text(run, snapshot.at),
                *cells_of(run, row.usage),
                "" if is_one and row.hosts else host_or_reason(row),
            ]
        )
        for node in row.nodes[:NODES]:
            name = f"  node {node.run.node_index}"
            where = "" if is_one else host_or_reason(node)
            use = cells_of(run, node.usage)
            rows.append(["", name, "", _state_text(node), "", *use, where])
        left = run.nodes - min(len(row.nodes), NODES)
        if row.nodes and left:
            rows.append(["", f"  and {left} more nodes", *[""] * (len(rows[0]) - 2)])
    return rows


def _state_text(row: RunRow) -> str:
    """`RUNNING, idle 14 min`: a run of several nodes is idle if all of them are."""
    parts = [node for node in row.nodes if not node.run.status.is_terminal] or [row]
    idle = min(each.usage.get(IDLE, 0.0) for each in parts)
    return ", ".join(filter(None, (describe_state(row.run), idle_text(idle))))


def _json(snapshot: ClusterSnapshot, env: str, project: str = "") -> dict[str, Any]:
    return {
        "env": env,
        "project": project or None,
        "at": time_json(snapshot.at),
        "total": total_json(snapshot),
        "queues": [{"jobQueue": queue.name, **queue_json(queue)} for queue in snapshot.queues],
        "runs": [
            {
                **run_json(row.run),
                "project": row.run.project or None,
                "usage": row.usage or None,
                **position_json(row),
                **({"head": row.head} if row.head else {}),
                **({"nodes": list(map(_node_json, row.nodes))} if row.nodes else {}),
            }
            for row in snapshot.runs
        ],
        "computeEnvironments": [compute_json(row) for row in snapshot.computes],
        "hosts": None if snapshot.hosts is None else [host_json(row) for row in snapshot.hosts],
        "otherRuns": snapshot.others,
        "missing": list(snapshot.missing),
    }


def _node_json(row: RunRow) -> dict[str, Any]:
    return {
        "jobId": row.run.job_id,
        "status": row.run.status.value,
        "usage": row.usage or None,
    }
