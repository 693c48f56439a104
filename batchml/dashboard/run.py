"""The page of one run: what happened, why, what it printed, what it used, what it costs."""

import shlex
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from batchml.cli.render import timestamp
from batchml.client import Client
from batchml.cluster.snapshot import RunRow
from batchml.dashboard.curves import SCRIPTS as CURVES
from batchml.dashboard.curves import STYLES, ChartWindow, RunSeries, colours_of, curves_section
from batchml.dashboard.html import Html, join, tag
from batchml.dashboard.layout import facts, nothing, page
from batchml.dashboard.logs import log_section
from batchml.dashboard.runs import chips, note, state_mark, state_of
from batchml.handles import RunHandle
from batchml.model.names import short_duration
from batchml.model.run import OutcomeClass, Run, classify, first_start
from batchml.runs.metrics.series import Series
from batchml.runs.search import FoundRun

_LINKED = 200  # children
_AHEAD = 5  # runs before a waiting one
_USE = {
    "cpu": "CPUs", "memory": "Memory in MiB", "gpu": "GPU in %", "gpu_memory": "GPU memory in MiB",
    "net_in": "Network in, B/s", "net_out": "Network out, B/s",
}  # fmt: skip


def run_page(
    found: FoundRun, env: str, trouble: str = "", revision: int | None = None,
    state_now: Html | None = None,
) -> Html:  # fmt: skip
    """The frame of the page. Its panels are asked for one by one: none waits for another.

    `state_now`: the content of the panel of the state, if it is known already.
    """
    job_id = found.job_id
    state = _panel("State", f"/run/{job_id}/state", "third", state_now, live=True)
    # Its title depends on the state, and comes with it. A run that does well has none.
    none = nothing() if state_of(found) in ("running", "succeeded") else None
    explained = tag("div", none, data_panel=f"/run/{job_id}/explanation", data_live=True)
    why = tag("section", explained, class_="card rest")
    timeline = _panel("Timeline", f"/run/{job_id}/timeline", "wide", live=True)
    numbers = [
        _panel("Metrics", f"/run/{job_id}/metrics", "third", live=True),
        _panel("Use", f"/run/{job_id}/usage", "rest", live=True),
        _panel("Cost", f"/run/{job_id}/cost", "third", live=True),
        _panel("Outputs", f"/run/{job_id}/outputs", "rest", live=True),
    ]
    request = [
        _panel("Request", f"/run/{job_id}/request"),
        _panel("Environment", f"/run/{job_id}/environment"),
        _panel("Code", f"/run/{job_id}/code", "wide"),
    ]
    is_over = found.run is None or found.run.status.is_terminal
    place = curves_section(f"/run/{job_id}/series", is_over=is_over)
    curves = tag("section", tag("h2", "Curves"), place, class_="card wide", id="curves")
    over_time = curves_section(f"/run/{job_id}/use", is_over=is_over)
    use = tag("section", tag("h2", "Use over time"), over_time, class_="card wide", id="use")
    log = log_section(job_id)
    # What a person looks for first: after a failure the reason and the last lines, else the curves.
    first = [timeline, curves, use, log]
    if state_of(found) == "failed":
        first = [log, timeline, curves, use]
    return page(
        f"{found.name} {found.shown_id[:8]}",
        tag("h1", found.name, " ", tag("small", found.shown_id[:8], class_="dim")), note(trouble),
        tag("div", data_panel=f"/run/{job_id}/actions", data_live=True),
        tag("div", why, state, *first, *numbers, *request, class_="cards", data_revision=revision),
        env=env, current="", view="run", styles=STYLES,
        scripts=("theme.js", "app.js", "act.js", "log.js", *CURVES, "run.js"),
    )  # fmt: skip


def _panel(
    title: str, path: str, width: str = "", content: Html | None = None, *, live: bool = False
) -> Html:  # fmt: skip
    body = tag("div", content, data_panel=path, data_live=live)
    return tag("section", tag("h2", title), body, class_=f"card {width}".rstrip())


def state_panel(run: Run, now_ms: int, rows: Sequence[RunRow] = ()) -> Html:
    """The state in words, times, and for a waiting run its place in the queue and why it waits.

    `rows`: the unfinished runs of the cluster.
    """
    found = FoundRun(run, None)
    row = next((each for each in rows if each.run.job_id == run.job_id), None)
    times = found.times(now_ms)
    outcome = classify(run).outcome.value if run.status.is_terminal else None
    return join((
        tag("p", state_mark(found)),
        facts([
            ("Outcome", outcome),
            ("Reason", run.status_reason),
            ("Submitted", _time(run.created_at)),
            ("Waited", None if times.waited is None else _span(times.waited)),
            ("Started", _time(times.started)),
            ("Ran", None if times.ran is None else _span(times.ran)),
            ("Exit code", None if run.exit_code is None else str(run.exit_code)),
            ("Queue", run.queue),
            ("Position", _position(row, rows) if row else None),
            ("Waits because", row.reason if row else None),
            ("Ahead of it", _ahead(row, rows) if row else None),
            ("Hosts", ", ".join(row.hosts) if row else None),
            ("Children", _children(run)),
            ("Attempts", str(len(run.attempts)) if len(run.attempts) > 1 else None),
        ]),
    ))  # fmt: skip


def _position(row: RunRow, rows: Sequence[RunRow]) -> Html | None:
    """`2 of 5`: its position, and the number of runs whose positions are known."""
    if not row.position:
        return None
    last = max(each.position or 0 for each in rows if each.run.queue == row.run.queue)
    return tag("span", f"{row.position} of {last} in the queue", data_waits=True)


def _ahead(row: RunRow, rows: Sequence[RunRow]) -> Html | None:
    """Links to the runs that are next in its queue."""
    known = [(each.position, each.run) for each in rows
             if each.position and each.run.queue == row.run.queue]  # fmt: skip
    ahead = sorted((place, run.name, run.job_id) for place, run in known
                   if place < (row.position or 0))  # fmt: skip
    if not ahead:
        return None
    links = (tag("a", f"{place}. {name}", href=f"/run/{job_id}")
             for place, name, job_id in ahead[:_AHEAD])  # fmt: skip
    more = tag("a", f"and {len(ahead) - _AHEAD} more", href="/cluster")
    return join((*links, *([more] if len(ahead) > _AHEAD else [])), ", ")


def _children(run: Run) -> Html | None:
    """The number of children in each state."""
    if not run.children:
        return None
    counts = join((tag("span", f"{count} {name}", class_="chip")
                   for name, count in run.children.items() if count), " ")  # fmt: skip
    links = [tag("a", str(number), href=f"/run/{run.job_id}:{number}")
             for number in range(min(run.array_size, _LINKED))]  # fmt: skip
    more = f" and {run.array_size - _LINKED} more" if run.array_size > _LINKED else None
    each = tag("details", tag("summary", "Each child"), tag("div", *links, class_="numbers"), more)
    return join((counts, each))


def _span(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if 0 < seconds < 1 else short_duration(seconds)


def _time(ms: int | None) -> Html | None:
    if not ms:
        return None
    return tag("time", timestamp(ms)[:19].replace("T", " ") + " UTC", datetime=timestamp(ms))


def metrics_panel(handle: RunHandle) -> Html:
    """The last value of each metric; the script keeps them as new as the curves."""
    last = handle.metrics()
    if not last:
        return tag("p", "No metrics: [metrics] in job.toml reads them from the output. ",
                   tag("code", "batchml adopt SCRIPT"), " writes it for what a script prints.",
                   class_="dim")  # fmt: skip
    rows = (
        tag("tr", tag("th", name, scope="row"), tag("td", f"{value:.4g}", class_="number",
            title=repr(value), data_metric=name))
        for name, value in last.items()
    )  # fmt: skip
    table = tag("table", tag("caption", "Last values", class_="unseen"), tag("tbody", *rows))
    return tag("div", table, class_="within", tabindex="0", role="region", aria_label="Last values")


def usage_panel(handle: RunHandle) -> Html:
    """Use of each node beside its request."""
    samples = handle.usage()
    seen = handle.seen.run if handle.seen else None
    known = [each.node.run for each in samples] or ([seen] if seen else [])
    is_over = all(run.status.is_terminal for run in known)
    if is_over and not any(each.usage for each in samples):
        return tag("p", "It ended before its use was measured.", class_="dim")
    if not samples:
        return tag("p", "Nothing was measured yet: a running container reports its use every few "
                   "seconds.", class_="dim")  # fmt: skip
    heading = ("Node", "State", "CPU", "Memory", "GPU", "GPU memory", "Network in", "Network out")
    rows = [tag("tr", *(tag("th", name, scope="col", class_="number" if place > 1 else None)
                        for place, name in enumerate(heading)))]  # fmt: skip
    for sample in samples:
        run, use = sample.node.run, sample.usage
        measured = (
            ("cpu", run.vcpus, ""), ("memory", run.memory_mib, "MiB"), ("gpu", None, "%"),
            ("gpu_memory", None, "MiB"), ("net_in", None, "B/s"), ("net_out", None, "B/s"),
        )  # fmt: skip
        cells = (
            sample.node.name, run.status.value,
            *(use_words(run, name, use.get(name), asked, unit) for name, asked, unit in measured),
        )  # fmt: skip
        rows.append(tag("tr", *(tag("td", cell, class_="number" if place > 1 else None)
                                for place, cell in enumerate(cells))))  # fmt: skip
    return tag("div", tag("table", *rows), class_="within", tabindex="0", role="region",
               aria_label="Use by node")  # fmt: skip


def use_words(
    run: Run, name: str, used: float | None, asked: float | None, unit: str
) -> str:  # fmt: skip
    """`1.5 of 2`. The last value was measured before a run had used up its memory."""
    if used is None:
        return "-"
    of = f" of {asked:g}" if asked else ""
    if name == "memory" and classify(run).outcome is OutcomeClass.OUT_OF_MEMORY:
        return f"all{of} {unit}, measured before: {used:.4g}"
    return f"{used:.4g}{of} {unit}".rstrip()


def cost_panel(handle: RunHandle) -> Html:
    bill = handle.cost()
    low, high = bill.usd.low, bill.usd.high
    words = f"${low:.4f}" if low == high else f"${low:.4f} to ${high:.4f}"
    if not high:
        words = "$0"
    unknown = tag("p", "; ".join(map(str, bill.unknown)), class_="dim") if bill.unknown else None
    is_over = handle.seen is None or handle.seen.run is None or handle.seen.run.status.is_terminal
    return join((tag("p", tag("strong", words), None if is_over else " so far"), unknown))


def request_panel(found: FoundRun) -> Html:
    run = found.run
    batchml = {name: value for name, value in found.tags.items() if name.startswith("batchml:")}
    own = {name: value for name, value in found.tags.items() if name not in batchml}
    return facts([
        ("Job id", found.shown_id),
        ("Command", tag("code", shlex.join(found.command)) if found.command else None),
        ("Parameters", chips(found.params.items()) if found.params else None),
        ("Resources", _resources(run) if run else None),
        ("Tags", chips(own.items()) if own else None),
        ("Tags of batchml", chips(batchml.items()) if batchml else None),
    ])  # fmt: skip


def environment_panel(found: FoundRun) -> Html:
    """What the program found around it. Values of variables are not shown: they may be secrets."""
    run, record = found.run, found.record
    spec: dict[str, Any] = record.spec if record else {}
    launch = (spec.get("launch") or {}).get("kind")
    names = sorted({*(run.environment if run else {}), *(spec.get("env") or {})})
    own = [name for name in names if not name.startswith(("BATCHML_", "AWS_"))]
    asked = run or record
    return facts([
        ("Image", asked.image if asked else None),
        ("Job definition", run.definition if run else None),
        ("Host", run.host if run else None),
        ("Nodes", str(run.nodes) if run and run.nodes else None),
        ("Launch", launch if launch != "plain" else None),
        ("Variables", ", ".join(own) if own else None),
        ("Secrets", chips((spec.get("secrets") or {}).items()) if spec.get("secrets") else None),
        ("Data sets", chips(found.data_sets.items()) if found.data_sets else None),
        ("Data folder", found.data_dir),
        ("Timeout of an attempt", short_duration(run.timeout) if run and run.timeout else None),
        ("Attempts at most", str(run.max_attempts) if run and run.max_attempts > 1 else None),
        ("Budget", f"${record.max_cost:g}" if record and record.max_cost else None),
        ("Share", run.share if run else None),
    ])  # fmt: skip


def _resources(run: Run) -> str:
    gpus = f", {run.gpus} GPU" if run.gpus else ""
    return f"{run.vcpus:g} vCPU, {run.memory_mib} MiB{gpus}"


def run_series(
    handle: RunHandle, window: ChartWindow | None = None, known: dict[str, Series] | None = None
) -> RunSeries:
    """Every value of each metric of a run, for its curves; or those in a window. `known`: values
    that have been read."""
    seen = handle.seen
    started = first_start(seen.run) if seen and seen.run else None
    directions = seen.record.directions if seen and seen.record else {}
    series = known
    if series is None:
        series = handle.series(window.samples_of(started) if window else None)
    return RunSeries(handle.job_id, "", series, started, 0, directions)


def use_series(handle: RunHandle) -> list[RunSeries]:
    """The use of CPU, memory, GPU and network over time, a line for each node."""
    found = []
    for sample in handle.usage(whole=True):
        run = sample.node.run
        asked = {"cpu": run.vcpus, "memory": run.memory_mib}
        series = {
            f"{title}, {asked[name]:g} requested" if asked.get(name) else title: sample.series[name]
            for name, title in _USE.items() if name in sample.series
        }  # fmt: skip
        found.append(RunSeries(run.job_id, sample.node.name, series, None))
    colours = colours_of([each.job_id for each in found])
    return [replace(each, colour=colours[each.job_id]) for each in found]


def open_run(client: Client, word: str) -> RunHandle:
    """The run of a path. Raises NotFound."""
    return client.run(word)
