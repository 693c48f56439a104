"""Train LeNet on MNIST with PyTorch.

It prints a line every 100 batches and three lines for each epoch, and writes the weights to
lenet.pt in $BATCHML_OUTPUT_DIR. With $BATCHML_CHECKPOINT_DIR it continues after an interruption.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from batchml.runtime import mnist, report
from batchml.runtime.device import open_torch
from batchml.runtime.storage.files import write_atomically

LINE_EVERY = 100  # batches between two log lines


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train LeNet on MNIST.")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--seed", type=int, default=0, help="0 or more; equal seeds give equal results"
    )
    options = parser.parse_args()
    if options.seed < 0 or min(options.epochs, options.batch_size) < 1:
        parser.error("--epochs and --batch-size start at 1, --seed at 0")
    if not 0 < options.lr < math.inf:
        parser.error("--lr is a number greater than 0")
    return options


def build_lenet() -> nn.Module:
    # Tanh keeps the order of values, so it may follow the pooling: the network computes the same
    # function with a quarter of the work.
    return nn.Sequential(
        *(nn.Conv2d(1, 20, kernel_size=5), nn.MaxPool2d(2), nn.Tanh()),
        *(nn.Conv2d(20, 50, kernel_size=5), nn.MaxPool2d(2), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(50 * 4 * 4, 500), nn.Tanh()),
        nn.Linear(500, mnist.CLASSES),
    ).to(memory_format=torch.channels_last)  # the layout in which convolutions are fastest


def to_device(split: mnist.Split, device: torch.device) -> tuple[Tensor, Tensor]:
    """Move all images (N, 1, 28, 28), as bytes to save memory, and labels (N) to the device."""
    images = torch.frombuffer(bytearray(split.images), dtype=torch.uint8)
    labels = torch.frombuffer(bytearray(split.labels), dtype=torch.uint8)
    return images.view(-1, 1, mnist.SIDE, mnist.SIDE).to(device), labels.to(device).long()


def scale(images: Tensor) -> Tensor:
    return images.float().div_(255)


def right_answers(scores: Tensor, labels: Tensor) -> Tensor:
    return (
        scores.argmax(1) == labels
    ).sum()  # a tensor, because a number would wait for the device


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    batches = zip(torch.split(images, 1000), torch.split(labels, 1000), strict=True)
    with torch.inference_mode():
        return sum(int(right_answers(model(scale(x)), y)) for x, y in batches) / len(labels)


def save(value: object, path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    write_atomically(str(path), buffer.getvalue())


@dataclass
class Progress:
    """The progress of the training. Progress and seed determine which images come next."""

    epoch: int = 0
    seen: int = 0  # images of this epoch that were trained on
    right: int = 0  # of these, images that the model classified correctly at that time


class Training:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(options.seed)
        self.options, self.device, self.progress = options, device, Progress()
        self.stopping = False
        self.model = build_lenet().to(device)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4, fused=True
        )

    def stop(self, *_signal: object) -> None:
        self.stopping = True

    def save(self, path: Path) -> None:
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        save({**parts, "progress": asdict(self.progress)}, path)

    def resume(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        print(f"Resuming in epoch {self.progress.epoch} after {self.progress.seen} images")

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        scores = self.model(scale(images))
        self.optimizer.zero_grad()
        functional.cross_entropy(scores, labels).backward()
        self.optimizer.step()
        return right_answers(scores, labels)

    def report_progress(self, count: int) -> None:
        """Report the progress, and stop if batchml says so: a sweep may end a bad trial early.

        Metrics need no report: batchml reads them from the log lines.
        """
        now = self.progress
        if not report(step=now.epoch * count + now.seen, total=self.options.epochs * count):
            self.stopping = True

    def train_epoch(self, images: Tensor, labels: Tensor) -> None:
        """Train the rest of the epoch. Its order depends on the seed and the epoch alone."""
        now, size = self.progress, self.options.batch_size
        rng = torch.Generator().manual_seed((self.options.seed << 20) + now.epoch)
        rest = torch.randperm(len(labels), generator=rng)[now.seen :].to(self.device)
        seen, right = now.seen, torch.tensor(now.right, device=self.device)
        since = time.perf_counter()
        batches = zip(torch.split(images[rest], size), torch.split(labels[rest], size), strict=True)
        for x, y in batches:
            right += self.step(x, y)
            seen += len(y)
            if seen % (size * LINE_EVERY) == 0:
                new, hits = seen - now.seen, int(right) - now.right
                speed = new / (time.perf_counter() - since)
                print(
                    f"Epoch[{now.epoch}] Batch [{seen // size}]\tSpeed: {speed:.2f} samples/sec"
                    f"\tTrain-accuracy={hits / new:.6f}"
                )
                now.seen, now.right, since = seen, int(right), time.perf_counter()
                self.report_progress(len(labels))
            if self.stopping:
                break
        now.seen, now.right = seen, int(right)


def run(options: argparse.Namespace, digits: mnist.Digits) -> int:
    # bf16 would not pay: the network is so small that a GPU mostly waits for its next kernel, and
    # casts are further kernels.
    device = open_torch(torch, bf16=False).device
    train, validation = to_device(digits.train, device), to_device(digits.validation, device)
    training = Training(options, device)
    signal.signal(signal.SIGTERM, training.stop)

    def validate(epoch: int) -> None:
        right = accuracy(training.model, *validation)
        print(f"Epoch[{epoch}] Validation-accuracy={right:.6f}")

    folder = os.environ.get("BATCHML_CHECKPOINT_DIR")
    checkpoint = Path(folder, "lenet.pt") if folder else None
    if checkpoint and checkpoint.exists():
        training.resume(checkpoint)
        if training.progress.epoch >= options.epochs:  # stopped after the last epoch
            validate(training.progress.epoch - 1)
    while training.progress.epoch < options.epochs:
        now, start = training.progress, time.perf_counter()
        training.train_epoch(*train)
        if now.seen == digits.train.size:
            print(f"Epoch[{now.epoch}] Train-accuracy={now.right / now.seen:.6f}")
            print(f"Epoch[{now.epoch}] Time cost={time.perf_counter() - start:.3f}")
            validate(now.epoch)
            training.progress = Progress(now.epoch + 1)
        if checkpoint:
            training.save(checkpoint)
        training.report_progress(digits.train.size)
        if training.stopping and training.progress.epoch < options.epochs:
            return 128 + signal.SIGTERM
    weights = {name: value.cpu() for name, value in training.model.state_dict().items()}
    save(weights, Path(os.environ.get("BATCHML_OUTPUT_DIR", "."), "lenet.pt"))
    return 0


def main() -> int:
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # show each line at once
    torch.backends.cudnn.deterministic = True
    options = parse_arguments()
    try:
        return run(options, mnist.load())
    except mnist.NoDigits as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
