"""From a job.toml to the requests, for hosts with and without GPUs; botocore checks them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.requests import container_properties, definition_request
from batchml.aws.naming import Platform
from batchml.context import Context
from batchml.errors import ConfigError
from batchml.jobs.find import find_source
from batchml.model.job import JobSpec, Launch, Resources
from batchml.runs.options import RunRequest
from batchml.runs.prepare import PreparedRun, prepare
from batchml.runs.rerun.resubmit import prepare_again
from batchml.runs.search import FoundRun
from batchml.runs.submit import submit_run
from tests.runs.test_submission import Aws, place_in, write
from tests.support.scripted import Answer, ScriptedSession

ROOT = Path(__file__).parents[2]
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


def test_a_queue_whose_types_are_not_known_is_not_said_to_have_no_gpus(
    tmp_path: Path, aws: Aws
) -> None:
    def answer(operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        if operation in ("DescribeJobQueues", "DescribeComputeEnvironments"):
            return "AccessDeniedException"
        return aws.answer(operation, params)

    here, _ = place(tmp_path, answer)
    prepared = prepare(here, order(queue="theirs"), dry_run=False)
    assert requested(prepared).get("GPU") is None
    assert prepared.notices == (
        'gpus = "auto" is no GPU: batchml.toml does not describe the queue theirs, and its hosts '
        "are not known here. On a GPU: --gpus 1",
    )


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
    assert prepared.notices[-1].endswith("finds no host within 10 min. There it has no GPU.")
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
    none, _ = place(tmp_path / "other", aws.answer, job=MXNET, gpu="c7i.xlarge")
    assert "GPU" not in requested(prepare(none, order(queue="gpu"), dry_run=False))


# --- From job.toml to what AWS Batch receives, for each kind of host ------------------------------

HOSTS = """
[env.dev]
region = "us-east-1"
ami = "build"
[env.dev.compute.c7i]
instance_types = ["c7i.2xlarge"]
max_vcpus = 64
[env.dev.compute.g6]
instance_types = ["g6.xlarge"]
max_vcpus = 64
[env.dev.compute.p5]
instance_types = ["p5.48xlarge"]
max_vcpus = 384
efa = true
[env.dev.compute.trn1]
instance_types = ["trn1.32xlarge"]
max_vcpus = 128
[env.dev.queues.trn1]
compute = ["trn1"]
[env.dev.queues.default]
compute = ["c7i"]
[env.dev.queues.g6]
compute = ["g6"]
[env.dev.queues.p5]
compute = ["p5"]
"""


class Received(Struct, frozen=True):
    """What AWS Batch receives of a run; botocore has checked both requests by its model."""

    register: dict[str, Any]
    submit: dict[str, Any]
    image: str  # the tag of the image in ECR, before its digest replaces it

    @property
    def container(self) -> dict[str, Any]:
        """The properties of the containers of all nodes."""
        return container_properties(self.register)

    @property
    def needs(self) -> dict[str, str]:
        """The resources of each container."""
        nodes = self.submit.get("nodeOverrides")
        overrides = nodes["nodePropertyOverrides"][0] if nodes else self.submit
        needs = overrides["containerOverrides"]["resourceRequirements"]
        return {each["type"]: each["value"] for each in needs}

    @property
    def mounts(self) -> list[str]:
        """The folders of the host that containers see."""
        return [each["host"]["sourcePath"] for each in self.container["volumes"]]

    @property
    def devices(self) -> list[str]:
        found = self.container["linuxParameters"].get("devices", ())
        return [each["hostPath"] for each in found]


def submitted(folder: Path, aws: Aws, queue: str, job: str = JOB, **changes: Any) -> Received:
    """Submit the job of a job.toml to a queue of HOSTS."""
    write(folder, job)
    here, session = place_in(folder, aws.answer, HOSTS)
    submit_run(here, prepare(here, order(queue=queue, **changes), dry_run=False))
    (register,), submit = session.asked("RegisterJobDefinition"), session.asked("SubmitJob")[-1]
    (image,) = session.asked("DescribeImages")
    assert submit["jobQueue"] == f"batchml-dev-{queue}"
    return Received(register, submit, image["imageIds"][0]["imageTag"])


def image_tag(flavor: str) -> str:
    source = find_source("pytorch", [ROOT / "images"], ROOT)
    assert source is not None
    return source.recipe(flavor).built_for("amd64").tag


def test_a_run_on_c7i_is_unprivileged_and_has_the_image_for_cpus(tmp_path: Path, aws: Aws) -> None:
    run = submitted(tmp_path, aws, "default")
    assert run.needs == {"VCPU": "4", "MEMORY": "2048"}
    assert "privileged" not in run.container
    assert (run.mounts, run.devices) == (["/workspace"], [])
    assert run.image == image_tag("cpu") != image_tag("cuda")


def test_a_run_on_g6_is_privileged_with_the_driver_of_the_host(tmp_path: Path, aws: Aws) -> None:
    run = submitted(tmp_path, aws, "g6")
    assert run.needs == {"VCPU": "4", "MEMORY": "2048", "GPU": "1"}
    assert run.container["privileged"] is True
    assert (run.mounts, run.devices) == (["/workspace", "/opt/nvidia"], [])
    assert MOUNT in run.container["mountPoints"]
    assert run.image == image_tag("cuda")


def test_nodes_on_p5_have_gpus_the_driver_and_all_devices_of_efa(tmp_path: Path, aws: Aws) -> None:
    job = f'nodes = 2\nlaunch = {{kind = "torchrun"}}\n{JOB}'.replace('"auto"', "8")
    run = submitted(tmp_path, aws, "p5", job)
    assert run.register["type"] == "multinode" and run.submit["nodeOverrides"]["numNodes"] == 2
    assert run.needs == {"VCPU": "4", "MEMORY": "2048", "GPU": "8"}
    assert run.container["privileged"] is True and MOUNT in run.container["mountPoints"]
    assert run.devices == [f"/dev/infiniband/uverbs{number}" for number in range(32)]
    limits = {each["name"]: each["hardLimit"] for each in run.container["ulimits"]}
    assert limits["memlock"] == -1
    assert run.image == image_tag("cuda")


def test_a_run_on_trn1_has_its_chips_and_no_gpu_also_with_auto(tmp_path: Path, aws: Aws) -> None:
    run = submitted(tmp_path, aws, "trn1", f"{JOB}neurons = 16\n")
    assert run.needs == {"VCPU": "128", "MEMORY": "2048"}, "all of the host"
    assert "privileged" not in run.container and run.mounts == ["/workspace"]
    assert run.devices == [f"/dev/neuron{chip}" for chip in range(16)]
    assert run.image == image_tag("cpu")


def test_auto_is_one_gpu_on_each_node_and_one_node_needs_no_efa(tmp_path: Path, aws: Aws) -> None:
    two = submitted(tmp_path / "two", aws, "p5", f"nodes = 2\n{JOB}")
    assert two.needs["GPU"] == "1" and len(two.devices) == 32
    one = submitted(tmp_path / "one", aws, "p5")
    assert one.needs["GPU"] == "1" and one.devices == []


JOBS = ("lenet", "lenet-mxnet", "ddp", "llama", "bert", "translate", "vit-ray")


@pytest.mark.parametrize("name", JOBS)
def test_the_jobs_that_ship_use_a_gpu_where_there_is_one(
    tmp_path: Path, aws: Aws, name: str
) -> None:
    here, _ = place_in(tmp_path, aws.answer, HOSTS)
    asked = RunRequest(job=name, changes={"queue": "g6"})
    there = prepare(here, asked, dry_run=False)
    assert container_properties(there.requests.register)["privileged"] is True
    assert there.record.gpus == 1
    elsewhere = prepare(here, RunRequest(job=name), dry_run=False)
    assert "privileged" not in container_properties(elsewhere.requests.register)
    assert elsewhere.record.gpus == 0


PLATFORM = Platform(
    gpu="driver-mount", job_role="arn:job", execution_role="arn:execution",
    log_group="/batchml/dev", workspace="/workspace", user="1000:1000", notices="/run/batchml",
    env="dev", region="us-east-1", tags={"batchml:env": "dev"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "aws_name", "local_name"),
    [
        (JobSpec(name="one"), "one-3bff241eff", "one-0462c4474a"),
        (JobSpec(name="two", nodes=2, launch=Launch("torchrun"), resources=Resources(4, "8 GiB")),
         "two-59dbbd7c0a", "two-b1bfa58980"),
        (JobSpec(name="gpu", resources=Resources(4, "8 GiB", gpus=1)),
         "gpu-a28ac1fab8", "gpu-3c638bb258"),
    ],
)  # fmt: skip
def test_definitions_without_new_devices_stay_as_they_were_registered(
    spec: JobSpec, aws_name: str, local_name: str
) -> None:
    """A definition's name has a hash of its content: these were registered before."""
    spec = replace(spec, image="pytorch", command=("python", "train.py"))
    names = [
        definition_request(spec, "registry/image@sha256:0", platform)["jobDefinitionName"]
        for platform in (PLATFORM, Platform())
    ]
    assert names == [aws_name, local_name]


def test_a_rerun_on_other_hosts_keeps_its_image_and_says_so(tmp_path: Path, aws: Aws) -> None:
    write(tmp_path, JOB)
    here, _ = place_in(tmp_path, aws.answer, HOSTS)
    submit_run(here, prepare(here, order(), dry_run=False))
    (record,) = here.history.newest_first("dev")
    said = "The image stays that for CPUs. With the one for GPUs, submit the job again."
    for gpus, notice in ((0, ""), (1, said)):
        changed = {"queue": "g6", "resources": {"gpus": gpus or "auto"}} if gpus else {}
        again = prepare_again(
            here, FoundRun(None, record), request=RunRequest(changes=changed), dry_run=True
        )
        assert again is not None and again.record.gpus == gpus
        assert (notice in again.notices) is bool(notice)
        assert container_properties(again.requests.register)["image"] == record.image
