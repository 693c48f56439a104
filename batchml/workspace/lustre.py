"""The workspace on FSx for Lustre, a file system that is linked to the environment's bucket.

Files are pushed and pulled through the bucket, without a run: FSx imports and exports objects by
itself, some time later. Only an export task ensures that all files are in the bucket, and only
reading them back ensures that they are complete.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.aws.fsx import (
    EVENTS,
    DataRepositoryAssociation,
    DataRepositoryTask,
    FsxApi,
    TaskType,
    key_prefix,
    parse_report,
    task_request,
)
from batchml.clock import Clock
from batchml.context import PollIntervals, backoff
from batchml.errors import FsxTaskFailed, NotFound, TransferFailed
from batchml.model.environment import (
    OnProgress,
    TransferReport,
    TransferStatus,
    WorkspaceEntry,
    relative_path,
)
from batchml.runtime.transfer.receive import TransferResult, combine, receive
from batchml.runtime.transfer.s3_archives import PosixArchive
from batchml.workspace.base import plan_copies, pull_target
from batchml.workspace.linked_files import LinkedSource, ObjectWriter, list_entries
from batchml.workspace.local import to_entry, to_report, track_progress, translate_errors
from batchml.workspace.remote import (
    ARCHIVE_PREFIX,
    RemoteStorage,
    RemoteWorkspace,
    never_a_folder,
    receive_target,
)

if TYPE_CHECKING:
    from batchml.aws.s3 import BucketStore

_IMPORTED_LATER = (
    "FSx imports the files into the workspace, mostly within a minute. A run that starts sooner "
    "may not see them yet."
)
_EXPORTED_LATER = (
    "Files were read from the bucket, which may lack what runs wrote in the last minutes. "
    "batchml workspace archive waits for all of it."
)
_LOADED_LATER = "All names are in the workspace; a file's content is loaded when it is first read."
_FREED = (
    "The space of the files is free. Their names stay, and their content is loaded again when it "
    "is read. Deleting them in the workspace would delete them in the bucket, too."
)
_DELETED_LATER = "FSx deletes them in the bucket, too, some time later."
_MAX_NAMED = 20  # failed files in a message


class LustreWorkspace(RemoteWorkspace):
    """A workspace on FSx for Lustre. It implements `WorkspaceBackend`.

    `store` writes objects with POSIX metadata below the prefix that the file system is linked to.
    """

    kind = "FSx for Lustre"

    def __init__(
        self,
        storage: RemoteStorage,
        link: "LustreLink",
        store: PosixArchive,
        objects: "BucketStore",
    ) -> None:
        super().__init__(storage)
        self._link, self._store, self._objects = link, store, objects

    def ls(self, path: str = "", *, deep: bool = False) -> list[WorkspaceEntry]:
        name = relative_path(path)
        found = list_entries(self._objects, ARCHIVE_PREFIX, name, deep=deep)
        if not found and name:
            raise self._no_such_path(path)
        return [to_entry(each) for each in found]

    def push(
        self, sources: Sequence[Path], dest: str, on_progress: OnProgress, *, checksum: bool = False
    ) -> TransferReport:
        paths = [self._context.folder / each for each in sources]
        slash = "/" if dest.endswith("/") else ""
        copies = plan_copies(paths, relative_path(dest) + slash, never_a_folder)
        writer = ObjectWriter(self._objects, ARCHIVE_PREFIX, self._store, checksum)
        done = TransferResult()
        with translate_errors():
            for copy in copies:
                done = combine(done, writer.send(copy, track_progress(on_progress)))
        return replace(to_report("push", self.location, done), notes=(_IMPORTED_LATER,))

    def pull(
        self, path: str, dest: Path | None, on_progress: OnProgress, *, checksum: bool = False
    ) -> TransferReport:
        name = relative_path(path)
        linked = LinkedSource(self._objects, ARCHIVE_PREFIX, self._store, name)
        if not linked.exists and name:
            raise self._no_such_path(path)
        target = pull_target(name, linked.is_folder, dest, self._context.folder)
        source, tree = receive_target(linked, target, linked.is_folder)
        with translate_errors():
            done = receive(source, tree, "", track_progress(on_progress), "pulling", checksum)
        return replace(to_report("pull", str(target), done), notes=(_EXPORTED_LATER,))

    def archive(
        self, to: str, on_progress: OnProgress, *, delete: bool = False, checksum: bool = False,
        overwrite: bool = False,
    ) -> TransferReport:  # fmt: skip
        """Like `WorkspaceBackend.archive`; `delete` frees space and keeps the names of files."""
        url = self._archive_url(to)
        if url != self.default_archive:
            if delete:
                raise TransferFailed(
                    f"--delete: the file system loads freed files from {self.default_archive} "
                    f"only, to which it is linked. Archive there, or leave out --delete."
                )
            return super().archive(to, on_progress, checksum=checksum, overwrite=overwrite)
        if delete:
            self._refuse_in_use()
        failed = self._export(on_progress)
        request = {"verb": "archive", "place": url, "linked": True, "checksum": checksum}
        report = self._to_report(self._execute(request, on_progress))
        report = replace(report, verb="archive", location=url, missing=failed + report.missing)
        if not delete or not report.is_complete:
            return report
        self._link.release(_on_task(on_progress, "freeing"))
        return replace(report, notes=(*report.notes, _FREED))

    def _export(self, on_progress: OnProgress) -> tuple[str, ...]:
        """Export all files to the bucket; return those that AWS could not write, and why."""
        task = self._link.export(_on_task(on_progress, "exporting"))
        if not task.failed:
            return ()
        names = self._failures(task)
        more = task.failed - len(names)
        rest = (f"{more} more, in {task.report or 'no report'}",) if more > 0 else ()
        return (*names, *rest)

    def _failures(self, task: DataRepositoryTask) -> tuple[str, ...]:
        found: list[str] = []
        prefix = key_prefix(task.report)
        for each in self._objects.list_objects(f"{prefix}/") if prefix else ():
            if task.id in each.key:
                found += parse_report(self._objects.get(each.key) or b"")
        return tuple(found[:_MAX_NAMED])

    def restore(
        self, source: str, on_progress: OnProgress, *, partial: bool = False,
        checksum: bool = False, overwrite: bool = False,
    ) -> TransferReport:  # fmt: skip
        url = self._archive_url(source)
        if url != self.default_archive:
            return super().restore(
                source, on_progress, partial=partial, checksum=checksum, overwrite=overwrite
            )
        task = self._link.import_names(_on_task(on_progress, "importing"))
        missing = (f"{task.failed} files: {task.reason or 'AWS gives no reason'}",)
        return TransferReport(
            "restore", url, files=task.succeeded, missing=missing if task.failed else (),
            notes=(_LOADED_LATER,),
        )  # fmt: skip

    def remove(self, paths: Sequence[str], on_progress: OnProgress) -> TransferReport:
        report = super().remove(paths, on_progress)
        return replace(report, notes=(*report.notes, _DELETED_LATER))

    def _no_such_path(self, path: str) -> NotFound:
        hint = f"Files of the last minutes may not be there yet. To list it: {self._command('ls')}"
        return NotFound("In the bucket of the workspace,", path, [], hint)


def _on_task(on_progress: OnProgress, doing: str) -> "OnTask":
    def report(task: DataRepositoryTask) -> None:
        text = doing if task.status == "EXECUTING" else f"{doing}: the task is {task.status}"
        finished = task.succeeded + task.failed
        on_progress(TransferStatus(text, files=finished, of_files=task.total))

    return report


# --- The link between file system and bucket ------------------------------------------------------
# AWS refuses an export task while the link exports automatically. So automatic export is paused
# during a task and resumed after it. If a command is killed in between, the next one resumes it.


OnTask = Callable[[DataRepositoryTask], None]

TASK_INTERVALS = PollIntervals(shortest=2.0, longest=30.0)
_CHANGE_LIMIT = 900.0  # seconds for AWS to change a link


class LustreLink:
    """A file system of FSx for Lustre and its link to the bucket."""

    def __init__(
        self, api: FsxApi, file_system: str, clock: Clock, token: Callable[[], str]
    ) -> None:
        self._api, self._id, self._clock = api, file_system, clock
        self._token = token  # makes a new token: AWS executes requests with the same token once

    def link(self) -> DataRepositoryAssociation:
        return self._api.association(self._id)

    def export(self, on_task: OnTask) -> DataRepositoryTask:
        """Write all changed files to the bucket; return the ended task, which may have failures.

        Raises FsxTaskFailed if the link cannot be changed, and the errors of AWS.
        """
        with self._paused_export() as link:
            return self._run("EXPORT_TO_REPOSITORY", link, on_task)

    def import_names(self, on_task: OnTask) -> DataRepositoryTask:
        """Make all objects of the bucket visible; contents are loaded when first read."""
        return self._run("IMPORT_METADATA_FROM_REPOSITORY", self.link(), on_task)

    def release(self, on_task: OnTask) -> DataRepositoryTask:
        """Free the space of all exported files."""
        return self._run("RELEASE_DATA_FROM_FILESYSTEM", self.link(), on_task)

    @contextmanager
    def _paused_export(self) -> Iterator[DataRepositoryAssociation]:
        """Pause automatic export during the block."""
        link = self.link()
        exports = link.exports or EVENTS  # empty: an earlier command was killed in this block
        try:
            yield self._set_exports(link, ())
        finally:
            self._set_exports(self.link(), exports)

    def _set_exports(
        self, link: DataRepositoryAssociation, exports: Sequence[str]
    ) -> DataRepositoryAssociation:
        """Set the events that the link exports, and wait until AWS has changed the link."""
        end, pauses = self._clock.monotonic() + _CHANGE_LIMIT, backoff(TASK_INTERVALS)
        is_requested = False
        while True:
            if link.status == "AVAILABLE" and set(link.exports) == set(exports):
                return link
            if link.status == "AVAILABLE" and not is_requested:  # AWS allows one change at a time
                self._api.set_exports(link, exports, self._token())
                is_requested = True
            elif link.status in ("MISCONFIGURED", "FAILED") or self._clock.monotonic() > end:
                raise FsxTaskFailed(
                    f"The link {link.id} of the file system {self._id} to {link.repository} is "
                    f"{link.status}: {link.reason or 'it takes longer than 15 minutes'}. Nothing "
                    f"was deleted. Repair the link and repeat the command."
                )
            self._clock.sleep(next(pauses))
            link = self.link()

    def _run(
        self, kind: TaskType, link: DataRepositoryAssociation, on_task: OnTask
    ) -> DataRepositoryTask:
        request = task_request(kind, self._id, link, token=self._token())
        # A task that a killed command began does the same: wait for it.
        task = next((each for each in self._api.running(self._id) if each.type == kind), None)
        task = task or self._api.create_task(request)
        pauses = backoff(TASK_INTERVALS)
        while True:
            on_task(task)
            if task.is_over:
                break
            self._clock.sleep(next(pauses))
            task = self._api.task(task.id)
        if task.status != "SUCCEEDED" and not task.failed:
            raise FsxTaskFailed(
                f"{kind} of {self._id} ended {task.status}: "
                f"{task.reason or 'AWS gives no reason'}. Nothing was deleted. Repeat the command."
            )
        return task
