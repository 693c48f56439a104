"""A tree to an archive: only what is new or changed is sent, and all that was sent is read back.

Unchanged is what the archive's manifest has with this size, time, inode and ctime, and the archive
with this size. Where only inode or ctime are others, as after a restore, the content decides.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Callable, Collection, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.storage.store import go_on
from batchml.runtime.transfer.backends import Moved, Vault, digest_stored, key_of
from batchml.runtime.transfer.files import FULL, Changed, Damaged, digest_of, is_restoring
from batchml.runtime.transfer.manifest import (
    COMPLETE,
    DELETED,
    FREED,
    GOING,
    OTHERS,
    Book,
    Entries,
    Writer,
    read_book,
)
from batchml.runtime.transfer.parallel import Account, Stopped
from batchml.runtime.transfer.receive import Result, no_room
from batchml.runtime.transfer.tree import (
    FOLDER,
    CarryError,
    Entry,
    LeftOut,
    Reader,
    Tree,
    is_as_before,
)

_TRIES = 2
_ROUNDS = 3  # over a tree in which something changes meanwhile
_CHANGES = "it changes while it is archived"
_NAMED = 5


class Plan(NamedTuple):
    """What an archive has to do for a tree. Pure values."""

    kept: Tuple[Entry, ...]  # as they are, with their SHA-256
    looked: Tuple[Entry, ...]  # files that may be what is there: their content says
    sent: Tuple[Entry, ...]
    away: Tuple[Entry, ...]  # of the archive alone

    @property
    def entries(self) -> List[Entry]:
        return [*self.kept, *self.looked, *self.sent, *self.away]


def plan(
    now: List[Entry],
    known: Entries,
    sizes: Dict[str, int],
    checksum: bool = False,
    comes_back: bool = False,
) -> Plan:
    """Decide from the tree, from what the archive's papers say, and from what lies there.

    `comes_back`: what the tree lacks is on its way back.
    """
    kept: List[Entry] = []
    looked: List[Entry] = []
    sent: List[Entry] = []
    for entry in now:
        if not entry.is_file:
            kept.append(entry)
        elif not _may_be(entry, known.get(entry.path), sizes):
            sent.append(entry)
        else:
            same = entry._replace(sha256=known[entry.path].sha256)
            is_sure = not checksum and entry.stamp == known[entry.path].stamp
            (kept if is_sure else looked).append(same)
    paths = {entry.path: entry for entry in now}
    # A tree without a file is a new disk, or one that was emptied: nobody deleted these one by one.
    is_work = any(entry.is_file for entry in now) and not comes_back
    reason = DELETED if is_work else FREED
    away = [_gone(entry, reason) for path, entry in known.items() if path not in paths]
    return Plan(tuple(kept), tuple(looked), tuple(sent), tuple(_room(away, paths)))


def _may_be(entry: Entry, there: Optional[Entry], sizes: Dict[str, int]) -> bool:
    """Whether a file is, by all that is quickly known, what the archive has."""
    is_known = there is not None and is_as_before(entry, there)
    return is_known and sizes.get(key_of(entry.path)) == entry.size


def _gone(entry: Entry, reason: str) -> Entry:
    """One that the tree has no more. What was freed comes back; what somebody deleted does not."""
    return entry if entry.away else entry._replace(away=reason)


def clashes(freed: Entries, found: Plan) -> List[Entry]:
    """Freed files, of which the archive has the only copy, where the tree has something else now.

    Those of the same size and kind may have the same content. Pure.
    """
    stays = {entry.path for entry in found.away}
    same = {entry.path: entry.sha256 for entry in (*found.kept, *found.looked)}
    return [
        entry
        for path, entry in freed.items()
        if path not in stays and same.get(path) != entry.sha256
    ]


def _room(away: List[Entry], now: Entries) -> List[Entry]:
    """Without those that are where something else is now: a file that became a folder."""
    above = {folder for path in now for folder in _above(path)}
    return [
        entry
        for entry in away
        if (entry.kind == FOLDER or entry.path not in above)
        and not any(folder in now and now[folder].kind != FOLDER for folder in _above(entry.path))
    ]


def _above(path: str) -> List[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def archive(
    tree: Tree,
    vault: Vault,
    account: Optional[Account] = None,
    checksum: bool = False,
    sends: bool = True,
    overwrite: bool = False,
) -> Result:
    """Bring an archive to what a tree holds. It is complete if the result has nothing missing.

    Without `sends` nothing is written but papers: what another has brought there is read back.
    Raises CarryError where a file that was freed would be replaced by another one, unless
    `overwrite` says so. Raises Full, StoreError, OSError; the same call then goes on.
    """
    account = account or Account()
    with vault.alone():
        work = _Work(tree, vault, account, checksum, sends, overwrite)
        work.begin()
        for _ in range(_ROUNDS):
            if not work.round():
                break
        return work.end()


class _Work:
    def __init__(
        self, tree: Tree, vault: Vault, account: Account, checksum: bool, sends: bool,
        overwrite: bool,
    ) -> None:  # fmt: skip
        self._tree, self._vault, self._account = tree, vault, account
        self._checksum, self._sends = checksum, sends
        self._book = read_book(vault)
        self._known: Entries = dict(self._book.entries)
        guarded = sends and not overwrite
        self._freed: Entries = {
            path: entry for path, entry in self._known.items()
            if guarded and entry.is_file and entry.away == FREED
        }  # fmt: skip
        self._writer = Writer(vault, self._book)
        self._sizes: Dict[str, int] = {}
        self._left_out: List[LeftOut] = []
        self._missing: Dict[str, str] = {}
        self._plan = Plan((), (), (), ())
        self._fresh: Dict[str, int] = {}  # what was sent, and its bytes
        self._at = 0.0  # when the tree was looked at last
        self._has_begun = False
        self._passes = 1 if vault.proves else 2  # over each file, for who waits: there and back

    def begin(self) -> None:
        self._sizes = self._vault.sizes()
        self._look()

    def _look(self) -> None:
        self._left_out = []
        self._at = time.time()
        now = list(self._tree.walk("", self._left_out))
        back = is_restoring(self._tree)
        self._plan = plan(now, self._known, self._sizes, self._checksum, back)

    def round(self) -> bool:
        """Send what is to be sent, and look again; whether there is more."""
        if self._plan.looked:
            self._read_what_may_be_there()
        if self._freed:
            self._keep_freed()
        coming = list(self._plan.sent)
        self._missing = {}
        if coming and not self._has_begun:
            self._writer.begin([entry for entry in self._plan.entries if entry.away != DELETED])
            self._has_begun = True
        if coming and self._sends:
            self._make_room(coming)
        size = self._passes * sum(entry.size for entry in coming)
        self._account.begin("archiving", len(coming), size)
        try:
            for some in self._account.each(self._bring, coming):
                self._note(some)
        except OSError as error:
            if error.errno in FULL:
                left = [each for each in coming if each.path not in self._fresh]
                raise no_room(error, "the archive, which is not complete", left) from error
            raise
        if not coming:
            return False
        self._look()
        return any(entry.path not in self._missing for entry in self._to_do())

    def _keep_freed(self) -> None:
        """Raise CarryError where the only copy of a file would go."""
        now = {entry.path: entry for entry in self._plan.sent}
        found = []
        for entry in clashes(self._freed, self._plan):
            there = now.get(entry.path)
            same_size = there is not None and there.size == entry.size
            if not (same_size and self._compared(entry, False)):
                found.append(entry.path)
        if found:
            more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            raise CarryError(
                f"the archive has the only copy of what was freed, and the workspace others of "
                f"these names now: {', '.join(map(repr, sorted(found)[:_NAMED]))}{more}. Nothing "
                "of them was sent. Keep both: move these away and restore, or archive to another "
                "place; or let the freed ones go: --overwrite"
            )

    def _read_what_may_be_there(self) -> None:
        """Before anything is sent: an archive that is complete stays so if nothing has changed."""
        looked = self._plan.looked
        self._account.begin("comparing", len(looked), sum(entry.size for entry in looked))
        for some in self._account.each(self._compared, looked):
            for entry, found in some:
                if found is None:
                    self._known.pop(entry.path, None)  # to be sent
                else:
                    self._known[entry.path] = found
        self._checksum = False  # once is enough
        self._look()

    def _compared(self, entry: Entry, told: bool = True) -> Optional[Entry]:
        """A file as the archive has it, or None where that has another content."""
        try:
            reader = Reader(self._tree, entry.path)
        except OSError:
            return None  # told of where it is to be sent
        try:
            same = digest_of(reader.fd, reader.entry.size) == entry.sha256
            if same and self._checksum:
                key, size = key_of(entry.path), reader.entry.size
                same = digest_stored(self._vault, key, size, lambda *_: None) == entry.sha256
            if not same or reader.has_changed():
                return None
            if told:
                self._account.moved(entry.path, entry.size, True)
                self._account.done(entry.path)
            return reader.entry._replace(sha256=entry.sha256)
        except Damaged:
            return None
        finally:
            reader.close()

    def _to_do(self) -> List[Entry]:
        return [*self._plan.looked, *self._plan.sent]

    def _note(self, some: List[Tuple[Entry, Tuple[Optional[Entry], str, bool]]]) -> None:
        fresh = []
        for entry, (done, why, was_sent) in some:
            if done is None:
                self._missing[entry.path] = why
                self._known.pop(entry.path, None)
                continue
            fresh.append(done)
            self._known[done.path] = done
            self._sizes[key_of(done.path)] = done.size
            if was_sent:
                self._fresh[done.path] = done.size
        self._writer.sent(fresh)

    def _make_room(self, coming: List[Entry]) -> None:
        """In a folder, where a file lies that is to be a folder, or the reverse."""
        wanted = {key_of(entry.path) for entry in coming}
        above = {folder for key in wanted for folder in _above(key)}
        doomed = [key for key in self._sizes if key in above]
        doomed += [key for key in self._sizes if any(up in wanted for up in _above(key))]
        if doomed:
            self._vault.delete(*doomed)
            for key in doomed:
                self._sizes.pop(key, None)

    def _bring(self, entry: Entry) -> Tuple[Optional[Entry], str, bool]:
        """Have one file in the archive: as it is there, or why not; and whether it was sent."""
        why = ""
        for _ in range(_TRIES):
            done = 0

            def moved(size: int, was_there: bool) -> None:
                nonlocal done
                done += size
                self._account.moved(entry.path, size, was_there)

            try:
                found, was_sent = self._once(entry, moved)
                self._account.done(entry.path, max(0, self._passes * entry.size - done))
                return found, "", was_sent
            except Stopped:
                raise
            except (Changed, Damaged) as error:
                why = str(error)
                self._account.took_back(done)
            except FileNotFoundError:
                return None, "it was deleted meanwhile", False
            except OSError as error:
                if error.errno in FULL or getattr(error, "temporary", False):
                    raise
                return None, error.strerror or str(error), False
        return None, why, False

    def _once(self, entry: Entry, moved: Moved) -> Tuple[Entry, bool]:
        reader = Reader(self._tree, entry.path)
        try:
            now, key = reader.entry, key_of(entry.path)
            if not self._sends:
                digest = digest_of(reader.fd, now.size)
                if self._sizes.get(key) != now.size or self._stored(key, now, moved) != digest:
                    raise Damaged("the archive has another content, or none")
                return self._settled(reader, digest), False
            digest = self._vault.send(
                key, now, reader.read, moved, lambda: not reader.has_changed()
            )
            # If it has changed since, the next look says so; what is there is whole, and known.
            found = now._replace(sha256=digest)
            if not self._vault.proves and self._stored(key, now, moved) != digest:
                raise Damaged("what was sent is not what is read back")
            return found, True
        finally:
            reader.close()

    def _stored(self, key: str, entry: Entry, moved: Moved) -> str:
        return digest_stored(self._vault, key, entry.size, moved)

    def _settled(self, reader: Reader, digest: str) -> Entry:
        if reader.has_changed():
            raise Changed(_CHANGES)
        return reader.entry._replace(sha256=digest)

    def end(self) -> Result:
        """Say that it is complete, where it is."""
        left = sorted(entry.path for entry in self._to_do())  # what was deleted is not missing
        missing = [LeftOut(path, self._missing.get(path, _CHANGES)) for path in left]
        missing += self._swallowed() if self._fresh and not missing else []
        missing += [each for each in self._left_out if each.is_loss and not each.is_link]
        left_out = tuple(each for each in self._left_out if not each.is_loss or each.is_link)
        if not missing and self._is_said():
            self._writer.confirm(self._at)
        elif not missing:
            self._writer.complete(self._plan.entries, len(left_out), self._at)
            self._vault.tidy()
        if missing and not self._has_begun:
            self._writer.begin([e for e in self._plan.entries if e.away != DELETED])
        return Result(
            len(self._fresh), sum(self._fresh.values()),
            max(0, sum(entry.is_file for entry in self._plan.kept) - len(self._fresh)),
            left_out, tuple(missing),
        )  # fmt: skip

    def _swallowed(self) -> List[LeftOut]:
        """What was read back, and then was not listed: a disk on which `a` and `A` are the same."""
        sizes = self._vault.sizes()
        return [
            LeftOut(entry.path, "the archive did not keep it: is another name the same there?")
            for entry in self._plan.entries
            if entry.is_file and not entry.away and sizes.get(key_of(entry.path)) != entry.size
        ]

    def _is_said(self) -> bool:
        """Whether the papers say so already."""
        if self._has_begun or not self._book.is_complete:
            return False
        return {entry.path: entry for entry in self._plan.entries} == self._book.entries


def mark_freed(vault: Vault, book: Book, paths: Optional[Collection[str]] = None) -> None:
    """Say that files of the tree may go: later archives keep what they hold, and restore has it.

    None: all of them.
    """
    entries = [
        entry._replace(away=FREED)
        if not entry.away and (paths is None or entry.path in paths)
        else entry
        for entry in book.entries.values()
    ]
    Writer(vault, book).complete(entries, 0, book.at)
    os.sync()  # contents are on the disk already, and now their names, too


def free(
    tree: Tree,
    vault: Vault,
    account: Optional[Account] = None,
    check: Callable[[], None] = go_on,
) -> Result:
    """Delete from a tree what a complete archive holds unchanged, once all of it was read back.

    Raises CarryError where the archive is not complete or not whole, and what `check` raises, which
    is called last: then nothing is deleted.
    """
    from batchml.runtime.transfer.restore import verify

    account = account or Account()
    with vault.alone():
        said, book = _said(vault), read_book(vault)
        if not book.is_complete:
            raise CarryError("the archive is not complete: nothing was deleted")
        bad = verify(vault, account).missing
        if bad:
            raise CarryError(
                f"the archive is damaged, nothing was deleted: {bad[0].path!r}: {bad[0].why}"
            )
        check()
        if _said(vault) != said:  # in a bucket nobody is kept out
            raise CarryError(f"{OTHERS}. Nothing was deleted")
        going = {path for path, entry in book.entries.items() if _is_archived(entry, tree)}
        mark_freed(vault, book, going)
        return _free(tree, book)


def _said(vault: Vault) -> Tuple[Optional[bytes], List[str]]:
    """What changes while somebody archives."""
    return vault.get(COMPLETE), vault.keys(GOING)


def archive_and_free(
    tree: Tree,
    vault: Vault,
    account: Account,
    checksum: bool = False,
    overwrite: bool = False,
    check: Callable[[], None] = go_on,
) -> Result:
    """`archive`, and where nothing is missing `free`. Raises what they raise."""
    done = archive(tree, vault, account, checksum, overwrite=overwrite)
    if done.missing:
        return done
    freed = free(tree, vault, account, check)
    return done._replace(removed=freed.removed, left_out=done.left_out + freed.left_out)


def _is_archived(entry: Entry, tree: Tree) -> bool:
    there = tree.look(entry.path)
    return there is not None and is_as_before(entry, there) and there.stamp == entry.stamp


def _free(tree: Tree, book: Book) -> Result:
    removed = size = 0
    stays: List[LeftOut] = []
    for path in sorted(book.entries, reverse=True):  # what is in a folder before it
        entry, there = book.entries[path], tree.look(path)
        if there is None or there.kind != entry.kind:
            continue
        if not _is_archived(entry, tree):
            stays.append(LeftOut(path, "it has changed since: it stays"))
            continue
        try:
            with tree.above(path) as (at, name):
                if entry.kind == FOLDER:
                    _remove_empty(name, at)
                    continue
                os.unlink(name, dir_fd=at)
        except PermissionError as error:
            stays.append(LeftOut(path, f"it stays: {error.strerror}"))
            continue
        removed, size = removed + entry.is_file, size + entry.size
    return Result(size=size, left_out=tuple(stays), removed=removed)


def _remove_empty(name: str, at: int) -> None:
    try:
        os.rmdir(name, dir_fd=at)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
