"""Draw images from their numbers, and blur them, which keeps CPUs busy.

The n-th image is always the same, so a training that continues from a checkpoint sees the images
that it would have seen without the interruption.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

CLASSES = 10
KERNEL, SIGMA, ROUNDS = 11, 2.0, 10  # of the blur; rounds make it slow

Batch = dict[str, NDArray[np.generic]]


class Draw:
    """Draws images for row numbers: a colour and a direction for each class, and noise."""

    def __init__(self, size: int, seed: int, first: int = 0) -> None:
        self._size, self._seed, self._first = size, seed, first

    def __call__(self, batch: Batch) -> Batch:
        numbers = batch["id"] + self._first
        images = np.stack([self._image(int(number)) for number in numbers])
        return {"image": images, "label": numbers % CLASSES, "number": numbers}

    def _image(self, number: int) -> NDArray[np.uint8]:
        rng = np.random.default_rng([self._seed, number])
        angle = 2 * np.pi * (number % CLASSES) / CLASSES
        at = np.linspace(-1, 1, self._size)
        slope = np.cos(angle) * at[:, None] + np.sin(angle) * at[None, :]
        tint = np.cos(angle + np.array([0.0, 2.1, 4.2]))[:, None, None]
        noise = rng.normal(0, 60, (3, self._size, self._size))
        return np.clip(128 + 50 * slope + 30 * tint + noise, 0, 255).astype(np.uint8)


def kernel() -> torch.Tensor:
    at = torch.arange(KERNEL) - KERNEL // 2
    weights = torch.exp(-(at**2) / (2 * SIGMA**2))
    return (weights / weights.sum()).repeat(3, 1)  # one for each colour


def blur(images: torch.Tensor, rounds: int = ROUNDS) -> torch.Tensor:
    """Apply a Gaussian blur `rounds` times, along rows and then columns, which is less work."""
    weights, half = kernel(), KERNEL // 2
    for _ in range(rounds):
        images = functional.pad(images, (half, half, half, half), mode="reflect")
        images = functional.conv2d(images, weights[:, None, None, :], groups=3)
        images = functional.conv2d(images, weights[:, None, :, None], groups=3)
    return images


class Blur:
    """Blurs images on one core, and adds the number of the node."""

    def __init__(self, rounds: int = ROUNDS) -> None:
        self._rounds = rounds

    def __call__(self, batch: Batch) -> Batch:
        import ray

        torch.set_num_threads(1)  # a task has one CPU
        images = blur(torch.from_numpy(batch["image"].astype(np.float32)), self._rounds)
        done = images.round().clamp(0, 255).to(torch.uint8).numpy()
        node = node_number(ray.get_runtime_context().get_node_id())
        return {**batch, "image": done, "node": np.full(len(done), node, np.int64)}


def node_number(node_id: str) -> int:
    """Make a number of a node's id that fits into a tensor."""
    return int(node_id[:12], 16)
