"""Translate lines with a trained model: those of --text, or of the input, one by one.

    batchml submit --wait translate
    batchml submit --wait translate -- python translate.py --text "3 4 7"

The model of the newest training is in the workspace, where every run finds it. On a terminal it
asks for line after line, until Ctrl-D.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from model import Shape, Translator, padded, translate
from vocabulary import Vocabulary

MODEL = "translate.pt"
AT_ONCE = 32  # lines


class NoModel(Exception):
    """There is none, or it is none; what to do about it."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Translate lines with a trained model.")
    parser.add_argument("--text", action="append", help="a line; may be given several times")
    parser.add_argument("--checkpoint", default="", help=f"{MODEL}, or the folder that has it")
    return parser.parse_args()


def find(given: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The model that was named, else that of the newest training. Raises NoModel."""
    workspace = environ.get("BATCHML_WORKSPACE")
    shared = [Path(workspace, "translate")] if workspace else []
    places = [Path(given), *(place.parent / given for place in shared)] if given else [*shared]
    places += [] if given else [Path()]
    files = [file for place in places for file in (place, place / MODEL)]
    for file in files:
        if file.is_file():
            return file
    raise NoModel(
        f"no model at {', '.join(str(place) for place in places)}. Train one with "
        f"`batchml submit --wait translate`, or name one with --checkpoint"
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
        except Exception as error:  # torch has no exception of its own for a file that is none
            raise NoModel(f"{path} is no model of train.py ({type(error).__name__})") from error

    def __call__(self, lines: list[str]) -> list[str]:
        ids = [self.words.encode(line) for line in lines]
        source = padded(ids, self.net.shape.longest).to(self.device)
        return [self.words.decode(line) for line in translate(self.net, source)]


def answer(model: Model, lines: Iterable[str]) -> int:
    """Print what each line is in the other language; how many there were."""
    count, waiting = 0, list[str]()
    for line in lines:
        waiting.append(line.strip())
        if len(waiting) == AT_ONCE:
            print(*model(waiting), sep="\n", flush=True)
            count, waiting = count + len(waiting), []
    if waiting:
        print(*model(waiting), sep="\n", flush=True)
    return count + len(waiting)


def converse(model: Model) -> None:
    print("A line and Enter; Ctrl-D ends it.")
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
        return 0  # one of the job's processes is enough
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
