"""Whether a state folder is the one that its journal was made in, or a copy of it.

A copy has the process ids and container names of the original, but not its locks. A server that
mistook a copy for the original would find its running attempts lost, kill them and start them
again. So the journal records which folder it belongs to, by facts that a copy does not share: the
inodes of the folder and of the journal, their file system, the machine. What belongs to a folder
(processes, containers, control groups, networks) is marked with its random `id`, and nothing
without that mark is ever signalled.

A folder that was moved keeps all of this, except its path. A journal that was restored in place is
detected by newer facts outside of it: `position`, which the server writes after each commit, or
attempts that have begun and that the journal does not contain.
"""

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.local.executors.record import Record, tasks_that_run
from batchml.local.home import Home, read_record
from batchml.runtime.processes import boot_id
from batchml.runtime.storage.files import write_json

ADOPT = "batchml local adopt"

_MACHINE = Path("/etc/machine-id")


class Identity(Struct, frozen=True):
    """A state folder as it was when a server last started on it."""

    id: str
    path: str
    device: int
    file_system: int  # f_fsid; 0 where the system has none
    inode: int
    journal: int  # the inode of the journal's file
    boot: str
    machine: str  # empty where the system has none
    adopted_from: str = ""  # the path of the folder that this one is a copy of, until it has served


class Position(Struct, frozen=True):
    """The newest things that the journal holds."""

    sequence: int = 0  # of the last job
    task_id: str = ""  # of the last attempt that began


class Journal(Struct, frozen=True):
    """What a journal says before anything is done with it."""

    identity: Identity | None  # of the folder that it belongs to
    sequence: int  # of its last job
    task_ids: frozenset[str]  # of all attempts that it has launched


def observe(home: Home, identity: str = "") -> Identity:
    """The facts of a folder as it is now. The journal must be there. Raises OSError."""
    found = home.root.stat()
    return Identity(
        id=identity or secrets.token_hex(8),
        path=str(home.root),
        device=found.st_dev,
        file_system=os.statvfs(home.root).f_fsid,
        inode=found.st_ino,
        journal=home.journal.stat().st_ino,
        boot=boot_id(),
        machine=_machine(),
    )


def _machine() -> str:
    try:
        return _MACHINE.read_text("ascii", "replace").strip()
    except OSError:
        return ""


def difference(kept: Identity, now: Identity) -> str:
    """Why a folder is not the one that its journal belongs to; empty when it is. Pure."""
    if kept.boot != now.boot and kept.machine and now.machine and kept.machine != now.machine:
        return f"comes from another machine, where its path was {kept.path}"
    if (kept.inode, kept.journal) != (now.inode, now.journal):
        if kept.inode == now.inode:
            return "holds a journal file that was replaced by a copy"
        return "is a copy" if kept.path == now.path else f"is a copy of {kept.path}"
    # Numbers of devices, and with some file systems their ids, may change when the machine starts.
    if not _same_file_system(kept, now) and (kept.boot == now.boot or kept.path != now.path):
        return f"is a copy of {kept.path}, which is on another disk"
    return ""


def _same_file_system(kept: Identity, now: Identity) -> bool:
    if kept.file_system and now.file_system:
        return kept.file_system == now.file_system
    return kept.device == now.device


# --- the look at a journal before anything is done with it ----------------------------------------


def judge(home: Home, journal: Journal) -> str:
    """Why a folder may only be read, by what its journal says; empty when it is the journal's.

    A journal that belongs to no folder yet is the folder's own.
    """
    kept = journal.identity
    if kept is None:
        return ""
    return difference(kept, observe(home)) or _older(home, kept, journal)


def _older(home: Home, kept: Identity, journal: Journal) -> str:
    """Why a journal is older than the other files of its folder; empty if it is not."""
    position = read_position(home) or Position()
    begun = tasks_that_run(kept.id) | ({position.task_id} if position.task_id else set())
    unknown = unknown_attempts(home, journal)
    is_older = position.sequence > journal.sequence or begun - journal.task_ids
    if is_older or _has_begun(home, unknown):
        return "holds a journal that is older than its other files, as after a restored backup"
    return ""


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def unknown_attempts(home: Home, journal: Journal) -> list[str]:
    """Folders of attempts that a journal has never heard of."""
    return sorted(set(_names_in(home.attempts)) - journal.task_ids)


def _has_begun(home: Home, task_ids: Iterable[str]) -> bool:
    """Whether the program of one of these attempts may have begun: their runners write that down.

    The folder alone says nothing: it is made before the commit that a killed server never made.
    """
    return any(_record_has_begun(home.attempt(task_id)) for task_id in task_ids)


def _record_has_begun(folder: Path) -> bool:
    """Raises OSError for a record that cannot be read."""
    found = read_record(folder / "runner.json", Record)
    return (folder / "exit.json").exists() or (found is not None and found.may_have_begun)


# --- for those who have no journal open -----------------------------------------------------------


def of(home: Home) -> Identity | None:
    """The identity of this folder, from the file beside its journal; None for a copy."""
    kept = read_record(home.local / "identity.json", Identity)
    try:
        return kept if kept is not None and not difference(kept, observe(home)) else None
    except OSError:
        return None  # its journal is gone


def write_down(home: Home, identity: Identity) -> None:
    write_json(str(home.local / "identity.json"), msgspec.to_builtins(identity))


def read_position(home: Home) -> Position | None:
    return read_record(home.position, Position)


def adopted(home: Home, kept: Identity | None) -> Identity:
    """A new identity for a folder that was a copy."""
    return replace(observe(home), adopted_from=kept.path if kept is not None else str(home.root))
