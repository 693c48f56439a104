"""An attempt's record as the server reads it, and the processes that a lost runner left behind.

A missing record is not evidence. An attempt whose start is in the journal, but whose record cannot
be read, may have begun. Only a record with `never_began` proves that its program did not.
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
from batchml.local.executors.choice import PROCESS
from batchml.local.executors.runner.files import FAILURE
from batchml.local.home import read_record
from batchml.runtime.processes import boot_id, descendants, send, start_time

_MAX_FAILURE = 180  # characters; AWS keeps 255 of a status reason


class RunnerRecord(Struct, frozen=True):
    """A runner and its attempt, as the runner has recorded them. The pid alone does not identify
    the runner: it may belong to another process by now.
    """

    pid: int
    start_time: int | None = None
    boot_id: str = ""
    kind: str = PROCESS
    groups: list[str] = []
    label: str = ""  # the name of its environment
    started_at: int | None = None  # ms
    address: str = ""
    may_have_begun: bool = False  # the runner has received the message to start the program
    never_began: bool = False  # its server died before that, so the program was not started

    @property
    def is_of_this_boot(self) -> bool:
        return self.boot_id == boot_id()

    @property
    def is_alive(self) -> bool:
        return self.is_of_this_boot and self.start_time == start_time(self.pid)


def read(folder: Path) -> RunnerRecord | None:
    """The record in an attempt's folder. None once the attempt has ended (then the record is
    renamed to exit.json), and while the record is empty or unreadable.
    """
    try:
        return read_record(folder / "runner.json", RunnerRecord)
    except OSError:
        return None


def lock_record(path: str, flags: int = 0) -> int | None:
    """The descriptor of a record that is now locked, or None when another process has locked it."""
    record = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(record)
        return None
    return record


def is_held(folder: Path) -> bool:
    """True while a runner holds the lock of the attempt's record; a dead runner cannot."""
    try:
        record = lock_record(str(folder / "runner.json"))
    except FileNotFoundError:
        return False
    if record is None:
        return True
    os.close(record)
    return False


def read_progress(folder: Path) -> str:
    """The current step of an attempt's preparation."""
    return _last_line(folder / "progress")


def describe_failure(folder: Path) -> str:
    """The error that ended an attempt's runner, as a sentence to append; empty if it wrote none."""
    text = _last_line(folder / FAILURE)[:_MAX_FAILURE]
    return f" It failed: {text}" if text else ""


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


class AttemptCondition(enum.Enum):
    """The condition of an attempt whose start is in the journal."""

    ENDED = "its runner has recorded an end"
    LIVES = "its runner lives"
    BEGINS = "its runner lives and is about to write its record"
    NEVER_BEGAN = "its runner has recorded that the program was not started"
    GONE = "its runner has ended without recording an end"
    UNKNOWN = "it has no readable record"


class AttemptEvidence(Struct, frozen=True):
    """The facts in an attempt's folder. `error` is the reason if one cannot be read."""

    has_ended: bool = False
    is_held: bool = False
    record: RunnerRecord | None = None
    error: str = ""

    @property
    def condition(self) -> AttemptCondition:
        if self.has_ended:
            return AttemptCondition.ENDED
        if self.is_held:
            return AttemptCondition.LIVES if self.record is not None else AttemptCondition.BEGINS
        if self.record is None:
            return AttemptCondition.UNKNOWN
        return AttemptCondition.NEVER_BEGAN if self.record.never_began else AttemptCondition.GONE


def read_evidence(folder: Path) -> AttemptEvidence:
    """Read the facts, in an order that misses nothing: a runner that ends writes its record,
    renames it, and dies.
    """
    try:
        held = is_held(folder)
        found = read_record(folder / "runner.json", RunnerRecord)
        return AttemptEvidence((folder / "exit.json").exists(), held, found)
    except OSError as error:
        return AttemptEvidence(error=str(error))


# --- Processes of a lost runner -------------------------------------------------------------------

log = logging.getLogger("batchml.local")

PAUSE = 0.02  # seconds between two searches

_LIMIT = 30.0  # seconds until the processes must be dead


def mark_of(identity: str, task_id: str) -> str:
    """The value of BATCHML_TASK in the processes of an attempt."""
    return f"{identity}.{task_id}"


def kill_processes(mark: str, groups: list[str]) -> Iterator[list[int]]:
    """Kill an attempt's processes. Each step yields the processes that it found, and the caller
    waits for `PAUSE` seconds before the next. `groups` are the attempt's control groups.

    Ends after two searches in a row that find nothing. One search alone misses a process that is
    being replaced by another (exec), or that forks and dies while the list is read. Gives up after
    `_LIMIT` seconds.
    """
    end = time.monotonic() + _LIMIT
    before: list[int] | None = None
    while time.monotonic() < end:
        left = cgroup.kill(groups) + find_processes(mark)
        if not left and before == []:
            cgroup.remove(groups, limit=0)
            return
        send(left, signal.SIGSTOP)  # a stopped process cannot fork while others are killed
        send(left, signal.SIGKILL)
        before = left
        yield left
    log.error("processes %s of attempt %s cannot be killed", before, mark)


def groups_of(record: RunnerRecord | None, identity: str) -> list[str]:
    """The control groups in a record that belong to this state folder: in a copy of a folder, a
    record names the original's groups.
    """
    if record is None or not record.is_of_this_boot:
        return []
    name = cgroup.name_of(identity)
    return [each for each in record.groups if os.path.basename(os.path.dirname(each)) == name]


def find_processes(mark: str) -> list[int]:
    """The processes of an attempt: those with its mark in their environment, and their descendants,
    which may have cleared theirs.
    """
    variable = f"BATCHML_TASK={mark}".encode()
    found = [pid for pid, variables in _environments() if variable in variables]
    return list(dict.fromkeys([*found, *descendants(*found)])) if found else []


def find_running_tasks(identity: str) -> set[str]:
    """The attempts of a state folder that have processes now, by their marks."""
    start = f"BATCHML_TASK={mark_of(identity, '')}".encode()
    return {
        variable[len(start) :].decode("ascii", "replace")
        for _, variables in _environments()
        for variable in variables
        if variable.startswith(start)
    }


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    """The variables of every other process that can be read."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                yield int(entry), file.read().split(b"\0")
        except OSError:
            continue
