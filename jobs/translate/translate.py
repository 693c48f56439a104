"""Translate lines with a trained model: the lines of --text, or of the standard input.

    batchml submit --wait translate
    batchml submit --wait translate -- python translate.py --text "3 4 7"

The model of the newest training is in the workspace, where every run finds it. On a terminal the
program asks for lines until Ctrl-D.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from model import Shape, Translator, pad_lines, translate
from vocabulary import Vocabulary

MODEL = "translate.pt"
BATCH = 32  # lines that are translated together


class NoModel(Exception):
    """There is no model, or a file that is no model. The text says what to do."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Translate lines with a trained model.")
    parser.add_argument("--text", action="append", help="a line; may be given several times")
    parser.add_argument("--checkpoint", default="", help=f"{MODEL}, or a folder with this file")
    return parser.parse_args()


def find(path: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Find the model at `path`, or without `path` that of the newest training. Raises NoModel."""
    workspace = environ.get("BATCHML_WORKSPACE")
    shared = [Path(workspace, "translate")] if workspace else []
    if path:
        candidates = [Path(path), *(each.parent / path for each in shared)]
    else:
        candidates = [*shared, Path()]
    files = [file for each in candidates for file in (each, each / MODEL)]
    for file in files:
        if file.is_file():
            return file
    raise NoModel(
        f"no model at {', '.join(map(str, candidates))}. Train a model: "
        "batchml submit --wait translate. Or name a model: --checkpoint"
    )


class Model:
    def __init__(self, path: Path) -> None:
        """Raises NoModel for a file that train.py did not write."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            self.words = Vocabulary.from_text(state["words"])
            self.net = Translator(Shape(**state["shape"])).to(self.device).eval()
            self.net.load_state_dict(state["model"])
        except Exception as error:  # torch raises many exceptions for a file that is no model
            raise NoModel(f"{path} is not a model of train.py ({type(error).__name__})") from error

    def __call__(self, lines: list[str]) -> list[str]:
        ids = [self.words.encode(line) for line in lines]
        source = pad_lines(ids, self.net.shape.longest).to(self.device)
        return [self.words.decode(line) for line in translate(self.net, source)]


def answer(model: Model, lines: Iterable[str]) -> int:
    """Print the translation of each line; return the number of lines."""
    count, waiting = 0, list[str]()
    for line in lines:
        waiting.append(line.strip())
        if len(waiting) == BATCH:
            print(*model(waiting), sep="\n", flush=True)
            count, waiting = count + len(waiting), []
    if waiting:
        print(*model(waiting), sep="\n", flush=True)
    return count + len(waiting)


def converse(model: Model) -> None:
    print("Type a line and Enter. Ctrl-D ends the program.")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line:
            print(*model([line]), flush=True)


def main() -> int:
    options = parse_arguments()
    if os.environ.get("RANK", "0") != "0":
        return 0  # one process of the job translates
    try:
        model = Model(find(options.checkpoint))
    except NoModel as error:
        print(f"translate.py: {error}", file=sys.stderr)
        return 78
    if not options.text and sys.stdin.isatty():
        converse(model)
    elif not answer(model, options.text or sys.stdin):
        print("translate.py: nothing to translate: give --text, or lines as input", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
