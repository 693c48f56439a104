"""Restore an archive into a tree, and verify an archive."""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from typing import Dict, Iterable, Iterator, List, Optional, Tuple

from batchml.runtime.storage.store import StoreError
from batchml.runtime.transfer.backends import ArchiveStore, key_of, stored_digest
from batchml.runtime.transfer.files import NO_SPACE, ContentDamaged, mark_restoring
from batchml.runtime.transfer.manifest import DELETED, ArchiveManifest, read_manifest
from batchml.runtime.transfer.parallel import TransferProgress, TransferStopped
from batchml.runtime.transfer.receive import OpenedFile, TransferResult, no_space_left, receive
from batchml.runtime.transfer.tree import (
    LINK,
    LeftOut,
    TransferError,
    Tree,
    TreeEntry,
    is_valid_path,
    leading_out,
    leads_out,
)

_NAMED = 10


class ArchiveIncomplete(TransferError):
    """The archive lacks files that it should hold."""


class ArchiveSource:
    """The entries of an archive, as a `TreeSource`."""

    def __init__(self, store: ArchiveStore, entries: List[TreeEntry], top: str) -> None:
        self._store, self._entries, self._top = store, entries, top

    def entries(self, left_out: List[LeftOut]) -> Iterator[TreeEntry]:
        for entry in self._entries:
            if entry.kind == LINK and leads_out(entry, self._top):
                left_out.append(leading_out(entry))
            else:
                yield entry

    @contextmanager
    def open(self, entry: TreeEntry) -> Iterator[OpenedFile]:
        key = key_of(entry.path)

        def read(start: int, length: int) -> bytes:
            block = self._store.read(key, start, length)
            if block is None:
                raise ContentDamaged("the archive does not hold it any more")
            return block

        yield OpenedFile(entry, read, lambda: True)


def stored_entries(manifest: ArchiveManifest, below: str = "") -> List[TreeEntry]:
    """Return the entries that a restore brings back, folders before their contents."""
    found = [entry for entry in manifest.entries.values() if entry.away != DELETED]
    if manifest.planned is not None:
        there = {entry.path for entry in found}
        found += [e for e in manifest.planned.values() if not e.is_file and e.path not in there]
    if below:
        found = [e for e in found if e.path == below or e.path.startswith(f"{below}/")]
    return sorted(found, key=lambda entry: entry.path.split("/"))


def restore(
    store: ArchiveStore,
    tree: Tree,
    progress: Optional[TransferProgress] = None,
    partial: bool = False,
    checksum: bool = False,
    below: str = "",
    overwrite: bool = False,
) -> TransferResult:
    """Copy into a tree the files of an archive that it lacks; check each by its SHA-256.

    A file that differs in the tree may be newer: it stays and is reported, unless `overwrite`.
    Raises ArchiveIncomplete before anything is written, unless `partial`. Raises NoSpaceLeft,
    StoreError, OSError: then the same call continues.
    """
    progress = progress or TransferProgress()
    manifest = read_manifest(store)
    if not manifest.exists:
        raise ArchiveIncomplete("there is no archive")
    entries = stored_entries(manifest, below)
    if below and not entries:
        raise TransferError(f"the archive holds no {below!r}")
    sizes = store.sizes()
    lost = _lost(entries, sizes)
    gone = sorted({*manifest.missing(), *lost})
    if gone and not partial:
        raise ArchiveIncomplete(_describe_gaps(gone, bool(lost)))
    entries = [entry for entry in entries if entry.path not in lost]
    try:
        mark_restoring(tree, True)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise no_space_left(error, tree.root, entries) from error
    source = ArchiveSource(store, entries, tree.root)
    done = receive(source, tree, "", progress, "restoring", checksum, keeps=not overwrite)
    left_out = {each.path for each in done.left_out}
    here = all(each.path in left_out or tree.lookup(each.path) for each in entries)
    if here and not below:
        mark_restoring(tree, False)
    return done._replace(
        missing=tuple(LeftOut(path, "the archive does not hold it") for path in gone) + done.missing
    )


def _lost(entries: List[TreeEntry], sizes: Dict[str, int]) -> List[str]:
    """Return the files that the manifest names and the store does not hold with their size."""
    return [e.path for e in entries if e.is_file and sizes.get(key_of(e.path)) != e.size]


def missing_files(manifest: ArchiveManifest, store: ArchiveStore) -> List[str]:
    """Return the files that an archive should hold and does not, by manifest and by store."""
    return sorted({*manifest.missing(), *_lost(stored_entries(manifest), store.sizes())})


def _describe_gaps(gone: List[str], is_lost: bool) -> str:
    names = ", ".join(map(repr, gone[:_NAMED]))
    more = f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else ""
    why = "files were deleted from it" if is_lost else "it was interrupted"
    return f"the archive is not complete, {why}: it lacks {names}{more}"


def verify(store: ArchiveStore, progress: Optional[TransferProgress] = None) -> TransferResult:
    """Read the whole archive back and compare it with its manifest. Raises StoreError."""
    counted = progress = progress or TransferProgress()
    manifest = read_manifest(store)
    if not manifest.exists:
        raise ArchiveIncomplete("there is no archive")
    files = [entry for entry in stored_entries(manifest) if entry.is_file]
    progress.begin("reading back", len(files), sum(entry.size for entry in files))
    missing = [LeftOut(path, "it was not sent yet") for path in manifest.missing()]
    whole = size = 0

    def check(entry: TreeEntry) -> str:
        def moved(count: int, _: bool) -> None:
            counted.moved(entry.path, count)

        try:
            digest = stored_digest(store, key_of(entry.path), entry.size, moved)
        except TransferStopped:
            raise
        except ContentDamaged as error:
            return str(error)
        except StoreError as error:
            if error.temporary:
                raise
            return str(error)
        counted.done(entry.path)
        return "" if digest == entry.sha256 else "its SHA-256 differs from when it was sent"

    for some in progress.each(check, files):
        for entry, why in some:
            if why:
                missing.append(LeftOut(entry.path, why))
            else:
                whole, size = whole + 1, size + entry.size
    return TransferResult(whole, size, missing=tuple(missing))


def find_unarchived(tree: Tree, manifest: ArchiveManifest) -> Tuple[List[LeftOut], List[LeftOut]]:
    """Return the entries of a tree that an archive lacks in this state, and those left out."""
    left_out: List[LeftOut] = []
    found: List[LeftOut] = []
    for entry in tree.walk("", left_out):
        there = manifest.entries.get(entry.path)
        if there is None or there.away == DELETED or there.kind != entry.kind:
            found.append(LeftOut(entry.path, "it is not in the archive"))
        elif entry.is_file and (entry.size, entry.mtime_ns, entry.stamp) != (
            there.size, there.mtime_ns, there.stamp,
        ):  # fmt: skip
            found.append(LeftOut(entry.path, "it has changed since"))
        elif entry.kind == LINK and entry.target != there.target:
            found.append(LeftOut(entry.path, "its target has changed since"))
    found += [each for each in left_out if each.is_loss]
    return found, [each for each in left_out if not each.is_loss]


# --- remove ---------------------------------------------------------------------------------------
# Delete files and folders of a tree, without following links.


def remove(tree: Tree, paths: Iterable[str]) -> TransferResult:
    """Delete files and folders, each with everything in it. A link itself is deleted.

    `missing` names the paths that do not exist or that could not be deleted, with the reason.
    """
    removed = 0
    missing: List[LeftOut] = []
    for path in paths:
        if not is_valid_path(path):
            missing.append(LeftOut(path or ".", "it is not a path in the workspace"))
            continue
        try:
            with tree.parent(path) as (at, name):
                removed += _remove_path(at, name, path, missing)
        except OSError as error:
            missing.append(LeftOut(path, error.strerror or str(error)))
    return TransferResult(removed=removed, missing=tuple(missing))


def _remove_path(at: int, name: str, path: str, missing: List[LeftOut]) -> int:
    """Delete one path; return the number of files and links deleted. Raises OSError."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=at)
        return 1
    count = 0

    def failed(error: OSError) -> None:
        missing.append(LeftOut(path, f"{error.filename!r}: {error.strerror}"))

    for folder, folders, files, fd in os.fwalk(name, topdown=False, onerror=failed, dir_fd=at):
        for each, is_folder in [*_each(files, False), *_each(folders, True)]:
            try:
                if is_folder and not _is_link(each, fd):
                    os.rmdir(each, dir_fd=fd)
                    continue
                os.unlink(each, dir_fd=fd)
                count += 1
            except OSError as error:
                inner = os.path.join(os.path.dirname(path), folder, each)
                missing.append(LeftOut(inner, error.strerror or str(error)))
    os.rmdir(name, dir_fd=at)
    return count


def _each(names: Iterable[str], is_folder: bool) -> List[Tuple[str, bool]]:
    return [(name, is_folder) for name in names]


def _is_link(name: str, at: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)
