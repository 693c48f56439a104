"""Stores for scripted sweeps: in memory, counted, away for a while, and of users who are killed."""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from batchml.runtime.storage.store import Store, StoreError


class MemoryStore(Store):
    """A store without a disk; a list costs what is listed, as in a folder or a bucket."""

    def __init__(self) -> None:
        self._folders: dict[str, dict[str, bytes]] = defaultdict(dict)

    def get(self, key: str) -> bytes | None:
        return self._folder(key).get(key)

    def put(self, key: str, data: bytes) -> None:
        self._folder(key)[key] = data

    def create(self, key: str, data: bytes) -> bool:
        return self._folder(key).setdefault(key, data) is data

    def keys(self, prefix: str, limit: int | None = None) -> list[str]:
        return sorted(key for key in self._folder(prefix) if key.startswith(prefix))[:limit]

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._folder(key).pop(key, None)

    def read(self, key: str, start: int, length: int) -> bytes | None:
        found = self._folder(key).get(key)
        return None if found is None else found[start : start + length]

    def put_file(self, key: str, path: str) -> None:
        raise NotImplementedError

    def get_file(self, key: str, path: str) -> bool:
        raise NotImplementedError

    def _folder(self, key: str) -> dict[str, bytes]:
        return self._folders[key.partition("/")[0]]


class Killed(BaseException):
    """The controller's process is gone, as by SIGKILL."""


class KillingStore:
    """A store whose user is killed at a write, before or after it came to the store."""

    def __init__(self, store: Store, dies_at: int, before: bool) -> None:
        self._store, self._before = store, before
        self.left = dies_at

    def __getattr__(self, name: str) -> Any:
        if name not in ("put", "create", "delete"):
            return getattr(self._store, name)
        return lambda *args: self.mortal(lambda: getattr(self._store, name)(*args))

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
