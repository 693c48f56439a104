"""S3: an environment's bucket, its objects, and how it is emptied for good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from batchml.aws.failures import translated
from batchml.aws.session import Session
from batchml.errors import ServiceError

_MAX_DELETE = 1000  # keys of one DeleteObjects


class Object(Struct, frozen=True):
    key: str
    size: int  # bytes
    modified: float  # seconds since the epoch


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

    def list(self, prefix: str) -> list[Object]:
        """The objects whose keys begin so, in the order of their keys."""
        found: list[Object] = []
        with translated("ListObjectsV2"):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._name, Prefix=prefix):
                found += [
                    Object(each["Key"], each["Size"], each["LastModified"].timestamp())
                    for each in page.get("Contents", ())
                ]
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
                    _delete(client, bucket, found)
                    count += len(found)
    except ServiceError as error:
        if error.code != "NoSuchBucket":
            raise
    return count


def _delete(client: Any, bucket: str, found: list[dict[str, Any]]) -> None:
    keys = [{"Key": each["Key"], "VersionId": each["VersionId"]} for each in found]
    with translated("DeleteObjects"):
        answer = client.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
    for error in answer.get("Errors", ()):
        raise ServiceError(
            "DeleteObjects", error.get("Code", ""), f"{error.get('Key')}: {error.get('Message')}", 0
        )
