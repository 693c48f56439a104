"""Open the archive at an address: a folder, or a prefix in S3.

A backend in S3 is imported when an archive is there.
"""

from __future__ import annotations

from collections.abc import Mapping

from batchml.runtime.storage.store import StoreError
from batchml.runtime.transfer.archives import ArchiveStore, FolderArchive


def open_archive(url: str, environ: Mapping[str, str]) -> ArchiveStore:
    """Open the archive at `s3://BUCKET/PREFIX` or in a folder. Raises StoreError."""
    if url.startswith("s3://"):
        from batchml.runtime.transfer.s3_archives import S3Archive

        return S3Archive.open(url, environ)
    return _open_folder(url)


def open_posix_archive(url: str, environ: Mapping[str, str]) -> ArchiveStore:
    """Like `open_archive`; in S3 objects have POSIX metadata. Raises StoreError."""
    if url.startswith("s3://"):
        from batchml.runtime.transfer.s3_archives import PosixArchive

        return PosixArchive.open(url, environ)
    return _open_folder(url)


def _open_folder(url: str) -> ArchiveStore:
    if not url or "://" in url:
        raise StoreError(f"{url!r} cannot be an archive: give a folder, or s3://BUCKET/PREFIX")
    return FolderArchive(url)
