"""Read tokens for a language model as a stream that can continue at any position.

A corpus is cut into windows. The n-th window of the training depends on the seed and n alone. So a
position is one number, the loader has no state, and any number of processes reads the same batches.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from order import shuffled
from torch import Tensor

_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def built_in_corpus() -> bytes:
    """Generate sums in words: a text that is small, regular and always the same."""
    size = range(len(_NUMBERS))
    sums = [(a, b) for a in size for b in size if a + b < len(_NUMBERS)]
    lines = [f"{_NUMBERS[a]} and {_NUMBERS[b]} is {_NUMBERS[a + b]}." for a, b in sums]
    lines += [f"{_NUMBERS[a + b]} less {_NUMBERS[b]} is {_NUMBERS[a]}." for a, b in sums]
    return ("\n".join(lines[shuffled(i, len(lines), 0)] for i in range(len(lines))) + "\n").encode()


class Corpus:
    """The tokens of the files of a folder, one file after the other.

    In `*.txt` each byte is a token. `*.bin` has tokens of your own tokenizer, 16 bits each, the
    lower byte first. Raises ValueError for a folder with neither, or both.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._parts: Sequence[bytes | mmap.mmap]
        self._width = 1  # bytes of a token
        if folder is None:
            self._parts = [built_in_corpus()]
        else:
            files = _files_in(Path(folder))
            self._width = 2 if files[0].suffix == ".bin" else 1
            self._parts = [_mapped(file) for file in files]
        self._ends: list[int] = []  # position of each part's end, in tokens
        for part in self._parts:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(part) // self._width)

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary: tokens are smaller."""
        return 1 << 8 * self._width

    def read(self, start: int, count: int) -> Tensor:
        """Read tokens (count) as 64-bit numbers, also across the end of a file."""
        found = []
        number = bisect.bisect_right(self._ends, start)
        while count:
            first = self._ends[number - 1] if number else 0
            taken = min(count, self._ends[number] - start)
            begin = (start - first) * self._width
            found.append(self._parts[number][begin : begin + taken * self._width])
            start, count, number = start + taken, count - taken, number + 1
        kind = torch.uint16 if self._width == 2 else torch.uint8
        return torch.frombuffer(bytearray(b"".join(found)), dtype=kind).long()


def _files_in(folder: Path) -> list[Path]:
    files = sorted(p for p in folder.rglob("*") if p.suffix in (".txt", ".bin") and p.is_file())
    files = [file for file in files if file.stat().st_size > 1]
    if not files:
        raise ValueError(
            f"{folder} has no text: put *.txt files, or *.bin files with tokens, there."
        )
    if len({file.suffix for file in files}) > 1:
        raise ValueError(f"{folder} has *.txt and *.bin files: leave files of one kind there.")
    return files


def _mapped(file: Path) -> mmap.mmap:
    with open(file, "rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


class Windows:
    """Windows of `length` + 1 tokens: the input, and the next token after each of its tokens."""

    def __init__(self, corpus: Corpus, length: int, seed: int) -> None:
        self._corpus, self._length, self._seed = corpus, length, seed
        self.count = (len(corpus) - 1) // length  # of an epoch
        if self.count < 1:
            raise ValueError(f"The text has {len(corpus)} tokens; a window takes {length + 1}.")

    def batch(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Return windows from `position` on: tokens (count, length), and the next token of each.

        Positions continue over the end of an epoch. Each epoch has another order.
        """
        pieces = torch.stack([self._window(position + i) for i in range(count)])
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()

    def _window(self, position: int) -> Tensor:
        epoch, place = divmod(position, self.count)
        place = shuffled(place, self.count, (self._seed << 20) + epoch)
        return self._corpus.read(place * self._length, self._length + 1)
