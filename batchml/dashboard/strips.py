"""What ran on each host, as a strip of time: which attempts, in which rows, drawn as SVG.

The drawing has no scripts: a bar is placed by percent of the width, so it fits every window. The
same runs are in a table beside it, for readers of texts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from batchml.cli.render import timestamp
from batchml.cluster.snapshot import ClusterSnapshot
from batchml.dashboard.html import Html, join, tag
from batchml.dashboard.runs import GLYPHS, state_of
from batchml.model.names import short_duration
from batchml.model.run import Run
from batchml.runs.search import FoundRun

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000  # ms
WINDOWS = {"15m": 15 * MINUTE, "1h": HOUR, "6h": 6 * HOUR, "24h": DAY, "7d": 7 * DAY}
_TICKS = {"15m": 3 * MINUTE, "1h": 10 * MINUTE, "6h": HOUR, "24h": 4 * HOUR, "7d": DAY}
NOT_KNOWN = ""  # the host of arrays, and of multi-node runs that have ended
MOST_BARS = 300  # of one host; with more, short runs share a bar
MOST_LANES = 16  # of one host
MOST_HOSTS = 60
LANE = 20  # px
_LEAST = 0.4  # percent of the width


class HostSpan(Struct, frozen=True):
    """The time of an attempt on a host; or of several short ones (`count`). Times are in ms."""

    start: int
    stop: int
    job_id: str
    name: str
    state: str  # a word of GLYPHS
    host: str = ""
    is_running: bool = False
    count: int = 1


def host_spans(
    snapshot: ClusterSnapshot, runs: Iterable[FoundRun], since: int, now_ms: int
) -> dict[str, list[HostSpan]]:
    """Host -> what ran there after `since`, the earliest first. Present hosts come first.

    The snapshot knows unfinished runs and nodes better than the list of runs, which may be older.
    """
    rows = snapshot.hosts or ()
    names = {key: row.host.name for row in rows for key in (row.host.id, row.host.instance) if key}
    found: dict[str, list[HostSpan]] = {row.host.name: [] for row in rows}
    only = rows[0].host.name if snapshot.is_local and len(rows) == 1 else ""
    live = {row.run.job_id: row for row in snapshot.runs}
    containers = [part.run for row in live.values() for part in (row.nodes or (row,))]
    known = [each.run for each in runs if each.run and each.job_id not in live
             and not (each.run.stopped_at and each.run.stopped_at < since)]  # fmt: skip
    for run in (*containers, *known):
        for span in _spans(run, now_ms):
            if span.stop >= since:
                host = only or names.get(span.host, span.host)
                found.setdefault(host, []).append(span)
    for spans in found.values():
        spans.sort(key=lambda each: (each.start, each.job_id))
    unknown = found.pop(NOT_KNOWN, [])
    return {**found, **({NOT_KNOWN: unknown} if unknown else {})}


def _spans(run: Run, now_ms: int) -> Iterator[HostSpan]:
    state = state_of(FoundRun(run, None))
    end = run.stopped_at if run.status.is_terminal else now_ms
    name = run.name if run.node_index is None else f"{run.name} node {run.node_index}"
    attempts = [each for each in run.attempts if each.started_at]
    for number, each in enumerate(attempts, 1):
        is_last = number == len(attempts)
        start, stop = each.started_at or 0, each.stopped_at or (end if is_last else None)
        is_running = is_last and not each.stopped_at and not run.status.is_terminal
        host = each.host or (run.host if is_last else "")
        shown = state if is_last else "failed"  # another attempt followed
        yield HostSpan(start, max(start, stop or start), run.job_id, name, shown, host, is_running)
    if not attempts and run.started_at and (run.array_size or run.nodes or run.host):
        stop = max(run.started_at, end or run.started_at)
        is_running = not run.status.is_terminal
        yield HostSpan(run.started_at, stop, run.job_id, name, state, run.host, is_running)


def gather_short(spans: Sequence[HostSpan], since: int, until: int) -> list[HostSpan]:
    """The spans; of many, short neighbours share one: below a 200th of the window, or longer."""
    found = list(spans)
    for part in (200, 100, 50, 25):
        if len(found) <= MOST_BARS:
            break
        found = _gather(spans, (until - since) / part, since, (until - since) / 100)
    return found


def _gather(spans: Iterable[HostSpan], short: float, since: int, pace: float) -> list[HostSpan]:
    """The spans, of which those below `short` share one for each state and each `pace` ms."""
    kept: list[HostSpan] = []
    groups: dict[tuple[int, str], list[HostSpan]] = {}
    for each in spans:
        start = max(each.start, since)
        if each.stop - start >= short or each.is_running:
            kept.append(each)
        else:
            groups.setdefault((int((start - since) / pace), each.state), []).append(each)
    for (place, _), group in groups.items():
        if len(group) == 1:
            kept.append(group[0])
            continue
        start = int(since + place * pace)
        stop = int(start + pace * 0.8)  # so that neighbours have a gap
        kept.append(replace(group[0], start=start, stop=stop, count=len(group)))
    return sorted(kept, key=lambda each: (each.start, each.state == "failed", each.job_id))


def pack(spans: Iterable[HostSpan], gap: float = 0) -> tuple[list[list[HostSpan]], int]:
    """Rows in which no two spans overlap, and the number of spans for which no row was left."""
    lanes: list[list[HostSpan]] = []
    left = 0
    for each in spans:
        lane = next((row for row in lanes if row[-1].stop + gap <= each.start), None)
        if lane is not None:
            lane.append(each)
        elif len(lanes) < MOST_LANES:
            lanes.append([each])
        else:
            left += 1
    return lanes, left


# --- drawing --------------------------------------------------------------------------------------


def ticks(window: str, until: int) -> list[int]:
    """The times of the axis within a window that ends at `until`, in ms."""
    step, since = _TICKS[window], until - WINDOWS[window]
    first = -(-since // step) * step
    return list(range(first, until, step))


def axis(window: str, until: int) -> Html:
    """The times of a window. The script shows clock times in the zone of the browser."""
    since, is_days = until - WINDOWS[window], window == "7d"
    texts = [
        tag("text", timestamp(at)[5:10] if is_days else timestamp(at)[11:16],
            x=f"{_percent(at, since, until):.2f}%", y=12, data_time=None if is_days else at)
        for at in ticks(window, until) if 3 < _percent(at, since, until) < 93
    ]  # fmt: skip
    now = tag("text", "now", x="100%", y=12, class_="end")
    return tag("svg", *texts, now, class_="axis", height=16, width="100%", aria_hidden="true")


def strip(spans: Sequence[HostSpan], window: str, until: int) -> tuple[Html, int]:
    """The strip of one host, and the number of runs for which it has no place."""
    since = until - WINDOWS[window]
    lanes, left = pack(gather_short(spans, since, until), gap=(until - since) / 800)
    height = max(1, len(lanes)) * LANE + 4
    lines = (
        tag("line", x1=f"{at:.2f}%", x2=f"{at:.2f}%", y1=0, y2=height)
        for at in (_percent(each, since, until) for each in ticks(window, until))
    )
    bars = (
        _bar(each, 3 + number * LANE, since, until)
        for number, lane in enumerate(lanes) for each in lane
    )  # fmt: skip
    drawn = tag("svg", *lines, *bars, class_="strip", height=height, width="100%",
                aria_hidden="true")  # fmt: skip
    return drawn, left


def _bar(span: HostSpan, y: int, since: int, until: int) -> Html:
    left, right = (_percent(each, since, until) for each in (span.start, span.stop))
    left = min(left, 100 - _LEAST)
    words = f"{span.count:,} runs" if span.count > 1 else span.name
    took = "" if span.count > 1 else f", {short_duration((span.stop - span.start) / 1000)}"
    title = f"{words}, {span.state}{took}, from {timestamp(span.start)[:19]}Z"
    inner = tag(
        "svg",
        tag("rect", width="100%", height=LANE - 3, rx=3),
        tag("text", f"{GLYPHS[span.state]} {words}", x=5, y=13),
        x=f"{left:.3f}%", y=y, width=f"{max(_LEAST, right - left):.3f}%", height=LANE - 3,
    )  # fmt: skip
    shown = [tag("title", title), inner]
    if span.count > 1:
        return tag("g", *shown, class_=f"bar-of {span.state}")
    path = f"/run/{span.job_id.partition('#')[0]}"
    return tag("a", *shown, class_=f"bar-of {span.state}", href=path, tabindex="-1")


def _percent(at: int, since: int, until: int) -> float:
    return min(100.0, max(0.0, 100 * (at - since) / (until - since)))


def strips(found: Mapping[str, Sequence[HostSpan]], labels: Mapping[str, Html], window: str,
           until: int) -> Html:  # fmt: skip
    """The strips of all hosts under one another. `labels`: of hosts that are there now."""
    shown = [host for host in found if host in labels or found[host]]
    hosts = shown[:MOST_HOSTS]
    items = []
    for host in hosts:
        drawn, left = strip(found[host], window, until)
        label = labels.get(host) or _label_of_former(host)
        more = tag("p", f"and {left} more at the same time", class_="dim") if left else None
        items.append(tag("li", tag("div", label, class_="strip-label"), drawn, more))
    rest = len(shown) - len(hosts)
    return join((
        tag("div", axis(window, until), class_="strip-axis"),
        tag("ol", *items, class_="strips"),
        tag("p", f"and {rest} more hosts", class_="dim") if rest else None,
    ))  # fmt: skip


def _label_of_former(host: str) -> Html:
    if host == NOT_KNOWN:
        return join((tag("strong", "Host not known"), " ",
                     tag("span", "arrays and former multi-node runs", class_="dim")))  # fmt: skip
    return join((tag("strong", host), " ", tag("span", "has ended", class_="dim")))
