"""Train a Llama from nothing, on any number of processes.

    train.py --size tiny|60m|1b|7b [--data FOLDER] [--steps N] [--batch SEQUENCES] ...

`--batch` is what one step takes, on all processes together: the same data in the same order,
however many there are. So a run that goes on with more or fewer goes on with the same training.
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
from saving import Saved
from sharding import Place, build, clip_gradients, fill, join
from torch import Tensor

from batchml.runtime import report, should_stop

STOPPED = 128 + signal.SIGTERM

# Products of two bf16 matrices, without sparsity, by the makers' data sheets. TFLOP/s.
PEAKS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "A10G": 70, "T4": 65}


def where(text: str) -> str:
    """A folder of this machine: `$BATCHML_WORKSPACE/text` is known here, and not where one submits.

    Raises ArgumentTypeError for a variable that is not set.
    """
    found = os.path.expandvars(text)
    if "$" in found:
        raise argparse.ArgumentTypeError(f"{found} names a variable that is not set here")
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Llama from nothing.")
    add = parser.add_argument
    add("--size", choices=SIZES, default="tiny")
    add("--data", type=where, help="a folder of *.txt, or of *.bin; else a small text of ours")
    add("--sequence", type=int, help="tokens trained at a time, instead of the size's own")
    add("--steps", type=int, default=100, help="of the whole training")
    add("--until", type=int, help="end after this step; another run may go on")
    add("--batch", type=int, default=32, help="sequences a step, on all processes together")
    add("--micro-batch", type=int, default=8, help="sequences a process computes at a time")
    add("--lr", type=float, default=3e-3, help="the highest learning rate")
    add("--warmup", type=int, default=10, help="steps until it is reached")
    add("--clip", type=float, default=1.0, help="the greatest norm of the gradients")
    add("--save-every", type=int, default=50, help="steps from one checkpoint to the next")
    add(
        "--checkpoints",
        type=where,
        default="",
        help="their folder, for several runs; else the run's own",
    )
    add("--log-every", type=int, default=10, help="steps from one line to the next")
    add("--seed", type=int, default=0)
    add("--tensor-parallel", type=int, default=1, help="processes that split each layer")
    add("--recompute", action="store_true", help="activations again in the backward pass")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    add("--peak", type=float, help="TFLOP/s of one device, where it is none that is known here")
    options = parser.parse_args()
    counts = ["steps", "batch", "micro_batch", "save_every", "log_every", "tensor_parallel"]
    low = [name for name in counts if getattr(options, name) < 1]
    if low:
        parser.error(", ".join(f"--{name.replace('_', '-')}" for name in low) + " start at 1")
    if not options.lr > 0 or not options.clip > 0 or options.warmup < 0 or options.seed < 0:
        parser.error("--lr and --clip are greater than 0, --warmup and --seed 0 or more")
    return options


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Of the step with this index: up in a line, then down along a cosine to a tenth."""
    if step < options.warmup:
        return float(options.lr * (step + 1) / options.warmup)
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return float(options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))))


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    if asked == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if asked == "bfloat16" else torch.float32


def peak_flops(options: argparse.Namespace, device: torch.device) -> float:
    """FLOP/s of one device, 0 where nobody says."""
    if options.peak:
        return float(options.peak) * 1e12
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak * 1e12 for part, peak in PEAKS.items() if part in name), 0.0)


class Speed:
    """Tokens a second and the share of the machine's peak that is used, since the last look."""

    def __init__(self, config: Config, tokens: int, peak: float) -> None:
        self._flops, self._tokens, self._peak = config.flops_per_token(), tokens, peak
        self._since, self._steps = time.perf_counter(), 0

    def look(self, step: int) -> dict[str, float]:
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
    """The loss is no number any more: what was saved before stands."""


class Training:
    """Raises ValueError for what cannot be trained: the batch, the tensor groups or the text."""

    def __init__(self, options: argparse.Namespace, place: Place) -> None:
        self.options, self.place = options, place
        sequence = options.sequence or SIZES[options.size].sequence
        self.config = replace(SIZES[options.size], sequence=sequence, recompute=options.recompute)
        self.share, rest = divmod(options.batch, place.readers)
        if rest or not self.share:
            raise ValueError(
                f"--batch {options.batch} does not divide by {place.readers} processes."
            )
        corpus = Corpus(options.data)
        if corpus.vocabulary > 256 and self.config.vocabulary < 32_000:
            raise ValueError(f"--size {options.size} knows bytes alone: give it a folder of *.txt.")
        self.windows = Windows(corpus, sequence, options.seed)
        self.dtype = choose_dtype(options.dtype, place.device)
        self.model = build(self.config, place, self.dtype)
        self.optimizer = self._optimizer()
        self.saved = Saved(self.model, self.optimizer, options.checkpoints)
        self.step, self.position = self.saved.load()
        if self.step:
            self._say(f"Resuming after step {self.step}")
        else:
            fill(self.model, options.seed, place.device)
        self.stopping = False

    def _optimizer(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.options.lr, betas=(0.9, 0.95))

    def stop(self, *_signal: object) -> None:
        self.stopping = True

    def train(self) -> bool:
        """Go on to the end. False when it was asked to stop before. Raises Diverged."""
        peak = peak_flops(self.options, self.place.device) * self.place.world
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
                self._tell(mean, float(norm), rate, speed.look(self.step))
            if self.step % self.options.save_every == 0 or is_last or stopping:
                self._save()
                speed.start(self.step)
            if stopping and not is_last:
                return False
        return True

    def _one_step(self, rate: float) -> tuple[Tensor, Tensor]:
        """The mean loss of this process's share, and the norm of the gradients of all."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        size = min(self.options.micro_batch, self.share)
        first = self.position + self.place.reader * self.share
        total = torch.zeros((), device=self.place.device)
        for start in range(0, self.share, size):
            count = min(size, self.share - start)
            tokens, wanted = self.windows.batch(first + start, count)
            device = self.place.device
            loss = self.model(tokens.to(device), wanted.to(device)) * (count / self.share)
            # Gradients travel after each piece: kept until the last, they would be kept whole.
            loss.backward()
            total += loss.detach()
        norm = clip_gradients(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        return total, norm

    def _agree(self, loss: Tensor) -> tuple[float, bool]:
        """The mean loss of all, and whether all stop now: as soon as one was asked to."""
        stopping = float(self.stopping or should_stop())
        said = torch.stack([loss, torch.tensor(stopping, device=loss.device)])
        dist.all_reduce(said)
        return float(said[0]) / self.place.world, float(said[1]) > 0

    def _tell(self, loss: float, norm: float, rate: float, speed: dict[str, float]) -> None:
        used = f" | MFU: {speed['mfu']:.1%}" if "mfu" in speed else ""
        self._say(
            f"Step {self.step}/{self.options.steps} | Loss: {loss:.4f} | Norm: {norm:.3f}"
            f" | LR: {rate:.2e} | {speed['tokens_per_second']:.0f} tokens/s{used}"
        )
        if self.place.rank == 0:
            report(step=self.step, total=self.options.steps, loss=loss, **speed)

    def _save(self) -> None:
        if self.saved.save(self.step, self.position):
            self._say(f"Step {self.step} | Checkpoint saved")

    def _say(self, words: str) -> None:
        if self.place.rank == 0:
            print(words)

    def describe(self) -> None:
        millions = self.config.parameters() / 1e6
        mesh = f"{self.place.readers} x {self.options.tensor_parallel}"
        self._say(
            f"Llama {self.options.size}: {millions:.1f} M weights on {mesh} processes"
            f" (data x tensor), {self.place.device.type}, {str(self.dtype)[6:]}"
        )


def run(options: argparse.Namespace) -> int:
    torch.manual_seed(options.seed)
    try:
        training = Training(options, join(options.tensor_parallel))
        signal.signal(signal.SIGTERM, training.stop)
        training.describe()
        return 0 if training.train() else STOPPED
    except (ValueError, Diverged) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"train.py: {error}", file=sys.stderr)
        return 1 if isinstance(error, Diverged) else 2


def main() -> int:
    assert isinstance(sys.stdout, io.TextIOWrapper)
    # Each line is seen as soon as it is written, and in one piece: others write there as well.
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
