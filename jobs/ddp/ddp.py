"""Train a linear model with many processes on many nodes: `ddp.py EPOCHS SAVE_EVERY`.

Command line and log lines are those of the classic multi-node example of PyTorch's tutorials. Any
launcher that sets torchrun's variables can start it. It corrects the example: the loss has a slope,
so the model learns; only one process writes snapshots, and a reader finds only complete files; a
resumed run repeats no epoch; and the last epoch is saved.

An epoch depends on the seed and its number alone, and a snapshot has the complete state. So an
interrupted training ends with the same bits as one without interruption, if the number of processes
is the same.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from batchml.runtime import report, should_stop
from batchml.runtime.device import NoDevice, join_torch

SAMPLES, FEATURES = 2048, 20
STOPPED = 128 + signal.SIGTERM  # exit code


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a linear model on all processes.")
    parser.add_argument("total_epochs", type=int, help="number of epochs")
    parser.add_argument("save_every", type=int, help="epochs between two snapshots")
    parser.add_argument("--batch_size", type=int, default=32, help="batch size of each process")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if min(options.total_epochs, options.save_every, options.batch_size) < 1:
        parser.error("EPOCHS, SAVE_EVERY and --batch_size start at 1")
    return options


def make_dataset(seed: int) -> Dataset[tuple[Tensor, ...]]:
    """Make points on a plane: the same points in all processes, the same plane for every seed."""
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.rand(SAMPLES, FEATURES, generator=rng)
    weights = torch.linspace(-1, 2, FEATURES).unsqueeze(1)
    return TensorDataset(inputs, inputs @ weights + 0.5)


def save(state: dict[str, Any], path: Path) -> None:
    """Replace the snapshot. A reader finds the complete old or new one, also after a power cut."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the new name durable
    finally:
        os.close(folder)


def broadcast_snapshot(path: Path) -> bytes:
    """Return the snapshot that rank 0 reads; b"" without one.

    So nodes need not share a folder, and all processes continue from the same epoch.
    """
    found = [path.read_bytes() if dist.get_rank() == 0 and path.exists() else b""]
    dist.broadcast_object_list(found)
    return found[0]


class Trainer:
    def __init__(self, options: argparse.Namespace, device: torch.device, path: Path) -> None:
        torch.manual_seed(options.seed)
        self.options, self.device, self.path = options, device, path
        self.rank = dist.get_rank()
        self.epochs_run = 0
        self.steps = 0  # of this process
        self.stopping = False
        data = make_dataset(options.seed)
        self.sampler: DistributedSampler[Any] = DistributedSampler(data, seed=options.seed)
        self.batches = DataLoader(data, options.batch_size, sampler=self.sampler)
        self.model = nn.Linear(FEATURES, 1).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=options.lr)
        self._resume()
        self.parallel = DistributedDataParallel(self.model)

    def stop(self, *_signal: object) -> None:
        self.stopping = True

    def train(self) -> bool:
        """Train to the last epoch. Return False if the run has to stop before."""
        while self.epochs_run < self.options.total_epochs:
            epoch = self.epochs_run
            loss = self._run_epoch(epoch)
            self.epochs_run += 1
            stopping = self._agree(loss, epoch)
            is_last = self.epochs_run == self.options.total_epochs
            if self.rank == 0 and (epoch % self.options.save_every == 0 or is_last or stopping):
                self._save(epoch)
            if stopping and not is_last:
                return False
        return True

    def _run_epoch(self, epoch: int) -> Tensor:
        """Train one epoch; return the mean loss of this process's batches."""
        # A seed for each epoch and rank: a snapshot needs no state of random numbers.
        torch.manual_seed((self.options.seed << 32) + (epoch << 12) + self.rank)
        self.sampler.set_epoch(epoch)
        print(
            f"[GPU{self.rank}] Epoch {epoch} | Batchsize: {self.options.batch_size}"
            f" | Steps: {len(self.batches)}"
        )
        total = torch.zeros((), device=self.device)
        for inputs, targets in self.batches:
            self.optimizer.zero_grad()
            outputs = self.parallel(inputs.to(self.device))
            loss = functional.mse_loss(outputs, targets.to(self.device))
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        self.steps += len(self.batches)
        return total / len(self.batches)

    def _agree(self, loss: Tensor, epoch: int) -> bool:
        """Say whether all processes stop after this epoch: if any of them has to."""
        stopping = self.stopping or should_stop()
        sums = torch.stack([loss, torch.tensor(float(stopping), device=self.device)])
        dist.all_reduce(sums)
        mean, stops = float(sums[0]) / dist.get_world_size(), float(sums[1])
        if self.rank == 0:
            print(f"Epoch {epoch} | Loss: {mean:.6f}")
            report(step=epoch + 1, total=self.options.total_epochs, loss=mean)
        return stops > 0

    def _save(self, epoch: int) -> None:
        state = {
            "MODEL_STATE": self.model.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": self.epochs_run,  # number of finished epochs, and index of the next
        }
        save(state, self.path)
        print(f"Epoch {epoch} | Training snapshot saved at {self.path.name}")

    def _resume(self) -> None:
        content = broadcast_snapshot(self.path)
        if not content:
            return
        state = torch.load(io.BytesIO(content), map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["MODEL_STATE"])
        self.optimizer.load_state_dict(state["OPTIMIZER_STATE"])
        self.epochs_run = state["EPOCHS_RUN"]
        print(f"Resuming training from snapshot at Epoch {self.epochs_run}")


def run(options: argparse.Namespace, device: torch.device) -> int:
    path = Path(os.environ.get("BATCHML_CHECKPOINT_DIR") or ".", "snapshot.pt")
    trainer = Trainer(options, device, path)
    signal.signal(signal.SIGTERM, trainer.stop)
    start = time.perf_counter()
    done = trainer.train()
    seconds = time.perf_counter() - start
    if trainer.rank == 0 and trainer.steps:
        world = dist.get_world_size()
        speed = trainer.steps * options.batch_size * world / seconds
        step = seconds / trainer.steps * 1000
        print(f"{world} processes: {speed:.0f} samples/s, {step:.3f} ms a step")
    return 0 if done else STOPPED


def main() -> int:
    assert isinstance(sys.stdout, io.TextIOWrapper)
    # Write each line at once and in one piece: other processes write to the same stream.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    options = parse_arguments()
    try:
        # A linear model of 21 weights gains nothing from bf16.
        device = join_torch(torch, bf16=False).device
    except NoDevice as error:
        return error.report()
    try:
        return run(options, device)
    finally:
        # DistributedDataParallel is part of a reference cycle and holds the process group. If
        # the group lives until Python ends, the process may abort there (torch 2.13, gloo).
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
