"""A companion that tells what an attempt and its ranks use: CPU, memory, GPUs, network."""

from __future__ import annotations

import os
from typing import Dict, NamedTuple, Optional, Tuple

from batchml.runtime.lines import MARK, ranks_mark, usage_mark
from batchml.runtime.usage_gpus import Gpus, together
from batchml.runtime.usage_host import (
    Cgroup,
    cpu_seconds,
    is_entry,
    memory_mib,
    own_cgroup,
    read,
)
from batchml.runtime.usage_net import DEV, Traffic, interfaces, total
from batchml.runtime.usage_ranks import RankMeter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.companions import Attempt

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
        from batchml.runtime.ranks_env import interface_of

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
