"""FSx for Lustre: its association with a bucket, and tasks that export, import or release files.

Automatic export copies a file to the bucket some time after it was closed, and nothing reports
when. The end of an export task reports that all files are in the bucket. AWS refuses such a task
while automatic export is on, so automatic export is paused for it.

Sources: Amazon FSx API reference, CreateDataRepositoryTask, UpdateDataRepositoryAssociation; FSx
for Lustre User Guide, "Automatically export updates", "Using data repository tasks".
"""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from batchml.aws.errors import translate_errors
from batchml.aws.session import Session
from batchml.errors import NotFound

TaskType = Literal[
    "EXPORT_TO_REPOSITORY", "IMPORT_METADATA_FROM_REPOSITORY", "RELEASE_DATA_FROM_FILESYSTEM"
]
EVENTS = ("NEW", "CHANGED", "DELETED")  # as in cfn/storage.yaml
REPORTS = ".batchml/archive/tasks"  # below the association's prefix, as AWS demands

_TASKS = "describe_data_repository_tasks"
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
    """A data repository task, with its numbers of files."""

    id: str
    type: str
    status: str
    total: int = 0
    succeeded: int = 0
    failed: int = 0
    reason: str = ""
    report: str = ""  # s3://...: the list of its failures

    @property
    def is_over(self) -> bool:
        return self.status in _ENDED


def task_request(
    kind: TaskType,
    file_system: str,
    link: DataRepositoryAssociation,
    *,
    token: str,
    paths: Sequence[str] = (),
    release_days: int = 0,
) -> dict[str, Any]:
    """The CreateDataRepositoryTask request. Without paths, it is for all files.

    A release frees the space of files that were not opened for `release_days`.
    """
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


def association_request(
    link: DataRepositoryAssociation, exports: Sequence[str], token: str
) -> dict[str, Any]:
    """The UpdateDataRepositoryAssociation request that sets the events of automatic export."""
    return {
        "AssociationId": link.id,
        "ClientRequestToken": token,
        "S3": {
            "AutoImportPolicy": {"Events": list(link.imports)},
            "AutoExportPolicy": {"Events": list(exports)},
        },
    }


def key_prefix(place: str) -> str:
    """The prefix of `s3://BUCKET/PREFIX`."""
    return place.removeprefix("s3://").partition("/")[2].strip("/")


def parse_report(report: bytes) -> list[str]:
    """The files that a task's report lists as failed, each with the reason.

    A line is `path,status,reason` and more. Source: "Task completion reports".
    """
    rows = csv.reader(io.StringIO(report.decode("utf-8", "replace")))
    return [
        f"{row[0]}: {row[2].strip() if len(row) > 2 and row[2].strip() else row[1].strip()}"
        for row in rows
        if len(row) > 1 and row[0] and row[1].strip().lower() != "succeeded"
    ]


class FsxApi:
    """Amazon FSx's calls, with our types. Each raises what `translate_errors` does."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def association(self, file_system: str) -> DataRepositoryAssociation:
        """The association of a file system with its bucket. Raises NotFound."""
        filters = [{"Name": "file-system-id", "Values": [file_system]}]
        for each in self._pages("describe_data_repository_associations", Filters=filters):
            return _link(each)
        raise NotFound("Link to a bucket", file_system, [], "batchml setup makes one.")

    def change(self, link: DataRepositoryAssociation, exports: Sequence[str], token: str) -> None:
        """Begin to set the events of automatic export; none turns it off."""
        with translate_errors("UpdateDataRepositoryAssociation"):
            self._client.update_data_repository_association(
                **association_request(link, exports, token)
            )

    def begin(self, request: Mapping[str, Any]) -> DataRepositoryTask:
        with translate_errors("CreateDataRepositoryTask"):
            return _task(self._client.create_data_repository_task(**request)["DataRepositoryTask"])

    def task(self, task_id: str) -> DataRepositoryTask:
        (found,) = self._pages(_TASKS, TaskIds=[task_id])
        return _task(found)

    def running(self, file_system: str) -> list[DataRepositoryTask]:
        """The tasks that have not ended. AWS runs one after the other."""
        filters = [
            {"Name": "file-system-id", "Values": [file_system]},
            {"Name": "task-lifecycle", "Values": ["PENDING", "EXECUTING", "CANCELING"]},
        ]
        return [_task(each) for each in self._pages(_TASKS, Filters=filters)]

    def _pages(self, operation: str, **request: Any) -> list[Any]:
        """The results of all pages; botocore has no paginator for these operations."""
        found: list[Any] = []
        more: dict[str, str] = {}
        while True:
            with translate_errors(operation.title().replace("_", "")):
                page = getattr(self._client, operation)(**request, **more)
                found += page["DataRepositoryTasks" if operation == _TASKS else "Associations"]
            if not page.get("NextToken"):
                return found
            more = {"NextToken": page["NextToken"]}

    @property
    def _client(self) -> Any:
        return self._session.client("fsx")


def _link(detail: Mapping[str, Any]) -> DataRepositoryAssociation:
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
