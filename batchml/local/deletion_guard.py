"""Delete the data of a state folder, unless that would lose something that exists nowhere else."""

import errno
import os
import stat
from collections.abc import Collection, Sequence
from contextlib import suppress

from msgspec import Struct

from batchml.local.executors import record
from batchml.local.home import Home
from batchml.local.store import identity
from batchml.runtime.storage.store import StoreError
from batchml.runtime.transfer.archive import mark_freed
from batchml.runtime.transfer.archives import ArchiveStore
from batchml.runtime.transfer.manifest import ArchiveManifest, read_manifest
from batchml.runtime.transfer.parallel import TransferProgress
from batchml.runtime.transfer.restore import find_unarchived, missing_files, remove, verify
from batchml.runtime.transfer.tree import LeftOut, TransferError, Tree, TreeEntry

WORKSPACE, DATA, VOLUMES = "workspace", "data", "volumes"
NAMES = (WORKSPACE, DATA, VOLUMES)
_GONE = "its file in the archive is gone"


class DataLoss(Struct, frozen=True):
    """The files of one folder that would be lost. `why` is a reason that applies to all of them."""

    name: str  # one of NAMES
    files: tuple[str, ...]  # paths in the folder, some with a reason: `a/x: it has changed since`
    why: str = ""


def count_running(home: Home) -> int:
    """The number of running attempts."""
    if identity.read_identity(home) is None:
        return 0  # a copy: its records name the processes of another folder
    count = 0
    for folder in home.attempts.iterdir() if home.attempts.is_dir() else ():
        if not (folder / "exit.json").exists():
            attempt = record.read(folder)
            count += attempt is not None and attempt.is_alive
    return count


def find_losses(
    home: Home, archive: ArchiveStore, progress: TransferProgress | None = None
) -> list[DataLoss]:
    """The files that would be lost if the data were deleted now. `archive` is the archive of the
    workspace.

    With `progress`, the whole archive is read and verified first, which may take long.
    """
    losses = [
        _find_workspace_loss(home, archive, progress),
        _whole_folder_loss(home, DATA, "no archive holds data sets"),
        _whole_folder_loss(home, VOLUMES, "no archive holds file systems of EFS"),
    ]
    return [loss for loss in losses if loss.files]


def _find_workspace_loss(
    home: Home, archive: ArchiveStore, progress: TransferProgress | None
) -> DataLoss:
    tree = Tree(str(home.root / WORKSPACE))
    if tree.lookup("") is None:
        return DataLoss(WORKSPACE, ())
    why = ""
    try:
        manifest = read_manifest(archive)
        if not manifest.is_complete:
            why = "the archive is not complete" if manifest.exists else "there is no archive"
            manifest = ArchiveManifest({})
        lost = [LeftOut(path, _GONE) for path in missing_files(manifest, archive)]
        if progress is not None and not why and not lost:
            lost = list(verify(archive, progress).missing)
    except (TransferError, StoreError) as error:
        manifest, lost, why = ArchiveManifest({}), [], str(error)
    entries, _ = find_unarchived(tree, manifest)
    entries += [entry for entry in lost if tree.lookup(entry.path)]  # the workspace still has these
    # An empty folder is no loss, and any other folder is represented by its files.
    folders = {entry.path for entry in entries if _is_folder(tree.lookup(entry.path))}
    files = sorted(str(entry) for entry in entries if entry.path not in folders)
    return DataLoss(WORKSPACE, tuple(files), why)


def _is_folder(entry: TreeEntry | None) -> bool:
    return entry is not None and entry.kind == "folder"


def _whole_folder_loss(home: Home, name: str, why: str) -> DataLoss:
    """Count every file of a folder as lost."""
    if not (home.root / name).is_dir():
        return DataLoss(name, ())
    entries = Tree(str(home.root / name)).walk("", [])
    files = [entry.path for entry in entries if entry.is_file]
    return DataLoss(name, tuple(files), why)


def delete_data(home: Home, archive: ArchiveStore) -> None:
    """Delete the content of the workspace, the data sets and the volumes.

    The archive's manifest notes this, so that later archives keep the deleted files. Raises OSError
    for files that cannot be deleted.
    """
    manifest = _read_complete_manifest(archive)
    if manifest is not None:
        mark_freed(archive, manifest)
    for name in NAMES:
        folder = home.root / name
        if folder.is_symlink():
            raise NotADirectoryError(f"{folder} is a link, and its target is not deleted")
        for inner in list(folder.iterdir()) if folder.is_dir() else ():
            _remove(Tree(str(folder)), inner.name)


def _read_complete_manifest(archive: ArchiveStore) -> ArchiveManifest | None:
    try:
        manifest = read_manifest(archive)
    except (TransferError, StoreError):
        return None  # the user has allowed the loss
    return manifest if manifest.is_complete else None


def _remove(tree: Tree, name: str) -> None:
    """Remove an entry of a folder, through descriptors: a running container may replace a folder
    with a link meanwhile.
    """
    with tree.folder("") as at:
        _make_writable(at, name)
    missing = remove(tree, [name]).missing
    if missing:
        first = missing[0]
        raise OSError(
            errno.EBUSY, f"it cannot be deleted: {first.why}", f"{tree.root}/{first.path}"
        )


def _make_writable(at: int, name: str) -> None:
    """Give the owner all rights to a folder and the folders in it: deleting their content needs
    them.
    """
    if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
        return
    _add_owner_access(at, name)
    for _, folders, _, fd in os.fwalk(name, dir_fd=at):
        for folder in folders:
            _add_owner_access(fd, folder)


def _add_owner_access(at: int, name: str) -> None:
    with suppress(OSError):
        folder = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=at)
        try:
            if os.fstat(folder).st_mode & stat.S_IRWXU != stat.S_IRWXU:
                os.chmod(f"/proc/self/fd/{folder}", stat.S_IRWXU)
        finally:
            os.close(folder)


_SHOWN = 5  # files of a loss


def describe_losses(losses: Sequence[DataLoss], allowed: Collection[str]) -> list[str]:
    """A line for each loss that is not allowed, and lines for its first files."""
    lines = []
    for loss in losses:
        if loss.name in allowed:
            continue
        count = "1 file" if len(loss.files) == 1 else f"{len(loss.files)} files"
        lines.append(f"{loss.name}: {count} would be lost{f', {loss.why}' if loss.why else ''}")
        lines += [f"  {text}" for text in loss.files[:_SHOWN]]
        lines += [f"  and {len(loss.files) - _SHOWN} more"] if len(loss.files) > _SHOWN else []
    return lines
