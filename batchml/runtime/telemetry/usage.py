"""A companion that tells what an attempt and its ranks use: CPU, memory, GPUs, network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.protocol.log_marks import MARK, ranks_mark, usage_mark
from batchml.runtime.telemetry.gpus import Gpu, Gpus, by_process, together
from batchml.runtime.telemetry.heartbeat import VARIABLE, Told, waited_share
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
    from batchml.runtime.entry.attempt import Attempt

# --- network --------------------------------------------------------------------------------------
# Bytes that a node has received and sent, where they can be told from those of others.
#
# A container with a network of its own (AWS Batch gives each node of a multi-node job one, and so
# do Docker's bridges and Fargate) counts its own. In the host's network, as AWS Batch's other jobs
# on EC2 have it, counters are of all containers there: then nothing is reported. What goes through
# EFA or InfiniBand past the kernel is counted nowhere here. Source: proc(5), /proc/net/dev.


DEV = "/proc/self/net/dev"
LOOPBACK = "lo"
# Interfaces that a host has which runs containers, and a container has not.
_OF_HOSTS = ("docker", "veth", "br-", "virbr", "cni", "podman", "flannel", "cali")

Traffic = Tuple[int, int]  # bytes received, bytes sent


def counters(text: str) -> Dict[str, Traffic]:
    """Interface -> bytes, of what the kernel writes in /proc/net/dev."""
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
    """Those whose bytes are this node's alone; None where they cannot be told apart.

    `owner` names the interface of an address. `text` is /proc/net/dev.
    """
    names = [name for name in counters(text) if name != LOOPBACK]
    address = environ.get("BATCHML_NODE_ADDRESS", "")
    if address:  # of the embedded server: in a namespace of its own, or one of many on lo
        found = owner(address)
        return (found,) if found in names else None
    if "AWS_BATCH_JOB_NODE_INDEX" in environ or (is_entry and not _is_host(names)):
        return tuple(names) or None
    return None


def _is_host(names: "list[str]") -> bool:
    return any(name.startswith(_OF_HOSTS) for name in names)


def total(text: str, chosen: "Optional[Tuple[str, ...]]") -> Optional[Traffic]:
    """Bytes of these interfaces together."""
    if chosen is None:
        return None
    found = counters(text)
    known = [found[name] for name in chosen if name in found]
    return (sum(each[0] for each in known), sum(each[1] for each in known)) if known else None


# --- ranks ----------------------------------------------------------------------------------------
# What each rank of a node uses, and how long it waits for the others.
#
# A rank is the processes whose environment has the same RANK: ours, torchrun's and anyone's.


_RANK, _PROGRESS = "RANK=", f"{VARIABLE}="


class Rank(NamedTuple):
    """The processes of one, parents before children."""

    number: int
    pids: List[int]
    progress: str  # path of its file; empty without one


def ranks_of(pids: List[int], read: Callable[[str], str] = read) -> List[Rank]:
    """Those among these processes."""
    found: Dict[int, Rank] = {}
    for pid in pids:
        number, progress = _who(read(f"/proc/{pid}/environ"))
        if number is not None:
            rank = found.setdefault(number, Rank(number, [], progress))
            rank.pids.append(pid)
    return sorted(found.values())


def _who(environ: str) -> Tuple[Optional[int], str]:
    number, progress = None, ""
    for word in environ.split("\0"):
        if word.startswith(_RANK):
            told = word[len(_RANK) :]
            number = int(told) if told.isascii() and told.isdigit() and len(told) < 7 else None
        elif word.startswith(_PROGRESS):
            progress = word[len(_PROGRESS) :]
    return number, progress


class RankMeter:
    """What the ranks used between two looks."""

    def __init__(self, read: Callable[[str], str] = read) -> None:
        self._read = read
        self._cpu: Dict[Tuple[int, int], float] = {}  # rank, its first process -> seconds
        self._told: Dict[int, Tuple[Told, Optional[float]]] = {}

    def look(self, pids: List[int], seconds: float, gpus: List[Gpu]) -> Dict[int, Dict[str, float]]:
        """Rank -> cpu in cores, memory in MiB, gpu in percent, gpu_memory in MiB, step, and waited
        in percent; each where it is known. `seconds`: since the last look.
        """
        cpu: Dict[Tuple[int, int], float] = {}
        found: Dict[int, Dict[str, float]] = {}
        for rank in ranks_of(pids, self._read):
            who = (rank.number, rank.pids[0])
            cpu[who] = sum(cpu_of(self._read(f"/proc/{pid}/stat")) for pid in rank.pids)
            # One that was not there before has used all of it since.
            used = max(0.0, cpu[who] - self._cpu.get(who, 0.0))
            found[rank.number] = {
                "cpu": used / seconds,
                "memory": memory_mib(rank.pids),
                **by_process(gpus, set(rank.pids)),
                **self._pace(rank),
            }
        self._cpu = cpu
        return found

    def _pace(self, rank: Rank) -> Dict[str, float]:
        told = Told.read(self._read(rank.progress)) if rank.progress else None
        if told is None:
            return {}
        before, share = self._told.get(rank.number, (None, None))
        if before != told:  # else its step takes longer than from look to look: the last one counts
            share = waited_share(before, told)
        self._told[rank.number] = told, share
        found = {} if told.step is None else {"step": told.step}
        return found if share is None else {**found, "waited": 100 * share}


# --- usage of an attempt --------------------------------------------------------------------------


FIRST = 5.0  # seconds from the start
EARLY, EARLY_UNTIL = 10.0, 120.0  # seconds between two marks, so long from the start
EVERY = 30.0  # seconds between two marks from then on
VARIABLE = "BATCHML_USAGE_EVERY"  # seconds between two marks, always, for who wants to see more
_MIB = 1 << 20


class Counters(NamedTuple):
    """What only grows, at a time of CLOCK_MONOTONIC."""

    at: float
    cpu: float  # seconds
    traffic: Optional[Traffic] = None


def rates(before: Counters, now: Counters) -> Dict[str, float]:
    """Cores, and bytes a second in and out, between two looks. What went back was started anew."""
    seconds = now.at - before.at
    found = {"cpu": max(0.0, now.cpu - before.cpu) / seconds}
    if before.traffic is not None and now.traffic is not None:
        for name, was, is_ in zip(("net_in", "net_out"), before.traffic, now.traffic):  # noqa: B905
            found[name] = (is_ - was if is_ >= was else is_) / seconds
    return found


class Usage:
    """Marks such as `usage cpu=1.93 memory=812 net_in=1200 net_out=90` and `ranks 0=cpu:0.96,...`:
    the first after 5 s, then one each 10 s for two minutes, then one each 30 s.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._gpus = Gpus(attempt.environ)
        self._ranks = RankMeter()
        self._group: Optional[Cgroup] = None
        self._interfaces: Optional[Tuple[str, ...]] = None
        self._began = 0.0
        self._last: Optional[Counters] = None
        self._every = _seconds(attempt.environ.get(VARIABLE, ""))
        self._wait = self._every or FIRST

    def tick(self, now: float) -> None:
        if self._last is None:  # the program begins, and most end before there is anything to say
            self._began = now
            self._last = self._begin(now)
        elif now - self._last.at >= self._wait:
            self._tell(now, self._last)

    def finish(self) -> None:
        self._gpus.close()

    def _begin(self, now: float) -> Counters:
        from batchml.runtime.nodes.torchrun.rank_env import interface_of

        environ = self._attempt.environ
        self._group = own_cgroup()
        entry, devices = is_entry(os.getpid()), read(DEV)
        self._interfaces = interfaces(environ, entry, devices, interface_of)
        # Of processes nothing has been used yet.
        cpu = self._group.cpu_seconds() if self._group else None
        return Counters(now, cpu or 0.0, total(devices, self._interfaces))

    def _tell(self, now: float, last: Counters) -> None:
        pids = self._attempt.pids()
        group = self._group
        cpu = group.cpu_seconds() if group else None
        held = group.memory_bytes() if group else None
        found = Counters(
            now, cpu_seconds(pids) if cpu is None else cpu, total(read(DEV), self._interfaces)
        )
        gpus = self._gpus.look()
        cores = group.cores() if group else None
        sample = {
            **rates(last, found),
            "memory": float(memory_mib(pids) if held is None else held // _MIB),
            **together(gpus),
            **({"cores": cores} if cores else {}),
        }
        self._attempt.mark(usage_mark(sample)[len(MARK) :])
        ranks = self._ranks.look(pids, now - last.at, gpus)
        if ranks:
            self._attempt.mark(ranks_mark(ranks)[len(MARK) :])
        self._last = found
        self._wait = self._every or (EARLY if now - self._began < EARLY_UNTIL else EVERY)


def _seconds(text: str) -> Optional[float]:
    """None for what is no time, which a user may have set."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if 0.5 <= found < 1e6 else None
