"""The controller of a sweep in AWS as a run of its own: what is submitted, and what that may do."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.client import Client
from batchml.context import open_cache
from batchml.errors import NotFound, SweepHasController
from batchml.jobs.find import ImageSource
from batchml.local.home import Home, ServerEndpoint
from batchml.resources import shipped_folder
from batchml.runs.controllers import context_in_aws
from batchml.sweeps.commands.sweeps import _start
from batchml.sweeps.control.lease import Lease, LeaseOwner
from batchml.sweeps.run import ControllerArguments, control_sweep, open_sweep, submit_controller
from batchml.sweeps.start import SweepOptions, prepare_sweep, start_sweep
from batchml.sweeps.stores import find_sweep_store
from tests.security.cloudformation import load, policies, statements, texts
from tests.support.counting import Counted
from tests.support.local_server import client_for
from tests.support.s3 import RoleS3
from tests.support.sweep_account import Hurried
from tests.support.sweep_account import account as account

PINNED = "123456789012.dkr.ecr.us-east-1.amazonaws.com/batchml/controller@sha256:" + "0" * 64
TABLE = {
    "name": "tiny", "job": "hello", "goal": {"min": "loss"},
    "space": {"x": {"float": [0.0, 1.0]}}, "limits": {"trials": 2, "parallel": 2},
}  # fmt: skip


def may(role: str) -> set[str]:
    """The actions that a role of the stack `roles` allows."""
    template = load(shipped_folder("cfn") / "roles.yaml")
    return {
        action
        for document in policies(template["Resources"][role])
        for statement in statements(document)
        for action in texts(statement["Action"])
    }


def switch(home: Home, server: ServerEndpoint, state: str) -> None:
    batch = client_for(home, server, "batch")
    batch.update_compute_environment(computeEnvironment="this-machine", state=state)


def container_of(home: Home, server: ServerEndpoint, job_id: str) -> dict[str, Any]:
    (job,) = client_for(home, server, "batch").describe_jobs(jobs=[job_id])["jobs"]
    return dict(job["container"])


@pytest.fixture
def role(account: Counted) -> Iterator[RoleS3]:
    """S3 as the controller's role sees it: it may list only below two prefixes."""
    made = RoleS3(os.environ["AWS_ENDPOINT_URL_S3"])
    made.lists, made.listed = False, ("code/", "runs/")
    yield made
    made.close()


@pytest.mark.parametrize("names_action", [True, False])
def test_a_detached_sweep_in_aws_is_finished_by_what_its_role_allows(
    account: Counted,
    home: Home,
    server: ServerEndpoint,
    tmp_path: Path,
    role: RoleS3,
    names_action: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where S3 answers 403 for every object that is not there yet."""
    context = Client("dev")._context
    ready = prepare_sweep(context, SweepOptions(table=TABLE))
    store = start_sweep(context, ready)
    known = open_cache(context)
    recipe = ImageSource(shipped_folder("images") / "controller").recipe().built_for("amd64")
    known.image(recipe.reference, lambda: PINNED)
    known.save()
    switch(home, server, "DISABLED")  # the run waits: here it would have none of AWS's keys
    run = submit_controller(context, ready.sweep, store)
    container = container_of(home, server, run)
    assert container["image"] == PINNED and container["jobRoleArn"].endswith("controller")
    client_for(home, server, "batch").terminate_job(jobId=run, reason="it goes on below")

    command = container["command"]
    assert command[:5] == ["python", "-m", "batchml", "sweeps", "attend"]
    options = dict(zip(command[6::2], command[7::2], strict=True))
    where = ControllerArguments(
        command[5], options["--env"], options["--store"], options["--region"], options["--digest"]
    )
    inside = context_in_aws(
        where.env, where.region, tmp_path / "inside", Hurried(), source="the sweep"
    )
    account.reset()
    role.names_action = names_action
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", role.address)
    switch(home, server, "ENABLED")
    found, started = open_sweep(inside, where)
    attended = control_sweep(inside, started, found, owner=LeaseOwner(job=run))
    last = [snapshot for snapshot in attended.snapshots()][-1]
    assert last.ended and last.best is not None
    asked = {name.lower() for name in account.calls}
    assert "submitjob" in asked
    allowed = {action.partition(":")[2].lower() for action in may("ControllerRole")}
    assert asked <= allowed, "no stack, no registry, no definition"
    again = subprocess.run(
        [sys.executable, *command[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr


def test_without_the_image_of_controllers_a_detached_sweep_writes_nothing(
    account: Counted,
) -> None:
    context = Client("dev")._context
    one_by_one = {**TABLE, "limits": {"trials": 2, "parallel": 1, "hours": 1, "target": 0.1}}
    ready = prepare_sweep(context, SweepOptions(table=one_by_one))
    account.answers["DescribeImages"] = lambda request: {"imageDetails": []}
    account.reset()
    with pytest.raises(NotFound, match="controller"):
        _start(context, ready, is_detached=True, json_=False)
    assert "SubmitJob" not in account.calls
    with pytest.raises(NotFound):
        find_sweep_store(context, ready.sweep.key)


def test_where_one_attends_no_other_is_submitted(account: Counted) -> None:
    context = Client("dev")._context
    ready = prepare_sweep(context, SweepOptions(table=TABLE))
    store = start_sweep(context, ready)
    Lease(store, context.clock, LeaseOwner("ann", "elsewhere", 7)).take()
    account.reset()
    with pytest.raises(SweepHasController, match="process 7 on elsewhere, of ann"):
        submit_controller(context, ready.sweep, store)
    assert not account.calls
