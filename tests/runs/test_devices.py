"""From a job.toml to the requests, for hosts with and without GPUs; botocore checks them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.context import Context
from batchml.errors import ConfigError
from batchml.runs.options import RunRequest
from batchml.runs.prepare import PreparedRun, prepare
from batchml.runs.submit import submit_run
from tests.runs.test_submission import Aws, place_in, write
from tests.support.scripted import Answer, ScriptedSession

CONFIG = """
[env.dev]
region = "us-east-1"
{env}
[env.dev.compute.cpu]
instance_types = ["c7i.2xlarge"]
max_vcpus = 64
[env.dev.compute.gpu]
instance_types = ["{gpu}"]
max_vcpus = 192
[env.dev.queues.default]
compute = ["cpu"]
[env.dev.queues.gpu]
compute = ["gpu"]
[env.dev.queues.both]
compute = ["cpu", "gpu"]
"""
JOB = """
image = "pytorch"
command = ["python", "train.py"]
code = false
[resources]
vcpus = 4
gpus = "auto"
"""
MOUNT = {"sourceVolume": "nvidia", "containerPath": "/usr/local/nvidia", "readOnly": True}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")
    return Aws()


def place(
    folder: Path, answer: Answer, *, job: str = JOB, gpu: str = "g6.xlarge", env: str = ""
) -> tuple[Context, ScriptedSession]:
    write(folder, job)
    return place_in(folder, answer, CONFIG.format(gpu=gpu, env=env))


def order(**changes: Any) -> RunRequest:
    return RunRequest(job="hello", changes=changes)


def container(prepared: PreparedRun) -> dict[str, Any]:
    return dict(prepared.requests.register["containerProperties"])


def requested(prepared: PreparedRun) -> dict[str, str]:
    """The resources that SubmitJob asks for."""
    needs = prepared.requests.submit["containerOverrides"]["resourceRequirements"]
    return {each["type"]: each["value"] for each in needs}


def image_content(prepared: PreparedRun) -> str:
    """The part of the image's tag that differs between its flavors."""
    assert prepared.cache is not None
    (reference,) = prepared.cache._facts.images
    return reference.rpartition(":")[2]


@pytest.mark.parametrize("queue", ["gpu", "both"])
@pytest.mark.parametrize("env", ['ami = "build"', 'ami = "ecs-gpu"'])
def test_auto_is_one_gpu_where_the_queue_has_them(
    tmp_path: Path, aws: Aws, queue: str, env: str
) -> None:
    here, session = place(tmp_path, aws.answer, env=env)
    prepared = prepare(here, order(queue=queue), dry_run=False)
    assert requested(prepared) == {"VCPU": "4", "MEMORY": "2048", "GPU": "1"}
    is_mounted = env == 'ami = "build"'
    assert container(prepared).get("privileged", False) is is_mounted
    assert (MOUNT in container(prepared)["mountPoints"]) is is_mounted
    said = f'gpus = "auto" is 1 GPU: hosts of the queue {queue} have GPUs.'
    assert said in prepared.notices
    assert submit_run(here, prepared) == "j-1"
    (recorded,) = here.history.newest_first("dev")
    assert (recorded.gpus, recorded.spec["resources"]["gpus"]) == (1, 1)
    assert "'auto'" not in str(session.calls)


def test_auto_is_no_gpu_where_the_queue_has_none_and_takes_the_image_for_cpus(
    tmp_path: Path, aws: Aws
) -> None:
    here, _ = place(tmp_path, aws.answer, env='ami = "build"')
    without = prepare(here, order(), dry_run=False)
    assert without.requests.submit["jobQueue"] == "batchml-dev-default"
    assert requested(without) == {"VCPU": "4", "MEMORY": "2048"}
    assert "privileged" not in container(without)
    assert without.notices == (
        'gpus = "auto" is no GPU: hosts of the queue default have none. On a GPU: --queue gpu',
    )
    plain = prepare(here, order(resources={"gpus": 0}), dry_run=False)
    assert plain.requests.register == without.requests.register, "no definition of its own"
    with_gpu = prepare(here, order(queue="gpu"), dry_run=False)
    assert image_content(with_gpu) != image_content(without) == image_content(plain)


@pytest.mark.parametrize(("instance", "gpus"), [("g6.2xlarge", "1"), ("c7i", None)])
def test_a_queue_that_the_file_does_not_describe_is_asked_for_once(
    tmp_path: Path, aws: Aws, instance: str, gpus: str | None
) -> None:
    def answer(operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        if operation == "DescribeJobQueues":
            entry = [{"order": 1, "computeEnvironment": "theirs"}]
            return {"jobQueues": [{"jobQueueName": "theirs", "computeEnvironmentOrder": entry}]}
        if operation == "DescribeComputeEnvironments":
            resources = {"type": "EC2", "instanceTypes": [instance]}
            return {"computeEnvironments": [
                {"computeEnvironmentName": "theirs", "computeResources": resources}
            ]}  # fmt: skip
        return aws.answer(operation, params)

    here, session = place(tmp_path, answer)
    prepared = prepare(here, order(queue="theirs"), dry_run=False)
    assert requested(prepared).get("GPU") == gpus
    assert len(session.asked("DescribeJobQueues")) == 1  # for GPUs and for the processor


def test_a_run_that_moves_has_the_gpus_of_each_of_its_queues(tmp_path: Path, aws: Aws) -> None:
    here, _ = place(tmp_path, aws.answer, env='ami = "build"')
    asked = order(queue="gpu", fallback={"queue": "default", "after": "10m"})
    prepared = prepare(here, asked, dry_run=True)
    assert prepared.plan is not None
    there = prepared.plan.requests
    assert requested(prepared)["GPU"] == "1"
    assert "GPU" not in str(there.submit)
    assert container(prepared)["privileged"] is True
    assert "privileged" not in there.register["containerProperties"]
    assert prepared.cache is not None and len(prepared.cache._facts.images) == 2, "both flavors"
    assert (prepared.record.gpus, prepared.plan.record.gpus) == (1, 0)
    assert prepared.plan.about(replace(prepared.record, job_id="j-1")).record.gpus == 0


def test_each_group_of_a_gang_follows_its_queue(tmp_path: Path, aws: Aws) -> None:
    job = """
image = "pytorch"
command = ["python", "train.py"]
code = false
launch = {kind = "ray"}
[[groups]]
name = "head"
queue = "gpu"
resources = {vcpus = 4, gpus = "auto"}
[[groups]]
name = "cpu"
count = 2
resources = {vcpus = 2, gpus = "auto"}
"""
    here, _ = place(tmp_path, aws.answer, job=job, env='ami = "build"')
    prepared = prepare(here, order(), dry_run=True)
    (worker,) = prepared.workers
    assert requested(prepared)["GPU"] == "1" and container(prepared)["privileged"] is True
    assert (prepared.record.gpus, worker.record.gpus) == (1, 0)
    assert "privileged" not in worker.requests.register["containerProperties"]
    assert "auto" not in str(prepared.record.spec["groups"])
    assert [each.partition(":")[0] for each in prepared.notices if "auto" in each] == [
        "head", "cpu",
    ]  # fmt: skip


def test_a_flag_with_nonsense_is_refused(tmp_path: Path, aws: Aws) -> None:
    here, _ = place(tmp_path, aws.answer)
    with pytest.raises(ConfigError, match=r"resources.gpus: found 'all'. Expected a whole number"):
        prepare(here, order(resources={"gpus": "all"}), dry_run=True)


MXNET = JOB.replace('"pytorch"', '"mxnet"')


def test_an_image_without_code_for_the_gpus_trains_on_the_cpus_with_auto(
    tmp_path: Path, aws: Aws
) -> None:
    here, _ = place(tmp_path, aws.answer, job=MXNET, gpu="p5.48xlarge", env='ami = "build"')
    prepared = prepare(here, order(queue="gpu"), dry_run=False)
    assert "GPU" not in requested(prepared) and "privileged" not in container(prepared)
    assert prepared.notices == (
        'gpus = "auto" is no GPU, with the image for CPUs: the image mxnet has code for compute '
        "capability up to 8.9, and not for GPUs of the queue gpu: p5.48xlarge (H100, 9.0).",
    )
    cpu = image_content(prepared)
    assert image_content(prepare(here, order(), dry_run=False)) == cpu
    with pytest.raises(ConfigError, match=r"resources.gpus: the image mxnet .* --gpus 0"):
        prepare(here, order(queue="gpu", resources={"gpus": 1}), dry_run=False)


def test_the_same_image_has_a_gpu_where_it_has_code(tmp_path: Path, aws: Aws) -> None:
    here, _ = place(tmp_path, aws.answer, job=MXNET, gpu="g6.xlarge")
    assert requested(prepare(here, order(queue="gpu"), dry_run=False))["GPU"] == "1"
    none, _ = place(tmp_path / "other", aws.answer, job=MXNET, gpu="c7i.large")
    assert "GPU" not in requested(prepare(none, order(queue="gpu"), dry_run=False))
