"""Train a model that translates lines of text, with one process or many.

All processes share each batch, so without dropout the result does not depend on their number,
except for rounding. The lines of a batch, and the random numbers of dropout, depend on the seed,
the step and the rank alone. So an interruption does not change the result.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bleu
import catalogues
import corpus
import torch
import vocabulary
from model import Shape, Translator, pad_lines, translate
from ranks import Ranks
from torch.nn import functional
from vocabulary import BEGIN, PAD, Vocabulary

from batchml.runtime import checkpoint, report
from batchml.runtime.device import NoDevice

MODEL = "translate.pt"  # the file that translate.py opens
LINE_EVERY = 50  # steps between two log lines
STOP_CHECK_EVERY = 10  # steps; all ranks check together whether to stop
CHUNK = 50  # batches whose lines are sorted by length together, so that batches have little padding
STOPPED = 143  # exit code: 128 + SIGTERM

Ids = list[int]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn to translate.")
    parser.add_argument(
        "--data", default="", help="folder with train.src and train.tgt, or gettext:LANGUAGE"
    )
    parser.add_argument(
        "--digits", type=int, default=4, help="most digits of the numbers, without --data"
    )
    parser.add_argument("--direction", default=corpus.DIRECTIONS[0], choices=corpus.DIRECTIONS)
    parser.add_argument("--vocabulary", default="words", help="words, or bpe:8000 for 8000 pieces")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="pairs, of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--warmup", type=int, default=200, help="steps until that rate")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--longest", type=int, default=256, help="most pieces of a line")
    parser.add_argument("--smoothing", type=float, default=0.1, help="label smoothing")
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    mistakes = list(_mistakes(options))
    if mistakes:
        parser.error("; ".join(mistakes))
    return options


def _mistakes(options: argparse.Namespace) -> Iterator[str]:
    for name in ("epochs", "batch_size", "warmup", "width", "heads", "layers", "save_every"):
        if getattr(options, name) < 1:
            yield f"--{name.replace('_', '-')} starts at 1"
    if options.seed < 0:
        yield "--seed starts at 0"
    if options.longest < 2:
        yield "--longest starts at 2"
    if options.digits not in range(1, 7):
        yield "--digits is 1 to 6"
    if options.heads > 0 and options.width % (2 * options.heads):
        yield "--width is a multiple of twice --heads"
    if not 0 < options.lr < math.inf:
        yield "--lr is a number greater than 0"
    for name in ("dropout", "smoothing"):
        if not 0 <= getattr(options, name) < 1:
            yield f"--{name} is from 0 to below 1"
    if not re.fullmatch(r"words|bpe:[1-9][0-9]{1,6}", options.vocabulary):
        yield "--vocabulary is words, or bpe: and a number of pieces, such as bpe:8000"


def batches(lengths: Sequence[int], size: int, seed: int) -> list[list[int]]:
    """Return the batches of an epoch, as numbers of lines. A smaller last batch is left out."""
    rng = random.Random(seed)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    order = order[: len(order) - len(order) % size]
    found = []
    for start in range(0, len(order), size * CHUNK):
        chunk = sorted(order[start : start + size * CHUNK], key=lambda number: lengths[number])
        found += [chunk[at : at + size] for at in range(0, len(chunk), size)]
    rng.shuffle(found)
    return found


def learning_rate(step: int, warmup: int) -> float:
    """Return the rate divided by --lr: linear up to 1, then down with the square root of steps."""
    return min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))


class Training:
    def __init__(
        self,
        options: argparse.Namespace,
        ranks: Ranks,
        pairs: corpus.Corpus,
        words: Vocabulary,
    ) -> None:
        self.options, self.ranks, self.words, self.pairs = options, ranks, words, pairs
        self.source = [words.encode(source) for source, _ in pairs.train]
        self.target = [words.encode(target) for _, target in pairs.train]
        self.size = min(options.batch_size, len(self.source))
        self.steps_each = len(self.source) // self.size  # of an epoch
        self.steps = options.epochs * self.steps_each
        self.step = 0  # number of finished steps
        self.should_continue = True
        torch.manual_seed(options.seed)
        shape = Shape(
            len(words), options.width, options.heads, options.layers, options.dropout,
            options.longest,
        )  # fmt: skip
        self.model = Translator(shape).to(ranks.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01
        )

    # --- Checkpoints and the result -------------------------------------------------------------

    def save(self) -> None:
        if self.ranks.rank == 0:
            checkpoint.save(self._write, self.step)

    def _write(self, folder: str) -> None:
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "step": self.step, "words": self.words.to_text(),
        }  # fmt: skip
        torch.save(state, Path(folder, "state.pt"))

    def resume(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.log(f"Resuming after step {self.step} of {self.steps}")

    def save_model(self) -> None:
        """Write the model to the outputs, and to the workspace, where translate.py finds it."""
        content = io.BytesIO()
        weights = {name: value.cpu() for name, value in self.model.state_dict().items()}
        shape = asdict(self.model.shape)
        torch.save({"model": weights, "shape": shape, "words": self.words.to_text()}, content)
        folders = [Path(os.environ.get("BATCHML_OUTPUT_DIR", "."))]
        if os.environ.get("BATCHML_WORKSPACE"):
            folders.append(Path(os.environ["BATCHML_WORKSPACE"], "translate"))
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".{MODEL}.{os.getpid()}"
            temporary.write_bytes(content.getvalue())
            temporary.replace(folder / MODEL)
            self.log(f"The model is {folder / MODEL}")

    # --- Training -------------------------------------------------------------------------------

    def train(self) -> bool:
        """Train to the last step. Return False if the run has to stop, after a checkpoint."""
        parallel = self.ranks.parallel(self.model)
        lost, pieces, since = 0.0, 0, time.perf_counter()
        while self.step < self.steps:
            epoch, first = divmod(self.step, self.steps_each)
            for batch in self._batches(epoch)[first:]:
                loss, count = self._learn(parallel, batch)
                lost, pieces = lost + loss, pieces + count
                self.step += 1
                if self.step % LINE_EVERY == 0 or self.step == self.steps:
                    mean = self.ranks.sum(float(lost))[0] / pieces
                    self._log_step(epoch, mean, pieces / (time.perf_counter() - since))
                    lost, pieces, since = 0.0, 0, time.perf_counter()
                if self.step % self.steps_each == 0:
                    break
                if self.step % self.options.save_every == 0:
                    self.save()
                if self.step % STOP_CHECK_EVERY == 0 and self.ranks.any(self._should_stop()):
                    self.save()
                    return False
            start = time.perf_counter()
            self.validate(epoch)
            self.save()
            if self.step < self.steps and self.ranks.any(self._should_stop()):
                return False
            since += time.perf_counter() - start
        return True

    def _batches(self, epoch: int) -> list[list[int]]:
        lengths = [len(line) for line in self.target]
        return batches(lengths, self.size, (self.options.seed << 20) + epoch)

    def _learn(self, parallel: torch.nn.Module, batch: Sequence[int]) -> tuple[torch.Tensor, int]:
        """Do one step; return the sum of the losses of this rank, and the pieces of all ranks."""
        own = batch[self.ranks.rank :: self.ranks.world]
        source = self._block([self.source[number] for number in own])
        target = self._block([self.target[number] for number in own])
        count = sum(min(len(self.target[number]), self.options.longest) for number in batch)
        shifted = functional.pad(target[:, :-1], (1, 0), value=BEGIN)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * learning_rate(self.step, self.options.warmup)
        # Random numbers depend on the seed, the step and the rank alone.
        torch.manual_seed(hash((self.options.seed, self.step, self.ranks.rank)) % 2**63)
        parallel.train()
        with self.ranks.autocast():
            scores = parallel(source, shifted)
        loss = functional.cross_entropy(
            scores.float().flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum",
            label_smoothing=self.options.smoothing,
        )  # fmt: skip
        self.optimizer.zero_grad()
        # The ranks' gradients are averaged; each piece of the batch counts the same.
        (loss * self.ranks.world / count).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach(), count

    def _block(self, lines: Sequence[Ids]) -> torch.Tensor:
        return pad_lines(lines, self.options.longest).to(self.ranks.device, non_blocking=True)

    # --- Validation and messages ----------------------------------------------------------------

    def validate(self, epoch: int) -> None:
        """Translate the held-out lines and compute the scores. Each rank translates its part."""
        self.model.eval()
        # Lines of a batch wait for the longest one.
        lines = sorted(self.pairs.valid, key=lambda pair: len(pair[0]))
        own = lines[self.ranks.rank :: self.ranks.world]
        counted = [0] * bleu.FIELDS
        for start in range(0, len(own), 64):
            part = own[start : start + 64]
            with self.ranks.autocast():
                source = self._block([self.words.encode(line) for line, _ in part])
                found = translate(self.model, source)
            for ids, (_, wanted) in zip(found, part, strict=True):
                each = bleu.counts(self.words.decode(ids), wanted)
                counted = [a + b for a, b in zip(counted, each, strict=True)]
        total = self.ranks.sum(*counted)
        score, exact = bleu.bleu(total), bleu.exact(total)
        self.log(f"Epoch[{epoch}] Validation bleu={score:.2f} exact={exact:.4f}")
        self._report(bleu=score, exact=exact)

    def _log_step(self, epoch: int, loss: float, speed: float) -> None:
        self.log(f"Epoch[{epoch}] Step[{self.step}] loss={loss:.6f} speed={speed:.0f} pieces/s")
        self._report(loss=loss)

    def _report(self, **values: float) -> None:
        if self.ranks.rank == 0:
            self.should_continue &= report(step=self.step, total=self.steps, **values)

    def _should_stop(self) -> bool:
        return not self.should_continue or checkpoint.should_stop()

    def log(self, line: str) -> None:
        if self.ranks.rank == 0:
            print(line, flush=True)


def read(options: argparse.Namespace) -> corpus.Corpus:
    """Read or make the pairs of lines. Raises BadCorpus."""
    if options.data.startswith(catalogues.PREFIX):
        return catalogues.read(options.data.removeprefix(catalogues.PREFIX))
    if options.data:
        return corpus.read(corpus.find(options.data))
    return corpus.numbers(options.digits, options.direction)


def prepare(options: argparse.Namespace, ranks: Ranks) -> Training:
    """Prepare the training, and resume it from a checkpoint. Raises BadCorpus."""
    pairs = read(options)
    state = newest(ranks)
    if min(options.batch_size, len(pairs.train)) < ranks.world:
        raise corpus.BadCorpus(f"{ranks.world} processes cannot share a batch of fewer pairs")
    if state is not None:
        words = Vocabulary.from_text(state["words"])
    else:
        built = ""
        if ranks.rank == 0:
            lines = (line for pair in pairs.train for line in pair)
            built = vocabulary.build(lines, options.vocabulary).to_text()
        words = Vocabulary.from_text(ranks.broadcast(built))
    training = Training(options, ranks, pairs, words)
    training.log(
        f"{len(pairs.train)} pairs to train on, {len(pairs.valid)} held out, {len(words)} pieces "
        f"in the vocabulary, {training.steps} steps on {ranks.world} processes"
    )
    if state is not None:
        training.resume(state)
    return training


def newest(ranks: Ranks) -> dict[str, Any] | None:
    """Load the newest checkpoint, which rank 0 chooses; None without one."""
    found = checkpoint.newest() if ranks.rank == 0 else None
    path = ranks.broadcast(found.path if found else "")
    if not path:
        return None
    file = Path(path, "state.pt")
    if not file.exists():
        sys.exit(f"train.py: rank {ranks.rank} has no {file}, from which rank 0 continues")
    state: dict[str, Any] = torch.load(file, map_location=ranks.device, weights_only=True)
    return state


def main() -> int:
    options = parse_arguments()
    try:
        ranks = Ranks()
        training = prepare(options, ranks)
    except corpus.BadCorpus as error:
        if ranks.local == 0:  # one message for each node
            print(f"train.py: {error}", file=sys.stderr)
        return 78
    except NoDevice as error:
        return error.report()
    is_done = training.train()
    if is_done and ranks.rank == 0:
        training.save_model()
    ranks.leave()
    return 0 if is_done else STOPPED


if __name__ == "__main__":
    sys.exit(main())
