"""What a runner that is gone has left behind: processes, found in each way there is, and killed."""

import logging
import os
import signal
import time
from collections.abc import Iterator

from batchml.local.executors import cgroup
from batchml.local.executors.record import Record
from batchml.runtime.processes import descendants, send

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
