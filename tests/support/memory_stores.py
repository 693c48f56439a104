"""Stores that tests own: in memory, with ends and losses where the test wants them."""

from collections.abc import Callable

from batchml.runtime.storage.store import Store, StoreError


class Killed(Exception):
    """The process ended here, as by SIGKILL."""


class MemoryStore(Store):
    """A store of nothing but a dictionary. `writes` counts what changed it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.writes = 0

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def put(self, key: str, data: bytes) -> None:
        self.writes += 1
        self.values[key] = data

    def create(self, key: str, data: bytes) -> bool:
        self.writes += 1
        return self.values.setdefault(key, data) is data

    def keys(self, prefix: str, limit: int | None = None) -> list[str]:
        return sorted(key for key in self.values if key.startswith(prefix))[:limit]

    def delete(self, *keys: str) -> None:
        for key in keys:
            self.writes += 1
            self.values.pop(key, None)

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


class MortalStore(MemoryStore):
    """The same values, for a process that is killed right before or after its nth write."""

    def __init__(self, values: dict[str, bytes], nth: int, *, after: bool) -> None:
        super().__init__()
        self.values = values
        self._nth = nth
        self._after = after

    def _dies(self, do: Callable[[], bool]) -> bool:
        if self.writes + 1 == self._nth and not self._after:
            raise Killed
        done = do()
        if self.writes == self._nth and self._after:
            raise Killed
        return done

    def put(self, key: str, data: bytes) -> None:
        put = super().put
        self._dies(lambda: put(key, data) is None)

    def create(self, key: str, data: bytes) -> bool:
        create = super().create
        return self._dies(lambda: create(key, data))

    def delete(self, *keys: str) -> None:
        delete = super().delete
        for key in keys:
            self._dies(lambda key=key: delete(key) is None)  # type: ignore[misc]


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
