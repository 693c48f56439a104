"""Controllers of sweeps on the embedded server: they use no resources and run only batchml."""

import sys
from pathlib import Path
from typing import Any

import pytest

from batchml.local.batch.state import CONTROLLERS, JobAttempt
from batchml.local.executors.choice import CONTAINER, PROCESS, Permits
from batchml.local.executors.container_spec import container_spec, spec_maker
from batchml.local.executors.spec import ExecutorHost, RunnerSpecError
from batchml.local.home import Home
from batchml.local.machine import MachineCapacity
from tests.support.engine_world import World, furnish
from tests.support.executor_rig import job_of
from tests.support.models import ec2

KEY = "2abcdefghijklmnop"
ATTEND = ["sweeps", "attend", KEY]


def world(journal: Path | None = None) -> World:
    w = furnish(World(vcpus=2, memory=256, journal=journal))
    w.environment(CONTROLLERS, type="UNMANAGED", computeResources=None, unmanagedvCpus=2)
    w.queue(CONTROLLERS, 1, CONTROLLERS)
    return w


def test_controllers_take_nothing_of_the_machine_and_need_none_of_it_to_be_free(
    tmp_path: Path,
) -> None:
    """B8a."""
    w = world(tmp_path / "journal")
    trials = [w.submit(vcpus=1, memory=128) for _ in range(2)]
    controllers = [w.submit(memory=200, queue=CONTROLLERS) for _ in range(3)]
    assert w.status(*trials) == ["STARTING", "STARTING"], "the machine is full"
    assert w.status(*controllers) == ["STARTING", "STARTING", "RUNNABLE"], "as many as its vCPUs"
    w.restart()
    assert w.state.free == MachineCapacity(0, 0)
    w.end(controllers[0])
    assert w.status(controllers[2]) == ["STARTING"]
    w.end(trials[0])
    assert w.state.free == MachineCapacity(1, 128), (
        "what a controller gives back is not the machine's"
    )


def test_the_environment_of_controllers_is_unmanaged() -> None:
    w = World()
    words = w.refusal(
        "CreateComputeEnvironment",
        computeEnvironmentName=CONTROLLERS,
        type="MANAGED",
        computeResources=ec2(1),
    )
    assert "UNMANAGED" in words


@pytest.fixture
def host(tmp_path: Path) -> ExecutorHost:
    home = Home(tmp_path / "home")
    return ExecutorHost(
        home, home.runtimes / "r", {"PATH": "/bin", "SECRET": "s", "LANG": "C.UTF-8"}
    )


def told(host: ExecutorHost, command: list[str], **variables: str) -> dict[str, Any]:
    job = job_of(command, env=variables)
    attempt = JobAttempt(1, "t" * 32, CONTROLLERS, ())
    return spec_maker(host, Permits())(PROCESS, job, attempt)


def test_a_controller_is_this_python_also_where_jobs_run_in_containers(host: ExecutorHost) -> None:
    spec = told(host, ATTEND, BATCHML_HOME="/elsewhere", PYTHONPATH="/evil", LD_PRELOAD="/evil.so")
    assert spec["command"] == [sys.executable, "-m", "batchml", *ATTEND]
    env = spec["env"]
    assert env["BATCHML_HOME"] == str(host.home.root)
    assert (env["BATCHML_ENV"], env["LANG"]) == ("local", "C.UTF-8")
    assert "evil" not in str(env) and "SECRET" not in env, "nothing of its job's own, nor secrets"
    assert (Path(env["PYTHONPATH"]) / "batchml" / "__main__.py").is_file()


@pytest.mark.parametrize(
    "command",
    [
        ["sh", "-c", "id"],
        ["sweeps", "attend", "../../x"],
        ["sweeps", "attend", KEY, "--config", "x"],
        ["sweeps", "stop", KEY],
        [],
    ],
)
def test_nothing_else_runs_there(host: ExecutorHost, command: list[str]) -> None:
    """Else a job in a container, which may submit others, could run a command of its own here."""
    with pytest.raises(RunnerSpecError, match="runs only controllers of sweeps and of fallbacks"):
        told(host, command)


# --- the store of a sweep, in a container -------------------------------------------------------


def contained(host: ExecutorHost, store: str) -> dict[str, Any]:
    job = job_of(["true"], env={"BATCHML_SWEEP": store})
    return container_spec(host, Permits(), job, JobAttempt(1, "t" * 32, "this-machine", ()))


def test_a_trial_in_a_container_sees_the_board_of_its_sweep(host: ExecutorHost) -> None:
    store = f"{host.home.sweeps}/{KEY}"
    spec = contained(host, store)
    assert "BATCHML_SWEEP=/batchml/sweep" in spec["config"]["Env"]
    mounts = {each["target"]: each for each in spec["sources"] if each["path"].startswith(store)}
    assert mounts["/batchml/sweep"]["read_only"], "its ledger is not the trials' to write"
    written = {target for target, each in mounts.items() if not each["read_only"]}
    assert written == {
        f"/batchml/sweep/{name}" for name in ("checkpoints", "claims", "inbox", "rungs")
    }


@pytest.mark.parametrize("store", ["", "/etc", "{sweeps}", "{sweeps}/../local", "{sweeps}/a/b"])
def test_no_other_folder_comes_in_as_a_store(host: ExecutorHost, store: str) -> None:
    spec = contained(host, store.replace("{sweeps}", str(host.home.sweeps)))
    assert not [each for each in spec["sources"] if each["target"].startswith("/batchml/sweep")]


def test_kinds_are_chosen_by_attempt_and_not_by_server_alone(host: ExecutorHost) -> None:
    job = job_of(["true"])
    made = spec_maker(host, Permits())(CONTAINER, job, JobAttempt(1, "t" * 32, "this-machine", ()))
    assert "config" in made
