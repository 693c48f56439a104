"""A run that goes on from another's checkpoint: `batchml rerun --resume`.

Before the command starts, what the other run saved is copied into this one's own folder, and
verified; the other's is only read. From then on it is this run's own: a later attempt finds it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any, Callable, List, NamedTuple, Optional

from batchml.runtime.checkpoint.layout import MANIFEST, Entry
from batchml.runtime.checkpoint.remote import (
    RESUMED,
    Found,
    Kept,
    bring_checkpoint,
    prefix_for,
    prefix_of,
)
from batchml.runtime.entry.folders import is_kept, workspace_folder
from batchml.runtime.protocol.launch import WORKER, Plan
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.files import write_json
from batchml.runtime.storage.store import FolderStore, Store, StoreError, go_on, open_store
from batchml.runtime.telemetry.budget import is_main_node

VARIABLE = "BATCHML_RESUME"
_MAP = "BATCHML_ARRAY_MAP"  # of ops/rerun.py
_KEY = "resumed"  # in the run's store, where no folder outlives an attempt
_WAIT = 3600.0  # seconds that the other nodes wait for the main one
_PAUSE = 2.0
_PART = ".batchml-part"  # the ending of a file on its way


class NothingThere(ValueError):
    """There is no checkpoint to go on from: to begin at the beginning is not what was asked for."""


class Told(NamedTuple):
    """Which run, and where its checkpoints may be; what is empty is no place of it."""

    job: str  # its id
    name: str
    key: str = ""  # names its folder in the workspace
    store: str = ""  # an s3:// prefix
    folder: str = ""  # of this machine; `FOLDER:3` is that of a child
    children: str = ""  # those that are run again, by their numbers in it: "3 17-19"
    is_array: bool = False  # it was an array: of its children some may have saved nothing

    @classmethod
    def read(cls, text: str) -> Told:
        """Raises ValueError."""
        found: Any = json.loads(text)
        if not isinstance(found, dict) or not {"job", "name"} <= set(found) <= set(cls._fields):
            raise ValueError(f"{VARIABLE} is not of this version: {text[:80]}")
        return cls(**found)

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in self._asdict().items() if value})

    def child(self, index: Optional[int]) -> Optional[int]:
        """Which child of it the child `index` of this run, or this run itself, goes on from.

        Raises ValueError.
        """
        return _nth(self.children, index or 0) if self.children else index

    def words(self, index: Optional[int], environ: Mapping[str, str]) -> str:
        """As people call it, whose numbers of children are those of the first array of all."""
        child, first = self.child(index), environ.get(_MAP, "")
        if child is not None and first:
            child = _nth(first, index or 0)
        return f"{self.name} {self.job}{'' if child is None else f':{child}'}"


def _nth(numbers: str, index: int) -> int:
    """Of numbers such as "3 17-19". Raises ValueError."""
    left = index
    for word in numbers.split():
        first, _, last = word.partition("-")
        size = int(last or first) - int(first) + 1
        if left < size:
            return int(first) + left
        left -= size
    raise ValueError(f"there is no number {index} in {numbers[:80]!r}")


def folder_of(folder: str, child: Optional[int]) -> str:
    """Where a run of this machine has its checkpoints."""
    return os.path.join(folder if child is None else f"{folder}:{child}", "checkpoints")


class _Source(NamedTuple):
    store: Store
    prefix: str = ""
    folder: str = ""  # the same, where it is one


def resume(
    env: RuntimeEnv,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    check: Callable[[], None] = go_on,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Copy what the run goes on from, unless an earlier attempt did; the main node does, and the
    head of a gang.

    `check` is called often, and may raise to end it. Raises NothingThere, StoreError and OSError.
    """
    told, plan = Told.read(environ[VARIABLE]), Plan.read(environ)
    if plan is not None and plan.role == WORKER:
        return None  # of a job of its own: what a gang saves, its head saves
    store = open_store(env.store, environ, check) if is_kept(env) else None
    if not is_main_node(environ):
        return _wait(env, store, check, sleep)
    if _is_done(env, store):
        return None
    whose = told.words(env.array_index, environ)
    words = ""
    for source in _sources(told, env, environ, check):
        words = words or _bring(source, env.checkpoint_dir, whose, say, check)
    if not words and not told.is_array:
        raise NothingThere(
            f"{whose} has saved no checkpoint to go on from. From the beginning: rerun it "
            f"without --resume"
        )
    if store is not None:
        wrong = Kept(env.checkpoint_dir, store, prefix_of(env)).finish()
        if wrong:
            raise StoreError(f"what {whose} saved cannot be kept: {wrong[0]}", temporary=True)
    _note(env, store, {"from": whose, "what": words})
    what = f"resumes from {words} of {whose}" if words else (
        f"{whose} has saved no checkpoint: this one begins at the beginning"
    )  # fmt: skip
    say(f"batchml notice: {what}")
    return None


def _sources(
    told: Told, env: RuntimeEnv, environ: Mapping[str, str], check: Callable[[], None]
) -> List[_Source]:
    """Where to look, in this order."""
    child = told.child(env.array_index)
    folders = []
    if told.folder:
        folders.append(folder_of(told.folder, child))
    elif env.workspace and told.key:
        folders.append(workspace_folder(env.workspace, told.key, child))
    found = [_Source(FolderStore(each), "", each) for each in folders]
    if told.store:
        found.append(_Source(open_store(told.store, environ, check), prefix_for(child)))
    return found


def _bring(
    source: _Source, folder: str, whose: str, say: Callable[[str], None], check: Callable[[], None]
) -> str:
    """Copy the newest checkpoint that is whole, and all other files. What came, in words.

    Raises NothingThere where all that look whole are damaged.
    """
    found = Found.among(name[len(source.prefix) :] for name in _names(source))
    brought: Optional[Entry] = None
    for entry in found.whole():
        check()
        names = found.checkpoints[entry]
        why = bring_checkpoint(source.store, source.prefix, folder, entry, names)
        if not why:
            brought = entry
            break
        say(f"batchml notice: {entry.name} of {whose} is passed over: {why}")
    if brought is None and found.whole():
        raise NothingThere(f"no checkpoint of {whose} is whole any more")
    others = _others(found, source)
    for name in others:
        check()
        _bring_file(source, name, folder)
    if source.folder:
        _bring_links(source.folder, folder)
    if brought is not None:
        return f"step {brought.step}"
    return f"what it saved, {len(others)} file{'s'[: len(others) != 1]}," if others else ""


def _names(source: _Source) -> List[str]:
    if source.folder:
        try:
            os.listdir(source.folder)  # one that may not be read is not taken for an empty one
        except (FileNotFoundError, NotADirectoryError):
            return []
    return source.store.keys(source.prefix)


def _others(found: Found, source: _Source) -> List[str]:
    """Files of a program that saves in a way of its own; folders, too, that are called as ours."""
    own = [name for name in found.others if not name.startswith(".batchml")]
    if source.folder:
        for entry, names in found.checkpoints.items():
            own += [] if f"{entry.name}/{MANIFEST}" in names else names
    return own


def _bring_file(source: _Source, name: str, folder: str) -> None:
    path = os.path.join(folder, *name.split("/"))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if source.store.get_file(source.prefix + name, path + _PART):
        if source.folder:  # which is the newest, some programs tell by the time
            old = os.stat(os.path.join(source.folder, name))
            os.utime(path + _PART, ns=(old.st_atime_ns, old.st_mtime_ns))
        os.replace(path + _PART, path)


def _bring_links(source: str, folder: str) -> None:
    """Links to folders beside them, such as `latest`. Those to files came as files."""
    for below, folders, _ in os.walk(source):
        for name in folders:
            path = os.path.join(below, name)
            if not os.path.islink(path):
                continue
            to, place = os.readlink(path), os.path.relpath(path, source)
            leads = os.path.normpath(os.path.join(os.path.dirname(place), to))
            new = os.path.join(folder, place)
            if not os.path.isabs(to) and leads.split(os.sep)[0] != "..":
                os.makedirs(os.path.dirname(new), exist_ok=True)
                if not os.path.lexists(new):
                    os.symlink(to, new)


# --- done once ------------------------------------------------------------------------------------


def _key(env: RuntimeEnv) -> str:
    return _KEY if env.array_index is None else f"{_KEY}/{env.array_index}"


def _is_done(env: RuntimeEnv, store: Optional[Store]) -> bool:
    if store is not None:
        return store.get(_key(env)) is not None
    return os.path.exists(os.path.join(env.checkpoint_dir, RESUMED))


def _note(env: RuntimeEnv, store: Optional[Store], told: Mapping[str, str]) -> None:
    if store is not None:
        store.put(_key(env), json.dumps(told).encode())
    else:
        write_json(os.path.join(env.checkpoint_dir, RESUMED), dict(told))


def _wait(
    env: RuntimeEnv,
    store: Optional[Store],
    check: Callable[[], None],
    sleep: Callable[[float], None],
) -> None:
    """Until the main node has copied it: the nodes of a run have one folder, or one store."""
    waited = 0.0
    while not _is_done(env, store):
        if waited >= _WAIT:
            raise StoreError("the main node has not copied what the run goes on from", True)
        check()
        sleep(_PAUSE)
        waited += _PAUSE
