"""Unpack the code that travelled with a run. Regular files and folders, inside, and no more."""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib


class BadArchive(Exception):
    """The archive holds what a code archive may not hold, or cannot be read."""


def unpack(archive: str, folder: str) -> int:
    """Unpack into `folder` and return the number of files.

    Raises BadArchive for absolute names, `..`, links and devices: `tarfile` lets them pass by
    default, and its own filter has been bypassed before (CVE-2025-4517).
    """
    count = 0
    try:
        with gzip.open(archive) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                path = _inside(folder, member.name)
                if member.isdir():
                    os.makedirs(path, exist_ok=True)
                    continue
                regular = member.isfile() and not member.issparse()
                content = tar.extractfile(member) if regular else None
                if content is None:
                    raise BadArchive(f"{member.name!r} is not a regular file")
                os.makedirs(os.path.dirname(path), exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
                mode = 0o755 if member.mode & 0o100 else 0o644
                with os.fdopen(os.open(path, flags, mode), "wb") as file:
                    while True:
                        block = content.read(1 << 20)
                        if not block:
                            break
                        file.write(block)
                count += 1
            while stream.read(1 << 20):  # to the end, where the checksum of it all is
                pass
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
        raise BadArchive(f"the code archive {archive} cannot be unpacked: {error}") from error
    return count


def _inside(folder: str, name: str) -> str:
    parts = name.split("/")
    if not name or name.startswith("/") or ".." in parts or "\0" in name or "\\" in name:
        raise BadArchive(f"{name!r} would be written outside the folder")
    return os.path.join(folder, *parts)
