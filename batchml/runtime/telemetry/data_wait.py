"""How long an attempt has waited for data: before its start, and at disks and shared folders.

The kernel counts the time in which at least one process of a control group waits for a block device
or a network file system (pressure stall information; it counts writes as well). Where a container
has no such file, the states of its processes are sampled: one that waits so is in the state `D`.
Both are upper bounds of the time that a program loses, because another of its processes may work
meanwhile. Reads from sockets, such as S3's, are not among them.

Source: Linux, Documentation/accounting/psi.rst (`some`, `total` in microseconds), and
cgroup-v2.rst, `io.pressure`; proc(5), /proc/PID/stat, the field `state`. The counters of each
process in /proc/PID/stat (`delayacct_blkio_ticks`) are 0 since Linux 5.14 unless a boot parameter
turns them on.
"""

from __future__ import annotations

import os
import re
from typing import Callable, Dict, List, Optional

from batchml.runtime.processes import read

PRESSURE = "/sys/fs/cgroup/io.pressure"
_SOME = re.compile(r"^some .*\btotal=([0-9]+)", re.MULTILINE)
_SAMPLE_EVERY = 2.0  # seconds
_MOST_THREADS = 256  # whose states one sample reads


class DataWait:
    """The time for which an attempt waits. `staged`: the seconds before its start.

    `pressure` returns the text of the control group's io.pressure, "" without one. `is_waiting`
    returns whether a process of the attempt waits for a disk right now.
    """

    def __init__(
        self,
        staged: float,
        now: float,
        pressure: Callable[[], str],
        is_waiting: Callable[[], bool],
    ) -> None:
        self._staged, self._began = staged, now
        self._pressure, self._is_waiting = pressure, is_waiting
        self._first = _total(pressure())
        self._samples = self._waiting = 0
        self._sampled = now

    def sample(self, now: float) -> None:
        """Take a sample, if one is needed and due. Called about once a second."""
        if self._first is None and now - self._sampled >= _SAMPLE_EVERY:
            self._sampled = now
            self._samples += 1
            self._waiting += self._is_waiting()

    def measure(self, now: float) -> Dict[str, float]:
        """`staging` and `io_wait` in seconds, and `data_wait`, their percentage of all the time.

        Times that are 0 are left out.
        """
        elapsed = max(0.0, now - self._began)
        waited = min(elapsed, self._at_disks(elapsed))
        found = {}
        if self._staged:
            found["staging"] = self._staged
        if waited >= 0.01:
            found["io_wait"] = waited
        if found:
            found["data_wait"] = 100 * (self._staged + waited) / max(self._staged + elapsed, 1e-9)
        return found

    def _at_disks(self, elapsed: float) -> float:
        if self._first is None:
            return elapsed * self._waiting / self._samples if self._samples else 0.0
        return max(0.0, (_total(self._pressure()) or self._first) - self._first)


def _total(text: str) -> Optional[float]:
    """The seconds in a text of io.pressure; None without them."""
    found = _SOME.search(text)
    return int(found[1]) / 1e6 if found else None


def any_waits(pids: List[int], proc: str = "/proc") -> bool:
    """Whether a thread of these processes waits for a disk or a network file system."""
    left = _MOST_THREADS
    for pid in pids:
        try:
            threads = os.listdir(f"{proc}/{pid}/task")[:left]
        except OSError:
            continue  # it has ended
        for thread in threads:
            state = read(f"{proc}/{pid}/task/{thread}/stat").rpartition(")")[2].split()
            if state[:1] == ["D"]:
                return True
        left -= len(threads)
        if left <= 0:
            break
    return False
