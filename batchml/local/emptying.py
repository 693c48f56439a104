"""Delete the data of a state folder, unless that would lose what is nowhere else."""

import os
import shutil
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from batchml.local.executors import record
from batchml.local.home import Home
from batchml.runtime.carry_archive import mark_freed
from batchml.runtime.carry_book import Book, read_book
from batchml.runtime.carry_crew import Account
from batchml.runtime.carry_restore import lacking, missing_of, verify
from batchml.runtime.carry_tree import CarryError, Entry, LeftOut, Tree
from batchml.runtime.carry_vaults import Vault
from batchml.runtime.store import StoreError

WORKSPACE, DATA = "workspace", "data"
NAMES = (WORKSPACE, DATA)
_GONE = "its file in the archive is gone"


class Loss(Struct, frozen=True):
    """What would be lost of a folder: the things in it, each with the reason."""

    name: str  # of NAMES
    things: tuple[str, ...]
    why: str = ""


def running(home: Home) -> int:
    """How many attempts are going on."""
    found = 0
    for folder in home.attempts.iterdir() if home.attempts.is_dir() else ():
        if not (folder / "exit.json").exists():
            attempt = record.read(folder)
            found += attempt is not None and attempt.is_alive
    return found


def losses(home: Home, vault: Vault, account: Account | None = None) -> list[Loss]:
    """What deleting the data now would lose. The archive of the workspace is at `vault`.

    With an account all of that is read back first, which may take long.
    """
    found = [_of_workspace(home, vault, account), _of_data(home)]
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


def _of_data(home: Home) -> Loss:
    """Data sets are in no archive."""
    left_out: list[LeftOut] = []
    files = [each.path for each in Tree(str(home.root / DATA)).walk("", left_out) if each.is_file]
    if not (home.root / DATA).is_dir():
        return Loss(DATA, ())
    return Loss(DATA, tuple(files), "no archive holds data sets")


def empty(home: Home, vault: Vault) -> None:
    """Delete what lies in the workspace and among the data sets.

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
            _remove(inner)


def _complete(vault: Vault) -> Book | None:
    try:
        book = read_book(vault)
    except (CarryError, StoreError):
        return None  # its loss was allowed
    return book if book.is_complete else None


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return

    def again(call: Any, name: str, _: object) -> None:
        """A folder that may not be written is made so first."""
        above = os.path.dirname(name)
        for folder in (above, name):
            if not os.path.islink(folder) and os.path.isdir(folder):
                os.chmod(folder, stat.S_IRWXU)
        call(name) if call is not os.open else shutil.rmtree(name)

    shutil.rmtree(path, onerror=again)


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
