"""The `Store`: small values and files by key. What outlives a run is kept in one.

Backends: a folder (`folder.py`), S3 by the standard library (`s3.py`), and on the client's side S3
by boto3 (`batchml/aws/s3.py`). `backends.open_store` opens the store at an address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import List, NamedTuple, Optional, Protocol


class StoreError(OSError):
    """A store could not be read or written. The text says which operation failed, where and why.

    `temporary`: the same call may succeed later, or from another host. `code` is S3's error code.
    """

    def __init__(self, text: str, temporary: bool = False, code: str = "") -> None:
        super().__init__(text)
        self.temporary = temporary
        self.code = code


class RetryLimits(NamedTuple):
    """How often a request to S3 is sent, and how long its answer may take."""

    tries: int
    timeout: float  # seconds without a byte


PATIENT = RetryLimits(7, 20.0)  # the pauses between the tries add up to 25 s at most
BRIEF = RetryLimits(2, 3.0)  # for calls during which the program's output waits


class Store(Protocol):
    """Values and files by key. A key is one or more parts with `/` between; no part is `.` or `..`.

    Every method raises StoreError when the store cannot be read or written.
    """

    def get(self, key: str) -> Optional[bytes]:
        """Return the value, or None when there is none."""

    def get_many(self, keys: Sequence[str]) -> List[Optional[bytes]]:
        """Return the values in the order of their keys. Backends may read several at once."""
        return [self.get(key) for key in keys]

    def has(self, key: str) -> bool:
        """Whether there is a value of this key."""
        return self.keys(check_key(key), 1) == [key]

    def put(self, key: str, data: bytes) -> None:
        """Write a value, whole and durable. After an error the old value is still there."""

    def create(self, key: str, data: bytes) -> bool:
        """Write a value unless there is one. Whether this call wrote it.

        An equal value counts as written by this call if an answer was lost and the request was
        sent again.
        """

    def keys(self, prefix: str, limit: Optional[int] = None) -> List[str]:
        """Return the keys that begin with `prefix`, sorted; only the first `limit` of them."""

    def delete(self, *keys: str) -> None:
        """Remove values. Keys without a value are ignored."""

    def read(self, key: str, start: int, length: int) -> Optional[bytes]:
        """Return a part of a value, shorter or empty where the value ends; None without a value."""

    def put_file(self, key: str, path: str) -> None:
        """Write the content of a file as a value."""

    def get_file(self, key: str, path: str) -> bool:
        """Write a value to a file, which may exist. False, and no file, without a value."""


def no_check() -> None:
    """The default of `check` parameters: never ends the operation."""


def check_key(key: str) -> str:
    """Return the key. Raises StoreError for a text that is no key."""
    if any(part in ("", ".", "..") for part in key.split("/")) or "\0" in key:
        raise StoreError(f"{key!r} is not a key of a store")
    return key
