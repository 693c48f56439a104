"""A gang through the embedded server: its nodes are jobs' nodes, its ranks tiny programs."""

import hashlib
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchml.local.home import Home
from batchml.runtime.protocol.launch import TORCHRUN, LaunchPlan
from tests.process.test_multinode import NAMESPACES, Cluster, namespaces, needs_namespaces
from tests.support.local_server import wait_for, wait_for_job

# Each step makes the next state of the last one, and rank 0 keeps it in a folder that all attempts
# share. It dies where FAULTS say so: `GENERATION:RANK:STEP:kill`; of `supervisor`, its parent does.
RANK = r"""
import hashlib, os, signal, sys, time
from batchml.runtime import should_stop
env = os.environ
rank, generation = int(env["RANK"]), int(env["BATCHML_GENERATION"])
kept = os.path.join(env["KEPT"], "state")
start, state = open(kept).read().split() if os.path.exists(kept) else ("0", "")
start = int(start)
def meet(step):
    # As in a collective, nobody goes on before all are here.
    name = f"{env['AWS_BATCH_JOB_ID'][:36]}-{generation}-{step}"
    place = os.path.join(env["KEPT"], "..", "meet", name)
    os.makedirs(place, exist_ok=True)
    open(os.path.join(place, str(rank)), "w").close()
    while len(os.listdir(place)) < int(env["WORLD_SIZE"]) and not should_stop():
        time.sleep(0.01)
print(f"generation {generation} world {env['WORLD_SIZE']} from {start}", flush=True)
if rank == 0:  # in a file also: a supervisor that is killed at once has not passed the line on
    print(start, file=open(os.path.join(env["KEPT"], "starts"), "a"), flush=True)
for step in range(start + 1, int(env["STEPS"]) + 1):
    meet(step)
    state = hashlib.sha256(f"{state}{step}".encode()).hexdigest()
    if rank == 0:
        with open(kept + ".tmp", "w") as file:
            file.write(f"{step} {state}")
        os.replace(kept + ".tmp", kept)
    if should_stop():
        print(f"rank {rank} has saved", flush=True)
        sys.exit(0)
    for fault in env.get("FAULTS", "").split():
        when, who, at, deed = fault.split(":")
        if (int(when), int(who)) == (generation, rank) and step - start == int(at):
            if deed == "supervisor":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
    while generation == int(env.get("WAIT", "0")) and not should_stop():
        time.sleep(0.05)
print(f"rank {rank} is done: {state[:16]}", flush=True)
"""


def unbroken(steps: int) -> str:
    """What it comes to when nothing happens."""
    state = ""
    for step in range(1, steps + 1):
        state = hashlib.sha256(f"{state}{step}".encode()).hexdigest()
    return state[:16]


LIMITS = '{"beat": 0.3, "silent": 15, "regroup": 3, "gone": 0.5, "end_grace": 0.3}'
Start = Callable[..., "Gang"]


class Gang:
    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.kept = folder / "kept"
        self.kept.mkdir()
        self.count = 0

    def submit(self, nodes: int, plan: LaunchPlan, attempts: int = 1, **variables: str) -> str:
        self.count += 1
        definition = self.cluster.define(nodes, RANK)
        given = {
            "BATCHML_KEY": f"{self.count:032x}",
            "BATCHML_LAUNCH": plan.to_json(),
            "BATCHML_GANG_TOKEN": os.urandom(16).hex(),
            "BATCHML_CHECKPOINT_DIR": str(self.kept),
            "KEPT": str(self.kept),
            "STEPS": "8",
            "BATCHML_GANG_LIMITS": LIMITS,
            **variables,
        }
        environment = [{"name": name, "value": value} for name, value in given.items()]
        override = {"targetNodes": "0:", "containerOverrides": {"environment": environment}}
        rules = [{"onExitCode": "75", "action": "RETRY"}, {"onReason": "*", "action": "EXIT"}]
        return str(
            self.cluster.batch.submit_job(
                jobName="gang", jobQueue="default", jobDefinition=definition,
                nodeOverrides={"nodePropertyOverrides": [override]},
                retryStrategy={"attempts": attempts, "evaluateOnExit": rules},
            )["jobId"]
        )  # fmt: skip

    def ended(self, job_id: str) -> tuple[str, int | None]:
        """The status of a job once it has ended, and its exit code."""
        job = wait_for_job(self.cluster.batch, job_id, limit=90)
        return job["status"], self.cluster.node(job_id, 0)["container"].get("exitCode")

    def run(self, job_id: str, node: int = 0) -> list[str]:
        """What all attempts of a node printed, in order."""
        attempts = self.cluster.node(job_id, node)["attempts"]
        streams = [attempt["container"]["logStreamName"] for attempt in attempts]
        return [
            event["message"]
            for stream in streams
            for event in self.cluster.logs.get_log_events(
                logGroupName="/aws/batch/job", logStreamName=stream, startFromHead=True
            )["events"]
        ]

    def until_said(self, words: str, job_id: str, node: int = 0) -> None:
        wait_for(
            lambda: any(words in line for line in self.said(job_id, node)),
            f"node {node} says {words!r}", 60,
        )  # fmt: skip

    def said(self, job_id: str, node: int = 0) -> list[str]:
        """What the last attempt of a node printed."""
        return self.cluster.lines(job_id, node)


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Start]:
    made: list[Cluster] = []

    def one(kind: str) -> Gang:
        home = Home(tmp_path / "home")
        home.prepare()
        made.append(Cluster(home, kind, tmp_path / "files"))
        return Gang(made[-1], tmp_path)

    yield one
    for cluster in made:
        cluster.close()


def test_a_killed_rank_begins_again_in_place_where_it_was(gang: Start) -> None:
    """(A1)"""
    here = gang("namespace" if NAMESPACES else "loopback")
    job_id = here.submit(2, LaunchPlan(TORCHRUN, processes=2), FAULTS="1:3:3:kill 2:0:2:kill")
    assert here.ended(job_id) == ("SUCCEEDED", 0), here.said(job_id)
    said = here.said(job_id)
    assert "[r0] generation 1 world 4 from 0" in said
    assert any("[r0] generation 3 world 4 from " in line for line in said)
    assert any("Rank 3 on node 1 " in line and "SIGKILL" in line for line in said)
    assert f"[r0] rank 0 is done: {unbroken(8)}" in said
    assert any(line.startswith("[r2] rank 2 is done") for line in here.said(job_id, 1))
    assert said[-1].startswith("::batchml end code=0 lines=")


@pytest.mark.journey
def test_a_lost_node_is_made_good_by_the_next_attempt(gang: Start) -> None:
    """The child's supervisor is killed in the first attempt, the main node's in the second.
    (A2, A3, A8)"""
    here = gang("loopback")
    faults = "1:1:2:supervisor 2:0:2:supervisor"
    job_id = here.submit(2, LaunchPlan(TORCHRUN, processes=1), attempts=3, FAULTS=faults)
    assert here.ended(job_id) == ("SUCCEEDED", 0), here.said(job_id)
    job = here.cluster.batch.describe_jobs(jobs=[f"{job_id}#0"])["jobs"][0]
    codes = [attempt["container"]["exitCode"] for attempt in job["attempts"]]
    assert codes == [75, 75, 0]
    said = here.run(job_id)
    starts = [int(start) for start in (here.kept / "starts").read_text().split()]
    assert starts == sorted(starts) and len(starts) == 3 and starts[-1] >= 2
    said = [line for line in said if not line.startswith("::batchml usage ")]
    assert said[-2].endswith(unbroken(8))


def test_a_terminated_run_saves_on_all_nodes_and_leaves_nothing(gang: Start) -> None:
    here = gang("loopback")
    job_id = here.submit(2, LaunchPlan(TORCHRUN, processes=2), WAIT="1")
    here.until_said("[r0] generation 1", job_id)
    here.until_said("[r3] generation 1", job_id, 1)
    here.cluster.batch.terminate_job(jobId=job_id, reason="enough")
    assert here.ended(job_id) == ("FAILED", 143)
    here.until_said("[r0] rank 0 has saved", job_id)
    here.until_said("[r3] rank 3 has saved", job_id, 1)


def namespace_of(cluster: Cluster, job_id: str, node: int) -> str:
    """The network namespace that a node lives in; other servers have the same addresses."""
    [place] = cluster.interfaces(job_id, node)
    for name in [line.split()[0] for line in namespaces(cluster.home)]:
        has = subprocess.run(["ip", "-n", name, "addr"], capture_output=True, text=True)
        if f"{place['privateIpv4Address']}/" in has.stdout:
            return name
    raise AssertionError(f"no namespace has {place}")


@needs_namespaces
def test_a_node_that_is_cut_off_is_ended_on_both_sides_and_taken_back(gang: Start) -> None:
    """Its ranks are ended by its own supervisor, which cannot be told to. (A4)"""
    here = gang("namespace")
    limits = '{"beat": 0.3, "silent": 2, "regroup": 60, "gone": 60, "end_grace": 0.3}'
    job_id = here.submit(2, LaunchPlan(TORCHRUN, processes=1), WAIT="1", BATCHML_GANG_LIMITS=limits)
    here.until_said("generation 1", job_id)
    here.until_said("generation 1", job_id, 1)
    name = namespace_of(here.cluster, job_id, 1)
    subprocess.run(["ip", "-n", name, "link", "set", "eth0", "down"], check=True)
    here.until_said("does not answer any more", job_id)
    here.until_said("the main node does not answer any more", job_id, 1)
    assert not any("generation 2" in line for line in here.said(job_id))
    subprocess.run(["ip", "-n", name, "link", "set", "eth0", "up"], check=True)
    assert here.ended(job_id) == ("SUCCEEDED", 0), here.said(job_id)
    assert f"rank 0 is done: {unbroken(8)}" in here.said(job_id)


@pytest.mark.skipif(not os.environ.get("BATCHML_TORTURE"), reason="minutes: make torture")
def test_whatever_is_killed_at_whatever_time_the_run_finishes(gang: Start) -> None:
    """Twenty ranks and five supervisors, at random; the state is that of an unbroken run. (A1, A8)

    The attempts are those of two jobs, as when a run is sent again.
    """
    chance = random.Random(7)
    here = gang("loopback")
    deeds = ["kill"] * 20 + ["supervisor"] * 5
    chance.shuffle(deeds)
    faults = " ".join(
        f"{generation}:{chance.randrange(4)}:{chance.randint(1, 12)}:{deed}"
        for generation, deed in enumerate(deeds, 1)
    )
    for _ in range(2):
        job_id = here.submit(
            2, LaunchPlan(TORCHRUN, processes=2), attempts=10, STEPS="250", FAULTS=faults
        )
        if here.ended(job_id) == ("SUCCEEDED", 0):
            break
    assert f"[r0] rank 0 is done: {unbroken(250)}" in here.said(job_id)
