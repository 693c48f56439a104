"""A run uses the processors that it requests, whatever counts them."""

import os

import pytest

from tests.support.cli import Cli, write_job

_JOB = """
name = "count"
command = ["python3", "count.py"]
image = "python:3.11-slim-bookworm"
[resources]
vcpus = 1
memory = "128 MiB"
"""
_COUNT = """
import os, subprocess, sys
from multiprocessing import cpu_count
nproc = subprocess.run("nproc", capture_output=True, text=True).stdout.strip()
found = os.cpu_count(), cpu_count(), nproc, *(os.environ[name] for name in sys.argv[1:])
print("found", *found)
"""
_SEEN = ("BATCHML_VCPUS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.mark.journey
def test_all_that_counts_processors_counts_the_vcpus_of_the_run(cli: Cli) -> None:
    write_job(cli.folder, "count", _JOB, count__py=_COUNT)
    command = ("submit", "--wait", "count", "--", "python3", "count.py", *_SEEN)
    shown = cli(*command)
    assert "found 1 1 1 1 1 1" in shown.out, shown
    own = cli(*command[:2], "--set-env", "OMP_NUM_THREADS=3", *command[2:])
    assert "found 1 1 3 1 3 3" in own.out, own


def test_the_children_of_an_array_count_like_a_run(cli: Cli) -> None:
    write_job(cli.folder, "count", _JOB, count__py=_COUNT)
    command = ("count", "--array", "2", "--", "python3", "count.py", *_SEEN)
    shown = cli("submit", "--wait", *command)
    assert shown.out.count("found 1 1 1 1 1 1") == 2, shown


def test_each_rank_counts_its_part_of_the_node(cli: Cli) -> None:
    launch = """
[launch]
kind = "torchrun"
processes_per_node = 2
"""
    vcpus = min(2, len(os.sched_getaffinity(0)))
    text = _JOB.replace("vcpus = 1", f"vcpus = {vcpus}")
    text = text.replace("python:3.11-slim-bookworm", "python")
    write_job(cli.folder, "count", text + launch, count__py=_COUNT)
    (cli.folder / "images" / "python").mkdir(parents=True)
    (cli.folder / "images" / "python" / "requirements.txt").write_text("")
    command = ("count", "--", "torchrun", "count.py", *_SEEN)
    shown = cli("submit", "--wait", *command)
    assert shown.out.count(f"found 1 1 1 {vcpus} 1 1") == 2, shown
