"""Our nouns -> AWS requests: judged by botocore's own service model, which neither side wrote."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.aws.requests import Travel, definition, registration, retry_strategy, submission
from batchml.aws.responses import to_run, to_summary
from batchml.aws.site import Platform, make_platform, queue_name
from batchml.errors import ConfigError
from batchml.local.protocol import service_model
from batchml.local.retry import wants_retry
from batchml.local.shapes import problems
from batchml.model.environment import Environment, Queue, Storage
from batchml.model.job import JobSpec, Resources, Retry
from batchml.model.status import JobStatus

SPEC = JobSpec(
    image="pytorch",
    name="lenet",
    command=("python", "train.py", "--lr", "{lr}"),
    params={"lr": 0.05},
    resources=Resources(vcpus=4, memory="15 GiB", gpus=1, shm="8 GiB"),
    env={"OMP_NUM_THREADS": 4},
    timeout="4h",
)


def made(spec: JobSpec, **travel: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    found = submission(spec, image="img", queue="default", travel=Travel(**travel))
    return found.register, found.submit


def test_requests_are_what_the_service_model_asks_for() -> None:
    register, submit = made(SPEC, code="/c.tar.gz", tags={"a": "b"}, depends_on=("j",))
    model = service_model("batch")
    for operation, request in (("RegisterJobDefinition", register), ("SubmitJob", submit)):
        shape = model.operation_model(operation).input_shape
        assert list(problems(shape, request, strict=True)) == []


def test_the_run_carries_command_parameters_and_resources() -> None:
    _, submit = made(SPEC, code="/c.tar.gz")
    overrides = submit["containerOverrides"]
    assert overrides["command"] == ["python", "train.py", "--lr", "0.05"]
    assert overrides["resourceRequirements"] == [
        {"type": "VCPU", "value": "4"},
        {"type": "MEMORY", "value": "15360"},
        {"type": "GPU", "value": "1"},
    ]
    variables = {entry["name"]: entry["value"] for entry in overrides["environment"]}
    assert json.loads(variables["BATCHML_PARAMS"]) == {"lr": 0.05}
    assert variables["BATCHML_CODE"] == "/c.tar.gz"
    assert variables["OMP_NUM_THREADS"] == "4"
    assert submit["timeout"] == {"attemptDurationSeconds": 4 * 3600}


def test_runs_that_differ_only_in_what_can_be_overridden_share_a_definition() -> None:
    other = msgspec.structs.replace(
        SPEC, params={"lr": 0.1}, timeout="1h", resources=Resources(shm="8 GiB"), env={}
    )
    assert made(SPEC)[0]["jobDefinitionName"] == made(other)[0]["jobDefinitionName"]
    another = msgspec.structs.replace(SPEC, resources=Resources(shm="1 GiB"))
    assert made(SPEC)[0]["jobDefinitionName"] != made(another)[0]["jobDefinitionName"]


def test_names_stay_within_what_batch_takes() -> None:
    register, submit = made(msgspec.structs.replace(SPEC, name="x" * 128))
    assert len(register["jobDefinitionName"]) == 128
    assert submit["jobDefinition"] == register["jobDefinitionName"]


def test_overrides_over_the_limit_are_refused_before_they_are_sent() -> None:
    with pytest.raises(ConfigError, match="8192"):
        made(msgspec.structs.replace(SPEC, command=("echo", "x" * 8192)))


@given(st.sets(st.sampled_from(["host-lost", "image-error", "app-error", "out-of-memory"])))
def test_retry_rules_retry_exactly_the_classes_that_were_asked_for(on: set[Any]) -> None:
    strategy = retry_strategy(JobSpec(retry=Retry(attempts=3, on=tuple(sorted(on)))))
    ends = {
        "host-lost": ("Host EC2 (instance i-0) terminated.", "", None),
        "image-error": ("Task failed to start", "CannotPullContainerError: no", None),
        "out-of-memory": (
            "Essential container in task exited",
            "OutOfMemoryError: Container killed due to memory usage",
            137,
        ),
        "app-error": ("Essential container in task exited", "", 1),
    }
    for outcome, (status_reason, reason, code) in ends.items():
        retried = wants_retry(
            strategy, attempts_made=1, status_reason=status_reason, reason=reason, exit_code=code
        )
        assert retried == (outcome in on), outcome


def test_a_sparse_answer_of_aws_is_read() -> None:
    """ListJobs of the real service leaves most members out (aws-sdk-js issue 4193)."""
    run = to_summary({"jobId": "j", "status": "RUNNABLE"}, "q")
    assert (run.job_id, run.status, run.name) == ("j", JobStatus.RUNNABLE, "")
    assert to_run({"jobId": "j", "status": "SUBMITTED"}).attempts == ()


def test_the_running_attempt_comes_last_and_finished_ones_keep_their_stream() -> None:
    detail = {
        "jobId": "j",
        "status": "RUNNING",
        "container": {"logStreamName": "s2"},
        "attempts": [{"container": {"logStreamName": "s1", "exitCode": 1}, "stoppedAt": 5}],
    }
    run = to_run(detail)
    assert [attempt.log_stream for attempt in run.attempts] == ["s1", "s2"]
    assert run.attempts[1].stopped_at is None
    ended = to_run({**detail, "status": "FAILED", "container": {"logStreamName": "s1"}})
    assert [attempt.log_stream for attempt in ended.attempts] == ["s1"]


# --- definitions of an environment in AWS ---------------------------------------------------

OUTPUTS = {
    "JobRoleArn": "arn:aws:iam::123456789012:role/batchml-dev-job",
    "ExecutionRoleArn": "arn:aws:iam::123456789012:role/batchml-dev-execution",
    "LogGroupName": "/batchml/dev",
    "FileSystemId": "fs-0123",
}
DEV = Environment(
    region="us-east-1", ami="build", tags={"team": "vision"}, queues={"gpu": Queue(compute=("a",))}
)
MOUNTED = make_platform("dev", DEV, OUTPUTS)
TOOLKIT = make_platform("dev", msgspec.structs.replace(DEV, gpu_access="toolkit"), OUTPUTS)
CPU = msgspec.structs.replace(SPEC, resources=Resources(vcpus=2))


def container(spec: JobSpec, platform: Platform) -> dict[str, Any]:
    request = definition(spec, "registry/img@sha256:0", platform)
    shape = service_model("batch").operation_model("RegisterJobDefinition").input_shape
    sent = registration(request, 1_800_000_000.0)
    assert list(problems(shape, sent, strict=True)) == []
    return dict(request["containerProperties"])


def test_a_job_with_gpus_has_the_driver_of_its_host_where_that_is_how_it_is_done() -> None:
    found = container(SPEC, MOUNTED)
    assert found["privileged"] is True
    assert {"name": "nvidia", "host": {"sourcePath": "/opt/nvidia"}} in found["volumes"]
    assert {"sourceVolume": "nvidia", "containerPath": "/usr/local/nvidia", "readOnly": True} in (
        found["mountPoints"]
    )
    assert found["environment"] == [{"name": "BATCHML_WORKSPACE", "value": "/workspace"}]
    submit = submission(SPEC, image="i", queue="q", travel=Travel(), platform=MOUNTED).submit
    assert {"type": "GPU", "value": "1"} in submit["containerOverrides"]["resourceRequirements"]


@pytest.mark.parametrize(("spec", "platform"), [(CPU, MOUNTED), (CPU, TOOLKIT), (SPEC, TOOLKIT)])
def test_nobody_else_is_privileged(spec: JobSpec, platform: Platform) -> None:
    found = container(spec, platform)
    assert "privileged" not in found
    assert [volume["host"]["sourcePath"] for volume in found["volumes"]] == ["/workspace"]
    assert found["mountPoints"] == [
        {"sourceVolume": "workspace", "containerPath": "/workspace", "readOnly": False}
    ]


def test_a_job_has_roles_and_a_log_of_its_environment() -> None:
    found = container(SPEC, TOOLKIT)
    assert found["jobRoleArn"] == OUTPUTS["JobRoleArn"]
    assert found["executionRoleArn"] == OUTPUTS["ExecutionRoleArn"]
    assert found["logConfiguration"]["options"] == {
        "awslogs-stream-prefix": "lenet", "awslogs-group": "/batchml/dev",
    }  # fmt: skip


def test_images_of_ours_run_as_nobody_special_and_others_as_they_say() -> None:
    assert container(SPEC, TOOLKIT)["user"] == "1000:1000"
    other = msgspec.structs.replace(SPEC, image="docker.io/library/python:3.12")
    assert "user" not in container(other, TOOLKIT)


def test_a_place_without_stacks_adds_nothing_that_is_not_there() -> None:
    bare = make_platform("dev", msgspec.structs.replace(DEV, gpu_access="toolkit"), {})
    usual = container(CPU, Platform())
    assert container(CPU, bare) == {**usual, "user": "1000:1000"}
    without = msgspec.structs.replace(DEV, storage=Storage(workspace="none"))
    assert make_platform("dev", without, OUTPUTS).workspace == ""
    assert make_platform("local", Environment(), OUTPUTS) == Platform()


def test_an_empty_platform_gives_the_definition_of_local() -> None:
    name = "lenet-992e118a00"  # as it has been since the first version: definitions are reused
    request = definition(SPEC, "img")
    assert request["jobDefinitionName"] == name
    assert request["tags"] == {"batchml": "lenet"}
    assert set(request["containerProperties"]) == {
        "image", "command", "resourceRequirements", "linuxParameters", "logConfiguration",
    }  # fmt: skip


def test_definitions_are_told_apart_by_place_and_tagged_with_it() -> None:
    names = {
        definition(spec, "img", platform)["jobDefinitionName"]
        for spec in (SPEC, CPU)
        for platform in (Platform(), MOUNTED, TOOLKIT)
    }
    assert len(names) == 5  # how GPUs are reached is nothing to a job without
    request = registration(definition(SPEC, "img", MOUNTED), 1_800_000_000.0)
    assert request["tags"] == {
        "batchml": "lenet", "batchml:env": "dev", "team": "vision",
        "batchml:registered": "2027-01-15",
    }  # fmt: skip
    # The day says when, not what: the name is that of the content.
    assert request["jobDefinitionName"] == definition(SPEC, "img", MOUNTED)["jobDefinitionName"]


def test_a_described_queue_has_the_environments_name_in_aws() -> None:
    assert queue_name("dev", DEV, "gpu") == "batchml-dev-gpu"
    assert queue_name("dev", DEV, "shared-by-others") == "shared-by-others"
    assert queue_name("local", DEV, "gpu") == "gpu"
