"""Stores for scripted sweeps: in memory, counted, away for a while, and of users who are killed."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from batchml.runtime.storage.store import Store, StoreError


class _Values(dict[str, bytes]):
    """By key. `folders` has the keys by their first folder, as a store that lists one has them."""

    def __init__(self) -> None:
        self.folders: dict[str, set[str]] = {}

    def __setitem__(self, key: str, data: bytes) -> None:
        super().__setitem__(key, data)
        self.folders.setdefault(key.partition("/")[0], set()).add(key)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self.folders[key.partition("/")[0]].remove(key)


class MemoryStore(Store):
    """A store of nothing but a dictionary. `writes` counts what changed it."""

    def __init__(self) -> None:
        self.values = _Values()
        self.writes = 0

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def put(self, key: str, data: bytes) -> None:
        self.writes += 1
        self.values[key] = data

    def create(self, key: str, data: bytes) -> bool:
        self.writes += 1
        if key in self.values:
            return False
        self.values[key] = data
        return True

    def keys(self, prefix: str, limit: int | None = None) -> list[str]:
        first, is_folder, _ = prefix.partition("/")
        keys = self.values.folders.get(first, ()) if is_folder else self.values
        return sorted(key for key in keys if key.startswith(prefix))[:limit]

    def delete(self, *keys: str) -> None:
        for key in keys:
            self.writes += 1
            if key in self.values:
                del self.values[key]

    def read(self, key: str, start: int, length: int) -> bytes | None:
        data = self.values.get(key)
        return None if data is None else data[start : start + length]

    def put_file(self, key: str, path: str) -> None:
        with open(path, "rb") as file:
            self.put(key, file.read())

    def get_file(self, key: str, path: str) -> bool:
        data = self.values.get(key)
        if data is not None:
            with open(path, "wb") as file:
                file.write(data)
        return data is not None


class Killed(BaseException):
    """The controller's process is gone, as by SIGKILL."""


class KillingStore:
    """A store whose user is killed at a write, before or after it came to the store."""

    def __init__(self, store: Store, dies_at: int, before: bool) -> None:
        self._store, self._before = store, before
        self.left = dies_at

    def __getattr__(self, name: str) -> Any:
        if name not in ("put", "create"):
            return getattr(self._store, name)
        return lambda *args: self.mortal(lambda: getattr(self._store, name)(*args))

    def delete(self, *keys: str) -> None:
        for key in keys:
            self.mortal(partial(self._store.delete, key))

    def mortal(self, act: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left == 0 and self._before:
            raise Killed
        done = act()
        if self.left == 0:
            raise Killed
        return done


class UnreachableStore:
    """A store that cannot be had for a while."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_away = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)

        def call(*args: Any) -> Any:
            if self.is_away:
                raise StoreError("the store is away", temporary=True)
            return found(*args)

        return call


class CountingStore:
    """A store that counts what one user asks of it."""

    def __init__(self, store: Store, asked: Counter[str]) -> None:
        self._store, self._asked = store, asked

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self._asked[name] += len(args[0]) if name == "get_many" else 1
            return found(*args)

        return call


class LossyStore(MemoryStore):
    """Every call fails once in a while, by `fails`: before it was carried out, or after."""

    def __init__(self, fails: Callable[[], str]) -> None:
        super().__init__()
        self._fails = fails

    def put(self, key: str, data: bytes) -> None:
        how = self._way()
        super().put(key, data)
        self._lose(how)

    def create(self, key: str, data: bytes) -> bool:
        how = self._way()
        done = super().create(key, data)
        self._lose(how)
        return done

    def get(self, key: str) -> bytes | None:
        self._way()
        return super().get(key)

    def keys(self, prefix: str, limit: int | None = None) -> list[str]:
        self._way()
        return super().keys(prefix, limit)

    def delete(self, *keys: str) -> None:
        how = self._way()
        super().delete(*keys)
        self._lose(how)

    def _way(self) -> str:
        how = self._fails()
        if how == "before":
            raise StoreError("the network is away", temporary=True)
        return how

    def _lose(self, how: str) -> None:
        if how == "after":
            raise StoreError("the answer was lost", temporary=True)
