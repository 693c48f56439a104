"""Transfer runs: their submission, their report, and the error without one."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from batchml.aws.s3 import BucketStore
from batchml.aws.session import Access, Session
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import NotFound, TransferWorkerFailed, UsageError
from batchml.model.environment import TransferStatus
from batchml.model.run import JobStatus, Run
from batchml.runtime.transfer.manifest import COMPLETE
from batchml.runtime.transfer.worker import PROGRESS_KEY, REPORT_KEY, REQUEST_VARIABLE
from batchml.workspace.backends import count_unfinished, open_workspace, owning_context
from batchml.workspace.deletion_guard import check_archived, describe_archive, reason_to_keep
from batchml.workspace.lustre import LustreWorkspace
from batchml.workspace.remote import RemoteWorkspace
from batchml.workspace.transfer_runs import TRANSFER_TAG, TransferRuns
from tests.runs.test_submission import Aws
from tests.support.fakes import FakeClock
from tests.support.scripted import ScriptedSession

CONFIG = """
[env.dev]
region = "us-east-1"
[env.dev.compute.cpu]
instance_types = ["m6i"]
max_vcpus = 64
[env.dev.queues.default]
compute = ["cpu"]
[env.lab]
region = "us-east-1"
[env.lab.storage]
shared_with = "dev"
[env.lab.compute.gpu]
instance_types = ["g5"]
max_vcpus = 64
[env.lab.queues.default]
compute = ["gpu"]
[env.bare]
region = "us-east-1"
[env.bare.storage]
workspace = "none"
"""
ORDERED = {"verb": "archive", "place": "s3://bucket/workspace"}


class TransferAws(Aws):
    """An account whose runs are RUNNING at the first look and have ended at the second."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.looks = 0, 0
        self.objects: dict[str, bytes] = {}
        self.listed: list[dict[str, Any]] = []

    def answer(self, operation: str, params: dict[str, Any]) -> Any:
        match operation:
            case "DescribeJobs":
                self.looks += 1
                status = "RUNNING" if self.looks < 2 else "FAILED" if self.code else "SUCCEEDED"
                return {"jobs": [{
                    "jobId": "j-1", "jobName": "workspace-archive", "jobQueue": "q",
                    "status": status, "startedAt": 1, "createdAt": 1, "stoppedAt": 20_000,
                    "jobDefinition": "d", "container": {"exitCode": self.code},
                }]}  # fmt: skip
            case "GetObject":
                name = params["Key"].partition("/carry/")[2]
                data = self.objects.get(f"carry/{name}" if name else params["Key"])
                return {"Body": io.BytesIO(data)} if data is not None else "NoSuchKey: no"
            case "DescribeJobQueues":
                names = ("batchml-dev-default", "batchml-lab-default")
                return {"jobQueues": [{
                    "jobQueueName": name, "jobQueueArn": name, "state": "ENABLED",
                    "computeEnvironmentOrder": [], "priority": 1,
                } for name in names]}  # fmt: skip
            case "ListJobs":
                return {"jobSummaryList": self.listed}
        return super().answer(operation, params)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> TransferAws:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")
    return TransferAws()


def place_in(folder: Path, aws: Aws, env: str = "dev") -> tuple[Context, ScriptedSession]:
    (folder / "batchml.toml").write_text(CONFIG)
    settings = load_settings({"BATCHML_HOME": str(folder / "home")}, folder, env)
    place, session = (
        Context(settings, FakeClock(1_800_000_000.0), folder),
        ScriptedSession(aws.answer),
    )
    place._session = session
    return place, session


def test_a_transfer_run_is_submitted_followed_and_read(tmp_path: Path, aws: TransferAws) -> None:
    place, session = place_in(tmp_path, aws)
    aws.objects = {
        REPORT_KEY: b'{"files": 3, "bytes": 10}',
        PROGRESS_KEY: b'{"doing": "archiving", "files": 1, "of_files": 3}',
    }
    told: list[str] = []
    seen: list[TransferStatus] = []
    runs = TransferRuns(place, BucketStore(session, "bucket"), told.append)
    assert runs.execute(ORDERED, seen.append) == {"files": 3, "bytes": 10}
    sent = session.asked("SubmitJob")[-1]
    assert sent["jobQueue"] == "batchml-dev-default" and sent["tags"][TRANSFER_TAG] == "archive"
    variables = {
        each["name"]: each["value"] for each in sent["containerOverrides"]["environment"]
    }  # fmt: skip
    assert json.loads(variables[REQUEST_VARIABLE]) == ORDERED
    assert variables["BATCHML_STORE"].startswith("s3://bucket/runs/")
    assert TransferStatus("archiving", files=1, of_files=3) in seen
    assert any("j-1 in batchml-dev-default" in words for words in told)
    key = {params["Key"] for params in session.asked("GetObject")}
    assert f"{variables['BATCHML_STORE'].removeprefix('s3://bucket/')}/{REPORT_KEY}" in key


def test_a_transfer_run_without_a_report_is_an_error_with_its_log(
    tmp_path: Path, aws: TransferAws
) -> None:
    place, session = place_in(tmp_path, aws)
    aws.code = 137
    with pytest.raises(TransferWorkerFailed) as error:
        TransferRuns(place, BucketStore(session, "bucket")).execute(ORDERED, lambda now: None)
    assert "batchml logs j-1 --env dev" in str(error.value) and error.value.exit_code == 137


def test_the_workspace_is_what_the_stacks_have(tmp_path: Path, aws: TransferAws) -> None:
    place, _ = place_in(tmp_path, aws)
    found = open_workspace(place)
    assert type(found) is RemoteWorkspace
    assert (found.location, found.default_archive) == ("EFS fs-1 of dev", "s3://bucket/workspace")
    aws.stacks["batchml-dev-storage"] = {
        **aws.stacks["batchml-dev-storage"],
        "LustreMountName": "x",
    }
    (tmp_path / "home" / "known-dev.json").unlink(missing_ok=True)
    assert isinstance(open_workspace(place_in(tmp_path, aws)[0]), LustreWorkspace)
    aws.stacks["batchml-dev-storage"] = {"BucketName": "bucket", "FileSystemId": ""}
    with pytest.raises(NotFound, match="batchml setup --env dev"):
        open_workspace(place_in(tmp_path, aws)[0])
    with pytest.raises(NotFound, match='workspace = "none"'):
        open_workspace(place_in(tmp_path, aws, "bare")[0])


def test_a_shared_workspace_is_the_others(tmp_path: Path, aws: TransferAws) -> None:
    place, _ = place_in(tmp_path, aws, "lab")
    owner = owning_context(place)
    assert (owner.env, place.env) == ("dev", "lab") and owning_context(owner) is owner
    assert owner.settings.environment.storage.workspace == "efs"


def test_runs_of_all_who_share_a_workspace_are_counted(tmp_path: Path, aws: TransferAws) -> None:
    place, session = place_in(tmp_path, aws)
    aws.listed = [{"jobId": "j", "jobName": "n", "status": "RUNNING"}]
    assert count_unfinished(place) >= 2
    asked = {params["jobQueue"] for params in session.asked("ListJobs")}
    assert asked == {"batchml-dev-default", "batchml-lab-default"}


def test_keys_for_the_bucket_are_those_of_the_moment() -> None:
    session = Session(Access("eu-west-1", "", "http://x", "AKIA", "secret"))
    found = session.variables({"AWS_ENDPOINT_URL_S3": "http://s3", "AWS_PROFILE": "p"})
    assert dict(found) == {
        "AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "",
        "AWS_ENDPOINT_URL_S3": "http://s3", "AWS_REGION": "eu-west-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    assert len(found) == 6 and found.get("AWS_PROFILE") is None


# --- what may be deleted --------------------------------------------------------------------------

WHOLE = b'{"at": 1000.5, "files": 3, "bytes": 2048}'


def run(name: str, status: str, stopped: int | None = None) -> Run:
    return Run(job_id="j-1", name=name, queue="q", status=JobStatus(status), stopped_at=stopped)


@pytest.mark.parametrize(
    ("complete", "runs", "why"),
    [
        (None, [], "no complete archive"),
        (b"{", [], "no complete archive"),
        (WHOLE, [], ""),
        (WHOLE, [run("train", "SUCCEEDED", 1_000_000)], ""),
        (WHOLE, [run("train", "SUCCEEDED", 1_000_600)], "ended after the archive of 1970"),
        (WHOLE, [run("train", "RUNNABLE")], "has not ended"),
        (WHOLE, [run("workspace-archive", "SUCCEEDED", 1_009_000)], ""),
        (WHOLE, [run("workspace-push", "SUCCEEDED", 1_009_000)], "ended after"),
        (WHOLE.replace(b"1000", b"-99000"), [], "AWS Batch may have forgotten later runs"),
    ],
)
def test_a_file_system_goes_only_when_all_of_it_is_archived(
    complete: bytes | None, runs: list[Run], why: str
) -> None:
    said = reason_to_keep(complete, runs, now=2000)
    assert why in said and bool(why) == bool(said)


def test_what_goes_is_told_and_what_stays_too(tmp_path: Path, aws: TransferAws) -> None:
    place, _ = place_in(tmp_path, aws)
    with pytest.raises(UsageError) as error:
        check_archived(place, ())
    assert "First: batchml workspace archive --env dev" in str(error.value)
    assert "--allow-loss fs-1" in str(error.value)
    assert "without a check of its archive" in check_archived(place, ["fs-1"])
    aws.objects[f"workspace/{COMPLETE}"] = WHOLE
    with pytest.raises(UsageError, match="00:16 UTC, and AWS Batch may have forgotten later runs"):
        check_archived(place, ())
    now = b"%d" % place.clock.now()
    aws.objects[f"workspace/{COMPLETE}"] = WHOLE.replace(b"1000.5", now)
    assert check_archived(place, ()).startswith("s3://bucket/workspace holds 3 files")
    assert describe_archive(WHOLE) == "3 files, 2.0 KiB, as of 1970-01-01 00:16 UTC"
    aws.stacks["batchml-dev-storage"] = {"BucketName": "bucket"}
    assert "no file system" in check_archived(place, ())
