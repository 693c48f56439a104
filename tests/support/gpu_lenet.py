"""Train LeNet eagerly and by the replays of a graph, and print whether the weights are the same.

It runs with a Python that has PyTorch. On a CPU the graph is a function that a replay calls, so the
order of the images, the positions and the restart after the capture are those of a GPU.
"""

import json
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.lenet import EAGER, FP32, GRAPH, NHWC, Trainer, Variant, synthetic
from benchmarks.gpu.machine import load_program

IMAGES, BATCH = 840, 8  # 105 batches: not a multiple of the steps of a graph


class Recorded:
    """Like a CUDA graph: what it warms up with changes the weights, what it records does not."""

    def __init__(self, work: Callable[[], object]) -> None:
        for _ in range(3):
            work()
        self.replay = work


def main() -> None:
    torch.set_num_threads(1)
    job = load_program("lenet")
    images, labels = job.to_device(synthetic(IMAGES + 3).train, torch.device("cpu"))
    weights, rights, accuracies = [], [], []
    for mode in (EAGER, GRAPH):
        trainer = Trainer(Variant(mode, FP32, NHWC, BATCH), job, (images, labels), Recorded)
        torch.manual_seed(1)
        trainer.train(epochs=2)
        weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
        rights.append(int(trainer.right))
        accuracies.append(trainer.accuracy(images, labels))
    kernels = trainer.profile(steps=12)
    compiled: Any = torch.compile(trainer._loss, backend="eager", fullgraph=True)
    loss, _ = compiled(images[:BATCH], labels[:BATCH])
    found = {
        "steps": trainer.steps,
        "equal": all(torch.equal(a, b) for a, b in zip(*weights, strict=True)),
        "right": rights,
        "accuracy": accuracies,
        "kernels": kernels.number,
        "loss": loss.item(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
