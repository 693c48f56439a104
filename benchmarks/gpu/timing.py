"""Time work on a device, and reuse the modules of the example jobs. Needs PyTorch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from statistics import median
from types import ModuleType
from typing import Any

import torch

from benchmarks.gpu.machine import ROOT


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: str, repeat: int = 5, warm_up: int = 2) -> float:
    """The median time of `work` in seconds, until the device has done it."""
    for _ in range(warm_up):
        work()
    times = []
    for _ in range(repeat):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times)


def capture(work: Callable[[], object], warm_up: int = 3) -> torch.cuda.CUDAGraph:
    """Record `work` as a CUDA graph. It runs `warm_up` times before, on a side stream, as the
    capture demands: libraries make their handles, optimizers their state.

    `work` must not wait for the device or make a tensor from Python values, and must not use
    tensors that change their place. Source: PyTorch, CUDA semantics, "CUDA Graphs".
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def free_memory() -> None:
    """Give the memory of deleted tensors back, so that the next variant finds all of it."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def load_program(job: str) -> ModuleType:
    """The train.py of a job, as a module that its own imports find. It is no part of a package."""
    path = ROOT / "jobs" / job / "train.py"
    name = f"job_{job.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def load_module(job: str, name: str) -> Any:
    """A module beside the train.py of a job. A process loads modules of one job only."""
    folder = str(ROOT / "jobs" / job)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)
