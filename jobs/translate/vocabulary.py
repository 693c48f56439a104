"""Encode text as numbers and decode it, by SentencePiece: words, or pieces of byte-pair encoding.

Both languages have one vocabulary, so that equal words have equal numbers.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

PAD, BEGIN, END, UNKNOWN = range(4)
SPECIAL = 4  # numbers before the numbers of pieces
MOST_WORDS = 50_000


class Vocabulary:
    def __init__(self, model: bytes) -> None:
        self.model = model
        self._processor = SentencePieceProcessor(model_proto=model)

    def __len__(self) -> int:
        return int(self._processor.vocab_size())

    @property
    def pieces(self) -> list[str]:
        return [self._processor.id_to_piece(number) for number in range(SPECIAL, len(self))]

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text, add_eos=True))

    def decode(self, numbers: Iterable[int]) -> str:
        """Decode the text up to its end mark."""
        found = list(numbers)
        end = found.index(END) if END in found else len(found)
        return str(self._processor.decode(found[:end])).strip()

    def to_text(self) -> str:
        return base64.b64encode(self.model).decode()

    @classmethod
    def from_text(cls, text: str) -> Vocabulary:
        return cls(base64.b64decode(text))


def build(lines: Iterable[str], kind: str) -> Vocabulary:
    """Learn a vocabulary of the kind that --vocabulary names: "words", or "bpe:8000"."""
    lines = list(lines)
    words = {word for line in lines for word in line.split()}
    letters = {letter for word in words for letter in word}
    if kind == "words":
        settings = {"model_type": "word", "vocab_size": min(MOST_WORDS, len(words)) + SPECIAL}
    else:
        # Letters are pieces, too, and so is the mark before a word.
        least = len(letters) + 1 + SPECIAL
        settings = {"model_type": "bpe", "vocab_size": max(int(kind[4:]), least)}
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        normalization_rule_name="identity",
        character_coverage=1.0,
        hard_vocab_limit=False,
        max_sentence_length=1 << 20,
        pad_id=PAD,
        bos_id=BEGIN,
        eos_id=END,
        unk_id=UNKNOWN,
        unk_surface=" <unk>",
        minloglevel=2,
        **settings,
    )
    return Vocabulary(model.getvalue())
