"""Data-parallel training with one process against two and four, with the efficiency of each.

    python -m benchmarks.scaling [--processes 1,2,4] [--rounds K] [--jobs ddp,bert] [--pairs DIR]

Processes are ranks of one node, with one thread each, as the supervisor starts them. bert,
translate and llama share each batch, whose size does not depend on the number of processes; ddp has
32 samples a process. Two efficiencies are given: by processes, and by cores, because processes that
share a core cannot be faster than that core. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from batchml.runtime.processors import count_processors
from benchmarks.ddp import DDP, LARGE, LLAMA, ours, train
from benchmarks.lenet import ROOT, interpreter

BERT, TRANSLATE = (ROOT / "jobs" / name / "train.py" for name in ("bert", "translate"))

# A BERT of 11 million weights (Turc et al. 2019, "BERT-mini"), not trained: speed is all the same.
_MAKE_BERT = """
import sys
sys.path.insert(0, sys.argv[1])
import model, pairs
from transformers import BertConfig, BertForSequenceClassification
pieces = model.vocabulary(model.TINY, pairs.made_up(1000, seed=1))
shape = BertConfig(vocab_size=30_522, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
                   intermediate_size=1024, num_labels=2)
BertForSequenceClassification(shape).save_pretrained(sys.argv[2])
model.tokenizer(pieces).save_pretrained(sys.argv[2])
"""


class Program(NamedTuple):
    image: str  # as in its job.toml
    words: tuple[str, ...]
    speed: str  # pattern of its log lines
    unit: str


def programs(pairs: str, model: str) -> dict[str, Program]:
    """The trainings. `pairs`: a folder with MRPC, or made-up; `model`: a folder for bert."""
    return {
        "ddp": Program(
            "pytorch", (str(DDP), "40", "100"), r"processes: (\d+) samples/s", "samples",
        ),
        "llama": Program("pytorch", (str(LLAMA), *LARGE), r"\| (\d+) tokens/s", "tokens"),
        "bert": Program(
            "nlp",
            (str(BERT), "--data", pairs, "--model", model, "--longest", "64", "--epochs", "1"),
            r"speed=([0-9.]+) pairs/s", "pairs",
        ),
        "translate": Program(
            "pytorch + requirements.txt",
            (str(TRANSLATE), "--data", "gettext:pt_BR", "--vocabulary", "bpe:4000", "--width",
             "256", "--epochs", "2"),
            r"speed=([0-9.]+) pieces/s", "pieces",
        ),
    }  # fmt: skip


class Row(NamedTuple):
    processes: int
    speed: float
    times: float  # the speed of one process
    by_processes: float  # efficiency
    by_cores: float


def rows(speeds: dict[int, float], cores: int) -> list[Row]:
    """The efficiency of each number of processes, beside one process. Pure."""
    one = speeds[1]
    return [
        Row(count, speed, speed / one, speed / one / count, speed / one / min(count, cores))
        for count, speed in sorted(speeds.items())
    ]


def speed_of(output: str, pattern: str) -> float:
    """The median of the lines but the first, which warms up. Raises RuntimeError without lines."""
    found = [float(text) for text in re.findall(pattern, output)]
    if not found:
        raise RuntimeError(f"the training printed no speed: {output[-2000:]}")
    return median(found[1:] or found)


def compare(chosen: dict[str, Program], counts: Sequence[int], rounds: int) -> None:
    cores = count_processors(os.environ)
    print(
        f"{cores} cores\n{'job':<10}{'processes':>9}{'speed':>20}{'times':>7}"
        f"{'by processes':>14}{'by cores':>10}"
    )
    for name, program in chosen.items():
        python = interpreter(program.image, Path(program.words[0]).parent)
        speeds: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(rounds):
            for count in counts:  # in turn: what disturbs the machine disturbs all alike
                output = train(1, ours(python, program.words, count)).output
                speeds[count].append(speed_of(output, program.speed))
        for row in rows({count: median(found) for count, found in speeds.items()}, cores):
            print(
                f"{name:<10}{row.processes:>9}{row.speed:>12.0f} {program.unit + '/s':<9}"
                f"{row.times:>5.2f}{row.by_processes:>14.0%}{row.by_cores:>10.0%}",
                flush=True,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", default="1,2,4", help="numbers of processes; the first is 1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", default="ddp,llama,bert,translate")
    parser.add_argument("--pairs", default="made-up", help="a folder with MRPC, for bert")
    options = parser.parse_args(arguments)
    counts = [int(text) for text in options.processes.split(",") if text.isdigit()]
    if not counts or counts[0] != 1 or min(counts) < 1 or options.rounds < 1:
        parser.error("--processes is a list such as 1,2,4, and --rounds starts at 1")
    with tempfile.TemporaryDirectory() as model:
        every = programs(options.pairs, model)
        unknown = {*options.jobs.split(",")} - {*every}
        if unknown:
            parser.error(f"--jobs: {', '.join(sorted(unknown))} is none of {', '.join(every)}")
        chosen = {name: every[name] for name in options.jobs.split(",")}
        if "bert" in chosen:
            command = [str(interpreter("nlp")), "-c", _MAKE_BERT, str(BERT.parent), model]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        compare(chosen, counts, options.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
