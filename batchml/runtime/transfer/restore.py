"""An archive back to a tree: what is missing or another there; and whether an archive is whole."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional, Tuple

from batchml.runtime.storage.store import StoreError
from batchml.runtime.transfer.backends import Vault, digest_stored, key_of
from batchml.runtime.transfer.files import FULL, Damaged, mark_restoring
from batchml.runtime.transfer.manifest import DELETED, Book, read_book
from batchml.runtime.transfer.parallel import Account, Stopped
from batchml.runtime.transfer.receive import Opened, Result, no_room, receive
from batchml.runtime.transfer.tree import LINK, CarryError, Entry, LeftOut, Tree, leads_out, led_out

_NAMED = 10


class Incomplete(CarryError):
    """An archive that does not hold all it should."""


class ArchiveSource:
    """The entries of an archive, as `carry_receive.Source` has them."""

    def __init__(self, vault: Vault, entries: List[Entry], top: str) -> None:
        self._vault, self._entries, self._top = vault, entries, top

    def entries(self, left_out: List[LeftOut]) -> Iterator[Entry]:
        for entry in self._entries:
            if entry.kind == LINK and leads_out(entry, self._top):
                left_out.append(led_out(entry))
            else:
                yield entry

    @contextmanager
    def open(self, entry: Entry) -> Iterator[Opened]:
        key = key_of(entry.path)

        def read(start: int, length: int) -> bytes:
            block = self._vault.read(key, start, length)
            if block is None:
                raise Damaged("it is not in the archive any more")
            return block

        yield Opened(entry, read, lambda: True)


def held(book: Book, below: str = "") -> List[Entry]:
    """What a restore brings back, folders before what is in them."""
    found = [entry for entry in book.entries.values() if entry.away != DELETED]
    if book.planned is not None:
        there = {entry.path for entry in found}
        found += [e for e in book.planned.values() if not e.is_file and e.path not in there]
    if below:
        found = [e for e in found if e.path == below or e.path.startswith(f"{below}/")]
    return sorted(found, key=lambda entry: entry.path.split("/"))


def restore(
    vault: Vault,
    tree: Tree,
    account: Optional[Account] = None,
    partial: bool = False,
    checksum: bool = False,
    below: str = "",
    overwrite: bool = False,
) -> Result:
    """Bring back what an archive holds and a tree lacks, each file checked by its SHA-256.

    What the tree has in another version is newer work, perhaps: it stays and is named, unless
    `overwrite` takes the archive's. Raises Incomplete for an archive that is not complete, before
    anything is written; `partial` takes what there is. Raises Full, StoreError, OSError; the same
    call then goes on.
    """
    account = account or Account()
    book = read_book(vault)
    if not book.exists:
        raise Incomplete("there is no archive")
    entries = held(book, below)
    if below and not entries:
        raise CarryError(f"the archive holds no {below!r}")
    sizes = vault.sizes()
    lost = _lost(entries, sizes)
    gone = sorted({*book.missing(), *lost})
    if gone and not partial:
        raise Incomplete(_told(gone, bool(lost)))
    entries = [entry for entry in entries if entry.path not in lost]
    try:
        mark_restoring(tree, True)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise no_room(error, tree.root, entries) from error
    source = ArchiveSource(vault, entries, tree.root)
    done = receive(source, tree, "", account, "restoring", checksum, keeps=not overwrite)
    left_out = {each.path for each in done.left_out}
    here = all(each.path in left_out or tree.look(each.path) for each in entries)
    if here and not below:
        mark_restoring(tree, False)
    return done._replace(
        missing=tuple(LeftOut(path, "the archive does not hold it") for path in gone) + done.missing
    )


def _lost(entries: List[Entry], sizes: Dict[str, int]) -> List[str]:
    """Files that the papers name, and that are not there with their size."""
    return [e.path for e in entries if e.is_file and sizes.get(key_of(e.path)) != e.size]


def missing_of(book: Book, vault: Vault) -> List[str]:
    """The files that an archive should hold, and does not, by its papers and by what lies there."""
    return sorted({*book.missing(), *_lost(held(book), vault.sizes())})


def _told(gone: List[str], is_lost: bool) -> str:
    names = ", ".join(map(repr, gone[:_NAMED]))
    more = f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else ""
    why = "files of it are gone" if is_lost else "it was cut off"
    return f"the archive is not complete, {why}: it lacks {names}{more}"


def verify(vault: Vault, account: Optional[Account] = None) -> Result:
    """Read all of an archive back, and compare it with its papers. Raises StoreError."""
    told = account = account or Account()
    book = read_book(vault)
    if not book.exists:
        raise Incomplete("there is no archive")
    files = [entry for entry in held(book) if entry.is_file]
    account.begin("reading back", len(files), sum(entry.size for entry in files))
    missing = [LeftOut(path, "it was not sent yet") for path in book.missing()]
    whole = size = 0

    def look(entry: Entry) -> str:
        def moved(count: int, _: bool) -> None:
            told.moved(entry.path, count)

        try:
            digest = digest_stored(vault, key_of(entry.path), entry.size, moved)
        except Stopped:
            raise
        except Damaged as error:
            return str(error)
        except StoreError as error:
            if error.temporary:
                raise
            return str(error)
        told.done(entry.path)
        return "" if digest == entry.sha256 else "its SHA-256 is another than when it was sent"

    for some in account.each(look, files):
        for entry, why in some:
            if why:
                missing.append(LeftOut(entry.path, why))
            else:
                whole, size = whole + 1, size + entry.size
    return Result(whole, size, missing=tuple(missing))


def lacking(tree: Tree, book: Book) -> Tuple[List[LeftOut], List[LeftOut]]:
    """What a tree has that an archive has not in this state, and what is left out in any case."""
    left_out: List[LeftOut] = []
    found: List[LeftOut] = []
    for entry in tree.walk("", left_out):
        there = book.entries.get(entry.path)
        if there is None or there.away == DELETED or there.kind != entry.kind:
            found.append(LeftOut(entry.path, "it is not in the archive"))
        elif entry.is_file and (entry.size, entry.mtime_ns, entry.stamp) != (
            there.size, there.mtime_ns, there.stamp,
        ):  # fmt: skip
            found.append(LeftOut(entry.path, "it has changed since"))
        elif entry.kind == LINK and entry.target != there.target:
            found.append(LeftOut(entry.path, "it leads elsewhere since"))
    found += [each for each in left_out if each.is_loss]
    return found, [each for each in left_out if not each.is_loss]
