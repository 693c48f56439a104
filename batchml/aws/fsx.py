"""FSx for Lustre: its association with a bucket, and tasks that export, import or release files.

Automatic export copies a file to the bucket some time after it was closed, and AWS does not report
when. An export task ends when all files are in the bucket. AWS refuses such a task while automatic
export is on, so automatic export is paused during the task.

Sources: Amazon FSx API reference, CreateDataRepositoryTask, UpdateDataRepositoryAssociation; FSx
for Lustre User Guide, "Automatically export updates", "Using data repository tasks".
"""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from batchml.aws.errors import call, read_token_pages
from batchml.aws.session import Session
from batchml.errors import NotFound

TaskType = Literal[
    "EXPORT_TO_REPOSITORY", "IMPORT_METADATA_FROM_REPOSITORY", "RELEASE_DATA_FROM_FILESYSTEM"
]
EVENTS = ("NEW", "CHANGED", "DELETED")  # the events of automatic export, as in cfn/storage.yaml
REPORTS = ".batchml/archive/tasks"  # the folder for reports, below the association's prefix

_ENDED = ("SUCCEEDED", "FAILED", "CANCELED")


class DataRepositoryAssociation(Struct, frozen=True):
    """The association of a file system's folder `path` with a prefix of a bucket."""

    id: str
    status: str
    path: str
    repository: str  # s3://BUCKET/PREFIX/
    exports: tuple[str, ...] = ()  # the events that are exported automatically
    imports: tuple[str, ...] = ()
    reason: str = ""

    @property
    def bucket(self) -> str:
        return self.repository.removeprefix("s3://").partition("/")[0]

    @property
    def prefix(self) -> str:
        return key_prefix(self.repository)


class DataRepositoryTask(Struct, frozen=True):
    """A data repository task, with the numbers of its files."""

    id: str
    type: str
    status: str
    total: int = 0
    succeeded: int = 0
    failed: int = 0
    reason: str = ""
    report: str = ""  # the s3:// URL of the list of files that failed

    @property
    def is_over(self) -> bool:
        return self.status in _ENDED


def task_request(
    kind: TaskType,
    file_system: str,
    association: DataRepositoryAssociation,
    *,
    token: str,
) -> dict[str, Any]:
    """The CreateDataRepositoryTask request, for all files.

    A release task frees the space of all exported files.
    """
    request: dict[str, Any] = {
        "Type": kind,
        "FileSystemId": file_system,
        "Paths": [],
        "Report": {"Enabled": False},
        "ClientRequestToken": token,
        "Tags": [{"Key": "batchml:carry", "Value": kind.partition("_")[0].lower()}],
    }
    if kind == "EXPORT_TO_REPOSITORY":
        request["Report"] = {
            "Enabled": True,
            "Path": f"{association.repository.rstrip('/')}/{REPORTS}",
            "Format": "REPORT_CSV_20191124",
            "Scope": "FAILED_FILES_ONLY",
        }
    if kind == "RELEASE_DATA_FROM_FILESYSTEM":
        duration = {"Unit": "DAYS", "Value": 0}
        request["ReleaseConfiguration"] = {"DurationSinceLastAccess": duration}
    return request


def association_request(
    association: DataRepositoryAssociation, exports: Sequence[str], token: str
) -> dict[str, Any]:
    """The UpdateDataRepositoryAssociation request that sets the events of automatic export."""
    return {
        "AssociationId": association.id,
        "ClientRequestToken": token,
        "S3": {
            "AutoImportPolicy": {"Events": list(association.imports)},
            "AutoExportPolicy": {"Events": list(exports)},
        },
    }


def key_prefix(url: str) -> str:
    """The prefix of `s3://BUCKET/PREFIX/`, without slashes around it."""
    return url.removeprefix("s3://").partition("/")[2].strip("/")


def parse_report(report: bytes) -> list[str]:
    """The files that the report of a task lists as failed, each with the reason.

    The report is CSV: `path,status,reason` and more. Source: FSx for Lustre User Guide, "Task
    completion reports".
    """
    rows = csv.reader(io.StringIO(report.decode("utf-8", "replace")))
    return [
        f"{row[0]}: {row[2].strip() if len(row) > 2 and row[2].strip() else row[1].strip()}"
        for row in rows
        if len(row) > 1 and row[0] and row[1].strip().lower() != "succeeded"
    ]


class FsxApi:
    """Amazon FSx's calls, with our types. Each raises what `call` does."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def association(self, file_system: str) -> DataRepositoryAssociation:
        """The association of a file system with its bucket. Raises NotFound."""
        filters = [{"Name": "file-system-id", "Values": [file_system]}]
        pages = read_token_pages(
            self._client, "DescribeDataRepositoryAssociations", Filters=filters
        )
        for page in pages:
            for detail in page["Associations"]:
                return _association(detail)
        kind = "Data repository association of the file system"
        raise NotFound(kind, file_system, [], "batchml setup creates it.")

    def set_exports(
        self, association: DataRepositoryAssociation, exports: Sequence[str], token: str
    ) -> None:
        """Begin to set the events of automatic export; without events it is off."""
        request = association_request(association, exports, token)
        call(self._client, "UpdateDataRepositoryAssociation", **request)

    def create_task(self, request: Mapping[str, Any]) -> DataRepositoryTask:
        """Create a task, and return it."""
        answer = call(self._client, "CreateDataRepositoryTask", **request)
        return _task(answer["DataRepositoryTask"])

    def task(self, task_id: str) -> DataRepositoryTask:
        """Read the present state of a task."""
        (found,) = self._tasks(TaskIds=[task_id])
        return found

    def running(self, file_system: str) -> list[DataRepositoryTask]:
        """The tasks that have not ended. AWS runs them one after the other."""
        filters = [
            {"Name": "file-system-id", "Values": [file_system]},
            {"Name": "task-lifecycle", "Values": ["PENDING", "EXECUTING", "CANCELING"]},
        ]
        return self._tasks(Filters=filters)

    def _tasks(self, **request: Any) -> list[DataRepositoryTask]:
        pages = read_token_pages(self._client, "DescribeDataRepositoryTasks", **request)
        return [_task(detail) for page in pages for detail in page["DataRepositoryTasks"]]

    @property
    def _client(self) -> Any:
        return self._session.client("fsx")


def _association(detail: Mapping[str, Any]) -> DataRepositoryAssociation:
    s3 = detail.get("S3", {})
    return DataRepositoryAssociation(
        id=detail["AssociationId"],
        status=detail.get("Lifecycle", ""),
        path=detail.get("FileSystemPath", "/"),
        repository=detail.get("DataRepositoryPath", ""),
        exports=tuple(s3.get("AutoExportPolicy", {}).get("Events", ())),
        imports=tuple(s3.get("AutoImportPolicy", {}).get("Events", ())),
        reason=detail.get("FailureDetails", {}).get("Message", ""),
    )


def _task(detail: Mapping[str, Any]) -> DataRepositoryTask:
    status = detail.get("Status", {})
    return DataRepositoryTask(
        id=detail["TaskId"],
        type=detail["Type"],
        status=detail["Lifecycle"],
        total=status.get("TotalCount", 0),
        succeeded=status.get("SucceededCount", 0),
        failed=status.get("FailedCount", 0),
        reason=detail.get("FailureDetails", {}).get("Message", ""),
        report=(detail.get("Report") or {}).get("Path", ""),
    )
