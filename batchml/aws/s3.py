"""S3: an environment's bucket, its objects, and how it is emptied for good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from batchml.aws.errors import translated
from batchml.aws.session import Session
from batchml.errors import ServiceError

_MAX_DELETE = 1000  # keys of one DeleteObjects
_AT_ONCE = 10  # calls side by side: the connections that a client of the SDK keeps
_TRIES = 5  # of a conditional write that met another


class Object(Struct, frozen=True):
    key: str
    size: int  # bytes
    modified: float  # seconds since the epoch


class About(Struct, frozen=True):
    """What S3 says of an object; `metadata` is its owner's, without `x-amz-meta-`."""

    size: int
    etag: str
    metadata: dict[str, str] = {}


class Bucket:
    """One bucket. Each method is one call, but for `list`, which is one for each 1,000 objects.

    All raise what `translated` makes of S3's refusals.
    """

    def __init__(self, session: Session, name: str) -> None:
        self._session = session
        self._name = name

    def has(self, key: str) -> bool:
        """Whether there is an object of this key."""
        return self._found("HeadObject", self._client.head_object, key) is not None

    def about(self, key: str) -> About | None:
        """What there is to say of an object without reading it; None when there is none."""
        found = self._found("HeadObject", self._client.head_object, key)
        if found is None:
            return None
        return About(found["ContentLength"], found.get("ETag", ""), found.get("Metadata", {}))

    def folder(self, prefix: str) -> tuple[list[Object], list[str]]:
        """The objects right below a prefix that ends with a slash, and what else begins so up to
        the next slash. A call for each 1,000 of both."""
        found: list[Object] = []
        below: list[str] = []
        with translated("ListObjectsV2"):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._name, Prefix=prefix, Delimiter="/"):
                found += map(_object, page.get("Contents", ()))
                below += [each["Prefix"] for each in page.get("CommonPrefixes", ())]
        return found, below

    def put(self, key: str, data: bytes) -> None:
        with translated("PutObject"):
            self._client.put_object(Bucket=self._name, Key=key, Body=data)

    def get(self, key: str) -> bytes | None:
        """An object's content; None when there is none."""
        found = self._found("GetObject", self._client.get_object, key)
        if found is None:
            return None
        with translated("GetObject"):
            return bytes(found["Body"].read())

    def list(self, prefix: str, most: int | None = None) -> list[Object]:
        """The objects whose keys begin so, in the order of their keys; the first `most` of them."""
        found: list[Object] = []
        with translated("ListObjectsV2"):
            pages = self._client.get_paginator("list_objects_v2")
            limit = {"MaxItems": most}
            for page in pages.paginate(Bucket=self._name, Prefix=prefix, PaginationConfig=limit):
                found += map(_object, page.get("Contents", ()))
        return found

    def download(self, key: str, path: Path) -> bool:
        """Write an object to a file, which is whole or not there; False when there is none."""
        found = self._found("GetObject", self._client.get_object, key)
        if found is None:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name[:200]}.part")
        try:
            with translated("GetObject"), open(temporary, "wb") as file:
                for block in found["Body"].iter_chunks(1 << 20):
                    file.write(block)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _found(self, operation: str, call: Any, key: str) -> Any:
        """The answer; None when there is no such object."""
        try:
            with translated(operation):
                return call(Bucket=self._name, Key=key)
        except ServiceError as error:
            # HEAD has no body, and so no better word than the status.
            if error.code in ("NoSuchKey", "404", "NotFound"):
                return None
            raise

    @property
    def _client(self) -> Any:
        return self._session.client("s3")


def _object(each: dict[str, Any]) -> Object:
    return Object(each["Key"], each["Size"], each["LastModified"].timestamp())


class BucketStore:
    """Keys below a prefix of a bucket, as `runtime/storage/store.py`'s Store has them.

    What fails is told as by `Bucket`, in the words for who works with the SDK.
    """

    def __init__(self, session: Session, bucket: str, prefix: str) -> None:
        self._session = session
        self._name = bucket
        self._bucket = Bucket(session, bucket)
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    def get(self, key: str) -> bytes | None:
        return self._bucket.get(self._prefix + key)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values in the order of their keys, some at a time."""
        if len(keys) < 2:
            return [self.get(key) for key in keys]
        from concurrent.futures import ThreadPoolExecutor

        self._client  # noqa: B018 - made here: two threads would make two
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return list(threads.map(self.get, keys))

    def put(self, key: str, data: bytes) -> None:
        self._bucket.put(self._prefix + key, data)

    def create(self, key: str, data: bytes) -> bool:
        for _ in range(_TRIES):
            try:
                with translated("PutObject"):
                    self._client.put_object(
                        Bucket=self._name, Key=self._prefix + key, Body=data, IfNoneMatch="*"
                    )
                return True
            except ServiceError as error:
                # Two at once, of which S3 says that one should try again.
                if error.code == "ConditionalRequestConflict":
                    continue
                if error.code != "PreconditionFailed":
                    raise
                return _was_sent_again(error) and self.get(key) == data
        return False

    def keys(self, prefix: str) -> list[str]:
        return self.first_keys(prefix, None)

    def first_keys(self, prefix: str, most: int | None) -> list[str]:
        """The first `most` of the keys that begin so: a call for each 1,000."""
        found = self._bucket.list(self._prefix + prefix, most)
        return sorted(each.key[len(self._prefix) :] for each in found)

    def delete(self, *keys: str) -> None:
        for start in range(0, len(keys), _MAX_DELETE):
            some = keys[start : start + _MAX_DELETE]
            _delete(self._client, self._name, [{"Key": self._prefix + key} for key in some])

    def read(self, key: str, start: int, length: int) -> bytes | None:
        if length <= 0:
            return b"" if self._bucket.has(self._prefix + key) else None
        try:
            with translated("GetObject"):
                found = self._client.get_object(
                    Bucket=self._name, Key=self._prefix + key,
                    Range=f"bytes={start}-{start + length - 1}",
                )  # fmt: skip
                return bytes(found["Body"].read())
        except ServiceError as error:
            if error.code == "InvalidRange":
                return b""
            if error.code == "NoSuchKey":
                return None
            raise

    def put_file(self, key: str, path: str) -> None:
        with translated("PutObject"), open(path, "rb") as file:
            self._client.put_object(Bucket=self._name, Key=self._prefix + key, Body=file)

    def get_file(self, key: str, path: str) -> bool:
        return self._bucket.download(self._prefix + key, Path(path))

    @property
    def _client(self) -> Any:
        return self._session.client("s3")


def _was_sent_again(error: ServiceError) -> bool:
    """Whether the SDK sent a call more than once: the first answer may have been lost."""
    answer = getattr(error.__cause__, "response", {})
    return bool(answer.get("ResponseMetadata", {}).get("RetryAttempts"))


def empty_bucket(session: Session, bucket: str) -> int:
    """Delete every version of every object; how many there were. None for a bucket that is gone.

    Raises ServiceError when S3 keeps some of them.
    """
    client, count = session.client("s3"), 0
    try:
        with translated("ListObjectVersions"):
            for page in client.get_paginator("list_object_versions").paginate(
                Bucket=bucket, PaginationConfig={"PageSize": _MAX_DELETE}
            ):
                found = [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]
                if found:
                    _delete(client, bucket, [_version(each) for each in found])
                    count += len(found)
    except ServiceError as error:
        if error.code != "NoSuchBucket":
            raise
    return count


def _version(found: dict[str, Any]) -> dict[str, Any]:
    return {"Key": found["Key"], "VersionId": found["VersionId"]}


def _delete(client: Any, bucket: str, keys: list[dict[str, Any]]) -> None:
    with translated("DeleteObjects"):
        answer = client.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
    for error in answer.get("Errors", ()):
        raise ServiceError(
            "DeleteObjects", error.get("Code", ""), f"{error.get('Key')}: {error.get('Message')}", 0
        )
