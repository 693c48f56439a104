"""The workspace of `local`: a folder of this machine."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from batchml.errors import NotFound, TransferFailed, UsageError
from batchml.model.environment import (
    OnProgress,
    TransferReport,
    TransferStatus,
    WorkspaceEntry,
    relative_path,
)
from batchml.runtime.storage.store import StoreError
from batchml.runtime.transfer.archive import archive, archive_and_free
from batchml.runtime.transfer.archives import ArchiveStore
from batchml.runtime.transfer.backends import open_archive
from batchml.runtime.transfer.main import list_folder
from batchml.runtime.transfer.parallel import TransferProgress
from batchml.runtime.transfer.receive import FolderSource, TransferResult, combine, receive
from batchml.runtime.transfer.restore import ArchiveIncomplete, remove, restore
from batchml.runtime.transfer.tree import FOLDER, LeftOut, TransferError, Tree, TreeEntry, join_path
from batchml.workspace.base import PlannedCopy, plan_copies, pull_target

CONTINUES = "The same command continues where it stopped."


class LocalWorkspace:
    """A workspace in the state folder. It implements `WorkspaceBackend`.

    `home` is the state folder, `here` the user's folder. `count_running` counts unfinished runs.
    """

    def __init__(
        self, home: Path, here: Path, count_running: Callable[[], int] = lambda: 0
    ) -> None:
        self._root = home / "workspace"
        self._default = home / "archive"
        self._here = here
        self._count_running = count_running
        self._tree = Tree(str(self._root))

    @property
    def location(self) -> str:
        return str(self._root)

    @property
    def default_archive(self) -> str:
        return str(self._default)

    def ls(self, path: str = "", *, deep: bool = False) -> list[WorkspaceEntry]:
        self._root.mkdir(parents=True, exist_ok=True)
        name = self._resolve(path)
        try:
            return [to_entry(each) for each in list_folder(self._tree, name, deep)]
        except FileNotFoundError:
            raise _no_such_path(path) from None

    def push(
        self, sources: Sequence[Path], dest: str, on_progress: OnProgress, *, checksum: bool = False
    ) -> TransferReport:
        self._root.mkdir(parents=True, exist_ok=True)
        paths = [self._here / each for each in sources]
        slash = "/" if dest.endswith("/") else ""
        done = TransferResult()
        for copy in plan_copies(paths, self._resolve(dest) + slash, self._is_folder):
            self._refuse_parent(copy)
            done = combine(done, self._push(copy, on_progress, checksum))
        return to_report("push", self.location, done)

    def _push(self, copy: PlannedCopy, on_progress: OnProgress, checksum: bool) -> TransferResult:
        top = copy.source if copy.is_folder else copy.source.parent
        source = FolderSource(Tree(str(top)), "" if copy.is_folder else copy.source.name)
        progress = track_progress(on_progress)
        with translate_errors():
            done = receive(source, self._tree, copy.name, progress, "pushing", checksum)
        return _prefixed(done, copy.name if copy.is_folder else "")

    def pull(
        self, path: str, dest: Path | None, on_progress: OnProgress, *, checksum: bool = False
    ) -> TransferReport:
        name = self._resolve(path)
        found = self._tree.lookup(name)
        if found is None:
            raise _no_such_path(path)
        is_folder = found.kind == FOLDER
        target = pull_target(relative_path(path) or name, is_folder, dest, self._here)
        source = FolderSource(self._tree, name)
        tree, below = (target, "") if is_folder else (target.parent, target.name)
        progress = track_progress(on_progress)
        with translate_errors():
            done = receive(source, Tree(str(tree)), below, progress, "pulling", checksum)
        return to_report("pull", str(target), done)

    def archive(
        self, to: str, on_progress: OnProgress, *, delete: bool = False, checksum: bool = False,
        overwrite: bool = False,
    ) -> TransferReport:  # fmt: skip
        if delete:
            self._refuse_in_use("nothing was archived")
        self._root.mkdir(parents=True, exist_ok=True)
        location, store = self.open_archive(to)
        progress = track_progress(on_progress)
        with translate_errors():
            if not delete:
                done = archive(self._tree, store, progress, checksum, overwrite=overwrite)
            else:
                done = archive_and_free(
                    self._tree, store, progress, checksum, overwrite,
                    lambda: self._refuse_in_use("all files are archived, and nothing was freed"),
                )  # fmt: skip
        return to_report("archive", location, done)

    def restore(
        self, source: str, on_progress: OnProgress, *, partial: bool = False,
        checksum: bool = False, overwrite: bool = False,
    ) -> TransferReport:  # fmt: skip
        location, store = self.open_archive(source)
        progress = track_progress(on_progress)
        with translate_errors():
            try:
                done = restore(store, self._tree, progress, partial, checksum, overwrite=overwrite)
            except ArchiveIncomplete as error:
                raise TransferFailed(
                    f"{location}: {error}. Nothing was written. Complete it where the files are "
                    "(batchml workspace archive), or restore what it holds: --partial"
                ) from error
        return to_report("restore", location, done)

    def remove(self, paths: Sequence[str], on_progress: OnProgress) -> TransferReport:
        return to_report("rm", self.location, remove(self._tree, map(self._resolve_parent, paths)))

    def open_archive(self, given: str = "") -> tuple[str, ArchiveStore]:
        """Return the location of an archive, and its store. Raises UsageError."""
        location = given or self.default_archive
        if not location.startswith("s3://"):
            if "://" in location:
                raise UsageError(f"{location}: an archive is a folder, or s3://BUCKET/PREFIX.")
            location = os.path.realpath(self._here / location)
            root = os.path.realpath(self._root)
            if f"{location}/".startswith(f"{root}/") or f"{root}/".startswith(f"{location}/"):
                raise UsageError(
                    f"{location} and the workspace contain each other: name another folder."
                )
        with translate_errors():
            return location, open_archive(location, os.environ)

    def _refuse_in_use(self, so_far: str) -> None:
        """Raise UsageError if runs use the workspace: nothing is deleted under them."""
        if count := self._count_running():
            runs = "1 run is" if count == 1 else f"{count} runs are"
            raise UsageError(
                f"{runs} using the workspace and its checkpoints: {so_far}. Wait for them "
                "(batchml wait), or archive without --delete."
            )

    def _resolve(self, path: str) -> str:
        """Make a path relative to the workspace, and follow links. Raises UsageError."""
        real = os.path.realpath(self._root)
        end = os.path.realpath(os.path.join(real, self._relative(path)))
        if end != real and not end.startswith(f"{real}/"):
            raise UsageError(f"{path!r} leads out of the workspace, to {end}.")
        return os.path.relpath(end, real) if end != real else ""

    def _resolve_parent(self, path: str) -> str:
        """Like `_resolve`, but do not follow a link at the end of the path."""
        above, _, name = self._relative(path).rpartition("/")
        return join_path(self._resolve(above), name)

    def _relative(self, path: str) -> str:
        """Make a path relative to the workspace, without following links. Raises UsageError."""
        for root in (os.path.realpath(self._root), str(self._root)):
            if f"{path}/".startswith(f"{root}/"):  # a run prints absolute paths
                return relative_path(os.path.relpath(path, root))
        return relative_path(path)

    def _is_folder(self, name: str) -> bool:
        found = self._tree.lookup(name)
        return found is not None and found.kind == FOLDER

    def _refuse_parent(self, copy: PlannedCopy) -> None:
        """Raise UsageError for a source that contains the workspace."""
        root, source = os.path.realpath(self._root), str(copy.source)
        if copy.is_folder and f"{root}/".startswith(f"{source.rstrip('/')}/"):
            raise UsageError(f"{source} contains the workspace itself: push other folders of it.")


def track_progress(on_progress: OnProgress) -> TransferProgress:
    return TransferProgress(lambda now: on_progress(TransferStatus(*now)))


def to_entry(entry: TreeEntry) -> WorkspaceEntry:
    return WorkspaceEntry(*entry[:7])  # type: ignore[arg-type]


def to_report(verb: str, location: str, done: TransferResult) -> TransferReport:
    return TransferReport(
        verb, location, done.files, done.size, done.unchanged, done.removed,
        tuple(map(str, done.left_out)), tuple(map(str, done.missing)),
    )  # fmt: skip


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn the errors of the transfer package into TransferFailed."""
    try:
        yield
    except StoreError as error:
        hint = ""
        if not os.environ.get("AWS_ACCESS_KEY_ID") and "key" in str(error):
            hint = '\nTo give it keys: eval "$(aws configure export-credentials --format env)"'
        raise TransferFailed(f"{error}. {CONTINUES}{hint}") from error
    except TransferError as error:
        raise TransferFailed(f"{error}.") from error


def _no_such_path(path: str) -> NotFound:
    return NotFound("In the workspace,", path, [], "To list it: batchml workspace ls")


def _prefixed(done: TransferResult, above: str) -> TransferResult:
    """Make the paths of a result relative to the workspace."""

    def prefix(names: tuple[LeftOut, ...]) -> tuple[LeftOut, ...]:
        return tuple(each._replace(path=join_path(above, each.path)) for each in names)

    return done._replace(left_out=prefix(done.left_out), missing=prefix(done.missing))
