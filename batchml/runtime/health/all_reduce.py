"""Measure an all-reduce between the nodes of a run: `python -m ...health.all_reduce FILE`.

The supervisor of each node starts this program before the ranks (`nodes/supervisor/agent.py`). It
needs PyTorch, which is imported once; then it forks one process for each GPU, or one on a node
without GPUs. The processes of all nodes sum growing arrays together for at most `seconds`. If the
result is below the floor, pairs of nodes do the same, so that `network.py` can name a slow node.

FILE has the order as JSON (`AllReduceOrder`). The answer of the node is written to `FILE.answer`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from batchml.runtime.health.network import (
    EarlierRate,
    MeasuredRate,
    PairRate,
    bus_bandwidth,
    floor_of,
    pair_rounds,
    read_nccl_log,
    sizes_up_to,
    software_of,
)
from batchml.runtime.package import drop_working_folder
from batchml.runtime.processes import die_with_parent, read
from batchml.runtime.storage.files import write_atomically

JOIN_WITHIN = 60.0  # seconds until PyTorch is imported on all nodes
_STUCK = 30.0  # seconds after which an operation fails that should take a few at most
_MOST = 20  # all-reduces of the final size
_SHARE = 0.25  # of the seconds: what the all-reduces of one size over all nodes may take
_PAIR_SHARE = 0.05  # the same over two nodes


class AllReduceOrder(NamedTuple):
    """What the processes of one node have to measure, and with whom."""

    master: str  # the address of the main node
    port: int  # a free one there
    node: int
    members: Sequence[int]  # processes of each node, in the order of the nodes
    backend: str  # nccl or gloo
    bytes: int  # the size of the array of each process
    seconds: float  # for everything after all processes have met
    rates: Sequence[Sequence[Any]] = ()  # `EarlierRate`s, on the main node
    bound: float = 0.0  # GB/s that the instance type allows; 0: unknown
    delay: float = 0.0  # seconds that this node waits before each all-reduce, to simulate a fault

    @property
    def first(self) -> int:
        return sum(self.members[: self.node])

    @property
    def world(self) -> int:
        return sum(self.members)


# --- The processes of a node ----------------------------------------------------------------------


def main(path: str) -> None:
    """Measure as the order in a file says, and write the node's answer."""
    drop_working_folder()
    with open(path, encoding="utf-8") as file:
        order = AllReduceOrder(**json.load(file))
    answer = f"{path}.answer"
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("torch.distributed")
    except Exception as error:
        _write(answer, {"error": f"PyTorch cannot be imported: {_words(error)}"})
        return
    if order.backend == "nccl" and not torch.cuda._is_compiled():
        _write(answer, {"error": "PyTorch of this image was built without CUDA"})
        return
    pids: Dict[int, int] = {}
    for local in range(order.members[order.node]):
        die = die_with_parent(os.getpid())
        pid = os.fork()  # no GPU is used yet, so the child may use one
        if not pid:
            die()
            os._exit(_rank(torch, order, local, path))
        pids[pid] = local
    why = ""
    while pids:
        pid, status = os.wait()
        local = pids.pop(pid, -1)
        if status and not why:
            why = read(f"{path}.{local}.error") or _describe_end(status)
            for other in pids:
                os.kill(other, signal.SIGKILL)
    measured = read(f"{path}.0.result")
    _write(answer, {"error": why, **(json.loads(measured) if measured and not why else {})})


def _rank(torch: Any, order: AllReduceOrder, local: int, path: str) -> int:
    """Measure as one process. Return its exit code."""
    try:
        if order.backend == "nccl":
            # Read by NCCL when it starts. The ranks of the run do not inherit this.
            os.environ.update(
                NCCL_DEBUG="INFO",
                NCCL_DEBUG_SUBSYS="INIT,NET",
                NCCL_DEBUG_FILE=f"{path}.{local}.nccl",
            )
            torch.cuda.set_device(local)
        result = _Measurement(torch, order, local, path).run()
        _write(f"{path}.{local}.result", result)
        return 0
    except BaseException as error:
        with open(f"{path}.{local}.error", "w", encoding="utf-8") as file:
            file.write(_words(error))
        return 1


class _Measurement:
    """One process of a measurement."""

    def __init__(self, torch: Any, order: AllReduceOrder, local: int, path: str) -> None:
        self._torch, self._dist = torch, torch.distributed
        self._order, self._path = order, path
        self._rank = order.first + local
        self._device = f"cuda:{local}" if order.backend == "nccl" else "cpu"
        self._began = 0.0

    def run(self) -> Dict[str, Any]:
        """The rate over all nodes, and those of pairs of nodes if it is below the floor."""
        from datetime import timedelta

        order, dist = self._order, self._dist
        store = dist.TCPStore(
            order.master, order.port, order.world, self._rank == 0,
            timeout=timedelta(seconds=JOIN_WITHIN),
        )  # fmt: skip
        self._began = time.monotonic()
        dist.init_process_group(
            order.backend, store=store, rank=self._rank, world_size=order.world,
            timeout=timedelta(seconds=_STUCK),
        )  # fmt: skip
        size, seconds = self._measure(None, order.seconds * _SHARE)
        rate = MeasuredRate(self._software(), size, bus_bandwidth(size, seconds, order.world))
        if self._rank == 0:
            floor = floor_of(rate, [EarlierRate(*each) for each in order.rates], order.bound)
            store.set("pairs", "1" if floor and rate.rate < floor.rate else "0")
        pairs = self._pairs(store) if store.get("pairs") == b"1" else []
        store.set(f"done {self._rank}", "1")
        if self._rank == 0:  # its store must outlive the others
            store.wait([f"done {rank}" for rank in range(order.world)], timedelta(seconds=5))
        return {"rate": list(rate), "pairs": [list(pair) for pair in pairs]}

    def _measure(self, group: Any, limit: float) -> Tuple[int, float]:
        """The largest size that fits into `limit` seconds, and the seconds of an all-reduce of it.

        All processes decide alike, because they know the same times.
        """
        sizes, left = sizes_up_to(self._order.bytes), limit
        for size, larger in zip(sizes, [*sizes[1:], 0]):  # noqa: B905 (Python 3.8)
            data = self._torch.zeros(size // 4, device=self._device)
            self._reduce(data, group)  # connections are made, buffers are touched
            each = self._time(data, group, 1)
            left -= 2 * each
            if not larger or 3 * each * larger / size > left:
                break
        count = min(_MOST, int(left / max(each, 1e-6)))
        return size, self._time(data, group, count) if count > 0 else each

    def _time(self, data: Any, group: Any, count: int) -> float:
        """Seconds of one all-reduce on the slowest process; the same value on all of them."""
        began = time.perf_counter()
        for _ in range(count):
            self._reduce(data, group)
        took = self._torch.tensor([(time.perf_counter() - began) / count], device=self._device)
        self._dist.all_reduce(took, op=self._dist.ReduceOp.MAX, group=group)
        return float(took.item())

    def _reduce(self, data: Any, group: Any) -> None:
        if self._order.delay:
            time.sleep(self._order.delay)
        self._dist.all_reduce(data, group=group)
        if self._device != "cpu":
            self._torch.cuda.synchronize()

    def _pairs(self, store: Any) -> List[PairRate]:
        """The rates of pairs of nodes, as many rounds as there is time for."""
        members, found = self._order.members, []
        starts = [sum(members[:node]) for node in range(len(members))]
        for number, pairs in enumerate(pair_rounds(len(members))):
            if self._rank == 0:
                left = self._began + self._order.seconds * (1 - _SHARE) - time.monotonic()
                store.set(f"round {number}", "1" if left > 0 else "0")
            if store.get(f"round {number}") != b"1":
                break
            mine: Optional[Tuple[Any, List[int], str]] = None  # None: no partner in this round
            for a, b in pairs:
                ranks = [starts[node] + i for node in (a, b) for i in range(members[node])]
                group = self._dist.new_group(ranks)  # called by all processes, in one order
                if self._rank in ranks:
                    mine = group, ranks, f"pair {a} {b}"
            if mine is not None:
                group, ranks, name = mine
                size, seconds = self._measure(group, self._order.seconds * _PAIR_SHARE)
                if self._rank == ranks[0]:
                    store.set(name, str(bus_bandwidth(size, seconds, len(ranks))))
            found += [PairRate(a, b, float(store.get(f"pair {a} {b}"))) for a, b in pairs]
        return found

    def _software(self) -> str:
        if self._order.backend != "nccl":
            return f"{self._order.backend} of PyTorch {self._torch.__version__}"
        return software_of(read_nccl_log(read(f"{self._path}.0.nccl")))


def _write(path: str, document: Dict[str, Any]) -> None:
    write_atomically(path, json.dumps(document).encode())


def _describe_end(status: int) -> str:
    """How a process ended that wrote no error, by its wait status."""
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)} ended the program that measures"
    return f"the program that measures ended with code {os.WEXITSTATUS(status)}"


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1])
