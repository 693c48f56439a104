"""Our nouns -> AWS requests: judged by botocore's own service model, which neither side wrote."""

import hashlib
import json
from itertools import combinations, product
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
from batchml.model.names import split_key
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

KEY = "7zpqugx6qrtobv6ob"


def made(spec: JobSpec, **travel: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    found = submission(spec, image="img", queue="default", travel=Travel(**travel))
    return found.register, found.submit


def test_requests_are_what_the_service_model_asks_for() -> None:
    register, submit = made(
        SPEC, code="/c.tar.gz", tags={"a": "b"}, depends_on=("j",), key=KEY, array=3, share="s"
    )
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


def test_overrides_over_the_limit_are_refused_where_nothing_could_read_them() -> None:
    with pytest.raises(ConfigError, match="8192"):
        made(msgspec.structs.replace(SPEC, command=("echo", "x" * 8192)))


@pytest.mark.parametrize("where", ["command", "env", "params"])
def test_what_is_too_long_for_batch_travels_as_a_document(where: str) -> None:
    long: dict[str, dict[str, Any]] = {
        "command": {"command": ("echo", "x" * 9000)},
        "env": {"env": {"LONG": "y" * 9000}},
        "params": {"params": {"lr": 0.05, "text": "z" * 9000}},
    }
    spec = msgspec.structs.replace(SPEC, **long[where])
    found = submission(
        spec, image="img", queue="q", travel=Travel(key=KEY, documents="s3://b/code")
    )
    overrides, document = found.submit["containerOverrides"], found.document
    assert document is not None
    assert len(json.dumps(overrides)) < 8192 - 512
    assert overrides["command"] == ["batchml-order"]
    variables = {entry["name"]: entry["value"] for entry in overrides["environment"]}
    digest = hashlib.sha256(document.data).hexdigest()
    assert variables["BATCHML_ORDER"] == f"s3://b/code/{digest}.json"
    assert variables["BATCHML_KEY"] == KEY
    assert ("BATCHML_PARAMS" in variables) == (where != "params")
    assert ("OMP_NUM_THREADS" in variables) == (where != "env")
    assert json.loads(document.data) == {
        "command": spec.argv(),
        "env": {name: str(value) for name, value in spec.env.items()},
        "params": spec.params,
    }


@given(st.integers(0, 9000))
def test_nothing_is_sent_that_batch_would_refuse_for_its_length(length: int) -> None:
    """The embedded server counts as AWS Batch does: with what Batch adds, as ECS gets it."""
    spec = msgspec.structs.replace(SPEC, command=("echo", "x" * length))
    travel = Travel(key=KEY, documents="d", code="c" * 150)
    overrides = submission(spec, image="i", queue="q", travel=travel).submit["containerOverrides"]
    sent = {name: overrides[name] for name in ("command", "environment")}
    assert len(json.dumps(sent)) + 400 <= 8192


def test_the_key_is_in_the_name_the_variables_and_nothing_else_changes() -> None:
    _, submit = made(SPEC, key=KEY, array=7)
    assert submit["jobName"] == f"lenet-{KEY}"
    assert split_key(submit["jobName"]) == ("lenet", KEY)
    assert submit["arrayProperties"] == {"size": 7}
    variables = {e["name"]: e["value"] for e in submit["containerOverrides"]["environment"]}
    assert (variables["BATCHML_KEY"], variables["BATCHML_ARRAY_SIZE"]) == (KEY, "7")
    assert made(SPEC, key=KEY)[0] == made(SPEC)[0]  # the definition is shared all the same
    long = msgspec.structs.replace(SPEC, name="x" * 128)
    assert len(made(long, key=KEY)[1]["jobName"]) == 128


CLASSES = ("host-lost", "image-error", "app-error", "out-of-memory")
EXITED = "Essential container in task exited"


@pytest.mark.parametrize("on", [set(c) for n in range(5) for c in combinations(CLASSES, n)])
@pytest.mark.parametrize(("has_budget", "has_store"), list(product([False, True], repeat=2)))
def test_retry_rules_retry_exactly_the_classes_that_were_asked_for(
    on: set[Any], has_budget: bool, has_store: bool
) -> None:
    spec = JobSpec(retry=Retry(attempts=3, on=tuple(sorted(on))))
    strategy = retry_strategy(spec, has_budget=has_budget, has_store=has_store)
    assert len(strategy["evaluateOnExit"]) == 5  # more AWS Batch does not take

    def is_retried(status_reason: str, reason: str, code: int | None) -> bool:
        return wants_retry(
            strategy, attempts_made=1, status_reason=status_reason, reason=reason, exit_code=code
        )

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
    for outcome, end in ends.items():
        assert is_retried(*end) == (outcome in on), outcome
    # A host that goes away may leave any code.
    assert is_retried("Host EC2 (instance i-0) terminated.", "", 143) == ("host-lost" in on)
    # Our runtime's own: a budget that is spent, a store that is away. Without one they are errors.
    assert is_retried(EXITED, "", 143) == ("app-error" in on and not has_budget)
    away = on & ({"host-lost", "app-error"} if has_store else {"app-error"})
    assert is_retried(EXITED, "", 75) == bool(away)
    nothing_known = is_retried("", "", None)
    assert nothing_known == ("app-error" in on)  # `*` matches what is absent


def test_a_submission_says_whether_it_has_a_budget_and_a_store() -> None:
    def codes(on: Any, **travel: Any) -> list[str]:
        spec = msgspec.structs.replace(SPEC, retry=Retry(attempts=2, on=on))
        rules = made(spec, **travel)[1]["retryStrategy"]["evaluateOnExit"]
        return [rule["onExitCode"] for rule in rules if "onExitCode" in rule]

    assert codes(("host-lost",)) == ["*"]
    assert codes(("host-lost",), store="s3://b/runs/k") == ["75"]
    assert codes(("app-error",), env={"BATCHML_MAX_SECONDS": "60"}) == ["143", "*"]


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


def test_a_command_that_travels_as_a_document_is_not_in_the_definition() -> None:
    long = msgspec.structs.replace(SPEC, command=("echo", *["x" * 1000] * 900))
    register = made(long, key=KEY, documents="s3://b/code")[0]
    assert register["containerProperties"]["command"] == ["batchml-order"]
    assert register == definition(long, "img")  # as `jobdef register` makes it
    assert definition(SPEC, "img")["containerProperties"]["command"] == list(SPEC.command)
