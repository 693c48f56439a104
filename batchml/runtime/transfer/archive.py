"""Archive a tree: send new and changed files, and read back all that was sent.

A file is unchanged if the manifest has its size, time, inode and ctime, and the store has its size.
If only inode or ctime differ, as after a restore, contents are compared.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Callable, Collection, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.storage.store import no_check
from batchml.runtime.transfer.backends import ArchiveStore, key_of, stored_digest
from batchml.runtime.transfer.files import (
    NO_SPACE,
    ContentDamaged,
    OnBytes,
    SourceChanged,
    digest_of,
    is_restoring,
)
from batchml.runtime.transfer.manifest import (
    COMPLETE,
    DELETED,
    FREED,
    OTHER_WRITER,
    SENT,
    ArchiveManifest,
    ManifestWriter,
    TreeEntries,
    read_manifest,
)
from batchml.runtime.transfer.parallel import TransferProgress, TransferStopped
from batchml.runtime.transfer.receive import TransferResult, no_space_left
from batchml.runtime.transfer.restore import verify
from batchml.runtime.transfer.tree import (
    FOLDER,
    LeftOut,
    Reader,
    TransferError,
    Tree,
    TreeEntry,
    looks_unchanged,
)

_TRIES = 2
_ROUNDS = 3  # over a tree that changes meanwhile
_CHANGES = "it changes while it is archived"
_NAMED = 5


class ArchivePlan(NamedTuple):
    """What archiving a tree requires."""

    kept: Tuple[TreeEntry, ...]  # unchanged, with their SHA-256
    compared: Tuple[TreeEntry, ...]  # files whose contents have to be compared
    sent: Tuple[TreeEntry, ...]
    away: Tuple[TreeEntry, ...]  # only in the archive

    @property
    def entries(self) -> List[TreeEntry]:
        return [*self.kept, *self.compared, *self.sent, *self.away]


def plan_archive(
    now: List[TreeEntry],
    known: TreeEntries,
    sizes: Dict[str, int],
    checksum: bool = False,
    is_restoring: bool = False,
) -> ArchivePlan:
    """Decide from the tree, the manifest's entries and the sizes in the store. Pure.

    `is_restoring`: missing files of the tree are being restored.
    """
    kept: List[TreeEntry] = []
    compared: List[TreeEntry] = []
    sent: List[TreeEntry] = []
    for entry in now:
        if not entry.is_file:
            kept.append(entry)
        elif not _may_be_stored(entry, known.get(entry.path), sizes):
            sent.append(entry)
        else:
            same = entry._replace(sha256=known[entry.path].sha256)
            is_sure = not checksum and entry.stamp == known[entry.path].stamp
            (kept if is_sure else compared).append(same)
    paths = {entry.path: entry for entry in now}
    # A tree without files is a new or emptied disk: nobody deleted these files one by one.
    were_deleted = any(entry.is_file for entry in now) and not is_restoring
    reason = DELETED if were_deleted else FREED
    away = [_mark_away(entry, reason) for path, entry in known.items() if path not in paths]
    return ArchivePlan(tuple(kept), tuple(compared), tuple(sent), tuple(_unreplaced(away, paths)))


def _may_be_stored(entry: TreeEntry, there: Optional[TreeEntry], sizes: Dict[str, int]) -> bool:
    """Say whether the archive has this file, judging by sizes and time."""
    is_known = there is not None and looks_unchanged(entry, there)
    return is_known and sizes.get(key_of(entry.path)) == entry.size


def _mark_away(entry: TreeEntry, reason: str) -> TreeEntry:
    """Mark an entry that the tree lacks. Restore brings back freed files, not deleted ones."""
    return entry if entry.away else entry._replace(away=reason)


def find_clashes(freed: TreeEntries, found: ArchivePlan) -> List[TreeEntry]:
    """Return freed files whose path the tree now uses for something else.

    The archive has their only copy. A file of the same size may have the same content. Pure.
    """
    stays = {entry.path for entry in found.away}
    same = {entry.path: entry.sha256 for entry in (*found.kept, *found.compared)}
    return [
        entry
        for path, entry in freed.items()
        if path not in stays and same.get(path) != entry.sha256
    ]


def _unreplaced(away: List[TreeEntry], now: TreeEntries) -> List[TreeEntry]:
    """Drop entries whose place is taken: a file that became a folder, or the reverse."""
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
    store: ArchiveStore,
    progress: Optional[TransferProgress] = None,
    checksum: bool = False,
    sends: bool = True,
    overwrite: bool = False,
) -> TransferResult:
    """Bring an archive up to date with a tree. It is complete if the result has nothing missing.

    Without `sends` only the manifest is written: files that something else has sent are read back.
    Raises TransferError if a different file would replace a freed one, unless `overwrite`. Raises
    NoSpaceLeft, StoreError, OSError: then the same call continues.
    """
    progress = progress or TransferProgress()
    with store.lock():
        work = _Archiver(tree, store, progress, checksum, sends, overwrite)
        work.begin()
        for _ in range(_ROUNDS):
            if not work.round():
                break
        return work.end()


class _Archiver:
    """Archives one tree into one store."""

    def __init__(
        self, tree: Tree, store: ArchiveStore, progress: TransferProgress, checksum: bool,
        sends: bool, overwrite: bool,
    ) -> None:  # fmt: skip
        self._tree, self._store, self._progress = tree, store, progress
        self._checksum, self._sends = checksum, sends
        self._manifest = read_manifest(store)
        self._known: TreeEntries = dict(self._manifest.entries)
        guarded = sends and not overwrite
        self._freed: TreeEntries = {
            path: entry for path, entry in self._known.items()
            if guarded and entry.is_file and entry.away == FREED
        }  # fmt: skip
        self._writer = ManifestWriter(store, self._manifest)
        self._sizes: Dict[str, int] = {}
        self._left_out: List[LeftOut] = []
        self._missing: Dict[str, str] = {}
        self._plan = ArchivePlan((), (), (), ())
        self._fresh: Dict[str, int] = {}  # sizes of sent files, by path
        self._at = 0.0  # when the tree was last scanned
        self._has_begun = False
        # how often the bytes of each file count as progress: once sent, once read back
        self._passes = 1 if store.verifies else 2

    def begin(self) -> None:
        self._sizes = self._store.sizes()
        self._scan()

    def _scan(self) -> None:
        self._left_out = []
        self._at = time.time()
        now = list(self._tree.walk("", self._left_out))
        back = is_restoring(self._tree)
        self._plan = plan_archive(now, self._known, self._sizes, self._checksum, back)

    def round(self) -> bool:
        """Send the planned files, and scan the tree again; return whether there is more to do."""
        if self._plan.compared:
            self._compare_contents()
        if self._freed:
            self._check_freed()
        coming = list(self._plan.sent)
        self._missing = {}
        if coming and not self._has_begun:
            self._writer.begin([entry for entry in self._plan.entries if entry.away != DELETED])
            self._has_begun = True
        if coming and self._sends:
            self._clear_way(coming)
        size = self._passes * sum(entry.size for entry in coming)
        self._progress.begin("archiving", len(coming), size)
        try:
            for some in self._progress.each(self._bring, coming):
                self._note(some)
        except OSError as error:
            if error.errno in NO_SPACE:
                left = [each for each in coming if each.path not in self._fresh]
                raise no_space_left(error, "the archive, which is not complete", left) from error
            raise
        if not coming:
            return False
        self._scan()
        return any(entry.path not in self._missing for entry in self._to_do())

    def _check_freed(self) -> None:
        """Raise TransferError if the only copy of a file would be replaced."""
        now = {entry.path: entry for entry in self._plan.sent}
        found = []
        for entry in find_clashes(self._freed, self._plan):
            there = now.get(entry.path)
            same_size = there is not None and there.size == entry.size
            if not (same_size and self._compare(entry, False)):
                found.append(entry.path)
        if found:
            more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            raise TransferError(
                f"the workspace has other files now under names of freed files, of which the "
                f"archive has the only copy: {', '.join(map(repr, sorted(found)[:_NAMED]))}{more}. "
                "None of them was sent. To keep both, move these away and restore, or archive to "
                "another place. To drop the freed files: --overwrite"
            )

    def _compare_contents(self) -> None:
        """Compare before anything is sent: a complete archive stays complete if nothing differs."""
        compared = self._plan.compared
        self._progress.begin("comparing", len(compared), sum(entry.size for entry in compared))
        for some in self._progress.each(self._compare, compared):
            for entry, found in some:
                if found is None:
                    self._known.pop(entry.path, None)  # then it is sent
                else:
                    self._known[entry.path] = found
        self._checksum = False  # once is enough
        self._scan()

    def _compare(self, entry: TreeEntry, counts: bool = True) -> Optional[TreeEntry]:
        """Return the file with the archive's digest, or None if the contents differ."""
        try:
            reader = Reader(self._tree, entry.path)
        except OSError:
            return None  # reported when it is sent
        try:
            same = digest_of(reader.fd, reader.entry.size) == entry.sha256
            if same and self._checksum:
                key, size = key_of(entry.path), reader.entry.size
                same = stored_digest(self._store, key, size, lambda *_: None) == entry.sha256
            if not same or reader.has_changed():
                return None
            if counts:
                self._progress.moved(entry.path, entry.size, True)
                self._progress.done(entry.path)
            return reader.entry._replace(sha256=entry.sha256)
        except ContentDamaged:
            return None
        finally:
            reader.close()

    def _to_do(self) -> List[TreeEntry]:
        return [*self._plan.compared, *self._plan.sent]

    def _note(self, some: List[Tuple[TreeEntry, Tuple[Optional[TreeEntry], str, bool]]]) -> None:
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

    def _clear_way(self, coming: List[TreeEntry]) -> None:
        """Delete stored files that stand where a folder has to be, or the reverse."""
        wanted = {key_of(entry.path) for entry in coming}
        above = {folder for key in wanted for folder in _above(key)}
        doomed = [key for key in self._sizes if key in above]
        doomed += [key for key in self._sizes if any(up in wanted for up in _above(key))]
        if doomed:
            self._store.delete(*doomed)
            for key in doomed:
                self._sizes.pop(key, None)

    def _bring(self, entry: TreeEntry) -> Tuple[Optional[TreeEntry], str, bool]:
        """Make sure that the archive holds one file: return its entry, or why that failed; and
        whether it was sent.
        """
        why = ""
        for _ in range(_TRIES):
            done = 0

            def moved(size: int, was_there: bool) -> None:
                nonlocal done
                done += size
                self._progress.moved(entry.path, size, was_there)

            try:
                found, was_sent = self._send_once(entry, moved)
                self._progress.done(entry.path, max(0, self._passes * entry.size - done))
                return found, "", was_sent
            except TransferStopped:
                raise
            except (SourceChanged, ContentDamaged) as error:
                why = str(error)
                self._progress.undo(done)
            except FileNotFoundError:
                return None, "it was deleted meanwhile", False
            except OSError as error:
                if error.errno in NO_SPACE or getattr(error, "temporary", False):
                    raise
                return None, error.strerror or str(error), False
        return None, why, False

    def _send_once(self, entry: TreeEntry, moved: OnBytes) -> Tuple[TreeEntry, bool]:
        reader = Reader(self._tree, entry.path)
        try:
            now, key = reader.entry, key_of(entry.path)
            if not self._sends:
                digest = digest_of(reader.fd, now.size)
                if self._sizes.get(key) != now.size or self._stored(key, now, moved) != digest:
                    raise ContentDamaged("the archive does not have this content")
                return self._settled(reader, digest), False
            digest = self._store.send(
                key, now, reader.read, moved, lambda: not reader.has_changed()
            )
            # If it has changed since, the next scan finds that; what was sent is consistent.
            found = now._replace(sha256=digest)
            if not self._store.verifies and self._stored(key, now, moved) != digest:
                raise ContentDamaged("the content read back is not what was sent")
            return found, True
        finally:
            reader.close()

    def _stored(self, key: str, entry: TreeEntry, moved: OnBytes) -> str:
        return stored_digest(self._store, key, entry.size, moved)

    def _settled(self, reader: Reader, digest: str) -> TreeEntry:
        if reader.has_changed():
            raise SourceChanged(_CHANGES)
        return reader.entry._replace(sha256=digest)

    def end(self) -> TransferResult:
        """Finish: record that the archive is complete, if it is."""
        left = sorted(entry.path for entry in self._to_do())  # deleted files are not missing
        missing = [LeftOut(path, self._missing.get(path, _CHANGES)) for path in left]
        missing += self._swallowed() if self._fresh and not missing else []
        missing += [each for each in self._left_out if each.is_loss and not each.is_link]
        left_out = tuple(each for each in self._left_out if not each.is_loss or each.is_link)
        if not missing and self._is_recorded():
            self._writer.confirm(self._at)
        elif not missing:
            self._writer.complete(self._plan.entries, len(left_out), self._at)
            self._store.tidy()
        if missing and not self._has_begun:
            self._writer.begin([e for e in self._plan.entries if e.away != DELETED])
        return TransferResult(
            len(self._fresh), sum(self._fresh.values()),
            max(0, sum(entry.is_file for entry in self._plan.kept) - len(self._fresh)),
            left_out, tuple(missing),
        )  # fmt: skip

    def _swallowed(self) -> List[LeftOut]:
        """Return files that were read back and then not listed: the disk ignores case, say."""
        sizes = self._store.sizes()
        return [
            LeftOut(
                entry.path, "the archive did not keep it: does another name differ only in case?"
            )
            for entry in self._plan.entries
            if entry.is_file and not entry.away and sizes.get(key_of(entry.path)) != entry.size
        ]

    def _is_recorded(self) -> bool:
        """Say whether the manifest is up to date already."""
        if self._has_begun or not self._manifest.is_complete:
            return False
        return {entry.path: entry for entry in self._plan.entries} == self._manifest.entries


def mark_freed(
    store: ArchiveStore, manifest: ArchiveManifest, paths: Optional[Collection[str]] = None
) -> None:
    """Record that files of the tree may go: later archives keep them, and restore brings them back.

    None stands for all files.
    """
    entries = [
        entry._replace(away=FREED)
        if not entry.away and (paths is None or entry.path in paths)
        else entry
        for entry in manifest.entries.values()
    ]
    ManifestWriter(store, manifest).complete(entries, 0, manifest.at)
    os.sync()  # contents are on the disk already, now names are, too


def free(
    tree: Tree,
    store: ArchiveStore,
    progress: Optional[TransferProgress] = None,
    check: Callable[[], None] = no_check,
) -> TransferResult:
    """Delete from a tree what a complete archive holds unchanged, once the archive was read back.

    Raises TransferError if the archive is not complete or damaged, and any error of `check`, which
    is called last. Then nothing is deleted.
    """
    progress = progress or TransferProgress()
    with store.lock():
        before, manifest = _fingerprint(store), read_manifest(store)
        if not manifest.is_complete:
            raise TransferError("the archive is not complete: nothing was deleted")
        bad = verify(store, progress).missing
        if bad:
            raise TransferError(
                f"the archive is damaged, nothing was deleted: {bad[0].path!r}: {bad[0].why}"
            )
        check()
        if _fingerprint(store) != before:  # a bucket has no locks
            raise TransferError(f"{OTHER_WRITER}. Nothing was deleted")
        going = {path for path, entry in manifest.entries.items() if _is_archived(entry, tree)}
        mark_freed(store, manifest, going)
        return _free(tree, manifest)


def _fingerprint(store: ArchiveStore) -> Tuple[Optional[bytes], List[str]]:
    """Return what changes while another process archives."""
    return store.get(COMPLETE), store.keys(SENT)


def archive_and_free(
    tree: Tree,
    store: ArchiveStore,
    progress: TransferProgress,
    checksum: bool = False,
    overwrite: bool = False,
    check: Callable[[], None] = no_check,
) -> TransferResult:
    """Call `archive`, and `free` if nothing is missing. Raises what they raise."""
    done = archive(tree, store, progress, checksum, overwrite=overwrite)
    if done.missing:
        return done
    freed = free(tree, store, progress, check)
    return done._replace(removed=freed.removed, left_out=done.left_out + freed.left_out)


def _is_archived(entry: TreeEntry, tree: Tree) -> bool:
    there = tree.lookup(entry.path)
    return there is not None and looks_unchanged(entry, there) and there.stamp == entry.stamp


def _free(tree: Tree, manifest: ArchiveManifest) -> TransferResult:
    removed = size = 0
    stays: List[LeftOut] = []
    for path in sorted(manifest.entries, reverse=True):  # contents before their folder
        entry, there = manifest.entries[path], tree.lookup(path)
        if there is None or there.kind != entry.kind:
            continue
        if not _is_archived(entry, tree):
            stays.append(LeftOut(path, "it has changed since: it stays"))
            continue
        try:
            with tree.parent(path) as (at, name):
                if entry.kind == FOLDER:
                    _remove_empty(name, at)
                    continue
                os.unlink(name, dir_fd=at)
        except PermissionError as error:
            stays.append(LeftOut(path, f"it stays: {error.strerror}"))
            continue
        removed, size = removed + entry.is_file, size + entry.size
    return TransferResult(size=size, left_out=tuple(stays), removed=removed)


def _remove_empty(name: str, at: int) -> None:
    try:
        os.rmdir(name, dir_fd=at)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
