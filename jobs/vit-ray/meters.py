"""How busy each node of the gang is: an actor on each, which takes no CPU from Ray's books."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from batchml.runtime.processes import descendants
from batchml.runtime.telemetry.gpus import GpuMonitor, gpu_totals
from batchml.runtime.telemetry.usage import cpu_seconds

EVERY = 1.0  # seconds between two samples
_FETCH_EVERY = 3.0  # seconds between two looks at all nodes: what a lost one had told stays


class Sample(NamedTuple):
    at: float  # seconds since the epoch
    cpu: float  # seconds of CPU that Ray's processes on the node have used
    gpu: float | None  # percent


@ray.remote(num_cpus=0, max_restarts=0)
class Meter:
    """Samples what belongs to this node's raylet, which is this actor's parent."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._gpus = GpuMonitor(os.environ)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        raylet = os.getppid()
        while True:
            gpu = gpu_totals(self._gpus.read()).get("gpu")
            used = cpu_seconds([raylet, *descendants(raylet)])
            self._samples.append(Sample(time.time(), used, gpu))
            time.sleep(EVERY)

    def since(self, count: int) -> list[tuple[float, float, float | None]]:
        return [tuple(each) for each in self._samples[count:]]


class Meters:
    """One for each node that is there or comes, read in the background until `stop`."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}  # id -> as `ray.nodes()` has it
        self.samples: dict[str, list[Sample]] = {}
        self._actors: dict[str, Any] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join(10)
        self._fetch()

    def _run(self) -> None:
        while not self._end.wait(_FETCH_EVERY):
            self._fetch()

    def _fetch(self) -> None:
        for node in ray.nodes():
            name = node["NodeID"]
            self.nodes[name] = node
            if node["Alive"] and name not in self._actors:
                here = NodeAffinitySchedulingStrategy(name, soft=False)
                self._actors[name] = Meter.options(scheduling_strategy=here).remote()
                self.samples[name] = []
        for name, actor in list(self._actors.items()):
            try:
                new = ray.get(actor.since.remote(len(self.samples[name])), timeout=5)
            except Exception:  # its node is gone, or busy; the others are not
                continue
            self.samples[name] += [Sample(*each) for each in new]
