"""The page of the cluster: queues, what waits and why, compute environments, hosts and their time.

All of it comes from one snapshot, which the hub takes anyway: looking costs no call to AWS.
"""

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlencode

from batchml.cli.render import timestamp
from batchml.client import Client
from batchml.clock import Clock
from batchml.cluster.rows import HostRow, vcpus_now
from batchml.cluster.snapshot import ClusterSnapshot, QueueRow, RunRow, with_queue_names
from batchml.cluster.tables import (
    held_and_asked,
    missing_line,
    percent,
    state_word,
    states_text,
    used_of,
)
from batchml.dashboard.app import PageQuery, Route, route
from batchml.dashboard.html import Child, Html, join, tag
from batchml.dashboard.hub import Hub
from batchml.dashboard.layout import STYLES, command_line, page
from batchml.dashboard.runs import note, state_mark
from batchml.dashboard.strips import NOT_KNOWN, WINDOWS, HostSpan, host_spans, strips
from batchml.errors import NotFound, ServiceUnreachable, UsageError
from batchml.model.hosts import HostResources
from batchml.model.names import short_duration
from batchml.runs.commands.usage import cells_of, memory
from batchml.runs.search import FoundRun

PATH = "/cluster"
MOST_ROWS = 100  # of a table; the numbers above it count all
DEFAULT_WINDOW = "1h"
PARTS = ("queues", "strips", "hosts")
STRIP_PACES = {"15m": 2, "1h": 5, "6h": 15, "24h": 30, "7d": 60}  # seconds between two drawings
OLD_AFTER = 20_000  # ms: a snapshot that is older is said to be old
_WORDS = {"15m": "15 min", "1h": "1 hour", "6h": "6 hours", "24h": "24 hours", "7d": "7 days"}


def read_window(given: str) -> str:
    """The time span of the strips. Raises UsageError."""
    if (given or DEFAULT_WINDOW) not in WINDOWS:
        raise UsageError(f"span={given}: choose one of {', '.join(WINDOWS)}.")
    return given or DEFAULT_WINDOW


def cluster_page(
    snapshot: ClusterSnapshot | None,
    runs: Iterable[FoundRun],
    now_ms: int,
    env: str,
    *,
    window: str = DEFAULT_WINDOW,
    trouble: str = "",
    env_option: str = "",
    is_patient: bool = True,
) -> Html:
    """The page. Without a snapshot, its content is asked for by the script, or by a link.

    Unless `is_patient`, strips of a long time are left to the script: they take a while to make.
    """
    is_long = WINDOWS[window] > WINDOWS["6h"] and not is_patient
    links = (
        tag("a", words, href=f"{PATH}?span={name}", aria_current="true" if name == window else None)
        for name, words in _WORDS.items()
    )
    choice = tag("nav", tag("span", "Hosts over the last", class_="dim"), *links,
                 class_="choice", aria_label="Time span")  # fmt: skip
    retry = tag("noscript", tag("a", "Look again", href=f"{PATH}?span={window}"))
    return page(
        "Cluster",
        tag("h1", "Cluster"),
        note(trouble),
        choice,
        *(
            tag(
                "div",
                cluster_panel(part, snapshot, runs, now_ms, window, trouble)
                if snapshot and not (is_long and part == "strips") else _waiting(part),
                data_panel=f"{PATH}/{part}?{urlencode({'span': window})}",
                data_pace=STRIP_PACES[window] if part == "strips" else None,
            )
            for part in PARTS
        ),
        None if snapshot else retry,
        tag("div", command_line(f"batchml top --hosts{env_option}"), class_="foot"),
        env=env, current=PATH, view="cluster", scripts=("theme.js", "app.js", "cluster.js"),
        styles=(*STYLES, "cluster.css"),
    )  # fmt: skip


def _waiting(part: str) -> Child:
    """What is in the place of a part that the script asks for."""
    if part == "strips":
        words = tag("p", "Drawing ...", class_="dim")
        return tag("div", _section("Hosts over time", words), class_="cards")
    return "Asking for queues and hosts ..." if part == "queues" else ""


def cluster_panel(
    part: str,
    snapshot: ClusterSnapshot,
    runs: Iterable[FoundRun],
    now_ms: int,
    window: str = DEFAULT_WINDOW,
    trouble: str = "",
) -> Html:
    """A part of the page, which is one of PARTS. Raises NotFound for another."""
    if part == "queues":
        missing = missing_line(snapshot)
        return join((
            _age_note(snapshot, now_ms, trouble),
            tag("p", missing, class_="warning") if missing else None,
            totals(snapshot),
            tag("div", _section("Queues", queue_table(snapshot)),
                _section("Waiting", waiting_table(snapshot)), class_="cards"),
        ))  # fmt: skip
    if part == "strips":
        found = host_spans(snapshot, runs, now_ms - WINDOWS[window], now_ms)
        strips_of = _section("Hosts over time", strips_section(snapshot, found, window, now_ms))
        return tag("div", strips_of, class_="cards")
    if part == "hosts":
        return tag(
            "div",
            _section("Running", running_table(snapshot)),
            _section("Hosts", host_table(snapshot)),
            _section("Compute environments", compute_table(snapshot)),
            class_="cards",
        )
    raise NotFound("Part of the page", part, PARTS, "")


def _section(title: str, *content: Child) -> Html:
    return tag("section", tag("h2", title), *content, class_="card wide")


def _age_note(snapshot: ClusterSnapshot, now_ms: int, trouble: str) -> Html | None:
    """A sentence above values that are old, which stay where they are."""
    age = now_ms - snapshot.at
    if not trouble and age < OLD_AFTER:
        return None
    why = "The environment does not answer" if trouble else "No newer ones have come"
    return tag("p", f"{why}: these values are {short_duration(age / 1000)} old.",
               class_="warning")  # fmt: skip


# --- totals ---------------------------------------------------------------------------------------


def _containers(number: int) -> str:
    return "container" if number == 1 else "containers"


def totals(snapshot: ClusterSnapshot) -> Html:
    """Numbers of the whole cluster, each with its unit."""
    total, resources = snapshot.total, snapshot.total.resources
    waiting = sum(queue.waiting for queue in snapshot.queues)
    running = sum(queue.running for queue in snapshot.queues)
    hosts = "-" if snapshot.hosts is None else str(sum(total.hosts.values()))
    price = "-" if total.price is None else f"${total.price:.2f}"
    tiles: list[tuple[str, str, Child]] = [
        ("Running", str(running), _containers(running)),
        ("Waiting", str(waiting), _containers(waiting)),
        ("Hosts", hosts, states_text(total.hosts, snapshot.is_local) or None),
        _tile_of("vCPUs", resources.used_vcpus, resources.vcpus),
        _tile_of("GPUs", resources.used_gpus, resources.gpus),
        ("Memory", _memory_of(resources) or "-", meter(resources.used_memory_mib,
                                                       resources.memory_mib)),
        ("CPU in use", "-" if total.cpu is None else percent(total.cpu),
         None if total.cpu is None else meter(total.cpu, 1)),
        ("Hosts cost", price, "an hour" if total.price is not None else None),
    ]  # fmt: skip
    if total.gpu is not None:
        tiles.insert(7, ("GPU in use", percent(total.gpu), meter(total.gpu, 1)))
    shown = (
        tag("div", tag("dt", name), tag("dd", tag("strong", value), " ", more))
        for name, value, more in tiles
    )
    return tag("dl", *shown, class_="tiles")


def _tile_of(name: str, used: float, had: float) -> tuple[str, str, Child]:
    return name, used_of(used, had).replace("/", " of ") or "-", meter(used, had)


def meter(part: float, whole: float) -> Html | None:
    """A bar of a part of a whole; None if there is no whole. The numbers are beside it."""
    if not whole:
        return None
    width = f"{min(100.0, max(0.0, 100 * part / whole)):.1f}%"
    return tag("svg", tag("rect", class_="track", width="100%", height=6, rx=3),
               tag("rect", class_="fill", width=width, height=6, rx=3),
               class_="meter", width="100%", height=6, aria_hidden="true")  # fmt: skip


def _memory_of(resources: HostResources) -> str:
    if not resources.memory_mib:
        return ""
    return f"{memory(resources.used_memory_mib) or '0'} of {memory(resources.memory_mib)}"


# --- tables ---------------------------------------------------------------------------------------


def data_table(
    caption: str, headings: Sequence[str], rows: Sequence[Sequence[Child]], *, number: str = ""
) -> Html:
    """A table whose first cell names the row. `number`: a letter for each column, n is right."""
    kinds = [
        None if kind != "n" else "number" for kind in number.ljust(len(headings))[: len(headings)]
    ]
    heading = tag("tr", *(tag("th", text, scope="col", class_=kind)
                          for text, kind in zip(headings, kinds, strict=True)))  # fmt: skip
    body = (
        tag("tr", *(
            tag("td" if place else "th", "-" if cell in (None, "") else cell, class_=kind,
                scope=None if place else "row")
            for place, (cell, kind) in enumerate(zip(row, kinds, strict=True))
        ))
        for row in rows
    )  # fmt: skip
    table = tag("table", tag("caption", caption, class_="unseen"), tag("thead", heading),
                tag("tbody", *body))  # fmt: skip
    return tag("div", table, class_="within", tabindex="0", role="region", aria_label=caption)


def queue_table(snapshot: ClusterSnapshot) -> Html:
    """Queues, the highest priority first, with why the next of each waits."""
    rows = [_queue_cells(row) for row in sorted(
        snapshot.queues, key=lambda row: (-(row.state.priority if row.state else 0), row.name))
    ]  # fmt: skip
    if not rows:
        return tag("p", "No queues: `batchml queue create NAME` makes one.", class_="dim")
    headings = ("Queue", "Waiting", "Running", "Next waits for", "vCPUs running+waiting",
                "GPUs running+waiting", "Compute environment", "Order", "Priority",
                "State")  # fmt: skip
    return data_table("Queues", headings, rows, number=" nn nn  n")


def _queue_cells(row: QueueRow) -> list[Child]:
    state = row.state
    reason = row.reason
    if state is not None and state.status != "VALID" and state.status_reason:
        reason = state.status_reason
    return [
        row.name, str(row.waiting), str(row.running),
        _why(reason, row.head),
        held_and_asked(row.vcpus, row.asked_vcpus, row.is_exact),
        held_and_asked(row.gpus, row.asked_gpus, row.is_exact),
        ", ".join(state.environments) if state else None,
        ("fair share" if state.policy else "first come") if state else None,
        str(state.priority) if state else None,
        state_word(state.is_enabled, state.status).lower() if state else None,
    ]  # fmt: skip


def _why(reason: str, head: str) -> Html | None:
    """Why the next run of a queue waits, with a link to it."""
    if head:
        return tag("a", reason or "not known", href=f"/run/{head}", title=reason or None)
    return tag("span", reason, title=reason) if reason else None


def run_link(row: RunRow, *, is_part: bool = False) -> Html:
    return tag("a", f"{'  ' if is_part else ''}{row.run.name}", href=f"/run/{row.run.job_id}",
               title=row.run.job_id)  # fmt: skip


def waiting_table(snapshot: ClusterSnapshot) -> Html:
    """Runs that wait, by queue and position, with the reason."""
    waiting = [row for row in snapshot.runs if not row.run.status.holds_resources
               and not any(each.run.status.holds_resources for each in row.nodes)
               and not _has_running_children(row)]  # fmt: skip
    if not waiting:
        return tag("p", "Nothing waits.", class_="dim")
    rows: list[list[Child]] = [
        [
            run_link(row), str(row.position) if row.position is not None else None,
            tag("span", row.reason, title=row.reason) if row.reason else None, row.run.queue,
            _requests(row), _since(snapshot, row.run.created_at),
        ]
        for row in waiting[:MOST_ROWS]
    ]  # fmt: skip
    headings = ("Run", "Position", "Why it waits", "Queue", "Request", "Waits for")
    table = data_table("Waiting runs", headings, rows, number=" n   n")
    return join((table, _more(len(waiting), "waiting runs", "/?q=runnable")))


def _has_running_children(row: RunRow) -> bool:
    return any(row.run.children.get(state) for state in ("STARTING", "RUNNING"))


def running_table(snapshot: ClusterSnapshot) -> Html:
    """Runs that hold hosts, with what they use of what they requested."""
    running = [row for row in snapshot.runs if row.run.status.holds_resources
               or _has_running_children(row)]  # fmt: skip
    if not running:
        return tag("p", "Nothing runs. This starts a run: ", tag("code", "batchml submit lenet"),
                   class_="dim")  # fmt: skip
    rows: list[list[Child]] = []
    for row in running[:MOST_ROWS]:
        for number, part in enumerate((row, *row.nodes)):
            run = part.run
            name = run_link(row) if not number else f"node {run.node_index}"
            *used, gpu_memory, _, _ = cells_of(row.run, part.usage)
            cpu, mem, gpu = map(_use_of, used)
            rows.append([
                name, state_mark(FoundRun(run, None)),
                run.queue if not number else None, ", ".join(part.hosts),
                _since(snapshot, run.started_at or run.created_at), cpu, mem, gpu, gpu_memory,
            ])  # fmt: skip
    headings = ("Run", "State", "Queue", "Host", "Runs for", "CPU", "Memory", "GPU", "GPU memory")
    table = data_table("Running runs", headings, rows, number="    nnnnn")
    return join((table, _more(len(running), "running runs", "/?q=running")))


def _use_of(cell: str) -> str:
    """`3.1/8` as `3.1 of 8`; a request of which the use is not known, as `- of 8`."""
    if not cell:
        return ""
    return cell.replace("/", " of ") if "/" in cell else f"- of {cell}"


def _more(count: int, what: str, path: str) -> Html | None:
    if count <= MOST_ROWS:
        return None
    return tag(
        "p", f"The first {MOST_ROWS} of {count} {what}: ", tag("a", "all of them", href=path)
    )


def _requests(row: RunRow) -> str:
    run = row.run
    parts = [f"{run.vcpus} vCPU" if run.vcpus else "", memory(run.memory_mib),
             f"{run.gpus} GPU" if run.gpus else "", f"{run.neurons} Neuron" if run.neurons else "",
             f"{run.nodes} nodes" if run.nodes else "",
             f"{run.array_size} children" if run.array_size else ""]  # fmt: skip
    return ", ".join(filter(None, parts))


def _since(snapshot: ClusterSnapshot, at: int | None) -> Html | None:
    if not at:
        return None
    words = short_duration(round(max(0, snapshot.at - at) / 1000))
    return tag("time", words, datetime=timestamp(at), title=f"since {timestamp(at)[:19]}Z")


def compute_table(snapshot: ClusterSnapshot) -> Html:
    if not snapshot.computes:
        return tag("p", "No compute environments are known.", class_="dim")
    rows: list[list[Child]] = []
    for row in snapshot.computes:
        state = row.state
        now = vcpus_now(state, row.resources, is_local=snapshot.is_local)
        kind = "spot" if state.is_spot else "on-demand" if state.is_managed else "unmanaged"
        is_bad = state.status not in ("VALID", "UPDATING")
        rows.append([
            state.name,
            join((f"{now} of {state.max_vcpus}", meter(now, state.max_vcpus)))
            if state.is_managed else None,
            str(state.min_vcpus) if state.is_managed else None,
            "this machine" if snapshot.is_local else kind,
            ", ".join(state.instance_types),
            states_text(row.hosts),
            used_of(row.resources.used_vcpus, row.resources.vcpus).replace("/", " of "),
            used_of(row.resources.used_gpus, row.resources.gpus).replace("/", " of "),
            state_word(state.is_enabled, state.status).lower(),
            tag("span", state.status_reason, title=state.status_reason) if is_bad else None,
        ])  # fmt: skip
    headings = ("Compute environment", "vCPUs now, at most", "vCPUs at least", "Kind",
                "Instance types", "Hosts",
                "vCPUs used", "GPUs used", "State", "Note")  # fmt: skip
    return data_table("Compute environments", headings, rows, number=" nn   nn  ")


# --- hosts ----------------------------------------------------------------------------------------


def strips_section(
    snapshot: ClusterSnapshot, found: Mapping[str, Sequence[HostSpan]], window: str, now_ms: int
) -> Html:
    """Strips of time, and the same attempts as a table."""
    labels = {row.host.name: _label(row) for row in snapshot.hosts or ()}
    if not labels and not any(found.values()):
        return tag("p", "No run was on a host in this time.", class_="dim")
    return join((
        strips(found, labels, window, now_ms),
        tag("p", "Times in ", tag("span", "UTC", data_zone=window != "7d"), ". A bar is an attempt "
            "of a run.", class_="dim"),
        _spans_table(found) if any(found.values()) else None,
    ))  # fmt: skip


def _label(row: HostRow) -> Html:
    host = row.host
    kind = " ".join(
        filter(
            None,
            ("spot" if row.spot else "", host.type if host.type != host.name else "", host.zone),
        )
    )
    return join((tag("strong", host.name), " ", tag("span", host.state.value, class_="chip"), " ",
                 tag("span", kind, class_="dim") if kind else None))  # fmt: skip


def host_table(snapshot: ClusterSnapshot) -> Html:
    if snapshot.hosts is None:
        return tag("p", "AWS does not say which hosts there are.", class_="dim")
    if not snapshot.hosts:
        words = "No hosts: AWS Batch starts hosts for waiting runs and ends them afterwards."
        return tag("p", words, class_="dim")
    rows: list[list[Child]] = []
    hosts = snapshot.hosts
    for row in hosts[:MOST_ROWS]:
        host, resources, use = row.host, row.host.resources, row.usage
        cpu = percent(use["cpu"] / resources.vcpus) if "cpu" in use and resources.vcpus else None
        gpu = percent(use["gpu"] / resources.gpus) if "gpu" in use and resources.gpus else None
        price = None if row.price is None else f"${row.price:.2f}"
        rows.append([
            host.name, host.state.value, ", ".join(row.computes),
            used_of(resources.used_vcpus, resources.vcpus).replace("/", " of "),
            used_of(resources.used_gpus, resources.gpus).replace("/", " of "),
            _memory_of(resources), cpu, gpu, str(max(host.tasks, len(row.runs))),
            _since(snapshot, host.since), price,
        ])  # fmt: skip
    headings = ("Host", "State", "Compute environment", "vCPUs", "GPUs", "Memory", "CPU in use",
                "GPU in use", "Runs", "Up for", "Price an hour")  # fmt: skip
    table = data_table("Hosts", headings, rows, number="   nnnnnnnn")
    more = f"and {len(hosts) - MOST_ROWS} more hosts" if len(hosts) > MOST_ROWS else None
    return join((table, tag("p", more, class_="dim") if more else None))


def _spans_table(found: Mapping[str, Sequence[HostSpan]]) -> Html:
    """The newest bars of the strips as a table."""
    spans = [(span.start, host, span) for host, each in found.items() for span in each]
    spans.sort(key=lambda each: -each[0])
    rows: list[list[Child]] = [
        [
            tag("a", span.name, href=f"/run/{span.job_id.partition('#')[0]}", title=span.job_id),
            "not known" if host == NOT_KNOWN else host, span.state,
            tag("time", f"{timestamp(start)[:19].replace('T', ' ')}", datetime=timestamp(start)),
            short_duration(round((span.stop - start) / 1000)),
        ]
        for start, host, span in spans[:MOST_ROWS]
    ]  # fmt: skip
    headings = ("Run", "Host", "State", "From (UTC)", "Took")
    table = data_table("Runs by host", headings, rows, number="    n")
    every = f"{len(spans):,} bar{'' if len(spans) == 1 else 's'} as a table"
    count = every if len(spans) <= MOST_ROWS else f"The newest {MOST_ROWS} of {every}"
    return tag("details", tag("summary", count, id="bars-name"), table, id="bars")


# --- routes ---------------------------------------------------------------------------------------


class ClusterPages:
    """The routes of the page of the cluster, which reads the hub's snapshot."""

    def __init__(self, client: Client, hub: Hub, clock: Clock) -> None:
        self._client, self._hub, self._clock = client, hub, clock

    @property
    def _now(self) -> int:
        return int(self._clock.now() * 1000)

    def routes(self) -> list[Route]:
        return [route(PATH, self.page), route(f"{PATH}/*", self.part)]

    def _snapshot(self) -> ClusterSnapshot | None:
        """The last snapshot, with names of queues for people."""
        found, label = self._hub.cluster, self._client.resource_label
        return with_queue_names(found, label) if found else None

    def page(self, query: PageQuery) -> Html:
        window = read_window(query.params.get("span", ""))
        return cluster_page(
            self._snapshot(), self._hub.snapshot()[1], self._now, self._client.env, window=window,
            trouble=self._hub.trouble, env_option=self._client.env_option, is_patient=False,
        )  # fmt: skip

    def part(self, query: PageQuery) -> Html:
        window, snapshot = read_window(query.params.get("span", "")), self._snapshot()
        if snapshot is None:
            if self._hub.trouble:
                raise ServiceUnreachable(self._hub.trouble)
            return tag("p", "Asking for queues and hosts ...", class_="dim")
        runs = self._hub.snapshot()[1]
        return cluster_panel(query.parts[0], snapshot, runs, self._now, window, self._hub.trouble)
