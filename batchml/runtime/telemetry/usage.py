"""Write the usage of an attempt and of its ranks as marks: CPU, memory, GPUs, network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.protocol.log_marks import MARK, ranks_mark, usage_mark
from batchml.runtime.telemetry.gpus import GpuMonitor, GpuUse, gpu_totals, gpu_use_of
from batchml.runtime.telemetry.heartbeat import VARIABLE, RankProgress, waited_share
from batchml.runtime.telemetry.host import (
    Cgroup,
    cpu_of,
    cpu_seconds,
    is_entry,
    memory_mib,
    own_cgroup,
    read,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.entry.attempt import AttemptHandle

# --- Network --------------------------------------------------------------------------------------
# Bytes that a node has received and sent.
#
# A container with its own network (nodes of multi-node jobs in AWS Batch, Docker's bridges,
# Fargate) has its own counters. Other jobs of AWS Batch on EC2 use the host's network, whose
# counters are of all its containers: then nothing is reported. Traffic that bypasses the kernel
# (EFA, InfiniBand) is not counted. Source: proc(5), /proc/net/dev.


DEV = "/proc/self/net/dev"
LOOPBACK = "lo"
# Interfaces of a host that runs containers; a container has none of them.
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
    names = [name for name in counters(text) if name != LOOPBACK]
    address = environ.get("BATCHML_NODE_ADDRESS", "")
    if address:  # in the embedded AWS Batch: in its own namespace, or one of many addresses of lo
        found = owner(address)
        return (found,) if found in names else None
    if "AWS_BATCH_JOB_NODE_INDEX" in environ or (is_entry and not _is_host(names)):
        return tuple(names) or None
    return None


def _is_host(names: "list[str]") -> bool:
    return any(name.startswith(_HOST_INTERFACES) for name in names)


def traffic_of(text: str, chosen: "Optional[Tuple[str, ...]]") -> Optional[Traffic]:
    """The sum of bytes of these interfaces."""
    if chosen is None:
        return None
    found = counters(text)
    known = [found[name] for name in chosen if name in found]
    return (sum(each[0] for each in known), sum(each[1] for each in known)) if known else None


# --- Ranks ----------------------------------------------------------------------------------------
# A rank is all processes with the same RANK in their environment, whoever set it: batchml, torchrun
# or another launcher.


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
        if number is not None:
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
        in percent; each if it is known. `seconds`: since the last measurement.
        """
        cpu: Dict[Tuple[int, int], float] = {}
        found: Dict[int, Dict[str, float]] = {}
        for rank in ranks_of(pids, self._read):
            key = (rank.number, rank.pids[0])
            cpu[key] = sum(cpu_of(self._read(f"/proc/{pid}/stat")) for pid in rank.pids)
            # A rank that is new has used all its CPU time since the last measurement.
            used = max(0.0, cpu[key] - self._cpu.get(key, 0.0))
            found[rank.number] = {
                "cpu": used / seconds,
                "memory": memory_mib(rank.pids),
                **gpu_use_of(gpus, set(rank.pids)),
                **self._step_and_wait(rank),
            }
        self._cpu = cpu
        return found

    def _step_and_wait(self, rank: MeasuredRank) -> Dict[str, float]:
        now = RankProgress.read(self._read(rank.progress)) if rank.progress else None
        if now is None:
            return {}
        before, share = self._progress.get(rank.number, (None, None))
        if before != now:  # else the step takes longer than the interval: keep the last share
            share = waited_share(before, now)
        self._progress[rank.number] = now, share
        found = {} if now.step is None else {"step": now.step}
        return found if share is None else {**found, "waited": 100 * share}


# --- Usage of the attempt -------------------------------------------------------------------------


FIRST = 5.0  # seconds from the start to the first mark
EARLY, EARLY_UNTIL = 10.0, 120.0  # seconds between two marks, until so long after the start
EVERY = 30.0  # seconds between two marks after that
INTERVAL = "BATCHML_USAGE_EVERY"  # the variable with other seconds between two marks
_MIB = 1 << 20


class Counters(NamedTuple):
    """Values that only grow, at a time of CLOCK_MONOTONIC."""

    at: float
    cpu: float  # seconds
    traffic: Optional[Traffic] = None


def rates(before: Counters, now: Counters) -> Dict[str, float]:
    """Cores, and bytes a second in and out, between two measurements. A counter that has become
    smaller was reset."""
    seconds = now.at - before.at
    found = {"cpu": max(0.0, now.cpu - before.cpu) / seconds}
    if before.traffic is not None and now.traffic is not None:
        for name, was, is_ in zip(("net_in", "net_out"), before.traffic, now.traffic):  # noqa: B905
            found[name] = (is_ - was if is_ >= was else is_) / seconds
    return found


class UsageReporter:
    """An attempt plug-in that writes marks such as `usage cpu=1.93 memory=812 net_in=1200
    net_out=90` and `ranks 0=cpu:0.96,...`: after 5 s, every 10 s for two minutes, then every 30 s.
    """

    def __init__(self, attempt: AttemptHandle) -> None:
        self._attempt = attempt
        self._gpus = GpuMonitor(attempt.environ)
        self._ranks = RankMeter()
        self._group: Optional[Cgroup] = None
        self._interfaces: Optional[Tuple[str, ...]] = None
        self._began = 0.0
        self._last: Optional[Counters] = None
        self._interval = _seconds(attempt.environ.get(INTERVAL, ""))
        self._wait = self._interval or FIRST

    def tick(self, now: float) -> None:
        if self._last is None:
            self._began = now
            self._last = self._begin(now)
        elif now - self._last.at >= self._wait:
            self._report(now, self._last)

    def finish(self) -> None:
        self._gpus.close()

    def _begin(self, now: float) -> Counters:
        from batchml.runtime.nodes.link.interfaces import interface_of

        environ = self._attempt.environ
        self._group = own_cgroup()
        entry, devices = is_entry(os.getpid()), read(DEV)
        self._interfaces = interfaces(environ, entry, devices, interface_of)
        # Without a control group, processes are counted, which have used nothing yet.
        cpu = self._group.cpu_seconds() if self._group else None
        return Counters(now, cpu or 0.0, traffic_of(devices, self._interfaces))

    def _report(self, now: float, last: Counters) -> None:
        pids = self._attempt.pids()
        group = self._group
        cpu = group.cpu_seconds() if group else None
        held = group.memory_bytes() if group else None
        found = Counters(
            now, cpu_seconds(pids) if cpu is None else cpu, traffic_of(read(DEV), self._interfaces)
        )
        gpus = self._gpus.read()
        cores = group.cores() if group else None
        sample = {
            **rates(last, found),
            "memory": float(memory_mib(pids) if held is None else held // _MIB),
            **gpu_totals(gpus),
            **({"cores": cores} if cores else {}),
        }
        self._attempt.mark(usage_mark(sample)[len(MARK) :])
        ranks = self._ranks.measure(pids, now - last.at, gpus)
        if ranks:
            self._attempt.mark(ranks_mark(ranks)[len(MARK) :])
        self._last = found
        self._wait = self._interval or (EARLY if now - self._began < EARLY_UNTIL else EVERY)


def _seconds(text: str) -> Optional[float]:
    """The number of seconds; None for an invalid value, which a user may have set."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if 0.5 <= found < 1e6 else None
