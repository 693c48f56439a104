"""Text as numbers and back: whole words, or the pieces that byte-pair encoding finds.

One vocabulary serves both languages, so that what looks the same in both is the same.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

PAD, BEGIN, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
_START = "\u2581"  # stands before each word, so that the spaces come back

Merge = tuple[str, str]


class Vocabulary:
    """Pieces by number. With `merges` words are cut into pieces, else they are pieces."""

    def __init__(self, pieces: Iterable[str], merges: Iterable[Merge] | None = None) -> None:
        self.pieces = [*SPECIAL, *pieces]
        self.merges = None if merges is None else [(a, b) for a, b in merges]
        self._numbers = {piece: number for number, piece in enumerate(self.pieces)}
        self._ranks = {merge: rank for rank, merge in enumerate(self.merges or ())}
        self._cut: dict[str, list[str]] = {}  # words that were cut before

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        return [self._numbers.get(piece, UNKNOWN) for piece in self._pieces(text)] + [END]

    def decode(self, numbers: Iterable[int]) -> str:
        """The text up to its end mark."""
        pieces = []
        for number in numbers:
            if number == END:
                break
            if number not in (PAD, BEGIN):
                pieces.append(self.pieces[number])
        if self.merges is None:
            return " ".join(pieces)
        return "".join(pieces).replace(_START, " ").strip()

    def _pieces(self, text: str) -> list[str]:
        if self.merges is None:
            return text.split()
        return [piece for word in text.split() for piece in self._cut_word(word)]

    def _cut_word(self, word: str) -> list[str]:
        """Join the pair that was learnt first, until none is left that was learnt."""
        known = self._cut.get(word)
        if known is not None:
            return known
        pieces = list(_START + word)
        while len(pieces) > 1:
            pairs = set(pairwise(pieces))
            first = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if first not in self._ranks:
                break
            pieces = joined(pieces, first)
        self._cut[word] = pieces
        return pieces

    def to_json(self) -> str:
        return json.dumps({"pieces": self.pieces[len(SPECIAL) :], "merges": self.merges})

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        return cls(**json.loads(text))


def of_words(lines: Iterable[str], most: int = 50_000) -> Vocabulary:
    """The words of a text, the most frequent first."""
    return Vocabulary(word for word, _ in _ranked(_words(lines))[:most])


def of_pairs(lines: Iterable[str], size: int) -> Vocabulary:
    """About `size` pieces: the characters, and the pairs that are joined most often.

    Sennrich, Haddow, Birch: Neural Machine Translation of Rare Words with Subword Units (2016).
    """
    words = _words(lines)
    texts = [list(_START + word) for word in words]
    often = list(words.values())
    counts: Counter[Merge] = Counter()
    where: defaultdict[Merge, set[int]] = defaultdict(set)  # pair -> words that have it, or had

    touched: set[Merge] = set()

    def count(place: int, sign: int) -> None:
        for pair in pairwise(texts[place]):
            counts[pair] += sign * often[place]
            where[pair].add(place)
            touched.add(pair)

    for place in range(len(texts)):
        count(place, 1)
    letters = sorted({letter for text in texts for letter in text})
    merges: list[Merge] = []
    heap: list[tuple[int, Merge]] = []
    while len(SPECIAL) + len(letters) + len(merges) < size:
        for pair in touched:
            heapq.heappush(heap, (-counts[pair], pair))
        touched.clear()
        while heap and -heap[0][0] != counts[heap[0][1]]:  # its count has changed since
            heapq.heappop(heap)
        if not heap or counts[heap[0][1]] < 2:
            break
        pair = heap[0][1]
        merges.append(pair)
        for place in where.pop(pair):
            count(place, -1)
            texts[place] = joined(texts[place], pair)
            count(place, 1)
    pieces = dict.fromkeys([*letters, *(a + b for a, b in merges)])
    return Vocabulary(pieces, merges)


def build(lines: Iterable[str], kind: str) -> Vocabulary:
    """By what --vocabulary says: "words", or "bpe:8000"."""
    return of_words(lines) if kind == "words" else of_pairs(lines, int(kind.removeprefix("bpe:")))


def joined(pieces: list[str], pair: Merge) -> list[str]:
    """`pieces` with each occurrence of the pair as one."""
    found: list[str] = []
    for piece in pieces:
        if found and (found[-1], piece) == pair:
            found[-1] += piece
        else:
            found.append(piece)
    return found


def _words(lines: Iterable[str]) -> Counter[str]:
    return Counter(word for line in lines for word in line.split())


def _ranked(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
