"""What a script of Slurm finds inside a run: its variables, and `srun`."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from batchml.runtime.entry.script import (
    interpreter,
    job_number,
    slurm_variables,
    unpack,
    without_login,
)
from batchml.runtime.nodes.slurm.srun import put_tools, read_step
from batchml.runtime.nodes.slurm.steps import SrunStep, StepNode, task_variables

JOB = {"AWS_BATCH_JOB_ID": "id:1", "AWS_BATCH_JOB_ARRAY_INDEX": "1", "BATCHML_ARRAY_SIZE": "3"}
TWO_NODES = {"SLURM_JOB_NODELIST": "10.0.0.1,10.0.0.2", "SLURM_NTASKS_PER_NODE": "2"}
ONE_NODE = {"SLURM_JOB_NODELIST": "127.0.0.1"}


def test_the_task_of_an_array_has_slurms_id() -> None:
    found = slurm_variables({**JOB, "BATCHML_SLURM_ARRAY": "2-10:4"}, "/job")
    assert found["SLURM_JOB_ID"] == found["SLURM_JOBID"] == job_number("id:1")
    assert found["SLURM_ARRAY_JOB_ID"] == job_number("id")
    names = ("ID", "COUNT", "MIN", "MAX", "STEP")
    assert [found[f"SLURM_ARRAY_TASK_{name}"] for name in names] == ["6", "3", "2", "10", "4"]
    assert found["SLURM_SUBMIT_DIR"] == "/job"


@pytest.mark.parametrize("spans", ["", "1-9"])
def test_ids_that_are_not_this_arrays_are_not_taken(spans: str) -> None:
    found = slurm_variables({**JOB, "BATCHML_SLURM_ARRAY": spans}, "/job")
    assert found["SLURM_ARRAY_TASK_ID"] == "1"


def test_a_single_id_is_a_task_without_an_array() -> None:
    found = slurm_variables({"AWS_BATCH_JOB_ID": "id", "BATCHML_SLURM_ARRAY": "7"}, "/job")
    assert (found["SLURM_ARRAY_TASK_ID"], found["SLURM_ARRAY_TASK_COUNT"]) == ("7", "1")
    assert "SLURM_ARRAY_TASK_ID" not in slurm_variables({"AWS_BATCH_JOB_ID": "id"}, "/job")


def test_the_first_node_knows_all_of_them() -> None:
    environ = {"AWS_BATCH_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4", "BATCHML_ATTEMPT": "2"}
    found = slurm_variables(environ, "/job", ["10.0.0.1", "10.0.0.2"])
    assert found["SLURM_JOB_NODELIST"] == found["SLURM_NODELIST"] == "10.0.0.1,10.0.0.2"
    assert found["SLURM_LAUNCH_NODE_IPADDR"] == found["SLURMD_NODENAME"] == "10.0.0.1"
    assert (found["SLURM_NNODES"], found["SLURM_NTASKS"]) == ("2", "8")
    assert found["SLURM_TASKS_PER_NODE"] == "4(x2)"
    assert found["SLURM_RESTART_COUNT"] == "1"


def test_a_jobs_number_is_one_that_scripts_can_calculate_with() -> None:
    """`expr 10000 + $(echo -n $SLURM_JOBID | tail -c 4)`, and an int of C."""
    ids = [str(uuid.UUID(int=n)) for n in range(1000)]
    numbers = {int(job_number(each)) for each in ids}
    assert len(numbers) == 1000 and min(numbers) > 0 and max(numbers) < 2**31
    assert job_number("") == ""


def test_first_lines() -> None:
    assert interpreter(b"#!/usr/bin/env python -u\n") == ["/usr/bin/env", "python -u"]
    assert interpreter(b"#! /bin/sh\n") == ["/bin/sh"]
    assert interpreter(b"echo\n") == []
    assert without_login(["/bin/bash", "-l"]) == ["/bin/bash"]
    assert without_login(["/bin/bash", "-e"]) == ["/bin/bash", "-e"]
    assert without_login(["/bin/bash", "--login"]) == ["/bin/bash"]
    assert without_login(["/bin/bash", "-el"]) == ["/bin/bash", "-e"]
    assert without_login(["/bin/bash", "-leuo pipefail"]) == ["/bin/bash", "-euo pipefail"]
    assert without_login(["/usr/bin/perl", "-l"]) == ["/usr/bin/perl", "-l"]
    for words in (["/bin/sh", "/all/profile"], ["/bin/sh", "-"], ["/bin/bash", "--posix"]):
        assert without_login(words) == words


def test_a_damaged_script_is_told_of() -> None:
    with pytest.raises(ValueError, match="damaged"):
        unpack("AAAA")


@pytest.mark.parametrize(
    ("words", "environ", "step"),
    [
        (["hostname"], {}, SrunStep(["hostname"])),
        (["-n", "4", "-l", "./a", "-n"], {}, SrunStep(["./a", "-n"], [0], 4, label=True)),
        (["-n4", "--cpu-bind=cores", "--mpi=pmix", "a"], {}, SrunStep(["a"], [0], 4)),
        (["--ntasks=8", "-N", "2", "a"], TWO_NODES, SrunStep(["a"], [0, 1], 4)),
        (["--gpus-per-task=a100:2", "--", "a"], TWO_NODES, SrunStep(["a"], [0, 1], 2, 2)),
        (["-c", "4", "--exclusive", "-u", "a"], TWO_NODES, SrunStep(["a"], [0, 1], 2)),
        (["-N1", "-n1", "-w", "10.0.0.2", "a"], TWO_NODES, SrunStep(["a"], [1])),
        (["--nodes=1", "a"], TWO_NODES, SrunStep(["a"], [0], 2)),
        (["-n", "1", "a"], TWO_NODES, SrunStep(["a"], [0])),
        (["a"], {**TWO_NODES, "AWS_BATCH_JOB_NODE_INDEX": "1"}, SrunStep(["a"], [1], 2)),
    ],
)
def test_the_words_of_srun(words: list[str], environ: dict[str, str], step: SrunStep) -> None:
    assert read_step(words, {**ONE_NODE, **environ}) == step


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ([], "no command is given"),
        (["-n3", "a"], "3 tasks cannot be shared evenly by 2 nodes"),
        (["-N3", "a"], "3 nodes are requested, and the run has 2"),
        (["-w", "node7", "a"], "node7 is none of this run's nodes, 10.0.0.1, 10.0.0.2"),
        (["--multi-prog", "a"], "--multi-prog is not supported"),
    ],
)
def test_what_srun_cannot_do(words: list[str], wrong: str) -> None:
    assert read_step(words, TWO_NODES).wrong.startswith(wrong)


def test_tasks_are_numbered_over_the_nodes_and_have_gpus_of_their_own() -> None:
    step = SrunStep(["a"], [0, 1], 2, gpus=2)
    found = task_variables(step, StepNode(1, {"SLURM_GPUS_ON_NODE": "4"}), 1)
    assert (found["SLURM_PROCID"], found["SLURM_LOCALID"]) == ("3", "1")
    assert (found["SLURM_NTASKS"], found["CUDA_VISIBLE_DEVICES"]) == ("4", "2,3")
    found = task_variables(step, StepNode(0, {"CUDA_VISIBLE_DEVICES": "5,7,8,9"}), 0)
    assert found["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert "CUDA_VISIBLE_DEVICES" not in task_variables(SrunStep(["a"]), StepNode(0, {}), 0)


def test_the_programs_work_whatever_the_script_did_to_its_python(tmp_path: Path) -> None:
    put_tools(str(tmp_path))
    environ = {
        **ONE_NODE, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": "/nowhere",
        "SLURMD_NODENAME": "10.0.0.7", "BATCHML_SLURM_FOLDER": str(tmp_path),
    }  # fmt: skip
    script = (
        "srun -n2 -l hostname -i; conda activate x; srun -n2 sh -c 'exit $((SLURM_PROCID * 4))'"
    )

    def run(words: list[str]) -> tuple[int, str]:
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    assert sys.executable in (tmp_path / "srun").read_text()
    code, said = run(["sh", "-c", script])
    assert (code, sorted(said.splitlines())) == (4, [
        "0: 10.0.0.7", "1: 10.0.0.7",
        "conda: batchml: nothing is done, because the packages are part of the image",
    ])  # fmt: skip
    code, said = run([str(tmp_path / "squeue")])
    assert (code, "use batchml ls, outside of the run" in said) == (127, True)
