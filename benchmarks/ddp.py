"""Data-parallel training on this machine: two nodes against one, our supervisor against torchrun.

    python -m benchmarks.ddp [--python PY] [--pairs K] [--epochs N]

Nodes are processes on the loopback, each with a supervisor and one rank, as in a container.
In each pair the two run in turn; a machine does other work too, which disturbs both of a pair
alike: trust the ratios. Two nodes of one machine share its cores and its memory bus.

A supervisor's share of a step is measured twice: by the steps of a pair, and by the CPU time of
the supervisors against that of the ranks, which does not depend on other programs.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from batchml.runtime.protocol.launch import TOKEN, TORCHRUN, VARIABLE, LaunchPlan
from benchmarks.lenet import ROOT, interpreter

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


def compare_nodes(python: Path, pairs: int, epochs: int) -> None:
    """The same work for each rank, on one node and on two."""
    one_epoch = 2048 // 32  # steps of one rank
    print(
        f"{'pair':>4} {'ddp 1':>9} {'ddp 2':>9} {'ratio':>6}"
        f" {'llama 1':>9} {'llama 2':>9} {'ratio':>6}   samples/s, tokens/s; of all ranks"
    )
    rows = []
    for pair in range(1, pairs + 1):
        row = []
        for program, value in (
            ([str(DDP), str(max(1, epochs // 4)), str(one_epoch)], Nodes.samples),
            ([str(LLAMA), *LARGE], Nodes.tokens),
        ):
            found = [value(train(nodes, ours(python, program))) for nodes in (1, 2)]
            row += [*found, found[1] / found[0]]
        rows.append(row)
        print(_row(str(pair), row), flush=True)
    print(_row("mid", [median(column) for column in zip(*rows, strict=True)]))


def _row(name: str, row: Sequence[float]) -> str:
    one, two, ratio, three, four, other = row
    return f"{name:>4} {one:9.0f} {two:9.0f} {ratio:6.2f} {three:9.0f} {four:9.0f} {other:6.2f}"


def compare_launchers(python: Path, pairs: int, epochs: int) -> None:
    """Two nodes, started by us and by torchrun."""
    program = [str(DDP), str(epochs), str(epochs)]
    starters = (ours(python, program), torchruns(python, program))
    print(
        f"{'pair':>4} {'ours':>9} {'torchrun':>9} {'ratio':>6}   ms a step;"
        " CPU of the launchers for that of the ranks: ours, torchrun"
    )
    rows = []
    for pair in range(1, pairs + 1):
        # Who goes first changes from pair to pair, so that neither always has the cooler machine.
        found = {which: train(2, starters[which]) for which in ((0, 1) if pair % 2 else (1, 0))}
        steps = [found[which].milliseconds() for which in (0, 1)]
        shares = [found[which].launchers_share for which in (0, 1)]
        rows.append([*steps, steps[0] / steps[1], *shares])
        print(_launched(str(pair), rows[-1]), flush=True)
    print(_launched("mid", [median(column) for column in zip(*rows, strict=True)]))


def _launched(name: str, row: Sequence[float]) -> str:
    mine, theirs, ratio, share, other = row
    return f"{name:>4} {mine:9.3f} {theirs:9.3f} {ratio:6.3f}   {share:.2%}, {other:.2%}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", type=Path, metavar="PY", help="a Python with PyTorch")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=200, help="of the pairs with torchrun")
    options = parser.parse_args(arguments)
    if options.pairs < 1 or options.epochs < 2:
        parser.error("--pairs starts at 1, --epochs at 2")
    python = options.python or interpreter("pytorch")
    print("One node beside two:")
    compare_nodes(python, options.pairs, options.epochs)
    print("\nOur supervisor beside torchrun, two nodes:")
    compare_launchers(python, options.pairs, options.epochs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
