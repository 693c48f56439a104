"""Decide about the network between the nodes of a run, by an all-reduce and NCCL's log. Pure.

`all_reduce.py` measures on each node, `nodes/supervisor/network_check.py` collects the answers, and
the main node decides here: docs/health.md, "The network of several nodes". Rates are bus bandwidths
in GB/s (1e9 bytes).

Sources: NVIDIA/nccl-tests, doc/PERFORMANCE.md (bus bandwidth); the log lines of NCCL and of
aws-ofi-nccl as issues of both repositories quote them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from batchml.runtime.health.checks import REPLACE, RETRY, HostCheck

MIB = 1 << 20
KEPT = 40  # earlier rates of an environment that are kept and compared
_LEAST_RATES = 3  # earlier rates without which there is no usual rate
_OF_USUAL = 0.8  # below this part of the usual rate the network is slow
_OF_BOUND = 0.4  # the same for what the instance type allows, while there is no usual rate
_OF_FASTEST = 0.7  # below this part of the fastest pair a pair of nodes is slow
_SECONDS = 2.0  # that 25 all-reduces of the chosen size may take at full speed
_LARGEST, _SMALLEST = 1 << 30, 4 * MIB
_GLOO_BYTES, _UNKNOWN_BYTES = 16 * MIB, 64 * MIB

LIBFABRIC = "Libfabric"  # older plugins call it "AWS Libfabric"


# --- Rates ----------------------------------------------------------------------------------------


class MeasuredRate(NamedTuple):
    """The bus bandwidth of an all-reduce. Only rates of equal software and size are compared."""

    software: str
    bytes: int  # of the array of each process
    rate: float  # GB/s


class EarlierRate(NamedTuple):
    """The rate of an earlier run of the environment, on as many nodes of the same type."""

    digest: str  # of its software
    bytes: int
    rate: float


class PairRate(NamedTuple):
    """The bus bandwidth of an all-reduce between two nodes."""

    a: int
    b: int
    rate: float


class RateFloor(NamedTuple):
    """The rate below which the network is slow, and where it comes from, in words."""

    rate: float
    of: str


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """GB/s at which each process sends, whatever their number: size/time x 2(n-1)/n."""
    return size / max(seconds, 1e-9) * 2 * (ranks - 1) / ranks / 1e9


def bus_bound(gbps: float, nodes: int, ranks: int) -> float:
    """The largest bus bandwidth that the network cards of the nodes allow; 0 if `gbps` is unknown.

    Each node has to send 2(N-1)/N of the array through its cards: algbw <= B x N / 2(N-1).
    """
    return gbps / 8 * nodes / (2 * (nodes - 1)) * 2 * (ranks - 1) / ranks if nodes > 1 else 0.0


def choose_bytes(backend: str, gbps: float, nodes: int) -> int:
    """The size to measure. It depends only on what stays the same between runs.

    Rates rise with the size, so it is large: 1 GiB, unless the network is too slow for that.
    """
    if backend != "nccl":
        return _GLOO_BYTES
    if not gbps:
        return _UNKNOWN_BYTES
    fits = gbps / 8 * 1e9 * nodes / (2 * (nodes - 1)) * _SECONDS / 25
    size = _LARGEST
    while size > fits and size > _SMALLEST:
        size //= 2
    return size


def sizes_up_to(size: int) -> List[int]:
    """The sizes to try, 1 MiB first, so that a very slow network is not asked for a large one."""
    sizes, each = [], MIB
    while each < size:
        sizes.append(each)
        each *= 8
    return [*sizes, size]


def floor_of(
    measured: MeasuredRate, earlier: Sequence[EarlierRate], bound: float
) -> Optional[RateFloor]:
    """The floor for a rate; None if nothing is known.

    At first it is a part of what the instance type allows, if NCCL uses EFA: one TCP connection is
    limited to less (EC2 User Guide, "Instance network bandwidth"). Then it is a part of the median
    of the environment's own rates.
    """
    usual = usual_rate(measured, earlier)
    if usual:
        return RateFloor(usual * _OF_USUAL, f"{_OF_USUAL:.0%} of the usual {describe_rate(usual)}")
    if bound and LIBFABRIC in measured.software:
        words = f"{_OF_BOUND:.0%} of the {describe_rate(bound)} that the instance type allows"
        return RateFloor(bound * _OF_BOUND, words)
    return None


def usual_rate(measured: MeasuredRate, earlier: Sequence[EarlierRate]) -> float:
    """The median of the earlier rates of the same software; 0 if they are too few.

    A network that is too slow for the whole size is measured with a smaller one, and still compared
    with the rates of larger ones.
    """
    software = digest(measured.software)
    same = [
        each.rate for each in earlier if each.digest == software and each.bytes >= measured.bytes
    ]
    return sorted(same)[len(same) // 2] if len(same) >= _LEAST_RATES else 0.0


def digest(software: str) -> str:
    """A short name for a text about software."""
    return hashlib.sha256(software.encode()).hexdigest()[:12]


def describe_rate(rate: float) -> str:
    return f"{rate:.0f} GB/s" if rate >= 100 else f"{rate:.3g} GB/s"


def pair_rounds(nodes: int) -> List[List[Tuple[int, int]]]:
    """Rounds in which each node has one partner, so that all pairs occur once (circle method)."""
    circle: List[Optional[int]] = [*range(nodes), *([None] if nodes % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        pairs = []
        for i in range(len(circle) // 2):
            a, b = circle[i], circle[-1 - i]
            if a is not None and b is not None:
                pairs.append((min(a, b), max(a, b)))
        rounds.append(pairs)
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def slow_pairs(pairs: Sequence[PairRate], floor: float) -> List[PairRate]:
    """The pairs that are much slower than the fastest pair, and below the floor for all nodes.

    Faster pairs do not explain why all nodes together are slow.
    """
    fastest = max((pair.rate for pair in pairs), default=0.0)
    return [pair for pair in pairs if pair.rate < min(floor, _OF_FASTEST * fastest)]


def slow_nodes(pairs: Sequence[PairRate], floor: float) -> List[int]:
    """The nodes whose pairs are all slow, if they have several. The partners must not be slow, too:
    with one slow pair nobody can tell which of its nodes is the cause.
    """
    slow = slow_pairs(pairs, floor)
    found = []
    for node in sorted({node for pair in pairs for node in pair[:2]}):
        own = [pair for pair in pairs if node in pair[:2]]
        if len(own) > 1 and all(pair in slow for pair in own):
            found.append(node)
    return found


# --- NCCL's log -----------------------------------------------------------------------------------


class NcclNetwork(NamedTuple):
    """What NCCL's log (NCCL_DEBUG=INFO, subsystems INIT and NET) says of the network."""

    name: str = ""  # Libfabric, Socket, IB, or the name of another plugin; empty: not in the log
    cards: int = 0  # network cards that the plugin found; 0: not in the log
    nccl: str = ""  # version
    plugin: str = ""  # version of aws-ofi-nccl
    provider: str = ""  # of libfabric
    problem: str = ""  # why EFA is not used, in words; empty: the log does not say

    @property
    def uses_efa(self) -> bool:
        return LIBFABRIC in self.name and self.provider in ("", "efa")


_NETWORK = re.compile(r"Using network (.+?)\s*$|Assigned NET plugin (.+?) to comm", re.M)
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w;-]+)(?:.*?\(found (\d+) nics?\))?")
_NCCL = re.compile(r"NCCL version (\d[\w.]*)")
_PLUGIN = re.compile(r"Initializing aws-ofi-nccl (?:GitHub-dev )?v?(\d[\w.]*)")
_PROBLEMS = (
    (re.compile(r"fi_getinfo\S* (?:call )?failed: (?:.*-61|No data available)|fi_getinfo.* -61"),
     "libfabric finds no EFA device (-61, No data available): its device nodes are not in the "
     "container, or cannot be opened"),
    (re.compile(r"Could not find any optimal provider"),
     "libfabric finds no provider for EFA"),
    (re.compile(r"No plugin found|Could not find: \S*libnccl-net|Plugin load .*returned \d+"),
     "NCCL finds no plugin for it: the image has no aws-ofi-nccl, or it is not on LD_LIBRARY_PATH"),
)  # fmt: skip


def read_nccl_log(text: str) -> NcclNetwork:
    """Read the log that NCCL wrote for one process."""
    network, provider = _NETWORK.search(text), _PROVIDER.search(text)
    nccl, plugin = _NCCL.search(text), _PLUGIN.search(text)
    problem = next((words for pattern, words in _PROBLEMS if pattern.search(text)), "")
    found = NcclNetwork(
        name=(network[1] or network[2]) if network else "",
        cards=int(provider[2] or 0) if provider else 0,
        nccl=nccl[1] if nccl else "",
        plugin=plugin[1] if plugin else "",
        provider=provider[1] if provider else "",
    )
    if provider and provider[1] != "efa" and not problem:
        problem = f"libfabric uses its provider {provider[1]}"
    return found if found.uses_efa else found._replace(problem=problem)


def software_of(found: NcclNetwork) -> str:
    """The versions and the network, by which rates are compared."""
    plugin = f" {found.plugin}" if found.plugin and found.uses_efa else ""
    return f"NCCL {found.nccl or '(version unknown)'} with {found.name or 'no network'}{plugin}"


# --- The decision ---------------------------------------------------------------------------------


class NodeAnswer(NamedTuple):
    """What one node reports after the measurement."""

    name: str  # for people
    error: str = ""  # why it could not measure
    nccl: NcclNetwork = NcclNetwork()
    counters: Mapping[str, int] = {}  # what EFA counted meanwhile, such as lost packets


class NetworkFacts(NamedTuple):
    """All that the decision depends on."""

    answers: Sequence[NodeAnswer]  # by the number of the node
    processes: int  # on all nodes
    efa: int  # EFA interfaces that the job asked for, on each node; 0: none
    instance_type: str = ""
    bound: float = 0.0  # GB/s that the type allows; 0: unknown
    measured: Optional[MeasuredRate] = None
    pairs: Sequence[PairRate] = ()
    earlier: Sequence[EarlierRate] = ()
    failed_first: int = -1  # the node whose error came first, which is the cause of the others


class NetworkDecision(NamedTuple):
    """What follows for the run."""

    lines: Tuple[str, ...] = ()
    unfit: Mapping[int, HostCheck] = {}  # nodes to leave for other hosts
    misconfigured: str = ""  # why the run ends: another host would not help
    keeps_rate: bool = False  # the rate belongs to the environment's usual ones


def decide(facts: NetworkFacts) -> NetworkDecision:
    """Decide whether the run may start, which nodes it leaves, and what is said.

    A slow network ends the run only on EC2, and only if one node is the cause: elsewhere the nodes
    may share a machine, and their rates vary with its load.
    """
    efa = _decide_efa(facts)
    if efa is not None:
        return efa
    measured = facts.measured
    if measured is None:
        why = "the main node has no result"
        if facts.failed_first >= 0:
            first = facts.answers[facts.failed_first]
            why = f"{first.name}: {first.error}"
        return NetworkDecision((f"the network between the nodes was not measured: {why}",))
    line = _describe(facts, measured)
    floor = floor_of(measured, facts.earlier, facts.bound)
    if floor is None or measured.rate >= floor.rate:
        return NetworkDecision((line,), keeps_rate=True)
    slow = f"the network is slow: {describe_rate(measured.rate)} is below {floor.of}"
    named = slow_nodes(facts.pairs, floor.rate)
    if named and 2 * len(named) <= len(facts.answers):
        unfit = {node: _describe_slow_node(node, facts) for node in named}
        if facts.instance_type:
            return NetworkDecision((line, slow), unfit)
        named_all = "; ".join(f"{facts.answers[i].name}: {unfit[i].text}" for i in named)
        return NetworkDecision((line, f"{slow}; {named_all}"), keeps_rate=True)
    pairs = slow_pairs(facts.pairs, floor.rate) or (facts.pairs if len(facts.answers) == 2 else ())
    if pairs:
        words = "; ".join(_describe_pair(pair, facts) for pair in sorted(pairs)[:4])
    elif facts.pairs:
        words = "no pair of nodes is slower than others, so no single node is the cause"
    else:
        words = "there was no time to measure pairs of nodes"
    return NetworkDecision((line, f"{slow}; {words}"), keeps_rate=True)


def _decide_efa(facts: NetworkFacts) -> Optional[NetworkDecision]:
    """The decision if EFA was asked for, and nodes do not use it as asked; None if all do.

    Nodes are only compared with nodes whose log is known: without those nobody can tell whether one
    host is the cause.
    """
    known = {i: each for i, each in enumerate(facts.answers) if each.nccl.name}
    if not facts.efa or not known:
        return None
    without = {i: each for i, each in known.items() if not each.nccl.uses_efa}
    if len(without) == len(known) < len(facts.answers):
        return None
    if len(without) == len(known):
        first = facts.answers[0].nccl
        return NetworkDecision(misconfigured=(
            f"the environment gives each node {facts.efa} EFA "
            f"interface{'s' if facts.efa > 1 else ''}, but NCCL uses {first.name} on all nodes"
            f"{f': {first.problem}' if first.problem else ''}. Use the image pytorch in its CUDA "
            "flavour, or install EFA's libraries in yours (docs/health.md); "
            'NCCL_NET = "Socket" in [env] of job.toml runs without EFA'
        ))  # fmt: skip
    if without:
        return NetworkDecision(unfit={i: _describe_no_efa(each) for i, each in without.items()})
    few = {i: each for i, each in known.items() if 0 < each.nccl.cards < facts.efa}
    if few and len(few) < len(known):
        return NetworkDecision(unfit={
            i: HostCheck("EFA", REPLACE, f"NCCL finds {each.nccl.cards} of {facts.efa} interfaces")
            for i, each in few.items()
        })  # fmt: skip
    return None


def _describe_no_efa(answer: NodeAnswer) -> HostCheck:
    why = f": {answer.nccl.problem}" if answer.nccl.problem else ""
    text = f"NCCL uses {answer.nccl.name} here, and EFA on other nodes{why}"
    return HostCheck("EFA", REPLACE, text)


def _describe(facts: NetworkFacts, measured: MeasuredRate) -> str:
    """The one line of a run whose network was measured."""
    nodes = len(facts.answers)
    parts = [f"{measured.software}: all-reduce over {nodes} nodes ({facts.processes} processes)"]
    compared = []
    if facts.bound:
        part = measured.rate / facts.bound
        share = f"{part:.0%}" if part >= 0.01 else "under 1%"
        compared.append(f"{share} of what {facts.instance_type} allows")
    usual = usual_rate(measured, facts.earlier)
    if usual:
        compared.append(f"usual: {describe_rate(usual)}")
    parts.append(f" at {describe_rate(measured.rate)}")
    parts.append(f" ({', '.join(compared)})" if compared else "")
    cards = [each.nccl.cards for each in facts.answers if each.nccl.cards]
    if cards:
        of = f" of {facts.efa}" if facts.efa else ""
        parts.append(f", {min(cards)}{of} EFA interfaces")
    return "".join(parts) + describe_counters([each.counters for each in facts.answers])


def describe_counters(counters: Sequence[Mapping[str, int]]) -> str:
    """What EFA counted on all nodes; empty where it counts nothing."""
    total: Dict[str, int] = {}
    for each in counters:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    if not total:
        return ""
    seen = [f"{count} {name}" for name, count in sorted(total.items()) if count]
    return f", {', '.join(seen)}" if seen else ", no packet lost"


def _describe_pair(pair: PairRate, facts: NetworkFacts) -> str:
    a, b = facts.answers[pair.a].name, facts.answers[pair.b].name
    return f"{describe_rate(pair.rate)} between {a} and {b}"


def _describe_slow_node(node: int, facts: NetworkFacts) -> HostCheck:
    own = [pair.rate for pair in facts.pairs if node in pair[:2]]
    others = [pair.rate for pair in facts.pairs if node not in pair[:2]]
    fast = f", and {describe_rate(max(others))} between other nodes" if others else ""
    text = f"{describe_rate(max(own))} at most to {len(own)} other nodes{fast}"
    return HostCheck("network", RETRY, text)
