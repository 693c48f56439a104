"""Restore an archive into a tree; verify an archive; and delete paths of a tree."""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from functools import partial
from typing import Dict, Iterable, Iterator, List, Optional, Tuple

from batchml.runtime.storage.store import StoreError
from batchml.runtime.transfer.archives import ArchiveStore, key_of, stored_digest
from batchml.runtime.transfer.files import NO_SPACE, ContentDamaged, mark_restoring
from batchml.runtime.transfer.manifest import DELETED, ArchiveManifest, read_manifest
from batchml.runtime.transfer.parallel import TransferProgress
from batchml.runtime.transfer.receive import TransferResult, no_space_left, receive
from batchml.runtime.transfer.tree import (
    LINK,
    LeftOut,
    OpenedFile,
    TransferError,
    Tree,
    TreeEntry,
    describe_leading_out,
    describe_os_error,
    is_valid_path,
    leads_out,
    name_some,
)

_MAX_NAMED = 10  # files that an error names


class ArchiveIncomplete(TransferError):
    """The archive lacks files that it should hold."""


class ArchiveSource:
    """The entries of an archive, as a `TreeSource`."""

    def __init__(self, store: ArchiveStore, entries: List[TreeEntry], top: str) -> None:
        self._store, self._entries, self._top = store, entries, top

    def entries(self, left_out: List[LeftOut]) -> Iterator[TreeEntry]:
        for entry in self._entries:
            if entry.kind == LINK and leads_out(entry, self._top):
                left_out.append(describe_leading_out(entry))
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
    stored = {e.path: e for e in manifest.entries.values() if e.away != DELETED}
    planned = {e.path: e for e in (manifest.planned or {}).values() if not e.is_file}
    entries = list({**planned, **stored}.values())
    if below:
        entries = [e for e in entries if f"{e.path}/".startswith(f"{below}/")]
    return sorted(entries, key=lambda entry: entry.path.split("/"))


def restore(
    store: ArchiveStore,
    tree: Tree,
    progress: Optional[TransferProgress] = None,
    partial: bool = False,
    checksum: bool = False,
    below: str = "",
    overwrite: bool = False,
) -> TransferResult:
    """Copy the files of an archive that a tree lacks into the tree; check each by its SHA-256.

    A file of the tree that differs may be newer: it stays and is reported, unless `overwrite`.
    `below` restricts the restore to a path of the archive. An incomplete archive raises
    ArchiveIncomplete before anything is written, unless `partial`. After NoSpaceLeft, StoreError
    and OSError a repeated call continues.
    """
    progress = progress or TransferProgress()
    manifest = read_manifest(store)
    if not manifest.exists:
        raise ArchiveIncomplete("there is no archive")
    entries = stored_entries(manifest, below)
    if below and not entries:
        raise TransferError(f"the archive holds no {below!r}")
    lost = _find_lost(entries, store.sizes())
    gaps = sorted({*manifest.missing(), *lost})
    if gaps and not partial:
        why = "files were deleted from it" if lost else "it was interrupted"
        raise ArchiveIncomplete(
            f"the archive is not complete, {why}: it lacks {name_some(gaps, _MAX_NAMED)}"
        )
    entries = [entry for entry in entries if entry.path not in lost]
    try:
        mark_restoring(tree, True)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise no_space_left(error, tree.root, entries) from error
    source = ArchiveSource(store, entries, tree.root)
    result = receive(source, tree, "", progress, "restoring", checksum, keeps=not overwrite)
    left_out = {left.path for left in result.left_out}
    has_all = all(entry.path in left_out or tree.lookup(entry.path) for entry in entries)
    if has_all and not below:
        mark_restoring(tree, False)
    missing = tuple(LeftOut(path, "the archive does not hold it") for path in gaps)
    return result._replace(missing=missing + result.missing)


def _find_lost(entries: List[TreeEntry], sizes: Dict[str, int]) -> List[str]:
    """Return the files of the manifest that the store does not hold, or only with another size."""
    return [e.path for e in entries if e.is_file and sizes.get(key_of(e.path)) != e.size]


def missing_files(manifest: ArchiveManifest, store: ArchiveStore) -> List[str]:
    """Return the files that an archive should hold and does not, by manifest and by store."""
    return sorted({*manifest.missing(), *_find_lost(stored_entries(manifest), store.sizes())})


def verify(store: ArchiveStore, progress: Optional[TransferProgress] = None) -> TransferResult:
    """Read the whole archive back and compare it with its manifest. Raises StoreError."""
    progress = progress or TransferProgress()
    manifest = read_manifest(store)
    if not manifest.exists:
        raise ArchiveIncomplete("there is no archive")
    files = [entry for entry in stored_entries(manifest) if entry.is_file]
    progress.begin("reading back", len(files), sum(entry.size for entry in files))
    missing = [LeftOut(path, "it was not sent yet") for path in manifest.missing()]
    count = size = 0
    for batch in progress.each(partial(_verify_file, store, progress), files):
        for entry, why in batch:
            if why:
                missing.append(LeftOut(entry.path, why))
            else:
                count, size = count + 1, size + entry.size
    return TransferResult(count, size, missing=tuple(missing))


def _verify_file(store: ArchiveStore, progress: TransferProgress, entry: TreeEntry) -> str:
    """Read one file back; return what is wrong with it, or ""."""

    def on_bytes(size: int, _: bool) -> None:
        progress.count(entry.path, size)

    try:
        digest = stored_digest(store, key_of(entry.path), entry.size, on_bytes)
    except (ContentDamaged, StoreError) as error:
        if getattr(error, "temporary", False):
            raise
        return str(error)
    progress.finish_file(entry.path)
    return "" if digest == entry.sha256 else "its SHA-256 differs from when it was sent"


def find_unarchived(tree: Tree, manifest: ArchiveManifest) -> Tuple[List[LeftOut], List[LeftOut]]:
    """Return the entries whose present state an archive lacks, and the entries left out."""
    left_out: List[LeftOut] = []
    unarchived: List[LeftOut] = []
    for entry in tree.walk("", left_out):
        there = manifest.entries.get(entry.path)
        if there is None or there.away == DELETED or there.kind != entry.kind:
            unarchived.append(LeftOut(entry.path, "it is not in the archive"))
        elif entry.is_file and entry.version != there.version:
            unarchived.append(LeftOut(entry.path, "it has changed since"))
        elif entry.kind == LINK and entry.target != there.target:
            unarchived.append(LeftOut(entry.path, "its target has changed since"))
    unarchived += [left for left in left_out if left.is_loss]
    return unarchived, [left for left in left_out if not left.is_loss]


# --- Delete files and folders of a tree, without following links ----------------------------------


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
            missing.append(LeftOut(path, describe_os_error(error)))
    return TransferResult(removed=removed, missing=tuple(missing))


def _remove_path(at: int, name: str, path: str, missing: List[LeftOut]) -> int:
    """Delete one path; return the number of files and links deleted. Raises OSError."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=at)
        return 1
    count = 0

    def note_error(error: OSError) -> None:
        missing.append(LeftOut(path, f"{error.filename!r}: {error.strerror}"))

    for folder, folders, files, fd in os.fwalk(name, topdown=False, onerror=note_error, dir_fd=at):
        for index, inner in enumerate([*files, *folders]):
            try:
                if index >= len(files) and not _is_link(inner, fd):
                    os.rmdir(inner, dir_fd=fd)
                    continue
                os.unlink(inner, dir_fd=fd)
                count += 1
            except OSError as error:
                inner_path = os.path.join(os.path.dirname(path), folder, inner)
                missing.append(LeftOut(inner_path, describe_os_error(error)))
    os.rmdir(name, dir_fd=at)
    return count


def _is_link(name: str, at: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)
