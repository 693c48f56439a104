"""Where sweeps have their boards: folders of this machine, or the environment's bucket."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from batchml.client.sweeping.freezing import SPEC
from batchml.errors import BatchmlError, ConfigError, NotFound, UsageError
from batchml.model.names import is_key, to_name
from batchml.runtime.storage.store import FolderStore, Store, StoreError, checked
from batchml.sweep.many import first_keys, get_many

if TYPE_CHECKING:
    from batchml.client.place import Place

MIN_PREFIX = 4  # characters of a key
_LIST = "sweeps"  # beside the boards in a bucket: an empty object for each sweep, with a name that
# says which, so that one call lists them all. No run's key looks like that.
_ENTRY = re.compile(r"(\d{13})-([2-7][a-z2-7]{16})-(.+)")
_LAST = re.compile(r"@last(?:~(\d{1,6}))?")


class BoardError(StoreError, BatchmlError):
    """The board cannot be had: a StoreError for what works on it, and for people ours."""

    def __init__(self, error: BatchmlError | StoreError) -> None:
        StoreError.__init__(self, str(error), _is_temporary(error), getattr(error, "code", ""))
        self.exit_code = getattr(error, "exit_code", BatchmlError.exit_code)

    def __str__(self) -> str:
        return str(self.args[0])


class Board:
    """The board of one sweep: a Store whose errors are all BoardErrors.

    `where` is its address: a folder, or `s3://BUCKET/PREFIX`.
    """

    def __init__(self, key: str, where: str, store: Store, list_: Store | None = None) -> None:
        self.key = key
        self.where = where
        self._store = store
        self._list = list_

    def get(self, key: str) -> bytes | None:
        with _told():
            return self._store.get(checked(key))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        with _told():
            return get_many(self._store, [checked(key) for key in keys])

    def first_keys(self, prefix: str, most: int) -> list[str]:
        with _told():
            return first_keys(self._store, prefix, most)

    def put(self, key: str, data: bytes) -> None:
        with _told():
            self._store.put(checked(key), data)

    def create(self, key: str, data: bytes) -> bool:
        with _told():
            if key == SPEC and self._list is not None:
                # First: a sweep that is not listed would not be found from another machine.
                self._list.put(_entry(self.key, data), b"")
            return self._store.create(checked(key), data)

    def keys(self, prefix: str) -> list[str]:
        with _told():
            return self._store.keys(prefix)

    def delete(self, *keys: str) -> None:
        with _told():
            self._store.delete(*map(checked, keys))

    def read(self, key: str, start: int, length: int) -> bytes | None:
        with _told():
            return self._store.read(checked(key), start, length)

    def put_file(self, key: str, path: str) -> None:
        with _told():
            self._store.put_file(checked(key), path)

    def get_file(self, key: str, path: str) -> bool:
        with _told():
            return self._store.get_file(checked(key), path)


class Listed(Struct, frozen=True):
    """A sweep that was started, by whoever works in the environment."""

    key: str
    name: str
    created_at: float  # seconds since the epoch


def open_board(place: "Place", key: str) -> Board:
    """The board of a sweep, which may be empty yet. Nothing is made.

    Raises ConfigError for an environment without a bucket.
    """
    if not is_key(key):
        raise NotFound("Sweep", key, [], "`batchml sweeps ls` shows them.")
    if place.settings.is_local:
        folder = str(place.home.root / "sweeps" / key)
        return Board(key, folder, FolderStore(folder))
    bucket = _bucket(place)
    return Board(
        key, f"s3://{bucket}/runs/{key}",
        _in_bucket(place, bucket, f"runs/{key}"), _in_bucket(place, bucket, f"runs/{_LIST}"),
    )  # fmt: skip


def board_at(place: "Place", where: str) -> Board:
    """The board at an address, for who may not ask what the environment has. Raises StoreError."""
    key = where.rstrip("/").rpartition("/")[2]
    if not where.startswith("s3://"):
        return Board(key, where, FolderStore(where))
    bucket, _, prefix = where[len("s3://") :].partition("/")
    if not bucket or not prefix:
        raise StoreError(f"{where!r} is no board: it is s3://BUCKET/PREFIX")
    return Board(key, where, _in_bucket(place, bucket, prefix))


def list_boards(place: "Place") -> list[Listed]:
    """The sweeps of an environment, newest first; in AWS one call for each 1,000.

    Raises ConfigError for an environment without a bucket, BoardError.
    """
    if place.settings.is_local:
        found = list(_in_folders(place))
    else:
        entries = _in_bucket(place, _bucket(place), f"runs/{_LIST}")
        with _told():
            names = entries.keys("")
        matches = (_ENTRY.fullmatch(name) for name in names)
        found = [Listed(each[2], each[3], int(each[1]) / 1000) for each in matches if each]
    return sorted(found, key=lambda each: (each.created_at, each.key), reverse=True)


def find_sweep(place: "Place", word: str) -> Board:
    """The board of the sweep that is meant: by its key or the start of one, its name (the newest of
    that name), `@last`, or `@last~2` for the one two before. Raises NotFound, UsageError."""
    if is_key(word):
        board = open_board(place, word)
        if board.get(SPEC) is not None:
            return board
    return open_board(place, choose(word, list_boards(place)).key)


def choose(word: str, sweeps: Sequence[Listed]) -> Listed:
    """The sweep that a word means, of these, newest first. Raises NotFound, UsageError."""
    last = _LAST.fullmatch(word)
    if last and int(last[1] or 0) < len(sweeps):
        return sweeps[int(last[1] or 0)]
    named = [each for each in sweeps if word and word in (each.name, each.key)]
    if named:
        return named[0]
    begun = [each for each in sweeps if len(word) >= MIN_PREFIX and each.key.startswith(word)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        keys = ", ".join(each.key for each in begun)
        raise UsageError(f"{word!r} is the start of several sweeps: {keys}. Give more of it.")
    if not sweeps:
        hint = "None was started in this environment yet: batchml sweep sweep.toml"
    elif last:
        hint = f"Only {len(sweeps)} were started in this environment."
    else:
        hint = "`batchml sweeps ls` shows them."
    names = [] if last else [each.name for each in sweeps[:20] if each.name]
    raise NotFound("Sweep", word, names, hint)


class _Brief(Struct):
    """What the list needs of `spec.json`."""

    name: str
    created_at: float = 0.0


def _in_folders(place: "Place") -> Iterator[Listed]:
    for path in (place.home.root / "sweeps").glob(f"*/{SPEC}"):
        key = path.parent.name
        if not is_key(key):
            continue
        try:
            yield _listed(key, path)
        except OSError:  # removed just now
            continue


def _listed(key: str, path: Path) -> Listed:
    """Of a damaged one the name is not known; who looks at it is told. Raises OSError."""
    try:
        brief = msgspec.json.decode(path.read_bytes(), type=_Brief)
    except msgspec.DecodeError:
        return Listed(key, "", min(each.stat().st_mtime for each in path.parent.iterdir()))
    return Listed(key, brief.name, brief.created_at)


def _entry(key: str, spec: bytes) -> str:
    brief = msgspec.json.decode(spec, type=_Brief)
    return f"{round(brief.created_at * 1000):013d}-{key}-{to_name(brief.name)}"


def _bucket(place: "Place") -> str:
    from batchml.client.known import open_known

    bucket = open_known(place).outputs().get("BucketName", "")
    if not bucket:
        raise ConfigError(
            f"Environment {place.env}",
            ["it has no bucket, where a sweep keeps its ledger. Make one with batchml setup."],
        )
    return bucket


def _in_bucket(place: "Place", bucket: str, prefix: str) -> Store:
    from batchml.aws.s3 import BucketStore

    return BucketStore(place.connect(), bucket, prefix)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BoardError:
        raise
    except (BatchmlError, StoreError) as error:
        raise BoardError(error) from error


def _is_temporary(error: BatchmlError | StoreError) -> bool:
    """Whether the same may succeed later."""
    if isinstance(error, StoreError):
        return error.temporary
    from batchml.aws.errors import Fate, fate

    return fate(error) is not Fate.REFUSED
