"""The network check of a run of several nodes: real all-reduces of gloo, and a fake type."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.runtime.health.network import MIB, MeasuredRate
from batchml.runtime.health.rate_history import RateHistory, RateKind
from batchml.runtime.processes import descendants
from batchml.runtime.protocol.launch import TORCHRUN, LaunchPlan
from batchml.runtime.protocol.variables import RuntimeEnv
from tests.process.test_supervisors import Nodes
from tests.support.efa_fake import fake_sys
from tests.support.local_server import wait_for
from tests.support.worlds import ROOT

pytestmark = pytest.mark.slow
ONE_EACH = LaunchPlan(TORCHRUN, processes=1, start_within=60)
DEEP = json.dumps({"checks": "deep"})


@pytest.fixture
def nodes(tmp_path: Path, pytorch: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, str(pytorch))
    (tmp_path / "workspace").mkdir()
    yield made
    made.close()


def start(nodes: Nodes, count: int, **more: str) -> None:
    given = {
        "PYTHONPATH": str(ROOT), "BATCHML_HEALTH": DEEP,
        "BATCHML_STORE": str(nodes.folder / "store"),
        "BATCHML_WORKSPACE": str(nodes.folder / "workspace"),
        "BATCHML_FAULT_FILE": str(nodes.folder / "fault-{host}"),
    }  # fmt: skip
    nodes.start(ONE_EACH, "say('trains')", count=count, **{**given, **more})


def history(nodes: Nodes, kind: RateKind) -> RateHistory:
    environ = {"BATCHML_WORKSPACE": str(nodes.folder / "workspace")}
    found = RateHistory.open(RuntimeEnv.read(environ), environ, kind)
    assert found is not None
    return found


def test_nodes_measure_each_other_and_later_runs_know_the_rate(nodes: Nodes) -> None:
    start(nodes, 2)
    assert nodes.ended() == [0, 0]
    said = nodes.said()
    assert said[0].startswith("batchml: gloo of PyTorch ")
    assert ": all-reduce over 2 nodes (2 processes) at " in said[0]
    assert said[1:3] == ["batchml: generation 1: 2 nodes, 2 ranks.", "trains"]
    assert nodes.said(1)[0] == "trains"
    kept = history(nodes, RateKind("", 2, 2, "gloo")).read()
    assert len(kept) == 1 and kept[0].rate > 0.001 and kept[0].bytes <= 16 * MIB


def test_the_slow_node_of_four_is_named_and_left(nodes: Nodes) -> None:
    """Its delay makes it slow, not the load of this machine: the others are measured at once."""
    fake_sys(nodes.folder / "sys", 0, "c7i.48xlarge")
    usual = history(nodes, RateKind("c7i.48xlarge", 4, 4, "gloo"))
    version = next(nodes_torch(nodes))
    for number in range(3):
        software = f"gloo of PyTorch {version}"
        usual.add(MeasuredRate(software, 16 * MIB, 1e6), "earlier", 1e9 + number)
    (nodes.folder / "fault-127.0.3.3").write_text("slow: 0.3")
    start(nodes, 4, BATCHML_SYS=str(nodes.folder / "sys"))
    assert nodes.ended() == [75, 75, 75, 75]
    assert "batchml notice: the network is slow: " in nodes.said()[1]
    last = nodes.said()[-2]
    assert last.startswith("batchml: node 2: this host (127.0.3.3) is unfit: network: ")
    assert " at most to 3 other nodes, and " in last and last.endswith("(1 of 3)")
    record = json.loads((nodes.folder / "store/hosts/bad/h-127.0.3.3").read_text())
    assert record["is_for_good"] is False
    assert len(usual.read()) == 3  # a slow node's rate is not the environment's


def test_a_program_that_dies_on_one_node_ends_the_check_and_the_run_starts(nodes: Nodes) -> None:
    start(nodes, 3)

    def probes() -> list[int]:
        found = descendants(nodes.processes[1].pid)
        return [pid for pid in found if b"all_reduce" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    os.kill(wait_for(probes, "node 1 measures", 60)[0], signal.SIGKILL)
    assert nodes.ended() == [0, 0, 0]
    assert nodes.said()[:2] == [
        "batchml notice: the network between the nodes was not measured: node 1 (127.0.3.2): the "
        "program that measures ended by signal 9",
        "batchml: generation 1: 3 nodes, 3 ranks.",
    ]


def nodes_torch(nodes: Nodes) -> Iterator[str]:
    """The version of PyTorch, as it names itself."""
    for path in Path(nodes.python).parent.parent.glob("lib/*/site-packages/torch/version.py"):
        found: dict[str, str] = {}
        exec(path.read_text(), found)
        yield found["__version__"]


def test_a_quick_check_on_cpus_measures_nothing(nodes: Nodes) -> None:
    start(nodes, 2, BATCHML_HEALTH="{}")
    assert nodes.ended() == [0, 0]
    assert nodes.said()[0] == "batchml: generation 1: 2 nodes, 2 ranks."


def test_a_stop_while_the_network_is_measured_ends_all_nodes_and_their_programs(
    nodes: Nodes,
) -> None:
    start(nodes, 2)

    def probes() -> list[int]:
        found = descendants(*(process.pid for process in nodes.processes))
        return [pid for pid in found if b"all_reduce" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    seen = wait_for(probes, "it measures", 60)
    nodes.processes[0].send_signal(signal.SIGTERM)
    assert nodes.ended() == [143, 143]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in seen)
    assert not any("generation" in line for line in nodes.said())
