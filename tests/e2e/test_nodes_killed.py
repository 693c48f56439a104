"""Runs of many nodes in which anything is killed at any time, as a user meets them.

The claim: such a run ends finished, without a person; every start goes on from the newest
checkpoint; nothing of it is left on the machine. BATCHML_TORTURE makes it hundreds of kills, in
networks of their own. docs/multi-node.md
"""

import hashlib
import itertools
import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from batchml.local.home import Home
from batchml.runtime.checkpoint import newest_step
from tests.process.test_multinode import NAMESPACES, namespaces
from tests.support.cli import Cli, write_job
from tests.support.executor_rig import IMAGE, docker, need_engine
from tests.support.local_server import identity_of, wait_for

ROUNDS = int(os.environ.get("BATCHML_TORTURE") or 0)
SEED = int(os.environ.get("BATCHML_SEED") or random.randrange(10**6))
LIMIT = 300 if ROUNDS else 60  # seconds for what takes three; a machine may be busy

# Times of the supervisors: what is lost for good here is not to be waited for.
JOB = """
image = "{image}"
command = ["python3", "train.py"]
nodes = 2
[resources]
vcpus = 1
memory = "128 MiB"
[launch]
kind = "torchrun"
processes_per_node = 2
start_within = "30s"
[retry]
attempts = 10
[env]
STEPS = "{steps}"
BATCHML_GANG_LIMITS = '{{"beat": 0.3, "regroup": 5, "gone": 0.3, "end_grace": 0.3}}'
"""

# Ranks that step together, as collectives do, through rank 0. A step's state follows from the last.
TRAIN = """
import hashlib, os, socket, sys, time
from batchml.runtime import checkpoint
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
main = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
found = checkpoint.newest()
step, state = (found.step, open(found.path + "/state").read()) if found else (0, "")
if rank == 0:
    server = socket.create_server(main)
    peers = [server.accept()[0] for _ in range(world - 1)]
else:
    while True:
        try:
            peers = [socket.create_connection(main)]
            break
        except OSError:
            time.sleep(0.01)
print(f"from {step}", flush=True)
def meet():
    for peer in peers:
        if rank:
            peer.sendall(b".")
        if not peer.recv(1):
            sys.exit("a peer is gone")
    for peer in peers:
        if not rank:
            peer.sendall(b".")
def write(folder):
    with open(folder + "/state", "w") as file:
        file.write(state)
while step < int(os.environ["STEPS"]):
    time.sleep(0.01)
    meet()
    step += 1
    state = hashlib.sha256(f"{state}{step}".encode()).hexdigest()
    print(f"step {step}", flush=True)
    if step % 5 == 0:
        checkpoint.save(write, step)
print(f"done {state}", flush=True)
"""


def unbroken(steps: int) -> str:
    """What a training comes to when nothing happens."""
    state = ""
    for step in range(1, steps + 1):
        state = hashlib.sha256(f"{state}{step}".encode()).hexdigest()
    return state


class Process(NamedTuple):
    pid: int
    parent: int
    node: int
    kind: str


def processes_of(job_id: str) -> list[Process]:
    """All live processes of a run, by their variables."""
    return [found for entry in Path("/proc").iterdir() if (found := _process(entry, job_id))]


def _process(entry: Path, job_id: str) -> Process | None:
    try:
        words = (entry / "environ").read_bytes().decode("utf-8", "replace").split("\0")
        command = (entry / "cmdline").read_bytes()
        fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None  # no process, not ours, or gone
    environ = dict(word.split("=", 1) for word in words if "=" in word)
    if not environ.get("AWS_BATCH_JOB_ID", "").startswith(job_id) or fields[0] == b"Z":
        return None
    kinds = {b"batchml.runtime.run": "entry", b"batchml.runtime.nodes.torchrun": "supervisor"}
    kind = next((kind for text, kind in kinds.items() if text in command), "rank")
    return Process(int(entry.name), int(fields[1]), int(environ["AWS_BATCH_JOB_NODE_INDEX"]), kind)


class Killed:
    """A run of `steps` steps, and what is done to it."""

    def __init__(self, cli: Cli, image: str, steps: int) -> None:
        write_job(cli.folder, "pair", JOB.format(image=image, steps=steps), train__py=TRAIN)
        sent = cli("submit", "pair", "--json")
        assert sent.code == 0, sent.err
        self._cli, self._steps = cli, steps
        self.id = str(sent.json["jobId"])
        self.floors: list[int] = []  # steps that were saved when something of it was killed

    def reached(self) -> int:
        return newest_step(str(self._cli.home.root / "runs" / self.id / "checkpoints")) or 0

    def until(self, step: int) -> int:
        """Wait for a checkpoint of this step or a later one; its step."""
        wait_for(lambda: self.reached() >= step, f"step {step} is saved", LIMIT)
        return self.reached()

    def check(self, kills: list[str]) -> None:
        """It is finished, it went on from its newest checkpoint each time, and it is gone."""
        done = self._cli("wait", self.id, timeout=LIMIT)
        assert done.code == 0, (SEED, kills, done, self._printed(0))
        lines = self._printed(0)
        assert sum(f"done {unbroken(self._steps)}" in line for line in lines) == 2, (SEED, kills)
        starts = [int(n) for n in re.findall(r"\[r0\] from (\d+)", "\n".join(lines))]
        assert starts == sorted(starts), (SEED, kills, starts)
        for floor in self.floors:
            assert any(start >= floor for start in starts), (SEED, kills, starts, self.floors)
        for rank in (0, 1):  # from each start on step by step
            said = re.findall(rf"\[r{rank}\] (from|step) (\d+)", "\n".join(lines))
            pairs = itertools.pairwise(said)
            assert all(b[0] == "from" or int(b[1]) == int(a[1]) + 1 for a, b in pairs), said
        assert wait_for(lambda: not processes_of(self.id), "all processes of it are gone", 30)

    def _printed(self, node: int) -> list[str]:
        return self._cli("logs", f"{self.id}#{node}").out.splitlines()


def runners(home: Home) -> list[int]:
    """Those of a server that live; a killed one leaves its record."""
    files = sorted(home.attempts.glob("*/runner.json"))
    pids = [json.loads(file.read_text())["pid"] for file in files]
    return [pid for pid in pids if is_runner(Path(f"/proc/{pid}/cmdline"))]


def is_runner(command: Path) -> bool:
    try:
        return b"batchml.local.executors.runner.main" in command.read_bytes()
    except OSError:
        return False


def kill(run: Killed, home: Home, chance: random.Random) -> str:
    """Kill something of a run, or what looks after it, by chance; what it was."""
    kind = chance.choice(["rank", "rank", "supervisor", "entry", "runner", "server", "node"])
    node = chance.randrange(2)

    def find() -> list[int]:
        if kind == "server":
            return [int((home.local / "lock").read_text())]
        if kind == "runner":
            return chance.sample(runners(home), 1) if runners(home) else []
        mine = [each for each in processes_of(run.id) if each.node == node]
        if kind == "entry":  # which may be a fork, with another's command line
            return [each.parent for each in mine if each.kind == "supervisor"]
        found = [each.pid for each in mine if kind in ("node", each.kind)]
        return chance.sample(found, 1) if kind == "rank" and found else found

    pids = wait_for(find, f"there is a {kind}", LIMIT)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return f"{kind} of node {node}: {pids}"


def killed_at_random(cli: Cli, image: str, kills: int, do: Callable[[Killed], str]) -> None:
    """A run with as many kills, each once some steps more are saved; for torture, many runs."""
    for number in range(max(1, ROUNDS)):
        _killed(cli, image, 9 if ROUNDS else kills, do)
        (cli.folder / "jobs" / "pair").rename(cli.folder / f"pair-{number}")


def _killed(cli: Cli, image: str, count: int, do: Callable[[Killed], str]) -> None:
    run = Killed(cli, image, 20 * (count + 4))
    kills: list[str] = []
    for index in range(count):
        saved = run.until(20 * index + 5)
        kills.append(do(run))
        if not kills[-1].startswith("server"):  # without which a run goes on
            run.floors.append(saved)
        cli("ls")  # a server that was killed comes back with the next command
    run.check(kills)


@pytest.fixture
def network(cli: Cli) -> Iterator[None]:
    """Nodes have addresses of the loopback, which are quick; for torture, networks of their own."""
    if not ROUNDS:
        cli.environ["BATCHML_NODE_NETWORK"] = "loopback"
    yield
    cli("local", "stop")


@pytest.mark.usefixtures("network")
def test_processes_of_a_run_may_be_killed_at_any_time(cli: Cli) -> None:
    """(A1, A2, A8)"""
    print(f"BATCHML_SEED={SEED}")
    chance = random.Random(SEED)
    assert cli("local", "start", "--vcpus", "2").code == 0
    image = "docker.io/library/python:3.12"
    killed_at_random(cli, image, 2, lambda run: kill(run, cli.home, chance))
    if NAMESPACES:
        wait_for(lambda: not namespaces(cli.home), "no network of it is left")


@pytest.mark.slow
@pytest.mark.usefixtures("network")
def test_containers_of_a_run_may_be_killed_at_any_time(cli: Cli) -> None:
    """(A2)"""
    need_engine()
    print(f"BATCHML_SEED={SEED}")
    chance = random.Random(SEED)

    def kill_one(run: Killed) -> str:
        node = chance.randrange(2) if ROUNDS else 1
        verb = chance.choice(["kill", "rm -f"])
        mine = docker("ps", "-q", "--filter", f"label=batchml.job={run.id}#{node}").stdout.split()
        docker(*verb.split(), *mine)
        return f"{verb} of node {node}"

    assert cli("local", "start", "--vcpus", "2", "--executor", "docker").code == 0
    killed_at_random(cli, IMAGE, 1, kill_one)
    mine = f"label=batchml.home={identity_of(cli.home)}"
    wait_for(lambda: not docker("ps", "-a", "-q", "--filter", mine).stdout, "no container is left")
    networks = docker("network", "ls", "--format", "{{json .}}").stdout.splitlines()
    names = [json.loads(line)["Name"] for line in networks]
    assert not [name for name in names if identity_of(cli.home)[:8] in name]
