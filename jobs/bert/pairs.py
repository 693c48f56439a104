"""Pairs of sentences that mean the same or not: the Microsoft Research Paraphrase Corpus.

Its two files are tables with tabs: Quality (1 or 0), #1 ID, #2 ID, #1 String, #2 String. Quotation
marks are text, and the first line may begin with a byte order mark. You can use your own files of
this form. `python pairs.py FOLDER` writes a small generated corpus, which a tiny model learns in
seconds.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TRAIN, TEST = "msr_paraphrase_train.txt", "msr_paraphrase_test.txt"
HEADER = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
_MAX_MISTAKES = 5  # of a file, in a message


class BadPairs(Exception):
    """A file of pairs has mistakes. The text names them and their lines."""


class Pair(NamedTuple):
    is_same: bool
    first: str
    second: str


def read(path: Path) -> list[Pair]:
    """Read the pairs of a file. Raises BadPairs with its mistakes."""
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise BadPairs(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadPairs(f"{path}: is not UTF-8 (byte {error.start})") from None
    header, *lines = text.removesuffix("\n").split("\n")
    if tuple(header.rstrip("\r").split("\t")) != HEADER:
        raise BadPairs(f"{path}: the first line is not {' '.join(HEADER)!r}, separated by tabs")
    found, mistakes = [], []
    for number, line in enumerate(lines, 2):
        fields = line.rstrip("\r").split("\t")
        if len(fields) != len(HEADER):
            mistakes.append(f"line {number} has {len(fields)} fields, not {len(HEADER)}")
        elif fields[0] not in ("0", "1"):
            mistakes.append(f"line {number} begins with {fields[0][:20]!r}, not 0 or 1")
        else:
            found.append(Pair(fields[0] == "1", fields[3], fields[4]))
    if len(mistakes) > _MAX_MISTAKES:
        mistakes[_MAX_MISTAKES:] = [f"and {len(mistakes) - _MAX_MISTAKES} more lines"]
    if not found and not mistakes:
        mistakes = ["the file has no pairs"]
    if mistakes:
        raise BadPairs(f"{path}: {'; '.join(mistakes)}")
    return found


def write(pairs: list[Pair], path: Path) -> None:
    rows = [HEADER]
    for number, pair in enumerate(pairs):
        ids = (str(2 * number + 1), str(2 * number + 2))
        rows.append((str(int(pair.is_same)), *ids, pair.first, pair.second))
    path.write_text("".join("\t".join(row) + "\n" for row in rows), "utf-8-sig")


# --- A generated corpus ---

_WHO = ["Acme", "Borealis", "the bank", "the airline", "Cobalt", "the maker of engines"]
_WHAT = ["profit", "revenue", "its share price", "output", "the number of its customers"]
_WHEN = ["on Monday", "in the third quarter", "last year", "in March", "this week"]
_VERBS = ["rose", "grew", "increased", "climbed", "went up"]
_SAID = ["said", "reported", "confirmed", "announced"]
_DENIED = ["denied", "disputed", "doubted"]
_FORMS = [
    "{who} {said} that {what} {verb} {when} .",
    "{when} {what} {verb} , {who} {said} .",
    "That {what} {verb} {when} is what {who} {said} .",
]


def made_up(count: int, seed: int) -> list[Pair]:
    """Generate sentences about companies. In half of the pairs, one denies what the other says."""
    return [*_generate(count, random.Random(seed))]


def _generate(count: int, rng: random.Random) -> Iterator[Pair]:
    for _ in range(count):
        fact = {"who": rng.choice(_WHO), "what": rng.choice(_WHAT), "when": rng.choice(_WHEN)}
        is_same = rng.random() < 0.5
        verbs_of_saying = [rng.choice(_SAID), rng.choice(_SAID if is_same else _DENIED)]
        rng.shuffle(verbs_of_saying)
        forms, verbs = rng.sample(_FORMS, 2), rng.sample(_VERBS, 2)
        first, second = (
            form.format(verb=verb, said=said, **fact)
            for form, verb, said in zip(forms, verbs, verbs_of_saying, strict=True)
        )
        yield Pair(is_same, first, second)


def write_made_up(folder: Path, train: int = 1000, test: int = 200) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write(made_up(train, seed=1), folder / TRAIN)
    write(made_up(test, seed=2), folder / TEST)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python pairs.py FOLDER")
    write_made_up(Path(sys.argv[1]))
