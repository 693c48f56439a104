"""CPU and memory of an attempt as the kernel counts them, by its container or by its processes.

Sources: proc(5); cgroup-v2.rst, `cpu.stat`, `cpu.max`, `memory.current`; cgroup-v1/cpuacct.rst,
cgroup-v1/memory.rst; scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import os
import resource
from typing import Dict, List, NamedTuple, Optional

# Programs that a container engine starts as process 1, with the entry as their only child.
INITS = frozenset(["docker-init", "tini", "catatonit", "dumb-init", "podman-init"])
_MIB = 1 << 20


class Cgroup(NamedTuple):
    """The control group of this container alone. Folders; empty if a controller is not there."""

    is_v2: bool
    cpu: str  # has the used CPU time
    quota: str
    memory: str

    def cpu_seconds(self) -> Optional[float]:
        if not self.is_v2:
            text = read(f"{self.cpu}/cpuacct.usage").strip()
            return int(text) / 1e9 if text.isdigit() else None
        text = pairs(read(f"{self.cpu}/cpu.stat")).get("usage_usec", "")
        return int(text) / 1e6 if text.isdigit() else None

    def cores(self) -> Optional[float]:
        """The limit in cores, such as 0.5; None without a limit."""
        if self.is_v2:
            words = read(f"{self.quota}/cpu.max").split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [read(f"{self.quota}/{name}").strip() for name in names]
        if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
            return None  # "max", or -1
        return int(words[0]) / int(words[1])

    def memory_bytes(self) -> Optional[int]:
        """Without pages of files that were not used lately, which the kernel frees before it kills
        a process.
        """
        name = "memory.current" if self.is_v2 else "memory.usage_in_bytes"
        held = read(f"{self.memory}/{name}").strip()  # empty in the machine's root group
        if not held.isdigit():
            return None
        idle = "inactive_file" if self.is_v2 else "total_inactive_file"
        return max(0, int(held) - int(pairs(read(f"{self.memory}/memory.stat")).get(idle, "0")))


def own_cgroup(pid: int = 0, proc: str = "/proc", root: str = "/sys/fs/cgroup") -> Optional[Cgroup]:
    """The control group of the container, if the process `pid` (this one) is its entry; else None.

    In any other process the group may have other runs, too: jobs that the embedded AWS Batch runs
    as processes share the group of the server.
    """
    if not is_entry(pid or os.getpid(), proc):
        return None
    lines = [line.split(":", 2) for line in read(f"{proc}/self/cgroup").splitlines()]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    if set(paths) == {""}:  # one hierarchy, v2; "/" only with a namespace of its own
        return Cgroup(True, root, root, root) if paths[""] == "/" else None
    folders = {}
    for name in ("cpuacct", "cpu", "memory"):
        # The mount must show this group, not the machine's whole tree.
        mount = mounted(read(f"{proc}/self/mountinfo"), name, f"{root}/")
        folders[name] = mount[0] if mount and mount[1] == paths.get(name) else ""
    if not any(folders.values()):
        return None
    return Cgroup(False, folders["cpuacct"], folders["cpu"], folders["memory"])


def is_entry(pid: int, proc: str = "/proc") -> bool:
    """Whether this process is the first of its container, or the only child of a small init."""
    if pid == 1:
        return True
    fields = read(f"{proc}/{pid}/stat").rpartition(")")[2].split()
    return fields[1:2] == ["1"] and read(f"{proc}/1/comm").strip() in INITS


def mounted(mountinfo: str, controller: str, below: str) -> "Optional[tuple[str, str]]":
    """The mount point of a controller of cgroup v1, and the group that it shows.

    Source: proc(5), /proc/PID/mountinfo: field 4 is the root of the mount, field 5 the mount point.
    """
    for line in mountinfo.splitlines():
        front, _, back = line.partition(" - ")
        fields, kind = front.split(), back.split()
        if len(fields) < 5 or kind[:1] != ["cgroup"] or not fields[4].startswith(below):
            continue
        if controller in kind[-1].split(","):
            return fields[4], fields[3]
    return None


def cpu_of(stat: str) -> float:
    """CPU seconds of a process and its reaped children, from its stat file."""
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 15:  # the process has ended
        return 0.0
    # utime, stime, and the same of children: fields 14 to 17, counted with the two up to ")"
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: List[int]) -> float:
    """CPU seconds of the descendants: those that live, and those that were reaped."""
    gone = resource.getrusage(resource.RUSAGE_CHILDREN)
    return gone.ru_utime + gone.ru_stime + sum(cpu_of(read(f"/proc/{pid}/stat")) for pid in pids)


def memory_mib(pids: List[int]) -> float:
    """Memory of processes: the unshared memory of each, and once the largest shared memory."""
    pages = [list(map(int, read(f"/proc/{pid}/statm").split()[1:3])) for pid in pids]
    found = [each for each in pages if len(each) == 2]  # resident pages, shared ones among them
    own = sum(resident - shared for resident, shared in found)
    held = own + max((shared for _, shared in found), default=0)
    return held * resource.getpagesize() // _MIB


def pairs(text: str) -> Dict[str, str]:
    """The lines `name value` of a file of the kernel."""
    found = (line.split() for line in text.splitlines())
    return {words[0]: words[1] for words in found if len(words) == 2}


def read(path: str) -> str:
    """The text of a file; empty without the file. Fast, because it is called for every process."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        data = b""
        while True:
            more = os.read(descriptor, 65_536)
            data += more
            if not more:
                return data.decode("utf-8", "replace")
    except OSError:  # the process has ended meanwhile
        return ""
    finally:
        os.close(descriptor)
