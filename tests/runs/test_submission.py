"""`submit` to an environment in AWS: what is asked, and what is sent."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import ConfigError, NoQueue, NotFound
from batchml.model.job import JobSpec, Launch
from batchml.model.names import split_key
from batchml.runs.job_images import check_kept_image, read_platform, resolve_jobs
from batchml.runs.options import RunRequest, resolve_job
from batchml.runs.prepare import prepare
from batchml.runs.submit import submit_run
from tests.support.fakes import FakeClock
from tests.support.scripted import Answer, ScriptedSession

CONFIG = """
[env.dev]
region = "us-east-1"
ami = "build"
[env.dev.compute.gpu]
instance_types = ["g5"]
max_vcpus = 64
[env.dev.queues.gpu]
compute = ["gpu"]
"""
JOB = """
image = "docker.io/library/python:3.12"
command = ["python", "-c", "print(1)"]
queue = "gpu"
code = false
[resources]
gpus = 1
"""
STACKS = {
    "batchml-dev-roles": {"JobRoleArn": "arn:job", "ExecutionRoleArn": "arn:execution"},
    "batchml-dev-observability": {"LogGroupName": "/batchml/dev"},
    "batchml-dev-storage": {"FileSystemId": "fs-1", "BucketName": "bucket"},
}
DIGEST = "sha256:" + "0" * 64


class Aws:
    """An account with the stacks of `dev`; it takes runs of definitions that it knows."""

    def __init__(self) -> None:
        self.definitions: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.stacks = dict(STACKS)
        self.images = True

    def answer(self, operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        match operation:
            case "DescribeStacks":
                found = self.stacks.get(params["StackName"])
                if found is None:
                    name = params["StackName"]
                    return f"ValidationError: Stack with id {name} does not exist"
                outputs = [{"OutputKey": k, "OutputValue": v} for k, v in found.items()]
                return {"Stacks": [{
                    "StackName": params["StackName"], "StackStatus": "CREATE_COMPLETE",
                    "Outputs": outputs,
                }]}  # fmt: skip
            case "SubmitJob":
                if params["jobDefinition"] not in self.definitions:
                    return "ClientException: JobDefinition not found"
                return {"jobId": "j-1", "jobName": params["jobName"]}
            case "DescribeJobDefinitions":
                known = self.definitions & {params["jobDefinitionName"]}
                return {"jobDefinitions": [{"jobDefinitionName": name} for name in known]}
            case "RegisterJobDefinition":
                self.definitions.add(params["jobDefinitionName"])
                return {}
            case "HeadObject":
                return {"ContentLength": 1} if params["Key"] in self.objects else "404: Not Found"
            case "PutObject":
                self.objects[params["Key"]] = params["Body"]
                return {"ETag": "e"}
            case "DescribeImages" if self.images:
                tag = params["imageIds"][0]["imageTag"]
                return {"imageDetails": [{
                    "repositoryName": params["repositoryName"], "imageDigest": DIGEST,
                    "imageTags": [tag],
                }]}  # fmt: skip
            case "DescribeRepositories" if self.images:
                name = params["repositoryNames"][0]
                uri = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/{name}"
                return {"repositories": [{
                    "repositoryName": name, "repositoryUri": uri,
                    "repositoryArn": f"arn:aws:ecr:us-east-1:123456789012:repository/{name}",
                }]}  # fmt: skip
        return "RepositoryNotFoundException: no"


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")
    return Aws()


def place_in(folder: Path, answer: Answer, config: str = CONFIG) -> tuple[Context, ScriptedSession]:
    (folder / "batchml.toml").write_text(config)
    if not (folder / "jobs").exists():
        write(folder, JOB)
    settings = load_settings({"BATCHML_HOME": str(folder / "home")}, folder, "dev")
    context = Context(settings, FakeClock(1_800_000_000.0), folder)
    session = ScriptedSession(answer)
    context._session = session
    return context, session


def write(folder: Path, text: str) -> None:
    (folder / "jobs" / "hello").mkdir(parents=True, exist_ok=True)
    (folder / "jobs" / "hello" / "job.toml").write_text(text)


def order(**changes: Any) -> RunRequest:
    return RunRequest(job="hello", changes=changes)


def test_a_run_is_of_its_environment(tmp_path: Path, aws: Aws) -> None:
    place, session = place_in(tmp_path, aws.answer)
    assert submit_run(place, prepare(place, order(), dry_run=False)) == "j-1"
    assert sorted(params["StackName"] for params in session.asked("DescribeStacks")) == (
        sorted(STACKS)  # each once
    )
    (registered,) = session.asked("RegisterJobDefinition")
    container = registered["containerProperties"]
    assert container["privileged"] is True
    assert container["jobRoleArn"] == "arn:job"
    assert container["executionRoleArn"] == "arn:execution"
    assert container["logConfiguration"]["options"]["awslogs-group"] == "/batchml/dev"
    assert [mount["containerPath"] for mount in container["mountPoints"]] == [
        "/workspace", "/usr/local/nvidia",
    ]  # fmt: skip
    assert registered["tags"] == {
        "batchml": "hello", "batchml:env": "dev", "batchml:registered": "2027-01-15",
    }  # fmt: skip
    assert {params["jobQueue"] for params in session.asked("SubmitJob")} == {"batchml-dev-gpu"}
    (sent, again) = session.asked("SubmitJob")
    assert sent["jobName"] == again["jobName"]  # the first was refused: one submission, one key
    name, key = split_key(sent["jobName"])
    assert name == "hello"
    assert sent["tags"] == {
        "batchml:key": key,
        "batchml:job": "hello",
        "batchml:project": place.project,
        "batchml:env": "dev",
    }
    (remembered,) = place.history.newest_first("dev")
    assert (remembered.key, remembered.name, remembered.gpus) == (key, "hello", 1)
    assert (remembered.job_id, remembered.queue) == ("j-1", "batchml-dev-gpu")


def test_the_second_run_registers_nothing(tmp_path: Path, aws: Aws) -> None:
    place, session = place_in(tmp_path, aws.answer)
    for _ in range(2):
        submit_run(place, prepare(place, order(), dry_run=False))
    assert len(session.asked("RegisterJobDefinition")) == 1
    assert len(session.asked("SubmitJob")) == 3
    assert len(session.asked("DescribeStacks")) == 3  # once for both


def test_a_parameter_that_the_command_does_not_use_is_named(tmp_path: Path, aws: Aws) -> None:
    write(tmp_path, JOB.replace("[resources]", "[params]\nlr = 0.1\nepochs = 3\n[resources]"))
    place, _ = place_in(tmp_path, aws.answer)
    for command, unused in (
        (("sh", "-c", "train --epochs 4"), "{lr}, {epochs}"),
        (("train", "--lr", "{lr}"), "{epochs}"),
        (("train", "{params}"), ""),
        (("sh", "-c", "train $BATCHML_PARAM_LR $BATCHML_PARAM_EPOCHS"), ""),
    ):
        asked = RunRequest(job="hello", command=command, params={"lr": "0.2", "epochs": "2"})
        notices = [each for each in prepare(place, asked, dry_run=True).notices if "-p:" in each]
        assert [unused in each for each in notices] == ([True] if unused else [])


def test_a_queue_that_is_not_there_is_told_in_the_users_names(tmp_path: Path, aws: Aws) -> None:
    def answer(operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        if operation == "SubmitJob":
            return "ClientException: JobQueue gqu not found, RequestId 1"
        if operation == "DescribeJobQueues":
            return {"jobQueues": [{"jobQueueName": "batchml-dev-gpu", "priority": 1}]}
        return aws.answer(operation, params)

    place, session = place_in(tmp_path, answer)
    asked = replace(order(queue="gqu"), queue_at="train.sh, line 4")
    prepared = prepare(place, asked, dry_run=False)
    assert not session.asked("DescribeJobQueues")  # none where it is there
    with pytest.raises(NoQueue) as caught:
        submit_run(place, prepared)
    assert str(caught.value) == (
        "Job queue 'gqu' (train.sh, line 4) does not exist. Did you mean 'gpu'? Known: gpu. "
        "--queue gpu runs it there."
    )
    assert caught.value.exit_code == 78
    assert not session.asked("RegisterJobDefinition")


def test_a_fallback_to_a_disabled_queue_is_not_called_missing(tmp_path: Path, aws: Aws) -> None:
    off = {"jobQueueName": "other", "priority": 1, "state": "DISABLED"}

    def answer(operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        known = operation == "DescribeJobQueues"
        return {"jobQueues": [off]} if known else aws.answer(operation, params)

    place, _ = place_in(tmp_path, answer)
    asked = order(fallback={"queue": "other", "after": "30m"})
    with pytest.raises(ConfigError, match="other takes no jobs now"):
        prepare(place, asked, dry_run=False)


def test_on_local_it_is_looked_for_before_anything_is_sent(tmp_path: Path, aws: Aws) -> None:
    _, session = place_in(
        tmp_path, lambda *_: {"jobQueues": [{"jobQueueName": "default", "priority": 1}]}
    )
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, "local")
    context = Context(settings, FakeClock(), tmp_path)
    context._session = session
    with pytest.raises(NoQueue, match=r"Known: default\. --queue default runs it here\."):
        prepare(context, order(queue="spot"), dry_run=True)
    assert [name for name, _ in session.calls] == ["DescribeJobQueues"]


def test_a_queue_that_was_made_meanwhile_is_found_by_the_same_client(
    tmp_path: Path, aws: Aws
) -> None:
    names = ["default", "gpu"]
    context, session = local_place(tmp_path, names)

    def queue_of(name: str) -> str:
        return str(prepare(context, order(queue=name), dry_run=True).requests.submit["jobQueue"])

    assert queue_of("gpu") == "gpu"
    with pytest.raises(NoQueue):
        queue_of("new")
    names.append("new")
    assert queue_of("new") == "new"
    names.append(context.qualified("gpu"))
    context.clock.sleep(1)
    assert queue_of("gpu") == context.qualified("gpu") != "gpu"  # the project's own comes first
    assert len(session.asked("DescribeJobQueues")) == 4


def local_place(
    folder: Path, queues: list[str], *, has_project: bool = True
) -> tuple[Context, ScriptedSession]:
    """`local` with these queues, which takes jobs for them."""

    def answer(operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        if operation == "DescribeJobQueues":
            return {"jobQueues": [{"jobQueueName": each, "priority": 1} for each in queues]}
        if params["jobQueue"] not in queues:
            return f"ClientException: JobQueue {params['jobQueue']} not found"
        return {"jobId": "6b0e0000-0000-4000-8000-000000000001", "jobName": params["jobName"]}

    _, session = place_in(folder, answer)
    if not has_project:
        (folder / "batchml.toml").unlink()
    settings = load_settings({"BATCHML_HOME": str(folder / "home")}, folder, "local")
    context = Context(settings, FakeClock(), folder)
    context._session = session
    context.home.prepare()
    return context, session


def test_submissions_of_one_second_ask_for_the_queues_once(tmp_path: Path, aws: Aws) -> None:
    queues = ["default", "gpu"]
    context, session = local_place(tmp_path, queues)
    for _ in range(5):
        submit_run(context, prepare(context, order(queue="gpu"), dry_run=False))
    assert [name for name, _ in session.calls] == ["DescribeJobQueues", *["SubmitJob"] * 5]
    queues.remove("gpu")
    with pytest.raises(NoQueue, match="gpu"):  # although it is known: SubmitJob refuses it
        submit_run(context, prepare(context, order(queue="gpu"), dry_run=False))
    session.calls.clear()
    with pytest.raises(NoQueue, match="gpu"):
        prepare(context, order(queue="gpu"), dry_run=False)  # it is not known any more
    assert not session.asked("SubmitJob")


def test_programs_without_a_project_also_ask_for_the_queues_once_a_second(
    tmp_path: Path, aws: Aws
) -> None:
    context, session = local_place(tmp_path, ["default"], has_project=False)
    assert context.settings.config is None
    for _ in range(5):
        prepare(context, order(queue="default"), dry_run=False)
    assert len(session.asked("DescribeJobQueues")) == 1
    context.clock.sleep(1)
    prepare(context, order(queue="default"), dry_run=False)
    assert len(session.asked("DescribeJobQueues")) == 2


def test_a_dry_run_reads_and_sends_nothing(tmp_path: Path, aws: Aws) -> None:
    place, session = place_in(tmp_path, aws.answer)
    prepare(place, order(), dry_run=True)
    assert {operation for operation, _ in session.calls} == {"DescribeStacks"}


def test_without_stacks_a_run_goes_to_what_there_is(tmp_path: Path, aws: Aws) -> None:
    aws.stacks = {}
    place, _ = place_in(tmp_path, aws.answer)
    found = prepare(place, order(queue="theirs"), dry_run=True).requests
    assert found.submit["jobQueue"] == "theirs"
    assert "jobRoleArn" not in found.register["containerProperties"]


def test_an_image_of_ours_is_named_by_its_digest(tmp_path: Path, aws: Aws) -> None:
    place, session = place_in(tmp_path, aws.answer)
    write(tmp_path, JOB.replace("docker.io/library/python:3.12", "pytorch"))
    for gpus in (0, 1):
        changes = {"resources": {"gpus": gpus}}
        found = prepare(place, order(**changes), dry_run=True).requests.register
        container = found["containerProperties"]
        registry = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
        assert container["image"] == f"{registry}/batchml/pytorch@{DIGEST}"
        assert container["user"] == "1000:1000"
    asked = {params["imageIds"][0]["imageTag"] for params in session.asked("DescribeImages")}
    assert len(asked) == 2  # with GPUs it is another flavor


BOTH = (
    CONFIG
    + """
[env.dev.compute.arm]
instance_types = ["m7g"]
max_vcpus = 4
[env.dev.queues.arm]
compute = ["arm"]
"""
)


def image_tags(session: ScriptedSession) -> list[str]:
    """The processors of the images that ECR was asked for."""
    asked = [params["imageIds"][0]["imageTag"] for params in session.asked("DescribeImages")]
    return [tag.rpartition("-")[2] for tag in asked]


def place_with_arm(folder: Path, answer: Answer) -> tuple[Context, ScriptedSession]:
    write(folder, JOB.replace("docker.io/library/python:3.12", "python"))
    place_in(folder, answer)
    (folder / "batchml.toml").write_text(BOTH)
    settings = load_settings({"BATCHML_HOME": str(folder / "home")}, folder, "dev")
    context = Context(settings, FakeClock(1_800_000_000.0), folder)
    context._session = session = ScriptedSession(answer)
    return context, session


def test_an_image_is_that_of_the_processor_of_the_queue(tmp_path: Path, aws: Aws) -> None:
    place, session = place_with_arm(tmp_path, aws.answer)
    for queue in ("gpu", "arm"):
        prepare(place, order(queue=queue, resources={"gpus": 0}), dry_run=True)
    assert image_tags(session) == ["amd64", "arm64"]
    assert not session.asked("DescribeJobQueues"), "the file describes both"


@pytest.mark.parametrize(("instance", "processor"), [("m7g.large", "arm64"), ("m7i", "amd64")])
def test_a_queue_that_the_file_does_not_describe_is_asked_for_its_processor_once(
    tmp_path: Path, aws: Aws, instance: str, processor: str
) -> None:
    def answer(operation: str, params: dict[str, Any]) -> Any:
        if operation == "DescribeJobQueues":
            order = [{"order": 1, "computeEnvironment": "theirs"}]
            return {"jobQueues": [{"jobQueueName": "theirs", "computeEnvironmentOrder": order}]}
        if operation == "DescribeComputeEnvironments":
            resources = {"type": "EC2", "instanceTypes": [instance]}
            return {"computeEnvironments": [
                {"computeEnvironmentName": "theirs", "computeResources": resources}
            ]}  # fmt: skip
        return aws.answer(operation, params)

    place, session = place_with_arm(tmp_path, answer)
    (tmp_path / "home").mkdir()
    for _ in range(2):
        ready = prepare(place, order(queue="theirs"), dry_run=True)
        assert ready.cache is not None
        ready.cache.save()
    assert image_tags(session) == [processor]
    assert len(session.asked("DescribeJobQueues")) == 1


def test_who_may_not_ask_for_queues_gets_the_image_of_the_files_processor(
    tmp_path: Path, aws: Aws
) -> None:
    place, session = place_with_arm(
        tmp_path,
        lambda operation, params: (
            "AccessDeniedException: no"
            if operation.startswith(("DescribeJobQ", "DescribeComp"))
            else aws.answer(operation, params)
        ),
    )
    prepare(place, order(queue="theirs"), dry_run=True)
    assert image_tags(session) == ["amd64"]


def test_an_image_is_not_kept_for_a_queue_of_another_processor(tmp_path: Path, aws: Aws) -> None:
    place, _ = place_with_arm(tmp_path, aws.answer)
    ours = OURS.partition('"')[2].rstrip('"')
    digest = ours.partition("sha256:")[0] + "sha256:" + "0" * 64
    check_kept_image(place, digest, "batchml-dev-gpu", "gpu")
    check_kept_image(place, digest, "theirs", "arm")
    check_kept_image(place, "docker.io/library/python:3.12", "gpu", "arm")
    with pytest.raises(ConfigError, match="queue arm has arm64 hosts") as refused:
        check_kept_image(place, digest, "batchml-dev-gpu", "arm")
    assert "for the amd64 hosts of queue gpu" in str(refused.value)


def test_an_image_that_was_not_pushed_says_how(tmp_path: Path, aws: Aws) -> None:
    aws.images = False
    place, session = place_in(tmp_path, aws.answer)
    write(tmp_path, JOB.replace("docker.io/library/python:3.12", "pytorch"))
    with pytest.raises(NotFound, match=r"batchml image push --env dev pytorch --flavor cuda"):
        prepare(place, order(), dry_run=False)
    assert session.asked("SubmitJob") == []


def test_definitions_of_jobs_read_the_stacks_once_for_all(tmp_path: Path, aws: Aws) -> None:
    place, session = place_in(tmp_path, aws.answer)
    platform = read_platform(place)
    first, second = (job.request(platform) for job in resolve_jobs(place, ["hello", "hello"])[0])
    assert first == second
    assert first["containerProperties"]["jobRoleArn"] == "arn:job"
    assert len(session.asked("DescribeStacks")) == 3


# --- what travels ---------------------------------------------------------------------------

OURS = 'image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/batchml/mine@sha256:0"'
CODE = f"""
{OURS}
command = ["python", "train.py"]
queue = "gpu"
"""


def variables(session: ScriptedSession) -> dict[str, str]:
    """Those of the last submission."""
    overrides = session.asked("SubmitJob")[-1]["containerOverrides"]
    return {entry["name"]: entry["value"] for entry in overrides["environment"]}


def test_code_goes_to_the_bucket_and_what_is_there_is_not_sent_again(
    tmp_path: Path, aws: Aws
) -> None:
    write(tmp_path, CODE)
    place, session = place_in(tmp_path, aws.answer)
    told: list[str] = []
    for _ in range(2):
        submit_run(place, prepare(place, order(), dry_run=False), told.append)
    assert (len(session.asked("HeadObject")), len(session.asked("PutObject"))) == (1, 1)
    (key,) = aws.objects
    found = variables(session)
    assert found["BATCHML_CODE"] == f"s3://bucket/{key}"
    assert found["BATCHML_STORE"] == f"s3://bucket/runs/{found['BATCHML_KEY']}"
    assert told[0].startswith("Code: 1 file, ")
    assert "not sent again" in told[1]


def test_the_bucket_is_asked_for_the_same_code_once_a_minute(tmp_path: Path, aws: Aws) -> None:
    write(tmp_path, CODE)
    place, session = place_in(tmp_path, aws.answer)

    def calls() -> list[str]:
        session.calls.clear()
        submit_run(place, prepare(place, order(), dry_run=False))
        return [operation for operation, _ in session.calls]

    assert "PutObject" in calls()
    assert calls() == ["SubmitJob"]
    (tmp_path / "jobs" / "hello" / "train.py").write_text("print(1)")
    assert calls() == ["HeadObject", "PutObject", "SubmitJob"]
    place.clock.sleep(60)
    assert calls() == ["HeadObject", "SubmitJob"]


def test_a_command_of_any_length_goes_along(tmp_path: Path, aws: Aws) -> None:
    write(tmp_path, CODE)
    place, session = place_in(tmp_path, aws.answer)
    long = RunRequest(job="hello", command=("echo", *["x" * 1000] * 100))
    submit_run(place, prepare(place, long, dry_run=False))
    assert session.asked("SubmitJob")[-1]["containerOverrides"]["command"] == ["batchml-order"]
    document = aws.objects[variables(session)["BATCHML_ORDER"].removeprefix("s3://bucket/")]
    assert json.loads(document)["command"] == list(long.command or ())
    with pytest.raises(ConfigError, match="Linux allows 128 KiB"):
        prepare(place, RunRequest(job="hello", command=("echo", "x" * 200_000)), dry_run=False)


def test_an_image_of_others_takes_no_code_and_no_long_command(tmp_path: Path, aws: Aws) -> None:
    write(tmp_path, JOB.replace("code = false", ""))
    place, session = place_in(tmp_path, aws.answer)
    with pytest.raises(ConfigError, match="code = false"):
        prepare(place, order(), dry_run=False)
    write(tmp_path, JOB)
    with pytest.raises(ConfigError, match="8192"):
        prepare(place, RunRequest(job="hello", command=("echo", "x" * 9000)), dry_run=False)
    with pytest.raises(ConfigError, match="nothing in it would replace"):
        prepare(place, RunRequest(job="hello", command=("echo", "{outputs}")), dry_run=False)
    submit_run(place, prepare(place, order(), dry_run=False))
    assert "BATCHML_STORE" not in variables(session)  # nothing in it could use one


def test_without_a_bucket_code_has_nowhere_to_go(tmp_path: Path, aws: Aws) -> None:
    write(tmp_path, CODE)
    del aws.stacks["batchml-dev-storage"]
    place, _ = place_in(tmp_path, aws.answer)
    with pytest.raises(ConfigError, match="batchml setup --env dev"):
        prepare(place, order(), dry_run=False)


def test_the_commit_of_the_folder_is_kept_with_the_run(tmp_path: Path, aws: Aws) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text(commit)
    place, session = place_in(tmp_path, aws.answer)
    prepared = prepare(place, order(), dry_run=False)
    submit_run(place, prepared)
    assert session.asked("SubmitJob")[-1]["tags"]["batchml:commit"] == commit
    assert prepared.record.commit == commit
    assert prepared.record.dirty is None  # git does not take this for a repository


# --- what is known of the environment -------------------------------------------------------


def stacks_asked(folder: Path, aws: Aws, hours: float = 0.0) -> int:
    """How often a submission, so many hours later, asks for the stacks."""
    place, session = place_in(folder, aws.answer)
    place.clock.sleep(hours * 3600)
    submit_run(place, prepare(place, order(), dry_run=False))
    return len(session.asked("DescribeStacks"))


def test_the_stacks_are_asked_for_once_an_hour_and_after_every_change(
    tmp_path: Path, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stacks_asked(tmp_path, aws) == 3
    assert stacks_asked(tmp_path, aws) == 0
    assert stacks_asked(tmp_path, aws, hours=0.9) == 0
    assert stacks_asked(tmp_path, aws, hours=1.1) == 3
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOTHER")  # another account, perhaps
    assert stacks_asked(tmp_path, aws) == 3


def test_an_environment_that_is_being_set_up_is_not_known_yet(tmp_path: Path, aws: Aws) -> None:
    del aws.stacks["batchml-dev-roles"]
    assert stacks_asked(tmp_path, aws) == 3
    assert stacks_asked(tmp_path, aws) == 3


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"of": "x", "at": 1e99}'])
def test_a_damaged_file_of_what_is_known_is_no_harm(
    tmp_path: Path, aws: Aws, content: bytes
) -> None:
    assert stacks_asked(tmp_path, aws) == 3
    (tmp_path / "home" / "known-dev.json").write_bytes(content)
    assert stacks_asked(tmp_path, aws) == 3


# --- several nodes --------------------------------------------------------------------------------

SPOT_CONFIG = f"""{CONFIG}
[env.dev.compute.cheap]
instance_types = ["g5"]
max_vcpus = 64
spot = true
[env.dev.queues.mixed]
compute = ["cheap", "gpu"]
"""
NODES = JOB.replace("code = false", "code = false\nnodes = 4")
POOLS: dict[str, list[dict[str, Any]]] = {
    "computeEnvironments": [
        {"computeEnvironmentName": "theirs-spot", "computeResources": {
            "type": "SPOT", "instanceTypes": ["g5"]}},
        {"computeEnvironmentName": "theirs", "computeResources": {
            "type": "EC2", "instanceTypes": ["g5"]}},
    ],
    "jobQueues": [
        {"jobQueueName": "theirs", "computeEnvironmentOrder": [{"computeEnvironment": "theirs"}]},
        {"jobQueueName": "theirs-mixed", "computeEnvironmentOrder": [
            {"computeEnvironment": "theirs"}, {"computeEnvironment": "theirs-spot"}]},
    ],
}  # fmt: skip


def place_of_nodes(tmp_path: Path, aws: Aws, job: str = NODES) -> tuple[Context, ScriptedSession]:
    def answer(operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        if operation == "DescribeComputeEnvironments":
            return {"computeEnvironments": POOLS["computeEnvironments"]}
        if operation == "DescribeJobQueues":
            return {"jobQueues": POOLS["jobQueues"]}
        return aws.answer(operation, params)

    write(tmp_path, job)
    _, session = place_in(tmp_path, answer)
    (tmp_path / "batchml.toml").write_text(SPOT_CONFIG)
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, "dev")
    context = Context(settings, FakeClock(1_800_000_000.0), tmp_path)
    context._session = session
    return context, session


def test_a_run_of_several_nodes_is_of_its_environment(tmp_path: Path, aws: Aws) -> None:
    place, session = place_of_nodes(tmp_path, aws)
    assert submit_run(place, prepare(place, order(), dry_run=False)) == "j-1"
    (registered,) = session.asked("RegisterJobDefinition")
    (group,) = registered["nodeProperties"]["nodeRangeProperties"]
    assert group["container"]["jobRoleArn"] == "arn:job"
    assert group["container"]["privileged"] is True
    submitted = session.asked("SubmitJob")[-1]
    assert submitted["nodeOverrides"]["numNodes"] == 4
    assert session.asked("DescribeComputeEnvironments") == []  # batchml.toml says what it is


@pytest.mark.parametrize("dry_run", [True, False])
def test_nodes_on_spot_are_refused_with_the_queues_that_would_do(
    dry_run: bool, tmp_path: Path, aws: Aws
) -> None:
    place, session = place_of_nodes(tmp_path, aws)
    with pytest.raises(ConfigError) as refused:
        prepare(place, order(queue="mixed"), dry_run=dry_run)
    (mistake,) = refused.value.mistakes
    assert "which uses spot instances (cheap)" in mistake
    assert "--queue gpu" in mistake
    assert "[[groups]]" in mistake
    assert session.asked("SubmitJob") == []
    prepare(place, order(queue="mixed", nodes=1), dry_run=dry_run)  # one may go there


def test_a_queue_that_is_not_described_is_asked_about_before_nodes_are_sent_there(
    tmp_path: Path, aws: Aws
) -> None:
    place, session = place_of_nodes(tmp_path, aws)
    with pytest.raises(ConfigError, match=r"uses spot instances \(theirs-spot\)"):
        prepare(place, order(queue="theirs-mixed"), dry_run=False)
    prepare(place, order(queue="theirs"), dry_run=False)
    asked = len(session.asked("DescribeJobQueues"))
    prepare(place, order(queue="theirs-mixed"), dry_run=True)
    assert len(session.asked("DescribeJobQueues")) == asked  # a dry run asks nothing of it


def test_ranks_need_an_image_with_our_runtime(tmp_path: Path, aws: Aws) -> None:
    place, _ = place_of_nodes(tmp_path, aws, f'{NODES}\n[launch]\nkind = "torchrun"\n')
    with pytest.raises(ConfigError) as refused:
        prepare(place, order(queue="mixed"), dry_run=True)
    assert [mistake.partition(":")[0] for mistake in refused.value.mistakes] == [
        "launch.kind", "nodes",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("torchrun", "--nnodes", "2", "train.py"), "set nodes in job.toml"),
        (("torchrun", "--nproc-per-node", "4"), "no script"),
        (
            ("python", "-m", "torch.distributed.run", "--wat", "x", "t.py"),
            "--wat is not a flag that batchml knows",
        ),
    ],
)
def test_a_line_with_torchrun_that_no_node_would_take_is_refused_here(
    words: tuple[str, ...], says: str, tmp_path: Path, aws: Aws
) -> None:
    place, _ = place_of_nodes(tmp_path, aws)
    spec = JobSpec(
        image="batchml/none", command=words, code=False, queue="gpu", nodes=4,
        launch=Launch(kind="torchrun"),
    )  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        prepare(place, RunRequest(spec=spec), dry_run=True)
    assert [mistake for mistake in refused.value.mistakes if says in mistake]


def test_who_may_not_ask_what_a_queue_is_made_of_may_submit_there(tmp_path: Path, aws: Aws) -> None:
    place, session = place_of_nodes(tmp_path, aws)
    answer = session._answer

    def refusing(operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        is_refused = operation == "DescribeComputeEnvironments"
        return "AccessDeniedException: not you" if is_refused else answer(operation, params)

    session._answer = refusing
    assert submit_run(place, prepare(place, order(queue="theirs-mixed"), dry_run=False)) == "j-1"


def test_an_array_of_several_nodes_is_refused(tmp_path: Path, aws: Aws) -> None:
    place, _ = place_of_nodes(tmp_path, aws)
    with pytest.raises(ConfigError, match="no arrays of multi-node jobs"):
        prepare(place, RunRequest(job="hello", array=3), dry_run=True)


@pytest.mark.parametrize(
    ("launch", "is_again", "kind", "launcher"),
    [
        (None, False, "torchrun", "torchrun"),
        ("plain", False, "plain", ""),
        ("mpi", False, "mpi", ""),
        (None, True, "plain", ""),  # a run that is submitted again keeps its kind
    ],
)
def test_a_command_of_torchrun_has_that_kind_on_several_nodes_unless_it_is_named(
    launch: str | None, is_again: bool, kind: str, launcher: str, tmp_path: Path, aws: Aws
) -> None:
    place, _ = place_of_nodes(tmp_path, aws)
    changes = {"nodes": 2, "launch": {"kind": launch}}
    spec = JobSpec(image="batchml/none", command=("-",)) if is_again else None
    found = resolve_job(
        place, RunRequest(spec=spec, command=("torchrun", "ddp.py"), changes=changes)
    )
    assert (found.spec.launch.kind, found.original.launch.kind) == (kind, kind)
    assert found.launcher == launcher


def test_a_run_that_is_submitted_again_writes_flags_as_its_job_does(
    tmp_path: Path, aws: Aws
) -> None:
    place, _ = place_in(tmp_path, aws.answer)
    flag = 'from argparse import ArgumentParser\nArgumentParser().add_argument("--weight-decay")\n'
    (place.folder / "train.py").write_text(flag)
    command = ("python", "train.py", "{params}")
    spec = JobSpec(image="batchml/none", command=("-",), flags="kebab")
    params = {"weight_decay": "0.01"}
    found = resolve_job(place, RunRequest(spec=spec, command=command, params=params))
    assert found.spec.argv()[-2:] == ["--weight-decay", "0.01"]
    plain = replace(spec, flags="as-is")
    with pytest.raises(ConfigError, match="the parameter is weight-decay"):
        resolve_job(place, RunRequest(spec=plain, command=command, params=params))
