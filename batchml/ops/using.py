"""What each node of a run uses, and which rank is slow, from the marks in their logs. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from msgspec import Struct

from batchml.aws.batch.jobs import Mark
from batchml.model.run import Run
from batchml.ops.metrics import Gathered, Sample, Series
from batchml.ops.rerun import ranges
from batchml.runtime.protocol.log_marks import parse_mark, read_ranks

AGE = 120_000  # ms: what was said before that is not of now
WAITED, CPU = "waited", "cpu"  # the evidence that a rank is slow
LEAST_WAIT = 10.0  # percent of the time that the others wait: less is no matter
_PART = 0.25  # of what the others wait, at most, does the slow one wait itself
_LESS_CPU = 25.0  # percent less than the slow one is what the others compute at least
_BUSY = 0.2  # cores: who computes less holds nobody up


class Node(Struct, frozen=True):
    """One container of a run of several: a node, or of a gang the head or a worker."""

    name: str  # "node 1", "head", "workers 3"
    run: Run


class Use(Struct, frozen=True):
    """`usage` and `ranks` as runtime/protocol/log_marks.py has them, the newest; else empty."""

    node: Node
    usage: dict[str, float] = {}
    ranks: dict[int, dict[str, float]] = {}
    series: dict[str, Series] = {}  # of usage, over time


class Slow(Struct, frozen=True):
    """Ranks that all others wait for. `others`: percent of the time that these wait, or by which
    they compute less.
    """

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    others: float
    evidence: str


def collect(nodes: Sequence[Node], marks: Iterable[Mark], now: int) -> list[Use]:
    """What the marks say of each node. Of one that has not ended only what is not old is told."""
    owners = {each.log_stream: i for i, node in enumerate(nodes) for each in node.run.attempts}
    usage: dict[int, dict[str, float]] = {}
    ranks: dict[int, dict[int, dict[str, float]]] = {}
    series: dict[int, dict[str, Gathered]] = {}
    for mark in marks:
        owner, said = owners.get(mark.stream), parse_mark(mark.message)
        if owner is None or said is None:
            continue
        kind, words = said
        run = nodes[owner].run
        is_now = mark.stream == run.attempts[-1].log_stream and (
            run.status.is_terminal or now - mark.at <= AGE
        )
        if kind == "usage":
            used = {name: float(value) for name, value in words.items()}
            for name, value in used.items():
                one = series.setdefault(owner, {}).setdefault(name, Gathered())
                one.add(Sample(value, mark.at / 1000, None))
            if is_now:
                usage[owner] = used
        elif kind == "ranks" and is_now:
            ranks[owner] = read_ranks(words)
    return [
        Use(
            node,
            usage.get(i, {}),
            ranks.get(i, {}),
            {n: Series(n, tuple(g.samples())) for n, g in series.get(i, {}).items()},
        )
        for i, node in enumerate(nodes)
    ]


def slow_ranks(uses: Iterable[Use]) -> Slow | None:
    """The ranks that hold all others up, if that is clear: a quarter of them at most, or all of one
    node, and as many others.

    Best by what programs say (`batchml.runtime.progress`): who waits least, while the others wait.
    Where none says so, by CPU time: who waits for a message computes less. Not where ranks use
    GPUs, whose waiting is busy, too.
    """
    homes: dict[int, str] = {}
    figures: dict[int, dict[str, float]] = {}
    for use in uses:
        for rank, told in use.ranks.items():
            homes[rank], figures[rank] = use.node.name, told
    waited = {rank: told[WAITED] for rank, told in figures.items() if WAITED in told}
    if waited:
        found = _by_wait(waited, homes) if len(waited) == len(figures) else None
        evidence = WAITED
    else:
        is_gpu = any("gpu_memory" in told for told in figures.values())
        cpu = {rank: told.get(CPU, 0.0) for rank, told in figures.items()}
        found = None if is_gpu else _by_cpu(cpu, homes)
        evidence = CPU
    if found is None:
        return None
    ranks, others = found
    nodes = tuple(dict.fromkeys(homes[rank] for rank in ranks))
    return Slow(tuple(ranks), nodes, others, evidence)


def _by_wait(
    waited: Mapping[int, float], homes: Mapping[int, str]
) -> tuple[list[int], float] | None:
    usual = sorted(waited.values())[3 * len(waited) // 4]  # of those that do wait
    slow = sorted(rank for rank, share in waited.items() if share <= usual * _PART)
    if usual < LEAST_WAIT or not _are_few(slow, homes):
        return None
    return slow, median(share for rank, share in waited.items() if rank not in slow)


def _by_cpu(cpu: Mapping[int, float], homes: Mapping[int, str]) -> tuple[list[int], float] | None:
    most = max(cpu.values(), default=0.0)
    slow = sorted(rank for rank, cores in cpu.items() if cores >= 0.9 * most)
    if most < _BUSY or not _are_few(slow, homes):
        return None
    less = [100 * (1 - cores / most) for rank, cores in cpu.items() if rank not in slow]
    return (slow, median(less)) if min(less) >= _LESS_CPU else None


def _are_few(slow: Sequence[int], homes: Mapping[int, str]) -> bool:
    """Whether the others are many enough to say that these are slow, and not the others quick."""
    if len({homes[rank] for rank in slow}) == 1:
        is_node = len(slow) == sum(home == homes[slow[0]] for home in homes.values())
        return len(slow) <= (len(homes) // 2 if is_node else max(1, len(homes) // 4))
    return 0 < len(slow) <= len(homes) // 4


def slow_text(slow: Slow) -> str:
    """One sentence for people, which says by what it is known."""
    numbers = ranges(list(slow.ranks))
    who = f"rank {numbers}" if len(slow.ranks) == 1 else f"ranks {numbers}"
    one = "is the slow one" if len(slow.ranks) == 1 else "are the slow ones"
    where = f"{who} on {', '.join(slow.nodes)}"
    it = "it" if len(slow.ranks) == 1 else "them"
    if slow.evidence == WAITED:
        return f"{where} {one}: the others wait {slow.others:.0f} % of a step for {it}"
    one = one.replace("is the", "may be the").replace("are the", "may be the")
    return (
        f"{where} {one}, by CPU time alone: the others compute {slow.others:.0f} % less. "
        "batchml.runtime.progress(step, waited=seconds) would tell"
    )


# --- drawn over time ------------------------------------------------------------------------------

CHARTS = {
    "cpu": "CPU, cores",
    "memory": "memory, MiB",
    "gpu": "GPU, percent",
    "gpu_memory": "GPU memory, MiB",
    "net_in": "network in, MB/s",
    "net_out": "network out, MB/s",
}
_MEGA = {"net_in": 1e6, "net_out": 1e6}


def charts(uses: Sequence[Use]) -> dict[str, dict[str, Series]]:
    """Title -> node -> its curve, for all that any node told of itself."""
    found: dict[str, dict[str, Series]] = {}
    for name, title in CHARTS.items():
        by = _MEGA.get(name, 1.0)
        for use in uses:
            series = use.series.get(name)
            if series is not None and series.samples:
                scaled = tuple(each._replace(value=each.value / by) for each in series.samples)
                found.setdefault(title, {})[use.node.name] = Series(name, scaled)
    return found
