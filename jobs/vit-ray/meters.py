"""Measure how busy each node of the Ray cluster is, by an actor on each that requests no CPU."""

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
_FETCH_EVERY = 3.0  # seconds between two requests to all nodes; samples of lost nodes are kept


class Sample(NamedTuple):
    at: float  # seconds since the epoch
    cpu: float  # CPU seconds that Ray's processes on the node have used
    gpu: float | None  # percent


@ray.remote(num_cpus=0, max_restarts=0)
class Meter:
    """Samples the processes of the node's raylet, which is the parent of this actor."""

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
    """Starts a Meter on each present or new node, and reads it in the background until `stop`."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}  # id -> entry of `ray.nodes()`
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
                strategy = NodeAffinitySchedulingStrategy(name, soft=False)
                self._actors[name] = Meter.options(scheduling_strategy=strategy).remote()
                self.samples[name] = []
        for name, actor in list(self._actors.items()):
            try:
                new = ray.get(actor.since.remote(len(self.samples[name])), timeout=5)
            except Exception:  # this node is lost or busy; continue with the others
                continue
            self.samples[name] += [Sample(*each) for each in new]
