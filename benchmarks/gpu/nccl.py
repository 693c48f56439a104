"""NCCL in a group of one process: that it starts, that it computes right, what it costs.

One GPU has nobody to talk to, so nothing here is the bandwidth of a network or of NVLink: an
all-gather into another buffer is a copy on the device, and its figure says so. An all-reduce in
place has nothing to do, and its time is what PyTorch and NCCL add to a step for each collective.
On a CPU the same calls go to gloo.
"""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist

from benchmarks.gpu import limits
from benchmarks.gpu.checks import CheckRun
from benchmarks.gpu.timing import seconds_of, synchronize

MIB, GB = 1 << 20, 1e9
FULL, SMALL = (64 * MIB, 1024 * MIB), (1 * MIB,)  # bytes


def measure(run: CheckRun) -> None:
    backend = "nccl" if run.device == "cuda" else "gloo"
    if backend == "nccl" and not dist.is_nccl_available():
        run.leave(f"PyTorch {torch.__version__} is built without NCCL")
    if run.device == "cuda":
        run.detail("version", ".".join(str(part) for part in torch.cuda.nccl.version()))
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        collectives(run, backend, SMALL if run.small else FULL)
    finally:
        gc.collect()
        dist.destroy_process_group()


def collectives(run: CheckRun, backend: str, sizes: tuple[int, ...]) -> None:
    device = run.device
    word = torch.ones(1, device=device)
    start = time.perf_counter()
    dist.all_reduce(word)  # the first call makes the communicator
    synchronize(device)
    run.figure("first collective", time.perf_counter() - start, "s", f"{backend} starts")
    each = seconds_of(lambda: dist.all_reduce(word), device, 20)
    run.figure("all-reduce of 4 bytes", 1e6 * each, "us", "has nothing to do in a group of one")
    for size in sizes:
        own = torch.randn(size // 4, device=device)
        gathered = torch.zeros_like(own)
        seconds = seconds_of(lambda a=own, b=gathered: dist.all_gather_into_tensor(b, a), device)  # type: ignore[misc]
        before = own.clone()
        reduced = seconds_of(lambda a=own: dist.all_reduce(a), device)  # type: ignore[misc]
        if not torch.equal(own, before) or not torch.equal(gathered, before):
            raise ArithmeticError(f"{backend} changed {size} bytes in a group of one")
        words = f"{size / MIB:.0f} MiB"
        note = "a device copy: bytes read and written; no network"
        run.figure(f"all-gather of {words}", 2 * size / seconds / GB, "GB/s", note)
        run.figure(f"all-reduce of {words}", 1e6 * reduced, "us", "in place")
    copy = run.before("limits", limits.BANDWIDTH)
    if copy:
        share = 2 * sizes[-1] / seconds / GB / copy
        run.finding(f"An all-gather in a group of one reaches {100 * share:.0f} % of a plain copy.")
    run.finding(f"{backend} starts, and its results are right in a group of one process.")
