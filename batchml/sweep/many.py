"""Many small values at once: from a store that is far away, side by side and page by page."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from batchml.runtime.storage.store import Store


@runtime_checkable
class Far(Protocol):
    """A store that gets many faster than one after the other, and need not list all it has."""

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]: ...

    def first_keys(self, prefix: str, most: int) -> list[str]: ...


def get_many(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """The values in the order of their keys; None for what is not there. Raises StoreError."""
    if isinstance(store, Far):
        return store.get_many(keys)
    return [store.get(key) for key in keys]


def first_keys(store: Store, prefix: str, most: int) -> list[str]:
    """The first of the keys that begin so, in order. Raises StoreError."""
    if isinstance(store, Far):
        return store.first_keys(prefix, most)
    return store.keys(prefix)[:most]
