"""Fine-tune BERT to tell whether two sentences say the same, with one process or many.

Each step takes the next batch of the epoch's order, of which every rank has its part; the order and
the dice of dropout follow from the seed and the step alone. So it goes on after an interruption as
if there had been none.
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

try:
    from batchml.runtime import checkpoint, report
except ImportError:  # elsewhere it trains all the same, without checkpoints and metrics
    checkpoint = report = None

LINE_EVERY = 20  # steps
LOOK_EVERY = 5  # steps; between two looks at whether to stop, which all ranks take together
STOPPED = 143
MADE_UP = "made-up"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune BERT on pairs of sentences.")
    parser.add_argument("--data", default="mrpc", help=f"mrpc, {MADE_UP}, or a folder with files")
    parser.add_argument("--model", default=bert.BASE, help=f"{bert.BASE}, {bert.TINY}, or a folder")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="pairs, of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-5, help="the highest learning rate")
    parser.add_argument("--warmup", type=float, default=0.1, help="share of the steps up to it")
    parser.add_argument("--longest", type=int, default=128, help="pieces of a pair")
    parser.add_argument("--save-every", type=int, default=50, help="steps; and after each epoch")
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
        self.step = 0  # that are finished
        self.goes_on = True
        self.scores = {"accuracy": 0.0, "f1": 0.0}
        torch.manual_seed(options.seed)
        self.model = bert.build(options.model, len(pieces), options.longest).to(ranks.device)
        self.optimizer = torch.optim.AdamW(_groups(self.model), lr=options.lr)
        self.has_bf16 = ranks.device.type == "cuda" and torch.cuda.is_bf16_supported()

    # --- what outlives this process -------------------------------------------------------------

    def save(self) -> None:
        if checkpoint is not None and self.ranks.rank == 0:
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
        self.say(f"Resuming after step {self.step} of {self.steps}")

    def keep(self) -> None:
        """Leave the model as a folder that transformers opens, and how good it is."""
        folder = Path(os.environ.get("BATCHML_OUTPUT_DIR", "."), "model")
        self.model.save_pretrained(folder)
        bert.tokenizer(self.pieces).save_pretrained(folder)
        (folder / "scores.json").write_text(json.dumps(self.scores) + "\n", "utf-8")

    # --- learning -------------------------------------------------------------------------------

    def train(self) -> bool:
        """Go on to the last step. False when the run is to stop before; what is done is saved."""
        together = self.ranks.together(self.model)
        lost, since = torch.zeros((), device=self.ranks.device), (self.step, time.perf_counter())
        while self.step < self.steps:
            epoch, first = divmod(self.step, self.steps_each)
            for batch in self._batches(epoch)[first:]:
                lost += self._learn(together, batch)
                self.step += 1
                if self.step % LINE_EVERY == 0 or self.step == self.steps:
                    steps, seconds = self.step - since[0], time.perf_counter() - since[1]
                    mean = self.ranks.sum(float(lost))[0] / (steps * self.size)
                    self._tell(epoch, mean, steps * self.size / seconds)
                    lost.zero_()
                    since = (self.step, time.perf_counter())
                if self.step % self.steps_each == 0:
                    break
                if self.step % self.options.save_every == 0:
                    self.save()
                if self.step % LOOK_EVERY == 0 and self.ranks.any(self._should_stop()):
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

    def _learn(self, together: torch.nn.Module, batch: Sequence[int]) -> torch.Tensor:
        """One step; the sum of the losses of this rank's pairs."""
        own = [self.train_pairs[at] for at in batch[self.ranks.rank :: self.ranks.world]]
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * self._rate()
        # The dice of this step and rank, whatever was before.
        torch.manual_seed(hash((self.options.seed, self.step, self.ranks.rank)) % 2**63)
        together.train()
        labels = torch.tensor([pair.label for pair in own], device=self.ranks.device)
        loss = functional.cross_entropy(self._scores(together, own), labels, reduction="sum")
        self.optimizer.zero_grad()
        # The ranks' gradients are averaged; each pair of the batch is to count the same.
        (loss * self.ranks.world / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def _rate(self) -> float:
        """As a share of the highest: up in a straight line, then down to nothing."""
        up = max(1.0, self.options.warmup * self.steps)
        return min((self.step + 1) / up, (self.steps - self.step) / max(1.0, self.steps - up))

    def _scores(self, network: torch.nn.Module, own: Sequence[bert.Encoded]) -> torch.Tensor:
        ids = pad_sequence([torch.tensor(pair.pieces) for pair in own], batch_first=True)
        sides = pad_sequence([torch.tensor(pair.sides) for pair in own], batch_first=True)
        lengths = torch.tensor([len(pair.pieces) for pair in own])
        is_there = torch.arange(ids.shape[1])[None, :] < lengths[:, None]
        blocks = {"input_ids": ids, "token_type_ids": sides, "attention_mask": is_there.long()}
        on_device = {name: block.to(self.ranks.device) for name, block in blocks.items()}
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.has_bf16):
            return network(**on_device).logits.float()

    # --- seeing how it goes ---------------------------------------------------------------------

    @torch.no_grad()
    def validate(self, epoch: int) -> None:
        """Judge the pairs of the test file, each rank its part."""
        self.model.eval()
        own = self.test_pairs[self.ranks.rank :: self.ranks.world]
        counted = [0] * 4  # by what they are, and what they are taken for
        for start in range(0, len(own), 64):
            part = own[start : start + 64]
            found = self._scores(self.model, part).argmax(-1).tolist()
            for pair, is_same in zip(part, found, strict=True):
                counted[2 * pair.label + is_same] += 1
        self.scores = scores(*self.ranks.sum(*counted))
        told = " ".join(f"{name}={value:.4f}" for name, value in self.scores.items())
        self.say(f"Epoch[{epoch}] Validation {told}")
        self._report(**self.scores)

    def _tell(self, epoch: int, loss: float, speed: float) -> None:
        self.say(f"Epoch[{epoch}] Step[{self.step}] loss={loss:.6f} speed={speed:.1f} pairs/s")
        self._report(loss=loss)

    def _report(self, **values: float) -> None:
        if report is not None and self.ranks.rank == 0:
            self.goes_on &= report(step=self.step, total=self.steps, **values)

    def _should_stop(self) -> bool:
        return not self.goes_on or (checkpoint is not None and checkpoint.should_stop())

    def say(self, line: str) -> None:
        if self.ranks.rank == 0:
            print(line, flush=True)


def scores(true_no: float, false_yes: float, false_no: float, true_yes: float) -> dict[str, float]:
    """Accuracy, and F1 of "they say the same", as MRPC is judged."""
    every = true_no + false_yes + false_no + true_yes
    at_all = 2 * true_yes + false_yes + false_no
    return {
        "accuracy": (true_no + true_yes) / every,
        "f1": 2 * true_yes / at_all if at_all else 0.0,
    }


def _groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Weights decay; biases and what normalises do not."""
    every = list(model.parameters())
    matrices = [each for each in every if each.ndim > 1]
    others = [each for each in every if each.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]


def read(options: argparse.Namespace, ranks: Ranks) -> tuple[list[mrpc.Pair], list[mrpc.Pair]]:
    """The pairs to learn from, and those to judge by. Raises BadPairs and NotHad."""
    if options.data == MADE_UP:
        return mrpc.made_up(1000, seed=1), mrpc.made_up(200, seed=2)
    if options.data == "mrpc":
        folder = download.bring(download.corpus())
    else:
        shared = (os.environ.get(name) for name in ("BATCHML_DATA_DIR", "BATCHML_WORKSPACE"))
        places = [Path(options.data), *(Path(place, options.data) for place in shared if place)]
        folder = next((place for place in places if place.is_dir()), places[0])
    train, test = mrpc.read(folder / mrpc.TRAIN), mrpc.read(folder / mrpc.TEST)
    if min(options.batch_size, len(train)) < ranks.world:
        raise mrpc.BadPairs(f"{ranks.world} processes cannot share a batch of fewer pairs")
    return train, test


def fetch(options: argparse.Namespace, ranks: Ranks) -> str:
    """Have one process of each node fetch what is needed; what went wrong, of any."""
    trouble = ""
    if ranks.local == 0:
        try:
            if options.data == "mrpc":
                download.bring(download.corpus())
            if options.model == bert.BASE:
                download.bring(download.weights())
        except download.NotHad as error:
            trouble = str(error)
            print(f"train.py: {trouble}", file=sys.stderr)
    return trouble or ("another node lacks files" if ranks.any(bool(trouble)) else "")


def prepare(options: argparse.Namespace, ranks: Ranks) -> Training:
    """The training where it stands. Raises BadPairs, BadModel and NotHad."""
    train, test = read(options, ranks)
    state = newest(ranks)
    pieces = state["pieces"] if state is not None else vocabulary(options, ranks, train)
    training = Training(options, ranks, pieces, train, test)
    training.say(
        f"{len(train)} pairs to learn from, {len(test)} to judge by, {len(pieces)} pieces in the "
        f"vocabulary, {training.steps} steps on {ranks.world} processes"
    )
    if state is not None:
        training.resume(state)
    return training


def vocabulary(options: argparse.Namespace, ranks: Ranks, train: list[mrpc.Pair]) -> dict[str, int]:
    """The same on all ranks. Raises BadModel, on all."""
    pieces: dict[str, int] = {}
    trouble = ""
    if ranks.rank == 0:
        try:
            pieces = bert.vocabulary(options.model, train)
        except (bert.BadModel, download.NotHad) as error:
            trouble = str(error)
    pieces, trouble = ranks.of_first((pieces, trouble))
    if trouble:
        raise bert.BadModel(trouble)
    return pieces


def newest(ranks: Ranks) -> dict[str, Any] | None:
    """What the newest checkpoint holds; rank 0 says which it is."""
    if checkpoint is None:
        return None
    found = checkpoint.newest() if ranks.rank == 0 else None
    path = ranks.of_first(found.path if found else "")
    if not path:
        return None
    file = Path(path, "state.pt")
    if not file.exists():
        sys.exit(f"train.py: rank {ranks.rank} has no {file}, from which rank 0 goes on")
    state: dict[str, Any] = torch.load(file, map_location=ranks.device, weights_only=True)
    return state


def main() -> int:
    options = parse_arguments()
    ranks = Ranks()
    if fetch(options, ranks):
        return 78
    try:
        training = prepare(options, ranks)
    except (mrpc.BadPairs, bert.BadModel, download.NotHad) as error:
        if ranks.local == 0:  # the others of this node say the same
            print(f"train.py: {error}", file=sys.stderr)
        return 78
    is_done = training.train()
    if is_done and ranks.rank == 0:
        training.keep()
    ranks.leave()
    return 0 if is_done else STOPPED


if __name__ == "__main__":
    sys.exit(main())
