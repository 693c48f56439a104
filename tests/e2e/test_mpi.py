"""MPI over the nodes of a job, as a user submits it: as processes, and in containers."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.test_multinode import KINDS
from tests.support.cli import Cli, write_job
from tests.support.executor_rig import IMAGE, docker, need_engine
from tests.support.local_server import wait_for
from tests.support.needs import unavailable

JOB = """
image = "{image}"
command = ["{python}", "sum.py", "{{code}}"]
nodes = 2
[params]
code = 0
[resources]
vcpus = 1
memory = "256 MiB"
[launch]
kind = "mpi"
processes_per_node = 2
start_within = "60s"
"""
# The sum of all ranks, by Open MPI's library, and where each of them is.
SUM = """
import ctypes, os, sys, time
mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
made = lambda name: ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, name)))
mpi.MPI_Init(None, None)
rank, total = ctypes.c_int(int(os.environ["RANK"])), ctypes.c_int()
mpi.MPI_Allreduce(
    ctypes.byref(rank), ctypes.byref(total), 1, made("ompi_mpi_int"), made("ompi_mpi_op_sum"),
    made("ompi_mpi_comm_world"),
)
node = os.environ["AWS_BATCH_JOB_NODE_INDEX"]
os.write(1, f"rank {rank.value} on node {node}: {total.value}\\n".encode())
code = int(sys.argv[1])
if code < 0:
    time.sleep(600)
if code and rank.value == 3:
    mpi.MPI_Abort(made("ompi_mpi_comm_world"), code)
mpi.MPI_Finalize()
"""


def check(cli: Cli, image: str, python: str) -> None:
    """The ranks of both nodes have talked; a rank's code is the run's."""
    write_job(cli.folder, "sum", JOB.format(image=image, python=python), sum__py=SUM)
    done = cli("submit", "sum", "--wait", "--json", timeout=120)
    assert (done.code, done.json["class"]) == (0, "succeeded"), cli("logs", done.json["jobId"]).out
    lines = [line.partition("] ")[2] for line in cli("logs", done.json["jobId"]).out.splitlines()]
    assert sorted(line for line in lines if line.startswith("rank")) == [
        f"rank {rank} on node {rank // 2}: 6" for rank in range(4)
    ], lines
    failed = cli("submit", "sum", "-p", "code=7", "--wait", "--json", timeout=120)
    assert (failed.code, failed.json["class"]) == (7, "app-error"), failed


@pytest.mark.parametrize("kind", KINDS)
def test_mpirun_starts_processes_on_all_nodes_without_ssh(cli: Cli, kind: str) -> None:
    if shutil.which("orted") is None:
        unavailable("no Open MPI: apt-get install openmpi-bin")
    cli.environ["BATCHML_NODE_NETWORK"] = kind
    assert cli("local", "start", "--vcpus", "2").code == 0
    try:
        check(cli, "docker.io/library/python:3.12", "/usr/bin/python3")
    finally:
        cli("local", "stop")


@pytest.fixture
def image(tmp_path: Path) -> Iterator[str]:
    """The base of the images with Open MPI from Debian, and no ssh."""
    need_engine()
    name = f"batchml-test-mpi:{tmp_path.name.lower()}"
    install = "apt-get update -q && apt-get install -q -y --no-install-recommends openmpi-bin"
    lines = f"FROM {IMAGE}\nRUN {install} && rm -f /usr/bin/ssh && ! command -v sshd\n"
    made = subprocess.run(
        ["docker", "build", "-q", "-t", name, "-"], input=lines, capture_output=True, text=True
    )
    if made.returncode:
        unavailable(f"no image with Open MPI: {made.stderr.strip()[-300:]}")
    yield name
    docker("rmi", "-f", name)


@pytest.mark.slow
def test_mpirun_starts_containers_ranks_without_ssh(cli: Cli, image: str) -> None:
    assert cli("local", "start", "--vcpus", "2", "--executor", "docker").code == 0
    try:
        check(cli, image, "python3")
        sent = cli("submit", "sum", "-p", "code=-1", "--json").json["jobId"]
        wait_for(lambda: cli("logs", sent).out.count("rank ") >= 4, "all ranks run", 60)
        node = docker("ps", "-q", "--filter", f"label=batchml.job={sent}#1").stdout.split()
        docker("kill", *node)
        lost = cli("wait", sent, "--json", timeout=120)
        assert (lost.code, lost.json[0]["class"]) == (75, "host-lost"), cli("logs", sent).out
    finally:
        cli("local", "stop")
