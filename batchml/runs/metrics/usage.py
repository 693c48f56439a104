"""Resource usage of the nodes of a run, slow ranks, and restarts of ranks, from marks in logs."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import fsum
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from batchml.aws.batch.jobs import IDLE, RANKS, USAGE, LiveApi, LogMark
from batchml.cli.render import time_json
from batchml.errors import BatchmlError
from batchml.model.group import GROUP_TAG
from batchml.model.names import format_used
from batchml.model.numbering import format_ranges
from batchml.model.outcome import is_supervised, restarts_in_place
from batchml.model.run import JobStatus, Record, Run
from batchml.runs.metrics.pace import PaceLog
from batchml.runs.metrics.reading import RunMetrics, read_metrics
from batchml.runs.metrics.series import Sample, SampleCollector, Series
from batchml.runtime.protocol.launch import AGAIN
from batchml.runtime.protocol.log_marks import parse_mark, read_ranks

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.runs.groups.members import GroupWorkers
    from batchml.runs.search import FoundRun

MAX_NODES = 64  # containers that are described in one call
WINDOW = 600_000  # ms at the end of a log that are read for the current usage
READING_TIME = 5.0  # seconds for which logs are read; the rest is not read
MAX_MARK_AGE = 120_000  # ms; an older mark does not show current usage
WAITED, CPU = "waited", "cpu"  # the evidence that a rank is slow
MIN_WAIT = 10.0  # percent of the time that the other ranks wait; less does not matter
_WAIT_RATIO = 0.25  # a slow rank waits at most this part of the time that the others wait
_MIN_CPU_GAP = 25.0  # percent of CPU time that the others use less than a slow rank
_MIN_CORES = 0.2  # a rank that uses less CPU is not a slow rank


class NodeRun(Struct, frozen=True):
    """A container of a run with several: a node, or the head or a worker of a group run."""

    name: str  # "node 1", "head", "workers 3"
    run: Run


class UsageSample(Struct, frozen=True):
    """The newest values of the `usage`, `ranks` and `idle` marks of a node, as in log_marks.py.

    `series` has all values of `usage` over time. `waits`: what an idle node waits for; "" if that
    is unknown.
    """

    node: NodeRun
    usage: dict[str, float] = {}
    ranks: dict[int, dict[str, float]] = {}
    series: dict[str, Series] = {}
    waits: str = ""

    @property
    def idle(self) -> float:
        """The seconds for which the node has done nothing; 0 for a busy node."""
        return self.usage.get(IDLE, 0.0)


class SlowRank(Struct, frozen=True):
    """Ranks that all others wait for.

    `others` is a percentage: how long the others wait, or how much less CPU they use, according to
    `evidence`.
    """

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    others: float
    evidence: str


def collect_usage(
    nodes: Sequence[NodeRun], marks: Iterable[LogMark], now: int
) -> list[UsageSample]:
    """The usage of each node, from its marks. Old marks of a running node do not count."""
    owners = {each.log_stream: i for i, node in enumerate(nodes) for each in node.run.attempts}
    usage: dict[int, dict[str, float]] = {}
    ranks: dict[int, dict[int, dict[str, float]]] = {}
    series: dict[int, dict[str, SampleCollector]] = {}
    waits: dict[int, str] = {}
    for mark in marks:
        owner, said = owners.get(mark.stream), parse_mark(mark.message)
        if owner is None or said is None:
            continue
        kind, words = said
        run = nodes[owner].run
        is_now = mark.stream == run.attempts[-1].log_stream and (
            run.status.is_terminal or now - mark.at <= MAX_MARK_AGE
        )
        if kind == "usage":
            used = {name: float(value) for name, value in words.items()}
            for name, value in used.items():
                one = series.setdefault(owner, {}).setdefault(name, SampleCollector())
                one.add(Sample(value, mark.at / 1000, None))
            if is_now:
                usage[owner] = used
            if IDLE not in used:
                waits.pop(owner, None)
        elif kind == IDLE and is_now:
            waits[owner] = words["waits"]
        elif kind == "ranks" and is_now:
            ranks[owner] = read_ranks(words)
    return [
        UsageSample(
            node,
            usage.get(i, {}),
            ranks.get(i, {}),
            {n: g.series(n) for n, g in series.get(i, {}).items()},
            waits.get(i, ""),
        )
        for i, node in enumerate(nodes)
    ]


def find_slow_ranks(uses: Iterable[UsageSample]) -> SlowRank | None:
    """The ranks that all others wait for; None if there are none, or if it is not clear.

    They are at most a quarter of the ranks, or all ranks of one node and at most half of all. The
    best evidence is the waiting time that programs report (`batchml.runtime.progress`): a slow rank
    waits least. Without reports it is CPU time: a rank that waits for a message uses less. Ranks on
    GPUs use CPU time while they wait, so that for them CPU time is no evidence.
    """
    node_of: dict[int, str] = {}
    figures: dict[int, dict[str, float]] = {}
    for use in uses:
        for rank, told in use.ranks.items():
            node_of[rank], figures[rank] = use.node.name, told
    waited = {rank: told[WAITED] for rank, told in figures.items() if WAITED in told}
    if waited:
        found = _by_wait(waited, node_of) if len(waited) == len(figures) else None
        evidence = WAITED
    else:
        is_gpu = any("gpu_memory" in told for told in figures.values())
        cpu = {rank: told.get(CPU, 0.0) for rank, told in figures.items()}
        found = None if is_gpu else _by_cpu(cpu, node_of)
        evidence = CPU
    if found is None:
        return None
    ranks, others = found
    nodes = tuple(dict.fromkeys(node_of[rank] for rank in ranks))
    return SlowRank(tuple(ranks), nodes, others, evidence)


def _by_wait(
    waited: Mapping[int, float], node_of: Mapping[int, str]
) -> tuple[list[int], float] | None:
    usual = sorted(waited.values())[3 * len(waited) // 4]  # the upper quartile
    slow = sorted(rank for rank, share in waited.items() if share <= usual * _WAIT_RATIO)
    if usual < MIN_WAIT or not _are_few(slow, node_of):
        return None
    from statistics import median  # late: few runs have slow ranks

    return slow, median(share for rank, share in waited.items() if rank not in slow)


def _by_cpu(cpu: Mapping[int, float], node_of: Mapping[int, str]) -> tuple[list[int], float] | None:
    most = max(cpu.values(), default=0.0)
    slow = sorted(rank for rank, cores in cpu.items() if cores >= 0.9 * most)
    if most < _MIN_CORES or not _are_few(slow, node_of):
        return None
    from statistics import median

    less = [100 * (1 - cores / most) for rank, cores in cpu.items() if rank not in slow]
    return (slow, median(less)) if min(less) >= _MIN_CPU_GAP else None


def _are_few(slow: Sequence[int], node_of: Mapping[int, str]) -> bool:
    """True if there are enough other ranks to call these slow."""
    if len({node_of[rank] for rank in slow}) == 1:
        is_node = len(slow) == sum(node == node_of[slow[0]] for node in node_of.values())
        return len(slow) <= (len(node_of) // 2 if is_node else max(1, len(node_of) // 4))
    return 0 < len(slow) <= len(node_of) // 4


def describe_slow_ranks(slow: SlowRank) -> str:
    """A sentence about slow ranks, with the evidence."""
    numbers = format_ranges(list(slow.ranks))
    who = f"rank {numbers}" if len(slow.ranks) == 1 else f"ranks {numbers}"
    one = "is the slow one" if len(slow.ranks) == 1 else "are the slow ones"
    where = f"{who} on {', '.join(slow.nodes)}"
    it = "it" if len(slow.ranks) == 1 else "them"
    if slow.evidence == WAITED:
        return f"{where} {one}: the others wait {slow.others:.0f} % of a step for {it}"
    one = one.replace("is the", "may be the").replace("are the", "may be the")
    return (
        f"{where} {one}, by CPU time alone: the others compute {slow.others:.0f} % less. "
        "batchml.runtime.progress(step, waited=seconds) would show it"
    )


# --- Use beside request ---------------------------------------------------------------------------


class ResourceUse(Struct, frozen=True):
    """The use of a container beside its request, over its last attempt, or the last ten minutes."""

    vcpus: int
    cpu: float  # cores, the mean
    memory_mib: int
    memory: float  # MiB, the most; 0 if unknown
    gpus: int
    gpu: float | None  # GPUs, the mean; None if unknown
    seconds: float  # of the attempt

    @property
    def unused(self) -> float | None:
        """The part of the request that was not used: of the GPUs if there are any, else of the
        vCPUs. None if unknown.
        """
        if self.gpus:
            return None if self.gpu is None else max(0.0, 1 - self.gpu / self.gpus)
        return max(0.0, 1 - self.cpu / self.vcpus) if self.vcpus else None


def use_of(sample: UsageSample) -> ResourceUse | None:
    """The use of a container beside its request; None before it has reported any."""
    run, last = sample.node.run, sample.usage
    cpu = last.get("mean_cpu", _mean_of(sample, "cpu"))
    if cpu is None:
        return None
    gpu = last.get("mean_gpu", _mean_of(sample, "gpu"))
    memory = sample.series.get("memory")
    began, series = (run.attempts[-1].started_at or 0) / 1000, sample.series.get("cpu")
    return ResourceUse(
        run.vcpus,
        cpu,
        run.memory_mib,
        last.get("most_memory", max(memory.values) if memory else 0.0),
        run.gpus,
        None if gpu is None else gpu / 100 * run.gpus,
        last.get("seconds", max(0.0, series.samples[-1].time - began) if series else 0.0),
    )


def _mean_of(sample: UsageSample, name: str) -> float | None:
    series = sample.series.get(name)
    return fsum(series.values) / len(series.values) if series else None


def unused_part(uses: Iterable[ResourceUse]) -> float | None:
    """The part of the requests of several containers that was not used, weighted by their time.

    None if it is unknown, or if only some of them have GPUs, whose price differs.
    """
    known = list(uses)
    parts = [(each.unused, each.seconds) for each in known if each.unused is not None]
    total = sum(seconds for _, seconds in parts)
    if not total or len({bool(each.gpus) for each in known}) > 1:
        return None
    return sum(part * seconds for part, seconds in parts) / total


def describe_use(use: ResourceUse) -> str:
    """`0.93 of 4 vCPU, 1.4 of 2 GPU, 812 of 2048 MiB`."""
    words = [f"{format_used(use.cpu)} of {use.vcpus} vCPU"]
    words += [f"{format_used(use.gpu)} of {use.gpus} GPU"] if use.gpu is not None else []
    words += [f"{use.memory:.0f} of {use.memory_mib} MiB"] if use.memory else []
    return ", ".join(words)


def use_json(use: ResourceUse | None) -> dict[str, float | None] | None:
    """The use for `--json`: mean cores and GPUs, the most memory in MiB."""
    if use is None:
        return None
    return {
        "vcpus": round(use.cpu, 3),
        "memory": use.memory or None,
        "gpus": None if use.gpu is None else round(use.gpu, 3),
    }


# --- Idle runs ------------------------------------------------------------------------------------


def idle_seconds(uses: Sequence[UsageSample]) -> float:
    """The seconds for which all running nodes of a run have done nothing; 0 if a node is busy."""
    running = [use for use in uses if not use.node.run.status.is_terminal]
    return min((use.idle for use in running), default=0.0)


def describe_idle_nodes(uses: Sequence[UsageSample]) -> list[str]:
    """What idle nodes use and wait for: `node 1: 0.02 cores; rank 1 waits to connect to ...`.

    A run of one container has no node names.
    """
    return [
        f"{f'{use.node.name}: ' if len(uses) > 1 else ''}{_describe_idle_use(use)}"
        f"{'; ' if use.waits else ''}{use.waits}"
        for use in uses
        if use.idle
    ]


def _describe_idle_use(use: UsageSample) -> str:
    parts = [f"{use.usage.get(CPU, 0.0):.2f} cores"]
    if "net_in" in use.usage:
        parts.append(f"network {max(use.usage['net_in'], use.usage.get('net_out', 0.0)):.0f} B/s")
    if "gpu" in use.usage:
        parts.append(f"GPU {use.usage['gpu']:.0f} %")
    return ", ".join(parts)


LEAST_IDLE = 120_000  # ms; the runtime reports that a run is idle after so long


def read_idle_seconds(context: "Context", runs: Sequence[Run], now: int) -> dict[str, float]:
    """Job id -> seconds, for the idle runs among these. `now`: in ms since the epoch.

    One call for all runs, and one more if some have several nodes; none if no run has run for two
    minutes. Without access to logs there are none.
    """
    old = [
        run for run in runs
        if run.status is JobStatus.RUNNING and now - (run.started_at or now) >= LEAST_IDLE
    ][:MAX_NODES]  # fmt: skip
    found = [NodeRun(run.job_id, run) for run in old if not run.nodes and run.attempts]
    ids = {f"{run.job_id}#{i}": run.job_id for run in old for i in range(run.nodes)}
    try:
        described = context.describe(list(ids)[:MAX_NODES]) if ids else {}
    except BatchmlError:
        described = {}
    found += [NodeRun(ids[each], run) for each, run in described.items() if run.attempts]
    by_run: dict[str, list[UsageSample]] = {}
    for use in read_usage(context, found, within=MAX_MARK_AGE):
        by_run.setdefault(use.node.name, []).append(use)
    seconds = {job_id: idle_seconds(uses) for job_id, uses in by_run.items()}
    return {job_id: each for job_id, each in seconds.items() if each}


# --- Curves ---------------------------------------------------------------------------------------

CHARTS = {
    "cpu": "CPU, cores",
    "memory": "memory, MiB",
    "gpu": "GPU, percent",
    "gpu_memory": "GPU memory, MiB",
    "net_in": "network in, MB/s",
    "net_out": "network out, MB/s",
}
_MEGA = {"net_in": 1e6, "net_out": 1e6}


def usage_charts(uses: Sequence[UsageSample]) -> dict[str, dict[str, Series]]:
    """The curves of usage: title -> node -> curve, for each kind of usage that a node reported."""
    found: dict[str, dict[str, Series]] = {}
    for name, title in CHARTS.items():
        by = _MEGA.get(name, 1.0)
        for use in uses:
            series = use.series.get(name)
            if series is not None and series.samples:
                scaled = tuple(each._replace(value=each.value / by) for each in series.samples)
                found.setdefault(title, {})[use.node.name] = Series(name, scaled)
    return found


# --- Restarts of ranks in place, from the main node's log -----------------------------------------


RESTART_FILTER = f'"{AGAIN}"'  # a filter pattern of CloudWatch Logs
SHOWN = 5  # the last restarts are described
_PREFIX = "batchml: "  # of messages of the runtime


class Restart(Struct, frozen=True):
    """A restart of all ranks in their containers."""

    at: int  # ms since the epoch
    why: str  # "node 1 does not answer any more"


def find_restarts(marks: Iterable[LogMark]) -> list[Restart]:
    """The restarts that the runtime reports in these messages, by time."""
    found = []
    for mark in marks:
        text = mark.message.strip()
        if text.startswith(_PREFIX) and text.endswith(AGAIN):
            why = text.removeprefix(_PREFIX).removesuffix(AGAIN).strip().rstrip(".")
            found.append(Restart(mark.at, why[:1].lower() + why[1:]))
    return sorted(found, key=lambda each: each.at)


UNFIT_FILTER = '"is unfit"'
_UNFIT = r"batchml: (?:.*: )?this host \(([^)]*)\) is unfit: (.*)"


class UnfitNotice(Struct, frozen=True):
    """The runtime left a host because a health check failed there."""

    at: int  # ms since the epoch
    host: str
    why: str  # "GPU 3 has fallen off the bus; another one is tried"


def find_unfit_notices(marks: Iterable[LogMark]) -> list[UnfitNotice]:
    """The notices of unfit hosts in these messages, by time."""
    matches = ((mark, re.match(_UNFIT, mark.message.strip())) for mark in marks)
    found = [UnfitNotice(mark.at, match[1], match[2]) for mark, match in matches if match]
    return sorted(found, key=lambda each: each.at)


def restarts_text(found: Sequence[Restart], is_whole: bool = True) -> str:
    """`2 times in place: node 1 is gone, at 10:42; rank 3 on node 1 ended with 1, at 11:05 UTC`.

    Restarts on several days have dates. `is_whole` is False if only part of a long log was read.
    """
    if not found:
        return ""
    days = len({_format_time(each.at, "%F") for each in found}) > 1
    form = "%m-%d %H:%M" if days else "%H:%M"
    count = f"{'' if is_whole else 'at least '}{_format_count(len(found))}"
    last = ", the last of them" if len(found) > SHOWN else ""
    told = "; ".join(f"{each.why}, at {_format_time(each.at, form)}" for each in found[-SHOWN:])
    return f"{count} in place{last}: {told} UTC"


def restarts_json(found: Sequence[Restart]) -> dict[str, Any]:
    """The restarts for `--json`; {} without restarts."""
    return (
        {"restarts": [{"at": time_json(each.at), "why": each.why} for each in found]}
        if found
        else {}
    )


def _format_count(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _format_time(ms: int, form: str) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime(form)


# --- Reading the logs of nodes, in few calls ------------------------------------------------------


def find_nodes(
    context: "Context", found: "FoundRun", parts: "Sequence[GroupWorkers]"
) -> list[NodeRun]:
    """The nodes of a multi-node run, or the head and workers of a group run, that have begun.

    For a single node the list has that node; for any other run it is empty. At most one call.
    """
    run = found.run
    if run is None or not (run.started_at or run.attempts):
        return []
    if run.node_index is not None:
        return [NodeRun(f"node {run.node_index}", run)] if run.attempts else []
    known = {"head": run} if parts else {}
    asked = {f"node {i}": f"{run.job_id}#{i}" for i in range(run.nodes)}
    for part in parts:
        workers = part.found.run if part.found else None
        if workers is None:
            continue
        if workers.array_size:
            size = range(workers.array_size)
            asked |= {f"{part.group} {i}": f"{workers.job_id}:{i}" for i in size}
        elif workers.attempts:
            known[part.group] = workers
    asked = dict(list(asked.items())[:MAX_NODES])
    told = context.describe(list(asked.values())) if asked else {}
    known |= {name: told[job_id] for name, job_id in asked.items() if job_id in told}
    return [NodeRun(name, each) for name, each in known.items() if each.attempts]


def own_container(run: Run | None) -> list[NodeRun]:
    """The container of a run that has only one, and has begun."""
    is_single = run is not None and run.attempts and not (run.nodes or run.array_size)
    return [NodeRun(run.name, run)] if run is not None and is_single else []


def read_usage(
    context: "Context", nodes: Sequence[NodeRun], whole: bool = False, within: int = WINDOW
) -> list[UsageSample]:
    """The newest usage of these nodes, with curves of the last ten minutes (`within`, in ms), or of
    the `whole` run.

    One call finds a hundred streams; more calls read them. Without access to logs there is no
    usage.
    """
    if not nodes:
        return []
    now = int(context.clock.now() * 1000)
    live = LiveApi(context.connect())
    end = context.clock.monotonic() + READING_TIME

    def marks() -> Iterator[LogMark]:
        for group in sorted({node.run.log_group for node in nodes}):
            runs = [node.run for node in nodes if node.run.log_group == group]
            tried = [one for run in runs for one in (run.attempts if whole else run.attempts[-1:])]
            streams = sorted({one.log_stream for one in tried if one.log_stream})
            begun = min((one.started_at or 0 for one in tried), default=0)
            over = all(run.status.is_terminal for run in runs)
            last = max((one.stopped_at or now for one in tried), default=now) if over else now
            since = begun if whole else max(begun, last - within)
            for mark in live.read_marks(group, streams, since, (USAGE, RANKS, IDLE)):
                yield mark
                if context.clock.monotonic() > end:
                    return

    seen: list[LogMark] = []
    try:
        for mark in marks():
            seen.append(mark)
    except BatchmlError:
        pass  # usage is optional information
    return collect_usage(nodes, seen, now)


def read_unused_part(context: "Context", run: Run) -> float | None:
    """The part of a run's request that it did not use, as in `unused_part`; None if unknown.

    Of a run with several containers, the first `MAX_NODES` count. Head and workers of a group run
    request different resources, so nothing is known of them. At most one call, and few for logs.
    """
    if GROUP_TAG in run.tags:
        return None
    children = [f"{run.job_id}#{i}" for i in range(run.nodes)]
    children += [f"{run.job_id}:{i}" for i in range(run.array_size or 0)]
    told = context.describe(children[:MAX_NODES]).values() if children else [run]
    nodes = [NodeRun(each.name, each) for each in told if each.attempts]
    uses = map(use_of, read_usage(context, nodes))
    return unused_part(each for each in uses if each is not None)


def read_run_metrics(
    context: "Context",
    run: Run,
    nodes: Sequence[NodeRun],
    record: Record | None,
    beside: PaceLog | None = None,
) -> RunMetrics:
    """Read the metrics of a run; if ranks train together, those of the main node, with rank 0.

    `beside` reads the same lines.
    """
    from msgspec.structs import replace

    if nodes and is_supervised(run):
        main = next((each.run for each in nodes if each.run.node_index in (0, None)), None)
        run = replace(run, attempts=main.attempts) if main else run
    return read_metrics(context, run, record, beside)


def read_restarts(
    context: "Context", run: Run | None, nodes: Sequence[NodeRun]
) -> tuple[list[Restart], bool]:
    """The restarts in all attempts, and True if the whole log was searched.

    One call, and more for a long log; none for a run without ranks. Without access to logs there
    are no restarts.
    """
    if run is None or run.node_index is not None or not restarts_in_place(run):
        return [], True
    main = next((each.run for each in nodes if each.run.node_index == 0), None)
    found, is_whole = _read_messages(context, [main or run], RESTART_FILTER)
    return find_restarts(found), is_whole


def read_unfit_notices(
    context: "Context", run: Run | None, nodes: Sequence[NodeRun]
) -> list[UnfitNotice]:
    """The hosts that a run or its nodes have left as unfit. One call for a hundred attempts, more
    for a long log. Without access to logs there are none.
    """
    runs = [each.run for each in nodes] or ([run] if run is not None else [])
    return find_unfit_notices(_read_messages(context, runs, UNFIT_FILTER)[0])


def _read_messages(
    context: "Context", runs: Sequence[Run], pattern: str
) -> tuple[list[LogMark], bool]:
    """The lines of all attempts that match a filter pattern; False if not all were searched."""
    attempts = [each for run in runs for each in run.attempts if each.log_stream]
    if not attempts:
        return [], True
    begun = min(each.started_at or 0 for each in attempts)
    streams = [each.log_stream for each in attempts]
    end = context.clock.monotonic() + READING_TIME

    def has_time() -> bool:
        return context.clock.monotonic() < end

    found: list[LogMark] = []
    live = LiveApi(context.connect())
    try:
        for mark in live.filter_lines(runs[0].log_group, streams, begun, pattern, has_time):
            found.append(mark)
    except BatchmlError:
        return found, False
    return found, has_time()
