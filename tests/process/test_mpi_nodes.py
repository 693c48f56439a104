"""MPI runs of two nodes as containers run them: Open MPI's and MPICH's own mpirun, without ssh."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.runtime.processes import descendants
from batchml.runtime.protocol.launch import MPI, LaunchPlan
from tests.process.test_processes import is_alive
from tests.process.test_supervisors import Nodes
from tests.support.local_server import wait_for
from tests.support.needs import unavailable

TWO = LaunchPlan(MPI, processes=2, start_within=60)
PROGRAMS = {"openmpi": "mpirun.openmpi", "mpich": "mpiexec.hydra"}
# MPI by its library, as the header files of each implementation name its constants. A process that
# does not call MPI_Init is no rank for MPICH: its end means nothing to the others.
PREAMBLE = """
import ctypes, os, signal, sys, time
from batchml.runtime import should_stop
if sys.argv[1] == "openmpi":
    mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
    made = lambda name: ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, name)))
    number, add = made("ompi_mpi_int"), made("ompi_mpi_op_sum")
    everyone = made("ompi_mpi_comm_world")
else:
    mpi = ctypes.CDLL("libmpich.so.12", ctypes.RTLD_GLOBAL)
    number, add, everyone = 0x4C000405, 0x58000003, 0x44000000
mpi.MPI_Init(None, None)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
node = int(os.environ["NODE"])
def say(*words):  # in one write, for ranks share a pipe
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def total():
    own, found = ctypes.c_int(rank + 1), ctypes.c_int()
    mpi.MPI_Allreduce(ctypes.byref(own), ctypes.byref(found), 1, number, add, everyone)
    return found.value
"""
END = "\nmpi.MPI_Finalize()\n"


class MpiNodes(Nodes):
    """Nodes whose PATH has the mpirun of one implementation."""

    kind = ""

    def use(self, kind: str) -> None:
        program = shutil.which(PROGRAMS[kind])
        if program is None:
            unavailable(
                f"no {PROGRAMS[kind]}: apt-get install {kind.replace('openmpi', 'openmpi-bin')}"
            )
        self.kind = kind
        (self.folder / "bin").mkdir()
        (self.folder / "bin" / "mpirun").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (self.folder / "bin" / "mpirun").chmod(0o755)

    def begin(self, script: str, *command: str, plan: LaunchPlan = TWO, count: int = 2) -> None:
        (self.folder / "rank.py").write_text(PREAMBLE + script + END)
        words = command or (sys.executable, str(self.folder / "rank.py"), self.kind)
        given = {
            "PATH": os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]]),
            "BATCHML_GRACE": "20",
            # MPICH's transport fails when a network interface that it has listed is removed, as
            # other tests do meanwhile. All ranks are on one machine.
            "UCX_TLS": "self,sm",
        }
        for number in range(count):
            self.add(number, count, plan, *words, NODE=str(number), **given)

    def processes_of(self, number: int) -> list[int]:
        return descendants(self.processes[number].pid)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[MpiNodes]:
    made = MpiNodes(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=sorted(PROGRAMS))
def mpi(request: pytest.FixtureRequest, nodes: MpiNodes) -> MpiNodes:
    nodes.use(request.param)
    return nodes


def ranks(lines: list[str]) -> list[str]:
    return sorted(line for line in lines if line.startswith("rank"))


@pytest.mark.journey
def test_ranks_of_all_nodes_talk_and_have_their_nodes_environment(mpi: MpiNodes) -> None:
    mpi.begin(
        "say('rank', rank, 'of', world, 'on', node, 'local', os.environ['LOCAL_RANK'], "
        "'sum', total(), os.path.basename(os.getcwd()), os.environ['MASTER_ADDR'])"
    )
    assert mpi.ended() == [0, 0], mpi.said()
    assert ranks(mpi.said()) == [
        f"rank {i} of 4 on {i // 2} local {i % 2} sum 10 work-{i // 2} 127.0.3.1" for i in range(4)
    ]
    assert mpi.end() == mpi.end(1) == {"code": "0"}


def test_a_rank_that_fails_ends_the_run_with_its_code(mpi: MpiNodes) -> None:
    mpi.begin("if rank == 3: mpi.MPI_Abort(everyone, 3)\ntime.sleep(600)")
    assert mpi.ended() == [3, 3]
    assert mpi.said()[-2] == "batchml: mpirun ended with 3."
    assert mpi.end() == mpi.end(1) == {"code": "3"}


def test_a_killed_rank_ends_the_run_and_nothing_is_left(mpi: MpiNodes) -> None:
    mpi.begin("""
say("rank", os.getpid())
until = sys.argv[0] + ".go"
while not os.path.exists(until): time.sleep(0.01)
if rank == 2: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
""")
    wait_for(lambda: len(ranks(mpi.said())) == 4, "all ranks run", 60)
    pids = [int(line.split()[1]) for line in ranks(mpi.said())]
    (mpi.folder / "rank.py.go").touch()
    codes = mpi.ended()
    assert codes[0] == codes[1]
    assert codes[0] in {"openmpi": [137], "mpich": [9, 255]}[mpi.kind]
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("node", [0, 1])
def test_a_stop_signal_to_one_node_lets_all_ranks_save(mpi: MpiNodes, node: int) -> None:
    mpi.begin("""
say("rank", rank)
while not should_stop(): time.sleep(0.01)
time.sleep(1.5)  # longer than mpirun itself would give them
say("saved", rank)
""")
    wait_for(lambda: len(ranks(mpi.said())) == 4, "all ranks run", 60)
    mpi.processes[node].terminate()
    assert mpi.ended() == [143, 143]
    assert sorted(line for line in mpi.said() if "saved" in line) == [
        f"saved {rank}" for rank in range(4)
    ]
    assert mpi.said()[-2] == "batchml: stopped (SIGTERM)"
    assert mpi.end(1) == {"code": "143", "by": "runtime"}


@pytest.mark.parametrize("victim", ["supervisor", "container"])
def test_a_node_that_dies_ends_the_run_to_be_tried_again(mpi: MpiNodes, victim: str) -> None:
    mpi.begin("say('rank', os.getpid()); time.sleep(600)")
    wait_for(lambda: len(ranks(mpi.said())) == 4, "all ranks run", 60)
    pids = [int(line.split()[1]) for line in ranks(mpi.said())]
    left = mpi.processes_of(1)
    if victim == "supervisor":
        os.kill(mpi.supervisor(1), signal.SIGKILL)
    else:  # and all that runs in it
        mpi.processes[1].kill()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    assert mpi.processes[0].wait(60) == 75
    mpi.processes[1].terminate()  # as AWS Batch does: there is no main node to tell its end
    assert mpi.processes[1].wait(60) == (75 if victim == "supervisor" else -9)
    assert mpi.end() == {"code": "75", "by": "runtime"}
    assert any("node 1" in line and ("is gone" in line) for line in mpi.said())
    wait_for(lambda: not any(map(is_alive, [*pids, *left])), "no process is left", 30)


def test_every_node_ends_when_the_main_node_does(mpi: MpiNodes) -> None:
    mpi.begin("say('rank', os.getpid()); time.sleep(600)")
    wait_for(lambda: len(ranks(mpi.said())) == 4, "all ranks run", 60)
    left = [*mpi.processes_of(0), *mpi.processes_of(1)]
    os.kill(mpi.supervisor(0), signal.SIGKILL)
    assert mpi.ended() == [75, 75]
    assert not any(map(is_alive, left))


def test_a_run_that_hangs_is_ended_to_be_tried_again(mpi: MpiNodes) -> None:
    mpi.begin("time.sleep(600)", plan=TWO._replace(hang_after=1.0))
    assert mpi.ended() == [75, 75]
    assert mpi.said()[-2] == "batchml: No rank gave a sign of life for 1 s."


def test_a_command_line_with_mpirun_is_the_users_own(mpi: MpiNodes) -> None:
    say = 'echo rank "$NODE"'
    mpi.begin("", "mpirun", "-n", "4", "sh", "-c", say, plan=TWO._replace(processes=0))
    assert mpi.ended() == [0, 0]
    assert ranks(mpi.said()) == ["rank 0", "rank 0", "rank 1", "rank 1"]


def test_one_node_needs_no_others(mpi: MpiNodes) -> None:
    mpi.begin("say('rank', rank, 'sum', total())", count=1, plan=TWO._replace(processes=3))
    assert mpi.ended() == [0], mpi.said()
    assert ranks(mpi.said()) == [f"rank {rank} sum 6" for rank in range(3)]


def test_a_daemon_that_cannot_be_started_ends_the_run(nodes: MpiNodes) -> None:
    """Where only the main node has all of MPI: MPICH's mpirun itself would wait forever."""
    nodes.use("mpich")
    program = shutil.which("mpiexec.hydra")
    assert program is not None
    (nodes.folder / "bin" / "mpirun").unlink()
    (nodes.folder / "bin" / "mpirun").symlink_to(program)  # it looks for its daemon beside itself
    nodes.begin("")
    codes = nodes.ended()
    assert codes[0] == codes[1] != 0
    assert any("hydra_pmi_proxy: not found" in line for line in nodes.said())


def test_an_image_without_mpirun_is_told_what_to_install(nodes: MpiNodes) -> None:
    nodes.add(0, 2, TWO, "true", PATH=str(nodes.folder))
    nodes.add(1, 2, TWO, "true", PATH=str(nodes.folder))
    assert nodes.ended() == [127, 127]
    for number in (0, 1):
        assert "this image has no mpirun: install openmpi-bin or mpich" in nodes.said(number)[-2]
