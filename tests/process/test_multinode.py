"""Multi-node jobs as processes: every node an address of its own. docs/behaviours.md B230-B239."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.local.home import Home
from tests.support.local_server import client_for, identity_of, wait_for, wait_for_job

PORT = 29_500

# A server that believes in a larger machine: two jobs of two nodes are to run at once anywhere.
SERVER = """
import sys
from batchml.local.server import daemon
from batchml.local.machine import MachineCapacity
daemon.read_machine = lambda: MachineCapacity(vcpus=8, memory=4096)
sys.exit(daemon.main())
"""

# The rendezvous of a framework, in small. All main nodes of a test listen before the first goes on.
NODE = """
import json, os, socket, sys, time
env = os.environ
told = {name: value for name, value in env.items() if name.startswith("AWS_BATCH_JOB_")}
print(json.dumps({"told": told, "own": env["BATCHML_NODE_ADDRESS"]}), flush=True)
index, count = int(env["AWS_BATCH_JOB_NODE_INDEX"]), int(env["AWS_BATCH_JOB_NUM_NODES"])
main = env.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
job = env["AWS_BATCH_JOB_ID"].partition("#")[0]
if main is None:
    wildcard = env["BIND"] == "wildcard"
    server = socket.create_server(("" if wildcard else env["BATCHML_NODE_ADDRESS"], PORT))
    open(os.path.join(env["MEET"], job), "w").close()
    while len(os.listdir(env["MEET"])) < int(env["JOBS"]):
        time.sleep(0.01)
    found = []
    for _ in range(count - 1):
        peer, address = server.accept()
        hello = peer.makefile().readline()
        found.append([hello.strip(), address[0]])
        peer.sendall(b"welcome\\n")
    print(json.dumps(sorted(found)), flush=True)
    while not os.path.exists(env["MEET"] + "/../go"):
        time.sleep(0.01)
    sys.exit(int(env.get("CODE", "0")))
source = None if env["BIND"] == "wildcard" else (env["BATCHML_NODE_ADDRESS"], 0)
end = time.monotonic() + 50
while True:  # the main node has an address before it listens
    try:
        peer = socket.create_connection((main, PORT), 30, source_address=source)
        break
    except ConnectionRefusedError:
        if time.monotonic() > end:
            raise
        time.sleep(0.01)
peer.sendall(f"{job} node {index}\\n".encode())
print(peer.makefile().readline().strip(), flush=True)
time.sleep(600)
""".replace("PORT", str(PORT))


def may_make_namespaces() -> bool:
    """Whether a network namespace can be made here, found out by making one."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("nsenter")):
        return False
    name = f"batchml-test-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


NAMESPACES = may_make_namespaces()
needs_namespaces = pytest.mark.skipif(not NAMESPACES, reason="network namespaces need root")
KINDS = [pytest.param("namespace", marks=needs_namespaces), "loopback"]


def namespaces(home: Home) -> list[str]:
    """What there is of a server's, on this machine."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout
    tag = identity_of(home)[:8]
    return [line for line in (listed + links).splitlines() if tag in line]


class Cluster:
    """A server and its clients; `start` again is the next server."""

    def __init__(self, home: Home, kind: str, folder: Path) -> None:
        self.home = home
        self.kind = kind
        self.meet = folder / "meet"
        self.meet.mkdir(parents=True)
        self.go = folder / "go"
        self.start()

    def start(self) -> None:
        reader, writer = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, "--home", str(self.home.root), "--ready-fd",
             str(writer)], pass_fds=[writer],
            env={**os.environ, "BATCHML_NODE_NETWORK": self.kind},
        )  # fmt: skip
        os.close(writer)
        with os.fdopen(reader) as file:
            told = json.loads(file.readline())
        assert "port" in told, told
        endpoint = self.home.endpoint()
        assert endpoint is not None
        self.batch = client_for(self.home, endpoint, "batch")
        self.logs = client_for(self.home, endpoint, "logs")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """End all jobs, then the server, gently: nothing of a test is to stay on the machine."""
        if self.process.poll() is not None:
            self.start()
        for status in ("RUNNABLE", "STARTING", "RUNNING"):
            for job in self.batch.list_jobs(jobQueue="default", jobStatus=status)["jobSummaryList"]:
                self.batch.terminate_job(jobId=job["jobId"], reason="the test is over")
                wait_for_job(self.batch, job["jobId"])
        self.process.terminate()
        assert self.process.wait(30) == 0
        assert namespaces(self.home) == []

    def define(self, count: int, script: str = NODE, **more: Any) -> str:
        container = {
            "image": "any",
            "command": [sys.executable, "-c", script],
            "resourceRequirements": [
                {"type": "VCPU", "value": "1"},
                {"type": "MEMORY", "value": "64"},
            ],
            **more,
        }
        made = self.batch.register_job_definition(
            jobDefinitionName="nodes", type="multinode",
            nodeProperties={
                "numNodes": count, "mainNode": 0,
                "nodeRangeProperties": [{"targetNodes": "0:", "container": container}],
            },
        )  # fmt: skip
        return f"{made['jobDefinitionName']}:{made['revision']}"

    def submit(self, definition: str, **variables: str) -> str:
        bind = "wildcard" if self.kind == "namespace" else "own"
        given = {"MEET": str(self.meet), "JOBS": "1", "BIND": bind, **variables}
        # As our client's jobs have it, whose first line says what network they are in.
        given = {"BATCHML_PARAMS": "{}", **given}
        environment = [{"name": name, "value": value} for name, value in given.items()]
        override = {"targetNodes": "0:", "containerOverrides": {"environment": environment}}
        return str(
            self.batch.submit_job(
                jobName="nodes", jobQueue="default", jobDefinition=definition,
                nodeOverrides={"nodePropertyOverrides": [override]},
            )["jobId"]
        )  # fmt: skip

    def interfaces(self, job_id: str, index: int) -> list[dict[str, str]]:
        """A node's, once the server has heard that it runs: it may have printed before."""
        found: list[dict[str, str]] = wait_for(
            lambda: self.node(job_id, index)["container"]["networkInterfaces"],
            f"node {index} has its address",
        )
        return found

    def node(self, job_id: str, index: int) -> dict[str, Any]:
        return dict(self.batch.describe_jobs(jobs=[f"{job_id}#{index}"])["jobs"][0])

    def lines(self, job_id: str, index: int) -> list[str]:
        """What a node has printed so far; with ours before it."""
        stream = self.node(job_id, index)["container"].get("logStreamName")
        if not stream:
            return []
        try:
            events = self.logs.get_log_events(
                logGroupName="/aws/batch/job", logStreamName=stream, startFromHead=True
            )["events"]
        except self.logs.exceptions.ResourceNotFoundException:
            return []
        return [event["message"] for event in events]

    def until_printed(self, job_id: str, index: int, count: int) -> list[str]:
        """What a node has printed, once that are so many lines."""

        def look() -> list[str]:
            lines = self.lines(job_id, index)[1:]
            return lines if len(lines) >= count else []

        found = wait_for(look, f"node {index} prints {count} lines", 60)
        return [str(line) for line in found]


Start = Callable[..., Cluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Cluster] = []

    def one(kind: str, name: str = "a") -> Cluster:
        home = Home(tmp_path / name / "home")
        home.prepare()
        made.append(Cluster(home, kind, tmp_path / name / "files"))
        return made[-1]

    yield one
    for cluster in made:
        cluster.close()


def check(cluster: Cluster, job_id: str, count: int) -> list[str]:
    """Everything that the nodes of a job say; their addresses."""
    met = json.loads(cluster.until_printed(job_id, 0, 2)[1])
    addresses = []
    for index in range(count):
        said = json.loads(cluster.until_printed(job_id, index, 2)[0])
        addresses.append(said["own"])
        told = said["told"]
        wanted = {
            "AWS_BATCH_JOB_ID": f"{job_id}#{index}",
            "AWS_BATCH_JOB_ATTEMPT": "1",
            "AWS_BATCH_JOB_NUM_NODES": str(count),
            "AWS_BATCH_JOB_NODE_INDEX": str(index),
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        }
        if index:
            wanted["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = addresses[0]
        assert told == wanted
        assert cluster.interfaces(job_id, index) == [{"privateIpv4Address": said["own"]}]
        first = cluster.lines(job_id, index)[0]
        assert f" network={cluster.kind} address={said['own']} " in first
    assert met == [[f"{job_id} node {i}", addresses[i]] for i in range(1, count)]
    assert len(set(addresses)) == count
    return addresses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.journey
def test_two_jobs_at_once_bind_the_same_port_and_do_not_meet(kind: str, start: Start) -> None:
    """In namespaces the wildcard address, on the loopback each its own. (B230, B231, B232)"""
    cluster = start(kind)
    definition = cluster.define(3)
    jobs = [cluster.submit(definition, JOBS="2") for _ in range(2)]
    addresses = [address for job_id in jobs for address in check(cluster, job_id, 3)]
    assert len(set(addresses)) == 6
    cluster.go.touch()
    for job_id in jobs:
        assert wait_for_job(cluster.batch, job_id)["status"] == "SUCCEEDED"
        for index in (1, 2):  # they would have slept for ten minutes
            assert cluster.node(job_id, index)["status"] == "SUCCEEDED"
            assert cluster.node(job_id, index)["container"]["exitCode"] == 128 + signal.SIGTERM
            assert cluster.lines(job_id, index)[-1] == "welcome"
    wait_for(lambda: not namespaces(cluster.home), "nothing is left on the machine")


@needs_namespaces
def test_two_servers_leave_each_other_alone(start: Start) -> None:
    """(B233)"""
    one, other = start("namespace", "a"), start("namespace", "b")
    jobs = [(cluster, cluster.submit(cluster.define(2))) for cluster in (one, other)]
    for cluster, job_id in jobs:
        check(cluster, job_id, 2)
    one.go.touch()
    assert wait_for_job(one.batch, jobs[0][1])["status"] == "SUCCEEDED"
    wait_for(lambda: not namespaces(one.home), "the first server's are gone")
    assert len(namespaces(other.home)) == 4  # a switch, two nodes, the way out
    other.go.touch()
    assert wait_for_job(other.batch, jobs[1][1])["status"] == "SUCCEEDED"


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_server_s_nodes_go_on_and_the_next_clears_up(kind: str, start: Start) -> None:
    """(B234)"""
    cluster = start(kind)
    definition = cluster.define(2)
    job_id = cluster.submit(definition)
    before = check(cluster, job_id, 2)
    cluster.kill()
    cluster.start()
    later = cluster.submit(definition, JOBS="2")
    after = check(cluster, later, 2)
    assert not {*before} & {*after}, "a live node's address is its own"
    cluster.go.touch()
    assert wait_for_job(cluster.batch, job_id)["status"] == "SUCCEEDED"
    assert wait_for_job(cluster.batch, later)["status"] == "SUCCEEDED"
    assert cluster.node(job_id, 0)["container"]["networkInterfaces"] == [
        {"privateIpv4Address": before[0]}
    ]
    wait_for(lambda: not namespaces(cluster.home), "nothing is left on the machine")


@needs_namespaces
def test_what_a_killed_server_left_behind_is_cleared_away_by_the_next(start: Start) -> None:
    """(B234)"""
    cluster = start("namespace")
    job_id = cluster.submit(cluster.define(2))
    check(cluster, job_id, 2)
    cluster.kill()
    cluster.go.touch()
    runners = [
        json.loads((attempt / name).read_text())["pid"]
        for attempt in cluster.home.attempts.iterdir()
        for name in ("runner.json", "exit.json")
        if (attempt / name).exists()
    ]
    assert len(runners) == 2
    assert len(namespaces(cluster.home)) == 4
    cluster.start()
    wait_for_job(cluster.batch, job_id)
    wait_for(lambda: not namespaces(cluster.home), "nothing is left on the machine")


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_reaches_the_server_as_any_job_does(kind: str, start: Start) -> None:
    """(B236)"""
    script = """
import os, boto3
batch = boto3.client(
    "batch", "us-east-1", endpoint_url=os.environ["BATCHML_ENDPOINT_URL"],
    aws_access_key_id=os.environ["BATCHML_ACCESS_KEY_ID"],
    aws_secret_access_key=os.environ["BATCHML_SECRET_ACCESS_KEY"],
)
print(batch.describe_job_queues()["jobQueues"][0]["jobQueueName"])
"""
    cluster = start(kind)
    job_id = cluster.submit(cluster.define(1, script))
    assert wait_for_job(cluster.batch, job_id, limit=60)["status"] == "SUCCEEDED", cluster.lines(
        job_id, 0
    )
    assert cluster.lines(job_id, 0)[-1] == "default"


@needs_namespaces
def test_a_terminated_job_leaves_nothing_on_the_machine(start: Start) -> None:
    """(B234)"""
    cluster = start("namespace")
    job_id = cluster.submit(cluster.define(2, "import time; time.sleep(600)"))
    wait_for_job(cluster.batch, job_id, "RUNNING")
    cluster.batch.terminate_job(jobId=job_id, reason="enough")
    assert wait_for_job(cluster.batch, job_id)["statusReason"] == "enough"
    wait_for(lambda: not namespaces(cluster.home), "nothing is left on the machine")


def test_a_network_of_an_unknown_kind_is_refused(home: Home) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "batchml.local.server.daemon", "--home", str(home.root),
         "--ready-fd", "1"],
        capture_output=True, text=True, env={**os.environ, "BATCHML_NODE_NETWORK": "carrier"},
    )  # fmt: skip
    assert "BATCHML_NODE_NETWORK is 'carrier': use namespace, loopback or auto." in done.stdout


NAMED = """
import os, socket, subprocess, time
meet, index = os.environ["MEET"], int(os.environ["AWS_BATCH_JOB_NODE_INDEX"])
name = subprocess.check_output(["hostname"], text=True).strip()
with open(f"{meet}/.{index}", "w") as file:
    file.write(name)
os.rename(f"{meet}/.{index}", f"{meet}/{index}")
while not os.path.exists(f"{meet}/{1 - index}"):
    time.sleep(0.02)
other = open(f"{meet}/{1 - index}").read()
own = socket.gethostbyname(name) == os.environ["BATCHML_NODE_ADDRESS"]
with socket.create_server(("0.0.0.0" if index else name, 7000 + index)) as server:
    open(f"{meet}/listens-{index}", "w").close()
    while not os.path.exists(f"{meet}/listens-{1 - index}"):
        time.sleep(0.02)
    socket.create_connection((other, 7001 - index), timeout=20).close()
    open(f"{meet}/met-{index}", "w").close()
    while not os.path.exists(f"{meet}/met-{1 - index}"):
        time.sleep(0.02)
print(name != other, own, flush=True)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_name_of_a_node_is_its_own_and_others_find_it_by_it(
    kind: str, start: Start
) -> None:
    cluster = start(kind)
    job_id = cluster.submit(cluster.define(2, NAMED))
    assert wait_for_job(cluster.batch, job_id)["status"] == "SUCCEEDED", cluster.lines(job_id, 0)
    assert [cluster.lines(job_id, index)[-1] for index in (0, 1)] == ["True True"] * 2
