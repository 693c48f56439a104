"""S3: read and write the objects in an environment's bucket, and empty a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from batchml.aws.errors import call, read_pages, translate_errors
from batchml.aws.session import Session
from batchml.errors import AccessError, BatchmlError, ServiceError
from batchml.runtime.storage.store import Store, check_key, is_missing

_MAX_DELETE = 1000  # keys of one DeleteObjects; S3's limit
_PARALLEL = 10  # simultaneous calls: the connections that an SDK client keeps
_TRIES = 5  # of a conditional write that conflicts with another


class StoredObject(Struct, frozen=True):
    """An object of a listing. `key` is relative to the store's prefix."""

    key: str
    size: int  # bytes
    modified: float  # seconds since the epoch


class ObjectHead(Struct, frozen=True):
    """The answer of HeadObject. `metadata` is the user-defined metadata, without `x-amz-meta-`."""

    size: int
    metadata: dict[str, str] = {}


class BucketStore(Store):
    """The objects of a bucket below a prefix, as a store; without a prefix, the whole bucket.

    Each method is one call, but listings need a call for each 1,000 objects. Methods raise the
    errors of `translate_errors`, and StoreError for a text that is not a valid key.
    """

    def __init__(self, session: Session, bucket: str, prefix: str = "") -> None:
        self._session = session
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    def get(self, key: str) -> bytes | None:
        found = self._find("GetObject", self._key(key))
        if found is None:
            return None
        with translate_errors("GetObject"):
            return bytes(found["Body"].read())

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if len(keys) < 2:
            return [self.get(key) for key in keys]
        from concurrent.futures import ThreadPoolExecutor

        self._client  # noqa: B018 - create the client now, before several threads do
        with ThreadPoolExecutor(_PARALLEL) as threads:
            return list(threads.map(self.get, keys))

    def has(self, key: str) -> bool:
        return self._find("HeadObject", self._key(key)) is not None

    def put(self, key: str, data: bytes) -> None:
        call(self._client, "PutObject", Bucket=self._bucket, Key=self._key(key), Body=data)

    def create(self, key: str, data: bytes) -> bool:
        name = self._key(key)
        for _ in range(_TRIES):
            try:
                request = {"Bucket": self._bucket, "Key": name, "Body": data, "IfNoneMatch": "*"}
                call(self._client, "PutObject", **request)
                return True
            except ServiceError as error:
                # Of two simultaneous writes, S3 asks one to try again.
                if error.code == "ConditionalRequestConflict":
                    continue
                if error.code != "PreconditionFailed":
                    raise
                return _was_sent_again(error) and self.get(key) == data
        return False

    def keys(self, prefix: str, limit: int | None = None) -> list[str]:
        return sorted(each.key for each in self.list_objects(prefix, limit))

    def delete(self, *keys: str) -> None:
        names = [{"Key": self._key(key)} for key in keys]
        for start in range(0, len(names), _MAX_DELETE):
            _delete(self._client, self._bucket, names[start : start + _MAX_DELETE])

    def read(self, key: str, start: int, length: int) -> bytes | None:
        if length <= 0:
            return b"" if self.has(key) else None
        name = self._key(key)
        found = self._find("GetObject", name, Range=f"bytes={start}-{start + length - 1}")
        if found is None:
            return None
        with translate_errors("GetObject"):
            return bytes(found["Body"].read()) if "Body" in found else b""

    def put_file(self, key: str, path: str) -> None:
        with translate_errors("PutObject"), open(path, "rb") as file:
            self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=file)

    def get_file(self, key: str, path: str) -> bool:
        found = self._find("GetObject", self._key(key))
        if found is None:
            return False
        target = Path(path)
        temporary = target.with_name(f".{target.name[:200]}.part")
        try:
            with translate_errors("GetObject"), open(temporary, "wb") as file:
                for block in found["Body"].iter_chunks(1 << 20):
                    file.write(block)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    # --- Beyond the methods of `Store`: sizes, times and metadata of objects ----------------------

    def head(self, key: str) -> ObjectHead | None:
        """Size and metadata of an object; None if it does not exist."""
        found = self._find("HeadObject", self._prefix + key)
        if found is None:
            return None
        return ObjectHead(found["ContentLength"], found.get("Metadata", {}))

    def list_objects(self, prefix: str, limit: int | None = None) -> list[StoredObject]:
        """The objects whose keys begin with `prefix`, in the order of their keys."""
        found: list[StoredObject] = []
        pages = {"MaxItems": limit}
        for page in self._list(Prefix=self._prefix + prefix, PaginationConfig=pages):
            found += map(self._object, page.get("Contents", ()))
        return found

    def list_folder(self, prefix: str) -> tuple[list[StoredObject], list[str]]:
        """The objects and the folders directly below a prefix that ends with a slash.

        The folders are prefixes that end with a slash.
        """
        found: list[StoredObject] = []
        folders: list[str] = []
        for page in self._list(Prefix=self._prefix + prefix, Delimiter="/"):
            found += map(self._object, page.get("Contents", ()))
            folders += [
                each["Prefix"][len(self._prefix) :] for each in page.get("CommonPrefixes", ())
            ]
        return found, folders

    def _list(self, **arguments: Any) -> list[dict[str, Any]]:
        return [*read_pages(self._client, "ListObjectsV2", Bucket=self._bucket, **arguments)]

    def _object(self, each: dict[str, Any]) -> StoredObject:
        key = each["Key"][len(self._prefix) :]
        return StoredObject(key, each["Size"], each["LastModified"].timestamp())

    def _find(self, operation: str, name: str, **more: str) -> dict[str, Any] | None:
        """The answer of GetObject or HeadObject; None if the object does not exist.

        For a range behind the end of an object it is empty.
        """
        try:
            return call(self._client, operation, Bucket=self._bucket, Key=name, **more)
        except (AccessError, ServiceError) as error:
            if error.code == "InvalidRange":
                return {}
            if self._says_missing(operation, name, error):
                return None
            raise

    def _says_missing(self, operation: str, name: str, error: BatchmlError) -> bool:
        answer = getattr(error.__cause__, "response", {})
        status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        refusal = answer.get("Error", {})
        if status == 403 and operation == "HeadObject":  # without a body it gives no reason
            return self._find("GetObject", name, Range="bytes=0-0") is None
        code, message = str(refusal.get("Code", "")), str(refusal.get("Message", ""))
        return is_missing(status, code, message, lambda: self._may_exist(name))

    def _may_exist(self, name: str) -> bool:
        try:
            found = call(self._client, "ListObjectsV2", Bucket=self._bucket, Prefix=name, MaxKeys=1)
        except AccessError:
            return True
        return any(each["Key"] == name for each in found.get("Contents", ()))

    def _key(self, key: str) -> str:
        return self._prefix + check_key(key)

    @property
    def _client(self) -> Any:
        return self._session.client("s3")


def _was_sent_again(error: ServiceError) -> bool:
    """Whether the SDK sent a call again, so that the first answer may have been lost."""
    answer = getattr(error.__cause__, "response", {})
    return bool(answer.get("ResponseMetadata", {}).get("RetryAttempts"))


def empty_bucket(session: Session, bucket: str) -> int:
    """Delete all versions of all objects, and return their number: 0 if there is no bucket.

    Raises ServiceError if S3 does not delete one of them.
    """
    client, count = session.client("s3"), 0
    request = {"Bucket": bucket, "PaginationConfig": {"PageSize": _MAX_DELETE}}
    try:
        for page in read_pages(client, "ListObjectVersions", **request):
            found = [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]
            if found:
                versions = [{name: each[name] for name in ("Key", "VersionId")} for each in found]
                _delete(client, bucket, versions)
                count += len(found)
    except ServiceError as error:
        if error.code != "NoSuchBucket":
            raise
    return count


def _delete(client: Any, bucket: str, keys: list[dict[str, Any]]) -> None:
    deletion = {"Objects": keys, "Quiet": True}
    answer = call(client, "DeleteObjects", Bucket=bucket, Delete=deletion)
    for error in answer.get("Errors", ()):
        raise ServiceError(
            "DeleteObjects", error.get("Code", ""), f"{error.get('Key')}: {error.get('Message')}", 0
        )
