"""The places that data sets come from: a prefix of a bucket in S3, or a folder.

A source lists its files with their versions, and reads blocks of them. A block that does not belong
to the listed version raises DataChanged, so that a copy never mixes two versions of a file.

Source: Amazon S3 API Reference, ListObjectsV2, GetObject (`If-Match`, `x-amz-checksum-mode`);
Amazon S3 User Guide, "Checking object integrity": an ETag is the MD5 of the content only for an
object that was sent in one part and is not encrypted by KMS or by a key of the user.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import stat
import zlib
from collections.abc import Mapping
from email.message import Message
from typing import Any, BinaryIO, Callable, Iterator, List, NamedTuple, Protocol, Set, Tuple, cast

from batchml.runtime.protocol.variables import folder_values
from batchml.runtime.storage.credentials import CredentialsProvider
from batchml.runtime.storage.s3 import S3Client
from batchml.runtime.storage.store import PATIENT, RetryLimits, StoreError, no_check

MAX_FILES = 2_000_000  # of one data set; its list is kept in memory
BLOCK = 32 << 20  # bytes that are read by one request, and have one digest
_READ = 1 << 20
_MD5 = re.compile(r"[0-9a-f]{32}")
_NAMED = 3  # keys in a message

Check = Callable[[], None]


class DataError(Exception):
    """A data set cannot be used: the sentence says which, why, and what to do.

    `temporary`: another attempt, or another host, may have it.
    """

    def __init__(self, text: str, temporary: bool = False) -> None:
        super().__init__(text)
        self.temporary = temporary


class DataChanged(Exception):
    """A file is not the one that was listed any more; the text is its name."""


class DataDamaged(Exception):
    """The bytes that came do not have the checksum that S3 keeps for them."""


class SourceFile(NamedTuple):
    """A file of a data set."""

    path: str  # below the folder of the data set
    size: int  # bytes
    version: str  # changes when the content does: an ETag, or inode and time
    changed: int  # when it was last changed, in ns since the epoch


class DataListing(NamedTuple):
    """The files of a data set, sorted by path. `only`: the source is this single file."""

    files: List[SourceFile]
    only: str = ""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class Sink(Protocol):
    """Receives the bytes of a block in order. Each `restart` begins again."""

    def restart(self) -> None: ...

    def write(self, data: bytes) -> None: ...


class DataSource(Protocol):
    """A place with a data set."""

    def list(self) -> DataListing:
        """List the files. Raises DataError, and StoreError."""

    def read(self, file: SourceFile, start: int, length: int, sink: Sink) -> None:
        """Read a part of a file.

        Raises DataChanged, DataDamaged, DataError, StoreError, and the errors of the sink.
        """


def open_source(name: str, url: str, environ: Mapping[str, str], check: Check) -> DataSource:
    """The source at `s3://BUCKET/PREFIX`, or in a folder. Raises DataError for another address."""
    for folder in ("workspace", "data"):
        if url.startswith(f"{{{folder}}}/"):
            url = folder_values(environ)[folder] + url[len(folder) + 2 :]
    if url.startswith("s3://"):
        return S3Source(name, url, environ, check)
    if os.path.isabs(url):
        return DataFolder(name, url, check)
    raise DataError(f"data.{name}: {url!r} is neither s3://BUCKET/PREFIX nor a folder's path.")


# --- S3 -------------------------------------------------------------------------------------------


class S3Source:
    """A prefix of a bucket, as a folder: `s3://BUCKET/sets/train` has the objects below
    `sets/train/`, or is the object `sets/train`.
    """

    def __init__(
        self,
        name: str,
        url: str,
        environ: Mapping[str, str],
        check: Check = no_check,
        limits: RetryLimits = PATIENT,
    ) -> None:
        bucket, _, prefix = url[len("s3://") :].partition("/")
        if not bucket:
            raise DataError(f"data.{name}: {url!r} names no bucket. Write s3://BUCKET/PREFIX.")
        self._name, self._bucket, self._top = name, bucket, prefix.strip("/")
        self._prefix = f"{self._top}/" if self._top else ""
        credentials = CredentialsProvider(environ, prefers_variables=True)
        self._client = S3Client(
            bucket, environ, check=check, limits=limits, credentials=credentials
        )

    @property
    def _url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}"

    def list(self) -> DataListing:
        try:
            files = list(self._objects())
            if not files and self._top:
                found = next(iter(self._client.list_objects(self._top, 1)), None)
                if found is not None and found.key == self._top:
                    name = self._top.rpartition("/")[2]
                    self._prefix = self._top[: -len(name)]
                    file = SourceFile(name, found.size, found.etag, found.changed)
                    return DataListing([file], only=name)
        except StoreError as error:
            raise self._refused(error) from error
        if not files:
            raise DataError(f"data.{self._name}: {self._url} has no objects.{self._beside()}")
        files.sort()
        _check_paths(self._name, self._url, files)
        return DataListing(files)

    def _objects(self) -> Iterator[SourceFile]:
        for number, found in enumerate(self._client.list_objects(self._prefix)):
            if number >= MAX_FILES:
                raise DataError(
                    f"data.{self._name}: {self._url} has more than {MAX_FILES:,} objects. Pack "
                    f"them into larger files."
                )
            path = found.key[len(self._prefix) :]
            if path and not path.endswith("/"):  # the mark of a folder
                yield SourceFile(path, found.size, found.etag, found.changed)

    def _beside(self) -> str:
        """What the bucket has instead of a prefix without objects."""
        above = self._top.rpartition("/")[0]
        above = f"{above}/" if above else ""
        try:
            names = self._client.list_folders(above)
        except StoreError:
            return " Check its spelling."
        place = f"s3://{self._bucket}/{above}"
        if not names:
            return f" {place} is empty, too." if above else " The bucket has no folders."
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        return f" {place} has: {shown}"

    def read(self, file: SourceFile, start: int, length: int, sink: Sink) -> None:
        headers = {"if-match": f'"{file.version}"'}
        is_whole = length == file.size
        if is_whole:
            headers["x-amz-checksum-mode"] = "ENABLED"
        else:
            headers["range"] = f"bytes={start}-{start + length - 1}"
        for tries_left in (1, 0):
            into = _Checked(sink, is_whole)
            try:
                answer = self._client.send(
                    "GET", self._prefix + file.path, (), headers, into=cast(BinaryIO, into)
                )
                if into.size != length:
                    raise DataDamaged(f"{into.size} bytes came instead of {length}")
                if is_whole:
                    into.compare(answer.headers, file.version)
                return
            except DataDamaged:
                if not tries_left:
                    raise
            except StoreError as error:
                if error.status in (404, 412) and error.code != "NoSuchBucket":
                    raise DataChanged(file.path) from error
                raise self._refused(error) from error

    def _refused(self, error: StoreError) -> Exception:
        """The error with what to do about it."""
        if error.temporary:
            return error
        if error.status == 403 and error.code == "InvalidObjectState":
            why = "has objects in an archive class of S3. Restore them first"
        elif error.status == 403:
            why = (
                "may not be read by this job's role. In AWS list it under `data` of the "
                "environment, or give the job keys of its own"
            )
        elif error.code == "NoSuchBucket":
            why = "does not exist: there is no such bucket"
        else:
            return DataError(f"data.{self._name}: {error}")
        return DataError(f"data.{self._name}: {self._url} {why} ({error}).")


class _Checked:
    """A file for S3Client, which passes the bytes of one answer on and computes their checksums."""

    def __init__(self, sink: Sink, has_checksums: bool) -> None:
        self._sink, self._has_checksums = sink, has_checksums
        self.size = self._crc = 0
        self._md5 = _new_md5()

    def seek(self, _: int) -> None:
        self._sink.restart()
        self.size = self._crc = 0
        self._md5 = _new_md5()

    def truncate(self) -> None:
        """Nothing to do: `seek` has begun again."""

    def write(self, data: bytes) -> None:
        self.size += len(data)
        if self._has_checksums:
            self._crc = zlib.crc32(data, self._crc)
            if self._md5 is not None:
                self._md5.update(data)
        self._sink.write(data)

    def compare(self, headers: Message, etag: str) -> None:
        """Compare the checksums that S3 sent with those of the bytes. Raises DataDamaged."""
        wanted = headers.get("x-amz-checksum-crc32", "")
        if wanted and "-" not in wanted:
            ours = base64.b64encode(self._crc.to_bytes(4, "big")).decode()
            if wanted != ours:
                raise DataDamaged(f"their CRC32 is {ours}, S3 keeps {wanted}")
        has_key = headers.get("x-amz-server-side-encryption", "AES256") != "AES256"
        has_key = has_key or "x-amz-server-side-encryption-customer-algorithm" in headers
        if self._md5 is None or has_key or not _MD5.fullmatch(etag):
            return
        if self._md5.hexdigest() != etag:
            raise DataDamaged(f"their MD5 is {self._md5.hexdigest()}, S3 keeps {etag}")


def _new_md5() -> Any:
    """An MD5; None where the system forbids it (FIPS)."""
    try:
        return hashlib.md5()
    except ValueError:
        return None


def _check_paths(name: str, url: str, files: List[SourceFile]) -> None:
    """Raise DataError if the keys cannot be files of a folder."""
    wrong = [
        file.path for file in files
        if "\0" in file.path
        or any(part in ("", ".", "..") or len(part.encode()) > 255 for part in file.path.split("/"))
    ]  # fmt: skip
    paths = {file.path for file in files}
    for file in files:
        above = file.path.rpartition("/")[0]
        while above:
            if above in paths:
                wrong.append(above)
            above = above.rpartition("/")[0]
    if wrong:
        shown = ", ".join(repr(each[:80]) for each in list(dict.fromkeys(wrong))[:_NAMED])
        raise DataError(
            f"data.{name}: {url} has {len(set(wrong))} objects whose keys cannot be files of a "
            f"folder: {shown}."
        )


# --- A folder -------------------------------------------------------------------------------------


class DataFolder:
    """A folder, or one file. Links are followed; a folder that was seen already is left out."""

    def __init__(self, name: str, path: str, check: Check = no_check) -> None:
        self.path = self._root = os.path.normpath(path)
        self._name, self._check = name, check

    def is_on(self, path: str) -> bool:
        """Whether the folder is on the same file system as `path`."""
        return os.stat(self._root).st_dev == os.stat(path).st_dev

    def list(self) -> DataListing:
        root = self._root
        try:
            state = os.stat(root)
            if stat.S_ISREG(state.st_mode):
                self._root, only = os.path.split(root)
                return DataListing([_source_file(only, state)], only=only)
            files = sorted(self._walk())
        except OSError as error:
            raise DataError(
                f"data.{self._name}: {root} cannot be read here: {error.strerror}. A container "
                f"sees its image, /workspace and the folders that are mounted for it."
            ) from error
        if not files:
            raise DataError(f"data.{self._name}: the folder {root} has no files.")
        return DataListing(files)

    def _walk(self) -> Iterator[SourceFile]:
        seen: Set[Tuple[int, int]] = set()
        number = 0
        for folder, names, files in os.walk(self._root, onerror=_raise, followlinks=True):
            self._check()
            state = os.stat(folder)
            if (state.st_dev, state.st_ino) in seen:
                names[:] = []
                continue
            seen.add((state.st_dev, state.st_ino))
            for each in files:
                path = os.path.join(folder, each)
                try:
                    found = os.stat(path)
                except FileNotFoundError:
                    continue  # a link that leads nowhere
                if stat.S_ISREG(found.st_mode):
                    number += 1
                    yield _source_file(os.path.relpath(path, self._root), found)
                if number > MAX_FILES:
                    raise DataError(
                        f"data.{self._name}: {self._root} has more than {MAX_FILES:,} files. Pack "
                        f"them into larger files."
                    )

    def read(self, file: SourceFile, start: int, length: int, sink: Sink) -> None:
        sink.restart()
        try:
            with open(os.path.join(self._root, file.path), "rb", buffering=0) as opened:
                opened.seek(start)
                left = length
                while left:
                    self._check()
                    data = opened.read(min(_READ, left))
                    if not data:
                        raise DataChanged(file.path)
                    left -= len(data)
                    sink.write(data)
                if _source_file(file.path, os.fstat(opened.fileno())) != file:
                    raise DataChanged(file.path)
        except FileNotFoundError as error:
            raise DataChanged(file.path) from error


def _raise(error: OSError) -> None:
    raise error


def _source_file(path: str, state: os.stat_result) -> SourceFile:
    version = f"{state.st_dev:x}.{state.st_ino:x}.{state.st_ctime_ns}"
    return SourceFile(path, state.st_size, version, state.st_mtime_ns)
