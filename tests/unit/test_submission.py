"""`submit` to an environment in AWS: what is asked, and what is sent."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from batchml.cli.submission import Order, prepare, read_platform, resolve, send
from batchml.cli.wiring import Place
from batchml.errors import NotFound
from batchml.settings import load_settings
from tests.fakes import FakeClock
from tests.scripted import Answer, ScriptedSession

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
    "batchml-dev-storage": {"FileSystemId": "fs-1", "BucketName": "b"},
}
DIGEST = "sha256:" + "0" * 64


class Aws:
    """An account with the stacks of `dev`; it takes runs of definitions that it knows."""

    def __init__(self) -> None:
        self.definitions: set[str] = set()
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


def place_in(folder: Path, answer: Answer) -> tuple[Place, ScriptedSession]:
    (folder / "batchml.toml").write_text(CONFIG)
    write(folder, JOB)
    settings = load_settings({"BATCHML_HOME": str(folder / "home")}, folder, "dev")
    place = Place(settings, FakeClock(1_800_000_000.0), folder)
    session = ScriptedSession(answer)
    place._session = session
    return place, session


def write(folder: Path, text: str) -> None:
    (folder / "jobs" / "hello").mkdir(parents=True, exist_ok=True)
    (folder / "jobs" / "hello" / "job.toml").write_text(text)


def order(**changes: Any) -> Order:
    return Order("hello", None, {}, changes, {}, (), False)


def test_a_run_is_of_its_environment(tmp_path: Path, aws: Aws) -> None:
    place, session = place_in(tmp_path, aws.answer)
    assert send(place, prepare(place, order(), dry_run=False)) == "j-1"
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
    (remembered,) = place.history.newest_first("dev")
    assert (remembered.job_id, remembered.queue) == ("j-1", "batchml-dev-gpu")


def test_the_second_run_registers_nothing(tmp_path: Path, aws: Aws) -> None:
    place, session = place_in(tmp_path, aws.answer)
    for _ in range(2):
        send(place, prepare(place, order(), dry_run=False))
    assert len(session.asked("RegisterJobDefinition")) == 1
    assert len(session.asked("SubmitJob")) == 3


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


def test_an_image_that_was_not_pushed_says_how(tmp_path: Path, aws: Aws) -> None:
    aws.images = False
    place, session = place_in(tmp_path, aws.answer)
    write(tmp_path, JOB.replace("docker.io/library/python:3.12", "pytorch"))
    with pytest.raises(NotFound, match=r"batchml image push pytorch --flavor cuda"):
        prepare(place, order(), dry_run=False)
    assert session.asked("SubmitJob") == []


def test_definitions_of_jobs_read_the_stacks_once_for_all(tmp_path: Path, aws: Aws) -> None:
    place, session = place_in(tmp_path, aws.answer)
    platform = read_platform(place)
    first, second = (job.request(platform) for job in resolve(place, ["hello", "hello"]))
    assert first == second
    assert first["containerProperties"]["jobRoleArn"] == "arn:job"
    assert len(session.asked("DescribeStacks")) == 3
