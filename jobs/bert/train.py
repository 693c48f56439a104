"""Fine-tune BERT to classify whether two sentences mean the same, with one process or many.

Every rank computes its part of each batch. The order of the pairs, and the random numbers of
dropout, depend on the seed and the step alone. So an interruption does not change the result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import download
import model as bert
import pairs as mrpc
import torch
from ranks import Ranks
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from batchml.runtime import checkpoint, report
from batchml.runtime.device import NoDevice

LINE_EVERY = 20  # steps between two log lines
STOP_CHECK_EVERY = 5  # steps; all ranks check together whether to stop
STOPPED = 143  # exit code: 128 + SIGTERM
MADE_UP = "made-up"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune BERT on pairs of sentences.")
    parser.add_argument("--data", default="mrpc", help=f"mrpc, {MADE_UP}, or a folder with files")
    parser.add_argument("--model", default=bert.BASE, help=f"{bert.BASE}, {bert.TINY}, or a folder")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="pairs, of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-5, help="the highest learning rate")
    parser.add_argument(
        "--warmup", type=float, default=0.1, help="fraction of the steps until that rate"
    )
    parser.add_argument("--longest", type=int, default=128, help="most pieces of a pair")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    mistakes = list(_mistakes(options))
    if mistakes:
        parser.error("; ".join(mistakes))
    return options


def _mistakes(options: argparse.Namespace) -> Iterator[str]:
    for name in ("epochs", "batch_size", "save_every"):
        if getattr(options, name) < 1:
            yield f"--{name.replace('_', '-')} starts at 1"
    if not 8 <= options.longest <= 512:
        yield "--longest is 8 to 512"
    if options.seed < 0:
        yield "--seed starts at 0"
    if not 0 < options.lr < math.inf:
        yield "--lr is a number greater than 0"
    if not 0 <= options.warmup < 1:
        yield "--warmup is from 0 to below 1"


class Training:
    def __init__(
        self,
        options: argparse.Namespace,
        ranks: Ranks,
        pieces: dict[str, int],
        train: list[mrpc.Pair],
        test: list[mrpc.Pair],
    ) -> None:
        self.options, self.ranks, self.pieces = options, ranks, pieces
        self.train_pairs = bert.encode(train, pieces, options.longest)
        self.test_pairs = bert.encode(test, pieces, options.longest)
        self.size = min(options.batch_size, len(train))
        self.steps_each = len(train) // self.size  # a smaller last batch is left out
        self.steps = options.epochs * self.steps_each
        self.step = 0  # number of finished steps
        self.should_continue = True
        self.scores = {"accuracy": 0.0, "f1": 0.0}
        torch.manual_seed(options.seed)
        self.model = bert.build(options.model, len(pieces), options.longest).to(ranks.device)
        self.optimizer = torch.optim.AdamW(_groups(self.model), lr=options.lr)

    # --- Checkpoints and the result -------------------------------------------------------------

    def save(self) -> None:
        if self.ranks.rank == 0:
            checkpoint.save(self._write, self.step)

    def _write(self, folder: str) -> None:
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "step": self.step, "pieces": self.pieces, "scores": self.scores,
        }  # fmt: skip
        torch.save(state, Path(folder, "state.pt"))

    def resume(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.scores = state["step"], state["scores"]
        self.log(f"Resuming after step {self.step} of {self.steps}")

    def save_model(self) -> None:
        """Write the model as a folder that transformers can open, with its scores."""
        folder = Path(os.environ.get("BATCHML_OUTPUT_DIR", "."), "model")
        self.model.save_pretrained(folder)
        bert.tokenizer(self.pieces).save_pretrained(folder)
        (folder / "scores.json").write_text(json.dumps(self.scores) + "\n", "utf-8")

    # --- Training -------------------------------------------------------------------------------

    def train(self) -> bool:
        """Train to the last step. Return False if the run has to stop, after a checkpoint."""
        parallel = self.ranks.parallel(self.model)
        lost, since = torch.zeros((), device=self.ranks.device), (self.step, time.perf_counter())
        while self.step < self.steps:
            epoch, first = divmod(self.step, self.steps_each)
            for batch in self._batches(epoch)[first:]:
                lost += self._learn(parallel, batch)
                self.step += 1
                if self.step % LINE_EVERY == 0 or self.step == self.steps:
                    steps, seconds = self.step - since[0], time.perf_counter() - since[1]
                    mean = self.ranks.sum(float(lost))[0] / (steps * self.size)
                    self._log_step(epoch, mean, steps * self.size / seconds)
                    lost.zero_()
                    since = (self.step, time.perf_counter())
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
            since = (since[0], since[1] + time.perf_counter() - start)
        return True

    def _batches(self, epoch: int) -> list[list[int]]:
        dice = torch.Generator().manual_seed((self.options.seed << 20) + epoch)
        order = torch.randperm(len(self.train_pairs), generator=dice).tolist()
        every = range(0, self.steps_each * self.size, self.size)
        return [order[start : start + self.size] for start in every]

    def _learn(self, parallel: torch.nn.Module, batch: Sequence[int]) -> torch.Tensor:
        """Do one step; return the sum of the losses of this rank's pairs."""
        own = [self.train_pairs[at] for at in batch[self.ranks.rank :: self.ranks.world]]
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * self._rate()
        # Random numbers depend on the seed, the step and the rank alone.
        torch.manual_seed(hash((self.options.seed, self.step, self.ranks.rank)) % 2**63)
        parallel.train()
        labels = torch.tensor([pair.label for pair in own], device=self.ranks.device)
        loss = functional.cross_entropy(self._scores(parallel, own), labels, reduction="sum")
        self.optimizer.zero_grad()
        # The ranks' gradients are averaged; each pair of the batch counts the same.
        (loss * self.ranks.world / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def _rate(self) -> float:
        """Return the learning rate divided by --lr: it rises linearly to 1, then falls to 0."""
        up = max(1.0, self.options.warmup * self.steps)
        return min((self.step + 1) / up, (self.steps - self.step) / max(1.0, self.steps - up))

    def _scores(self, network: torch.nn.Module, own: Sequence[bert.Encoded]) -> torch.Tensor:
        ids = pad_sequence([torch.tensor(pair.pieces) for pair in own], batch_first=True)
        sides = pad_sequence([torch.tensor(pair.sides) for pair in own], batch_first=True)
        lengths = torch.tensor([len(pair.pieces) for pair in own])
        is_there = torch.arange(ids.shape[1])[None, :] < lengths[:, None]
        blocks = {"input_ids": ids, "token_type_ids": sides, "attention_mask": is_there.long()}
        on_device = {name: block.to(self.ranks.device) for name, block in blocks.items()}
        with self.ranks.autocast():
            return network(**on_device).logits.float()

    # --- Validation and messages ----------------------------------------------------------------

    @torch.no_grad()
    def validate(self, epoch: int) -> None:
        """Compute the scores of the test pairs. Each rank classifies its part."""
        self.model.eval()
        own = self.test_pairs[self.ranks.rank :: self.ranks.world]
        counted = [0] * 4  # pairs by 2 * label + prediction
        for start in range(0, len(own), 64):
            part = own[start : start + 64]
            found = self._scores(self.model, part).argmax(-1).tolist()
            for pair, is_same in zip(part, found, strict=True):
                counted[2 * pair.label + is_same] += 1
        self.scores = scores(*self.ranks.sum(*counted))
        text = " ".join(f"{name}={value:.4f}" for name, value in self.scores.items())
        self.log(f"Epoch[{epoch}] Validation {text}")
        self._report(**self.scores)

    def _log_step(self, epoch: int, loss: float, speed: float) -> None:
        self.log(f"Epoch[{epoch}] Step[{self.step}] loss={loss:.6f} speed={speed:.1f} pairs/s")
        self._report(loss=loss)

    def _report(self, **values: float) -> None:
        if self.ranks.rank == 0:
            self.should_continue &= report(step=self.step, total=self.steps, **values)

    def _should_stop(self) -> bool:
        return not self.should_continue or checkpoint.should_stop()

    def log(self, line: str) -> None:
        if self.ranks.rank == 0:
            print(line, flush=True)


def scores(true_no: float, false_yes: float, false_no: float, true_yes: float) -> dict[str, float]:
    """Compute accuracy, and F1 of "they mean the same", which are the usual scores of MRPC."""
    count = true_no + false_yes + false_no + true_yes
    denominator = 2 * true_yes + false_yes + false_no
    return {
        "accuracy": (true_no + true_yes) / count,
        "f1": 2 * true_yes / denominator if denominator else 0.0,
    }


def _groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Weight decay is for matrices, not for biases and normalisation."""
    parameters = list(model.parameters())
    matrices = [each for each in parameters if each.ndim > 1]
    others = [each for each in parameters if each.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]


def read(options: argparse.Namespace, ranks: Ranks) -> tuple[list[mrpc.Pair], list[mrpc.Pair]]:
    """The pairs to train on, and those to judge by. Raises BadPairs and DownloadFailed."""
    if options.data == MADE_UP:
        return mrpc.made_up(1000, seed=1), mrpc.made_up(200, seed=2)
    if options.data == "mrpc":
        folder = download.fetch(download.corpus())
    else:
        shared = (os.environ.get(name) for name in ("BATCHML_DATA_DIR", "BATCHML_WORKSPACE"))
        folders = [Path(options.data), *(Path(each, options.data) for each in shared if each)]
        folder = next((each for each in folders if each.is_dir()), folders[0])
    train, test = mrpc.read(folder / mrpc.TRAIN), mrpc.read(folder / mrpc.TEST)
    if min(options.batch_size, len(train)) < ranks.world:
        raise mrpc.BadPairs(f"{ranks.world} processes cannot share a batch of fewer pairs")
    return train, test


def fetch(options: argparse.Namespace, ranks: Ranks) -> str:
    """Download missing files in one process of each node. Return the error of any node, or ""."""
    trouble = ""
    if ranks.local == 0:
        try:
            if options.data == "mrpc":
                download.fetch(download.corpus())
            if options.model == bert.BASE:
                download.fetch(download.weights())
        except download.DownloadFailed as error:
            trouble = str(error)
            print(f"train.py: {trouble}", file=sys.stderr)
    return trouble or ("another node lacks files" if ranks.any(bool(trouble)) else "")


def prepare(options: argparse.Namespace, ranks: Ranks) -> Training:
    """Prepare the training, and resume it from a checkpoint.

    Raises BadPairs, BadModel and DownloadFailed.
    """
    train, test = read(options, ranks)
    state = newest(ranks)
    pieces = state["pieces"] if state is not None else vocabulary(options, ranks, train)
    training = Training(options, ranks, pieces, train, test)
    training.log(
        f"{len(train)} pairs to train on, {len(test)} to test with, {len(pieces)} pieces in the "
        f"vocabulary, {training.steps} steps on {ranks.world} processes"
    )
    if state is not None:
        training.resume(state)
    return training


def vocabulary(options: argparse.Namespace, ranks: Ranks, train: list[mrpc.Pair]) -> dict[str, int]:
    """Return the same vocabulary on all ranks. Raises BadModel on all ranks."""
    pieces: dict[str, int] = {}
    trouble = ""
    if ranks.rank == 0:
        try:
            pieces = bert.vocabulary(options.model, train)
        except (bert.BadModel, download.DownloadFailed) as error:
            trouble = str(error)
    pieces, trouble = ranks.broadcast((pieces, trouble))
    if trouble:
        raise bert.BadModel(trouble)
    return pieces


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
    except NoDevice as error:
        return error.report()
    if fetch(options, ranks):
        return 78
    try:
        training = prepare(options, ranks)
    except (mrpc.BadPairs, bert.BadModel, download.DownloadFailed) as error:
        if ranks.local == 0:  # one message for each node
            print(f"train.py: {error}", file=sys.stderr)
        return 78
    is_done = training.train()
    if is_done and ranks.rank == 0:
        training.save_model()
    ranks.leave()
    return 0 if is_done else STOPPED


if __name__ == "__main__":
    sys.exit(main())
