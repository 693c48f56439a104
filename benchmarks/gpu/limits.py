"""What the hardware can do: kernels a second, bytes a second, operations a second.

The other checks compare their figures with these, because data sheets are upper bounds that no
program reaches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.gpu.checks import CheckRun
from benchmarks.gpu.timing import capture, seconds_of, synchronize

MIB, GB = 1 << 20, 1e9


class Sizes(NamedTuple):
    copy: int  # bytes
    transfer: int  # bytes between host and device
    launches: int
    matrix: int  # rows and columns
    repeat: int


FULL = Sizes(4096 * MIB, 512 * MIB, 2000, 8192, 7)
SMALL = Sizes(4 * MIB, 1 * MIB, 50, 64, 2)

EAGER_LAUNCH, GRAPH_LAUNCH = "eager launch", "graph launch"
BANDWIDTH = "copy on the device"
SUSTAINED = "bf16 product, sustained"
BF16, TF32, FP32 = PRODUCTS = ("bf16 product", "tf32 product", "fp32 product")


def measure(run: CheckRun) -> None:
    sizes, device = SMALL if run.small else FULL, run.device
    launches(run, sizes, device)
    copies(run, sizes, device)
    products(run, sizes, device)


def launches(run: CheckRun, sizes: Sizes, device: str) -> None:
    """Measure the time of a kernel that does nothing worth its start."""
    x = torch.ones(1, device=device)

    def work() -> None:
        for _ in range(sizes.launches):
            x.add_(1)

    eager = seconds_of(work, device, sizes.repeat) / sizes.launches
    run.figure(EAGER_LAUNCH, 1e6 * eager, "us", "a kernel that PyTorch starts from Python")
    if device != "cuda":
        run.finding("CUDA graphs exist only on a GPU: their launch overhead was not measured.")
        return
    graph = capture(work)
    captured = seconds_of(graph.replay, device, sizes.repeat) / sizes.launches
    run.figure(GRAPH_LAUNCH, 1e6 * captured, "us", "a kernel of a CUDA graph")
    run.finding(
        f"A CUDA graph starts a kernel in {1e6 * captured:.2f} us, Python in {1e6 * eager:.2f} us."
    )


def copies(run: CheckRun, sizes: Sizes, device: str) -> None:
    source = torch.empty(_fitting(sizes.copy, device), dtype=torch.uint8, device=device)
    source.random_(0, 256)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), device, sizes.repeat)
    note = f"bytes read and written, {source.nbytes / MIB:.0f} MiB"
    run.figure(BANDWIDTH, 2 * source.nbytes / seconds / GB, "GB/s", note)
    if device == "cuda":
        transfers(run, sizes, device)


def transfers(run: CheckRun, sizes: Sizes, device: str) -> None:
    there = torch.empty(sizes.transfer, dtype=torch.uint8, device=device)
    for pinned in (True, False):
        here = torch.zeros(sizes.transfer, dtype=torch.uint8, pin_memory=pinned)
        words = "pinned" if pinned else "pageable"
        up = seconds_of(_copier(there, here), device, sizes.repeat)
        down = seconds_of(_copier(here, there), device, sizes.repeat)
        run.figure(f"host to device, {words}", there.nbytes / up / GB, "GB/s")
        run.figure(f"device to host, {words}", there.nbytes / down / GB, "GB/s")


def _copier(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def _fitting(size: int, device: str) -> int:
    """At most a quarter of the free memory, since another tensor is as large."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else size * 4
    return int(min(size, free // 4))


def products(run: CheckRun, sizes: Sizes, device: str) -> None:
    """Measure products of square matrices of random numbers: zeros would be faster."""
    n = sizes.matrix
    for name, dtype, precision in (
        (BF16, torch.bfloat16, "highest"),
        (TF32, torch.float32, "high"),
        (FP32, torch.float32, "highest"),
    ):
        torch.set_float32_matmul_precision(precision)
        a = torch.randn(n, n, device=device, dtype=dtype)
        b = torch.randn(n, n, device=device, dtype=dtype)
        seconds = seconds_of(lambda a=a, b=b: a @ b, device, sizes.repeat)  # type: ignore[misc]
        rate = 2 * n**3 / seconds / 1e12
        run.figure(name, rate, "TFLOP/s", f"{n} x {n} x {n}, random numbers")
    torch.set_float32_matmul_precision("highest")
    if device == "cuda":
        sustained(run, n)


def sustained(run: CheckRun, n: int, seconds: float = 2.0) -> None:
    """Measure products without a pause: the card may lower its clocks to keep its power limit."""
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    b, c = torch.randn_like(a), torch.empty_like(a)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(10):
            torch.mm(a, b, out=c)
        synchronize("cuda")
        count += 10
    rate = 2 * n**3 * count / (time.perf_counter() - start) / 1e12
    run.figure(SUSTAINED, rate, "TFLOP/s", f"{seconds:g} s without a pause")
