"""S3: empty a bucket for good. Its objects' older versions are objects too."""

from typing import Any

from batchml.aws.failures import translated
from batchml.aws.session import Session
from batchml.errors import ServiceError

_MAX_DELETE = 1000  # keys of one DeleteObjects


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
