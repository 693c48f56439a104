"""Data-parallel training with one process against two and four, with the efficiency of each.

Processes are ranks of one node, with one thread each, as the supervisor starts them. bert,
translate and llama share each batch, whose size does not depend on the number of processes; ddp has
32 samples a process. The efficiency is by cores: processes that share a core cannot be faster than
that core. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from batchml.runtime.processors import count_processors
from benchmarks.ddp import DDP, LARGE, LLAMA, ours, train
from benchmarks.lenet import ROOT, interpreter
from benchmarks.rows import Finding, alone, paired
from benchmarks.running import main

PROCESSES = (1, 2, 4)
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


def efficiency(speed: float, one: float, processes: int, cores: int) -> float:
    """The speed of several processes for that of one, and for the cores that they have. Pure."""
    return speed / one / min(processes, cores)


def speed_of(output: str, pattern: str) -> float:
    """The median of the lines but the first, which warms up. Raises RuntimeError without lines."""
    found = [float(text) for text in re.findall(pattern, output)]
    if not found:
        raise RuntimeError(f"the training printed no speed: {output[-2000:]}")
    return median(found[1:] or found)


def compare(program: Program, name: str, cores: int, rounds: int) -> Iterator[Finding]:
    python = interpreter(program.image, Path(program.words[0]).parent)
    speeds: dict[int, list[float]] = {count: [] for count in PROCESSES}
    for _ in range(rounds):
        for count in PROCESSES:  # in turn: what disturbs the machine disturbs all alike
            output = train(1, ours(python, program.words, count)).output
            speeds[count].append(speed_of(output, program.speed))
    for count in PROCESSES[1:]:
        pairs = list(zip(speeds[count], speeds[1], strict=True))
        yield paired(
            f"scaling/{name}_{count}", f"{name} with {count} processes", f"{program.unit}/s", pairs,
            beside="one process", smaller=False,
        )  # fmt: skip
        yield alone(
            f"scaling/{name}_{count}.efficiency", f"{name} with {count} processes, by cores", "%",
            [100 * efficiency(speed, one, count, cores) for speed, one in pairs], smaller=False,
        )  # fmt: skip


def measure(full: bool) -> Iterator[Finding]:
    cores = count_processors(os.environ)
    with tempfile.TemporaryDirectory() as model:
        command = [str(interpreter("nlp")), "-c", _MAKE_BERT, str(BERT.parent), model]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        for name, program in programs("made-up", model).items():
            yield from compare(program, name, cores, 3 if full else 1)


if __name__ == "__main__":
    main(measure)
