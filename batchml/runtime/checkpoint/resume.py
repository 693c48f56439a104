"""Continue from the checkpoint of another run: `batchml rerun --resume`.

Before the command starts, the other run's checkpoint and files are copied into this run's
checkpoint folder and verified. Later attempts of this run find them there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

from batchml.runtime.checkpoint.layout import MANIFEST, CheckpointName
from batchml.runtime.checkpoint.remote import (
    RESUMED,
    CheckpointFiles,
    CheckpointSender,
    child_prefix,
    fetch_checkpoint,
    run_prefix,
)
from batchml.runtime.entry.folders import is_kept_in_store, workspace_folder
from batchml.runtime.entry.outputs import KEPT
from batchml.runtime.protocol.launch import WORKER, LaunchPlan
from batchml.runtime.protocol.variables import ARRAY_MAP, RuntimeEnv, is_main_node, nth_number
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.files import write_json
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import Store, StoreError, no_check

VARIABLE = "BATCHML_RESUME"
_KEY = "resumed"  # the key of the record in the run's store, if no folder outlives an attempt
_WAIT = 3600.0  # seconds that the other nodes wait for the main node
_PAUSE = 2.0  # seconds between two polls
_PART = ".batchml-part"  # ends the name of a file that is being copied


class NoCheckpoint(ValueError):
    """The other run has no checkpoint. It is not replaced by a start from the beginning."""


class ResumeSource(NamedTuple):
    """The run to resume from, and where its checkpoints may be. Empty texts name nothing."""

    job: str  # id
    name: str
    key: str = ""  # of the submission; names the run's folder in the workspace
    store: str = ""  # an s3:// prefix
    folder: str = ""  # on this machine; `FOLDER:3` is the folder of child 3
    children: str = ""  # the numbers in the array of the children that run again: "3 17-19"
    is_array: bool = False  # the run was an array, some of whose children may have saved nothing

    @classmethod
    def read(cls, text: str) -> ResumeSource:
        """Read the client's JSON. Raises ValueError."""
        found: Any = json.loads(text)
        if not isinstance(found, dict) or not {"job", "name"} <= set(found) <= set(cls._fields):
            raise ValueError(f"{VARIABLE} was written by another version of batchml: {text[:80]}")
        return cls(**found)

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in self._asdict().items() if value})

    def child(self, index: Optional[int]) -> Optional[int]:
        """The child of the other run from which child `index` of this run continues.

        Raises ValueError.
        """
        return nth_number(self.children, index or 0) if self.children else index

    def describe(self, index: Optional[int], environ: Mapping[str, str]) -> str:
        """The other run in words. A child has its number in the first array, not in a rerun's."""
        child, first = self.child(index), environ.get(ARRAY_MAP, "")
        if child is not None and first:
            child = nth_number(first, index or 0)
        return f"{self.name} {self.job}{'' if child is None else f':{child}'}"


def checkpoint_folder(folder: str, child: Optional[int]) -> str:
    """The checkpoint folder of a run on this machine."""
    return os.path.join(folder if child is None else f"{folder}:{child}", "checkpoints")


def kept_folder(folder: str, child: Optional[int]) -> str:
    """The files that a run on this machine has kept of its working folder."""
    return os.path.join(folder if child is None else f"{folder}:{child}", "output", KEPT)


def kept_prefix(child: Optional[int]) -> str:
    """The prefix of these files in the store of a run."""
    return f"output/{KEPT}/" if child is None else f"output/{child}/{KEPT}/"


def kept_places(env: RuntimeEnv, environ: Mapping[str, str]) -> List[Tuple[str, str]]:
    """The stores, with prefixes, that may have files of the other run's working folder.

    Empty without another run. Raises ValueError.
    """
    if VARIABLE not in environ or not env.is_run:
        return []
    other = ResumeSource.read(environ[VARIABLE])
    child, found = other.child(env.array_index), []
    if other.folder:
        found.append((os.path.dirname(kept_folder(other.folder, child)), f"{KEPT}/"))
    if other.store:
        found.append((other.store, kept_prefix(child)))
    return found


class _Source(NamedTuple):
    """A place that may have the other run's files."""

    store: Store
    prefix: str = ""
    folder: str = ""  # the store's folder, if it is one


def resume(
    env: RuntimeEnv,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    check: Callable[[], None] = no_check,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Copy the other run's files, unless an earlier attempt has copied them.

    Only the main node copies, and in a group run only the head. `check` is called often, and may
    raise to end the copy. Raises NoCheckpoint, StoreError and OSError.
    """
    other, plan = ResumeSource.read(environ[VARIABLE]), LaunchPlan.read(environ)
    if plan is not None and plan.role == WORKER:
        return None  # a worker of a group run: only the head saves
    store = open_store(env.store, environ, check) if is_kept_in_store(env) else None
    if not is_main_node(environ):
        return _wait(env, store, check, sleep)
    if _is_done(env, store):
        return None
    name = other.describe(env.array_index, environ)
    copied = ""
    for source in _sources(other, env, environ, check):
        copied = copied or _copy(source, env.checkpoint_dir, name, say, check)
    if not copied and not other.is_array and not _has_kept_files(env, environ):
        raise NoCheckpoint(
            f"{name} has saved no checkpoint to go on from. To start from the beginning, rerun it "
            f"without --resume"
        )
    if store is not None:
        errors = CheckpointSender(env.checkpoint_dir, store, run_prefix(env)).finish()
        if errors:
            raise StoreError(f"the files of {name} cannot be kept: {errors[0]}", temporary=True)
    _record(env, store, {"from": name, "what": copied})
    if _has_kept_files(env, environ) and not copied:
        return None  # the working folder gets them
    if copied:
        say(f"batchml notice: this run resumes from {copied} of {name}")
    else:
        say(f"batchml notice: {name} has saved no checkpoint: this run starts from the beginning")
    return None


def _has_kept_files(env: RuntimeEnv, environ: Mapping[str, str]) -> bool:
    places = kept_places(env, environ)
    return any(open_store(url, environ).keys(prefix, 1) for url, prefix in places)


def _sources(
    other: ResumeSource, env: RuntimeEnv, environ: Mapping[str, str], check: Callable[[], None]
) -> List[_Source]:
    """The places where the other run's files may be, in the order of the search."""
    child = other.child(env.array_index)
    folders = []
    if other.folder:
        folders.append(checkpoint_folder(other.folder, child))
    elif env.workspace and other.key:
        folders.append(workspace_folder(env.workspace, other.key, child))
    found = [_Source(FolderStore(each), "", each) for each in folders]
    if other.store:
        found.append(_Source(open_store(other.store, environ, check), child_prefix(child)))
    return found


def _copy(
    source: _Source, folder: str, name: str, say: Callable[[str], None], check: Callable[[], None]
) -> str:
    """Copy the newest complete checkpoint and all other files of the run `name`.

    Returns a description of the copied files. Raises NoCheckpoint if all checkpoints are damaged.
    """
    found = CheckpointFiles.among(key[len(source.prefix) :] for key in _keys(source))
    copied: Optional[CheckpointName] = None
    for entry in found.with_manifest():
        check()
        names = found.checkpoints[entry]
        why = fetch_checkpoint(source.store, source.prefix, folder, entry, names)
        if not why:
            copied = entry
            break
        say(f"batchml notice: {entry.name} of {name} is skipped: {why}")
    if copied is None and found.with_manifest():
        raise NoCheckpoint(f"all checkpoints of {name} are damaged")
    others = _others(found, source)
    for each in others:
        check()
        _copy_file(source, each, folder)
    if source.folder:
        _copy_links(source.folder, folder)
    if copied is not None:
        return f"step {copied.step}"
    return f"the {len(others)} file{'s'[: len(others) != 1]}" if others else ""


def _keys(source: _Source) -> List[str]:
    if source.folder:
        try:
            os.listdir(source.folder)  # raises if the folder cannot be read: it may not be empty
        except (FileNotFoundError, NotADirectoryError):
            return []
    return source.store.keys(source.prefix)


def _others(found: CheckpointFiles, source: _Source) -> List[str]:
    """Files of programs that save without batchml, also in folders named like checkpoints."""
    others = [name for name in found.others if not name.startswith(".batchml")]
    if source.folder:
        for entry, names in found.checkpoints.items():
            others += [] if f"{entry.name}/{MANIFEST}" in names else names
    return others


def _copy_file(source: _Source, name: str, folder: str) -> None:
    path = os.path.join(folder, *name.split("/"))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if source.store.get_file(source.prefix + name, path + _PART):
        os.replace(path + _PART, path)


def _copy_links(source: str, folder: str) -> None:
    """Copy links to folders in `source`, such as `latest`. Links to files were copied as files."""
    for below, folders, _ in os.walk(source):
        for name in folders:
            path = os.path.join(below, name)
            if not os.path.islink(path):
                continue
            target, link = os.readlink(path), os.path.relpath(path, source)
            resolved = os.path.normpath(os.path.join(os.path.dirname(link), target))
            new = os.path.join(folder, link)
            if not os.path.isabs(target) and resolved.split(os.sep)[0] != "..":
                os.makedirs(os.path.dirname(new), exist_ok=True)
                if not os.path.lexists(new):
                    os.symlink(target, new)


# --- The record that the copy is done -------------------------------------------------------------


def _key(env: RuntimeEnv) -> str:
    return _KEY if env.array_index is None else f"{_KEY}/{env.array_index}"


def _is_done(env: RuntimeEnv, store: Optional[Store]) -> bool:
    if store is not None:
        return store.get(_key(env)) is not None
    return os.path.exists(os.path.join(env.checkpoint_dir, RESUMED))


def _record(env: RuntimeEnv, store: Optional[Store], value: Mapping[str, str]) -> None:
    if store is not None:
        store.put(_key(env), json.dumps(value).encode())
    else:
        write_json(os.path.join(env.checkpoint_dir, RESUMED), dict(value))


def _wait(
    env: RuntimeEnv,
    store: Optional[Store],
    check: Callable[[], None],
    sleep: Callable[[float], None],
) -> None:
    """Wait until the main node has copied the files into the folder or store of all nodes."""
    waited = 0.0
    while not _is_done(env, store):
        if waited >= _WAIT:
            raise StoreError("the main node has not copied the checkpoint to resume from", True)
        check()
        sleep(_PAUSE)
        waited += _PAUSE
