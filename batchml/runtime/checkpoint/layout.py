"""How a checkpoint lies on a disk: `step-0000000120/`, its files, and a manifest written last.

Nothing needs a lock, and of the file system only that a rename is whole: as NFS, EFS and Lustre do.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

from batchml.runtime.checkpoint.fence import Term
from batchml.runtime.storage.files import sync_folder, write_new

MANIFEST = "MANIFEST.json"
SAVING, REMOVING = ".saving-", ".removing-"  # what is not whole yet, and what no longer is
_BLOCK = 1 << 20
_NAME = re.compile(r"step-([0-9]{1,18})(?:\.([0-9]{1,9}))?")

Files = Dict[str, Tuple[int, str]]  # path below the folder -> bytes, SHA-256


class Checkpoint(NamedTuple):
    """One that is whole: the folder with its files, and how many steps were finished."""

    path: str
    step: int


class Entry(NamedTuple):
    """A folder that has the name of a checkpoint. Later ones are greater."""

    step: int
    version: int  # a step may be saved again: then the old one stays until the new one is there
    name: str


def entry_of(name: str) -> Optional[Entry]:
    found = _NAME.fullmatch(name)
    return Entry(int(found[1]), int(found[2] or 0), name) if found else None


def entries(folder: str) -> List[Entry]:
    """What is in a folder, the newest first; nothing where there is no folder. Raises OSError."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(filter(None, map(entry_of, names)), reverse=True)


def free_name(folder: str, step: int) -> str:
    """A name that no entry of this step has: `step-0000000120`, then `step-0000000120.1`."""
    versions = [each.version for each in entries(folder) if each.step == step]
    name = f"step-{step:010d}"
    return f"{name}.{max(versions) + 1}" if versions else name


def manifest(term: Term, step: int, world: int, save: str, files: Files) -> Dict[str, Any]:
    """What MANIFEST.json says; `save` names this very save."""
    told = {name: {"size": size, "sha256": digest} for name, (size, digest) in files.items()}
    return {
        "format": 1, "run": term.run, "attempt": term.attempt, "generation": term.generation,
        "step": step, "world": world, "save": save, "at": round(time.time(), 3), "files": told,
    }  # fmt: skip


def read_manifest(path: str) -> Dict[str, Any]:
    """The manifest of a checkpoint. Raises ValueError, and OSError where there is none to read."""
    with open(os.path.join(path, MANIFEST), "rb") as file:
        found = json.loads(file.read())
    try:
        for name, each in found["files"].items():
            int(each["size"]), str(each["sha256"]), os.path.join(path, name)
        int(found["step"])
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"its {MANIFEST} is not one of ours ({error})") from None
    return dict(found)


def trouble(path: str, step: int, thorough: bool = True) -> str:
    """What is wrong with a checkpoint; empty for one that is whole.

    `thorough` reads all its files, otherwise their sizes are compared. Raises OSError where it
    cannot be read at all, which says nothing about the checkpoint.
    """
    try:
        found = read_manifest(path)
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except ValueError as error:
        return str(error)
    if found["step"] != step:
        return f"its {MANIFEST} is that of step {found['step']}"
    for name, told in found["files"].items():
        file = os.path.join(path, name)
        try:
            size = os.stat(file).st_size
            if size != told["size"]:
                return f"{name} has {size} bytes instead of {told['size']}"
            if thorough and digest_of(file) != told["sha256"]:
                return f"{name} has changed: its SHA-256 is another"
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing"
    return ""


def looks_whole(path: str, step: int) -> bool:
    """By its manifest and the sizes of its files."""
    try:
        return not trouble(path, step, thorough=False)
    except OSError:
        return False


def digest_of(path: str, sync: bool = False) -> str:
    """SHA-256 of a file, which is durable afterwards if `sync`."""
    found = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while True:
            block = file.read(_BLOCK)
            if not block:
                break
            found.update(block)
        if sync:
            os.fsync(file.fileno())
    return found.hexdigest()


def written(folder: str, names: Optional[Sequence[str]] = None) -> Files:
    """Make what lies in a folder durable, and describe it. Raises OSError."""
    found: Files = {}
    for name in all_files(folder) if names is None else names:
        path = os.path.join(folder, name)
        found[name] = (os.stat(path).st_size, digest_of(path, sync=True))
    return found


def all_files(folder: str) -> List[str]:
    """Paths below a folder, of regular files and links to such.

    Raises OSError where a part cannot be looked into: a checkpoint without it would pass for whole.
    """

    def fail(error: OSError) -> None:
        raise error

    found = []
    for path, _, names in os.walk(folder, onerror=fail):
        whole = [os.path.join(path, name) for name in names]
        found += [os.path.relpath(each, folder) for each in whole if os.path.isfile(each)]
    return sorted(found)


def sync_folders(folder: str) -> None:
    for path, _, _ in os.walk(folder):
        sync_folder(path)


def commit(folder: str, temporary: str, told: Dict[str, Any]) -> str:
    """Write the manifest and give the folder its name, which is returned. Raises OSError."""
    write_new(os.path.join(temporary, MANIFEST), json.dumps(told).encode(), 0o644)
    sync_folders(temporary)
    name = free_name(folder, told["step"])
    os.rename(temporary, os.path.join(folder, name))
    sync_folder(folder)
    return name


def doomed(found: Sequence[Entry], whole: Set[str], keep: int, new: str) -> List[str]:
    """The names of those that may go now that `new` is there.

    Of those that are `whole` the newest `keep` stay, each step once; `new` stays in any case.
    """
    kept: Dict[int, str] = {}
    for each in sorted(found, reverse=True):
        if each.name in whole and len(kept) < max(1, keep):
            kept.setdefault(each.step, each.name)
    return [each.name for each in found if each.name != new and each.name not in kept.values()]


def remove(folder: str, name: str) -> None:
    """Remove a checkpoint; half removed it does not look like one. What fails is left lying."""
    path = os.path.join(folder, name)
    if not name.startswith((SAVING, REMOVING)):
        gone = os.path.join(folder, f"{REMOVING}{os.urandom(4).hex()}-{name}")
        try:
            os.rename(path, gone)
        except OSError:
            return
        path = gone
    shutil.rmtree(path, ignore_errors=True)


def prune(folder: str, keep: int, new: str, damaged: Set[str]) -> None:
    """Remove what is too old, and what is known to be `damaged` (names)."""
    found = entries(folder)
    whole = {
        each.name
        for each in found
        if each.name not in damaged and looks_whole(os.path.join(folder, each.name), each.step)
    }
    for name in doomed(found, whole, keep, new):
        remove(folder, name)
