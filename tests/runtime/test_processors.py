"""The variables by which the libraries of a program start as many threads as it has processors."""

import os
import subprocess
import sys

import pytest

from batchml.runtime.processors import (
    count_processors,
    divide,
    thread_variables,
    with_counts,
    with_processors,
)

HERE = count_processors({})


def seen_by_python(environ: dict[str, str], code: str) -> str:
    """What a Python of this machine prints with these variables."""
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True
    )
    assert not found.stderr
    return found.stdout.strip()


@pytest.mark.parametrize(
    ("vcpus", "count"),
    [("1", 1), ("0.25", 1), ("100000", HERE), ("many", HERE), ("", HERE), ("inf", HERE)],
)
def test_a_container_has_the_vcpus_of_its_job_and_no_more_than_there_are(
    vcpus: str, count: int
) -> None:
    assert count_processors({"BATCHML_VCPUS": vcpus}) == count


def test_every_library_gets_a_thread_for_each_processor() -> None:
    found = with_processors({"PATH": "/bin"}, 6)
    for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "RAYON", "BLIS"):
        assert found[f"{name}_NUM_THREADS"] == "6"
    assert found["VECLIB_MAXIMUM_THREADS"] == found["PYTHON_CPU_COUNT"] == found["NPROC"] == "6"
    assert found["PATH"] == "/bin"


def test_a_value_of_the_image_or_of_the_job_wins() -> None:
    own = {"MKL_NUM_THREADS": "9", "PYTHON_CPU_COUNT": "3", "PYTHONPATH": "/mine"}
    found = with_processors(own, 2)
    assert (found["MKL_NUM_THREADS"], found["PYTHON_CPU_COUNT"]) == ("9", "3")
    assert found["OMP_NUM_THREADS"] == "2"
    assert found["PYTHONPATH"].endswith(":/mine")


@pytest.mark.parametrize(("given", "others"), [("1", "1"), ("4,2", "4"), ("x", "2"), ("0", "2")])
def test_the_jobs_number_of_openmp_threads_holds_for_all_libraries(given: str, others: str) -> None:
    found = with_processors({"OMP_NUM_THREADS": given}, 2)
    assert found["OMP_NUM_THREADS"] == given
    assert found["OPENBLAS_NUM_THREADS"] == found["NUMEXPR_NUM_THREADS"] == others
    assert found["PYTHON_CPU_COUNT"] == "2", "for programs that start processes"


def test_numexpr_gets_no_more_threads_than_it_accepts() -> None:
    assert thread_variables({}, 96)["NUMEXPR_NUM_THREADS"] == "64"


def test_ray_sets_the_threads_of_each_task_itself() -> None:
    found = with_counts({}, 4)
    assert found["PYTHON_CPU_COUNT"] == "4"
    assert not [name for name in found if name.endswith("_THREADS") and "INDUCTOR" not in name]


def test_the_tasks_of_a_slurm_step_share_the_processors() -> None:
    whole = with_processors({}, HERE)
    tasks = divide({**whole, "MKL_NUM_THREADS": "77"}, HERE)
    assert tasks["OMP_NUM_THREADS"] == tasks["PYTHON_CPU_COUNT"] == "1"
    assert "MKL_NUM_THREADS" not in tasks, "the script has set it"
    assert divide(whole, 1)["OMP_NUM_THREADS"] == str(HERE)
    assert divide(whole, HERE + 5)["OMP_NUM_THREADS"] == "1"


# Python 3.13 does not start with a value that is neither a number nor "default".
IGNORED = ["default", *(["0", "many"] if sys.version_info < (3, 13) else [])]


@pytest.mark.parametrize("given", ["7", *IGNORED])
def test_python_counts_the_processors_of_the_run(given: str) -> None:
    environ = with_processors({"PYTHON_CPU_COUNT": given}, 3)
    expected = given if given.isdigit() and given != "0" else os.cpu_count()
    code = "import os, multiprocessing as m; print(os.cpu_count(), m.cpu_count())"
    assert seen_by_python(environ, code) == f"{expected} {expected}"


def test_the_users_own_sitecustomize_runs_as_well(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "sitecustomize.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write("import os; os.environ['SITE'] = 'mine'\n")
    environ = with_processors({"PYTHONPATH": str(tmp_path)}, 5)
    code = "import os; print(os.environ['SITE'], os.cpu_count())"
    assert seen_by_python(environ, code) == "mine 5"
