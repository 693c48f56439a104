"""Train a Llama from nothing, on any number of processes.

    train.py --size tiny|60m|1b|7b [--data FOLDER] [--steps N] [--batch SEQUENCES] ...

`--batch` is the number of sequences of a step, on all processes together. Any number of processes
reads the same data in the same order, so a run may continue with more or fewer processes.
"""

from __future__ import annotations

import argparse
import gc
import io
import math
import os
import signal
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from data import Corpus, Windows
from model import SIZES, Config
from saving import Checkpoints
from sharding import Process, build, clip_gradients, fill, join
from torch import Tensor

from batchml.runtime import report, should_stop
from batchml.runtime.device import BF16, NoDevice
from batchml.runtime.protocol.instance_types import accelerator_of_card

STOPPED = 128 + signal.SIGTERM  # exit code


def folder(text: str) -> str:
    """Expand variables in a path such as `$BATCHML_WORKSPACE/text`, which only a run has.

    Raises ArgumentTypeError for a variable that is not set.
    """
    path = os.path.expandvars(text)
    if "$" in path:
        raise argparse.ArgumentTypeError(f"{path} has a variable that is not set in the run")
    return path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Llama from nothing.")
    add = parser.add_argument
    add("--size", choices=SIZES, default="tiny")
    add("--data", type=folder, help="folder of *.txt or *.bin files; default: a small text")
    add("--sequence", type=int, help="tokens of a sequence; default: that of the size")
    add("--steps", type=int, default=100, help="steps of the whole training")
    add("--until", type=int, help="end after this step; another run may continue")
    add("--batch", type=int, default=32, help="sequences a step, on all processes together")
    add("--micro-batch", type=int, default=8, help="sequences a process computes at a time")
    add("--lr", type=float, default=3e-3, help="the highest learning rate")
    add("--warmup", type=int, default=10, help="steps until that rate")
    add("--clip", type=float, default=1.0, help="the highest norm of gradients")
    add("--save-every", type=int, default=50, help="steps between checkpoints")
    add(
        "--checkpoints",
        type=folder,
        default="",
        help="folder for checkpoints of several runs; default: the run's own folder",
    )
    add("--log-every", type=int, default=10, help="steps between log lines")
    add("--seed", type=int, default=0)
    add("--tensor-parallel", type=int, default=1, help="processes that split each layer")
    add("--recompute", action="store_true", help="compute activations again, to save memory")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    add("--peak", type=float, help="TFLOP/s of one device, for MFU; default: by its name")
    options = parser.parse_args()
    counts = ["steps", "batch", "micro_batch", "save_every", "log_every", "tensor_parallel"]
    low = [name for name in counts if getattr(options, name) < 1]
    if low:
        parser.error(", ".join(f"--{name.replace('_', '-')}" for name in low) + " start at 1")
    if not options.lr > 0 or not options.clip > 0 or options.warmup < 0 or options.seed < 0:
        parser.error("--lr and --clip are greater than 0, --warmup and --seed 0 or more")
    return options


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Return the rate of a step: linear up to --lr, then along a cosine to a tenth of it."""
    if step < options.warmup:
        return float(options.lr * (step + 1) / options.warmup)
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return float(options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))))


def choose_dtype(asked: str, precision: str) -> torch.dtype:
    if asked == "auto":
        return torch.bfloat16 if precision == BF16 else torch.float32
    return torch.bfloat16 if asked == "bfloat16" else torch.float32


def peak_flops(options: argparse.Namespace, device: torch.device) -> float:
    """Return FLOP/s of one device for dense 16-bit matrices, 0 if unknown."""
    if options.peak:
        return float(options.peak) * 1e12
    if device.type != "cuda":
        return 0.0
    about = torch.cuda.get_device_properties(device)
    card = accelerator_of_card(about.name, about.total_memory / 2**30)
    return (card.bf16_tflops or card.fp16_tflops or 0.0) * 1e12 if card else 0.0


class Speed:
    """Measures tokens per second, and MFU: the fraction of the devices' peak that is used."""

    def __init__(self, config: Config, tokens: int, peak: float) -> None:
        self._flops, self._tokens, self._peak = config.flops_per_token(), tokens, peak
        self._since, self._steps = time.perf_counter(), 0

    def measure(self, step: int) -> dict[str, float]:
        now = time.perf_counter()
        speed = (step - self._steps) * self._tokens / (now - self._since)
        self._since, self._steps = now, step
        found = {"tokens_per_second": speed}
        if self._peak:
            found["mfu"] = speed * self._flops / self._peak
        return found

    def start(self, step: int) -> None:
        self._since, self._steps = time.perf_counter(), step


class Diverged(Exception):
    """The loss is no longer a number. Earlier checkpoints remain."""


class Training:
    """A training. Raises ValueError for a batch, tensor groups or a text that do not fit."""

    def __init__(self, options: argparse.Namespace, process: Process) -> None:
        self.options, self.process = options, process
        sequence = options.sequence or SIZES[options.size].sequence
        self.config = replace(SIZES[options.size], sequence=sequence, recompute=options.recompute)
        self.share, rest = divmod(options.batch, process.readers)
        if rest or not self.share:
            raise ValueError(
                f"--batch {options.batch} is not a multiple of {process.readers} processes."
            )
        corpus = Corpus(options.data)
        if corpus.vocabulary > 256 and self.config.vocabulary < 32_000:
            raise ValueError(f"--size {options.size} supports only bytes: give a folder of *.txt.")
        self.windows = Windows(corpus, sequence, options.seed)
        self.dtype = choose_dtype(options.dtype, process.precision)
        self.model = build(self.config, process, self.dtype)
        self.optimizer = self._optimizer()
        self.checkpoints = Checkpoints(self.model, self.optimizer, options.checkpoints)
        self.step, self.position = self.checkpoints.load()
        if self.step:
            self._log(f"Resuming after step {self.step}")
        else:
            fill(self.model, options.seed, process.device)
        self.stopping = False

    def _optimizer(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.options.lr, betas=(0.9, 0.95))

    def stop(self, *_signal: object) -> None:
        self.stopping = True

    def train(self) -> bool:
        """Train to the end. Return False if the run has to stop before. Raises Diverged."""
        peak = peak_flops(self.options, self.process.device) * self.process.world
        speed = Speed(self.config, self.options.batch * self.config.sequence, peak)
        speed.start(self.step)
        end = min(self.options.steps, self.options.until or self.options.steps)
        while self.step < end:
            rate = learning_rate(self.step, self.options)
            loss, norm = self._one_step(rate)
            self.step += 1
            self.position += self.options.batch
            mean, stopping = self._agree(loss)
            if not math.isfinite(mean) or not math.isfinite(norm):
                raise Diverged(
                    f"step {self.step} has a loss of {mean} and a gradient of {float(norm)}:"
                    " choose a lower --lr."
                )
            is_last = self.step == end
            if self.step % self.options.log_every == 0 or is_last or stopping:
                self._log_step(mean, float(norm), rate, speed.measure(self.step))
            if self.step % self.options.save_every == 0 or is_last or stopping:
                self._save()
                speed.start(self.step)
            if stopping and not is_last:
                return False
        return True

    def _one_step(self, rate: float) -> tuple[Tensor, Tensor]:
        """Do one step; return the mean loss of this process's share, and the norm of gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        size = min(self.options.micro_batch, self.share)
        first = self.position + self.process.reader * self.share
        total = torch.zeros((), device=self.process.device)
        for start in range(0, self.share, size):
            count = min(size, self.share - start)
            tokens, wanted = self.windows.batch(first + start, count)
            device = self.process.device
            loss = self.model(tokens.to(device), wanted.to(device)) * (count / self.share)
            # Gradients are reduced after each micro-batch: otherwise each process would keep all of
            # them, and not only its share.
            loss.backward()
            total += loss.detach()
        norm = clip_gradients(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        return total, norm

    def _agree(self, loss: Tensor) -> tuple[float, bool]:
        """Return the mean loss of all processes, and whether they stop, as any of them has to."""
        stopping = float(self.stopping or should_stop())
        sums = torch.stack([loss, torch.tensor(stopping, device=loss.device)])
        dist.all_reduce(sums)
        return float(sums[0]) / self.process.world, float(sums[1]) > 0

    def _log_step(self, loss: float, norm: float, rate: float, speed: dict[str, float]) -> None:
        used = f" | MFU: {speed['mfu']:.1%}" if "mfu" in speed else ""
        self._log(
            f"Step {self.step}/{self.options.steps} | Loss: {loss:.4f} | Norm: {norm:.3f}"
            f" | LR: {rate:.2e} | {speed['tokens_per_second']:.0f} tokens/s{used}"
        )
        if self.process.rank == 0:
            report(step=self.step, total=self.options.steps, loss=loss, **speed)

    def _save(self) -> None:
        if self.checkpoints.save(self.step, self.position):
            self._log(f"Step {self.step} | Checkpoint saved")

    def _log(self, words: str) -> None:
        if self.process.rank == 0:
            print(words)

    def describe(self) -> None:
        millions = self.config.parameters() / 1e6
        mesh = f"{self.process.readers} x {self.options.tensor_parallel}"
        self._log(
            f"Llama {self.options.size}: {millions:.1f} M weights on {mesh} processes"
            f" (data x tensor), {str(self.dtype)[6:]}"
        )


def run(options: argparse.Namespace) -> int:
    torch.manual_seed(options.seed)
    try:
        process = join(options.tensor_parallel, bf16=options.dtype != "float32")
        training = Training(options, process)
        signal.signal(signal.SIGTERM, training.stop)
        training.describe()
        return 0 if training.train() else STOPPED
    except NoDevice as error:
        return error.report()
    except (ValueError, Diverged) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"train.py: {error}", file=sys.stderr)
        return 1 if isinstance(error, Diverged) else 2


def main() -> int:
    assert isinstance(sys.stdout, io.TextIOWrapper)
    # Write each line at once and in one piece: other processes write to the same stream.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    options = parse_arguments()
    try:
        return run(options)
    finally:
        if dist.is_initialized():
            # A model that FSDP shards is part of reference cycles and holds the process groups. If
            # a group lives until Python ends, the process may abort there (torch 2.13, gloo).
            gc.collect()
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
