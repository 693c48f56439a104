"""Files of a workspace as objects of the bucket that it is linked to.

An object that FSx wrote, or that we did, says what it is as a file; of another, S3's own words are
all that is known. Folders are keys that end with a slash, or stand in those of what is in them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from batchml.ops.workspace import Way
from batchml.runtime.transfer.backends import PosixVault, digest_stored, from_metadata, key_of
from batchml.runtime.transfer.files import Changed, digest_of
from batchml.runtime.transfer.parallel import Account
from batchml.runtime.transfer.receive import Opened, Result
from batchml.runtime.transfer.tree import FOLDER, LINK, OWN, Entry, LeftOut, Reader, Tree, joined
from batchml.runtime.transfer.worker import Alone

if TYPE_CHECKING:
    from batchml.aws.s3 import About, Bucket, Object

_ODD = "its name cannot be that of an object in S3"


def entries_of(bucket: "Bucket", prefix: str, name: str, *, deep: bool) -> list[Entry]:
    """What lies in a folder, by name, with paths from the workspace on; of a file, the file.

    Of a folder that is not listed deeply, each thing is asked for what it is.
    """
    about = bucket.about(f"{prefix}/{name}") if name else None
    if about is not None:
        return [_known(Entry(name, size=about.size), about)]
    top = f"{prefix}/{name}/" if name else f"{prefix}/"
    if deep:
        found = [_entry(each, f"{prefix}/") for each in bucket.list(top)]
        return [*_with_folders([each for each in found if not _is_paper(each.path)], name)]
    objects, folders = bucket.folder(top)
    entries = [Entry(each[len(prefix) + 1 : -1], FOLDER, 0o755) for each in folders]
    entries += [_entry(each, f"{prefix}/") for each in objects if each.key != top]
    kept = [each for each in entries if not _is_paper(each.path)]
    asked = (_asked(bucket, prefix, each) for each in kept)
    return sorted(asked, key=lambda entry: entry.path)


def _is_paper(path: str) -> bool:
    """Whether it is the archive's, or only on the way to it."""
    return path == OWN or f"{path}/".startswith(f"{OWN}/") or path == OWN.partition("/")[0]


def _entry(found: "Object", prefix: str) -> Entry:
    path, time = found.key.removeprefix(prefix), round(found.modified * 1e9)
    if path.endswith("/"):
        return Entry(path.rstrip("/"), FOLDER, 0o755, 0, time)
    return Entry(path, size=found.size, mtime_ns=time)


def _with_folders(entries: list[Entry], top: str) -> Iterator[Entry]:
    """Also the folders that have no key, each before what is in it; without the top."""
    seen = {"", top}
    for entry in sorted(entries, key=lambda each: each.path.split("/")):
        parts = entry.path.split("/")
        for count in range(1, len(parts)):
            above = "/".join(parts[:count])
            if above not in seen and not top.startswith(f"{above}/"):
                seen.add(above)
                yield Entry(above, FOLDER, 0o755)
        if entry.path not in seen:
            seen.add(entry.path)
            yield entry


def _asked(bucket: "Bucket", prefix: str, entry: Entry) -> Entry:
    end = "/" if entry.kind == FOLDER else ""
    about = bucket.about(f"{prefix}/{entry.path}{end}")
    return _known(entry, about) if about is not None else entry


def _known(entry: Entry, about: "About") -> Entry:
    found = from_metadata(entry, about.metadata)
    return found._replace(size=0) if found.kind != "file" else found


def tree_of(way: Way) -> Tree:
    """A source: a folder, or one file under the name that it is to have."""
    if way.is_folder:
        return Tree(str(way.source))
    return Alone(str(way.source.parent), way.source.name, way.name.rpartition("/")[2])


class LinkSource:
    """A folder or file of the bucket, as `carry_receive.Source` has them."""

    def __init__(self, bucket: "Bucket", prefix: str, vault: PosixVault, name: str) -> None:
        self._bucket, self._prefix, self._vault, self._name = bucket, prefix, vault, name

    @cached_property
    def _listed(self) -> list[Entry]:
        return entries_of(self._bucket, self._prefix, self._name, deep=True)

    @property
    def is_folder(self) -> bool:
        return [each.path for each in self._listed] != [self._name]

    @property
    def is_there(self) -> bool:
        if self._listed:
            return True
        return self._bucket.about(f"{self._prefix}/{self._name}/") is not None

    def entries(self, left_out: list[LeftOut]) -> Iterator[Entry]:
        top = self._name if self.is_folder else self._name.rpartition("/")[0]
        for entry in self._each():
            path = entry.path[len(top) :].lstrip("/")
            if entry.kind == LINK:
                entry = entry._replace(target=self._target(entry))
            yield entry._replace(path=path)

    def _each(self) -> Iterator[Entry]:
        """What each is, some at a time: a call for every one of them."""
        from concurrent.futures import ThreadPoolExecutor

        if self._listed:
            _asked(
                self._bucket, self._prefix, self._listed[0]
            )  # two threads would make two clients
        with ThreadPoolExecutor(8) as pool:
            yield from pool.map(lambda each: _asked(self._bucket, self._prefix, each), self._listed)

    def _target(self, entry: Entry) -> str:
        found = self._vault.get(entry.path) or b""
        return found.decode("utf-8", "surrogateescape")

    @contextmanager
    def open(self, entry: Entry) -> Iterator[Opened]:
        above = self._name if self.is_folder else self._name.rpartition("/")[0]
        path = joined(above, entry.path)
        before = self._bucket.about(f"{self._prefix}/{path}")

        def read(start: int, length: int) -> bytes:
            return self._vault.read(path, start, length) or b""

        def settled() -> bool:
            return self._bucket.about(f"{self._prefix}/{path}") == before

        size = before.size if before is not None else 0
        yield Opened(entry._replace(size=size), read, settled)


class Sender:
    """Writes files of this machine as objects that FSx brings in as files."""

    def __init__(self, bucket: "Bucket", prefix: str, vault: PosixVault, checksum: bool) -> None:
        self._bucket, self._prefix, self._vault = bucket, prefix, vault
        self._checksum = checksum

    def send(self, way: Way, account: Account) -> Result:
        """One source. What is there with its size and time is unchanged. Raises StoreError."""
        left_out: list[LeftOut] = []
        tree, above = tree_of(way), way.into
        there = {each.key: each.size for each in self._bucket.list(f"{self._prefix}/{way.name}")}
        entries = list(tree.walk("", left_out))
        self._mark(above, entries, there)
        coming = [entry for entry in entries if entry.is_file]
        account.begin("pushing", len(coming), sum(entry.size for entry in coming))

        def bring(entry: Entry) -> tuple[str, bool]:
            return self._bring(tree, entry, joined(above, entry.path), there, account)

        files = size = 0
        missing: list[LeftOut] = []
        for some in account.each(bring, coming):
            for entry, (why, was_sent) in some:
                if why:
                    missing.append(LeftOut(joined(above, entry.path), why))
                elif was_sent:
                    files, size = files + 1, size + entry.size
        unchanged = len(coming) - files - len(missing)
        return Result(files, size, unchanged, tuple(left_out), tuple(missing))

    def _mark(self, above: str, entries: list[Entry], there: dict[str, int]) -> None:
        """Folders and links: their keys say what they are. Those above belong to the user, too."""
        parts = above.split("/") if above else []
        for count in range(1, len(parts) + 1):
            path = "/".join(parts[:count])
            if self._bucket.about(f"{self._prefix}/{path}/") is None:
                self._vault.mark(Entry(path, FOLDER, 0o755))
        for entry in entries:
            key = f"{self._prefix}/{joined(above, entry.path)}"
            if entry.kind == LINK or (entry.kind == FOLDER and f"{key}/" not in there):
                self._vault.mark(entry._replace(path=joined(above, entry.path)))

    def _bring(
        self, tree: Tree, entry: Entry, path: str, there: dict[str, int], account: Account
    ) -> tuple[str, bool]:
        """Have one file there; why not, and whether it was sent."""
        if key_of(path) != path:
            return _ODD, False
        try:
            reader = Reader(tree, entry.path)
        except OSError as error:
            return error.strerror or str(error), False
        try:
            now = reader.entry
            if there.get(f"{self._prefix}/{path}") == now.size and self._is_same(reader, path):
                account.done(path, now.size)
                return "", False
            self._vault.send(
                path, now._replace(path=path), reader.read,
                lambda count, was_there: account.moved(path, count, was_there),
                lambda: not reader.has_changed(),
            )  # fmt: skip
            account.done(path)
            return "", True
        except Changed as error:
            return str(error), False
        finally:
            reader.close()

    def _is_same(self, reader: Reader, path: str) -> bool:
        about = self._bucket.about(f"{self._prefix}/{path}")
        if about is None:
            return False
        if self._checksum:
            size = reader.entry.size
            stored = digest_stored(self._vault, path, size, lambda count, was_there: None)
            return digest_of(reader.fd, size) == stored
        known = from_metadata(reader.entry._replace(mtime_ns=0), about.metadata)
        return known.mtime_ns // 1000 == reader.entry.mtime_ns // 1000
