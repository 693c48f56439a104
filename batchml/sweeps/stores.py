"""Find, list and open the stores of sweeps: folders of this machine, or prefixes of a bucket."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from batchml.aws.errors import ErrorClass, classify_error
from batchml.aws.s3 import BucketStore
from batchml.config.project import project_name, short_project
from batchml.context import Context, open_cache
from batchml.errors import BatchmlError, ConfigError, NotFound, SweepStoreError, UsageError
from batchml.model.names import is_key, to_name
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import Store, StoreError
from batchml.sweeps.started import SPEC

SURE_PREFIX = 8  # letters of a sweep's key that name a sweep of any project
MIN_PREFIX = 4  # the fewest letters of a sweep's key that can name the sweep
# The folder beside the stores in a bucket that has an empty object for each sweep. The object's
# name has the sweep's time, key and name, so that one call lists all sweeps. No run has this key.
_LIST = "sweeps"
# In lists of versions before projects, the name of the object ends with that of the sweep.
_LIST_KEY = re.compile(r"(\d{13})-([2-7][a-z2-7]{16})-([^@]+)(?:@(.+))?")
_LAST = re.compile(r"@last(?:~(\d{1,6}))?")


class SweepStore(Store):
    """The store of one sweep. All its errors are SweepStoreErrors.

    `where` is its address: a folder, or `s3://BUCKET/PREFIX`. `sweep_list` is the store of the list
    of all sweeps, if the environment has such a list.
    """

    def __init__(self, key: str, where: str, store: Store, sweep_list: Store | None = None) -> None:
        self.key = key
        self.where = where
        self._store = store
        self._sweep_list = sweep_list

    def get(self, key: str) -> bytes | None:
        with _translate_errors():
            return self._store.get(key)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        with _translate_errors():
            return self._store.get_many(keys)

    def has(self, key: str) -> bool:
        with _translate_errors():
            return self._store.has(key)

    def put(self, key: str, data: bytes) -> None:
        with _translate_errors():
            self._store.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        with _translate_errors():
            if key == SPEC and self._sweep_list is not None:
                # First, because other machines find only sweeps that are listed.
                self._sweep_list.put(_list_key(self.key, data), b"")
            return self._store.create(key, data)

    def keys(self, prefix: str, limit: int | None = None) -> list[str]:
        with _translate_errors():
            return self._store.keys(prefix, limit)

    def delete(self, *keys: str) -> None:
        with _translate_errors():
            self._store.delete(*keys)

    def read(self, key: str, start: int, length: int) -> bytes | None:
        with _translate_errors():
            return self._store.read(key, start, length)

    def put_file(self, key: str, path: str) -> None:
        with _translate_errors():
            self._store.put_file(key, path)

    def get_file(self, key: str, path: str) -> bool:
        with _translate_errors():
            return self._store.get_file(key, path)


class ListedSweep(Struct, frozen=True):
    """A sweep of the list, started by any user of the environment."""

    key: str
    name: str
    created_at: float  # seconds since the epoch
    project: str = ""  # its identity; "" for sweeps of versions before projects


def open_sweep_store(context: Context, key: str) -> SweepStore:
    """The store of a sweep, which may be empty. Nothing is created.

    Raises ConfigError for an environment without a bucket.
    """
    if not is_key(key):
        raise NotFound("Sweep", key, [], "`batchml sweeps ls` shows them.")
    if context.settings.is_local:
        folder = str(context.home.root / "sweeps" / key)
        return SweepStore(key, folder, FolderStore(folder))
    bucket = _bucket(context)
    return SweepStore(
        key, f"s3://{bucket}/runs/{key}",
        _in_bucket(context, bucket, f"runs/{key}"), _in_bucket(context, bucket, f"runs/{_LIST}"),
    )  # fmt: skip


def sweep_store_at(context: Context, where: str) -> SweepStore:
    """The store at an address, for controllers, which have no permission to read CloudFormation
    stacks. Raises StoreError."""
    key = where.rstrip("/").rpartition("/")[2]
    if not where.startswith("s3://"):
        return SweepStore(key, where, FolderStore(where))
    bucket, _, prefix = where[len("s3://") :].partition("/")
    if not bucket or not prefix:
        raise StoreError(
            f"{where!r} is not the address of a sweep's store, which is s3://BUCKET/PREFIX"
        )
    return SweepStore(key, where, _in_bucket(context, bucket, prefix))


def list_sweeps(context: Context, project: str = "") -> list[ListedSweep]:
    """The sweeps of a project, or of the environment, newest first; one call for 1,000 in AWS.

    Raises ConfigError for an environment without a bucket, SweepStoreError.
    """
    if context.settings.is_local:
        sweeps = list(_list_folders(context))
    else:
        list_store = _in_bucket(context, _bucket(context), f"runs/{_LIST}")
        with _translate_errors():
            names = list_store.keys("")
        matches = filter(None, map(_LIST_KEY.fullmatch, names))
        sweeps = [
            ListedSweep(match[2], match[3], int(match[1]) / 1000, match[4] or "")
            for match in matches
        ]
    sweeps = [each for each in sweeps if project in ("", each.project)]
    return sorted(sweeps, key=lambda each: (each.created_at, each.key), reverse=True)


def find_sweep_store(context: Context, word: str) -> SweepStore:
    """The store of the sweep that a word names, as `choose_sweep` does.

    Raises NotFound, UsageError.
    """
    if is_key(word):
        store = open_sweep_store(context, word)
        if store.get(SPEC) is not None:
            return store
    chosen = choose_sweep(word, list_sweeps(context), context.project)
    return open_sweep_store(context, chosen.key)


def suggest(context: Context, word: str) -> NotFound | None:
    """The error for a word that names no run but a sweep of this machine; None for other words."""
    if not context.settings.is_local or not (context.home.root / "sweeps").is_dir():
        return None
    try:
        sweeps = [] if word.startswith("@") else list_sweeps(context)
        key = choose_sweep(word, sweeps, context.project).key
    except BatchmlError:
        return None
    return NotFound("Run", word, [], f"It is a sweep: batchml sweeps show {key}")


def choose_sweep(word: str, sweeps: Sequence[ListedSweep], project: str = "") -> ListedSweep:
    """The sweep that a word names: its key, a prefix of the key, its name (then the newest sweep of
    this name), `@last`, or `@last~2` for the second before the last.

    `sweeps`: all of the environment, newest first. A key, and a prefix of eight letters, name any
    sweep. `@last` names sweeps of the project; other words also sweeps without a project.

    Raises NotFound, UsageError.
    """
    exact = [each for each in sweeps if len(word) >= SURE_PREFIX and each.key.startswith(word)]
    if len(exact) == 1:
        return exact[0]
    last = _LAST.fullmatch(word)
    every = sweeps
    sweeps = [each for each in every if project in ("", each.project)]
    if not last and not _named(word, sweeps):
        sweeps = [each for each in every if not each.project] if project else sweeps
    if last and int(last[1] or 0) < len(sweeps):
        return sweeps[int(last[1] or 0)]
    matching = _named(word, sweeps)
    if matching and (len(matching) == 1 or word in (matching[0].name, matching[0].key)):
        return matching[0]
    if matching:
        keys = ", ".join(each.key for each in matching)
        raise UsageError(f"{word!r} is a prefix of several sweeps: {keys}. Give more letters.")
    elsewhere = _named(word, every)
    where = f"in the project {project_name(project)}" if project else "in this environment"
    own = [each for each in every if project in ("", each.project)]
    if elsewhere:
        other = short_project(elsewhere[0].project, [project, *(each.project for each in every)])
        key = elsewhere[0].key[:SURE_PREFIX]
        hint = f"The project {other} has it: give its key, {key}, or add --project {other}."
    elif not own:
        hint = f"None was started {where} yet: batchml sweep sweep.toml"
    elif last:
        hint = f"Only {len(own)} were started {where}."
    else:
        hint = "`batchml sweeps ls` shows them."
    names = [] if last or elsewhere else [each.name for each in own[:20] if each.name]
    raise NotFound("Sweep", word, names, hint, where=where if elsewhere else "")


def _named(word: str, sweeps: Sequence[ListedSweep]) -> list[ListedSweep]:
    """The sweeps of this name, or key, or prefix of the key; a name comes before a prefix."""
    named = [each for each in sweeps if word and word in (each.name, each.key)]
    return named or [
        each for each in sweeps if len(word) >= MIN_PREFIX and each.key.startswith(word)
    ]


class _SpecHead(Struct):
    """The fields of `spec.json` that the list needs."""

    name: str
    created_at: float = 0.0
    project: str = ""


def _list_folders(context: Context) -> Iterator[ListedSweep]:
    for path in (context.home.root / "sweeps").glob(f"*/{SPEC}"):
        key = path.parent.name
        if not is_key(key):
            continue
        try:
            yield _read_listed(key, path)
        except OSError:  # removed just now
            continue


def _read_listed(key: str, path: Path) -> ListedSweep:
    """The list's entry of a sweep; the name is empty if `spec.json` is damaged. Raises OSError."""
    try:
        head = msgspec.json.decode(path.read_bytes(), type=_SpecHead)
    except msgspec.DecodeError:
        return ListedSweep(key, "", min(each.stat().st_mtime for each in path.parent.iterdir()))
    return ListedSweep(key, head.name, head.created_at, head.project)


def _list_key(key: str, spec: bytes) -> str:
    head = msgspec.json.decode(spec, type=_SpecHead)
    project = f"@{head.project}" if head.project else ""
    return f"{round(head.created_at * 1000):013d}-{key}-{to_name(head.name)}{project}"


def _bucket(context: Context) -> str:
    bucket = open_cache(context).outputs().get("BucketName", "")
    if not bucket:
        raise ConfigError(
            f"Environment {context.env}",
            ["it has no bucket, in which a sweep keeps its ledger. Make one with batchml setup."],
        )
    return bucket


def _in_bucket(context: Context, bucket: str, prefix: str) -> Store:
    return BucketStore(context.connect(), bucket, prefix)


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except SweepStoreError:
        raise
    except (BatchmlError, StoreError) as error:
        raise SweepStoreError(
            str(error),
            temporary=_is_temporary(error),
            code=getattr(error, "code", ""),
            exit_code=getattr(error, "exit_code", BatchmlError.exit_code),
        ) from error


def _is_temporary(error: BatchmlError | StoreError) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, StoreError):
        return error.temporary
    return classify_error(error) is not ErrorClass.REFUSED
