"""Unpack the code that travelled with a run. Regular files and folders, inside, and no more."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zlib
from typing import Any

MAX_BYTES = 1024**3  # of all files; what a client sends is a quarter of that
MAX_FILES = 200_000
_BLOCK = 1 << 20


class BadArchive(Exception):
    """The archive holds what a code archive may not hold, or cannot be read."""


class _Hashed:
    """A stream that is read once from its start to its end, and its SHA-256."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = bytes(self._stream.read(size))
        self.hash.update(data)
        return data


def unpack(archive: str, folder: str, digest: str = "") -> int:
    """Unpack into `folder` and return the number of files.

    With a `digest`, the SHA-256 of the archive before compression must be that.

    Raises BadArchive for absolute names, `..`, links and devices: `tarfile` lets them pass by
    default, and its own filter has been bypassed before (CVE-2025-4517).
    """
    count = size = 0
    try:
        with gzip.open(archive) as packed:
            stream = _Hashed(packed)
            # As a pipe: nothing is sought, so that all of it goes through the hash, once.
            tar = tarfile.open(fileobj=stream, mode="r|")  # type: ignore[call-overload]  # noqa: SIM115
            for member in tar:
                path = _inside(folder, member.name)
                if member.isdir():
                    os.makedirs(path, exist_ok=True)
                    continue
                regular = member.isfile() and not member.issparse()
                content = tar.extractfile(member) if regular else None
                if content is None:
                    raise BadArchive(f"{member.name!r} is not a regular file")
                count, size = count + 1, size + member.size
                if count > MAX_FILES or size > MAX_BYTES:
                    raise BadArchive("it unpacks to more than a code archive may hold")
                _write(path, 0o755 if member.mode & 0o100 else 0o644, content)
            while stream.read(_BLOCK):  # to the end, where the checksum of it all is
                pass
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
        raise BadArchive(f"the code archive {archive} cannot be unpacked: {error}") from error
    if digest and stream.hash.hexdigest() != digest:
        raise BadArchive(f"the code archive {archive} is not the one that was sent")
    return count


def _write(path: str, mode: int, content: Any) -> None:
    """A new file. Raises OSError where there is anything of that name."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        while True:
            block = content.read(_BLOCK)
            if not block:
                break
            file.write(block)


def _inside(folder: str, name: str) -> str:
    parts = name.split("/")
    if not name or name.startswith("/") or ".." in parts or "\0" in name:
        raise BadArchive(f"{name!r} would be written outside the folder")
    return os.path.join(folder, *parts)
