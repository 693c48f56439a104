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


def kill(task_id: str, record: Record | None) -> Iterator[list[int]]:
    """Kill an attempt's processes, in steps with a `PAUSE` after each: those that were found.

    Done after two looks in a row that find nothing: one alone misses a process that is just being
    replaced by another (exec), or that forks and dies while the list is read. Or given up.
    """
    groups = record.groups if record is not None and record.is_of_this_boot else []
    end = time.monotonic() + _LIMIT
    before: list[int] | None = None
    while time.monotonic() < end:
        left = cgroup.kill(groups) + tagged(task_id)
        if not left and before == []:
            cgroup.remove(groups, limit=0)
            return
        send(left, signal.SIGSTOP)  # whoever is stopped cannot fork while others are killed
        send(left, signal.SIGKILL)
        before = left
        yield left
    log.error("processes %s of attempt %s cannot be killed", before, task_id)


def tagged(task_id: str) -> list[int]:
    """Processes that belong to an attempt: those with its variable in their environment, and
    those that descend from them, which may have cleared theirs.
    """
    found = []
    mark = f"BATCHML_TASK={task_id}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(entry))
        except OSError:
            continue
    return list(dict.fromkeys([*found, *descendants(*found)])) if found else []
