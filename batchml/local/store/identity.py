"""The identity of a state folder: whether it is the folder of its journal, or a copy.

A copy contains the process ids and container names of the original, but not its locks. A server
that mistook a copy for the original would consider the running attempts lost, kill them and start
them again. So the journal records its folder by facts that a copy does not share: the inodes of the
folder and of the journal, their file system, the machine. Everything outside the folder (processes,
containers, control groups, networks) is marked with its random `id`, and nothing without that mark
is ever signalled.

A moved folder keeps all of these facts, except its path. A journal that was restored in place is
detected by newer facts outside of it: `position`, which the server writes after each commit, and
attempts that have begun but are not in the journal.
"""

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.local.executors.record import RunnerRecord, find_running_tasks
from batchml.local.home import Home, read_record
from batchml.runtime.processes import boot_id
from batchml.runtime.storage.files import write_json

ADOPT = "batchml local adopt"

_MACHINE = Path("/etc/machine-id")


class FolderIdentity(Struct, frozen=True):
    """A state folder as it was at the last start of a server."""

    id: str
    path: str
    device: int
    file_system: int  # f_fsid; 0 where the system has none
    inode: int
    journal: int  # the inode of the journal's file
    boot: str
    machine: str  # empty where the system has none
    adopted_from: str = ""  # the path of the original folder, until this copy has served


class JournalPosition(Struct, frozen=True):
    """The newest entries of the journal."""

    sequence: int = 0  # of the last job
    task_id: str = ""  # of the last attempt that began


class JournalFacts(Struct, frozen=True):
    """Facts of a journal's content, read before anything is changed."""

    identity: FolderIdentity | None  # of the folder that the journal belongs to
    sequence: int  # of its last job
    task_ids: frozenset[str]  # of all attempts that it has launched


def observe(home: Home, identity: str = "") -> FolderIdentity:
    """The facts of a folder as it is now. The journal must exist. Raises OSError."""
    status = home.root.stat()
    return FolderIdentity(
        id=identity or secrets.token_hex(8),
        path=str(home.root),
        device=status.st_dev,
        file_system=os.statvfs(home.root).f_fsid,
        inode=status.st_ino,
        journal=home.journal.stat().st_ino,
        boot=boot_id(),
        machine=_machine(),
    )


def _machine() -> str:
    try:
        return _MACHINE.read_text("ascii", "replace").strip()
    except OSError:
        return ""


def difference(kept: FolderIdentity, now: FolderIdentity) -> str:
    """The reason why a folder is not its journal's, as a clause without subject; empty when it is.
    Pure.
    """
    if kept.boot != now.boot and kept.machine and now.machine and kept.machine != now.machine:
        return f"comes from another machine, where its path was {kept.path}"
    if (kept.inode, kept.journal) != (now.inode, now.journal):
        if kept.inode == now.inode:
            return "holds a journal file that was replaced by a copy"
        return "is a copy" if kept.path == now.path else f"is a copy of {kept.path}"
    # Device numbers, and ids of some file systems, may change when the machine restarts.
    if not _same_file_system(kept, now) and (kept.boot == now.boot or kept.path != now.path):
        return f"is a copy of {kept.path}, which is on another disk"
    return ""


def _same_file_system(kept: FolderIdentity, now: FolderIdentity) -> bool:
    if kept.file_system and now.file_system:
        return kept.file_system == now.file_system
    return kept.device == now.device


# --- The check of a journal before it is opened for writing ---------------------------------------


def why_read_only(home: Home, journal: JournalFacts) -> str:
    """The reason why a folder may only be read, given its journal's content; empty when it may be
    written.

    A journal without an identity belongs to its folder.
    """
    kept = journal.identity
    if kept is None:
        return ""
    return difference(kept, observe(home)) or _older(home, kept, journal)


def _older(home: Home, kept: FolderIdentity, journal: JournalFacts) -> str:
    """The reason if a journal is older than the other files of its folder; else empty."""
    position = read_position(home) or JournalPosition()
    begun = find_running_tasks(kept.id) | ({position.task_id} if position.task_id else set())
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


def unknown_attempts(home: Home, journal: JournalFacts) -> list[str]:
    """Folders of attempts that the journal does not contain."""
    return sorted(set(_names_in(home.attempts)) - journal.task_ids)


def _has_begun(home: Home, task_ids: Iterable[str]) -> bool:
    """Whether the program of one of these attempts may have begun, according to its runner.

    A folder alone proves nothing: it is made before a commit, and the server may be killed in
    between.
    """
    return any(_record_has_begun(home.attempt(task_id)) for task_id in task_ids)


def _record_has_begun(folder: Path) -> bool:
    """Raises OSError for a record that cannot be read."""
    runner = read_record(folder / "runner.json", RunnerRecord)
    return (folder / "exit.json").exists() or (runner is not None and runner.may_have_begun)


# --- Without an open journal ----------------------------------------------------------------------


def read_identity(home: Home) -> FolderIdentity | None:
    """The identity of this folder, from the file beside its journal; None for a copy."""
    kept = read_record(home.local / "identity.json", FolderIdentity)
    try:
        return kept if kept is not None and not difference(kept, observe(home)) else None
    except OSError:
        return None  # the journal is missing


def write_identity(home: Home, identity: FolderIdentity) -> None:
    write_json(str(home.local / "identity.json"), msgspec.to_builtins(identity))


def read_position(home: Home) -> JournalPosition | None:
    return read_record(home.position, JournalPosition)


def identity_of_copy(home: Home, kept: FolderIdentity | None) -> FolderIdentity:
    """A new identity for a folder that was a copy."""
    return replace(observe(home), adopted_from=kept.path if kept is not None else str(home.root))
