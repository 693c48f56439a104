"""BERT that classifies whether two sentences mean the same, and its tokenizer."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # download.py has the verified files
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import download
import transformers
from pairs import Pair
from tokenizers import normalizers, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

BASE, TINY = "bert-base-uncased", "tiny"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

transformers.utils.logging.set_verbosity_error()  # no warning about the new classifier
transformers.utils.logging.disable_progress_bar()


class Encoded(NamedTuple):
    """A pair of sentences as numbers."""

    pieces: list[int]  # of both sentences, by their numbers in the vocabulary
    sides: list[int]  # the sentence of each piece, 0 or 1
    label: int  # 1: the sentences mean the same


class BadModel(Exception):
    """A folder has no model that can be read. The text says what is missing."""


def vocabulary(model: str, pairs: list[Pair]) -> dict[str, int]:
    """Map pieces of words to numbers, as a model does. Raises BadModel, DownloadFailed."""
    if model == TINY:
        return _make_vocabulary(pairs)
    folder = _folder(model)
    try:
        if (folder / "vocab.txt").exists():
            return dict(BertTokenizer(vocab=str(folder / "vocab.txt")).get_vocab())
        if (folder / "tokenizer.json").exists():
            return dict(BertTokenizer.from_pretrained(folder).get_vocab())
    except (OSError, ValueError) as error:
        raise BadModel(f"{folder} has no vocabulary that can be read: {error}") from error
    raise BadModel(f"{folder} has neither vocab.txt nor tokenizer.json")


def tokenizer(pieces: dict[str, int]) -> Any:
    return BertTokenizer(vocab=pieces, do_lower_case=True)


def build(model: str, pieces: int, longest: int) -> Any:
    """Build the network. Raises BadModel and DownloadFailed."""
    if model == TINY:
        shape = BertConfig(
            vocab_size=pieces, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=max(longest, 64), num_labels=2,
            initializer_range=0.1,
        )  # fmt: skip
        return BertForSequenceClassification(shape)
    folder = _folder(model)
    # The defaults of BertConfig are the sizes of BERT-base.
    settings = {"config": BertConfig(num_labels=2)} if model == BASE else {"num_labels": 2}
    try:
        return BertForSequenceClassification.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, **settings
        )
    except (OSError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise BadModel(f"{folder} has no BERT that can be read: {first}") from error


def encode(pairs: list[Pair], pieces: dict[str, int], longest: int) -> list[Encoded]:
    """Encode pairs. In a pair with more than `longest` pieces, the longer sentence is cut."""
    firsts, seconds = [pair.first for pair in pairs], [pair.second for pair in pairs]
    found = tokenizer(pieces)(firsts, seconds, truncation="longest_first", max_length=longest)
    columns = zip(found["input_ids"], found["token_type_ids"], pairs, strict=True)
    return [Encoded(ids, sides, int(pair.is_same)) for ids, sides, pair in columns]


def _folder(model: str) -> Path:
    if model == BASE:
        return download.fetch(download.weights())
    if not Path(model).is_dir():
        raise BadModel(f"--model {model}: write {BASE}, {TINY}, or a folder with config.json")
    return Path(model)


def _make_vocabulary(pairs: list[Pair], limit: int = 4000) -> dict[str, int]:
    """Make a WordPiece vocabulary of the letters and the most frequent words of these sentences.

    It depends on the sentences alone, unlike what the trainer of `tokenizers` finds.
    """
    lower, cut = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    texts = (text for pair in pairs for text in (pair.first, pair.second))
    words = Counter(
        word for text in texts for word, _ in cut.pre_tokenize_str(lower.normalize_str(text))
    )
    letters = sorted({letter for word in words for letter in word})
    frequent = sorted(words, key=lambda word: (-words[word], word))
    pieces = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *frequent]
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces[:limit]))}
