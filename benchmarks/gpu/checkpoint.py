"""Checkpoints of a model on the GPU: how long the training stands still, and that they restore.

Three ways, each of weights and Adam's state: `checkpoint.save` with torch.save, the shards of
jobs/llama, and a copy to pinned memory that a thread writes while the training goes on.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from batchml.runtime import checkpoint
from benchmarks.gpu.checks import CheckRun
from benchmarks.gpu.machine import load_module
from benchmarks.gpu.timing import free_memory, synchronize

GIB = 1 << 30
STATE = 2 * GIB  # bytes of weights and Adam's state
SMALL_STATE = 1 << 20
STEPS = 8  # before each save
_COPIES = 5  # of the state on the disk at once: the last two of two ways, and the one in the making

State = dict[str, Any]


class Training:
    """A stack of linear layers that Adam fits to random numbers."""

    def __init__(self, size: int, device: str) -> None:
        """`size`: bytes of weights, and of Adam's two numbers for each of them."""
        torch.manual_seed(7)
        layers = 4
        width = max(8, int((size / 12 / layers) ** 0.5))
        self.device = device
        self.model = torch.nn.Sequential(
            *[torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
        ).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.data = torch.randn(64, width, device=device)

    def step(self) -> None:
        loss = (self.model(self.data) - self.data).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> State:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def measure(run: CheckRun) -> None:
    size = fitting_size(run)
    os.environ.pop("RANK", None)
    training = Training(size, run.device)
    run_steps(training, STEPS)
    held = sum(each.nbytes for each in tensors(training.state()))
    run.figure("state", held / GIB, "GiB", "weights and Adam's state, float32")
    step = run_steps(training, STEPS)
    run.figure("step", 1000 * step, "ms", "without a save")
    whole, sharded = blocking(run, training, held), shards(run, training, held)
    copied = beside(run, training, held, step)
    run.finding(
        f"A save of {held / GIB:.2f} GiB stops the training for {whole:.2f} s with "
        f"checkpoint.save, {sharded:.2f} s with jobs/llama's shards, and {copied:.2f} s if a "
        "thread saves a copy in pinned memory. All three restored every number."
    )


def fitting_size(run: CheckRun) -> int:
    """The bytes of the state that fit this GPU and this disk."""
    free = shutil.disk_usage(run.folder).free // (2 * _COPIES)
    memory = torch.cuda.mem_get_info()[0] // 4 if run.device == "cuda" else free
    # All ways together write and read the state six times, with SHA-256.
    in_time = int(disk_rate(run) * run.left() / 12)
    size = min(SMALL_STATE if run.small else STATE, free, memory, max(SMALL_STATE, in_time))
    if size < SMALL_STATE:
        run.leave(f"the disk of {run.folder} or the GPU has too little room for a checkpoint")
    return size


def disk_rate(run: CheckRun) -> float:
    """Bytes a second that the scratch folder's disk takes."""
    data = os.urandom(SMALL_STATE if run.small else 64 * SMALL_STATE)
    path = run.folder / "rate"
    began = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    rate = len(data) / (time.perf_counter() - began)
    path.unlink()
    run.figure("disk", rate / 1e9, "GB/s", "written and synchronized")
    return rate


def run_steps(training: Training, count: int) -> float:
    """The seconds of a step."""
    synchronize(training.device)
    began = time.perf_counter()
    for _ in range(count):
        training.step()
    synchronize(training.device)
    return (time.perf_counter() - began) / count


def tensors(state: Any) -> list[torch.Tensor]:
    """All tensors of a state, in order."""
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state
    nested = values if isinstance(state, (dict, list, tuple)) else ()
    return [each for value in nested for each in tensors(value)]


def digest(state: State) -> list[torch.Tensor]:
    return [each.detach().to("cpu", copy=True) for each in tensors(state)]


def blocking(run: CheckRun, training: Training, held: int) -> float:
    """`checkpoint.save` as most programs call it: the training waits until all is on the disk."""
    folder = str(run.folder / "blocking")

    def write(path: str) -> None:
        torch.save(training.state(), f"{path}/state.pt")

    stall = stop_watch(training.device, lambda: checkpoint.save(write, 1, folder=folder))
    report(run, "torch.save", stall, held, "the training stands still")
    restored(run, training, lambda: read(folder, training), "torch.save")
    shutil.rmtree(folder)
    return stall


def shards(run: CheckRun, training: Training, held: int) -> float:
    """The checkpoints of jobs/llama: torch.distributed.checkpoint, here of one process."""
    folder = str(run.folder / "shards")
    dist.init_process_group("gloo", init_method=f"file://{run.folder}/group", rank=0, world_size=1)
    try:
        saving = load_module("llama", "saving")
        checkpoints = saving.Checkpoints(training.model, training.optimizer, folder)
        stall = stop_watch(training.device, lambda: checkpoints.save(1, 0))
        report(run, "shards", stall, held, "as jobs/llama saves")
        restored(run, training, checkpoints.load, "shards")
    finally:
        dist.destroy_process_group()
    shutil.rmtree(folder)
    return stall


def beside(run: CheckRun, training: Training, held: int, usual: float) -> float:
    """Copy the state to pinned memory, and let a thread write it while the training goes on."""
    folder = str(run.folder / "beside")
    pinned = pinned_copy(training.state(), training.device)
    saved: list[bool] = []

    def write_all() -> None:
        def write(path: str) -> None:
            torch.save(pinned, f"{path}/state.pt")

        saved.append(checkpoint.save(write, 1, folder=folder))

    stall = stop_watch(training.device, lambda: copy_into(pinned, training.state()))
    expected = digest(training.state())
    thread = threading.Thread(target=write_all)
    began = time.perf_counter()
    thread.start()
    steps = 0
    while thread.is_alive() and run.left() > 5:
        run_steps(training, 1)
        steps += 1
    during = (time.perf_counter() - began) / max(1, steps)
    thread.join(max(0.1, run.left()))
    if saved != [True]:
        raise RuntimeError("the thread did not save the checkpoint in its time")
    report(run, "pinned copy", stall, held, "then a thread writes")
    run.figure("written beside", time.perf_counter() - began, "s", f"{steps} steps meanwhile")
    slower = f"{during / max(usual, 1e-9):.1f} times as long"
    run.figure("step meanwhile", 1000 * during, "ms", slower)
    restored(run, training, lambda: read(folder, training), "pinned copy", expected)
    return stall


def pinned_copy(state: Any, device: str) -> Any:
    """A state of the same shape in memory of the host, to which a GPU copies at full speed."""
    if isinstance(state, torch.Tensor):
        return torch.empty_like(state, device="cpu", pin_memory=device == "cuda")
    if isinstance(state, dict):
        return {name: pinned_copy(value, device) for name, value in state.items()}
    return [pinned_copy(each, device) for each in state] if isinstance(state, list) else state


def copy_into(target: Any, source: Any) -> None:
    for there, here in zip(tensors(target), tensors(source), strict=True):
        there.copy_(here, non_blocking=True)


def stop_watch(device: str, work: Callable[[], object]) -> float:
    """The seconds for which the training stands still. Raises RuntimeError if `work` is False."""
    synchronize(device)
    began = time.perf_counter()
    if work() is False:
        raise RuntimeError("the checkpoint was not saved: see the log")
    synchronize(device)
    return time.perf_counter() - began


def report(run: CheckRun, way: str, stall: float, held: int, note: str) -> None:
    run.figure(f"{way}, stall", stall, "s", f"{held / GIB / max(stall, 1e-9):.2f} GiB/s; {note}")


def read(folder: str, training: Training) -> None:
    found = checkpoint.newest(folder)
    if found is None:
        raise RuntimeError(f"{folder} has no complete checkpoint")
    path = Path(found.path) / "state.pt"
    training.load(torch.load(path, map_location=training.device, weights_only=True))


def restored(
    run: CheckRun,
    training: Training,
    load: Callable[[], object],
    way: str,
    expected: list[torch.Tensor] | None = None,
) -> None:
    """Train on, restore, and compare each number. Raises RuntimeError for a difference."""
    wanted = expected or digest(training.state())
    run_steps(training, 2)
    seconds = stop_watch(training.device, lambda: load() and None)
    found = digest(training.state())
    same = len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    run.figure(f"{way}, restore", seconds, "s", "with the check of every file")
    if not same:
        raise RuntimeError(f"{way}: the restored state differs from the saved one")
    del found, wanted
    free_memory()
