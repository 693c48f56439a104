"""The orders of `srun` for other nodes: what the first node sends, and what a node makes of it."""

import os
from pathlib import Path
from typing import Any

import pytest

from batchml.runtime.nodes.link.remote_start import PreparedTasks
from batchml.runtime.nodes.slurm.server import gather
from batchml.runtime.nodes.slurm.steps import (
    FOLDER,
    LOG,
    SrunStep,
    StepNode,
    changes,
    file_id,
    make_order,
    network_variables,
    prepare_tasks,
    remember_start,
)


class Nodes:
    """The first node and another one, whose folders differ."""

    def __init__(self, top: Path) -> None:
        self.first, self.second = top / "first", top / "second"
        for each in (self.first, self.second):
            (each / "tools").mkdir(parents=True)
        self.given = {"PATH": os.environ["PATH"], "SECRET": "s3cr3t"}
        self.environ = {
            **self.given, FOLDER: str(self.first / "tools"), LOG: "another file"
        }  # fmt: skip
        remember_start(self.environ[FOLDER], self.given, str(self.first))

    def order(self, *command: str, **changed: str) -> dict[str, Any]:
        step = SrunStep(list(command), nodes=[0, 1], tasks=2)
        return make_order(step, {**self.environ, **changed})

    def prepare(self, order: dict[str, Any]) -> PreparedTasks:
        environ = {**self.given, FOLDER: str(self.second / "tools")}
        return prepare_tasks(order, StepNode(1, environ, str(self.second)))


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    found = Nodes(tmp_path)
    monkeypatch.chdir(found.first)
    return found


def test_a_task_has_the_scripts_variables_and_this_nodes_folders(nodes: Nodes) -> None:
    order = nodes.order("cat", f"{nodes.first}/x", DATA=f"{nodes.first}/data")
    first, second = nodes.prepare(order).commands
    assert list(first.words) == ["cat", f"{nodes.second}/x"]
    assert first.folder == str(nodes.second)
    assert first.environ["DATA"] == f"{nodes.second}/data"
    assert first.environ["SECRET"] == "s3cr3t"
    numbers = [each.environ["SLURM_PROCID"] for each in (first, second)]
    assert numbers == ["2", "3"] and first.environ["SLURM_NTASKS"] == "4"


def test_variables_that_each_node_has_are_not_sent(nodes: Nodes) -> None:
    order = nodes.order("true", SAID="by the script")
    assert order["environ"]["SAID"] == "by the script"
    assert "SECRET" not in order["environ"] and "PATH" not in order["environ"]


def test_changes_are_the_variables_that_a_node_lacks() -> None:
    start = {"A": "1", "B": "2", "PWD": "/a", "GONE": "x"}
    assert changes(start, {"A": "1", "B": "3", "C": "4", "PWD": "/b"}) == {
        "B": "3", "C": "4", "GONE": None
    }  # fmt: skip


def test_output_for_the_log_goes_to_the_log_of_its_node(nodes: Nodes) -> None:
    assert nodes.prepare(nodes.order("true")).returns_output
    nodes.environ[LOG] = file_id(1)
    prepared = nodes.prepare(nodes.order("true"))
    assert not prepared.returns_output and not prepared.joins_errors


def test_a_run_of_one_node_does_not_wait() -> None:
    assert gather({}, "") == ["127.0.0.1"]


def test_each_of_several_nodes_has_variables_with_its_address() -> None:
    """torchrun and gloo would ask for the name of the machine, which may be that of 127.0.0.1."""
    two = {"AWS_BATCH_JOB_NUM_NODES": "2", "BATCHML_NODE_ADDRESS": "127.0.0.1"}
    found = network_variables(two)
    assert found["PET_LOCAL_ADDR"] == found["SLURMD_NODENAME"] == "127.0.0.1"
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "lo"
    assert network_variables({}) == {}
