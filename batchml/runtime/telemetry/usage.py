"""Measure how much CPU, memory, GPU and network an attempt and its ranks use; write marks of it."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.processes import INITS, SPARE, read
from batchml.runtime.protocol.log_marks import MARK, ranks_mark, usage_mark
from batchml.runtime.protocol.variables import STAGED, seconds_of
from batchml.runtime.telemetry.data_wait import PRESSURE, DataWait, any_waits
from batchml.runtime.telemetry.gpus import GpuMonitor, GpuUse, gpu_totals, gpu_use_of
from batchml.runtime.telemetry.heartbeat import VARIABLE, RankProgress, waited_share
from batchml.runtime.telemetry.idle import Activity, IdleWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.entry.attempt import AttemptHandle

# --- CPU and memory -------------------------------------------------------------------------------
# The kernel counts the CPU time and the memory of a container, and of each process.
#
# Sources: proc(5); cgroup-v2.rst, `cpu.stat`, `cpu.max`, `memory.current`; cgroup-v1/cpuacct.rst,
# cgroup-v1/memory.rst; scheduler/sched-bwc.rst.


_MIB = 1 << 20


class Cgroup(NamedTuple):
    """The control group of this container: the folder of each controller, or an empty text."""

    is_v2: bool
    cpu: str  # the folder with the used CPU time
    quota: str  # the folder with the limit of CPU time
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
        """The memory in use, without file pages that were not used lately, because the kernel frees
        these pages before it kills a process.
        """
        name = "memory.current" if self.is_v2 else "memory.usage_in_bytes"
        held = read(f"{self.memory}/{name}").strip()  # empty in the machine's root group
        if not held.isdigit():
            return None
        idle = "inactive_file" if self.is_v2 else "total_inactive_file"
        return max(0, int(held) - int(pairs(read(f"{self.memory}/memory.stat")).get(idle, "0")))


def own_cgroup(pid: int = 0, proc: str = "/proc", root: str = "/sys/fs/cgroup") -> Optional[Cgroup]:
    """The container's control group, if process `pid` (0: this one) is its entry; else None.

    The control group of any other process may have several runs: jobs that the embedded AWS Batch
    runs as processes share the group of the server.
    """
    if not is_entry(pid or os.getpid(), proc):
        return None
    lines = [line.split(":", 2) for line in read(f"{proc}/self/cgroup").splitlines()]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    if set(paths) == {""}:  # one hierarchy, v2; "/" only if the container has its own namespace
        return Cgroup(True, root, root, root) if paths[""] == "/" else None
    folders = {}
    for name in ("cpuacct", "cpu", "memory"):
        # The mount must show this group, not the machine's whole tree.
        mount = find_mount(read(f"{proc}/self/mountinfo"), name, f"{root}/")
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


def find_mount(mountinfo: str, controller: str, below: str) -> "Optional[tuple[str, str]]":
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
    # utime, stime, and both of the children: fields 14 to 17 of proc(5); `fields` begins with 3.
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: List[int]) -> float:
    """CPU seconds of the processes `pids`, and of descendants that were reaped."""
    gone = resource.getrusage(resource.RUSAGE_CHILDREN)
    return gone.ru_utime + gone.ru_stime + sum(cpu_of(read(f"/proc/{pid}/stat")) for pid in pids)


def memory_mib(pids: List[int]) -> float:
    """Memory of processes: the unshared memory of each, and once the largest shared memory."""
    fields = [list(map(int, read(f"/proc/{pid}/statm").split()[1:3])) for pid in pids]
    pages = [each for each in fields if len(each) == 2]  # resident pages, shared pages among them
    unshared = sum(resident - shared for resident, shared in pages)
    largest_shared = max((shared for _, shared in pages), default=0)
    return (unshared + largest_shared) * resource.getpagesize() // _MIB


def memory_kills(proc: str = "/proc", root: str = "/sys/fs/cgroup") -> int:
    """How many processes of this control group the kernel killed because memory was full.

    0 if that is unknown. Source: cgroup-v2.rst, memory.events; cgroup-v1/memory.rst,
    memory.oom_control.
    """
    for folder, is_v2 in _memory_folders(proc, root):
        name = "memory.events" if is_v2 else "memory.oom_control"
        count = pairs(read(f"{folder}/{name}")).get("oom_kill", "")
        if count.isdigit():
            return int(count)
    return 0


def memory_left(proc: str = "/proc", root: str = "/sys/fs/cgroup") -> int:
    """The bytes that processes of this control group may still take; 0 if that is unknown.

    Source: proc(5), MemAvailable; cgroup-v2.rst, memory.max; cgroup-v1/memory.rst.
    """
    lines = read(f"{proc}/meminfo").splitlines()
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    for folder, is_v2 in _memory_folders(proc, root):
        limit = read(f"{folder}/{'memory.max' if is_v2 else 'memory.limit_in_bytes'}").strip()
        used = Cgroup(is_v2, "", "", folder).memory_bytes()
        if limit.isdigit() and used is not None:
            found.append(int(limit) - used)
    return max(0, min(found, default=0))


def _memory_folders(proc: str, root: str) -> List[Tuple[str, bool]]:
    """The folders of this control group and of the top of its mount, each with: is it of v2?

    A container with a cgroup namespace sees its own group at the top; without one the group is
    further down. Source: proc(5).
    """
    lines = (line.split(":", 2) for line in read(f"{proc}/self/cgroup").splitlines())
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    path, folder, mounted_at = paths.get("", "/"), root, "/"
    is_v2 = "memory" not in paths
    if not is_v2:
        path = paths["memory"]
        mount = find_mount(read(f"{proc}/self/mountinfo"), "memory", f"{root}/")
        folder, mounted_at = mount or (f"{root}/memory", "/")
    top = mounted_at.rstrip("/")
    below = path[len(top) :] if f"{path}/".startswith(f"{top}/") else ""
    return [(folder + below, is_v2), (folder, is_v2)]


def pairs(text: str) -> Dict[str, str]:
    """Name -> value, from the lines `name value` of a file of the kernel."""
    found = (line.split() for line in text.splitlines())
    return {words[0]: words[1] for words in found if len(words) == 2}


# --- Network --------------------------------------------------------------------------------------
# Bytes that a node has received and sent.
#
# A container with its own network (nodes of multi-node jobs in AWS Batch, Docker's bridges,
# Fargate) has its own counters. Other jobs of AWS Batch on EC2 use the host's network, whose
# counters are those of all containers on it: then nothing is reported. Traffic that bypasses the
# kernel (EFA, InfiniBand) is not counted. Source: proc(5), /proc/net/dev.


DEV = "/proc/self/net/dev"
_LOOPBACK = "lo"
# Interfaces that only a host that runs containers has.
_HOST_INTERFACES = ("docker", "veth", "br-", "virbr", "cni", "podman", "flannel", "cali")

Traffic = Tuple[int, int]  # bytes received, bytes sent


def counters(text: str) -> Dict[str, Traffic]:
    """Interface -> bytes, from the text of /proc/net/dev."""
    found = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and len(words) >= 9 and words[0].isdigit() and words[8].isdigit():
            found[name.strip()] = (int(words[0]), int(words[8]))
    return found


def interfaces(
    environ: Mapping[str, str],
    is_entry: bool,
    text: str,
    owner: Callable[[str], str],
) -> Optional[Tuple[str, ...]]:
    """The interfaces that only this node uses; None if they cannot be distinguished.

    `owner` returns the interface of an address. `text` is /proc/net/dev.
    """
    names = [name for name in counters(text) if name != _LOOPBACK]
    address = environ.get("BATCHML_NODE_ADDRESS", "")
    if address:  # of the embedded AWS Batch: the node has a namespace, or only an address of `lo`
        found = owner(address)
        return (found,) if found in names else None
    is_host = any(name.startswith(_HOST_INTERFACES) for name in names)
    if "AWS_BATCH_JOB_NODE_INDEX" in environ or (is_entry and not is_host):
        return tuple(names) or None
    return None


def _interface_of(address: str) -> str:
    from batchml.runtime.nodes.link.address import interface_of  # it imports socket

    return interface_of(address)


def traffic_of(text: str, chosen: Optional[Tuple[str, ...]]) -> Optional[Traffic]:
    """The sum of bytes of these interfaces; None if there are none. `text` is /proc/net/dev."""
    found = counters(text)
    traffic = [found[name] for name in chosen or () if name in found]
    return (sum(each[0] for each in traffic), sum(each[1] for each in traffic)) if traffic else None


# --- Ranks ----------------------------------------------------------------------------------------
# The processes with the same RANK in their environment are one rank, whether batchml, torchrun or
# another launcher has set the variable.


_RANK, _PROGRESS = "RANK=", f"{VARIABLE}="


class MeasuredRank(NamedTuple):
    """The processes of one rank, parents before children."""

    number: int
    pids: List[int]
    progress: str  # path of its progress file; empty without one


def ranks_of(pids: List[int], read: Callable[[str], str] = read) -> List[MeasuredRank]:
    """The ranks among these processes."""
    found: Dict[int, MeasuredRank] = {}
    for pid in pids:
        number, progress = _read_rank(read(f"/proc/{pid}/environ"))
        if number is not None and not read(f"/proc/{pid}/comm").startswith(SPARE):
            rank = found.setdefault(number, MeasuredRank(number, [], progress))
            rank.pids.append(pid)
    return sorted(found.values())


def _read_rank(environ: str) -> Tuple[Optional[int], str]:
    number, progress = None, ""
    for word in environ.split("\0"):
        if word.startswith(_RANK):
            text = word[len(_RANK) :]
            number = int(text) if text.isascii() and text.isdigit() and len(text) < 7 else None
        elif word.startswith(_PROGRESS):
            progress = word[len(_PROGRESS) :]
    return number, progress


class RankMeter:
    """The usage of the ranks between two measurements."""

    def __init__(self, read: Callable[[str], str] = read) -> None:
        self._read = read
        self._cpu: Dict[Tuple[int, int], float] = {}  # rank, its first process -> seconds
        self._progress: Dict[int, Tuple[RankProgress, Optional[float]]] = {}

    def measure(
        self, pids: List[int], seconds: float, gpus: List[GpuUse]
    ) -> Dict[int, Dict[str, float]]:
        """Rank -> cpu in cores, memory in MiB, gpu in percent, gpu_memory in MiB, step, and waited
        in percent, as far as they are known. `seconds` is the time since the last measurement.
        """
        cpu: Dict[Tuple[int, int], float] = {}
        found: Dict[int, Dict[str, float]] = {}
        for rank in ranks_of(pids, self._read):
            key = (rank.number, rank.pids[0])
            cpu[key] = sum(cpu_of(self._read(f"/proc/{pid}/stat")) for pid in rank.pids)
            # A new rank has used all its CPU time since the last measurement.
            used = max(0.0, cpu[key] - self._cpu.get(key, 0.0))
            found[rank.number] = {
                "cpu": used / seconds,
                "memory": memory_mib(rank.pids),
                **gpu_use_of(gpus, set(rank.pids)),
                **self._step_and_wait(rank),
            }
        self._cpu = cpu
        return found

    def last_progress(self) -> float:
        """When a rank last reported progress, in seconds of CLOCK_MONOTONIC; 0: never."""
        return max((found.at for found, _ in self._progress.values()), default=0.0)

    def _step_and_wait(self, rank: MeasuredRank) -> Dict[str, float]:
        now = RankProgress.read(self._read(rank.progress)) if rank.progress else None
        if now is None:
            return {}
        before, share = self._progress.get(rank.number, (None, None))
        if before != now:  # if equal, a step takes longer than the interval: keep the last share
            share = waited_share(before, now)
        self._progress[rank.number] = now, share
        found = {} if now.step is None else {"step": now.step}
        return found if share is None else {**found, "waited": 100 * share}


# --- Usage of the attempt -------------------------------------------------------------------------


FIRST = 5.0  # seconds from the start to the first mark
EARLY = 10.0  # seconds between two marks in the first EARLY_UNTIL seconds
EARLY_UNTIL = 120.0
EVERY = 30.0  # seconds between two marks after that
INTERVAL = "BATCHML_USAGE_EVERY"  # sets another interval between two marks, in seconds


class Counters(NamedTuple):
    """Values that only grow, and the time at which they were read."""

    at: float  # seconds of CLOCK_MONOTONIC
    cpu: float  # seconds of CPU time
    traffic: Optional[Traffic] = None


def rates(before: Counters, now: Counters) -> Dict[str, float]:
    """Cores, and bytes a second in and out, between two measurements.

    A counter that has become smaller was reset.
    """
    seconds = now.at - before.at
    found = {"cpu": max(0.0, now.cpu - before.cpu) / seconds}
    if before.traffic is not None and now.traffic is not None:
        for name, was, is_ in zip(("net_in", "net_out"), before.traffic, now.traffic):  # noqa: B905
            found[name] = (is_ - was if is_ >= was else is_) / seconds
    return found


class UsageReporter:
    """An attempt plug-in that writes marks such as `usage cpu=1.93 memory=812 net_in=1200
    net_out=90` and `ranks 0=cpu:0.96,...`: after 5 s, every 10 s for two minutes, then every 30 s.

    The last mark, at the end of the attempt, repeats the values before it, and has those of the
    whole attempt: `seconds`, `mean_cpu`, `mean_gpu` and `most_memory`. `staging`, `io_wait` and
    `data_wait` are those of the attempt until then.
    """

    def __init__(self, attempt: AttemptHandle, clock: Callable[[], float] = time.monotonic) -> None:
        self._attempt = attempt
        self._clock = clock
        self._gpus = GpuMonitor(attempt.environ)
        self._ranks = RankMeter()
        self._group: Optional[Cgroup] = None
        self._interfaces: Optional[Tuple[str, ...]] = None
        self._began: Optional[Counters] = None
        self._last: Optional[Counters] = None
        self._sample: Dict[str, float] = {}
        self._gpu_time = self._gpu_seconds = 0.0  # measured seconds; percent times seconds
        self._most_memory = 0.0
        self._idle: Optional[IdleWatch] = None
        self._data: Optional[DataWait] = None
        self._interval = seconds_of(attempt.environ.get(INTERVAL), least=0.5, default=0.0)
        self._wait = self._interval or FIRST

    def tick(self, now: float) -> None:
        if self._began is None or self._last is None:
            self._began = self._last = self._begin(now)
            self._idle = IdleWatch(self._attempt, now)
            self._data = self._watch_data(now)
            return
        if self._data is not None:
            self._data.sample(now)
        if now - self._last.at >= self._wait:
            self._report(now, self._last)
            self._wait = self._interval or (EARLY if now - self._began.at < EARLY_UNTIL else EVERY)

    def finish(self) -> None:
        self._gpus.close()
        now = self._clock()
        data = (self._data or self._watch_data(now)).measure(now)
        seconds = now - self._began.at if self._began else 0.0
        if self._began is None or seconds < FIRST:
            if "staging" in data:
                self._attempt.mark(usage_mark(data)[len(MARK) :])
            return
        cpu = self._group.cpu_seconds() if self._group else None
        used = (cpu_seconds(self._attempt.pids()) if cpu is None else cpu) - self._began.cpu
        whole = {"seconds": seconds, "mean_cpu": max(0.0, used) / seconds}
        if self._gpu_time:
            whole["mean_gpu"] = self._gpu_seconds / self._gpu_time
        if self._most_memory:
            whole["most_memory"] = self._most_memory
        self._attempt.mark(usage_mark({**self._sample, **data, **whole})[len(MARK) :])

    def _watch_data(self, now: float) -> DataWait:
        attempt = self._attempt
        staged = seconds_of(attempt.environ.get(STAGED), least=0.1, default=0.0)
        has_own = self._group is not None and self._group.is_v2
        return DataWait(
            staged, now, lambda: read(PRESSURE) if has_own else "",
            lambda: any_waits(attempt.pids()),
        )  # fmt: skip

    def _begin(self, now: float) -> Counters:
        environ = self._attempt.environ
        self._group = own_cgroup()
        entry, text = is_entry(os.getpid()), read(DEV)
        self._interfaces = interfaces(environ, entry, text, _interface_of)
        # Without a control group the processes are measured, which have used nothing yet.
        cpu = self._group.cpu_seconds() if self._group else cpu_seconds([])
        return Counters(now, cpu or 0.0, traffic_of(text, self._interfaces))

    def _report(self, now: float, last: Counters) -> None:
        pids = self._attempt.pids()
        group = self._group
        cpu = group.cpu_seconds() if group else None
        memory = group.memory_bytes() if group else None
        found = Counters(
            now, cpu_seconds(pids) if cpu is None else cpu, traffic_of(read(DEV), self._interfaces)
        )
        gpus = self._gpus.read()
        cores = group.cores() if group else None
        sample = {
            **rates(last, found),
            "memory": float(memory_mib(pids) if memory is None else memory // _MIB),
            **gpu_totals(gpus),
            **({"cores": cores} if cores else {}),
            **(self._data.measure(now) if self._data else {}),
        }
        self._sample = sample
        self._most_memory = max(self._most_memory, sample["memory"])
        if "gpu" in sample:
            self._gpu_time += now - last.at
            self._gpu_seconds += sample["gpu"] * (now - last.at)
        ranks = self._ranks.measure(pids, now - last.at, gpus)
        idle = self._measure_idleness(now, sample, pids, gpus)
        self._attempt.mark(usage_mark({**sample, "idle": idle} if idle else sample)[len(MARK) :])
        if ranks:
            self._attempt.mark(ranks_mark(ranks)[len(MARK) :])
        self._last = found

    def _measure_idleness(
        self, now: float, sample: Mapping[str, float], pids: List[int], gpus: List[GpuUse]
    ) -> float:
        """The seconds for which the attempt is idle; 0 if they are not worth mentioning."""
        if self._idle is None:
            return 0.0
        traffic = [sample[name] for name in ("net_in", "net_out") if name in sample]
        busy = [each.values["busy"] for each in gpus if "busy" in each.values]
        activity = Activity(
            sample["cpu"], max(traffic) if traffic else None, gpu=max(busy) if busy else None
        )
        return self._idle.measure(now, activity, pids, self._ranks.last_progress())
