"""Supervisors as containers run them, a node each, on addresses of the loopback."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.runtime.processes import descendants
from batchml.runtime.protocol.launch import MAIN, TORCHRUN, LaunchPlan
from batchml.runtime.protocol.log_marks import parse_mark
from tests.process.test_processes import is_alive
from tests.support.efa_fake import fake_sys
from tests.support.local_server import wait_for
from tests.support.nvml_fake import build

TWO = LaunchPlan(TORCHRUN, processes=2, start_within=30)
QUICK = '{"beat": 0.1, "silent": 15, "regroup": 3, "gone": 0.3, "end_grace": 0.3}'
PREAMBLE = """
import os, signal, subprocess, sys, time
from batchml.runtime import should_stop
rank, generation = int(os.environ["RANK"]), int(os.environ["BATCHML_GENERATION"])
def say(*words): print(*words, flush=True)
def until(path):
    while not os.path.exists(path): time.sleep(0.01)
def save(text):
    path = os.path.join(os.environ["BATCHML_CHECKPOINT_DIR"], "snapshot")
    open(f"{path}.{rank}.tmp", "w").write(text)
    os.replace(f"{path}.{rank}.tmp", path)
"""


class Nodes:
    """A run's, that share a folder as a run's nodes do."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self.python = python
        self.processes: list[subprocess.Popen[bytes]] = []
        self.first = 0

    def start(self, plan: LaunchPlan, script: str, count: int = 2, **env: str) -> None:
        """As a run's next attempt, if it is not the first. BATCHML names for all nodes."""
        self.first = len(self.processes)
        (self.folder / "rank.py").write_text(PREAMBLE + script)
        for number in range(count):
            self.add(number, count, plan, **env)

    def add(self, number: int, count: int, plan: LaunchPlan, *command: str, **env: str) -> None:
        given = {
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
            "AWS_BATCH_JOB_ID": f"job#{number}" if count > 1 else "job",
            "AWS_BATCH_JOB_ATTEMPT": "1",
            "BATCHML_KEY": self.folder.name,
            "BATCHML_LAUNCH": plan.to_json(),
            "BATCHML_GANG_TOKEN": "00112233445566778899aabbccddeeff",
            "BATCHML_GANG_LIMITS": QUICK,
            "BATCHML_CHECKPOINT_DIR": str(self.folder / "checkpoints"),
            "BATCHML_OUTPUT_DIR": str(self.folder / "output"),
            "BATCHML_STOP_FILE": str(self.folder / f"stop-{number}"),
            "BATCHML_NODE_ADDRESS": f"127.0.3.{number + 1}",
        }
        if count > 1:
            given |= {"AWS_BATCH_JOB_NUM_NODES": str(count), "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
                      "AWS_BATCH_JOB_NODE_INDEX": str(number)}  # fmt: skip
        if number:
            given["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "127.0.3.1"
        work = self.folder / f"work-{number}"
        work.mkdir(exist_ok=True)
        words = command or (self.python, str(self.folder / "rank.py"))
        with open(self._log(len(self.processes)), "wb") as log:
            made = subprocess.Popen(
                [self.python, "-m", "batchml.runtime.run", *words],
                cwd=work, env={**given, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.processes.append(made)

    def _log(self, place: int) -> Path:
        return self.folder / f"log-{place}"

    def said(self, number: int = 0) -> list[str]:
        lines = self._log(self.first + number).read_text().splitlines()
        return [line for line in lines if not line.startswith("::batchml usage ")]

    def until_said(self, words: str, number: int = 0) -> str:
        def look() -> str:
            return next((line for line in self.said(number) if words in line), "")

        return str(wait_for(look, f"node {number} says {words!r}", 60))

    def ended(self) -> list[int]:
        """The exit codes of all nodes of this attempt."""
        return [process.wait(60) for process in self.processes[self.first :]]

    def end(self, number: int = 0) -> dict[str, str]:
        """What the end mark of a node says."""
        kind, words = parse_mark(self.said(number)[-1]) or ("", {})
        assert kind == "end"
        del words["lines"]
        return words

    def supervisor(self, number: int) -> int:
        return descendants(self.processes[self.first + number].pid)[0]

    def close(self) -> None:
        left = descendants(*(process.pid for process in self.processes))
        for process in self.processes:
            process.kill()
            process.wait()
        wait_for(lambda: not any(map(is_alive, left)), "all of it is gone")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.close()


def test_one_node_needs_no_others_and_its_ranks_are_told_apart(nodes: Nodes) -> None:
    """Several ranks are prefixed; each has a file of its own; `torchrun`'s flags are understood."""
    (nodes.folder / "rank.py").write_text(
        PREAMBLE + "say('of', os.environ['WORLD_SIZE'], *sys.argv[1:])\nsys.stderr.write('err')"
    )
    nodes.add(
        0, 1, LaunchPlan(TORCHRUN, logs=MAIN), "torchrun", "--nproc-per-node=2", "--max-restarts=3",
        str(nodes.folder / "rank.py"), "--lr", "0.1", BATCHML_GANG_TOKEN="",
    )  # fmt: skip
    assert nodes.ended() == [0]
    said = nodes.said()
    assert said[0] == "batchml: torchrun's --max-restarts is ignored: batchml sets it"
    assert said[1] == "batchml: generation 1: 1 node, 2 ranks."
    assert sorted(said[2:5]) == ["[r0] err", "[r0] of 2 --lr 0.1", "[r1] err"]
    assert nodes.end() == {"code": "0"}
    files = nodes.folder / "output" / "ranks"
    assert (files / "rank-1.log").read_text() == "--- generation 1\nof 2 --lr 0.1\nerr\n"


def test_a_killed_rank_takes_its_generation_with_it_on_every_node(nodes: Nodes) -> None:
    """What a rank left behind in a session of its own, too, before the next begins."""
    nodes.start(TWO, """
if generation == 1:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    save(str(rank))
    say("child", child.pid)
    until(f"{sys.argv[0]}.go")
    if rank == 3: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
say("again", os.environ["TORCHELASTIC_RESTART_COUNT"])
""")  # fmt: skip
    children = []
    for rank in range(4):
        words = nodes.until_said(f"[r{rank}] child", rank // 2)
        children.append(int(words.split()[-1]))
    assert all(map(is_alive, children))
    (nodes.folder / "rank.py.go").touch()
    for rank in range(4):
        nodes.until_said(f"[r{rank}] again 1", rank // 2)
    assert not any(map(is_alive, children))
    assert nodes.ended() == [0, 0]
    why = "Rank 3 on node 1 (127.0.3.2) was ended by SIGKILL. It begins again in place"
    assert f"batchml: {why}" in nodes.said()


def test_a_program_that_fails_twice_at_its_start_ends_with_its_own_code(nodes: Nodes) -> None:
    nodes.start(TWO, "say('no such file'); sys.exit(3 if rank == 2 else 0)")
    assert nodes.ended() == [3, 3]
    assert nodes.end() == nodes.end(1) == {"code": "3"}
    said = nodes.said()
    assert said[-4:-1] == [
        "batchml: its last lines were:",
        "  no such file",
        "batchml: Rank 2 on node 1 (127.0.3.2) ended with 3. "
        "The start before it ended the same way",
    ]
    assert nodes.said(1).count("[r2] no such file") == 2  # two starts
    assert "batchml: its last lines were:" not in nodes.said(1)


def test_a_traceback_is_printed_once_for_all_ranks_and_starts(nodes: Nodes) -> None:
    nodes.start(TWO, "raise ValueError('boom')")
    assert nodes.ended() == [1, 1]
    for node in (0, 1):
        said = nodes.said(node)
        assert sum(line.endswith("ValueError: boom") for line in said) <= 1
    assert " ended with 1" in nodes.said()[-2]


ALONE = QUICK.replace("}", ', "alone": 1}')
MEET = """
import socket
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    meeting = socket.create_server(where)
    other = meeting.accept()[0]
else:
    while True:
        try: other = socket.create_connection(where); break
        except OSError: time.sleep(0.05)
say("met")
"""
WORK = """
for step in range(400):
    say("step", step)
    if os.path.exists(os.environ["BATCHML_CHECKPOINT_DIR"] + "/enough"): break
    time.sleep(0.05)
"""


def test_ranks_of_two_nodes_that_never_connect_are_noticed(nodes: Nodes) -> None:
    nodes.start(TWO._replace(processes=1), WORK, BATCHML_GANG_LIMITS=ALONE)
    line = nodes.until_said("batchml notice: the 2 ranks of 2 nodes")
    assert "nobody listens on MASTER_ADDR:MASTER_PORT (127.0.3.1:" in line
    (nodes.folder / "checkpoints" / "enough").write_text("")
    assert nodes.ended() == [0, 0]
    assert sum("batchml notice" in line for number in (0, 1) for line in nodes.said(number)) == 1


def test_ranks_that_are_connected_are_not_noticed(nodes: Nodes) -> None:
    """Many looks of the watch pass: it looks each second here."""
    nodes.start(TWO._replace(processes=1), MEET + WORK, BATCHML_GANG_LIMITS=ALONE)
    nodes.until_said("step 60")
    (nodes.folder / "checkpoints" / "enough").write_text("")
    assert nodes.ended() == [0, 0]
    assert not any("batchml notice" in line for number in (0, 1) for line in nodes.said(number))


def test_three_starts_without_a_new_checkpoint_are_a_crash_loop_over_attempts(nodes: Nodes) -> None:
    """The first makes one. The main node dies in the third, so the fourth is of another attempt."""
    script = """
if generation == 1: save("1"); time.sleep(0.01)
if generation == 3: os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)
os.kill(os.getpid(), signal.SIGKILL)
"""
    alone = LaunchPlan(TORCHRUN, processes=1)
    nodes.start(alone, script, count=1)
    assert nodes.ended() == [75]
    assert nodes.end() == {"code": "75", "by": "runtime"}
    nodes.start(alone, script, count=1, AWS_BATCH_JOB_ATTEMPT="2")
    assert nodes.ended() == [76]
    assert nodes.end() == {"code": "76", "by": "runtime"}
    assert nodes.said()[-2].startswith(
        "batchml: a crash loop: the last 3 starts (generations 2, 3, 4) made no new checkpoint. "
        "The last of them: Rank 0 on node 0 was ended by SIGKILL."
    )


def test_a_hang_is_ended_with_its_stacks_on_record(nodes: Nodes) -> None:
    """The program does nothing for it. Another `sitecustomize` of the user's is run as before."""
    site = nodes.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import os; os.environ['SITE'] = 'mine'\n")
    plan = TWO._replace(hang_after=1.0)
    nodes.start(plan, """
def stuck_in_backward(): time.sleep(600)
say(os.environ["SITE"])
if generation == 1 and rank == 1: stuck_in_backward()
until(f"{sys.argv[0]}.go")
""", PYTHONPATH=f"{site}:{os.getcwd()}")  # fmt: skip
    nodes.until_said("generation 2: 2 nodes, 4 ranks.")
    (nodes.folder / "rank.py.go").touch()
    assert nodes.ended() == [0, 0]
    said = nodes.said()
    assert said.count("[r0] mine") >= 2
    assert any("[r1]" in line and "in stuck_in_backward" in line for line in said)
    assert any("[r3]" in line and "in until" in line for line in nodes.said(1))
    assert "batchml: No rank gave a sign of life for 1 s. It begins again in place" in said
    files = sorted(os.listdir(nodes.folder / "output" / "ranks"))
    assert [f for f in files if "stacks" in f] == [
        f"rank-{i}.generation-1.stacks" for i in range(4)
    ]


def test_a_child_node_that_dies_ends_the_run_to_be_tried_again(nodes: Nodes) -> None:
    """Its supervisor is killed; no process of any node is left."""
    nodes.start(TWO, "say(os.getpid()); time.sleep(600)")
    ranks = [int(nodes.until_said(f"[r{i}] ", i // 2).split()[-1]) for i in range(4)]
    os.kill(nodes.supervisor(1), signal.SIGKILL)
    assert nodes.ended() == [75, 75]
    assert nodes.end() == nodes.end(1) == {"code": "75", "by": "runtime"}
    assert "batchml: node 1 (127.0.3.2) is gone" in nodes.said()
    assert nodes.said()[-2].startswith("batchml: node 1: the supervisor of its ranks is gone: ")
    assert not any(map(is_alive, ranks))


def test_a_child_node_whose_main_node_dies_ends_its_ranks_and_itself(nodes: Nodes) -> None:
    nodes.start(TWO, "say(os.getpid()); time.sleep(600)")
    ranks = [int(nodes.until_said(f"[r{i}] ", i // 2).split()[-1]) for i in range(4)]
    nodes.processes[0].kill()
    assert nodes.ended() == [-9, 75]
    assert not any(map(is_alive, ranks))
    assert "batchml: the main node (127.0.3.1) could not be reached within" in nodes.said(1)[-2]


def test_a_node_that_falls_silent_is_given_up_and_taken_back(nodes: Nodes) -> None:
    """Stopped, as by a partition: its ranks go on, so no other generation may begin without it."""
    limits = '{"beat": 0.2, "silent": 2, "regroup": 60, "end_grace": 0.3}'
    nodes.start(TWO, """
say("begun")
if generation == 1: time.sleep(600)
""", BATCHML_GANG_LIMITS=limits)  # fmt: skip
    nodes.until_said("[r3] begun", 1)
    nodes.until_said("[r0] begun")
    frozen = nodes.supervisor(1)
    os.kill(frozen, signal.SIGSTOP)
    nodes.until_said("node 1 (127.0.3.2) does not answer any more")
    nodes.until_said("It begins again in place")
    assert not any("generation 2:" in line for line in nodes.said())
    os.kill(frozen, signal.SIGCONT)
    assert nodes.ended() == [0, 0]
    assert any("generation 2:" in line for line in nodes.said())


@pytest.mark.parametrize("node", [0, 1])
def test_a_stop_signal_to_one_node_lets_all_ranks_save(nodes: Nodes, node: int) -> None:
    nodes.start(TWO, """
say("begun")
while not should_stop(): time.sleep(0.01)
say("saved")
""")  # fmt: skip
    for rank in range(4):
        nodes.until_said(f"[r{rank}] begun", rank // 2)
    nodes.processes[node].terminate()
    assert nodes.ended() == [143, 143]
    for rank in range(4):
        assert f"[r{rank}] saved" in nodes.said(rank // 2)
    assert nodes.said()[-2] == "batchml: stopped (SIGTERM)"
    assert nodes.end(1 - node) == {"code": "143", "by": "runtime"}


def test_a_stop_is_heard_by_a_supervisor_and_a_rank_that_were_stopped(nodes: Nodes) -> None:
    (nodes.folder / "rank.py").write_text(PREAMBLE + """
say(os.getpid())
while not should_stop(): time.sleep(0.01)
say("saved")
""")  # fmt: skip
    nodes.add(0, 1, TWO, BATCHML_GRACE="600")
    rank = int(nodes.until_said("[r1] ").split()[-1])
    nodes.until_said("[r0] ")
    for pid in (nodes.supervisor(0), rank):
        os.kill(pid, signal.SIGSTOP)
    nodes.processes[0].terminate()
    assert nodes.ended() == [143]
    assert {"[r0] saved", "[r1] saved"} <= set(nodes.said())


def test_a_child_without_a_main_node_leaves_at_a_stop(nodes: Nodes) -> None:
    nodes.add(1, 2, TWO._replace(start_within=600), BATCHML_GRACE="600")
    wait_for(lambda: descendants(nodes.processes[0].pid), "the child has a supervisor")
    nodes.processes[0].terminate()
    assert nodes.ended() == [143]
    assert nodes.said()[-2] == "batchml: stopped (SIGTERM)"


def test_a_stop_file_on_one_node_reaches_all_without_a_signal(nodes: Nodes) -> None:
    nodes.start(TWO, """
signal.signal(signal.SIGTERM, lambda *_: say("signalled"))
say("begun")
while not should_stop(): time.sleep(0.01)
""")  # fmt: skip
    nodes.until_said("[r3] begun", 1)
    (nodes.folder / "stop-1").touch()
    assert nodes.ended() == [0, 0]
    assert not any("signalled" in line for line in nodes.said())


def test_a_node_that_never_comes_is_named(nodes: Nodes) -> None:
    nodes.add(0, 3, TWO._replace(start_within=0.5))
    assert nodes.ended() == [75]
    assert nodes.said()[-2].startswith("batchml: nodes 1, 2 did not connect within ")


def test_a_node_of_another_attempt_is_fenced_off(nodes: Nodes) -> None:
    nodes.start(TWO, "", count=0)
    nodes.add(0, 2, TWO, AWS_BATCH_JOB_ATTEMPT="2")
    nodes.add(1, 2, TWO)
    assert nodes.processes[1].wait(60) == 75
    words = "this is attempt 2 of job job, and that node runs attempt 1 of job job"
    assert nodes.said(1)[-2] == f"batchml: {words}"
    nodes.processes[0].terminate()  # it waits for its own node 1
    assert nodes.ended() == [143, 75]


def test_a_child_that_cannot_begin_ends_the_gang_with_its_reason(nodes: Nodes) -> None:
    nodes.start(TWO, "", count=0)
    (nodes.folder / "code").write_text("no archive")
    nodes.add(0, 2, TWO, "true")
    nodes.add(1, 2, TWO, "true", BATCHML_CODE=str(nodes.folder / "code"))
    assert nodes.ended() == [78, 78]
    assert nodes.said()[-2].startswith(
        "batchml: node 1 could not start its command: the code archive"
    )


def test_an_unfit_child_ends_the_gang_to_be_tried_elsewhere(nodes: Nodes) -> None:
    (nodes.folder / "fault").write_text("XID 79: the GPU has fallen off the bus")
    nodes.start(TWO, "", count=0)
    nodes.add(0, 2, TWO, "true")
    nodes.add(1, 2, TWO, "true", BATCHML_FAULT_FILE=str(nodes.folder / "fault"))
    assert nodes.ended() == [75, 75]
    why = "this host (127.0.3.2) is unfit: fault file: XID 79: the GPU has fallen off the bus"
    assert nodes.said()[-2] == f"batchml: node 1: {why}; another one is tried"


def test_a_node_without_all_its_efa_devices_is_left_and_the_run_goes_on_elsewhere(
    nodes: Nodes,
) -> None:
    """In the next attempt another host takes its place: one with all devices."""
    for host in ("127.0.3.1", "127.0.3.2", "127.0.3.4", "new"):
        fake_sys(nodes.folder / "sys" / host, 4)
    fake_sys(nodes.folder / "sys" / "127.0.3.3", 3)
    given = {
        "BATCHML_EFA": "4", "BATCHML_SYS": str(nodes.folder / "sys" / "{host}"),
        "BATCHML_STORE": str(nodes.folder / "store"),
    }  # fmt: skip
    one = TWO._replace(processes=1)
    nodes.start(one, "say('trains')", count=4, **given)
    assert nodes.ended() == [75, 75, 75, 75]
    why = (
        "this host (127.0.3.3) is unfit: EFA: 3 of 4 devices are there (only rdmap0, rdmap1, "
        "rdmap2 in /sys/class/infiniband); another one is tried (1 of 3)"
    )
    assert nodes.said()[-2] == f"batchml: node 2: {why}"
    assert not any("trains" in line for number in range(4) for line in nodes.said(number))

    nodes.first = len(nodes.processes)
    for number in range(4):
        host = "new" if number == 2 else f"127.0.3.{number + 1}"
        nodes.add(number, 4, one, **given, BATCHML_HOST_ID=host, AWS_BATCH_JOB_ATTEMPT="2")
    assert nodes.ended() == [0, 0, 0, 0]
    assert nodes.said(2)[0] == "trains"


@pytest.mark.parametrize(("floor", "code"), [(1024.0, 0), (1e15, 75)])
def test_the_network_between_nodes_is_measured(nodes: Nodes, floor: float, code: int) -> None:
    nodes.start(TWO._replace(bandwidth=floor), "")
    assert nodes.ended() == [code, code]
    nodes.until_said(" MiB/s between node 1 (127.0.3.2) and the main node")
    assert ("node 1: this host is unfit: " in nodes.said()[-2]) == (code != 0)


def test_what_cannot_be_meant_is_one_line(nodes: Nodes) -> None:
    nodes.add(0, 1, TWO, "torchrun", "--nnodes=7", "x.py")
    nodes.add(0, 1, TWO, "no-such-command")
    nodes.add(0, 2, TWO, "true", BATCHML_GANG_TOKEN="")
    nodes.add(0, 1, TWO, "true", BATCHML_LAUNCH='{"kind": "dask"}')
    nodes.add(0, 1, TWO, "true", BATCHML_LAUNCH="{")
    assert nodes.ended() == [78, 127, 78, 78, 78]
    told = [nodes.said(number)[-2] for number in range(5)]
    assert "--nnodes is 7, and this run has 1: set nodes in job.toml" in told[0]
    assert "cannot run 'no-such-command': no such command in this image" in told[1]
    assert "BATCHML_GANG_TOKEN is not set" in told[2]
    assert "this image does not know launch.kind 'dask'" in told[3]
    assert "BATCHML_LAUNCH is not a launch plan" in told[4]
    assert [len(nodes.said(number)) for number in range(5)] == [2, 3, 2, 2, 2]


def test_a_notice_on_one_of_three_nodes_lets_all_save_and_the_run_be_tried_again(
    nodes: Nodes,
) -> None:
    """As the entry passes one on: its words in a file, then a TERM to the supervisor. (A5)

    A rank that does not look is killed before the host goes, long as the run's own grace may be.
    """
    nodes.start(TWO._replace(processes=1), """
say("begun with", os.environ["OMP_NUM_THREADS"])
while rank == 2 or not should_stop(): time.sleep(0.01)
say("saved")
""", count=3, BATCHML_GRACE="600", BATCHML_VCPUS="1")  # fmt: skip
    for number in range(3):
        nodes.until_said("begun with 1", number)
    supervisor = nodes.supervisor(1)
    given = Path(f"/proc/{supervisor}/environ").read_bytes().decode().split("\0")
    verdict = next(line.partition("=")[2] for line in given if line.startswith("BATCHML_VERDICT="))
    told = {"code": 75, "why": "its host goes in 120 s", "grace": 2.0}
    Path(verdict + ".asked").write_text(json.dumps(told))
    os.kill(supervisor, signal.SIGTERM)
    assert nodes.ended() == [75, 75, 75]
    for number in range(3):
        assert nodes.said(number).count("saved") == (number < 2)
        assert nodes.end(number) == {"code": "75", "by": "runtime"}
    assert nodes.said()[-2] == "batchml: its host goes in 120 s"


def test_a_notice_that_a_childs_entry_hears_ends_all_nodes_with_its_code(nodes: Nodes) -> None:
    """Whether or not its supervisor has reached the main node by then."""
    notice = nodes.folder / "notice"
    notice.write_text('{"action": "terminate", "time": "2026-09-18T08:22:00Z"}')
    (nodes.folder / "rank.py").write_text(PREAMBLE + "while not should_stop(): time.sleep(0.01)")
    nodes.add(0, 2, TWO)
    nodes.add(1, 2, TWO, BATCHML_NOTICE_FILE=str(notice))
    assert nodes.ended() == [75, 75]
    assert nodes.end() == nodes.end(1) == {"code": "75", "by": "runtime"}
    assert any("EC2" in line or "spot" in line.lower() for line in nodes.said())


def test_a_supervisor_that_dies_before_it_reached_the_main_node_is_told_of(nodes: Nodes) -> None:
    """By the entry of its container, as soon as the main node listens."""
    nodes.add(1, 2, TWO)
    wait_for(lambda: descendants(nodes.processes[0].pid), "the child has a supervisor")
    os.kill(nodes.supervisor(0), signal.SIGKILL)
    why = "the supervisor of its ranks is gone: signal 9 ended it"
    nodes.until_said(f"batchml: {why}")
    nodes.add(0, 2, TWO._replace(start_within=600))
    assert nodes.ended() == [75, 75]
    assert nodes.said(1)[-2] == f"batchml: node 1: {why}"


def test_a_notice_before_the_main_node_listens_is_told_once_it_does(nodes: Nodes) -> None:
    notice = nodes.folder / "notice"
    notice.write_text('{"action": "terminate"}')
    nodes.add(1, 2, TWO, "true", BATCHML_NOTICE_FILE=str(notice), BATCHML_GRACE="2")
    nodes.until_said("spot notice")
    wait_for(lambda: not descendants(nodes.processes[0].pid), "the supervisor has given up")
    nodes.add(0, 2, TWO._replace(start_within=600), "true")
    assert nodes.ended() == [75, 75]
    assert nodes.said(1)[-2].startswith(
        "batchml: node 1 could not start its command: spot notice: EC2 will"
    )


def faked_gpu(folder: Path, fault: str) -> dict[str, str]:
    """The variables of a node whose GPU breaks once the file `breaks` is there."""
    (folder / "sitecustomize.py").write_text(
        "import batchml.runtime.telemetry.gpus; batchml.runtime.telemetry.gpus.DEVICE = '/dev/null'"
    )
    return {
        "NVIDIA_VISIBLE_DEVICES": "GPU-aaaa",
        "LD_LIBRARY_PATH": str(build(folder).parent),
        fault: str(folder / "breaks"),
        "PYTHONPATH": f"{folder}:{os.getcwd()}",
    }


def test_a_gpu_that_breaks_on_one_node_ends_all_to_be_tried_elsewhere(
    nodes: Nodes, tmp_path: Path
) -> None:
    """The driver's library is one that says so once a file is there."""
    (nodes.folder / "rank.py").write_text(PREAMBLE + """
say("begun")
while not should_stop(): time.sleep(0.01)
""")  # fmt: skip
    nodes.add(0, 2, TWO)
    nodes.add(1, 2, TWO, **faked_gpu(tmp_path, "FAKE_XID_79"))
    nodes.until_said("[r3] begun", 1)
    (tmp_path / "breaks").touch()
    assert nodes.ended() == [75, 75]
    assert nodes.end() == {"code": "75", "by": "runtime"}
    assert nodes.said()[-2].startswith("batchml: this host (127.0.3.2) is unfit: GPU-aaaa: XID 79")


def test_a_rank_that_fails_because_its_gpu_is_lost_does_not_begin_again_there(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Without an event: the check of the host before the next generation finds it."""
    (nodes.folder / "rank.py").write_text(PREAMBLE + """
say("begun", generation)
lost = os.environ.get("FAKE_LOST", "")
if rank == 3:
    open(lost, "w").close()
    raise RuntimeError("CUDA error: unspecified launch failure")
while not should_stop(): time.sleep(0.01)
""")  # fmt: skip
    nodes.add(0, 2, TWO)
    nodes.add(1, 2, TWO, **faked_gpu(tmp_path, "FAKE_LOST"))
    assert nodes.ended() == [75, 75]
    lines = [line for node in (0, 1) for line in nodes.said(node)]
    assert not any("begun 2" in line for line in lines)
    assert any("is unfit: GPU-aaaa: it does not answer: GPU is lost" in line for line in lines)


@pytest.mark.parametrize("way", ["checkpoint", "file"])
def test_nodes_with_folders_of_their_own_go_on_where_rank_0_was(nodes: Nodes, way: str) -> None:
    """Without a workspace: by the run's store, in which the main node's folder is kept."""
    nodes.start(TWO._replace(processes=1), """
from batchml.runtime import checkpoint
folder = os.environ["BATCHML_CHECKPOINT_DIR"]
plain = os.path.join(folder, "snapshot")
def step():
    found = checkpoint.newest()
    return found.step if found else int(open(plain).read()) if os.path.exists(plain) else 0
say("generation", generation, "from", step())
if generation < 3:
    if rank == 0 and sys.argv[1] == "file": save(str(10 * generation))
    if sys.argv[1] == "checkpoint":
        checkpoint.save(lambda path: open(path + "/x", "w").close(), 10 * generation)
    until(f"{sys.argv[0]}.{generation}")
    if rank == 0: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
""", count=0)  # fmt: skip
    for number in (0, 1):
        nodes.add(
            number, 2, TWO._replace(processes=1), sys.executable, str(nodes.folder / "rank.py"),
            way, BATCHML_CHECKPOINT_DIR="", BATCHML_STORE=str(nodes.folder / "store"),
            BATCHML_KEEP_EVERY="0.2",
        )  # fmt: skip
    for generation in (1, 2):
        for number in (0, 1):
            nodes.until_said(f"generation {generation} from {10 * (generation - 1)}", number)
        (nodes.folder / f"rank.py.{generation}").touch()
    assert nodes.ended() == [0, 0]
    for number in (0, 1):
        assert "generation 3 from 20" in nodes.said(number)
    step = ", from step 20." if way == "checkpoint" else ", from the saved files."
    assert f"batchml: generation 3: 2 nodes, 2 ranks{step}" in nodes.said()


def test_a_node_to_which_nothing_can_be_brought_lets_the_run_be_tried_again(nodes: Nodes) -> None:
    """What the main node cannot send, the next attempt does not know of, on any node."""
    limits = QUICK.replace("}", ', "fetch_within": 0.5}')
    nodes.start(TWO._replace(processes=1), """
from batchml.runtime import checkpoint
if generation == 1:
    checkpoint.save(lambda path: open(path + "/x", "w").close(), 10)
    if rank == 0: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
until(f"{sys.argv[0]}.never")
""", BATCHML_CHECKPOINT_DIR="", BATCHML_STORE=str(nodes.folder / "store"),
        BATCHML_GANG_LIMITS=limits, BATCHML_KEEP_EVERY="600")  # fmt: skip
    assert nodes.ended() == [75, 75]
    why = (
        "the checkpoint of step 10 could not be fetched from the run's store within 0.5 s: "
        "the main node has not sent it"
    )
    assert nodes.said()[-2] == f"batchml: node 1 (127.0.3.2) could not start its command: {why}"


def test_a_reason_that_cannot_be_recorded_leaves_the_exit_code(tmp_path: Path) -> None:
    """As on a full disk: the code says that another host may succeed, and the log says the rest."""
    done = subprocess.run(
        [sys.executable, "-m", "batchml.runtime.nodes.torchrun", "--", sys.executable, "rank.py"],
        env={**os.environ, "BATCHML_VERDICT": str(tmp_path / "missing" / "verdict")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 75
    why, unrecorded = done.stdout.splitlines()
    assert why.startswith("batchml: this node's supervisor cannot work: ")
    assert unrecorded.startswith("batchml: the reason of exit code 75 is not recorded: ")
    assert done.stderr == ""
