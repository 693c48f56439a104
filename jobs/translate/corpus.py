"""Pairs of lines to learn a translation from: two text files, or numbers and their words.

Your own corpus is a folder with the UTF-8 files train.src and train.tgt, and if you like valid.src
and valid.tgt. Line N of one file translates line N of the other. Without a folder, pairs such as
"3 4 7" and "three hundred forty seven" are generated, in either direction. To write these as files:
`python corpus.py FOLDER`.
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

HELD_OUT = 10  # one in 10 pairs is for validation, and never trained on
MAX_HELD_OUT = 1000

_SMALL = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]

Pair = tuple[str, str]


class BadCorpus(Exception):
    """A folder of text has mistakes. The text names them and their files."""


class Corpus(NamedTuple):
    train: list[Pair]
    valid: list[Pair]


def in_words(number: int) -> str:
    """Write a number below a million in words: 3472 is three thousand four hundred seventy two."""
    thousands, rest = divmod(number, 1000)
    hundreds, rest = divmod(rest, 100)
    words = [in_words(thousands), "thousand"] if thousands else []
    words += [_SMALL[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        tens, rest = divmod(rest, 10)
        words.append(_TENS[tens - 2])
    if rest or not words:
        words.append(_SMALL[rest])
    return " ".join(words)


def numbers(digits: int, direction: str = "digits-words") -> Corpus:
    """Generate every number with at most so many digits, and its words."""
    pairs = [(" ".join(str(number)), in_words(number)) for number in range(10**digits)]
    if direction == "words-digits":
        pairs = [(words, figures) for figures, words in pairs]
    return split(pairs)


def split(pairs: Iterable[Pair]) -> Corpus:
    """Hold out one pair in ten, chosen by its source, so that equal sources are not divided."""
    train: list[Pair] = []
    valid: list[Pair] = []
    for pair in pairs:
        held_out = zlib.crc32(pair[0].encode()) % HELD_OUT == 0 and len(valid) < MAX_HELD_OUT
        (valid if held_out else train).append(pair)
    return Corpus(train, valid)


def find(folder: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Find a folder: the path itself, or below the folders that runs share. Raises BadCorpus."""
    shared = (environ.get(name) for name in ("BATCHML_DATA_DIR", "BATCHML_WORKSPACE"))
    candidates = [Path(folder), *(Path(each, folder) for each in shared if each)]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise BadCorpus(f"there is no folder with a corpus at {', '.join(map(str, candidates))}")


def read(folder: Path) -> Corpus:
    """Read the corpus in a folder. Raises BadCorpus with its mistakes."""
    mistakes: list[str] = []
    train = _pairs(folder, "train", mistakes)
    if (folder / "valid.src").exists() or (folder / "valid.tgt").exists():
        found = Corpus(train, _pairs(folder, "valid", mistakes)[:MAX_HELD_OUT])
    else:
        found = split(train)
    for name, pairs in found._asdict().items():
        if not pairs and not mistakes:
            mistakes.append(f"{folder} has no pair of lines {_PURPOSE[name]}")
    if mistakes:
        raise BadCorpus("; ".join(mistakes))
    return found


_PURPOSE = {
    "train": "to train on",
    "valid": "to validate with: add some, or valid.src and valid.tgt",
}


def _pairs(folder: Path, name: str, mistakes: list[str]) -> list[Pair]:
    """Read the pairs of two files, without pairs of which a side is empty."""
    sides = [_lines(folder / f"{name}.{side}", mistakes) for side in ("src", "tgt")]
    if None in sides:
        return []
    source, target = (side or [] for side in sides)
    if len(source) != len(target):
        counts = f"{name}.src has {len(source)} lines and {name}.tgt {len(target)}"
        mistakes.append(f"{folder}: {counts}: line N of one translates line N of the other")
        return []
    return [(a, b) for a, b in zip(source, target, strict=True) if a and b]


def _lines(path: Path, mistakes: list[str]) -> list[str] | None:
    try:
        # Not splitlines(), which also splits at characters that may be inside a sentence.
        text = path.read_text("utf-8-sig")
    except OSError as error:
        mistakes.append(f"{path}: {error.strerror}")
    except UnicodeDecodeError as error:
        mistakes.append(f"{path}: is not UTF-8 (byte {error.start})")
    else:
        return [" ".join(line.split()) for line in text.removesuffix("\n").split("\n")]
    return None


def write(corpus: Corpus, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in corpus._asdict().items():
        for side, lines in zip(("src", "tgt"), zip(*pairs, strict=True), strict=True):
            (folder / f"{name}.{side}").write_text("".join(f"{line}\n" for line in lines), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write numbers and their words as text files.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--digits", type=int, default=4, choices=range(1, 7))
    parser.add_argument("--direction", default="digits-words", choices=DIRECTIONS)
    options = parser.parse_args()
    write(numbers(options.digits, options.direction), options.folder)
    return 0


DIRECTIONS = ("digits-words", "words-digits")

if __name__ == "__main__":
    sys.exit(main())
