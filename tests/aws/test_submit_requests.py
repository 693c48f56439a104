"""Our nouns -> AWS requests: judged by botocore's own service model, which neither side wrote."""

import hashlib
import json
from itertools import combinations, product
from typing import Any, NamedTuple, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.aws.batch.requests import (
    SubmissionContext,
    dated_registration,
    definition_request,
    make_submission,
    retry_strategy,
)
from batchml.aws.batch.responses import to_run, to_summary
from batchml.aws.naming import Platform, make_platform, queue_name
from batchml.errors import ConfigError
from batchml.local.batch.lifecycle import wants_retry
from batchml.local.server.protocol import problems, service_model
from batchml.model.environment import Compute, Environment, Queue, Storage
from batchml.model.job import Health, JobSpec, Launch, Resources, Retry
from batchml.model.names import split_key
from batchml.model.run import JobStatus, OutcomeClass, class_of
from batchml.runtime.protocol.launch import LaunchPlan
from batchml.runtime.protocol.sweep import TrialContract
from batchml.runtime.protocol.variables import IDLE_AFTER
from batchml.runtime.sweep.assignment import may_be_retried

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


def made(spec: JobSpec, **submission: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    found = make_submission(
        spec, image="img", queue="default", submission=SubmissionContext(**submission)
    )
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


@pytest.mark.parametrize(
    ("resources", "mib"),
    [
        (Resources(), 1024),  # 2 GiB of memory
        (Resources(memory="15 GiB", gpus=1), 7680),
        (Resources(memory="100 MiB"), 64),  # as in any container
        (Resources(memory="15 GiB", shm="1 GiB"), 1024),
        (Resources(memory="1 GiB", shm="8 GiB"), 8192),
    ],
)
def test_shared_memory_is_half_of_the_memory_unless_the_job_sets_it(
    resources: Resources, mib: int
) -> None:
    for nodes in (1, 2):
        register, _ = made(msgspec.structs.replace(SPEC, resources=resources, nodes=nodes))
        container = (
            register.get("containerProperties")
            or (register["nodeProperties"]["nodeRangeProperties"][0]["container"])
        )
        assert container["linuxParameters"]["sharedMemorySize"] == mib


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
    found = make_submission(
        spec, image="img", queue="q", submission=SubmissionContext(key=KEY, documents="s3://b/code")
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
    submission = SubmissionContext(key=KEY, documents="d", code="c" * 150)
    overrides = make_submission(spec, image="i", queue="q", submission=submission).submit[
        "containerOverrides"
    ]
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
@pytest.mark.parametrize(("has_budget", "has_runtime"), list(product([False, True], repeat=2)))
def test_retry_rules_retry_exactly_the_classes_that_were_asked_for(
    on: set[Any], has_budget: bool, has_runtime: bool
) -> None:
    spec = JobSpec(retry=Retry(attempts=3, on=tuple(sorted(on))))
    strategy = retry_strategy(spec, has_budget=has_budget, has_runtime=has_runtime)
    shape = service_model("batch").operation_model("SubmitJob").input_shape
    assert list(problems(shape.members["retryStrategy"], strategy, strict=True)) == []
    assert 1 <= len(strategy["evaluateOnExit"]) <= 5  # more AWS Batch does not take

    def is_retried(status_reason: str, reason: str, code: int | None) -> bool:
        return wants_retry(
            strategy, attempts_made=1, status_reason=status_reason, reason=reason, exit_code=code
        )

    ends = {
        "host-lost": ("Host EC2 (instance i-0) terminated.", "", None),
        "image-error": ("Task failed to start", "CannotPullContainerError: no", None),
        "out-of-memory": (EXITED, "OutOfMemoryError: Container killed due to memory usage", 137),
        "app-error": (EXITED, "", 1),
    }
    for outcome, end in ends.items():
        assert is_retried(*end) == (outcome in on), outcome
    # A host that goes away may leave any code.
    assert is_retried("Host EC2 (instance i-0) terminated.", "", 143) == ("host-lost" in on)
    # Our runtime's own, which are errors of the program's without it.
    is_ours = has_runtime or has_budget
    assert is_retried(EXITED, "", 143) == ("app-error" in on and not has_budget)
    assert is_retried(EXITED, "", 75) == (("host-lost" if is_ours else "app-error") in on)
    for code in (76, 77, 78):
        assert is_retried(EXITED, "", code) == ("app-error" in on and not is_ours)
    for code in (6, 8, 42, 69, 80, 255):  # near them, and the program's
        assert is_retried(EXITED, "", code) == ("app-error" in on)
    nothing_known = is_retried("", "", None)
    assert nothing_known == ("app-error" in on)  # `*` matches what is absent


@pytest.mark.parametrize("on", [set(c) for n in range(5) for c in combinations(CLASSES, n)])
def test_a_killed_container_of_ranks_is_a_lost_host_unless_it_was_for_memory(on: set[Any]) -> None:
    """Five rules have no room for it beside an image-error that is tried again."""
    spec = JobSpec(retry=Retry(attempts=3, on=tuple(sorted(on))), launch=Launch(kind="torchrun"))
    strategy = retry_strategy(spec, has_runtime=True)
    assert len(strategy["evaluateOnExit"]) <= 5

    def is_retried(status_reason: str, reason: str, code: int | None) -> bool:
        return wants_retry(
            strategy, attempts_made=1, status_reason=status_reason, reason=reason, exit_code=code
        )

    wanted = "app-error" in on or ("host-lost" in on and "image-error" not in on)
    assert is_retried(EXITED, "", 137) == wanted
    assert is_retried(EXITED, "OutOfMemoryError: full", 137) == ("out-of-memory" in on)
    assert is_retried("Task failed to start", "CannotPull", None) == ("image-error" in on)
    assert is_retried(EXITED, "", 1) == ("app-error" in on)


NO_EFA = (
    "CannotStartContainerError: Error response from daemon: error gathering device information "
    'while adding custom device "/dev/infiniband/uverbs3": no such file or directory'
)


@pytest.mark.parametrize("kind", ["plain", "torchrun"])
@pytest.mark.parametrize("on", [set(c) for n in range(5) for c in combinations(CLASSES, n)])
def test_a_host_without_a_device_of_the_definition_is_a_lost_host(on: set[Any], kind: Any) -> None:
    """The reason is that of Docker. A definition without devices has the rules of any other."""
    spec = JobSpec(retry=Retry(attempts=3, on=tuple(sorted(on))), launch=Launch(kind=kind))
    strategy = retry_strategy(spec, has_runtime=True, lists_devices=True)
    shape = service_model("batch").operation_model("SubmitJob").input_shape
    assert list(problems(shape.members["retryStrategy"], strategy, strict=True)) == []
    assert len(strategy["evaluateOnExit"]) <= 5

    def is_retried(status_reason: str, reason: str) -> bool:
        return wants_retry(
            strategy, attempts_made=1, status_reason=status_reason, reason=reason, exit_code=None
        )

    if "image-error" not in on:
        assert is_retried("Task failed to start", NO_EFA) == ("host-lost" in on)
    assert is_retried("Task failed to start", "CannotPull") == ("image-error" in on)
    assert is_retried("Host EC2 (instance i-0) terminated.", "") == ("host-lost" in on)
    assert class_of("Task failed to start", NO_EFA, None) is OutcomeClass.HOST_LOST


@pytest.mark.parametrize("on", [set(c) for n in range(5) for c in combinations(CLASSES, n)])
@pytest.mark.parametrize("code", [0, 1, 75, 76, 77, 78, 255])
def test_a_trial_knows_of_its_own_end_whether_batch_tries_again(on: set[Any], code: int) -> None:
    spec = JobSpec(retry=Retry(attempts=3, on=tuple(sorted(on))))
    strategy = retry_strategy(spec, has_runtime=True)
    said = wants_retry(strategy, attempts_made=1, status_reason=EXITED, reason="", exit_code=code)
    contract = cast(TrialContract, Retries(tuple(on)))
    assert may_be_retried(contract, 1, code, was_signalled=False) == (said and code != 0)
    assert not may_be_retried(contract, 3, code, was_signalled=True)


class Retries(NamedTuple):
    """As much of a sweep's course as is looked at."""

    retries: tuple[str, ...]
    attempts: int = 3


def test_where_rules_are_too_few_codes_near_the_final_ones_end_a_run_too() -> None:
    """Five rules: one then stands for 76, 77 and 78 (docs/multi-node.md)."""
    spec = JobSpec(retry=Retry(attempts=3, on=("app-error",)))
    tight = retry_strategy(spec, has_runtime=True)["evaluateOnExit"]
    assert tight[-1] == {"onExitCode": "7*", "action": "EXIT"}
    usual = JobSpec(retry=Retry(attempts=3, on=("app-error", "host-lost")))
    named = [rule.get("onExitCode") for rule in
             retry_strategy(usual, has_runtime=True)["evaluateOnExit"]]  # fmt: skip
    assert named == [None, None, "76", "77", "78"]


def test_a_submission_says_whether_it_has_a_budget_and_our_runtime() -> None:
    def codes(on: Any, **submission: Any) -> list[str]:
        spec = msgspec.structs.replace(SPEC, retry=Retry(attempts=2, on=on))
        rules = made(spec, **submission)[1]["retryStrategy"]["evaluateOnExit"]
        return [rule["onExitCode"] for rule in rules if "onExitCode" in rule]

    assert codes(("host-lost",)) == ["*"]
    assert codes(("host-lost",), store="s3://b/runs/k") == ["75"]
    assert codes(("host-lost",), documents="/home/code") == ["75"]
    assert codes(("app-error",), env={"BATCHML_MAX_SECONDS": "60"}) == ["143", "7*"]


# --- several nodes --------------------------------------------------------------------------------

TORCHRUN = msgspec.structs.replace(
    SPEC,
    nodes=2,
    launch=Launch(kind="torchrun", processes_per_node=4, hang_after="10m"),
    health=Health(bandwidth="100 MiB", quarantine=True),
)
TOKEN = "0123456789abcdef" * 2


def variables_of(submit: dict[str, Any]) -> dict[str, str]:
    override = submit.get("containerOverrides")
    if override is None:
        [only] = submit["nodeOverrides"]["nodePropertyOverrides"]
        override = only["containerOverrides"]
    return {each["name"]: each["value"] for each in override["environment"]}


def test_a_run_of_several_nodes_is_a_multi_node_job() -> None:
    """AWS Batch User Guide, "Multi-node parallel jobs"; judged by botocore's model."""
    register, submit = made(TORCHRUN, key=KEY, token=TOKEN, documents="d", share="s")
    model = service_model("batch")
    for operation, request in (("RegisterJobDefinition", register), ("SubmitJob", submit)):
        shape = model.operation_model(operation).input_shape
        assert list(problems(shape, request, strict=True)) == []
    nodes = register["nodeProperties"]
    assert (register["type"], nodes["mainNode"]) == ("multinode", 0)
    [group] = nodes["nodeRangeProperties"]
    assert group["targetNodes"] == "0:"
    assert group["container"] == made(SPEC)[0]["containerProperties"]
    assert "containerProperties" not in register
    assert "containerOverrides" not in submit
    assert submit["nodeOverrides"]["numNodes"] == 2
    [override] = submit["nodeOverrides"]["nodePropertyOverrides"]
    assert override["targetNodes"] == "0:"
    wanted = made(SPEC)[1]["containerOverrides"]
    assert override["containerOverrides"]["command"] == wanted["command"]
    needs = override["containerOverrides"]["resourceRequirements"]
    assert needs == wanted["resourceRequirements"]


def test_every_run_is_told_its_vcpus() -> None:
    for spec in (SPEC, TORCHRUN, msgspec.structs.replace(SPEC, nodes=3)):
        told = variables_of(made(spec, key=KEY, token=TOKEN)[1])
        assert told["BATCHML_VCPUS"] == str(spec.resources.vcpus)
        assert told.get("BATCHML_GPUS", "0") == str(spec.resources.gpu_count)
        resources = msgspec.structs.replace(spec.resources, gpus=8)
        with_gpus = msgspec.structs.replace(spec, resources=resources)
        assert variables_of(made(with_gpus, key=KEY, token=TOKEN)[1])["BATCHML_GPUS"] == "8"


def test_a_run_that_may_be_idle_for_some_time_only_is_told_so() -> None:
    _, submit = made(msgspec.structs.replace(SPEC, idle_after="30m"))
    variables = submit["containerOverrides"]["environment"]
    assert {"name": IDLE_AFTER, "value": "1800"} in variables
    _, submit = made(SPEC)
    assert IDLE_AFTER not in str(submit)


def test_the_nodes_are_told_what_they_do_together() -> None:
    told = variables_of(made(TORCHRUN, key=KEY, token=TOKEN)[1])
    plan = LaunchPlan.read(told)
    assert plan == LaunchPlan("torchrun", processes=4, hang_after=600.0, bandwidth=100 * 1024.0**2)
    assert told["BATCHML_GANG_TOKEN"] == TOKEN
    assert json.loads(told["BATCHML_HEALTH"]) == {
        "checks": "quick", "bandwidth": 100 * 1024**2, "tries": 3, "quarantine": True,
    }  # fmt: skip
    plain = variables_of(made(msgspec.structs.replace(SPEC, nodes=3), key=KEY, token=TOKEN)[1])
    for name in ("LAUNCH", "GANG_TOKEN", "HEALTH"):
        assert f"BATCHML_{name}" not in plain


def test_runs_of_any_number_of_nodes_share_a_definition_that_no_single_container_has() -> None:
    three = msgspec.structs.replace(TORCHRUN, nodes=3)
    assert made(TORCHRUN)[0] == made(three)[0]
    assert made(TORCHRUN)[0]["jobDefinitionName"] != made(SPEC)[0]["jobDefinitionName"]


def test_a_group_s_own_variables_win_over_what_its_spec_would_say() -> None:
    """What `runs/groups/submit.py` says of a Ray gang's jobs."""
    spec = msgspec.structs.replace(SPEC, launch=Launch(kind="ray"))
    assert "BATCHML_LAUNCH" not in variables_of(made(spec, token=TOKEN)[1])
    env = {"BATCHML_LAUNCH": LaunchPlan("ray", role="worker").to_json()}
    plan = LaunchPlan.read(variables_of(made(spec, env=env)[1]))
    assert plan is not None
    assert plan.role == "worker"


@given(st.integers(0, 9000))
def test_nothing_is_sent_to_nodes_that_batch_would_refuse_for_its_length(length: int) -> None:
    spec = msgspec.structs.replace(TORCHRUN, command=("echo", "x" * length))
    found = make_submission(
        spec,
        image="i",
        queue="q",
        submission=SubmissionContext(key=KEY, token=TOKEN, documents="d"),
    )
    [override] = found.submit["nodeOverrides"]["nodePropertyOverrides"]
    said = override["containerOverrides"]
    told = {"AWS_BATCH_JOB_NUM_NODES": "1000", "AWS_BATCH_JOB_NODE_INDEX": "999",
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "255.255.255.255"}  # fmt: skip
    more = [{"name": name, "value": value} for name, value in told.items()]
    whole = {**said, "environment": [*said["environment"], *more]}
    del whole["resourceRequirements"]
    assert len(json.dumps(whole)) < 8192 - 512
    assert (found.document is None) == (said["command"][0] == "echo")
    assert variables_of(found.submit)["BATCHML_GANG_TOKEN"] == TOKEN


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
    request = definition_request(spec, "registry/img@sha256:0", platform)
    shape = service_model("batch").operation_model("RegisterJobDefinition").input_shape
    sent = dated_registration(request, 1_800_000_000.0)
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
    submit = make_submission(
        SPEC, image="i", queue="q", submission=SubmissionContext(), platform=MOUNTED
    ).submit
    assert {"type": "GPU", "value": "1"} in submit["containerOverrides"]["resourceRequirements"]


@pytest.mark.parametrize(("spec", "platform"), [(CPU, MOUNTED), (CPU, TOOLKIT), (SPEC, TOOLKIT)])
def test_nobody_else_is_privileged(spec: JobSpec, platform: Platform) -> None:
    found = container(spec, platform)
    assert "privileged" not in found
    assert [volume["host"]["sourcePath"] for volume in found["volumes"]] == ["/workspace"]
    assert found["mountPoints"] == [
        {"sourceVolume": "workspace", "containerPath": "/workspace", "readOnly": False}
    ]


def test_containers_hear_of_spot_notices_where_hosts_may_be_taken_back() -> None:
    """The same definitions go to all queues of an environment: one of its hosts may be spot."""
    spot = msgspec.structs.replace(DEV, compute={"a": Compute(), "b": Compute(spot=True)})
    platform = make_platform("dev", spot, OUTPUTS)
    for found in (container(CPU, platform), container(SPEC, platform)):
        assert {"name": "notices", "host": {"sourcePath": "/run/batchml"}} in found["volumes"]
        assert found["mountPoints"][-1] == {
            "sourceVolume": "notices", "containerPath": "/run/batchml", "readOnly": True,
        }  # fmt: skip
        assert found["environment"] == [
            {"name": "BATCHML_WORKSPACE", "value": "/workspace"},
            {"name": "BATCHML_NOTICE_FILE", "value": "/run/batchml/notice"},
        ]
    on_demand = msgspec.structs.replace(DEV, compute={"a": Compute()})
    assert make_platform("dev", on_demand, OUTPUTS) == MOUNTED


def test_a_job_with_data_sets_has_the_cache_of_its_host() -> None:
    data = {"train": "s3://team/sets", "test": "{workspace}/test"}
    spec = msgspec.structs.replace(SPEC, data=data, command=("train", "{data.train}"))
    platform = Platform(env="dev", data_cache=True)
    found = definition_request(spec, "img", platform)["containerProperties"]
    assert {"name": "BATCHML_DATA_CACHE", "value": "/batchml/cache"} in found["environment"]
    (point,) = found["mountPoints"]
    assert (point["containerPath"], point["readOnly"]) == ("/batchml/cache", False)
    (volume,) = found["volumes"]
    assert volume == {"name": "cache", "host": {"sourcePath": "/var/lib/batchml/cache"}}
    variables = made(spec)[1]["containerOverrides"]["environment"]
    values = {each["name"]: each["value"] for each in variables}
    assert json.loads(values["BATCHML_DATA"]) == data and values["BATCHML_FILL"] == "1"
    without = definition_request(SPEC, "img", platform)["containerProperties"]
    assert "volumes" not in without, "the definitions of other jobs stay as they are"


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


FABRIC = Platform(env="dev", efa={"batchml-dev-p5": 32, "batchml-dev-g6": 1, "batchml-dev-slow": 0})
NODES = msgspec.structs.replace(SPEC, nodes=2)


def node(spec: JobSpec, queue: str) -> dict[str, Any]:
    request = definition_request(spec, "img", FABRIC, queue)
    shape = service_model("batch").operation_model("RegisterJobDefinition").input_shape
    assert list(problems(shape, request, strict=True)) == []
    (nodes,) = request["nodeProperties"]["nodeRangeProperties"]
    return dict(nodes["container"])


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container.get("environment", ())}


@pytest.mark.parametrize(("queue", "count"), [("batchml-dev-p5", 32), ("batchml-dev-g6", 1)])
def test_nodes_with_efa_have_its_devices_and_memory_that_stays(queue: str, count: int) -> None:
    found = node(NODES, queue)
    paths = [f"/dev/infiniband/uverbs{number}" for number in range(count)]
    assert found["linuxParameters"] == {
        "initProcessEnabled": True, "sharedMemorySize": NODES.resources.shm_mib,
        "devices": [
            {"hostPath": each, "containerPath": each, "permissions": ["READ", "WRITE", "MKNOD"]}
            for each in paths
        ],
    }  # fmt: skip
    assert {each["name"]: (each["softLimit"], each["hardLimit"]) for each in found["ulimits"]} == {
        "memlock": (-1, -1), "stack": (67_108_864,) * 2, "nofile": (1_024_000,) * 2,
    }  # fmt: skip
    assert variables(found) == {
        "BATCHML_EFA": str(count), "FI_EFA_USE_HUGE_PAGE": "0", "NCCL_NET_PLUGIN": "ofi",
        "NCCL_TUNER_PLUGIN": "ofi", "NCCL_SOCKET_IFNAME": "^lo,docker,ecs",
    }  # fmt: skip


def test_nodes_without_efa_use_tcp_on_purpose() -> None:
    found = node(NODES, "batchml-dev-slow")
    assert "devices" not in found["linuxParameters"] and "ulimits" not in found
    assert variables(found) == {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "^lo,docker,ecs"}


def test_ranks_that_batchml_starts_know_their_interface() -> None:
    ranks = msgspec.structs.replace(NODES, launch=Launch(kind="torchrun"))
    assert "NCCL_SOCKET_IFNAME" not in variables(node(ranks, "batchml-dev-p5"))


def test_nodes_without_gpus_have_the_devices_and_nothing_of_nccl() -> None:
    cpu = msgspec.structs.replace(CPU, nodes=2)
    assert variables(node(cpu, "batchml-dev-g6")) == {
        "BATCHML_EFA": "1", "FI_EFA_USE_HUGE_PAGE": "0",
    }  # fmt: skip
    assert variables(node(cpu, "batchml-dev-slow")) == {}


def test_nodes_with_neuron_chips_have_both_kinds_of_devices() -> None:
    chips = Resources(vcpus=128, memory="480 GiB", neurons=2)
    found = node(msgspec.structs.replace(CPU, nodes=2, resources=chips), "batchml-dev-g6")
    paths = [each["hostPath"] for each in found["linuxParameters"]["devices"]]
    assert paths == ["/dev/neuron0", "/dev/neuron1", "/dev/infiniband/uverbs0"]
    assert variables(found)["FI_PROVIDER"] == "efa"
    assert not [name for name in variables(found) if name.startswith("NCCL")]


def test_one_node_and_a_queue_that_the_file_does_not_describe_have_nothing_of_it() -> None:
    bare = msgspec.structs.replace(FABRIC, efa={})
    for spec, queue in ((SPEC, "batchml-dev-p5"), (NODES, "theirs")):
        with_fabric = definition_request(spec, "img", FABRIC, queue)
        assert with_fabric == definition_request(spec, "img", bare, queue)


def test_each_number_of_devices_has_a_definition_of_its_own() -> None:
    names = {
        definition_request(NODES, "img", FABRIC, queue)["jobDefinitionName"]
        for queue in (*FABRIC.efa, "theirs")
    }
    assert len(names) == 4


def test_the_queues_of_an_environment_have_the_devices_of_their_hosts() -> None:
    compute = {"p5": Compute(instance_types=("p5.48xlarge",), efa=True), "cpu": Compute()}
    queues = {name: Queue(compute=(name,)) for name in compute}
    dev = msgspec.structs.replace(DEV, ami="build", compute=compute, queues=queues)
    assert make_platform("dev", dev, OUTPUTS).efa == {"batchml-dev-p5": 32, "batchml-dev-cpu": 0}


def test_an_empty_platform_gives_the_definition_of_local() -> None:
    name = "lenet-992e118a00"  # as it has been since the first version: definitions are reused
    request = definition_request(SPEC, "img")
    assert request["jobDefinitionName"] == name
    assert request["tags"] == {"batchml": "lenet"}
    assert set(request["containerProperties"]) == {
        "image", "command", "resourceRequirements", "linuxParameters", "logConfiguration",
    }  # fmt: skip


def test_definitions_are_told_apart_by_place_and_tagged_with_it() -> None:
    names = {
        definition_request(spec, "img", platform)["jobDefinitionName"]
        for spec in (SPEC, CPU)
        for platform in (Platform(), MOUNTED, TOOLKIT)
    }
    assert len(names) == 5  # how GPUs are reached is nothing to a job without
    request = dated_registration(definition_request(SPEC, "img", MOUNTED), 1_800_000_000.0)
    assert request["tags"] == {
        "batchml": "lenet", "batchml:env": "dev", "team": "vision",
        "batchml:registered": "2027-01-15",
    }  # fmt: skip
    # The day says when, not what: the name is that of the content.
    assert (
        request["jobDefinitionName"]
        == definition_request(SPEC, "img", MOUNTED)["jobDefinitionName"]
    )


def test_a_described_queue_has_the_environments_name_in_aws() -> None:
    assert queue_name("dev", DEV, "gpu") == "batchml-dev-gpu"
    assert queue_name("dev", DEV, "shared-by-others") == "shared-by-others"
    assert queue_name("local", DEV, "gpu") == "gpu"


def test_a_command_that_travels_as_a_document_is_not_in_the_definition() -> None:
    long = msgspec.structs.replace(SPEC, command=("echo", *["x" * 1000] * 900))
    register = made(long, key=KEY, documents="s3://b/code")[0]
    assert register["containerProperties"]["command"] == ["batchml-order"]
    assert register == definition_request(long, "img")  # as `jobdef register` makes it
    assert definition_request(SPEC, "img")["containerProperties"]["command"] == list(SPEC.command)
