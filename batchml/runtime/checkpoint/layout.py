"""Checkpoints on a disk: folders such as `step-0000000120/`, whose manifest is written last.

Saving needs no locks, only atomic renames, which NFS, EFS and Lustre have.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

from batchml.runtime.processes import process_age
from batchml.runtime.protocol.variables import number_of
from batchml.runtime.storage.files import read_json, sync_path, write_json, write_new

# --- The fence ------------------------------------------------------------------------------------
# Of two generations of a run that live at once, only the later one may save.
#
# The fence is a file beside the checkpoints. A generation writes its number into it when it
# searches for the checkpoint to continue from, or at its first save. An earlier generation that
# still lives, for example on a host without network, reads the fence before each save, and does not
# save. Microseconds lie between that read and the rename of a save; only a lock could prevent a
# mistake in between, and shared file systems often have no locks.


FENCE = ".batchml-fence.json"
GENERATION = "BATCHML_GENERATION"


class FenceTerm(NamedTuple):
    """A generation of the processes of a run."""

    run: str  # the job's id, the same on all nodes; empty outside a run
    attempt: int
    generation: int  # of this attempt
    began: float = 0.0  # seconds since the epoch

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> FenceTerm:
        run = environ.get("BATCHML_RUN") or environ.get("AWS_BATCH_JOB_ID", "")
        attempt = environ.get("BATCHML_ATTEMPT") or environ.get("AWS_BATCH_JOB_ATTEMPT", "")
        return cls(
            run.partition("#")[0], number_of(attempt, 1), number_of(environ.get(GENERATION), 0),
            time.time() - process_age(),
        )  # fmt: skip

    def is_before(self, other: FenceTerm) -> bool:
        """Whether `other` is later. For two jobs, as in batches of a sweep, the clock decides."""
        if self.run == other.run:
            return (self.attempt, self.generation) < (other.attempt, other.generation)
        return self.began < other.began

    def describe(self) -> str:
        return f"attempt {self.attempt}, generation {self.generation} of run {self.run or '(none)'}"


def claim_folder(folder: str, term: FenceTerm) -> str:
    """Claim a folder for a generation. Return why it may not save there, or an empty text.

    Raises OSError if the fence can be neither read nor written.
    """
    path = os.path.join(folder, FENCE)
    holder = _holder(path)
    if holder is not None:
        if term.is_before(holder):
            return f"{holder.describe()} saves here now"
        if term[:3] == holder[:3]:
            return ""
    write_json(path, term._asdict())
    return ""


def _holder(path: str) -> FenceTerm | None:
    found = read_json(path)
    try:
        return FenceTerm(
            str(found["run"]), int(found["attempt"]), int(found["generation"]),
            float(found["began"]),
        )  # fmt: skip
    except (TypeError, KeyError, ValueError):
        return None  # missing or invalid


# --- Checkpoints ----------------------------------------------------------------------------------


MANIFEST = "MANIFEST.json"
SAVING, REMOVING = ".saving-", ".removing-"  # names of incomplete checkpoints
_BLOCK = 1 << 20
_NAME = r"step-([0-9]{1,18})(?:\.([0-9]{1,9}))?"

Files = Dict[str, Tuple[int, str]]  # path below the folder -> bytes, SHA-256


class Checkpoint(NamedTuple):
    """A complete checkpoint: the folder with its files, and the number of finished steps."""

    path: str
    step: int


class CheckpointName(NamedTuple):
    """The parsed name of a checkpoint's folder. Later checkpoints are greater."""

    step: int
    version: int  # above 0 if the step was saved again: the old folder stays until that is done
    name: str


def parse_name(name: str) -> Optional[CheckpointName]:
    found = re.fullmatch(_NAME, name)
    return CheckpointName(int(found[1]), int(found[2] or 0), name) if found else None


def list_checkpoints(folder: str) -> List[CheckpointName]:
    """The checkpoints in a folder, the newest first; empty without the folder. Raises OSError."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(filter(None, map(parse_name, names)), reverse=True)


def free_name(folder: str, step: int) -> str:
    """An unused name for this step: `step-0000000120`, then `step-0000000120.1`."""
    versions = [each.version for each in list_checkpoints(folder) if each.step == step]
    name = f"step-{step:010d}"
    return f"{name}.{max(versions) + 1}" if versions else name


def make_manifest(
    term: FenceTerm, step: int, world: int, save: str, files: Files
) -> Dict[str, Any]:
    """The content of MANIFEST.json; `save` identifies this save."""
    listed = {name: {"size": size, "sha256": digest} for name, (size, digest) in files.items()}
    return {
        "format": 1, "run": term.run, "attempt": term.attempt, "generation": term.generation,
        "step": step, "world": world, "save": save, "at": round(time.time(), 3), "files": listed,
    }  # fmt: skip


def read_manifest(path: str) -> Dict[str, Any]:
    """Read the manifest of a checkpoint. Raises ValueError and OSError."""
    with open(os.path.join(path, MANIFEST), "rb") as file:
        found = json.loads(file.read())
    try:
        for name, each in found["files"].items():
            int(each["size"]), str(each["sha256"]), os.path.join(path, name)
        int(found["step"])
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"its {MANIFEST} is not valid ({error})") from None
    return dict(found)


def find_damage(path: str, step: int, thorough: bool = True) -> str:
    """The damage of a checkpoint in words; empty if it is complete.

    With `thorough` all files are read, else only their sizes are compared. Raises OSError if the
    checkpoint cannot be read, which does not mean that it is damaged.
    """
    try:
        found = read_manifest(path)
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except ValueError as error:
        return str(error)
    if found["step"] != step:
        return f"its {MANIFEST} is of step {found['step']}"
    for name, listed in found["files"].items():
        file = os.path.join(path, name)
        try:
            size = os.stat(file).st_size
            if size != listed["size"]:
                return f"{name} has {size} bytes instead of {listed['size']}"
            if thorough and digest_of(file) != listed["sha256"]:
                return f"{name} has changed: its SHA-256 differs from the manifest's"
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing"
    return ""


def looks_whole(path: str, step: int) -> bool:
    """Whether a checkpoint is complete, by its manifest and the sizes of its files."""
    try:
        return not find_damage(path, step, thorough=False)
    except OSError:
        return False


def digest_of(path: str, sync: bool = False) -> str:
    """The SHA-256 of a file. With `sync` the file is durable afterwards."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for block in iter(lambda: file.read(_BLOCK), b""):
            digest.update(block)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()


def describe_files(folder: str, names: Optional[Sequence[str]] = None) -> Files:
    """Make the files in a folder durable, and return their sizes and SHA-256. Raises OSError."""
    found: Files = {}
    for name in all_files(folder) if names is None else names:
        path = os.path.join(folder, name)
        found[name] = (os.stat(path).st_size, digest_of(path, sync=True))
    return found


def all_files(folder: str) -> List[str]:
    """The paths, below a folder, of its regular files and links to regular files.

    Raises OSError if a subfolder cannot be read: a checkpoint without it would look complete.
    """

    def fail(error: OSError) -> None:
        raise error

    found = []
    for below, _, names in os.walk(folder, onerror=fail):
        paths = [os.path.join(below, name) for name in names]
        found += [os.path.relpath(path, folder) for path in paths if os.path.isfile(path)]
    return sorted(found)


def commit(folder: str, temporary: str, manifest: Dict[str, Any]) -> str:
    """Write the manifest and rename the folder. Return its final name. Raises OSError."""
    write_new(os.path.join(temporary, MANIFEST), json.dumps(manifest).encode(), 0o644)
    for below, _, _ in os.walk(temporary):
        sync_path(below)
    name = free_name(folder, manifest["step"])
    os.rename(temporary, os.path.join(folder, name))
    sync_path(folder)
    return name


def select_old(found: Sequence[CheckpointName], whole: Set[str], keep: int, new: str) -> List[str]:
    """The names of the checkpoints that may be removed after `new` was saved.

    Of the complete checkpoints (`whole`) the newest `keep` stay, one for each step. `new` always
    stays.
    """
    kept: Dict[int, str] = {}
    for entry in sorted(found, reverse=True):
        if entry.name in whole and len(kept) < max(1, keep):
            kept.setdefault(entry.step, entry.name)
    return [entry.name for entry in found if entry.name not in (new, *kept.values())]


def remove(folder: str, name: str) -> None:
    """Remove a checkpoint, and ignore errors.

    It is renamed first, so that a partly removed checkpoint never looks complete.
    """
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
    """Remove all checkpoints except `new` and the newest `keep` complete ones.

    A checkpoint with a name in `damaged` does not count as complete.
    """
    found = list_checkpoints(folder)
    whole = {
        each.name
        for each in found
        if each.name not in damaged and looks_whole(os.path.join(folder, each.name), each.step)
    }
    for name in select_old(found, whole, keep, new):
        remove(folder, name)
