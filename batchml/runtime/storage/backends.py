"""Open the store at an address: a folder, or s3://BUCKET/PREFIX.

Each backend is a function that imports the backend's module, so that a run loads only the code of
its own store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Callable, Dict

from batchml.runtime.storage.store import PATIENT, RetryLimits, Store, StoreError, no_check

Check = Callable[[], None]


def open_store(
    url: str,
    environ: Mapping[str, str],
    check: Check = no_check,
    limits: RetryLimits = PATIENT,
) -> Store:
    """Open the store at `s3://BUCKET/PREFIX`, or in the folder of this path.

    `check` is called often during requests to S3, and may raise to end them. Opening sends nothing
    and makes no folder. Raises StoreError for any other address.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    if not url or scheme not in _BACKENDS:
        raise StoreError(f"{url!r} is not a store: give a folder, or s3://BUCKET/PREFIX")
    return _BACKENDS[scheme](url, environ, check, limits)


def _open_folder(
    url: str, _environ: Mapping[str, str], _check: Check, _limits: RetryLimits
) -> Store:
    from batchml.runtime.storage.folder import FolderStore

    return FolderStore(url)


def _open_s3(url: str, environ: Mapping[str, str], check: Check, limits: RetryLimits) -> Store:
    from batchml.runtime.storage.s3 import S3Store

    return S3Store.open(url, environ, check, limits)


_BACKENDS: Dict[str, Callable[[str, Mapping[str, str], Check, RetryLimits], Store]] = {
    "": _open_folder,
    "s3": _open_s3,
}
