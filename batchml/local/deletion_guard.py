"""Delete the data of a state folder, unless that would lose what is nowhere else."""

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
from batchml.runtime.transfer.backends import Vault
from batchml.runtime.transfer.manifest import Book, read_book
from batchml.runtime.transfer.parallel import Account
from batchml.runtime.transfer.remove import remove
from batchml.runtime.transfer.restore import lacking, missing_of, verify
from batchml.runtime.transfer.tree import CarryError, Entry, LeftOut, Tree

WORKSPACE, DATA, VOLUMES = "workspace", "data", "volumes"
NAMES = (WORKSPACE, DATA, VOLUMES)
_GONE = "its file in the archive is gone"


class Loss(Struct, frozen=True):
    """What would be lost of a folder: the things in it, each with the reason."""

    name: str  # of NAMES
    things: tuple[str, ...]
    why: str = ""


def running(home: Home) -> int:
    """How many attempts are going on."""
    found = 0
    if identity.of(home) is None:  # a copy: its records name the processes of another folder
        return 0
    for folder in home.attempts.iterdir() if home.attempts.is_dir() else ():
        if not (folder / "exit.json").exists():
            attempt = record.read(folder)
            found += attempt is not None and attempt.is_alive
    return found


def losses(home: Home, vault: Vault, account: Account | None = None) -> list[Loss]:
    """What deleting the data now would lose. The archive of the workspace is at `vault`.

    With an account all of that is read back first, which may take long.
    """
    found = [
        _of_workspace(home, vault, account),
        _archived_nowhere(home, DATA, "no archive holds data sets"),
        _archived_nowhere(home, VOLUMES, "no archive holds file systems of EFS"),
    ]
    return [loss for loss in found if loss.things]


def _of_workspace(home: Home, vault: Vault, account: Account | None) -> Loss:
    tree = Tree(str(home.root / WORKSPACE))
    if tree.look("") is None:
        return Loss(WORKSPACE, ())
    why = ""
    try:
        book = read_book(vault)
        if not book.is_complete:
            why = "the archive is not complete" if book.exists else "there is no archive"
            book = Book({})
        lost = [LeftOut(each, _GONE) for each in missing_of(book, vault)]
        if account is not None and not why and not lost:
            lost = list(verify(vault, account).missing)
    except (CarryError, StoreError) as error:
        book, lost, why = Book({}), [], str(error)
    things, _ = lacking(tree, book)
    things += [each for each in lost if tree.look(each.path)]  # not what was lost before
    # An empty folder is no loss, and one that is not is named by what is in it.
    folders = {each.path for each in things if _is_folder(tree.look(each.path))}
    files = sorted(str(each) for each in things if each.path not in folders)
    return Loss(WORKSPACE, tuple(files), why)


def _is_folder(entry: Entry | None) -> bool:
    return entry is not None and entry.kind == "folder"


def _archived_nowhere(home: Home, name: str, why: str) -> Loss:
    """All files of a folder would be lost."""
    if not (home.root / name).is_dir():
        return Loss(name, ())
    files = [each.path for each in Tree(str(home.root / name)).walk("", []) if each.is_file]
    return Loss(name, tuple(files), why)


def empty(home: Home, vault: Vault) -> None:
    """Delete what lies in the workspace, among the data sets and in volumes.

    The archive is told: later ones keep what it holds. Raises OSError for what cannot be deleted.
    """
    book = _complete(vault)
    if book is not None:
        mark_freed(vault, book)
    for name in NAMES:
        folder = home.root / name
        if folder.is_symlink():
            raise NotADirectoryError(f"{folder} is a link: what it leads to is not ours to empty")
        for inner in list(folder.iterdir()) if folder.is_dir() else ():
            _remove(Tree(str(folder)), inner.name)


def _complete(vault: Vault) -> Book | None:
    try:
        book = read_book(vault)
    except (CarryError, StoreError):
        return None  # its loss was allowed
    return book if book.is_complete else None


def _remove(tree: Tree, name: str) -> None:
    """By descriptors: a container that goes on may put a link in the place of a folder."""
    with tree.folder("") as at:
        _open_to_us(at, name)
    missing = remove(tree, [name]).missing
    if missing:
        first = missing[0]
        raise OSError(
            errno.EBUSY, f"it cannot be deleted: {first.why}", f"{tree.root}/{first.path}"
        )


def _open_to_us(at: int, name: str) -> None:
    """What is in a folder can be deleted only where the folder may be read and written."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
        return
    _let_write(at, name)
    for _, folders, _, fd in os.fwalk(name, dir_fd=at):
        for each in folders:
            _let_write(fd, each)


def _let_write(at: int, name: str) -> None:
    with suppress(OSError):
        found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=at)
        try:
            if os.fstat(found).st_mode & stat.S_IRWXU != stat.S_IRWXU:
                os.chmod(f"/proc/self/fd/{found}", stat.S_IRWXU)
        finally:
            os.close(found)


def told(found: Sequence[Loss], allowed: Collection[str], most: int = 5) -> list[str]:
    """A line or more for each loss that is not allowed."""
    lines = []
    for loss in found:
        if loss.name in allowed:
            continue
        count = "1 thing" if len(loss.things) == 1 else f"{len(loss.things)} things"
        lines.append(f"{loss.name}: {count} would be lost{f', {loss.why}' if loss.why else ''}")
        lines += [f"  {text}" for text in loss.things[:most]]
        lines += [f"  and {len(loss.things) - most} more"] if len(loss.things) > most else []
    return lines
