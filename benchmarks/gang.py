"""What a supervisor costs, and how soon a multi-node run goes on, compared with torchrun.

Nodes are processes on the loopback with one rank each, started in turn by our entry and by
`torchrun --max-restarts 0` with a static rendezvous. torchrun's own restarts across nodes do not
recover in torch 2.13, so a killed rank costs there the end of the run and a new run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from batchml.runtime.processes import WAITING_SPARE, descendants, read
from batchml.runtime.protocol.launch import TOKEN, TORCHRUN, VARIABLE, LaunchPlan
from benchmarks.ddp import children, free_port
from benchmarks.lenet import ROOT, interpreter
from benchmarks.rows import Finding, paired
from benchmarks.running import main

# Prints the time of each step. Torch's only where it is asked for: it takes seconds to import.
RANK = """
import os, sys, time
rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
if sys.argv[1] == "torch":
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    meet = lambda: dist.all_reduce(torch.ones(1))
else:
    meet = lambda: time.sleep(0.05)
print("pid", os.getpid(), flush=True)
for step in range(int(sys.argv[2])):
    meet()
    print("step", time.monotonic(), flush=True)
    time.sleep(0.02)
sys.exit(int(sys.argv[3]))
"""
LIMIT = 120.0  # seconds


class Launched(NamedTuple):
    """Nodes that run, the file of each one's output, and when the first was started."""

    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]
    began: float

    def words(self, kind: str) -> list[list[str]]:
        """What followed `kind` in the lines of each node, in order."""
        return [
            [line.split()[1] for line in log.read_text().splitlines() if line.startswith(kind)]
            for log in self.logs
        ]

    def until(self, kind: str, count: int) -> list[list[str]]:
        """`words`, once each node has printed so many of them. Raises RuntimeError."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            found = self.words(kind)
            if all(len(each) >= count for each in found):
                return found
            time.sleep(0.005)
        raise RuntimeError("\n".join(log.read_text() for log in self.logs))

    def codes(self) -> list[int]:
        return [process.wait(LIMIT) for process in self.processes]

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        self.codes()


Starter = Callable[[int, int, int, str], tuple[list[str], dict[str, str]]]


def ours(python: Path, rank: Sequence[str], spares: str = "") -> Starter:
    def start(node: int, nodes: int, port: int, folder: str) -> tuple[list[str], dict[str, str]]:
        environ = {
            VARIABLE: LaunchPlan(TORCHRUN, processes=1).to_json(), TOKEN: "0" * 32,
            "BATCHML_KEY": f"benchmark{port}", "BATCHML_NODE_ADDRESS": f"127.0.0.{node + 1}",
            "BATCHML_CHECKPOINT_DIR": f"{folder}/checkpoints-{port}",
            "BATCHML_SPARES": spares, "BATCHML_GANG_LIMITS": '{"spares": 0}',
            "AWS_BATCH_JOB_ID": f"job#{node}",
            "AWS_BATCH_JOB_ATTEMPT": "1", "AWS_BATCH_JOB_NODE_INDEX": str(node),
            "AWS_BATCH_JOB_NUM_NODES": str(nodes), "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        }  # fmt: skip
        if node:
            environ["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "127.0.0.1"
        return [str(python), "-m", "batchml.runtime.run", str(python), *rank], environ

    return start


def torchruns(python: Path, rank: Sequence[str]) -> Starter:
    def start(node: int, nodes: int, port: int, _: str) -> tuple[list[str], dict[str, str]]:
        words = [f"--nnodes={nodes}", "--nproc-per-node=1", f"--node-rank={node}"]
        words += ["--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=0"]
        return [str(python), "-m", "torch.distributed.run", *words, *rank], {}

    return start


def launch(starter: Starter, nodes: int, folder: str) -> Launched:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("BATCHML_", "AWS_"))}
    base |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
             "PYTHONUNBUFFERED": "1"}  # fmt: skip
    port, began = free_port(), time.monotonic()
    processes, logs = [], []
    for node in range(nodes):
        command, environ = starter(node, nodes, port, folder)
        logs.append(Path(folder) / f"{port}-{node}")
        with logs[-1].open("wb") as log:
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=folder,
                    env={**base, **environ},
                    stdout=log,
                    stderr=subprocess.DEVNULL,
                    stdin=subprocess.DEVNULL,
                )
            )
    return Launched(processes, logs, began)


def memory_mib(pids: Sequence[int]) -> float:
    """Private and shared pages, these by halves and so on: proc_pid_smaps(5), Pss."""
    kib = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            kib += int(line.split()[1]) if line.startswith("Pss:") else 0
    return kib / 1024


class Start(NamedTuple):
    seconds: float  # from the command to the first line of both ranks
    memory: float  # MiB of what is beside the rank, of one node
    code: int  # of the main node, where a rank ends with 3


def started(starter: Starter, folder: str) -> Start:
    here = launch(starter, 2, folder)
    here.until("pid", 1)
    seconds = time.monotonic() - here.began
    [rank] = [int(pid) for pid in here.words("pid")[0][:1]]
    beside = [here.processes[0].pid, *children(here.processes[0].pid)]
    memory = memory_mib([pid for pid in beside if pid != rank])
    return Start(seconds, memory, here.codes()[0])


def next_step(starter: Starter, folder: str, has_spares: bool = False) -> float:
    """Seconds from the kill of a rank to the next step of both, in place."""
    here = launch(starter, 2, folder)
    pids = here.until("pid", 1)
    here.until("step", 10)
    end = time.monotonic() + LIMIT
    while has_spares and not all(has_spare(node.pid) for node in here.processes):
        if time.monotonic() > end:
            raise RuntimeError("no spare is ready")
        time.sleep(0.05)
    killed = time.monotonic()
    os.kill(int(pids[1][0]), signal.SIGKILL)
    here.until("pid", 2)
    before = [log.read_text().rpartition("pid ")[0].count("step ") for log in here.logs]
    steps = here.until("step", max(before) + 1)
    here.end()
    return max(float(times[count]) for times, count in zip(steps, before, strict=True)) - killed


def has_spare(node: int) -> bool:
    return any(read(f"/proc/{pid}/comm").strip() == WAITING_SPARE for pid in descendants(node))


def sent_again(starter: Starter, folder: str) -> float:
    """The same where the run ends, and is started again at once."""
    here = launch(starter, 2, folder)
    pids = here.until("pid", 1)
    here.until("step", 10)
    killed = time.monotonic()
    os.kill(int(pids[1][0]), signal.SIGKILL)
    here.codes()
    again = launch(starter, 2, folder)
    found = max(float(times[0]) for times in again.until("step", 1))
    again.end()
    return found - killed


def measure(full: bool) -> Iterator[Finding]:
    rounds, python = 5 if full else 1, interpreter("pytorch")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "rank.py"
        script.write_text(RANK)
        fails, goes_on = [str(script), "plain", "40", "3"], [str(script), "torch", "3000", "0"]
        pairs = [
            (started(ours(python, fails), folder), started(torchruns(python, fails), folder))
            for _ in range(rounds)
        ]
        beside = "torchrun, static"
        yield paired(
            "gang/start", "to the first line of both ranks", "s",
            [(a.seconds, b.seconds) for a, b in pairs], beside=beside, goal=1,
        )  # fmt: skip
        yield paired(
            "gang/memory", "memory beside the ranks of a node", "MiB",
            [(a.memory, b.memory) for a, b in pairs], beside=beside, goal=1,
        )  # fmt: skip
        if any(each.code != 3 for each, _ in pairs):
            raise RuntimeError("a rank ended with 3, and the gang did not")
        again = [
            (next_step(ours(python, goes_on, "1"), folder, has_spares=True),
             next_step(ours(python, goes_on), folder),
             sent_again(torchruns(python, goes_on), folder))
            for _ in range(rounds)
        ]  # fmt: skip
        told = "from a killed rank to the next step, in place"
        yield paired(
            "gang/recovery", told, "s", [(b, c) for _, b, c in again],
            beside=f"{beside}, started again", goal=1,
        )  # fmt: skip
        yield paired(
            "gang/recovery_spares", f"{told}, with spares", "s", [(a, c) for a, _, c in again],
            beside=f"{beside}, started again", goal=0.3,
        )  # fmt: skip


if __name__ == "__main__":
    main(measure)
