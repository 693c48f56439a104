"""The interface of a workspace, and the plan of what is copied into it."""

import os
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
        """List a folder by name; with `deep` everything below it. For a file, return the file."""

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
        """Copy a file or folder out of the workspace; None: into the current folder."""

    def archive(
        self, to: str, on_progress: OnProgress, *, delete: bool = False, checksum: bool = False,
        overwrite: bool = False,
    ) -> TransferReport:  # fmt: skip
        """Bring the archive at `to` (default: `default_archive`) up to date with the workspace.

        It is complete if the report has nothing missing. `delete` then frees the archived files.
        `overwrite` replaces freed files of the archive whose names the workspace uses again.
        """

    def restore(
        self, source: str, on_progress: OnProgress, *, partial: bool = False,
        checksum: bool = False, overwrite: bool = False,
    ) -> TransferReport:  # fmt: skip
        """Copy missing files back from a complete archive; `partial`: from any archive.

        `overwrite` replaces files that differ from the archive, which else stay and are reported.
        """

    def remove(self, paths: Sequence[str], on_progress: OnProgress) -> TransferReport:
        """Delete files and folders for good; a link itself. `removed` counts the files."""


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
    """Decide the name of each source in the workspace; `dest` is relative to it, may end with `/`.

    Unlike cp it gives the same answer a second time: a folder that was pushed as `sets` is not
    pushed into `sets`. Raises UsageError with all mistakes.
    """
    target = dest.strip("/")
    goes_into = not target or dest.endswith("/") or len(sources) > 1
    found, wrong = [], []
    for source in sources:
        real = Path(os.path.realpath(source))
        name = os.path.basename(os.path.abspath(source))
        if not real.exists():
            wrong.append(f"{source} does not exist.")
        elif not (real.is_dir() or real.is_file()):
            wrong.append(f"{source} is neither a file nor a folder.")
        elif goes_into and not name:
            wrong.append(f"{source} has no name: give the destination a name.")
        else:
            is_inside = goes_into or (real.is_file() and is_folder(target))
            path = f"{target}/{name}".strip("/") if is_inside else target
            found.append(PlannedCopy(real, path, real.is_dir()))
    names = [copy.name for copy in found]
    wrong += [f"Two of the sources would become {name}." for name in _duplicates(names)]
    if wrong:
        raise UsageError("Nothing was pushed:\n" + "\n".join(f"  - {each}" for each in wrong))
    return found


def _duplicates(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def pull_target(name: str, is_folder: bool, dest: Path | None, here: Path) -> Path:
    """Decide the path on this machine of something that is pulled.

    A folder becomes `dest`, or adds its files to an existing `dest`. A file goes into an existing
    folder `dest`, or becomes `dest`. Path drops a final slash: to force a folder give `dest/.`.
    """
    if dest is None:
        return here / (name.rpartition("/")[2] or "workspace")
    target = here / dest
    return target / name.rpartition("/")[2] if not is_folder and target.is_dir() else target
