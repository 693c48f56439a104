"""What each rank of a node uses, and how long it waits for the others.

A rank is the processes whose environment has the same RANK: ours, torchrun's and anyone's.
"""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.pulse import VARIABLE, Told, waited_share
from batchml.runtime.usage_gpus import Gpu, by_process
from batchml.runtime.usage_host import cpu_of, memory_mib, read

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
