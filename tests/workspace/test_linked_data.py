"""A workspace of FSx for Lustre: a bucket that moto keeps, and an FSx that is played."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.aws.fsx import EVENTS, FsxApi, association_request, parse_report, task_request
from batchml.aws.s3 import BucketStore
from batchml.errors import FsxTaskFailed, NotFound, TransferFailed, UsageError
from batchml.local.server.protocol import problems
from batchml.model.environment import TransferStatus, ignore_progress
from batchml.runtime.transfer.s3_archives import PosixArchive, from_metadata, posix_headers
from batchml.runtime.transfer.tree import TreeEntry
from batchml.workspace.lustre import LustreLink, LustreWorkspace
from tests.support.fakes import FakeClock
from tests.support.s3 import BUCKET, KEYS, moto_s3
from tests.support.scripted import ScriptedSession
from tests.workspace.test_workspace_requests import Lab, plant, seen

PLACE = f"s3://{BUCKET}/workspace"


class Fsx:
    """Amazon FSx as its documentation has it: a link, and one task after the other.

    What its link holds back is exported by a task alone. Names in `stuck` it cannot write.
    """

    def __init__(self, root: Path, s3: Any) -> None:
        self.root, self.s3 = root, s3
        self.exports: list[str] = list(EVENTS)
        self.busy = 0  # looks for which the link goes on changing
        self.tasks: list[dict[str, Any]] = []
        self.stuck: list[str] = []
        self.ends = "SUCCEEDED"
        self.link_fails = ""
        self.session = ScriptedSession(self.answer)

    def answer(self, operation: str, params: dict[str, Any]) -> Any:
        shape = self.session.client("fsx").meta.service_model.operation_model(operation)
        found = [str(each) for each in problems(shape.input_shape, params, strict=True)]
        assert not found, found
        match operation:
            case "DescribeDataRepositoryAssociations":
                return {"Associations": [self.link()]}
            case "UpdateDataRepositoryAssociation":
                if self.busy:
                    return "BadRequest: it is being updated"
                self.exports = params["S3"]["AutoExportPolicy"]["Events"]
                self.busy = 2
                return {"Association": self.link()}
            case "CreateDataRepositoryTask":
                return self.begin(params)
            case "DescribeDataRepositoryTasks":
                return {"DataRepositoryTasks": self.looked(params)}
        raise AssertionError(operation)

    def link(self) -> dict[str, Any]:
        status = "UPDATING" if self.busy else "AVAILABLE"
        if self.link_fails:
            status = "MISCONFIGURED"
        self.busy = max(0, self.busy - 1)
        return {
            "AssociationId": "dra-0123456789abcdef0", "Lifecycle": status, "FileSystemPath": "/",
            "DataRepositoryPath": f"{PLACE}/", "FailureDetails": {"Message": self.link_fails},
            "S3": {
                "AutoImportPolicy": {"Events": list(EVENTS)},
                "AutoExportPolicy": {"Events": self.exports},
            },
        }  # fmt: skip

    def begin(self, params: dict[str, Any]) -> Any:
        if params["Type"] == "EXPORT_TO_REPOSITORY":
            if self.exports or self.busy:
                return "BadRequest: auto export is on"
            self.export()
            if self.stuck:
                report = params["Report"]["Path"].removeprefix(f"s3://{BUCKET}/")
                lines = "".join(f"{each},failed,AccessDenied\n" for each in self.stuck)
                key = f"{report}/task-0123456789abcdef0/failures.csv"
                self.s3.put_object(Bucket=BUCKET, Key=key, Body=lines.encode())
        task = {
            "TaskId": "task-0123456789abcdef0", "Type": params["Type"], "Lifecycle": "PENDING",
            "CreationTime": 0, "Report": params["Report"],
        }  # fmt: skip
        self.tasks.append(task)
        return {"DataRepositoryTask": task}

    def looked(self, params: dict[str, Any]) -> list[dict[str, Any]]:
        if "TaskIds" not in params:
            return [each for each in self.tasks if each["Lifecycle"] in ("PENDING", "EXECUTING")]
        task = self.tasks[-1]
        steps = {"PENDING": "EXECUTING", "EXECUTING": self.ends}
        task["Lifecycle"] = steps.get(task["Lifecycle"], task["Lifecycle"])
        failed = len(self.stuck)
        task["Status"] = {"TotalCount": 3, "SucceededCount": 3 - failed, "FailedCount": failed}
        return [task]

    def export(self) -> None:
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            if path.is_file() and not path.is_symlink() and name not in self.stuck:
                self.s3.put_object(Bucket=BUCKET, Key=f"workspace/{name}", Body=path.read_bytes())


class Moto:
    """A session for moto's S3."""

    def __init__(self, s3: Any) -> None:
        self._s3 = s3

    def client(self, service: str) -> Any:
        return self._s3


class Lustre(Lab):
    """An environment with FSx for Lustre."""

    def __init__(self, folder: Path, address: str) -> None:
        super().__init__(folder, address)
        environ = {**KEYS, "AWS_ENDPOINT_URL_S3": address}
        self.fsx = Fsx(self.root, self.s3)
        tokens = iter(f"token-{number}" for number in range(100))
        self.linked = LustreLink(
            FsxApi(self.fsx.session), "fs-0123456789abcdef0", FakeClock(), lambda: next(tokens)
        )
        self.lustre = LustreWorkspace(
            replace(self.storage, file_system="fs-0123456789abcdef0"), self.linked,
            PosixArchive.open(PLACE, environ), BucketStore(Moto(self.s3), BUCKET),  # type: ignore[arg-type]
        )  # fmt: skip


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with moto_s3() as found:
        yield found


@pytest.fixture
def lab(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lustre]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")
    made = Lustre(tmp_path, address)
    yield made
    for key in made.keys():  # noqa: SIM118  (no mapping)
        made.s3.delete_object(Bucket=BUCKET, Key=key)


def plain(top: Path) -> None:
    """`plant` without the name that no object in S3 can have."""
    plant(top)
    next(top.glob("sets/gr*")).unlink()


# --- through the bucket ---------------------------------------------------------------------------


def test_what_is_pushed_lies_in_the_bucket_as_files_of_the_user(lab: Lustre) -> None:
    plant(lab.here)
    report = lab.lustre.push([Path("sets")], "data/sets", ignore_progress)
    assert report.files == 2 and "FSx imports the files into the workspace" in report.notes[0]
    assert len(report.missing) == 1 and "cannot be the key of an S3 object" in report.missing[0]
    said = lab.s3.head_object(Bucket=BUCKET, Key="workspace/data/sets/run.sh")["Metadata"]
    assert (said["file-permissions"], said["file-owner"]) == ("0100755", "1000")
    # Folders, too, or they would be root's, and a link.
    assert {"workspace/data/", "workspace/data/sets/empty/"} <= set(lab.keys("workspace/"))
    link = lab.s3.head_object(Bucket=BUCKET, Key="workspace/data/sets/link")["Metadata"]
    assert link["file-permissions"] == "0120777"
    assert lab.transfers.requests == [], "no run"
    again = lab.lustre.push([Path("sets")], "data/sets", ignore_progress)
    assert (again.files, again.unchanged) == (0, 2)
    (lab.here / "sets" / "a.txt").write_text("two")
    assert lab.lustre.push([Path("sets")], "data/sets", ignore_progress).files == 1


def test_what_was_pushed_is_pulled_as_it_was(lab: Lustre) -> None:
    plain(lab.here)
    before = seen(lab.here / "sets")
    lab.lustre.push([Path("sets")], "", ignore_progress)
    lab.lustre.push([Path("sets/a.txt")], "one.txt", ignore_progress)
    report = lab.lustre.pull("sets", Path("back"), ignore_progress)
    assert report.is_complete and seen(lab.here / "back") == before
    lab.lustre.pull("one.txt", Path("here.txt"), ignore_progress)
    assert (lab.here / "here.txt").read_text() == "one"
    again = lab.lustre.pull("sets", Path("back"), ignore_progress)
    assert (again.files, again.unchanged) == (0, 2)
    with pytest.raises(NotFound):
        lab.lustre.pull("nowhere", None, ignore_progress)


def test_a_large_file_is_sent_in_parts_and_says_what_it_is(lab: Lustre) -> None:
    with open(lab.here / "large.bin", "wb") as file:
        file.truncate(17 << 20)
        file.seek(5)
        file.write(b"x")
    lab.lustre.push([Path("large.bin")], "", ignore_progress)
    said = lab.s3.head_object(Bucket=BUCKET, Key="workspace/large.bin")
    assert said["Metadata"]["file-permissions"] == "0100644" and said["ContentLength"] == 17 << 20
    assert lab.lustre.push([Path("large.bin")], "", ignore_progress, checksum=True).unchanged == 1


def test_the_bucket_is_listed_as_a_workspace(lab: Lustre) -> None:
    plain(lab.here)
    lab.lustre.push([Path("sets")], "data/sets", ignore_progress)
    assert [(each.path, each.kind) for each in lab.lustre.ls("data")] == [("data/sets", "folder")]
    found = {each.path: each for each in lab.lustre.ls("data/sets")}
    assert found["data/sets/link"].kind == "link" and found["data/sets/run.sh"].mode == 0o755
    assert found["data/sets/a.txt"].mtime_ns == 1_600_000_000_123_456_789
    deep = [each.path for each in lab.lustre.ls("", deep=True)]
    assert deep[:2] == ["data", "data/sets"] and "data/sets/a.txt" in deep
    (one,) = lab.lustre.ls("data/sets/a.txt")
    assert one.size == 3


# --- archive and restore --------------------------------------------------------------------------


def test_an_archive_is_exported_by_a_task_and_then_read_back(lab: Lustre) -> None:
    plain(lab.root)
    told: list[TransferStatus] = []
    report = lab.lustre.archive("", told.append)
    assert report.is_complete and lab.transfers.requests[-1]["linked"]
    assert "workspace/.batchml/archive/complete.json" in lab.keys("workspace/")
    # The link exports by itself again.
    assert lab.fsx.exports == list(EVENTS)
    assert "exporting" in {each.doing for each in told}
    asked = [name for name, _ in lab.fsx.session.calls if name.startswith(("Update", "Create"))]
    assert asked == [
        "UpdateDataRepositoryAssociation", "CreateDataRepositoryTask",
        "UpdateDataRepositoryAssociation",
    ]  # fmt: skip


def test_files_that_aws_did_not_write_are_named_and_nothing_is_freed(lab: Lustre) -> None:
    plain(lab.root)
    lab.fsx.stuck = ["sets/a.txt"]
    report = lab.lustre.archive("", ignore_progress, delete=True)
    assert not report.is_complete
    assert "sets/a.txt: AccessDenied" in report.missing
    assert any(each.startswith("sets/a.txt: the archive does not have") for each in report.missing)
    assert [each["Type"] for each in lab.fsx.tasks] == ["EXPORT_TO_REPOSITORY"]
    assert lab.fsx.exports == list(EVENTS)


def test_what_is_freed_is_released_and_not_deleted(lab: Lustre) -> None:
    """FSx would delete in the bucket what is deleted in the file system."""
    plain(lab.root)
    report = lab.lustre.archive("", ignore_progress, delete=True)
    assert [each["Type"] for each in lab.fsx.tasks][-1] == "RELEASE_DATA_FROM_FILESYSTEM"
    assert (lab.root / "sets" / "a.txt").exists() and "Their names stay" in " ".join(report.notes)
    assert "delete" not in lab.transfers.requests[-1]
    lab.at_work = 1
    with pytest.raises(UsageError, match="1 run has not ended"):
        lab.lustre.archive("", ignore_progress, delete=True)
    with pytest.raises(TransferFailed, match="--delete"):
        lab.lustre.archive("s3://other/x", ignore_progress, delete=True)


def test_a_task_that_ends_badly_leaves_the_link_as_it_was(lab: Lustre) -> None:
    lab.fsx.ends = "FAILED"
    with pytest.raises(FsxTaskFailed, match="ended FAILED"):
        lab.lustre.archive("", ignore_progress)
    assert lab.fsx.exports == list(EVENTS)


def test_after_a_command_that_was_killed_the_link_exports_again(lab: Lustre) -> None:
    plain(lab.root)
    lab.fsx.exports = []  # it was killed while a task went on
    lab.fsx.export()
    running = {"TaskId": "task-0123456789abcdef0", "Type": "EXPORT_TO_REPOSITORY",
               "Lifecycle": "EXECUTING", "CreationTime": 0}  # fmt: skip
    lab.fsx.tasks = [running]
    lab.linked.export(lambda task: None)
    assert len(lab.fsx.tasks) == 1, "the task that runs is gone on with"
    assert lab.fsx.exports == list(EVENTS)


def test_a_link_that_aws_cannot_use_is_told(lab: Lustre) -> None:
    lab.fsx.link_fails = "the bucket is gone"
    with pytest.raises(FsxTaskFailed, match="MISCONFIGURED: the bucket is gone"):
        lab.lustre.archive("", ignore_progress)


def test_restore_brings_in_the_names_and_says_that_contents_follow(lab: Lustre) -> None:
    report = lab.lustre.restore("", ignore_progress)
    assert report.files == 3 and "when it is first read" in report.notes[0]
    assert lab.fsx.tasks[-1]["Type"] == "IMPORT_METADATA_FROM_REPOSITORY"
    assert lab.transfers.requests == []


# --- what is pure ---------------------------------------------------------------------------------


def test_requests_are_as_the_service_has_them() -> None:
    import botocore.session

    from batchml.aws.fsx import DataRepositoryAssociation

    link = DataRepositoryAssociation(
        "dra-0123456789abcdef0", "AVAILABLE", "/", f"{PLACE}/", EVENTS, EVENTS
    )
    model = botocore.session.Session().get_service_model("fsx")
    for kind in (
        "EXPORT_TO_REPOSITORY", "IMPORT_METADATA_FROM_REPOSITORY", "RELEASE_DATA_FROM_FILESYSTEM",
    ):  # fmt: skip
        request = task_request(kind, "fs-0123456789abcdef0", link, token="t")
        shape = model.operation_model("CreateDataRepositoryTask").input_shape
        assert not list(problems(shape, request, strict=True))
    shape = model.operation_model("UpdateDataRepositoryAssociation").input_shape
    assert not list(problems(shape, association_request(link, (), "t"), strict=True))


@pytest.mark.parametrize(
    ("report", "names"),
    [
        (b"", []),
        (b"a.txt,failed,AccessDenied\n", ["a.txt: AccessDenied"]),
        (b'"a, b.txt",failed,\nok.txt,succeeded,\n', ["a, b.txt: failed"]),
        (b"\xff\n", []),
    ],
)
def test_a_report_of_failures_is_read_whatever_it_holds(report: bytes, names: list[str]) -> None:
    assert parse_report(report) == names


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_an_object_says_is_what_the_file_is(kind: str) -> None:
    mode = 0o777 if kind == "link" else 0o750
    entry = TreeEntry("a", kind, mode, 0, 1_600_000_000_123_456_789)
    said = {key.removeprefix("x-amz-meta-"): value for key, value in posix_headers(entry).items()}
    assert from_metadata(TreeEntry("a"), said) == entry
    # Of another's objects nothing is known, and what is odd is not believed.
    assert from_metadata(entry._replace(kind="file"), {"file-permissions": "rw", "file-mtime": "x"})
    assert from_metadata(TreeEntry("a"), {"file-mtime": "12"}).mtime_ns == 12 * 10**9
