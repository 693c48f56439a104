"""The variables that the embedded server sets for a job."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.local.batch.state import Job, Nodes
from batchml.local.executors.choice import Permits
from batchml.local.executors.container_spec import container_spec
from batchml.local.executors.spec import ExecutorHost, runner_spec
from batchml.local.home import Home

from tests.support.executor_rig import attempt_of, job_of  # isort: skip


@pytest.fixture
def host(tmp_path: Path) -> ExecutorHost:
    home = Home(tmp_path / "home")
    return ExecutorHost(home, home.runtimes / "r", {})


def inside_process(host: ExecutorHost, job: Job) -> dict[str, str]:
    return dict(runner_spec(host, job, attempt_of(job))["env"])


def inside_container(host: ExecutorHost, job: Job) -> tuple[dict[str, str], dict[str, Any]]:
    """The variables, and what is mounted where."""
    spec = container_spec(host, Permits(), job, attempt_of(job))
    env = dict(entry.split("=", 1) for entry in spec["config"]["Env"])
    return env, {source["target"]: source["path"] for source in spec["sources"]}


def test_metrics_and_stop_file_of_a_process_go_with_its_working_directory(
    host: ExecutorHost,
) -> None:
    job = job_of(["true"])
    spec = runner_spec(host, job, attempt_of(job))
    for name in ("BATCHML_METRICS", "BATCHML_STOP_FILE"):
        assert Path(spec["env"][name]).parent == Path(spec["cwd"])


def test_the_folder_of_data_sets_is_made_unless_it_is_the_users(host: ExecutorHost) -> None:
    job = job_of(["true"])
    made = runner_spec(host, job, attempt_of(job))["shared"]
    assert made == [f"{host.home.root}/workspace", f"{host.home.root}/data"]
    job = job_of(["true"], env={"BATCHML_DATA_DIR": "/mine"})
    assert runner_spec(host, job, attempt_of(job))["shared"] == made[:1]


def test_in_a_container_the_runtime_makes_them_unless_the_job_names_them(
    host: ExecutorHost,
) -> None:
    env, _ = inside_container(host, job_of(["true"]))
    assert not {"BATCHML_METRICS", "BATCHML_STOP_FILE"} & set(env)
    env, _ = inside_container(host, job_of(["true"], env={"BATCHML_METRICS": "/mine"}))
    assert env["BATCHML_METRICS"] == "/mine"


def test_a_run_with_a_budget_gets_a_store_for_its_account(host: ExecutorHost) -> None:
    job = job_of(["true"], env={"BATCHML_MAX_SECONDS": "60"})
    store = str(host.home.runs / job.id / "store")
    assert inside_process(host, job)["BATCHML_STORE"] == store
    env, mounted = inside_container(host, job)
    assert env["BATCHML_STORE"] == "/batchml/store"
    assert mounted["/batchml/store"] == store
    assert "BATCHML_STORE" not in inside_process(host, job_of(["true"]))


def test_the_child_of_an_array_knows_how_many_there_are_unless_its_client_says(
    host: ExecutorHost,
) -> None:
    job = job_of(["true"])
    spec = replace(job.spec, array_size=7)
    assert inside_process(host, replace(job, index=2, spec=spec))["BATCHML_ARRAY_SIZE"] == "7"
    given = job_of(["true"], env={"BATCHML_ARRAY_SIZE": "100"})
    child = replace(given, index=2, spec=replace(given.spec, array_size=7))
    assert inside_process(host, child)["BATCHML_ARRAY_SIZE"] == "100"
    assert "BATCHML_ARRAY_SIZE" not in inside_process(host, job)


def test_a_process_of_ours_goes_through_the_runtime_whatever_its_image(host: ExecutorHost) -> None:
    ours = job_of(["true"], env={"BATCHML_KEY": "k"})
    spec = runner_spec(host, ours, attempt_of(ours))
    assert spec["command"][1:] == ["-m", "batchml.runtime.run", "true"]
    theirs = job_of(["true"])
    assert runner_spec(host, theirs, attempt_of(theirs))["command"] == ["true"]


def node_of(job: Job, index: int) -> Job:
    return replace(job, id=f"{job.id}#{index}", node=index,
                   spec=replace(job.spec, nodes=Nodes(2, 0)))  # fmt: skip


@pytest.mark.parametrize("told", ["LAUNCH", "HEALTH"])
def test_the_nodes_of_a_run_share_what_outlives_an_attempt(host: ExecutorHost, told: str) -> None:
    """Checkpoints, outputs, the store are the run's; metrics and stop file a node's own. (B237)"""
    job = job_of(["true"], env={f"BATCHML_{told}": "{}"})
    nodes = [node_of(job, index) for index in (0, 1)]
    first, second = (inside_process(host, node) for node in nodes)
    runs = host.home.runs / job.id
    for name, folder in (("OUTPUT_DIR", "output"), ("CHECKPOINT_DIR", "checkpoints"),
                         ("STORE", "store")):  # fmt: skip
        assert first[f"BATCHML_{name}"] == second[f"BATCHML_{name}"] == str(runs / folder)
    assert first["BATCHML_METRICS"] != second["BATCHML_METRICS"]
    assert [env["BATCHML_RUN"] for env in (first, second)] == [node.id for node in nodes]
    (_, mounted), (_, others) = (inside_container(host, node) for node in nodes)
    for inside in ("/batchml/output", "/batchml/checkpoints", "/batchml/store"):
        assert mounted[inside] == others[inside]
    spec = runner_spec(host, nodes[0], attempt_of(nodes[0]))
    assert spec["own"] == ""  # never left to another job


@pytest.mark.parametrize("told", ["CODE", "ORDER", "LAUNCH", "HEALTH"])
def test_a_container_is_wrapped_where_the_runtime_has_something_to_do(
    host: ExecutorHost, told: str
) -> None:
    """(B238)"""
    job = job_of(["true"], env={f"BATCHML_{told}": "x"})
    assert container_spec(host, Permits(), job, attempt_of(job))["wrap"] is True
    plain = job_of(["true"], env={"BATCHML_KEY": "k"})
    assert container_spec(host, Permits(), plain, attempt_of(plain))["wrap"] is False


def test_what_a_job_was_given_is_found_in_a_state_folder_that_was_moved(host: ExecutorHost) -> None:
    home = host.home
    for path in (home.code / "a.tar.gz", home.sweeps / "key" / "spec.json"):
        path.parent.mkdir(parents=True)
        path.touch()
    there = {"BATCHML_CODE": "/gone/code/a.tar.gz", "BATCHML_SWEEP": "/gone/sweeps/key"}
    env = inside_process(host, job_of(["true"], env=there))
    assert env["BATCHML_CODE"] == str(home.code / "a.tar.gz")
    assert env["BATCHML_SWEEP"] == str(home.sweeps / "key")
    _, mounted = inside_container(host, job_of(["true"], env=there))
    assert str(home.code / "a.tar.gz") in mounted.values()
    lost = {"BATCHML_CODE": "/gone/code/b.tar.gz", "BATCHML_SWEEP": "s3://b/gone/key"}
    assert inside_process(host, job_of(["true"], env=lost)).items() >= lost.items()
