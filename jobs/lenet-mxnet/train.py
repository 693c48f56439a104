"""Train LeNet on MNIST with MXNet, with the symbol and Module API of the original example.

It prints MXNet's classic lines, and writes mnist-symbol.json and mnist-NNNN.params to
$BATCHML_OUTPUT_DIR. With $BATCHML_CHECKPOINT_DIR it continues after an interruption. It trains on a
GPU where there is one for which MXNet has code.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path

import numpy as np

from batchml.runtime import device, mnist, report
from batchml.runtime.storage.files import write_json

# MXNet reads these variables when it is imported.
FOUND = device.choose_mxnet(os.environ, device.is_mxnet_for_cuda())
if FOUND.gpu:
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as NVML counts
    # Equal seeds give equal results: no algorithm is chosen by its time.
    os.environ.setdefault("MXNET_ENFORCE_DETERMINISM", "1")
    os.environ.setdefault("MXNET_CUDNN_AUTOTUNE_DEFAULT", "0")
else:
    # One operation after the other: on a CPU it is faster for a network this small.
    os.environ.setdefault("MXNET_ENGINE_TYPE", "NaiveEngine")
try:
    import mxnet as mx
except OSError as error:
    sys.exit(device.why_mxnet_fails(error))

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


def build_lenet() -> mx.sym.Symbol:
    layer = mx.sym.var("data")
    for filters in (20, 50):
        layer = mx.sym.Convolution(layer, kernel=(5, 5), num_filter=filters)
        layer = mx.sym.Activation(layer, act_type="tanh")
        layer = mx.sym.Pooling(layer, pool_type="max", kernel=(2, 2), stride=(2, 2))
    layer = mx.sym.FullyConnected(mx.sym.flatten(layer), num_hidden=500)
    layer = mx.sym.Activation(layer, act_type="tanh")
    layer = mx.sym.FullyConnected(layer, num_hidden=mnist.CLASSES)
    # "batch" divides the gradient by the size of each batch, of which the last may be smaller.
    return mx.sym.SoftmaxOutput(layer, name="softmax", normalization="batch")


def to_arrays(split: mnist.Split, context: mx.Context) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    """Make arrays of all images (N, 1, 28, 28), from 0 to 1, and labels (N), on the device."""
    images = np.frombuffer(split.images, np.uint8).reshape(-1, 1, mnist.SIDE, mnist.SIDE)
    labels = np.frombuffer(split.labels, np.uint8)
    return mx.nd.array(images, context) / 255, mx.nd.array(labels, context)


def batch_of(arrays: tuple[mx.nd.NDArray, mx.nd.NDArray], start: int, size: int) -> mx.io.DataBatch:
    images, labels = arrays
    return mx.io.DataBatch([images[start : start + size]], [labels[start : start + size]])


def right_answers(module: mx.mod.Module, batch: mx.io.DataBatch) -> mx.nd.NDArray:
    return (module.get_outputs()[0].argmax(axis=1) == batch.label[0]).sum()


def accuracy(module: mx.mod.Module, arrays: tuple[mx.nd.NDArray, mx.nd.NDArray]) -> float:
    count = len(arrays[1])
    right = 0
    for start in range(0, count, 1000):
        batch = batch_of(arrays, start, 1000)
        module.forward(batch, is_train=False)
        right += int(right_answers(module, batch).asscalar())
    return right / count


@dataclass
class Progress:
    """The progress of the training. Progress and seed determine which images come next."""

    epoch: int = 0
    seen: int = 0  # images of this epoch that were trained on
    right: int = 0  # of these, images that the model classified correctly at that time


class Training:
    def __init__(self, options: argparse.Namespace, context: mx.Context) -> None:
        mx.random.seed(options.seed)
        self.options, self.context = options, context
        self.progress, self.stopping = Progress(), False
        size = options.batch_size
        self.module = mx.mod.Module(build_lenet(), context=context)
        self.module.bind(
            [("data", (size, 1, mnist.SIDE, mnist.SIDE))], [("softmax_label", (size,))]
        )
        self.module.init_params(mx.init.Xavier())
        settings = {"learning_rate": options.lr, "momentum": 0.9, "wd": 1e-4, "rescale_grad": 1.0}
        self.module.init_optimizer(kvstore=None, optimizer="sgd", optimizer_params=settings)

    def stop(self, *_signal: object) -> None:
        self.stopping = True

    def save(self, folder: Path) -> None:
        """Write a set of files, then the JSON file that names the set: it is always complete."""
        name = f"lenet-{self.progress.epoch}-{self.progress.seen}"
        self.module.save_params(str(folder / f"{name}.params"))
        self.module.save_optimizer_states(str(folder / f"{name}.states"))
        write_json(str(folder / "lenet.json"), {"name": name, "progress": asdict(self.progress)})
        for old in set(folder.glob("lenet-*")) - set(folder.glob(f"{name}.*")):
            old.unlink()

    def resume(self, folder: Path) -> None:
        state = json.loads((folder / "lenet.json").read_text())
        self.module.load_params(str(folder / f"{state['name']}.params"))
        self.module.load_optimizer_states(str(folder / f"{state['name']}.states"))
        self.progress = Progress(**state["progress"])
        print(f"Resuming in epoch {self.progress.epoch} after {self.progress.seen} images")

    def step(self, batch: mx.io.DataBatch) -> mx.nd.NDArray:
        self.module.forward(batch, is_train=True)
        self.module.backward()
        self.module.update()
        return right_answers(self.module, batch)

    def report_progress(self, count: int) -> None:
        """Report the progress, and stop if batchml says so: a sweep may end a bad trial early.

        Metrics need no report: batchml reads them from the log lines.
        """
        now = self.progress
        if not report(step=now.epoch * count + now.seen, total=self.options.epochs * count):
            self.stopping = True

    def train_epoch(self, arrays: tuple[mx.nd.NDArray, mx.nd.NDArray]) -> None:
        """Train the rest of the epoch. Its order depends on the seed and the epoch alone."""
        now, size, count = self.progress, self.options.batch_size, len(arrays[1])
        order = np.random.RandomState([self.options.seed, now.epoch]).permutation(count)
        order = mx.nd.array(order, self.context)
        images, labels = (mx.nd.take(array, order) for array in arrays)
        seen, right = now.seen, mx.nd.array([now.right], self.context)
        since = time.perf_counter()
        while seen < count and not self.stopping:
            right += self.step(batch_of((images, labels), seen, size))
            seen = min(seen + size, count)
            if seen % (size * LINE_EVERY) == 0:
                new, hits = seen - now.seen, int(right.asscalar()) - now.right
                speed = new / (time.perf_counter() - since)
                print(
                    f"Epoch[{now.epoch}] Batch [{seen // size}]\tSpeed: {speed:.2f} samples/sec"
                    f"\tTrain-accuracy={hits / new:.6f}"
                )
                now.seen, now.right, since = seen, now.right + hits, time.perf_counter()
                self.report_progress(count)
        now.seen, now.right = seen, int(right.asscalar())


def save_model(module: mx.mod.Module, epochs: int, output: Path) -> None:
    """Write the model so that only complete files appear in `output`."""
    with tempfile.TemporaryDirectory(dir=output) as folder:
        module.save_checkpoint(f"{folder}/mnist", epochs)
        for file in Path(folder).iterdir():
            file.replace(output / file.name)


def run(options: argparse.Namespace, digits: mnist.Digits) -> int:
    context = device.confirm_mxnet(mx, FOUND)
    train, validation = (to_arrays(split, context) for split in (digits.train, digits.validation))
    training = Training(options, context)
    signal.signal(signal.SIGTERM, training.stop)

    def validate(epoch: int) -> None:
        print(f"Epoch[{epoch}] Validation-accuracy={accuracy(training.module, validation):.6f}")

    folder = os.environ.get("BATCHML_CHECKPOINT_DIR")
    if folder and Path(folder, "lenet.json").exists():
        training.resume(Path(folder))
        if training.progress.epoch >= options.epochs:  # stopped after the last epoch
            validate(training.progress.epoch - 1)
    while training.progress.epoch < options.epochs:
        now, start = training.progress, time.perf_counter()
        training.train_epoch(train)
        if now.seen == digits.train.size:
            print(f"Epoch[{now.epoch}] Train-accuracy={now.right / now.seen:.6f}")
            print(f"Epoch[{now.epoch}] Time cost={time.perf_counter() - start:.3f}")
            validate(now.epoch)
            training.progress = Progress(now.epoch + 1)
        if folder:
            training.save(Path(folder))
        training.report_progress(digits.train.size)
        if training.stopping and training.progress.epoch < options.epochs:
            return 128 + signal.SIGTERM
    save_model(training.module, options.epochs, Path(os.environ.get("BATCHML_OUTPUT_DIR", ".")))
    return 0


def main() -> int:
    assert isinstance(sys.stdout, TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # show each line at once
    options = parse_arguments()
    try:
        return run(options, mnist.load())
    except mnist.NoDigits as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
