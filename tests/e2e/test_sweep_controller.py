"""The controller of a sweep in AWS as a run of its own: what is submitted, and what that may do."""

from pathlib import Path
from typing import Any

import pytest

from batchml.client.client import Client
from batchml.client.known import open_known
from batchml.client.sweeping.attending import Where, place_in_aws, sweep_of
from batchml.client.sweeping.detaching import detach
from batchml.client.sweeping.holding import AnotherController
from batchml.client.sweeping.reading import Wish
from batchml.client.sweeping.running import attend
from batchml.client.sweeping.starting import make_ready, start
from batchml.local.home import Endpoint, Home
from batchml.ops.images import read_recipe
from batchml.resources import shipped
from batchml.sweep.lease import Lease, Owner
from tests.conftest import client_for
from tests.counting import Counted
from tests.e2e.test_sweep_calls import Hurried
from tests.e2e.test_sweep_calls import account as account
from tests.security.cloudformation import load, policies, statements, texts

PINNED = "123456789012.dkr.ecr.us-east-1.amazonaws.com/batchml/controller@sha256:" + "0" * 64
TABLE = {
    "name": "tiny", "job": "hello", "goal": {"min": "loss"},
    "space": {"x": {"float": [0.0, 1.0]}}, "limits": {"trials": 2, "parallel": 2},
}  # fmt: skip


def may(role: str) -> set[str]:
    """The actions that a role of the stack `roles` allows."""
    template = load(shipped("cfn") / "roles.yaml")
    return {
        action
        for document in policies(template["Resources"][role])
        for statement in statements(document)
        for action in texts(statement["Action"])
    }


def switch(home: Home, server: Endpoint, state: str) -> None:
    batch = client_for(home, server, "batch")
    batch.update_compute_environment(computeEnvironment="this-machine", state=state)


def container_of(home: Home, server: Endpoint, job_id: str) -> dict[str, Any]:
    (job,) = client_for(home, server, "batch").describe_jobs(jobs=[job_id])["jobs"]
    return dict(job["container"])


def test_a_detached_sweep_in_aws_is_finished_by_what_its_role_allows(
    account: Counted, home: Home, server: Endpoint, tmp_path: Path
) -> None:
    place = Client("dev")._place
    ready = make_ready(place, Wish(table=TABLE))
    board = start(place, ready)
    known = open_known(place)
    known.image(read_recipe(shipped("images") / "controller").reference, lambda: PINNED)
    known.save()
    switch(home, server, "DISABLED")  # the run waits: here it would have none of AWS's keys
    run = detach(place, ready.frozen, board)
    container = container_of(home, server, run)
    assert container["image"] == PINNED and container["jobRoleArn"].endswith("controller")
    client_for(home, server, "batch").terminate_job(jobId=run, reason="it goes on below")

    command = container["command"]
    assert command[:5] == ["python", "-m", "batchml", "sweeps", "attend"]
    options = dict(zip(command[6::2], command[7::2], strict=True))
    where = Where(command[5], **{name.removeprefix("--"): v for name, v in options.items()})
    inside = place_in_aws(where, tmp_path / "inside", Hurried())
    account.reset()
    switch(home, server, "ENABLED")
    found, frozen = sweep_of(inside, where)
    attended = attend(inside, frozen, found, owner=Owner(job=run))
    last = [picture for picture in attended.pictures()][-1]
    assert last.ended and last.best is not None
    asked = {name.lower() for name in account.calls}
    assert "submitjob" in asked
    allowed = {action.partition(":")[2].lower() for action in may("ControllerRole")}
    assert asked <= allowed, "no stack, no registry, no definition"


def test_where_one_attends_no_other_is_submitted(account: Counted) -> None:
    place = Client("dev")._place
    ready = make_ready(place, Wish(table=TABLE))
    board = start(place, ready)
    Lease(board, place.clock, Owner("ann", "elsewhere", 7)).take()
    account.reset()
    with pytest.raises(AnotherController, match="process 7 on elsewhere, of ann"):
        detach(place, ready.frozen, board)
    assert not account.calls
