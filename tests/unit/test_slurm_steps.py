"""Steps of several nodes: what the first node writes into the run's store, and the others do."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchml.runtime.nodes.slurm import steps as slurm_tasks
from batchml.runtime.nodes.slurm.steps import (
    FOLDER,
    LOG,
    Book,
    Far,
    Part,
    Place,
    Step,
    changes,
    gather,
    log_of,
    network,
    remember,
    send,
)
from batchml.runtime.storage.store import FolderStore, StoreError
from tests.conftest import wait_for


class Nodes:
    """The first node and another one, whose folders differ."""

    def __init__(self, top: Path) -> None:
        self.store = FolderStore(str(top / "store"))
        self.book = Book(self.store, 1)
        self.first, self.second = top / "first", top / "second"
        for each in (self.first, self.second):
            (each / "tools").mkdir(parents=True)
        self.given = {"PATH": os.environ["PATH"], "SECRET": "s3cr3t"}
        self.environ = {
            **self.given,
            "BATCHML_STORE": str(top / "store"),
            "AWS_BATCH_JOB_ATTEMPT": "1",
            FOLDER: str(self.first / "tools"),
            LOG: "another file",
        }
        remember(self.environ[FOLDER], self.given, str(self.first))

    def send(self, *command: str, **changed: str) -> Far:
        step = Step(list(command), nodes=[0, 1], tasks=2)
        (far,) = send(step, {**self.environ, **changed})
        return far

    def part(self, number: int) -> Part:
        order = self.book.order(number)
        assert order is not None
        tools = str(self.second / "tools")
        return Part(
            self.book, number, order, Place(1, {**self.given, FOLDER: tools}, str(self.second))
        )


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    found = Nodes(tmp_path)
    monkeypatch.chdir(found.first)
    return found


def test_a_step_runs_there_with_the_scripts_variables_and_its_output_comes_back(
    nodes: Nodes, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    program = "echo $SLURM_PROCID of $SLURM_NTASKS on $SLURM_NODEID: $DATA $SECRET $PWD; exit 3"
    far = nodes.send("sh", "-c", program, DATA=f"{nodes.first}/data")
    part = nodes.part(0)
    wait_for(part.look, "its tasks have ended")
    wait_for(lambda: far.poll() is not None, "the first node has heard")
    assert far.poll() == [3, 3]
    rest = f"of 4 on 1: {nodes.second}/data s3cr3t {nodes.second}"
    printed = sorted(capfdbinary.readouterr().out.decode().splitlines())
    assert printed == [f"2 {rest}", f"3 {rest}"]


def test_what_the_run_was_given_is_not_written_down(nodes: Nodes) -> None:
    far = nodes.send("true", SAID="by the script")
    order = nodes.book.order(0)
    assert order is not None and order["environ"]["SAID"] == "by the script"
    assert "SECRET" not in order["environ"]
    far.forget()
    assert nodes.book.order(0) == {"nodes": []}  # nothing stays, and nodes count on


def test_changes_are_what_a_node_does_not_have_yet() -> None:
    began = {"A": "1", "B": "2", "PWD": "/a", "GONE": "x"}
    assert changes(began, {"A": "1", "B": "3", "C": "4", "PWD": "/b"}) == {
        "B": "3", "C": "4", "GONE": None
    }  # fmt: skip


def test_steps_have_numbers_whoever_writes_them(nodes: Nodes) -> None:
    assert [nodes.book.begin({"nodes": []}, 0) for _ in range(3)] == [0, 1, 2]
    nodes.send("true")
    assert nodes.book.order(3) is not None


def test_a_signal_is_passed_on_and_the_code_is_a_shells(nodes: Nodes) -> None:
    far = nodes.send("sleep", "600")
    part = nodes.part(0)
    assert not part.look()
    far.pass_on(15)
    wait_for(part.look, "its tasks have ended")
    wait_for(lambda: far.poll() is not None, "the first node has heard")
    assert far.poll() == [143, 143] and far.was_one_killed()


def test_a_program_that_is_not_there_ends_the_step(
    nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    far = nodes.send("no-such-program")
    assert nodes.part(0).look()
    assert far.poll() == [127]
    assert "no-such-program" in capsys.readouterr().err


def test_what_a_task_leaves_behind_is_not_waited_for(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_tasks, "_READING", 0.1)
    far = nodes.send("sh", "-c", "sleep 600 & echo $! > left$SLURM_PROCID")
    part = nodes.part(0)
    try:
        wait_for(part.look, "its tasks have ended")
        wait_for(lambda: far.poll() == [0, 0], "the first node has heard")
    finally:
        for left in nodes.second.glob("left*"):
            os.kill(int(left.read_text()), signal.SIGKILL)


def test_output_into_the_log_stays_in_the_nodes_own(nodes: Nodes) -> None:
    nodes.environ[LOG] = log_of(1)
    nodes.send("true")
    order = nodes.book.order(0)
    assert order is not None and order["caught"] is False


def test_the_script_begins_once_all_nodes_are_there(nodes: Nodes) -> None:
    environ = {"AWS_BATCH_JOB_NUM_NODES": "3", "BATCHML_NODE_ADDRESS": "10.0.0.1"}
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            nodes.book.enter(2, "10.0.0.3")
        if len(slept) == 5:
            nodes.book.enter(1, "10.0.0.2")

    assert gather(environ, book=nodes.book, sleep=sleep) == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert gather({}) == ["127.0.0.1"]


def test_a_node_of_several_says_where_it_is_reached() -> None:
    """torchrun and gloo would ask for the name of the machine, which may be that of 127.0.0.1."""
    two = {"AWS_BATCH_JOB_NUM_NODES": "2", "BATCHML_NODE_ADDRESS": "127.0.0.1"}
    found = network(two)
    assert found["PET_LOCAL_ADDR"] == found["SLURMD_NODENAME"] == "127.0.0.1"
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "lo"
    assert network({}) == {}


class Away(FolderStore):
    """A store that cannot be had now and then."""

    def __init__(self, folder: str, fails: Callable[[], bool]) -> None:
        super().__init__(folder)
        self._fails = fails

    def put(self, key: str, data: bytes) -> None:
        if self._fails():
            raise StoreError("it is away", temporary=True)
        super().put(key, data)


def test_what_could_not_be_told_is_told_later(nodes: Nodes, tmp_path: Path) -> None:
    nodes.send(sys.executable, "-c", "print('x' * 70000)")
    order: Any = nodes.book.order(0)
    away = [True] * 3
    book = Book(Away(str(tmp_path / "store"), lambda: bool(away and away.pop())), 1)
    place = Place(1, {**nodes.given, FOLDER: str(nodes.second)}, str(nodes.second))
    part = Part(book, 0, order, place)

    def look() -> bool:
        try:
            return part.look()
        except StoreError:
            return False

    wait_for(look, "all is told")
    ended = book.ended(0, 1)
    assert ended is not None and ended["codes"] == [0, 0] and not away
    told = b"".join(book.out(0, 1, block) or b"" for block in range(ended["blocks"]))
    assert len(told) == 2 * 70001
