"""Read and write the files of an FSx for Lustre workspace as objects of its linked bucket.

Objects that FSx or batchml wrote have POSIX metadata; for others only S3's size and time are known.
A folder is a key that ends with a slash, or a prefix of other keys.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING

from batchml.runtime.transfer.archives import key_of, stored_digest
from batchml.runtime.transfer.files import SourceChanged, digest_of
from batchml.runtime.transfer.parallel import TransferProgress
from batchml.runtime.transfer.receive import TransferResult
from batchml.runtime.transfer.s3_archives import PosixArchive, from_metadata
from batchml.runtime.transfer.tree import (
    ARCHIVE_FOLDER,
    FOLDER,
    LINK,
    LeftOut,
    OpenedFile,
    Reader,
    Tree,
    TreeEntry,
    join_path,
)
from batchml.workspace.base import PlannedCopy, source_tree

if TYPE_CHECKING:
    from batchml.aws.s3 import BucketStore, ObjectHead, StoredObject

_NOT_A_KEY = "its name cannot be the key of an S3 object"


def list_entries(bucket: "BucketStore", prefix: str, name: str, *, deep: bool) -> list[TreeEntry]:
    """List a folder, sorted by name. Paths are relative to the workspace. A file lists itself.

    `deep` also lists subfolders. Without it the POSIX metadata of each entry is read, by one call.
    """
    head = bucket.head(f"{prefix}/{name}") if name else None
    if head is not None:
        return [_apply_head(TreeEntry(name, size=head.size), head)]
    top = f"{prefix}/{name}/" if name else f"{prefix}/"
    if deep:
        found = [_entry(each, f"{prefix}/") for each in bucket.list_objects(top)]
        return [*_add_folders([each for each in found if not _is_archive_file(each.path)], name)]
    objects, folders = bucket.list_folder(top)
    entries = [TreeEntry(each[len(prefix) + 1 : -1], FOLDER, 0o755) for each in folders]
    entries += [_entry(each, f"{prefix}/") for each in objects if each.key != top]
    kept = [each for each in entries if not _is_archive_file(each.path)]
    return sorted((_add_metadata(bucket, prefix, each) for each in kept), key=lambda e: e.path)


def _is_archive_file(path: str) -> bool:
    """Say whether a path belongs to the archive's manifest, or is a folder above it."""
    return (
        path == ARCHIVE_FOLDER
        or f"{path}/".startswith(f"{ARCHIVE_FOLDER}/")
        or path == ARCHIVE_FOLDER.partition("/")[0]
    )


def _entry(found: "StoredObject", prefix: str) -> TreeEntry:
    path, time = found.key.removeprefix(prefix), round(found.modified * 1e9)
    if path.endswith("/"):
        return TreeEntry(path.rstrip("/"), FOLDER, 0o755, 0, time)
    return TreeEntry(path, size=found.size, mtime_ns=time)


def _add_folders(entries: list[TreeEntry], top: str) -> Iterator[TreeEntry]:
    """Add folders that have no object, each before its contents, except the folder `top`."""
    seen = {"", top}
    for entry in sorted(entries, key=lambda each: each.path.split("/")):
        parts = entry.path.split("/")
        for count in range(1, len(parts)):
            above = "/".join(parts[:count])
            if above not in seen and not top.startswith(f"{above}/"):
                seen.add(above)
                yield TreeEntry(above, FOLDER, 0o755)
        if entry.path not in seen:
            seen.add(entry.path)
            yield entry


def _add_metadata(bucket: "BucketStore", prefix: str, entry: TreeEntry) -> TreeEntry:
    end = "/" if entry.kind == FOLDER else ""
    head = bucket.head(f"{prefix}/{entry.path}{end}")
    return _apply_head(entry, head) if head is not None else entry


def _apply_head(entry: TreeEntry, head: "ObjectHead") -> TreeEntry:
    found = from_metadata(entry, head.metadata)
    return found._replace(size=0) if found.kind != "file" else found


class LinkedSource:
    """A folder or file of the bucket, as a `TreeSource`."""

    def __init__(self, bucket: "BucketStore", prefix: str, store: PosixArchive, name: str) -> None:
        self._bucket, self._prefix, self._store, self._name = bucket, prefix, store, name

    @cached_property
    def _listed(self) -> list[TreeEntry]:
        return list_entries(self._bucket, self._prefix, self._name, deep=True)

    @property
    def is_folder(self) -> bool:
        return [each.path for each in self._listed] != [self._name]

    @property
    def exists(self) -> bool:
        if self._listed:
            return True
        return self._bucket.head(f"{self._prefix}/{self._name}/") is not None

    def entries(self, left_out: list[LeftOut]) -> Iterator[TreeEntry]:
        top = self._name if self.is_folder else self._name.rpartition("/")[0]
        for entry in self._with_metadata():
            path = entry.path[len(top) :].lstrip("/")
            if entry.kind == LINK:
                entry = entry._replace(target=self._target(entry))
            yield entry._replace(path=path)

    def _with_metadata(self) -> Iterator[TreeEntry]:
        """Read the metadata of the entries in parallel, by one call each."""
        add = partial(_add_metadata, self._bucket, self._prefix)
        if self._listed:
            add(self._listed[0])  # makes the SDK's client, before threads would make several
        with ThreadPoolExecutor(8) as pool:
            yield from pool.map(add, self._listed)

    def _target(self, entry: TreeEntry) -> str:
        found = self._store.get(entry.path) or b""
        return found.decode("utf-8", "surrogateescape")

    @contextmanager
    def open(self, entry: TreeEntry) -> Iterator[OpenedFile]:
        above = self._name if self.is_folder else self._name.rpartition("/")[0]
        path = join_path(above, entry.path)
        before = self._bucket.head(f"{self._prefix}/{path}")

        def read(start: int, length: int) -> bytes:
            return self._store.read(path, start, length) or b""

        def is_unchanged() -> bool:
            return self._bucket.head(f"{self._prefix}/{path}") == before

        size = before.size if before is not None else 0
        yield OpenedFile(entry._replace(size=size), read, is_unchanged)


class ObjectWriter:
    """Writes files of this machine as objects with POSIX metadata, which FSx imports."""

    def __init__(
        self, bucket: "BucketStore", prefix: str, store: PosixArchive, checksum: bool
    ) -> None:
        self._bucket, self._prefix, self._store = bucket, prefix, store
        self._checksum = checksum

    def send(self, copy: PlannedCopy, progress: TransferProgress) -> TransferResult:
        """Send one source. Files with the same size and time are unchanged. Raises StoreError."""
        left_out: list[LeftOut] = []
        tree, above = source_tree(copy), copy.target_folder
        objects = self._bucket.list_objects(f"{self._prefix}/{copy.name}")
        stored = {each.key: each.size for each in objects}
        entries = list(tree.walk("", left_out))
        self._put_entries(above, entries, stored)
        files_to_send = [entry for entry in entries if entry.is_file]
        progress.begin("pushing", len(files_to_send), sum(entry.size for entry in files_to_send))

        def send(entry: TreeEntry) -> tuple[str, bool]:
            return self._send_file(tree, entry, join_path(above, entry.path), stored, progress)

        files = size = 0
        missing: list[LeftOut] = []
        for batch in progress.each(send, files_to_send):
            for entry, (why, was_sent) in batch:
                if why:
                    missing.append(LeftOut(join_path(above, entry.path), why))
                elif was_sent:
                    files, size = files + 1, size + entry.size
        unchanged = len(files_to_send) - files - len(missing)
        return TransferResult(files, size, unchanged, tuple(left_out), tuple(missing))

    def _put_entries(self, above: str, entries: list[TreeEntry], stored: dict[str, int]) -> None:
        """Write objects for folders and links, and for the folders above the target."""
        parts = above.split("/") if above else []
        for count in range(1, len(parts) + 1):
            path = "/".join(parts[:count])
            if self._bucket.head(f"{self._prefix}/{path}/") is None:
                self._store.put_entry(TreeEntry(path, FOLDER, 0o755))
        for entry in entries:
            key = f"{self._prefix}/{join_path(above, entry.path)}"
            if entry.kind == LINK or (entry.kind == FOLDER and f"{key}/" not in stored):
                self._store.put_entry(entry._replace(path=join_path(above, entry.path)))

    def _send_file(
        self,
        tree: Tree,
        entry: TreeEntry,
        path: str,
        stored: dict[str, int],
        progress: TransferProgress,
    ) -> tuple[str, bool]:
        """Send one file if it differs; return why that failed or "", and whether it was sent."""
        if key_of(path) != path:
            return _NOT_A_KEY, False
        try:
            reader = Reader(tree, entry.path)
        except OSError as error:
            return error.strerror or str(error), False
        try:
            size = reader.entry.size
            if stored.get(f"{self._prefix}/{path}") == size and self._is_same(reader, path):
                progress.finish_file(path, size)
                return "", False
            self._store.send(path, reader.as_file(path), partial(progress.count, path))
            progress.finish_file(path)
            return "", True
        except SourceChanged as error:
            return str(error), False
        finally:
            reader.close()

    def _is_same(self, reader: Reader, path: str) -> bool:
        head = self._bucket.head(f"{self._prefix}/{path}")
        if head is None:
            return False
        if self._checksum:
            size = reader.entry.size
            return digest_of(reader.read, size) == stored_digest(self._store, path, size)
        stored = from_metadata(reader.entry._replace(mtime_ns=0), head.metadata)
        return stored.mtime_ns // 1000 == reader.entry.mtime_ns // 1000
