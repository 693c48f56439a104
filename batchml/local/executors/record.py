"""An attempt's record as the server reads it: whether its runner lives, and what it says."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from msgspec import Struct

from batchml.local.home import read_record
from batchml.runtime.processes import boot_id, start_time

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

    @property
    def is_of_this_boot(self) -> bool:
        return self.boot_id == boot_id()

    @property
    def is_alive(self) -> bool:
        return self.is_of_this_boot and self.start_time == start_time(self.pid)


def read(folder: Path) -> Record | None:
    """The record in an attempt's folder, until its end; None while it is empty."""
    return read_record(folder / "runner.json", Record)


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


def is_empty(folder: Path) -> bool:
    try:
        return (folder / "runner.json").stat().st_size == 0
    except FileNotFoundError:
        return True
