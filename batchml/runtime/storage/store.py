"""The `Store`: values and files by key, which outlive a run.

Backends: a folder (`folder.py`), S3 with the standard library (`s3.py`), and for clients S3 with
boto3 (`batchml/aws/s3.py`). `backends.open_store` opens the store at an address.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import List, NamedTuple, Optional, Protocol


class StoreError(OSError):
    """A store could not be read or written. The text says which operation failed, where and why.

    `temporary`: the same call may succeed later, or from another host. `code` is S3's error code,
    `status` the status of its answer; without an answer 0.
    """

    def __init__(self, text: str, temporary: bool = False, code: str = "", status: int = 0) -> None:
        super().__init__(text)
        self.temporary = temporary
        self.code = code
        self.status = status


class RetryLimits(NamedTuple):
    """The limits of one request to S3."""

    tries: int  # the most times that it is sent
    timeout: float  # seconds without a byte


PATIENT = RetryLimits(7, 20.0)  # the pauses between the tries add up to 25 s at most
BRIEF = RetryLimits(2, 3.0)  # for calls during which the program's output is not copied


class Store(Protocol):
    """Values and files by key. A key is one or more parts joined by `/`; no part is `.` or `..`.

    Every method raises StoreError when the store cannot be read or written.
    """

    def get(self, key: str) -> Optional[bytes]:
        """Return the value; None without a value."""

    def get_many(self, keys: Sequence[str]) -> List[Optional[bytes]]:
        """Return the values in the order of their keys. Backends may read several at once."""
        return [self.get(key) for key in keys]

    def has(self, key: str) -> bool:
        """Whether the key has a value."""
        return self.keys(check_key(key), 1) == [key]

    def put(self, key: str, data: bytes) -> None:
        """Write a value, whole and durable. After an error the old value is still there."""

    def create(self, key: str, data: bytes) -> bool:
        """Write a value unless the key has one. Return whether this call wrote it.

        If an answer was lost and the request was sent again, an equal value counts as written by
        this call.
        """

    def keys(self, prefix: str, limit: Optional[int] = None) -> List[str]:
        """Return the keys that begin with `prefix`, sorted; only the first `limit` of them."""

    def delete(self, *keys: str) -> None:
        """Remove values. Keys without a value are ignored."""

    def read(self, key: str, start: int, length: int) -> Optional[bytes]:
        """Return a part of a value, shorter if the value ends before; None without a value."""

    def put_file(self, key: str, path: str) -> None:
        """Write the content of a file as a value."""

    def link_file(self, key: str, path: str) -> None:
        """Write a file as a value that no program changes any more, without a copy if possible."""
        self.put_file(key, path)

    def get_file(self, key: str, path: str) -> bool:
        """Write a value to a file, which may exist. False without a value: no file is written."""


_MISSING = ("NoSuchKey", "NotFound", "404")  # "404": botocore's code for an answer without a body
_DENIED = ("AccessDenied", "Forbidden", "403", "")
_ACTION = r"not authorized to perform: ([\w-]+:\w+)"


def is_missing(status: int, code: str, message: str, may_exist: Callable[[], bool]) -> bool:
    """Whether S3's refusal of a GET or HEAD says that the object does not exist.

    S3 answers 404 only to those who may list the bucket, and 403 to others, who get the same for an
    object that they may not read. Then the message decides, if it names the action that was denied:
    s3:ListBucket for a missing object. Otherwise `may_exist` is called once: it asks S3 for a list
    of this key, and is also True if that is denied, so that a denial is never taken for a missing
    object. Source: S3 API Reference, GetObject, "Permissions"; docs/decisions/046.
    """
    if code in _MISSING or (status == 404 and code != "NoSuchBucket"):
        return True
    if status != 403 or code not in _DENIED:
        return False
    action = re.search(_ACTION, message)
    return action[1] == "s3:ListBucket" if action else not may_exist()


def no_check() -> None:
    """The default of parameters named `check`: it never ends the operation."""


def check_key(key: str) -> str:
    """Return the key. Raises StoreError for a text that is not a key."""
    if any(part in ("", ".", "..") for part in key.split("/")) or "\0" in key:
        raise StoreError(f"{key!r} is not a key of a store")
    return key
