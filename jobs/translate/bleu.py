"""BLEU of a whole test set, from counts that can be added: Papineni et al. (2002)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

LONGEST = 4  # words that are compared at once
FIELDS = 2 * LONGEST + 4


def counts(found: str, wanted: str) -> list[int]:
    """Right and all word sequences of 1 to 4, words found and wanted, lines that agree, lines."""
    ours, theirs = found.split(), wanted.split()
    right, every = [], []
    for length in range(1, LONGEST + 1):
        mine = _sequences(ours, length)
        right.append((mine & _sequences(theirs, length)).total())
        every.append(mine.total())
    return [*right, *every, len(ours), len(theirs), int(ours == theirs), 1]


def bleu(counted: Sequence[float]) -> float:
    """0 to 100, from the sum of the `counts` of all lines.

    Lengths of which the test set has no sequence are left out; of others at least half a sequence
    is taken to be right, so that one missing length does not make a short test set worthless.
    """
    right, every = counted[:LONGEST], counted[LONGEST : 2 * LONGEST]
    found, wanted = counted[2 * LONGEST : 2 * LONGEST + 2]
    shares = [max(a, 0.5) / b for a, b in zip(right, every, strict=True) if b]
    if not shares or not right[0]:
        return 0.0
    brevity = min(0.0, 1 - wanted / found)
    return 100 * math.exp(brevity + sum(map(math.log, shares)) / len(shares))


def exact(counted: Sequence[float]) -> float:
    """The share of lines that are right to the word."""
    return counted[-2] / counted[-1] if counted[-1] else 0.0


def _sequences(words: Sequence[str], length: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + length]) for i in range(len(words) - length + 1))
