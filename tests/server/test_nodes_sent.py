"""Requests for runs of many containers, checked by botocore's model, moto and our own server."""

import importlib.util
import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from batchml.aws.batch.responses import to_run
from batchml.client import Client
from batchml.jobs.find import load_job
from batchml.local.executors.choice import choose
from batchml.local.home import Home
from batchml.local.server.protocol import problems, service_model
from batchml.model.group import launch_plan
from batchml.model.job import Launch
from batchml.model.run import Run
from batchml.runtime.protocol.launch import KINDS, LaunchPlan
from tests.support.server_rig import Rig, furnish

COMMON = """
image = "docker.io/library/python:3.12"
command = ["python", "train.py"]
code = false
[resources]
vcpus = 1
memory = "64 MiB"
[retry]
attempts = 3
on = ["host-lost", "app-error"]
"""
JOBS = {
    "plain": f"nodes = 3\n{COMMON}",
    "torchrun": f"nodes = 2\n{COMMON}[launch]\nkind = 'torchrun'\nprocesses_per_node = 4\n"
    "hang_after = '10m'\n[health]\nbandwidth = '100 MiB'\nquarantine = true\n",
    "mpi": f"nodes = 2\n{COMMON}[launch]\nkind = 'mpi'\nprocesses_per_node = 2\n"
    "hang_after = '1h'\n",
    "ray": f"{COMMON}[launch]\nkind = 'ray'\n[[groups]]\nname = 'head'\n"
    "[[groups]]\nname = 'workers'\ncount = 2\nmin = 1\n"
    "resources = {vcpus = 1, memory = '64 MiB'}\n",
}
Requests = list[tuple[dict[str, Any], dict[str, Any]]]  # register and submit, of each job


def test_every_launch_kind_is_tried_here_and_can_be_started() -> None:
    """A kind is a row in `KINDS`, a module that runs as a program, and a name for job.toml."""
    names = typing.get_args(typing.get_type_hints(Launch)["kind"])
    assert set(JOBS) == {"plain", *KINDS} == {*names}
    for row in KINDS.values():
        found = importlib.util.find_spec(row.module)
        assert found is not None and found.origin is not None
        assert '__name__ == "__main__"' in Path(found.origin).read_text()


@pytest.fixture(params=sorted(JOBS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sent(kind: str, tmp_path: Path) -> Requests:
    """The requests of the dry run of a job of this kind."""
    home = Home(tmp_path / "home")
    home.prepare()
    home.local.mkdir(exist_ok=True)
    choose(home, None, None, None, vcpus=8)
    folder = tmp_path / "jobs" / kind
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(JOBS[kind])
    client = Client("local", tmp_path, environ={"BATCHML_HOME": str(home.root)})
    plan = client.plan(kind)
    jobs = [plan, *plan.get("groups", {}).values()]
    return [(each["RegisterJobDefinition"], each["SubmitJob"]) for each in jobs]


def test_the_service_model_takes_them(sent: Requests) -> None:
    model = service_model("batch")
    for register, submit in sent:
        for operation, request in (("RegisterJobDefinition", register), ("SubmitJob", submit)):
            shape = model.operation_model(operation).input_shape
            assert list(problems(shape, request, strict=True)) == []


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "example")
    with mock_aws(config={"batch": {"use_docker": False}}):
        iam, batch = (boto3.client(each, region_name="us-east-1") for each in ("iam", "batch"))
        role = iam.create_role(RoleName="r", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
        made = batch.create_compute_environment(
            computeEnvironmentName="hosts", type="UNMANAGED", serviceRole=role
        )
        order = [{"order": 1, "computeEnvironment": made["computeEnvironmentArn"]}]
        batch.create_job_queue(
            jobQueueName="default", state="ENABLED", priority=1, computeEnvironmentOrder=order
        )
        yield batch


def test_moto_takes_them(sent: Requests, moto: Any) -> None:
    for register, submit in sent:
        moto.register_job_definition(**register)
        job_id = moto.submit_job(**submit)["jobId"]
        (detail,) = moto.describe_jobs(jobs=[job_id])["jobs"]
        assert detail["jobName"] == submit["jobName"]


def test_our_own_server_takes_them_and_what_it_shows_is_what_was_asked_for(
    kind: str, sent: Requests, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, vcpus=8)
    try:
        batch = rig.client("batch")
        furnish(batch, lambda name: {"q": "default"}.get(name, name))
        runs = []
        for register, submit in sent:
            batch.register_job_definition(**register)
            job_id = batch.submit_job(**submit)["jobId"]
            runs.append(to_run(batch.describe_jobs(jobs=[job_id])["jobs"][0]))
    finally:
        rig.close()
    shown = [(run.nodes, run.array_size, run.vcpus, run.command) for run in runs]
    command = ("python", "train.py")
    assert (
        shown
        == {
            "plain": [(3, 0, 1, command)],
            "torchrun": [(2, 0, 1, command)],
            "mpi": [(2, 0, 1, command)],
            "ray": [(0, 0, 1, command), (0, 2, 1, command)],
        }[kind]
    )
    spec = load_job(tmp_path / "jobs" / kind, [])
    for run in runs:
        _check_plan(run, launch_plan(spec))
    tokens = {run.environment.get("BATCHML_GANG_TOKEN", "") for run in runs}
    assert len(tokens) == 1
    assert (len(tokens.pop()) == 32) == (kind != "plain")


def _check_plan(run: Run, wanted: LaunchPlan | None) -> None:
    found = LaunchPlan.read(run.environment)
    if found is not None:
        found = found._replace(role="head", groups=())
    assert found == wanted
    assert os.path.basename(run.environment["BATCHML_KEY"]) == run.key
