"""Archive a tree: send new and changed files, and read back every file that was sent.

A file is unchanged if the manifest has its size, time, inode and ctime, and the store has its size.
If only inode or ctime differ, as after a restore, contents are compared.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Callable, Collection, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.storage.store import no_check
from batchml.runtime.transfer.archives import ArchiveStore, key_of, stored_digest
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
from batchml.runtime.transfer.parallel import TransferProgress
from batchml.runtime.transfer.receive import TransferResult, no_space_left
from batchml.runtime.transfer.restore import verify
from batchml.runtime.transfer.tree import (
    FOLDER,
    LeftOut,
    Reader,
    TransferError,
    Tree,
    TreeEntry,
    describe_os_error,
    looks_unchanged,
    name_some,
)

_MAX_ROUNDS = 3  # over a tree that changes meanwhile
_CHANGES = "it changes while it is archived"
_MAX_NAMED = 5  # files that an error names


class ArchivePlan(NamedTuple):
    """The work of archiving a tree."""

    kept: Tuple[TreeEntry, ...]  # unchanged entries, with their SHA-256
    compared: Tuple[TreeEntry, ...]  # files whose contents have to be compared
    sent: Tuple[TreeEntry, ...]  # files that have to be sent
    away: Tuple[TreeEntry, ...]  # entries that only the archive has

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
    """Decide by the entries of the tree (`now`) and of the manifest (`known`), and the sizes of the
    files in the store. Pure.

    `checksum`: compare the contents of all files that the archive has. `is_restoring`: the files
    that the tree lacks are being restored.
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
    # A tree without any file is a new or emptied disk: nobody deleted the files one by one.
    were_deleted = any(entry.is_file for entry in now) and not is_restoring
    reason = DELETED if were_deleted else FREED
    away = [_mark_away(entry, reason) for path, entry in known.items() if path not in paths]
    return ArchivePlan(tuple(kept), tuple(compared), tuple(sent), tuple(_unreplaced(away, paths)))


def _may_be_stored(entry: TreeEntry, there: Optional[TreeEntry], sizes: Dict[str, int]) -> bool:
    """Say whether the archive has this file, judged by sizes and time."""
    is_recorded = there is not None and looks_unchanged(entry, there)
    return is_recorded and sizes.get(key_of(entry.path)) == entry.size


def _mark_away(entry: TreeEntry, reason: str) -> TreeEntry:
    """Mark an entry that the tree lacks. A restore brings back freed files, not deleted ones."""
    return entry if entry.away else entry._replace(away=reason)


def find_clashes(freed: TreeEntries, plan: ArchivePlan) -> List[TreeEntry]:
    """Return the freed files whose path has another entry in the tree now, or may have. Pure.

    The archive has the only copy of a freed file.
    """
    away = {entry.path for entry in plan.away}
    same = {entry.path: entry.sha256 for entry in (*plan.kept, *plan.compared)}
    return [
        entry
        for path, entry in freed.items()
        if path not in away and same.get(path) != entry.sha256
    ]


def _unreplaced(away: List[TreeEntry], now: TreeEntries) -> List[TreeEntry]:
    """Drop entries that the tree has replaced: a file that became a folder, or the reverse."""
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

    Without `sends` only the manifest is written: another program, such as FSx, has sent the files,
    and they are read back. Raises TransferError if a different file would replace a freed one,
    unless `overwrite`. After NoSpaceLeft, StoreError and OSError a repeated call continues.
    """
    progress = progress or TransferProgress()
    with store.lock():
        work = _Archiver(tree, store, progress, checksum, sends, overwrite)
        work.begin()
        for _ in range(_MAX_ROUNDS):
            if not work.do_round():
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
        is_guarded = sends and not overwrite
        # files whose only copy must not be replaced
        self._freed: TreeEntries = {
            path: entry for path, entry in self._known.items()
            if is_guarded and entry.is_file and entry.away == FREED
        }  # fmt: skip
        self._writer = ManifestWriter(store, self._manifest)
        self._sizes: Dict[str, int] = {}  # of the files in the store, by key
        self._left_out: List[LeftOut] = []
        self._missing: Dict[str, str] = {}  # path of a file that failed -> why
        self._plan = ArchivePlan((), (), (), ())
        self._sent: Dict[str, int] = {}  # sizes of the files that were sent, by path
        self._at = 0.0  # when the tree was last scanned
        self._has_begun = False  # the manifest records that the archive is incomplete
        # how often the bytes of each file count as progress: once sent, once read back
        self._passes = 1 if store.verifies else 2

    def begin(self) -> None:
        self._sizes = self._store.sizes()
        self._scan()

    def _scan(self) -> None:
        self._left_out = []
        self._at = time.time()
        now = list(self._tree.walk("", self._left_out))
        self._plan = plan_archive(
            now, self._known, self._sizes, self._checksum, is_restoring(self._tree)
        )

    def do_round(self) -> bool:
        """Send the planned files, and scan the tree again; return whether there is more to do."""
        if self._plan.compared:
            self._compare_contents()
        if self._freed:
            self._check_freed()
        coming = list(self._plan.sent)
        self._missing = {}
        if coming and not self._has_begun:
            self._begin_manifest()
            self._has_begun = True
        if coming and self._sends:
            self._clear_way(coming)
        size = self._passes * sum(entry.size for entry in coming)
        self._progress.begin("archiving", len(coming), size)
        try:
            for batch in self._progress.each(self._ensure_stored, coming):
                self._note_stored(batch)
        except OSError as error:
            if error.errno in NO_SPACE:
                left = [entry for entry in coming if entry.path not in self._sent]
                raise no_space_left(error, "the archive, which is not complete", left) from error
            raise
        if not coming:
            return False
        self._scan()
        return any(entry.path not in self._missing for entry in self._to_do())

    def _check_freed(self) -> None:
        """Raise TransferError if the only copy of a file would be replaced."""
        sizes = {entry.path: entry.size for entry in self._plan.sent}
        clashes = sorted(
            entry.path
            for entry in find_clashes(self._freed, self._plan)
            if sizes.get(entry.path) != entry.size or not self._compare(entry, counts=False)
        )
        if clashes:
            raise TransferError(
                f"the workspace now has other files under the names of freed files, of which the "
                f"archive has the only copy: {name_some(clashes, _MAX_NAMED)}. None of them was "
                "sent. To keep both, move the new files away and restore, or archive to another "
                "place. To drop the freed files: --overwrite"
            )

    def _compare_contents(self) -> None:
        """Compare contents before any file is sent: an archive stays complete if none differs."""
        compared = self._plan.compared
        self._progress.begin("comparing", len(compared), sum(entry.size for entry in compared))
        for batch in self._progress.each(self._compare, compared):
            for entry, same in batch:
                if same is None:
                    self._known.pop(entry.path, None)  # so that the next scan plans to send it
                else:
                    self._known[entry.path] = same
        self._checksum = False  # one comparison is enough
        self._scan()

    def _compare(self, entry: TreeEntry, counts: bool = True) -> Optional[TreeEntry]:
        """Return the file's entry with the archive's digest, or None if the contents differ.

        `counts`: the file counts as progress.
        """
        try:
            reader = Reader(self._tree, entry.path)
        except OSError:
            return None  # the error is reported when the file is sent
        try:
            size = reader.entry.size
            is_same = digest_of(reader.read, size) == entry.sha256
            if is_same and self._checksum:
                is_same = stored_digest(self._store, key_of(entry.path), size) == entry.sha256
            if not is_same or not reader.is_unchanged():
                return None
            if counts:
                self._progress.count(entry.path, entry.size, True)
                self._progress.finish_file(entry.path)
            return reader.entry._replace(sha256=entry.sha256)
        except ContentDamaged:
            return None
        finally:
            reader.close()

    def _to_do(self) -> List[TreeEntry]:
        return [*self._plan.compared, *self._plan.sent]

    def _note_stored(self, batch: List[Tuple[TreeEntry, Tuple[Optional[TreeEntry], str]]]) -> None:
        stored = []
        for entry, (now, why) in batch:
            if now is None:
                self._missing[entry.path] = why
                self._known.pop(entry.path, None)
                continue
            stored.append(now)
            self._known[now.path] = now
            self._sizes[key_of(now.path)] = now.size
            if self._sends:
                self._sent[now.path] = now.size
        self._writer.record(stored)

    def _clear_way(self, coming: List[TreeEntry]) -> None:
        """Delete stored files whose key has to become a folder, or the reverse."""
        keys = {key_of(entry.path) for entry in coming}
        folders = {folder for key in keys for folder in _above(key)}
        obstacles = [
            key for key in self._sizes if key in folders or not keys.isdisjoint(_above(key))
        ]
        if obstacles:
            self._store.delete(*obstacles)
            for key in obstacles:
                del self._sizes[key]

    def _ensure_stored(self, entry: TreeEntry) -> Tuple[Optional[TreeEntry], str]:
        """Make sure that the archive holds one file; return its entry, or None and why not."""
        try:
            stored, counted = self._progress.try_file(
                entry.path, lambda on_bytes: self._send_once(entry, on_bytes)
            )
        except (SourceChanged, ContentDamaged) as error:
            return None, str(error)
        except FileNotFoundError:
            return None, "it was deleted meanwhile"
        except OSError as error:
            if error.errno in NO_SPACE or getattr(error, "temporary", False):
                raise
            return None, describe_os_error(error)
        self._progress.finish_file(entry.path, max(0, self._passes * entry.size - counted))
        return stored, ""

    def _send_once(self, entry: TreeEntry, on_bytes: OnBytes) -> TreeEntry:
        reader = Reader(self._tree, entry.path)
        try:
            key, size = key_of(entry.path), reader.entry.size
            if self._sends:
                digest = self._store.send(key, reader.as_file(entry.path), on_bytes)
                # If the file has changed since, the next scan finds that; what was sent is one
                # state of it.
                is_verified = self._store.verifies
                if not is_verified and stored_digest(self._store, key, size, on_bytes) != digest:
                    raise ContentDamaged("the content read back is not what was sent")
            else:
                digest, is_stored = digest_of(reader.read, size), self._sizes.get(key) == size
                if not is_stored or stored_digest(self._store, key, size, on_bytes) != digest:
                    raise ContentDamaged("the archive does not have this content")
                if not reader.is_unchanged():
                    raise SourceChanged(_CHANGES)
            return reader.entry._replace(sha256=digest)
        finally:
            reader.close()

    def end(self) -> TransferResult:
        """Record that the archive is complete, if it is, and return the result."""
        unsent = sorted(entry.path for entry in self._to_do())  # without files deleted meanwhile
        missing = [LeftOut(path, self._missing.get(path, _CHANGES)) for path in unsent]
        missing += self._find_unlisted() if self._sent and not missing else []
        missing += [left for left in self._left_out if left.is_loss and not left.is_link]
        left_out = tuple(left for left in self._left_out if not left.is_loss or left.is_link)
        if not missing and self._is_recorded():
            self._writer.confirm(self._at)
        elif not missing:
            self._writer.complete(self._plan.entries, len(left_out), self._at)
            self._store.tidy()
        if missing and not self._has_begun:
            self._begin_manifest()
        return TransferResult(
            len(self._sent), sum(self._sent.values()),
            max(0, sum(entry.is_file for entry in self._plan.kept) - len(self._sent)),
            left_out, tuple(missing),
        )  # fmt: skip

    def _begin_manifest(self) -> None:
        """Record what the archive will contain, and that it is not complete."""
        self._writer.begin([entry for entry in self._plan.entries if entry.away != DELETED])

    def _find_unlisted(self) -> List[LeftOut]:
        """Return files that were read back but are not listed, as on a disk that ignores case."""
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
    """Record that files may be deleted from the tree: later archives keep them, and a restore
    brings them back.

    `paths`: the paths of these files; None: all files.
    """
    entries = [
        entry._replace(away=FREED)
        if not entry.away and (paths is None or entry.path in paths)
        else entry
        for entry in manifest.entries.values()
    ]
    ManifestWriter(store, manifest).complete(entries, 0, manifest.at)
    os.sync()  # the contents were synced before; now the names are on the disk, too


def free(
    tree: Tree,
    store: ArchiveStore,
    progress: Optional[TransferProgress] = None,
    check: Callable[[], None] = no_check,
) -> TransferResult:
    """Read a complete archive back; then delete from the tree the entries that it holds unchanged.

    Raises TransferError if the archive is incomplete or damaged, and any error of `check`, which is
    called after the archive was read. Then nothing is deleted.
    """
    progress = progress or TransferProgress()
    with store.lock():
        before, manifest = _fingerprint(store), read_manifest(store)
        if not manifest.is_complete:
            raise TransferError("the archive is not complete: nothing was deleted")
        damaged = verify(store, progress).missing
        if damaged:
            first = damaged[0]
            raise TransferError(
                f"the archive is damaged, nothing was deleted: {first.path!r}: {first.why}"
            )
        check()
        if _fingerprint(store) != before:  # a bucket has no locks
            raise TransferError(f"{OTHER_WRITER}. Nothing was deleted")
        freed = {path for path, entry in manifest.entries.items() if _is_archived(entry, tree)}
        mark_freed(store, manifest, freed)
        return _free(tree, manifest)


def _fingerprint(store: ArchiveStore) -> Tuple[Optional[bytes], List[str]]:
    """Return values that change while another process archives."""
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
    left_out: List[LeftOut] = []
    for path in sorted(manifest.entries, reverse=True):  # contents before their folder
        entry, there = manifest.entries[path], tree.lookup(path)
        if there is None or there.kind != entry.kind:
            continue
        if not _is_archived(entry, tree):
            left_out.append(LeftOut(path, "it has changed since: it stays"))
            continue
        try:
            with tree.parent(path) as (at, name):
                if entry.kind == FOLDER:
                    _remove_empty(name, at)
                    continue
                os.unlink(name, dir_fd=at)
        except PermissionError as error:
            left_out.append(LeftOut(path, f"it stays: {error.strerror}"))
            continue
        removed, size = removed + entry.is_file, size + entry.size
    return TransferResult(size=size, left_out=tuple(left_out), removed=removed)


def _remove_empty(name: str, at: int) -> None:
    try:
        os.rmdir(name, dir_fd=at)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
