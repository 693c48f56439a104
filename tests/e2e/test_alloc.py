"""alloc, and scripts of Slurm, as a person uses them."""

import os
import pty
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.local.home import Home
from tests.support.cli import Cli

LIMIT = 60  # seconds for anything here

SCRIPT = """#!/bin/bash -l
#SBATCH --job-name=slurms --cpus-per-task=1
#SBATCH --array=3,5
#SBATCH --output=logs/%j.out
#BATCHML --memory "256 MiB"
set -e
module load cuda/12
echo "task $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT: $1 in $(basename "$SLURM_SUBMIT_DIR")"
[ "$SLURM_CPUS_ON_NODE" = 1 ] && [ -d "$SLURM_TMPDIR" ] && [ "$SLURM_TMPDIR" != "$TMPDIR" ]
[ $((SLURM_JOB_ID % 1000)) -ge 0 ]
cat words.txt
srun --ntasks=2 --label sh -c 'sleep 0.$SLURM_PROCID; echo rank $SLURM_PROCID of $SLURM_NTASKS'
srun sh -c 'exit 5'
"""


# Of PyTorch's tutorial on training with several nodes, with echo before torchrun.
NODES = r"""#!/bin/bash
#SBATCH --job-name=multinode-example
#SBATCH --nodes=2
#SBATCH --ntasks=2

nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head_node=${nodes[0]}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
export TRAIN=$PWD/train.py
srun sh -c "echo torchrun --rdzv_id $RANDOM --rdzv_endpoint $head_node_ip:29500 \$TRAIN"
[ "$(srun -w "${nodes[1]}" cat words.txt)" = "hello from the folder" ] || exit 6
srun sh -c 'exit $((SLURM_PROCID * 7))'
"""


@pytest.fixture(scope="module")
def people(environments: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """All sit at one machine, of four vCPUs whatever it has."""
    top = tmp_path_factory.mktemp("people")
    home, folder = Home(top / "home"), top / "work"
    home.prepare()
    home.envs.symlink_to(environments)
    folder.mkdir()
    (folder / "words.txt").write_text("hello from the folder\n")
    cli = Cli(folder, home)
    assert cli("local", "start", "--vcpus", "4").code == 0
    yield cli
    assert cli("local", "stop").code == 0


def job_id(text: str) -> str:
    found = re.search(r"Submitted job \[[\w-]+ - ([0-9a-f-]{36})\]", text)
    assert found, text
    return found[1]


@pytest.mark.journey
def test_a_command_runs_on_all_that_is_held_and_then_it_is_given_back(people: Cli) -> None:
    program = "srun --label cat words.txt; echo $BATCHML_RUN; exit 3"
    shown = people("alloc", "--nodes", "2", "--", "sh", "-c", program)
    run = job_id(shown.err)
    assert shown.code == 3, shown.err
    *labelled, last = shown.out.splitlines()
    assert sorted(labelled) == ["0: hello from the folder", "1: hello from the folder"]
    assert last == f"{run}#0"
    assert "[retry]" not in shown.err
    assert re.search(r"is granted 2 nodes, each of 1 vCPU, \d+ MiB\.", shown.err)
    assert "The resources are released. It ran " in shown.err
    found = people("show", run, "--json").json
    assert (found["status"], found["tags"]["batchml:seat"]) == ("SUCCEEDED", "alloc")


def test_what_a_killed_client_held_ends_itself_and_says_so(people: Cli) -> None:
    held = people("alloc", "--idle", "1s", "--json")
    assert (held.code, held.json["status"]) == (0, "RUNNING")
    run = held.json["jobId"]
    assert f"shell:  batchml shell {run}" in held.err  # and nobody comes
    assert people("wait", run, "--timeout", "60s").code == 0
    assert "the allocation was idle for 1 s and is ended. It ran" in people("logs", run).out


def test_ctrl_c_while_it_waits_cancels(people: Cli) -> None:
    first = people("submit", "--json", "--vcpus", "64", "--", "sleep", "60").json["jobId"]
    waiting = people.watch("alloc", "--vcpus", "64")
    try:
        assert waiting.stderr is not None
        seen = ""
        while "is RUNNABLE" not in seen:
            line = waiting.stderr.readline()
            assert line, seen
            seen += line
        waiting.send_signal(signal.SIGINT)
        _, err = waiting.communicate(timeout=LIMIT)
    finally:
        waiting.kill()
    assert waiting.returncode == 130, err
    assert f"Cancelled job {job_id(seen)}." in err
    assert people("wait", job_id(seen)).code == 143
    assert people("cancel", first).code == 0


def test_a_shell_on_a_terminal_and_its_exit_code(people: Cli) -> None:
    leader, follower = pty.openpty()
    shell = subprocess.Popen(
        people.command("alloc", "--name", "seat"), cwd=people.folder,
        env={**people.environ, "TERM": "xterm", "SHELL": "/bin/sh", "PS1": "$ "},
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    seen = _until(leader, b"releases the resources")
    os.write(leader, b"echo it is $((6 * 7)) here; echo 1 > made.txt; exit 4\n")
    seen += _until(leader, b"")
    assert shell.wait(timeout=LIMIT) == 4, seen.decode("utf-8", "replace")
    os.close(leader)
    assert b"it is 42 here" in seen and b"The resources are released." in seen
    assert b"This is a copy of the folder: `batchml get` brings changed files." in seen
    assert b"made.txt (2 B) was written to the working folder, and can be copied from" in seen
    assert people("get", "@last").code == 0
    assert next(people.folder.glob("seat-*/work/made.txt")).read_text() == "1\n"
    assert re.search(rb"\(alloc [0-9a-f]{8}\) ", seen)


def _until(leader: int, text: bytes) -> bytes:
    """What the terminal shows, until it shows `text`; to its end where that is empty."""
    seen = b""
    while not text or text not in seen:
        try:
            block = os.read(leader, 65536)
        except OSError:
            return seen
        if not block:
            return seen
        seen += block
    return seen


@pytest.mark.journey
def test_a_script_of_slurm_runs_as_it_is(people: Cli) -> None:
    (people.folder / "train.sh").write_text(SCRIPT)
    shown = people("submit", "--wait", "train.sh", "--", "an argument")
    assert shown.code == 1, shown.out + shown.err  # children that failed
    assert "Child 1 FAILED: app-error: the program ended with code 5" in shown.err
    assert "line 4: --output is passed over" in shown.err
    for child, task in ((0, 3), (1, 5)):
        lines = [
            line.partition("Z] ")[2]
            for line in shown.out.splitlines()
            if line.startswith(f"{child} | [")
        ]
        assert lines == [
            "module: batchml: nothing is done, because the packages are part of the image",
            f"task {task} of 2: an argument in work",
            "hello from the folder",
            "0: rank 0 of 2",
            "1: rank 1 of 2",
        ]


@pytest.mark.journey
def test_a_script_for_several_nodes_runs_on_the_first_and_its_steps_on_all(people: Cli) -> None:
    (people.folder / "nodes.sh").write_text(NODES)
    shown = people("submit", "--wait", "nodes.sh")
    assert shown.code == 7, shown.out + shown.err
    trains = dict(re.findall(r"^([01]) \| \[.*Z\] (torchrun .*)$", shown.out, re.MULTILINE))
    assert sorted(trains) == ["0", "1"], shown.out
    first, second = (words.split() for _, words in sorted(trains.items()))
    assert first[:-1] == second[:-1]  # one script, one $RANDOM, one endpoint
    assert first[-1].endswith("/train.py") and first[-1] != second[-1]  # each in its own folder
