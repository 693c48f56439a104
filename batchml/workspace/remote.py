"""The workspace of an environment in AWS: a file system that this machine cannot mount.

Files pass through the environment's bucket. Transfer runs (`transfer_runs.py`) copy them between
the bucket and an EFS. FSx for Lustre is linked to the bucket and needs fewer of them: `lustre.py`.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.errors import BatchmlError, NotFound, TransferFailed, UsageError
from batchml.model.environment import (
    MOUNT,
    OnProgress,
    TransferReport,
    WorkspaceEntry,
    ignore_progress,
    relative_path,
)
from batchml.runtime.transfer.archive import archive
from batchml.runtime.transfer.archives import ArchiveStore
from batchml.runtime.transfer.main import RESULT_MARK
from batchml.runtime.transfer.manifest import read_manifest
from batchml.runtime.transfer.receive import (
    TransferResult,
    TreeSource,
    combine,
    receive,
)
from batchml.runtime.transfer.restore import ArchiveSource, stored_entries
from batchml.runtime.transfer.tree import LeftOut, OpenedFile, Tree, TreeEntry, from_line
from batchml.runtime.transfer.worker import LISTING_KEY
from batchml.sessions.exec.backends import capture_output
from batchml.sessions.exec.target import ExecTarget
from batchml.workspace.base import plan_copies, pull_target, source_tree
from batchml.workspace.local import CONTINUES, to_entry, to_report, track_progress, translate_errors

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.model.run import Run
    from batchml.runtime.storage.store import Store
    from batchml.workspace.transfer_runs import RemoteTransfers

ARCHIVE_PREFIX = "workspace"  # of the bucket; FSx for Lustre is linked to it: cfn/storage.yaml
STAGING_PREFIX = "runs/carry"  # of the bucket: files in transit; a lifecycle rule expires them


class RemoteStorage(Struct, frozen=True):
    """A file system in AWS, and the means to reach it.

    `open_store` opens the archive at s3://BUCKET/PREFIX. `count_unfinished` counts the runs that
    may be using the workspace.
    """

    context: "Context"
    bucket: str
    file_system: str
    transfers: "RemoteTransfers"
    open_store: Callable[[str], ArchiveStore]
    count_unfinished: Callable[[], int]


class RemoteWorkspace:
    """A workspace on EFS, which only transfer runs reach. It implements `WorkspaceBackend`.

    `list_quickly` lists a folder without a transfer run, or returns None.
    """

    kind = "EFS"

    def __init__(
        self,
        storage: RemoteStorage,
        list_quickly: Callable[[str], list[WorkspaceEntry] | None] = lambda path: None,
    ) -> None:
        self._storage = storage
        self._context, self._bucket = storage.context, storage.bucket
        self._transfers, self._open = storage.transfers, storage.open_store
        self._list_quickly = list_quickly

    @property
    def location(self) -> str:
        return f"{self.kind} {self._storage.file_system} of {self._context.env}"

    @property
    def default_archive(self) -> str:
        return f"s3://{self._bucket}/{ARCHIVE_PREFIX}"

    def ls(self, path: str = "", *, deep: bool = False) -> list[WorkspaceEntry]:
        name = relative_path(path)
        entries = None if deep else self._list_quickly(name)
        if entries is not None:
            return entries
        self._execute({"verb": "list", "path": name, "deep": deep}, ignore_progress, path)
        lines = self._transfers.read_file(LISTING_KEY).decode("ascii").splitlines()
        return [to_entry(from_line(line)) for line in lines]

    def push(
        self, sources: Sequence[Path], dest: str, on_progress: OnProgress, *, checksum: bool = False
    ) -> TransferReport:
        slash = "/" if dest.endswith("/") else ""
        paths = [self._context.folder / each for each in sources]
        sending = track_progress(_relabel(on_progress, "sending"))
        done, staged = TransferResult(), []
        for copy in plan_copies(paths, relative_path(dest) + slash, never_a_folder):
            url = self._staging_url("push", str(copy.source), copy.name)
            with translate_errors():
                store = self._open(url)
                store.verifies = True  # the transfer run compares what it fetches
                sent = archive(source_tree(copy), store, sending, checksum, overwrite=True)
            done = combine(done, sent)
            staged.append({"place": url, "below": copy.target_folder})
        if done.missing:
            return to_report("push", self.location, done)
        request = {"verb": "push", "staged": staged, "checksum": checksum}
        report = self._to_report(self._execute(request, on_progress))
        self._unstage(each["place"] for each in staged)
        left_out = tuple(map(str, done.left_out)) + report.left_out
        return replace(report, verb="push", location=self.location, left_out=left_out)

    def pull(
        self, path: str, dest: Path | None, on_progress: OnProgress, *, checksum: bool = False
    ) -> TransferReport:
        name = relative_path(path)
        url = self._staging_url("pull", name)
        answer = self._execute({"verb": "pull", "path": name, "place": url}, on_progress, path)
        staged, is_folder = self._to_report(answer), answer.get("kind") != "file"
        store = self._open(url)
        with translate_errors():
            entries = stored_entries(read_manifest(store))
        target = pull_target(name, is_folder, dest, self._context.folder)
        source, tree = receive_target(ArchiveSource(store, entries, str(target)), target, is_folder)
        with translate_errors():
            done = receive(source, tree, "", track_progress(on_progress), "pulling", checksum)
        if not staged.missing and not done.missing:
            self._unstage([url])
        report = to_report("pull", str(target), done)
        return replace(
            report, left_out=staged.left_out + report.left_out,
            missing=staged.missing + report.missing, notes=staged.notes,
        )  # fmt: skip

    def archive(
        self, to: str, on_progress: OnProgress, *, delete: bool = False, checksum: bool = False,
        overwrite: bool = False,
    ) -> TransferReport:  # fmt: skip
        url = self._archive_url(to)
        if delete:
            self._refuse_in_use()
        request = {"verb": "archive", "place": url, "delete": delete, "checksum": checksum,
                   "overwrite": overwrite}  # fmt: skip
        report = self._to_report(self._execute(request, on_progress))
        return replace(report, verb="archive", location=url)

    def restore(
        self, source: str, on_progress: OnProgress, *, partial: bool = False,
        checksum: bool = False, overwrite: bool = False,
    ) -> TransferReport:  # fmt: skip
        url = self._archive_url(source)
        request = {"verb": "restore", "place": url, "partial": partial, "checksum": checksum,
                   "overwrite": overwrite}  # fmt: skip
        report = self._to_report(self._execute(request, on_progress))
        return replace(report, verb="restore", location=url)

    def remove(self, paths: Sequence[str], on_progress: OnProgress) -> TransferReport:
        request = {"verb": "remove", "paths": [relative_path(each) for each in paths]}
        report = self._to_report(self._execute(request, on_progress))
        return replace(report, verb="rm", location=self.location)

    # --- Transfer runs ----------------------------------------------------------------------------

    def _execute(
        self, request: Mapping[str, Any], on_progress: OnProgress, path: str = ""
    ) -> dict[str, Any]:
        """Execute a request in a transfer run; return its report.

        Raises NotFound for `path`, TransferFailed, TransferWorkerFailed.
        """
        answer = self._transfers.execute(request, on_progress)
        if answer.get("absent"):
            hint = f"To list it: {self._command('ls')}"
            raise NotFound("In the workspace,", path, [], hint)
        if answer.get("error"):
            raise TransferFailed(f"{answer['error']}. {CONTINUES}")
        return answer

    def _to_report(self, answer: Mapping[str, Any]) -> TransferReport:
        cost = self._transfers.describe_cost()
        return TransferReport(
            files=answer.get("files", 0),
            size=answer.get("bytes", 0),
            unchanged=answer.get("unchanged", 0),
            removed=answer.get("removed", 0),
            left_out=tuple(answer.get("leftOut", ())),
            missing=tuple(answer.get("missing", ())),
            notes=(f"Transfer run: {cost}",) if cost else (),
        )

    def _archive_url(self, url: str) -> str:
        """Return the URL of an archive. Raises UsageError if transfer runs cannot reach it."""
        if url and not url.startswith("s3://"):
            raise UsageError(
                f"{url}: runs in AWS cannot reach this. Give s3://BUCKET/PREFIX, or copy files to "
                f"this machine: {self._command('pull')}"
            )
        return url.rstrip("/") or self.default_archive

    def _command(self, verb: str) -> str:
        return f"batchml workspace {verb} --env {self._context.env}"

    def _refuse_in_use(self) -> None:
        """Raise UsageError if runs may use the workspace: nothing is deleted under them."""
        count = self._storage.count_unfinished()
        if count:
            runs = "1 run has" if count == 1 else f"{count} runs have"
            raise UsageError(
                f"{runs} not ended in {self._context.env} and may use the workspace: nothing was "
                f"archived. Wait for them, or archive without --delete."
            )

    def _staging_url(self, *words: str) -> str:
        """Return the URL for files in transit: for equal paths the same URL, to continue there."""
        digest = hashlib.sha256("\0".join((self._context.env, *words)).encode()).hexdigest()
        return f"s3://{self._bucket}/{STAGING_PREFIX}/{digest[:24]}"

    def _unstage(self, urls: Iterable[str]) -> None:
        """Delete files that have arrived. A lifecycle rule of the bucket deletes what stays."""
        for url in urls:
            try:
                store: Store = self._open(url)
                store.delete(*store.keys(""))
            except (BatchmlError, OSError):
                continue


def _relabel(on_progress: OnProgress, doing: str) -> OnProgress:
    return lambda now: on_progress(replace(now, doing=doing))


def never_a_folder(_: str) -> bool:
    """For a workspace whose folders this machine cannot see. Transfer runs report conflicts."""
    return False


def receive_target(source: TreeSource, target: Path, is_folder: bool) -> tuple[TreeSource, Tree]:
    """Return the source and the tree that receives it; a single file gets the name of `target`."""
    if is_folder:
        return source, Tree(str(target))
    return _RenamedSource(source, target.name), Tree(str(target.parent))


class _RenamedSource:
    """A source of one file, under another name."""

    def __init__(self, source: TreeSource, name: str) -> None:
        self._source, self._name = source, name
        self._original = ""

    def entries(self, left_out: list[LeftOut]) -> Iterator[TreeEntry]:
        for entry in self._source.entries(left_out):
            self._original = entry.path
            yield entry._replace(path=self._name)

    def open(self, entry: TreeEntry) -> AbstractContextManager[OpenedFile]:
        return self._source.open(entry._replace(path=self._original))


# --- Listing in a running run ---------------------------------------------------------------------
# A run that is RUNNING has the workspace mounted and answers sooner than a transfer run.


_MAX_LISTING_RUNS = 2  # runs that are tried, one after the other
_LISTING_LIMIT = 20.0  # seconds for each


def list_in_running_run(context: "Context", path: str) -> list[WorkspaceEntry] | None:
    """List a folder of the workspace; None if no run could do it."""
    try:
        runs = running_runs(context)
    except BatchmlError:
        return None
    for run in runs[:_MAX_LISTING_RUNS]:
        try:
            result = capture_output(context, ExecTarget(run), listing_command(path), _LISTING_LIMIT)
        except BatchmlError:
            continue
        if result.code == 0:
            return read_listing(result.out)
    return None


def running_runs(context: "Context") -> "list[Run]":
    """Return the RUNNING runs of the environment that have one container."""
    existing = set(context.batch.queues())
    names = [context.queue(each) for each in context.settings.environment.queues]
    return [
        run
        for name in names
        if name in existing
        for run in context.batch.list_recent(name)
        if run.status.value == "RUNNING" and not (run.array_size or run.nodes)
    ]


def listing_command(path: str) -> tuple[str, ...]:
    """Return the command that lists a folder of the workspace inside a container."""
    command = ("python", "-m", "batchml.runtime.transfer.main", "list", MOUNT)
    return (*command, f"--below={path}") if path else command


def read_listing(output: bytes) -> list[WorkspaceEntry] | None:
    """Decode the output of `listing_command`; None if it is not a listing. Pure."""
    lines = output.decode("utf-8", "replace").splitlines()
    result = next((each for each in reversed(lines) if each.startswith(RESULT_MARK)), "")
    try:
        entries = json.loads(result.removeprefix(RESULT_MARK))["entries"]
        return [to_entry(from_line(json.dumps(each))) for each in entries]
    except (ValueError, TypeError, KeyError):
        return None
