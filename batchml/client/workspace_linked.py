"""A workspace of FSx for Lustre, which is linked to the environment's bucket.

What is pushed and pulled goes through the bucket, without a run: FSx brings objects in, and files
out, by itself, some time after. Only a task says that all of it is out, and only reading it back
says that it is whole.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.client.linked_files import LinkSource, Sender, entries_of
from batchml.client.workspace_aws import ARCHIVE, CarriedWorkspace, Opener, landed, unknown
from batchml.client.workspace_local import account, as_entry, as_report, told
from batchml.errors import NotFound, TransferFailed
from batchml.model.workspace import Entry, Progress, Report, Watch, below
from batchml.ops.workspace import landing, ways
from batchml.runtime.transfer.backends import PosixVault
from batchml.runtime.transfer.receive import Result, receive, together

if TYPE_CHECKING:
    from batchml.aws.fsx import Task
    from batchml.aws.s3 import Bucket
    from batchml.client.carriers import Carriers
    from batchml.client.place import Place
    from batchml.ops.linked import Linked

_IN = (
    "FSx brings it into the workspace by itself, mostly within a minute: a run that starts sooner "
    "may not see it yet."
)
_OUT = (
    "From the bucket: what runs wrote in the last minutes may not be there yet. "
    "batchml workspace archive waits for all of it."
)
_LAZY = "All names are in the workspace; a file's content is loaded when it is first read."
_FREED = (
    "The room of its files is free; their names stay, and content is loaded again when it is read. "
    "Deleting them there would delete them in the bucket, too."
)
_GONE = "FSx deletes them in the bucket, too, some time after."
_NAMED = 20  # files that failed, in a message


class LinkedWorkspace(CarriedWorkspace):
    """The methods are `Workspace`'s. `vault` is the bucket at the link's prefix."""

    kind = "FSx for Lustre"

    def __init__(
        self,
        place: "Place",
        bucket: str,
        file_system: str,
        carriers: "Carriers",
        opener: Opener,
        at_work: Callable[[], int],
        linked: "Linked",
        vault: PosixVault,
        objects: "Bucket",
    ) -> None:
        super().__init__(place, bucket, file_system, carriers, opener, at_work)
        self._linked, self._vault, self._objects = linked, vault, objects

    def ls(self, path: str = "", *, deep: bool = False) -> list[Entry]:
        name = below(path)
        found = entries_of(self._objects, ARCHIVE, name, deep=deep)
        if not found and name:
            raise self._no_such(path)
        return [as_entry(each) for each in found]

    def push(
        self, sources: Sequence[Path], dest: str, watch: Watch, *, checksum: bool = False
    ) -> Report:
        slash = "/" if dest.endswith("/") else ""
        found = ways([self._place.here / each for each in sources], below(dest) + slash, unknown)
        sender = Sender(self._objects, ARCHIVE, self._vault, checksum)
        done = Result()
        with told():
            for way in found:
                done = together(done, sender.send(way, account(watch)))
        return replace(as_report("push", self.where, done), notes=(_IN,))

    def pull(self, path: str, dest: Path | None, watch: Watch, *, checksum: bool = False) -> Report:
        name = below(path)
        source = LinkSource(self._objects, ARCHIVE, self._vault, name)
        if not source.is_there and name:
            raise self._no_such(path)
        target = landing(name, source.is_folder, dest, self._place.here)
        onto, tree = landed(source, target, source.is_folder)
        with told():
            done = receive(onto, tree, "", account(watch), "pulling", checksum)
        return replace(as_report("pull", str(target), done), notes=(_OUT,))

    def archive(
        self, to: str, watch: Watch, *, delete: bool = False, checksum: bool = False,
        overwrite: bool = False,
    ) -> Report:  # fmt: skip
        """As `Workspace.archive`; `delete` frees the room of files, and leaves their names."""
        place = self._asked(to)
        if place != self.archive_place:
            if delete:
                raise TransferFailed(
                    f"--delete: what is freed comes back from {self.archive_place} alone, to which "
                    f"the file system is linked. Archive there, or leave out --delete."
                )
            return super().archive(to, watch, checksum=checksum, overwrite=overwrite)
        if delete:
            self._refuse_at_work()
        failed = self._exported(watch)
        order = {"verb": "archive", "place": place, "linked": True, "checksum": checksum}
        report = replace(self._carry(order, watch), verb="archive", place=place)
        report = replace(report, missing=failed + report.missing)
        if not delete or not report.is_complete:
            return report
        self._linked.release(_seen(watch, "freeing"), 0)
        return replace(report, notes=(*report.notes, _FREED))

    def _exported(self, watch: Watch) -> tuple[str, ...]:
        """Let all of it be written to the bucket; the files that AWS did not write, and why."""
        task = self._linked.export(_seen(watch, "exporting"))
        if not task.failed:
            return ()
        names = self._failures(task)
        more = task.failed - len(names)
        rest = (f"{more} more, in {task.report or 'no report'}",) if more > 0 else ()
        return (*names, *rest)

    def _failures(self, task: "Task") -> tuple[str, ...]:
        from batchml.aws.fsx import failures_of, in_bucket

        found: list[str] = []
        prefix = in_bucket(task.report)
        for each in self._objects.list(f"{prefix}/") if prefix else ():
            if task.id in each.key:
                found += failures_of(self._objects.get(each.key) or b"")
        return tuple(found[:_NAMED])

    def restore(
        self, source: str, watch: Watch, *, partial: bool = False, checksum: bool = False,
        overwrite: bool = False,
    ) -> Report:  # fmt: skip
        place = self._asked(source)
        if place != self.archive_place:
            return super().restore(
                source, watch, partial=partial, checksum=checksum, overwrite=overwrite
            )
        task = self._linked.import_names(_seen(watch, "importing"))
        missing = (f"{task.failed} files: {task.reason or 'AWS does not say why'}",)
        return Report(
            "restore", place, files=task.succeeded, missing=missing if task.failed else (),
            notes=(_LAZY,),
        )  # fmt: skip

    def remove(self, paths: Sequence[str], watch: Watch) -> Report:
        report = super().remove(paths, watch)
        return replace(report, notes=(*report.notes, _GONE))

    def _no_such(self, path: str) -> NotFound:
        hint = (
            f"Look: {self._command('ls')}. Of what runs wrote in the last minutes nothing is said."
        )
        return NotFound("In the bucket of the workspace,", path, [], hint)


def _seen(watch: Watch, doing: str) -> "Callable[[Task], None]":
    def see(task: "Task") -> None:
        words = doing if task.status == "EXECUTING" else f"{doing}: the task is {task.status}"
        watch(Progress(words, files=task.succeeded + task.failed, of_files=task.total))

    return see
