"""Time work on a device, and capture CUDA graphs. Needs PyTorch."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median

import torch


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
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
