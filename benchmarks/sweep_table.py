"""Make `sweep_table.csv`: small networks on MNIST, every point of a grid trained once.

So a search can be measured on real trainings without training: their validation errors after 1,
3, 9 and 27 epochs. Needs NumPy and the four files of MNIST; takes half an hour of one core.

    python -m benchmarks.sweep_table FOLDER_OF_MNIST
"""

import csv
import gzip
import sys
from itertools import product
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".csv")
EPOCHS = (1, 3, 9, 27)
TRAIN, VALID = 10_000, 5_000  # images

LR = tuple(10 ** (-3 + level / 2) for level in range(8))
MOMENTUM = (0.0, 0.5, 0.9)
L2 = (0.0, 1e-4, 1e-3)
DROPOUT = (0.0, 0.25)
WIDTH = (16, 32, 64, 128)
BATCH = (32, 128, 512)
LEVELS = (LR, MOMENTUM, L2, DROPOUT, WIDTH, BATCH)


def main(folder: Path) -> None:
    import numpy as np  # type: ignore[import-not-found,unused-ignore]

    images = _read(folder / "train-images-idx3-ubyte.gz", 16).reshape(-1, 14, 2, 14, 2)
    pixels = (images[: TRAIN + VALID].mean(axis=(2, 4)).reshape(-1, 196) / 255).astype("float32")
    labels = _read(folder / "train-labels-idx1-ubyte.gz", 8)[: TRAIN + VALID]
    with FILE.open("a", newline="") as file:
        done = sum(1 for _ in FILE.open())
        writer = csv.writer(file, lineterminator="\n")
        for number, point in enumerate(product(*LEVELS)):
            if number < done:
                continue
            with np.errstate(all="ignore"):
                errors = _train(np, pixels, labels, point, number)
            writer.writerow(f"{error:.4g}" for error in errors)
            file.flush()


def _read(path: Path, header: int) -> Any:
    import numpy as np  # type: ignore[import-not-found,unused-ignore]

    return np.frombuffer(gzip.decompress(path.read_bytes()), dtype=np.uint8, offset=header)


def _train(np: Any, pixels: Any, labels: Any, point: tuple[float, ...], seed: int) -> list[float]:
    """The validation errors after each of EPOCHS; one hidden layer of ReLUs, plain momentum."""
    lr, momentum, l2, dropout, width, batch = point
    width, batch = int(width), int(batch)
    random = np.random.default_rng(seed)
    shapes = ((196, width), (width,), (width, 10), (10,))
    weights = [
        random.normal(0, (2 / shape[0]) ** 0.5, shape).astype("float32")
        if len(shape) == 2
        else np.zeros(shape, "float32")
        for shape in shapes
    ]
    moves = [np.zeros_like(weight) for weight in weights]
    errors = []
    for epoch in range(1, EPOCHS[-1] + 1):
        order = random.permutation(TRAIN)
        for start in range(0, TRAIN, batch):
            rows = order[start : start + batch]
            x, count = pixels[rows], len(rows)
            hidden = np.maximum(x @ weights[0] + weights[1], 0)
            if dropout:
                kept = random.random(hidden.shape, dtype="float32") >= dropout
                hidden = hidden * kept / np.float32(1 - dropout)
            out = hidden @ weights[2] + weights[3]
            # Clipped: numbers too small to be normal ones make a step a hundred times slower.
            out = np.exp(np.maximum(out - out.max(axis=1, keepdims=True), np.float32(-30)))
            out /= out.sum(axis=1, keepdims=True)
            out[np.arange(count), labels[rows]] -= 1
            out /= count
            back = (out @ weights[2].T) * (hidden > 0)
            slopes = (x.T @ back, back.sum(axis=0), hidden.T @ out, out.sum(axis=0))
            for weight, move, slope in zip(weights, moves, slopes, strict=True):
                move *= np.float32(momentum)
                move += slope + np.float32(l2) * weight
                weight -= np.float32(lr) * move
                if start // batch % 64 == 0:
                    move[np.abs(move) < 1e-15] = 0
        if epoch in EPOCHS:
            hidden = np.maximum(pixels[TRAIN:] @ weights[0] + weights[1], 0)
            guess = (hidden @ weights[2] + weights[3]).argmax(axis=1)
            errors.append(float((guess != labels[TRAIN:]).mean()))
    return errors


if __name__ == "__main__":
    main(Path(sys.argv[1]))
