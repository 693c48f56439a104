"""FSx for Lustre and its bucket: the link between them, and tasks that export, import and release.

What is written is exported by itself, some time after it was closed; nothing says when. A task
says so of everything, and AWS takes none for a link that exports by itself: that is held meanwhile.

Sources: Amazon FSx API reference, CreateDataRepositoryTask, UpdateDataRepositoryAssociation; FSx
for Lustre User Guide, "Automatically export updates", "Using data repository tasks".
"""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from batchml.aws.errors import translated
from batchml.aws.session import Session
from batchml.errors import NotFound

TaskType = Literal[
    "EXPORT_TO_REPOSITORY", "IMPORT_METADATA_FROM_REPOSITORY", "RELEASE_DATA_FROM_FILESYSTEM"
]
EVENTS = ("NEW", "CHANGED", "DELETED")  # as cfn/storage.yaml has them
REPORTS = ".batchml/archive/tasks"  # below the link's prefix, which is where AWS wants them

_TASKS = "describe_data_repository_tasks"
_ENDED = ("SUCCEEDED", "FAILED", "CANCELED")


class Link(Struct, frozen=True):
    """A data repository association. `bucket` and `prefix` are what it is linked to."""

    id: str
    status: str
    path: str  # of the file system
    repository: str  # s3://BUCKET/PREFIX/
    exports: tuple[str, ...] = ()  # what is exported by itself
    imports: tuple[str, ...] = ()
    reason: str = ""

    @property
    def bucket(self) -> str:
        return self.repository.removeprefix("s3://").partition("/")[0]

    @property
    def prefix(self) -> str:
        return in_bucket(self.repository)


class Task(Struct, frozen=True):
    """A data repository task, and how far it is: files."""

    id: str
    type: str
    status: str
    total: int = 0
    succeeded: int = 0
    failed: int = 0
    reason: str = ""
    report: str = ""  # s3://..., where its failures are listed

    @property
    def is_over(self) -> bool:
        return self.status in _ENDED


def task_request(
    kind: TaskType,
    file_system: str,
    link: Link,
    *,
    token: str,
    paths: Sequence[str] = (),
    release_days: int = 0,
) -> dict[str, Any]:
    """CreateDataRepositoryTask arguments. No paths: all of the file system. Pure.

    `release_days` is for a release: files that nobody has opened for so long.
    """  # fmt: skip
    request: dict[str, Any] = {
        "Type": kind,
        "FileSystemId": file_system,
        "Paths": list(paths),
        "Report": {"Enabled": False},
        "ClientRequestToken": token,
        "Tags": [{"Key": "batchml:carry", "Value": kind.partition("_")[0].lower()}],
    }
    if kind == "EXPORT_TO_REPOSITORY":
        request["Report"] = {
            "Enabled": True,
            "Path": f"{link.repository.rstrip('/')}/{REPORTS}",
            "Format": "REPORT_CSV_20191124",
            "Scope": "FAILED_FILES_ONLY",
        }
    if kind == "RELEASE_DATA_FROM_FILESYSTEM":
        duration = {"Unit": "DAYS", "Value": release_days}
        request["ReleaseConfiguration"] = {"DurationSinceLastAccess": duration}
    return request


def link_request(link: Link, exports: Sequence[str], token: str) -> dict[str, Any]:
    """UpdateDataRepositoryAssociation arguments: what is exported by itself from now on. Pure."""
    return {
        "AssociationId": link.id,
        "ClientRequestToken": token,
        "S3": {
            "AutoImportPolicy": {"Events": list(link.imports)},
            "AutoExportPolicy": {"Events": list(exports)},
        },
    }


def in_bucket(place: str) -> str:
    """What comes after the bucket of `s3://BUCKET/PREFIX`."""
    return place.removeprefix("s3://").partition("/")[2].strip("/")


def failures_of(report: bytes) -> list[str]:
    """The files that a task's report names, each with why. Pure.

    A line is `path,status,reason` and more. Source: "Task completion reports".
    """
    rows = csv.reader(io.StringIO(report.decode("utf-8", "replace")))
    return [
        f"{row[0]}: {row[2].strip() if len(row) > 2 and row[2].strip() else row[1].strip()}"
        for row in rows
        if len(row) > 1 and row[0] and row[1].strip().lower() != "succeeded"
    ]


class FileSystems:
    """Amazon FSx. Every method raises what `translated` makes of a refusal."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def link(self, file_system: str) -> Link:
        """The link of a file system to its bucket. Raises NotFound where it has none."""
        filters = [{"Name": "file-system-id", "Values": [file_system]}]
        for each in self._pages("describe_data_repository_associations", Filters=filters):
            return _link(each)
        raise NotFound("Link to a bucket", file_system, [], "batchml setup makes one.")

    def change(self, link: Link, exports: Sequence[str], token: str) -> None:
        """Begin to let a link export these events by itself, or none."""
        with translated("UpdateDataRepositoryAssociation"):
            self._client.update_data_repository_association(**link_request(link, exports, token))

    def begin(self, request: Mapping[str, Any]) -> Task:
        with translated("CreateDataRepositoryTask"):
            return _task(self._client.create_data_repository_task(**request)["DataRepositoryTask"])

    def task(self, task_id: str) -> Task:
        (found,) = self._pages(_TASKS, TaskIds=[task_id])
        return _task(found)

    def running(self, file_system: str) -> list[Task]:
        """The tasks that are not over: AWS carries out one after the other."""
        filters = [
            {"Name": "file-system-id", "Values": [file_system]},
            {"Name": "task-lifecycle", "Values": ["PENDING", "EXECUTING", "CANCELING"]},
        ]
        return [_task(each) for each in self._pages(_TASKS, Filters=filters)]

    def _pages(self, operation: str, **request: Any) -> list[Any]:
        """All that there is of an operation; botocore has no paginator for these."""
        found: list[Any] = []
        more: dict[str, str] = {}
        while True:
            with translated(operation.title().replace("_", "")):
                page = getattr(self._client, operation)(**request, **more)
                found += page["DataRepositoryTasks" if operation == _TASKS else "Associations"]
            if not page.get("NextToken"):
                return found
            more = {"NextToken": page["NextToken"]}

    @property
    def _client(self) -> Any:
        return self._session.client("fsx")


def _link(detail: Mapping[str, Any]) -> Link:
    s3 = detail.get("S3", {})
    return Link(
        id=detail["AssociationId"],
        status=detail.get("Lifecycle", ""),
        path=detail.get("FileSystemPath", "/"),
        repository=detail.get("DataRepositoryPath", ""),
        exports=tuple(s3.get("AutoExportPolicy", {}).get("Events", ())),
        imports=tuple(s3.get("AutoImportPolicy", {}).get("Events", ())),
        reason=detail.get("FailureDetails", {}).get("Message", ""),
    )


def _task(detail: Mapping[str, Any]) -> Task:
    status = detail.get("Status", {})
    return Task(
        id=detail["TaskId"],
        type=detail["Type"],
        status=detail["Lifecycle"],
        total=status.get("TotalCount", 0),
        succeeded=status.get("SucceededCount", 0),
        failed=status.get("FailedCount", 0),
        reason=detail.get("FailureDetails", {}).get("Message", ""),
        report=(detail.get("Report") or {}).get("Path", ""),
    )
