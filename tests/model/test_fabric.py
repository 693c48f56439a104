"""The Elastic Fabric Adapter: which hosts have it, and why others do not."""

from typing import Any

import pytest

from batchml.model.environment import Compute, Environment, Queue
from batchml.model.fabric import (
    FabricLayout,
    describe_fabric,
    describe_network,
    efa_obstacles,
    efa_of_queue,
    fabric_layout,
)


def compute(*types: str, **more: Any) -> Compute:
    return Compute(**{"instance_types": types, "max_vcpus": 192, "efa": True, **more})


@pytest.mark.parametrize(
    ("types", "layout"),
    [
        (["p5.48xlarge"], (32, 0)),
        (["p5en.48xlarge"], (16, 0)),
        (["p4d.24xlarge"], (4, 0)),
        (["p4d.24xlarge", "p4de.24xlarge"], (4, 0)),
        (["g6.8xlarge", "g6.48xlarge", "g5.12xlarge"], (1, 0)),
        (["g6e.48xlarge"], (4, 0)),
        (["c7i.48xlarge"], (1, 0)),
        (["hpc7a.96xlarge"], (2, 0)),
    ],
)
def test_hosts_have_the_interfaces_of_their_types(
    types: list[str], layout: tuple[int, int]
) -> None:
    assert fabric_layout(compute(*types), "build") == FabricLayout(*layout)


def test_the_first_card_of_a_p6_b300_has_none() -> None:
    own = compute("p6-b300.48xlarge", ami="ami-01234567")
    assert fabric_layout(own, "build") == FabricLayout(16, 1)
    assert fabric_layout(compute("p6-b200.48xlarge", ami="ami-01234567"), "") == FabricLayout(8, 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (compute("g6.xlarge"), "g6.xlarge has no Elastic Fabric Adapter. These have: g6.8xlarge"),
        (compute("p3.16xlarge"), "p3.16xlarge has no Elastic Fabric Adapter."),
        (compute("m7i.large"), "These have: m7i.48xlarge, m7i.metal-48xl."),
        (compute("p5"), "name instance types, no families. Of p5, these have EFA: p5.4xlarge"),
        (compute("optimal"), "the network cards of optimal are not known"),
        (compute("p9.99xlarge"), "the network cards of p9.99xlarge are not known"),
        (compute("p6e-gb200.36xlarge"), "UltraServer"),
        (compute("p5.48xlarge", "p5en.48xlarge"), "p5.48xlarge has 32, p5en.48xlarge has 16"),
        (compute("p5.48xlarge", spot=True), "never places on spot hosts"),
        (compute("p5.48xlarge", ami="ecs-gpu"), 'AMI has no EFA driver. Set ami = "build", name'),
        (compute("hpc7g.16xlarge"), "AMI has no EFA driver. Name an AMI with the driver, or"),
        (compute("trn1.32xlarge"), "AMI has no EFA driver. Name an AMI with the driver, or"),
    ],
)
def test_the_reason_against_efa_is_told(given: Compute, said: str) -> None:
    reasons = list(efa_obstacles(given, "build"))
    assert len(reasons) == 1 and said in reasons[0], reasons
    assert fabric_layout(given, "build") is None


def test_all_reasons_are_told_at_once() -> None:
    wrong = compute("g6.xlarge", "p5", "p6e-gb200.36xlarge", spot=True, ami="ecs-gpu")
    assert len(list(efa_obstacles(wrong, "build"))) == 5


@pytest.mark.parametrize("more", [{"ami": "ami-01234567"}, {"bootstrap": "efa.sh"}])
def test_an_ami_or_a_script_of_the_user_may_bring_the_driver(more: dict[str, str]) -> None:
    for name in ("p5.48xlarge", "hpc7g.16xlarge", "trn1.32xlarge"):
        assert list(efa_obstacles(compute(name, **more), "ecs-gpu")) == []


def environment(ami: str = "build", **computes: Compute) -> Environment:
    queues = {name: Queue(compute=(name,)) for name in computes}
    return Environment(ami=ami, compute=computes, queues={**queues, "all": Queue(
        compute=tuple(computes))})  # fmt: skip


def test_nothing_has_efa_unless_the_file_says_so() -> None:
    off = compute("p5.48xlarge", efa=False)
    assert Compute().efa is False
    assert fabric_layout(off, "build") is None
    assert list(describe_fabric(environment(gpu=off))) == []


def test_auto_is_efa_where_nothing_prevents_it_and_the_plan_says_why_not() -> None:
    assert fabric_layout(compute("p5.48xlarge", efa="auto"), "build") == FabricLayout(32, 0)
    small = compute("g6.xlarge", efa="auto")
    assert fabric_layout(small, "build") is None
    (line,) = describe_fabric(environment(dev=small))
    assert not line.is_used
    assert line.text.startswith(
        'hosts of compute dev have no EFA (efa = "auto"): g6.xlarge has no Elastic'
    )


def test_the_plan_says_how_many_interfaces_hosts_have() -> None:
    assert list(describe_fabric(environment(gpu=compute("p5.48xlarge")))) == [
        (
            "each host of compute gpu has 32 EFA interfaces, 3,200 Gbps; all hosts are in one zone",
            True,
        )
    ]
    (line,) = describe_fabric(environment(gpu=compute("g6.8xlarge", "g6.12xlarge")))
    assert "has 1 EFA interface, 25 Gbps or 40 Gbps; all" in line.text


def test_a_queue_of_unlike_hosts_has_no_efa() -> None:
    """A container does not start on a host that lacks a device of its definition."""
    both = environment(big=compute("p5.48xlarge"), small=compute("g6.48xlarge"))
    assert [efa_of_queue(both, name) for name in ("big", "small", "all")] == [32, 1, 0]
    assert list(describe_fabric(both))[-1] == (
        "multi-node runs in queue all do not use EFA, because its hosts have different numbers of "
        "interfaces (big has 32, small has 1)",
        False,
    )
    alike = environment(one=compute("p4d.24xlarge"), two=compute("p4de.24xlarge"))
    assert efa_of_queue(alike, "all") == 4


def test_a_run_is_told_which_network_its_nodes_have() -> None:
    found = environment(
        fast=compute("p5.48xlarge"), slow=compute("p5.48xlarge", efa=False),
        small=compute("g6.xlarge", efa=False),
    )  # fmt: skip
    assert describe_network(found, "fast", 8) == "EFA: each node has 32 devices."
    assert describe_network(found, "fast", 0) == "EFA: each node has 32 devices."
    slow = describe_network(found, "slow", 8)
    assert slow.startswith("Nodes talk over TCP (NCCL_NET=Socket): queue slow has no Elastic")
    assert slow.endswith("efa = true under compute.slow of batchml.toml.")
    assert "efa = true" not in describe_network(found, "small", 1)
    assert "different numbers of EFA interfaces" in describe_network(found, "all", 1)
    assert describe_network(found, "small", 0) == describe_network(found, "theirs", 8) == ""
