"""A run that finds no host in its queue goes on in another one, while nobody waits for it."""

from pathlib import Path
from typing import Any

import pytest

from batchml.client import Client
from batchml.history import History
from batchml.local.home import Home
from batchml.runs.fallback.move import FallbackPlans
from tests.support.local_server import wait_for, wait_for_job
from tests.support.models import ec2

SAYS = "import os; print('follows', os.environ['BATCHML_MOVED'])"


@pytest.fixture
def queues(batch: Any) -> None:
    """A queue whose one host is taken for as long as the test lasts, and one with a free host."""
    for name in ("spot", "gpu"):
        batch.create_compute_environment(
            computeEnvironmentName=name, type="MANAGED",
            computeResources=ec2(1, instanceTypes=["g5"]),
        )  # fmt: skip
        order = [{"order": 1, "computeEnvironment": name}]
        batch.create_job_queue(jobQueueName=name, priority=1, computeEnvironmentOrder=order)


@pytest.mark.usefixtures("queues")
def test_a_run_moves_by_itself_and_is_one_run_for_its_user(
    home: Home, batch: Any, tmp_path: Path
) -> None:
    told: list[str] = []
    environ = {"BATCHML_HOME": str(home.root)}
    client = Client("local", tmp_path, environ=environ, tell=told.append)
    hog = client.submit(command=["sleep", "60"], queue="spot", vcpus=1, memory="64 MiB", name="hog")
    wait_for_job(batch, hog.job_id, "RUNNING")
    run = client.submit(
        command=["python3", "-c", SAYS], queue="spot", vcpus=1, memory="64 MiB",
        name="mover", fallback="gpu:1s",
    )  # fmt: skip
    # Nobody waits for it: the watcher in the queue `controllers` does what has to be done.
    first = wait_for_job(batch, run.job_id, "FAILED")
    assert first["isCancelled"] is True
    assert first["statusReason"] == "batchml: moved to the queue gpu: no host within 1 s"
    assert not first["attempts"]
    wait_for(lambda: client.run("mover").job_id != run.job_id, "the move")
    ended = client.run("mover")
    assert ended.wait().exit_code == 0
    assert [line.text for line in ended.logs()] == [f"follows {run.job_id}"]
    assert client.run(run.job_id) == ended  # under the id that it had at first, too
    assert [each.name for each in client.runs()] == ["mover", "hog"]
    assert run.describe().job_id == ended.job_id
    history = History(home.root / "history.jsonl")
    plans, key = FallbackPlans.beside(history, "local"), history.newest_first("local")[0].key
    wait_for(lambda: plans.find(key) is None, "the plan's end")
    hog.cancel()
