"""Data-parallel training on this machine: two nodes against one, our supervisor against torchrun.

Nodes are processes on the loopback, each with a supervisor and one rank, as in a container.
Two nodes of one machine share its cores and its memory bus.

A supervisor's share of a step is measured twice: by the steps of a pair, and by the CPU time of
the supervisors against that of the ranks, which does not depend on other programs.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from batchml.runtime.protocol.launch import TOKEN, TORCHRUN, VARIABLE, LaunchPlan
from benchmarks.lenet import ROOT, interpreter
from benchmarks.rows import Finding, paired
from benchmarks.running import main

DDP, LLAMA = ROOT / "jobs" / "ddp" / "ddp.py", ROOT / "jobs" / "llama" / "train.py"
SPEED = re.compile(r"processes: (\d+) samples/s, ([0-9.]+) ms a step")
TOKENS = re.compile(r"\| (\d+) tokens/s")
# Steps long enough that the processes compute more than they send.
LARGE = ("--steps", "50", "--batch", "128", "--micro-batch", "64", "--save-every", "50")
LIMIT = 600.0  # seconds of one training
_TICK = os.sysconf("SC_CLK_TCK")


class Nodes(NamedTuple):
    """What the nodes of one training printed, and what started the ranks used beside them."""

    output: str
    launchers_share: float  # CPU time of the launchers for that of the ranks, in the same steps

    def samples(self) -> float:
        return float(self._found()[1])

    def milliseconds(self) -> float:
        return float(self._found()[2])

    def tokens(self) -> float:
        """A second; the median of the lines but the first, which warms up."""
        return median([float(text) for text in TOKENS.findall(self.output)][1:])

    def _found(self) -> re.Match[str]:
        found = SPEED.search(self.output)
        if found is None:
            raise RuntimeError(f"the training failed: {self.output[-2000:]}")
        return found


Starter = Callable[[int, int, int], tuple[list[str], dict[str, str]]]  # node, nodes, port


def ours(python: Path, program: Sequence[str], processes: int = 1) -> Starter:
    """Each node as in a container, but for the server and the entry, which are not in its way."""

    def start(node: int, nodes: int, port: int) -> tuple[list[str], dict[str, str]]:
        environ = {
            VARIABLE: LaunchPlan(TORCHRUN, processes=processes).to_json(),
            TOKEN: "0" * 32,
            "BATCHML_KEY": f"benchmark{port}",
            "BATCHML_NODE_ADDRESS": f"127.0.0.{node + 1}",
            "AWS_BATCH_JOB_ID": f"job#{node}",
            "AWS_BATCH_JOB_ATTEMPT": "1",
            "AWS_BATCH_JOB_NODE_INDEX": str(node),
            "AWS_BATCH_JOB_NUM_NODES": str(nodes),
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        }
        if node:
            environ["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "127.0.0.1"
        command = [
            str(python),
            "-m",
            "batchml.runtime.nodes.torchrun",
            "--",
            str(python),
            *program,
        ]
        return command, environ

    return start


def torchruns(python: Path, program: Sequence[str]) -> Starter:
    """The launcher of PyTorch with a static rendezvous, the fastest that it has."""

    def start(node: int, nodes: int, port: int) -> tuple[list[str], dict[str, str]]:
        words = [f"--nnodes={nodes}", "--nproc-per-node=1", f"--node-rank={node}"]
        words += ["--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=0"]
        return [str(python), "-m", "torch.distributed.run", *words, *program], {}

    return start


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def cpu_seconds(pids: Sequence[int]) -> float:
    """Of processes alone, without their children: proc_pid_stat(5)."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICK


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Meter:
    """The CPU time of launchers and of what they started, from one moment to another."""

    def __init__(self, launchers: Sequence[int]) -> None:
        self._launchers = launchers
        self._ranks = [child for pid in launchers for child in children(pid)]
        self._start = self._read()

    def _read(self) -> tuple[float, float]:
        return cpu_seconds(self._launchers), cpu_seconds(self._ranks)

    def share(self) -> float:
        now = self._read()
        return (now[0] - self._start[0]) / (now[1] - self._start[1])


def train(nodes: int, starter: Starter) -> Nodes:
    """All nodes, to their end. Raises RuntimeError when one fails."""
    port = free_port()
    base = {k: v for k, v in os.environ.items() if not k.startswith(("BATCHML_", "AWS_"))}
    with tempfile.TemporaryDirectory() as folder:
        base |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                 "BATCHML_CHECKPOINT_DIR": folder}  # fmt: skip
        started = [_popen(*starter(node, nodes, port), base, folder) for node in range(nodes)]
        output, share = _follow(started)
        for process in started:
            if process.wait(LIMIT):
                raise RuntimeError(f"a node ended with code {process.returncode}: {output[-2000:]}")
    return Nodes(output, share)


def _popen(
    command: Sequence[str], own: Mapping[str, str], base: Mapping[str, str], folder: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env={**base, **own}, cwd=folder, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _follow(started: Sequence[subprocess.Popen[str]]) -> tuple[str, float]:
    """The main node's output, and the launchers' share between its first and its last epoch."""
    lines, share, meter = [], 0.0, None
    assert started[0].stdout is not None
    for line in started[0].stdout:
        lines.append(line)
        if "Epoch 0 | Loss" in line:
            meter = Meter([process.pid for process in started])
        if meter and SPEED.search(line):
            share = meter.share()
    for process in started[1:]:
        assert process.stdout is not None
        lines += process.stdout.readlines()
    return "".join(lines), share


def compare_nodes(python: Path, pairs: int, epochs: int, large: bool) -> Iterator[Finding]:
    """The same work for each rank, on two nodes and on one."""
    one_epoch = 2048 // 32  # steps of one rank
    programs = {"ddp": ([str(DDP), str(epochs), str(one_epoch)], Nodes.samples, "samples/s")}
    if large:
        programs["llama"] = ([str(LLAMA), *LARGE], Nodes.tokens, "tokens/s")
    for name, (program, value, unit) in programs.items():
        found = [
            (value(train(2, ours(python, program))), value(train(1, ours(python, program))))
            for _ in range(pairs)
        ]
        yield paired(
            f"ddp/{name}", f"{name} on two nodes, {epochs} epochs", unit, found, beside="one node",
            smaller=False,
        )  # fmt: skip


def compare_launchers(python: Path, pairs: int, epochs: int) -> Iterator[Finding]:
    """Two nodes, started by us and by torchrun."""
    program = [str(DDP), str(epochs), str(epochs)]
    starters = (ours(python, program), torchruns(python, program))
    rounds = []
    for pair in range(pairs):
        # Who goes first changes from pair to pair, so that neither always has the cooler machine.
        found = {which: train(2, starters[which]) for which in ((0, 1) if pair % 2 else (1, 0))}
        rounds.append((found[0], found[1]))
    yield paired(
        "ddp/step", f"a step of two nodes, {epochs} epochs", "ms",
        [(a.milliseconds(), b.milliseconds()) for a, b in rounds], beside="torchrun", goal=1.05,
    )  # fmt: skip
    yield paired(
        "ddp/launcher", f"CPU of the launchers for that of the ranks, {epochs} epochs", "%",
        [(100 * a.launchers_share, 100 * b.launchers_share) for a, b in rounds], beside="torchrun",
    )  # fmt: skip


def measure(full: bool) -> Iterator[Finding]:
    python = interpreter("pytorch")
    yield from compare_launchers(python, 5 if full else 1, 200 if full else 50)
    yield from compare_nodes(python, 5 if full else 1, 50 if full else 20, full)


if __name__ == "__main__":
    main(measure)
