"""What is run for an MPI job: the line of mpirun, its settings, and the agent's reading of them."""

import json
import stat
from pathlib import Path

import pytest

from batchml.runtime.nodes.mpi.agent import main as agent
from batchml.runtime.nodes.mpi.agent import read_words
from batchml.runtime.nodes.mpi.main import (
    daemon_variables,
    mpirun_line,
    mpirun_variables,
    read_command,
    write_files,
)
from batchml.runtime.nodes.supervisor.main import ProgramMissing


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    for name in ("mpirun", "mpiexec", "python"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    return {"PATH": str(tmp_path)}


def test_a_program_is_started_by_mpirun_on_all_nodes(environ: dict[str, str]) -> None:
    command = read_command(["./solver", "--steps", "a b"], 2, environ)
    assert (command.words, command.processes) == (("./solver", "--steps", "a b"), 0)
    line = mpirun_line(command.words, environ, 8)
    assert line[:3] == [f"{environ['PATH']}/mpirun", "-n", "8"]
    assert line[-3:] == ["./solver", "--steps", "a b"]


def test_a_python_script_gets_python(environ: dict[str, str]) -> None:
    command = read_command(["train.py"], 2, environ)
    assert command.words == (f"{environ['PATH']}/python", "-u", "train.py")


@pytest.mark.parametrize(
    ("line", "processes"),
    [
        ("mpirun -n 8 ./a", 4), ("mpiexec -np 7 ./a", 4), ("mpirun --tag-output ./a", 0),
        ("mpirun -n auto ./a", 0),
    ],
)  # fmt: skip
def test_a_line_with_mpirun_stays_as_it_is(
    environ: dict[str, str], line: str, processes: int
) -> None:
    words = line.split()
    command = read_command(words, 2, environ)
    assert command.words == (f"{environ['PATH']}/{words[0]}", *words[1:])
    assert command.processes == processes
    assert mpirun_line(command.words, environ, 8) == list(command.words)


@pytest.mark.parametrize("words", [["./a"], ["mpirun", "./a"], ["mpiexec", "./a"]])
def test_a_missing_mpirun_is_named_with_the_package(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ProgramMissing, match=r"has no mpi\w+: install openmpi-bin or mpich"):
        read_command(words, 2, {"PATH": str(tmp_path)})


def test_each_implementation_finds_the_nodes_and_the_agent(tmp_path: Path) -> None:
    found = mpirun_variables(str(tmp_path), "eth0")
    write_files(str(tmp_path), [("10.0.0.1", 4), ("10.0.0.2", 2)])
    for name in ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC",
                 "I_MPI_HYDRA_BOOTSTRAP_EXEC"):  # fmt: skip
        assert Path(found[name]).stat().st_mode & stat.S_IXUSR
    for name in ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile"):
        assert Path(found[name]).read_text() == "10.0.0.1 slots=4\n10.0.0.2 slots=2\n"
    for name in ("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE"):
        assert Path(found[name]).read_text() == "10.0.0.1:4\n10.0.0.2:2\n"
    assert found["OMPI_MCA_btl_tcp_if_include"] == found["HYDRA_IFACE"] == "eth0"
    assert "HYDRA_IFACE" not in mpirun_variables(str(tmp_path), "")
    assert set(daemon_variables("/tmp/x").values()) == {"/tmp/x"}


def test_the_agent_reads_the_arguments_of_ssh() -> None:
    assert read_words(["10.0.0.2", " orted", "-mca", '"env"']) == ("10.0.0.2", ' orted -mca "env"')
    assert read_words(["-x", "-q", "node", '"/usr/bin/proxy"', "--port", "1"]) == (
        "node", '"/usr/bin/proxy" --port 1'
    )  # fmt: skip
    with pytest.raises(ValueError, match="a host and a command"):
        read_words(["-x", "node"])


def test_the_agent_names_a_host_that_is_no_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts.json").write_text(json.dumps({"10.0.0.1": 0}))
    assert agent(str(tmp_path), ["10.0.0.9", "true"]) == 255
    assert "10.0.0.9 is not the address of a node of this run" in capsys.readouterr().err
