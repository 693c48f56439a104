"""The interface of a workspace, and rules for the names of files that are copied."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from batchml.errors import UsageError
from batchml.model.environment import OnProgress, TransferReport, WorkspaceEntry
from batchml.runtime.transfer.tree import Tree
from batchml.runtime.transfer.worker import SingleFileTree


class WorkspaceBackend(Protocol):
    """The folder that all runs of an environment share, on some kind of storage.

    Paths are relative to the workspace, with `/` as separator; `""` is the workspace itself, and
    `/workspace/x` means `x`. All methods raise UsageError for a path that leads out of it, NotFound
    for a path that does not exist, and TransferFailed for an interrupted transfer: then the same
    call continues it.
    """

    @property
    def location(self) -> str:
        """Where the workspace is, for messages: a folder of this machine, a file system."""

    @property
    def default_archive(self) -> str:
        """Where `archive` and `restore` go by default: a folder, or s3://BUCKET/PREFIX."""

    def ls(self, path: str = "", *, deep: bool = False) -> list[WorkspaceEntry]:
        """List a folder, sorted by name; with `deep` also its subfolders. A file lists itself."""

    def push(
        self, sources: Sequence[Path], dest: str, on_progress: OnProgress, *, checksum: bool = False
    ) -> TransferReport:
        """Copy files and folders of this machine into the workspace.

        One source becomes `dest`. Several sources, or a `dest` that ends with a slash, go into the
        folder `dest`. Without `dest` each keeps its name. `checksum` compares contents of files
        that have the same size and time.
        """

    def pull(
        self, path: str, dest: Path | None, on_progress: OnProgress, *, checksum: bool = False
    ) -> TransferReport:
        """Copy a file or folder out of the workspace; without `dest` into the current folder."""

    def archive(
        self, to: str, on_progress: OnProgress, *, delete: bool = False, checksum: bool = False,
        overwrite: bool = False,
    ) -> TransferReport:  # fmt: skip
        """Bring the archive at `to` (default: `default_archive`) up to date with the workspace.

        The archive is complete if the report has no missing files; then `delete` frees the archived
        files. `overwrite` replaces freed files of the archive whose names the workspace uses again.
        """

    def restore(
        self, source: str, on_progress: OnProgress, *, partial: bool = False,
        checksum: bool = False, overwrite: bool = False,
    ) -> TransferReport:  # fmt: skip
        """Copy missing files back from a complete archive; `partial`: from any archive.

        `overwrite` replaces files that differ from the archive; else they stay and are reported.
        """

    def remove(self, paths: Sequence[str], on_progress: OnProgress) -> TransferReport:
        """Delete files, folders and links for good. `removed` of the report counts the files."""


# --- Copy plan ------------------------------------------------------------------------------------


class PlannedCopy(Struct, frozen=True):
    """One source and its name in the workspace."""

    source: Path  # on this machine, with links resolved
    name: str
    is_folder: bool

    @property
    def target_folder(self) -> str:
        """The folder of the workspace that receives the files."""
        return self.name if self.is_folder else self.name.rpartition("/")[0]


def source_tree(copy: PlannedCopy) -> Tree:
    """Return the tree to copy: a folder, or one file under its new name."""
    if copy.is_folder:
        return Tree(str(copy.source))
    return SingleFileTree(str(copy.source.parent), copy.source.name, copy.name.rpartition("/")[2])


def plan_copies(
    sources: Sequence[Path], dest: str, is_folder: Callable[[str], bool]
) -> list[PlannedCopy]:
    """Decide the name of each source in the workspace. `dest` is relative to it; `/` may follow.

    Unlike with cp, the name is the same the second time: a folder that was pushed as `sets` is not
    then pushed into `sets`. Raises UsageError with all mistakes.
    """
    target = dest.strip("/")
    goes_into = not target or dest.endswith("/") or len(sources) > 1
    copies, mistakes = [], []
    for source in sources:
        real = Path(os.path.realpath(source))
        name = os.path.basename(os.path.abspath(source))
        if not real.exists():
            mistakes.append(f"{source} does not exist.")
        elif not (real.is_dir() or real.is_file()):
            mistakes.append(f"{source} is neither a file nor a folder.")
        elif goes_into and not name:
            mistakes.append(f"{source} has no name: give the destination a name.")
        else:
            is_inside = goes_into or (real.is_file() and is_folder(target))
            path = f"{target}/{name}".strip("/") if is_inside else target
            copies.append(PlannedCopy(real, path, real.is_dir()))
    counts = Counter(copy.name for copy in copies)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    mistakes += [f"Two of the sources would become {name}." for name in repeated]
    if mistakes:
        raise UsageError("Nothing was pushed:\n" + "\n".join(f"  - {each}" for each in mistakes))
    return copies


def pull_target(name: str, is_folder: bool, dest: Path | None, here: Path) -> Path:
    """Decide the path on this machine of a file or folder that is pulled.

    A folder becomes `dest`, or adds its files to an existing `dest`. A file goes into an existing
    folder `dest`, or becomes `dest`.
    """
    if dest is None:
        return here / (name.rpartition("/")[2] or "workspace")
    target = here / dest
    return target / name.rpartition("/")[2] if not is_folder and target.is_dir() else target
