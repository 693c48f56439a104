"""Where the time of one training step of jobs/lenet goes: run it with the interpreter of the job.

    PYTHONPATH=. python benchmarks/lenet_profile.py [--batches N]

Times each phase of the step by hand, beside the matrix products that any way to compute these
layers contains, then lists the operators that torch.profiler finds heaviest.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import profile

from batchml.runtime import mnist

WARM_UP = 20  # batches


def load_job() -> Any:
    """The job's train.py as a module; it is no part of any package."""
    path = Path(__file__).resolve().parent.parent / "jobs" / "lenet" / "train.py"
    spec = importlib.util.spec_from_file_location("train", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train"] = module
    spec.loader.exec_module(module)
    return module


def phases_of_a_step(job: Any, training: Any) -> dict[str, Callable[[Any], Any]]:
    """The step of the job, taken apart; each phase gets what the one before returned."""

    def data(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return job.scale(batch[0]), batch[1]

    def forward(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        scores = training.model(batch[0])
        return functional.cross_entropy(scores, batch[1]), scores, batch[1]

    def backward(outcome: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        training.optimizer.zero_grad()
        torch.autograd.backward(outcome[0])
        return outcome[1:]

    def optimizer(answers: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        training.optimizer.step()
        return answers

    def accuracy(answers: tuple[Tensor, Tensor]) -> Tensor:
        right: Tensor = job.right_answers(*answers)
        return right

    steps = (data, forward, backward, optimizer, accuracy)
    return {step.__name__: step for step in steps}


def products(batch: int) -> list[tuple[Tensor, Tensor]]:
    """The matrices that a step multiplies if its convolutions are products of their windows:
    forward, for the weights, and for the input, which the first layer does not need.
    """
    found = []
    for rows, inputs, outputs in (
        *((batch * 24 * 24, 25, 20), (batch * 8 * 8, 500, 50)),
        *((batch, 800, 500), (batch, 500, mnist.CLASSES)),
    ):
        left, weights = torch.ones(rows, inputs), torch.ones(inputs, outputs)
        result = left @ weights
        found += [(left, weights), (left.t(), result), (result, weights.t())]
    del found[2]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    job = load_job()
    settings = argparse.Namespace(seed=0, lr=0.05, batch_size=options.batch_size)
    training = job.Training(settings, torch.device("cpu"))
    images, labels = job.to_device(mnist.load().train, training.device)

    start = time.perf_counter()
    order = torch.randperm(len(labels))
    images, labels = images[order], labels[order]
    permute = (time.perf_counter() - start) / len(labels) * options.batch_size

    parts = torch.split(images, options.batch_size), torch.split(labels, options.batch_size)
    batches = list(zip(*parts, strict=True))[: options.batches + WARM_UP]
    phases = phases_of_a_step(job, training)
    times: dict[str, list[float]] = {name: [] for name in phases}
    for batch in batches:
        value: Any = batch
        for name, phase in phases.items():
            start = time.perf_counter()
            value = phase(value)
            times[name].append(time.perf_counter() - start)
    cost = {"permutation, its share": permute}
    cost |= {name: median(seconds[WARM_UP:]) for name, seconds in times.items()}
    whole = sum(cost.values())
    for name, seconds in cost.items():
        print(f"{name:<24}{seconds * 1e6:8.0f} us {seconds / whole:6.1%}")
    print(f"{'a batch':<24}{whole * 1e6:8.0f} us, {options.batch_size / whole:.0f} samples/s")
    pairs, seconds = products(options.batch_size), []
    for _ in range(options.batches):
        start = time.perf_counter()
        for left, right in pairs:
            torch.mm(left, right)
        seconds.append(time.perf_counter() - start)
    least = median(seconds)
    print(f"{'matrix products alone':<24}{least * 1e6:8.0f} us {least / whole:6.1%}\n")

    with profile() as recorded:
        for batch in batches[:100]:
            training.step(*batch)
    print(recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))
    return 0


if __name__ == "__main__":
    sys.exit(main())
