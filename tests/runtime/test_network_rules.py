"""The network between nodes: rates, floors, pairs, NCCL's log, and what follows for the run."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from batchml.runtime.health.checks import REPLACE, RETRY
from batchml.runtime.health.network import (
    MIB,
    EarlierRate,
    MeasuredRate,
    NcclNetwork,
    NetworkDecision,
    NetworkFacts,
    NodeAnswer,
    PairRate,
    bus_bandwidth,
    bus_bound,
    choose_bytes,
    decide,
    digest,
    floor_of,
    pair_rounds,
    read_nccl_log,
    sizes_up_to,
    slow_nodes,
    software_of,
)
from batchml.runtime.nodes.supervisor.network_check import NetworkCheck

# Lines of NCCL and aws-ofi-nccl as issues quote them: NVIDIA/nccl 1597, 352 and 229;
# NVIDIA/nccl-tests 188; aws/aws-ofi-nccl 1020 and 889; NVIDIA/exemplar-performance, aws-efa.md.
P5EN = """
8h200-2:6831:6840 [0] NCCL INFO NCCL version 2.25.1+cuda12.8
8h200-2:6831:6840 [0] NCCL INFO NET/Plugin: Loaded net plugin Libfabric (v9)
8h200-2:6831:6840 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.14.0
8h200-2:6831:6840 [0] NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)
8h200-2:6831:6840 [0] NCCL INFO NET/OFI NIC group 7 device #0 0000:a3:00.0
8h200-2:6831:6840 [0] NCCL INFO NET/OFI Setting NCCL_TOPO_FILE environment variable to /proc/x
8h200-2:6831:6840 [0] NCCL INFO PROFILER/Plugin: Could not find: libnccl-profiler.so.
8h200-2:6831:6840 [0] NCCL INFO Using network Libfabric
"""
NEWER = """
ip:1:1 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 8 nics)
ip:1:1 [0] NCCL INFO Assigned NET plugin Libfabric to comm
"""
NO_DEVICES = """
NCCL version 2.27.7+cuda13.0
ip-172-31-3-90:1929:1937 [0] nccl_net_ofi_rdma_init:7978 NCCL WARN NET/OFI OFI fi_getinfo() call failed: No data available
ip-172-31-3-90:1929:1937 [0] NCCL INFO NET/IB : No device found.
ip-172-31-3-90:1929:1937 [0] NCCL INFO NET/Socket : Using [0]ens32:172.31.3.90<0>
ip-172-31-3-90:1929:1937 [0] NCCL INFO Using network Socket
"""  # noqa: E501
NO_PLUGIN = """
ds-ml-01-0:17754:17754 [0] NCCL INFO Bootstrap : Using [0]lo:127.0.0.1<0>
ds-ml-01-0:17754:17754 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).
ds-ml-01-0:17754:17754 [0] NCCL INFO NET/IB : No device found.
ds-ml-01-0:17754:17754 [0] NCCL INFO Using network Socket
"""
TCP = """
ip:1:1 [0] NCCL INFO NET/OFI Selected Provider is tcp (found 1 nics)
ip:1:1 [0] NCCL INFO Using network AWS Libfabric
"""


# --- rates ----------------------------------------------------------------------------------------


def test_the_bound_of_a_type_is_that_of_its_network_cards() -> None:
    assert round(bus_bound(400, 2, 16)) == 94  # two p4d
    assert round(bus_bound(3200, 2, 16)) == 750  # two p5
    assert round(bus_bound(3200, 8, 64)) == 450
    assert bus_bound(0, 2, 16) == bus_bound(400, 1, 8) == 0


def test_bus_bandwidth_does_not_depend_on_the_number_of_processes() -> None:
    assert bus_bandwidth(10**9, 1.0, 2) == 1.0
    assert bus_bandwidth(10**9, 1.0, 10**6) == pytest.approx(2.0, rel=1e-5)


def test_the_size_is_as_large_as_the_network_allows() -> None:
    assert choose_bytes("nccl", 3200, 2) == choose_bytes("nccl", 400, 2) == 1 << 30
    assert choose_bytes("nccl", 25, 2) == 128 * MIB
    assert choose_bytes("nccl", 0.1, 1000) == 4 * MIB
    assert choose_bytes("nccl", 0, 2) == 64 * MIB
    assert choose_bytes("gloo", 3200, 2) == 16 * MIB
    assert sizes_up_to(16 * MIB) == [MIB, 8 * MIB, 16 * MIB]
    assert sizes_up_to(MIB) == [MIB]


EFA_RATE = MeasuredRate("NCCL 2.29.7 with Libfabric 1.21.1", 1 << 30, 400.0)


def earlier(*rates: float, software: str = EFA_RATE.software) -> list[EarlierRate]:
    return [EarlierRate(digest(software), 1 << 30, rate) for rate in rates]


def test_the_floor_is_the_types_at_first_and_then_the_environments_own() -> None:
    at_first = floor_of(EFA_RATE, [], 750)
    assert at_first is not None and at_first.rate == 300
    assert floor_of(EFA_RATE, earlier(500, 500), 750) == at_first  # two are no usual rate
    own = floor_of(EFA_RATE, earlier(500, 90, 480), 750)
    assert own is not None and own.rate == pytest.approx(384)
    assert own.of == "80% of the usual 480 GB/s"


def test_only_like_is_compared_with_like() -> None:
    other = earlier(500, 500, 500, software="NCCL 2.30.7 with Libfabric 1.21.1")
    of_type = floor_of(EFA_RATE, [], 750)
    assert floor_of(EFA_RATE, other, 750) == of_type
    smaller = [each._replace(bytes=MIB) for each in earlier(500, 500, 500)]
    assert floor_of(EFA_RATE, smaller, 750) == of_type
    sockets = EFA_RATE._replace(software="NCCL 2.29.7 with Socket")
    assert floor_of(sockets, [], 750) is None  # TCP does not reach what the cards can


@given(some.integers(2, 40))
def test_in_each_round_a_node_has_one_partner_and_all_pairs_meet_once(nodes: int) -> None:
    rounds = pair_rounds(nodes)
    for pairs in rounds:
        met = [node for pair in pairs for node in pair]
        assert len(met) == len(set(met)) == nodes - nodes % 2
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(nodes), 2))


def all_pairs(nodes: int, *slow: int, rounds: int = 99) -> list[PairRate]:
    return [
        PairRate(a, b, 20.0 if {a, b} & {*slow} else 100.0)
        for pairs in pair_rounds(nodes)[:rounds] for a, b in pairs
    ]  # fmt: skip


def test_a_node_is_named_if_all_its_pairs_are_slow() -> None:
    assert slow_nodes(all_pairs(3, 2), 90) == [2]
    assert slow_nodes(all_pairs(8, 5), 90) == [5]
    assert slow_nodes(all_pairs(8, 5, rounds=2), 90) == [5]
    assert slow_nodes(all_pairs(8, 1, 5), 90) == [1, 5]


def test_a_node_whose_pairs_are_fast_enough_is_not_the_cause() -> None:
    """On a busy machine pairs differ much."""
    pairs = [
        pair._replace(rate=60.0) if 3 in pair[:2] and 2 not in pair[:2] else pair
        for pair in all_pairs(4, 2)
    ]
    assert slow_nodes(pairs, 50) == [2]


def test_no_node_is_named_where_nobody_can_tell() -> None:
    assert slow_nodes(all_pairs(2, 1), 90) == []
    assert slow_nodes(all_pairs(8, 5, rounds=1), 90) == []
    assert slow_nodes(all_pairs(8), 90) == slow_nodes([], 90) == []


# --- NCCL's log -----------------------------------------------------------------------------------


def test_a_log_says_that_efa_is_used() -> None:
    found = read_nccl_log(P5EN)
    assert found == NcclNetwork("Libfabric", 16, "2.25.1", "1.14.0", "efa")
    assert found.uses_efa
    assert software_of(found) == "NCCL 2.25.1 with Libfabric 1.14.0"
    assert read_nccl_log(NEWER) == NcclNetwork("Libfabric", 8, provider="efa")


def test_a_log_says_why_efa_is_not_used() -> None:
    found = read_nccl_log(NO_DEVICES)
    assert (found.name, found.nccl, found.uses_efa) == ("Socket", "2.27.7", False)
    assert "-61, No data available" in found.problem
    assert "the image has no aws-ofi-nccl" in read_nccl_log(NO_PLUGIN).problem
    tcp = read_nccl_log(TCP)
    assert (tcp.uses_efa, tcp.problem) == (False, "libfabric uses its provider tcp")
    assert read_nccl_log("") == NcclNetwork()


# --- the decision ---------------------------------------------------------------------------------


def answers(*logs: str) -> list[NodeAnswer]:
    return [NodeAnswer(f"node {i}", "", read_nccl_log(log)) for i, log in enumerate(logs)]


def facts(*logs: str, **more: Any) -> NetworkFacts:
    given = NetworkFacts(answers(*logs), 8 * len(logs), 16, "p5en.48xlarge", 750, EFA_RATE)
    return given._replace(**more)


def test_a_good_network_is_one_line() -> None:
    counted = [each._replace(counters={"rx_drops": 0}) for each in answers(P5EN, P5EN)]
    decision = decide(facts(P5EN, P5EN, answers=counted))
    assert decision == NetworkDecision((
        "NCCL 2.29.7 with Libfabric 1.21.1: all-reduce over 2 nodes (16 processes) at 400 GB/s "
        "(53% of what p5en.48xlarge allows), 16 of 16 EFA interfaces, no packet lost",
    ), keeps_rate=True)  # fmt: skip
    lost = [each._replace(counters={"rx_drops": 3, "retrans_pkts": 0}) for each in counted]
    assert decide(facts(answers=lost)).lines[0].endswith(", 6 rx_drops")


def test_without_efa_on_all_nodes_no_other_host_would_help() -> None:
    decision = decide(facts(NO_PLUGIN, NO_PLUGIN, measured=None))
    assert not decision.unfit
    assert decision.misconfigured.startswith(
        "the environment gives each node 16 EFA interfaces, but NCCL uses Socket on all nodes: "
        "NCCL finds no plugin for it: the image has no aws-ofi-nccl"
    )
    assert 'NCCL_NET = "Socket" in [env]' in decision.misconfigured


def test_without_efa_on_one_node_that_node_is_left() -> None:
    decision = decide(facts(P5EN, P5EN, NO_DEVICES, P5EN))
    assert list(decision.unfit) == [2] and not decision.misconfigured
    assert decision.unfit[2].severity == REPLACE
    assert "NCCL uses Socket here, and EFA on other nodes: libfabric" in decision.unfit[2].text
    fewer = decide(facts(P5EN, P5EN.replace("found 16", "found 15"), P5EN))
    assert fewer.unfit[1].text == "NCCL finds 15 of 16 interfaces"


def test_no_host_is_blamed_by_its_log_alone() -> None:
    """The log of the other node is not known, because its program ended early."""
    decision = decide(facts(NO_PLUGIN, "", measured=None, failed_first=1))
    assert not decision.unfit and not decision.misconfigured
    assert "was not measured: node 1" in decision.lines[0]
    few = P5EN.replace("found 16", "found 15")
    assert not decide(facts(few, "")).unfit and not decide(facts(few, few)).unfit


def test_sockets_are_right_where_nobody_asked_for_efa() -> None:
    decision = decide(facts(NO_PLUGIN, NO_PLUGIN, efa=0))
    assert decision.keeps_rate and not (decision.unfit or decision.misconfigured)


def test_a_slow_node_is_left_and_its_rate_is_not_the_environments() -> None:
    slow = EFA_RATE._replace(rate=100.0)
    decision = decide(facts(P5EN, P5EN, P5EN, measured=slow, pairs=all_pairs(3, 2)))
    assert list(decision.unfit) == [2] and decision.unfit[2].severity == RETRY
    assert decision.unfit[2].text == (
        "20 GB/s at most to 2 other nodes, and 100 GB/s between other nodes"
    )
    assert "100 GB/s is below 40% of the 750 GB/s" in decision.lines[1]
    assert not decision.keeps_rate


def test_a_slow_network_without_a_culprit_is_said_and_the_run_starts() -> None:
    slow = EFA_RATE._replace(rate=100.0)
    two = decide(facts(P5EN, P5EN, measured=slow, pairs=[PairRate(0, 1, 101)]))
    assert not two.unfit and two.keeps_rate
    assert two.lines[1].endswith("; 101 GB/s between node 0 and node 1")
    alike = decide(facts(P5EN, P5EN, P5EN, measured=slow, pairs=all_pairs(3)))
    assert alike.lines[1].endswith(
        "no pair of nodes is slower than others, so no single node is the cause"
    )
    late = decide(facts(P5EN, P5EN, P5EN, measured=slow))
    assert late.lines[1].endswith("there was no time to measure pairs of nodes")


def test_a_slow_node_is_only_reported_where_nodes_may_share_a_machine() -> None:
    slow = EFA_RATE._replace(rate=100.0)
    given = facts(P5EN, P5EN, P5EN, measured=slow, pairs=all_pairs(3, 2), instance_type="")
    decision = decide(given)
    assert not decision.unfit and "node 2: 20 GB/s at most" in decision.lines[1]


def test_what_could_not_be_measured_is_said_with_the_first_cause() -> None:
    lost = NodeAnswer("node", "the connection was closed")
    failed = [lost, lost, NodeAnswer("node 2", "PyTorch cannot be imported: no disk"), lost]
    decision = decide(NetworkFacts(failed, 4, 0, failed_first=2))
    assert decision == NetworkDecision((
        "the network between the nodes was not measured: "
        "node 2: PyTorch cannot be imported: no disk",
    ))  # fmt: skip


# --- Orders and answers ---------------------------------------------------------------------------


def checked(said: list[str], **environ: str) -> NetworkCheck:
    """The check of two nodes with EFA and a GPU each, which measure."""
    found = NetworkCheck({"BATCHML_EFA": "1", **environ}, said.append, said.append)
    info = {"versions": {"torch": "2.13.0"}, "gpus": 1, "type": "g6.8xlarge", "address": "::1"}
    assert found.order([info, info], ["node 0", "node 1"]) is not None
    return found


SOCKETS = {"nccl": list(read_nccl_log(NO_PLUGIN)), "counters": {}, "rate": list(EFA_RATE)}


@pytest.mark.parametrize(
    ("chosen", "is_wrong"),
    [({}, True), ({"NCCL_NET": "Socket"}, False), ({"NCCL_NET_PLUGIN": "none"}, False),
     ({"NCCL_NET_PLUGIN": "ofi"}, True)],
)  # fmt: skip
def test_a_job_may_choose_tcp_itself(chosen: dict[str, str], is_wrong: bool) -> None:
    check = checked([], **chosen)
    assert check.answer(0, SOCKETS) is None
    decision = check.answer(1, SOCKETS)
    assert decision is not None and bool(decision.misconfigured) is is_wrong


def test_an_answer_that_comes_after_a_node_was_lost_decides_nothing() -> None:
    said: list[str] = []
    check = checked(said)
    check.answer(0, SOCKETS)
    check.leave()
    assert check.answer(1, SOCKETS) is None and said == []
