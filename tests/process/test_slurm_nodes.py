"""Scripts of Slurm on two nodes, as containers run them: the script on the first, `srun` on all."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.runtime.processes import descendants
from tests.process.test_processes import is_alive
from tests.support.local_server import wait_for


class Nodes:
    """Two nodes, each with a working folder of its own, that share the run's store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, script: str, count: int = 2) -> None:
        path = self.folder / "job.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        for number in range(count):
            self.add(number)

    def add(self, number: int) -> None:
        work = self.folder / f"work-{number}"
        work.mkdir()
        given = {
            "PATH": os.environ["PATH"], "BATCHML_SLURM": "1",
            "AWS_BATCH_JOB_ID": f"job#{number}", "AWS_BATCH_JOB_ATTEMPT": "1",
            "AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            "AWS_BATCH_JOB_NODE_INDEX": str(number), "BATCHML_STORE": str(self.folder / "store"),
            "BATCHML_NODE_ADDRESS": f"127.0.4.{number + 1}",
            "BATCHML_METRICS": str(self.folder / f"of-{number}" / "metrics"),
            "BATCHML_OUTPUT_DIR": str(self.folder / "output"), "BATCHML_GRACE": "20",
        }  # fmt: skip
        (self.folder / f"of-{number}").mkdir()
        script = [sys.executable, "-m", "batchml.runtime.entry.script", str(self.folder / "job.sh")]
        with open(self.folder / f"log-{number}", "wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "batchml.runtime.run", *script], cwd=work,
                    env=given, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )
            )  # fmt: skip

    def said(self, number: int = 0) -> list[str]:
        return (self.folder / f"log-{number}").read_text().splitlines()

    def until_said(self, words: str, number: int = 0) -> None:
        look = lambda: any(words in line for line in self.said(number))  # noqa: E731
        wait_for(look, f"node {number} says {words!r}", 60)

    def code(self, number: int = 0) -> int:
        return self.processes[number].wait(60)

    def close(self) -> None:
        left = descendants(*(process.pid for process in self.processes))
        for process in self.processes:
            process.kill()
            process.wait()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        wait_for(lambda: not any(map(is_alive, left)), "all of it is gone")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.close()


def test_a_step_runs_on_all_nodes_and_what_is_caught_comes_to_the_script(nodes: Nodes) -> None:
    nodes.start("""
echo nodes $SLURM_JOB_NODELIST
export MINE=yes
srun sh -c 'echo task $SLURM_PROCID of $SLURM_NTASKS: $MINE ${PWD##*/}'
echo caught $(srun -l sh -c 'echo $SLURM_PROCID' | sort)
srun -w 127.0.4.2 sh -c 'exit 7'; echo code $?
srun no-such-program 2>/dev/null; echo code $?
srun sh -c '[ $SLURM_PROCID = 0 ] || kill -9 $$'; echo code $?
exit 5
""")
    assert nodes.code() == 5
    said = nodes.said()[:-1]
    assert said == [
        "nodes 127.0.4.1,127.0.4.2", "task 0 of 2: yes work-0", "caught 0: 0 1: 1",
        "code 7", "code 127", "code 137",
    ]  # fmt: skip
    assert "task 1 of 2: yes work-1" in nodes.said(1)


def test_a_stop_lets_the_script_and_its_tasks_save(nodes: Nodes) -> None:
    """The script decides: its own srun still reaches the other node."""
    nodes.start("""
trap 'srun -w 127.0.4.2 sh -c "echo last"; exit 9' TERM
srun -l sh -c 'trap "echo saved; exit 0" TERM; echo begun; while :; do sleep 0.1; done' | cat &
wait
""")
    nodes.until_said("0: begun")
    nodes.until_said("1: begun")
    nodes.processes[0].terminate()
    assert nodes.code() == 9
    nodes.until_said("last", 1)


def test_a_node_that_is_gone_ends_its_tasks_and_the_step(nodes: Nodes) -> None:
    nodes.start("srun sh -c 'echo begun; [ $SLURM_PROCID = 0 ] || exec sleep 600'; echo code $?")
    nodes.until_said("begun", 1)
    (follower, *_) = descendants(nodes.processes[1].pid)
    os.kill(follower, signal.SIGKILL)
    assert nodes.code() == 0
    assert "code 75" in nodes.said()
    assert any("node 1 (127.0.4.2) is gone" in line for line in nodes.said())


def test_the_other_node_ends_its_tasks_when_the_first_is_gone(nodes: Nodes) -> None:
    nodes.start("srun sh -c 'echo begun $$; exec sleep 600'")
    nodes.until_said("begun", 1)
    task = int(next(line for line in nodes.said(1) if "begun" in line).split()[-1])
    left = descendants(nodes.processes[0].pid)
    nodes.processes[0].kill()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(task), "the task of the other node has ended", 30)


def test_the_script_waits_for_the_other_node(nodes: Nodes) -> None:
    nodes.start("echo here; scontrol show hostnames", count=1)
    wait_for(lambda: (nodes.folder / "store" / "steps" / "1" / "server").exists(), "it listens", 30)
    assert nodes.said() == []
    nodes.add(1)
    assert nodes.code() == 0
    assert nodes.said()[:-1] == ["here", "127.0.4.1", "127.0.4.2"]
