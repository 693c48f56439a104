"""An attempt's record as the server reads it: whether its runner lives, and what it says.

What a record does not say is not evidence. An attempt whose start is in the journal, and of which
no record can be read, may have begun; only a record that says so proves that it did not.
"""

from __future__ import annotations

import enum
import fcntl
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from batchml.local.executors import cgroup
from batchml.local.home import read_record
from batchml.runtime.processes import boot_id, descendants, send, start_time

PROCESS, CONTAINER = "process", "container"  # what an attempt can be


class Record(Struct, frozen=True):
    """A runner, as it says itself: a bare pid may by now be somebody else's."""

    pid: int
    start_time: int | None = None
    boot_id: str = ""
    kind: str = PROCESS
    groups: list[str] = []
    label: str = ""
    started_at: int | None = None  # ms
    address: str = ""
    may_have_begun: bool = False  # the runner was told to start the program
    never_began: bool = False  # its server died before that, and so it did not

    @property
    def is_of_this_boot(self) -> bool:
        return self.boot_id == boot_id()

    @property
    def is_alive(self) -> bool:
        return self.is_of_this_boot and self.start_time == start_time(self.pid)


def read(folder: Path) -> Record | None:
    """The record in an attempt's folder, until its end; None while it is empty or unreadable."""
    try:
        return read_record(folder / "runner.json", Record)
    except OSError:
        return None


def take(path: str, flags: int = 0) -> int | None:
    """The descriptor of a record that is now locked, or None when someone else has locked it."""
    record = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(record)
        return None
    return record


def is_held(folder: Path) -> bool:
    """True while a runner holds the attempt's record; a dead one cannot."""
    try:
        record = take(str(folder / "runner.json"))
    except FileNotFoundError:
        return False
    if record is None:
        return True
    os.close(record)
    return False


class Verdict(enum.Enum):
    """What has become of an attempt whose start is in the journal."""

    ENDED = "its runner has recorded an end"
    LIVES = "its runner looks after it"
    BEGINS = "its runner lives and is about to write its record"
    NEVER_BEGAN = "its runner has recorded that the program was not started"
    GONE = "its runner is gone without an end"
    UNKNOWN = "nothing readable is left of it"


class Evidence(Struct, frozen=True):
    """What the folder of an attempt holds. `error` says what of it cannot be read."""

    has_ended: bool = False
    is_held: bool = False
    record: Record | None = None
    error: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.has_ended:
            return Verdict.ENDED
        if self.is_held:
            return Verdict.LIVES if self.record is not None else Verdict.BEGINS
        if self.record is None:
            return Verdict.UNKNOWN
        return Verdict.NEVER_BEGAN if self.record.never_began else Verdict.GONE


def evidence(folder: Path) -> Evidence:
    """What is left of an attempt, in an order that misses nothing: a runner that ends writes its
    record, renames it, and dies.
    """
    try:
        held = is_held(folder)
        found = read_record(folder / "runner.json", Record)
        return Evidence((folder / "exit.json").exists(), held, found)
    except OSError as error:
        return Evidence(error=str(error))


# --- what is left of an attempt -------------------------------------------------------------------
# What a runner that is gone has left behind: processes, found in each way there is, and killed.


log = logging.getLogger("batchml.local")

PAUSE = 0.02  # seconds between two looks

_LIMIT = 30.0  # seconds for what is there to die


def mark_of(identity: str, task_id: str) -> str:
    """What the processes of an attempt are marked with, in their variable BATCHML_TASK."""
    return f"{identity}.{task_id}"


def kill(mark: str, groups: list[str]) -> Iterator[list[int]]:
    """Kill an attempt's processes, in steps with a `PAUSE` after each: those that were found.
    `groups` are control groups of its own.

    Done after two looks in a row that find nothing: one alone misses a process that is just being
    replaced by another (exec), or that forks and dies while the list is read. Or given up.
    """
    end = time.monotonic() + _LIMIT
    before: list[int] | None = None
    while time.monotonic() < end:
        left = cgroup.kill(groups) + tagged(mark)
        if not left and before == []:
            cgroup.remove(groups, limit=0)
            return
        send(left, signal.SIGSTOP)  # whoever is stopped cannot fork while others are killed
        send(left, signal.SIGKILL)
        before = left
        yield left
    log.error("processes %s of attempt %s cannot be killed", before, mark)


def groups_of(record: Record | None, identity: str) -> list[str]:
    """The control groups that a record names, as far as they are this state folder's: in a copy of
    another folder a record names that folder's groups.
    """
    if record is None or not record.is_of_this_boot:
        return []
    name = cgroup.name_of(identity)
    return [each for each in record.groups if os.path.basename(os.path.dirname(each)) == name]


def tagged(mark: str) -> list[int]:
    """Processes that belong to an attempt: those with its mark in their environment, and those
    that descend from them, which may have cleared theirs.
    """
    variable = f"BATCHML_TASK={mark}".encode()
    found = [pid for pid, variables in _environments() if variable in variables]
    return list(dict.fromkeys([*found, *descendants(*found)])) if found else []


def tasks_that_run(identity: str) -> set[str]:
    """The attempts of a state folder that have processes now, by their marks."""
    start = f"BATCHML_TASK={mark_of(identity, '')}".encode()
    return {
        variable[len(start) :].decode("ascii", "replace")
        for _, variables in _environments()
        for variable in variables
        if variable.startswith(start)
    }


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    """The variables of every other process that lets us see them."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                yield int(entry), file.read().split(b"\0")
        except OSError:
            continue
