"""An encoder-decoder transformer: Vaswani et al., Attention Is All You Need (2017)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from vocabulary import BEGIN, END, PAD


@dataclass(frozen=True)
class Shape:
    pieces: int  # of the vocabulary
    width: int = 128
    heads: int = 4
    layers: int = 2  # of the encoder, and of the decoder
    dropout: float = 0.1
    longest: int = 256  # most pieces of a line; longer lines are cut


class Translator(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.pieces, shape.width, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=shape.width**-0.5)
        positions = encode_positions(shape.longest + 1, shape.width)
        self.register_buffer("positions", positions, persistent=False)
        self.dropout = nn.Dropout(shape.dropout)
        layer = {
            "d_model": shape.width, "nhead": shape.heads, "dim_feedforward": 4 * shape.width,
            "dropout": shape.dropout, "batch_first": True, "norm_first": True,
        }  # fmt: skip
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**layer), shape.layers, nn.LayerNorm(shape.width),
            enable_nested_tensor=False,
        )  # fmt: skip
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(**layer), shape.layers, nn.LayerNorm(shape.width)
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Score the piece after each of `target`: (lines, pieces of a line, vocabulary)."""
        return self.decode(target, self.encode(source), source)

    def encode(self, source: Tensor) -> Tensor:
        return self.encoder(self._embed(source), src_key_padding_mask=source == PAD)

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        decoded = self.decoder(
            self._embed(target), memory, tgt_mask=later, tgt_is_causal=True,
            tgt_key_padding_mask=target == PAD, memory_key_padding_mask=source == PAD,
        )  # fmt: skip
        return functional.linear(decoded, self.embedding.weight)

    def _embed(self, numbers: Tensor) -> Tensor:
        scaled = self.embedding(numbers) * math.sqrt(self.shape.width)
        return self.dropout(scaled + self.positions[: numbers.shape[1]])


def encode_positions(length: int, width: int) -> Tensor:
    """Return the positional encoding (length, width): sines and cosines of growing wavelength."""
    speeds = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    angles = torch.arange(length)[:, None] * speeds
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :width]


def pad_lines(lines: Sequence[Sequence[int]], longest: int) -> Tensor:
    """Make one block of lines of pieces. A line that is too long is cut and keeps its end mark."""
    cut = [line if len(line) <= longest else [*line[: longest - 1], END] for line in lines]
    rows = [torch.tensor(line) for line in cut]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


@torch.no_grad()
def translate(model: Translator, source: Tensor) -> list[list[int]]:
    """Translate greedily, until all lines have ended or are twice as long as their source."""
    memory = model.encode(source)
    found = torch.full((len(source), 1), BEGIN, device=source.device)
    ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    for _ in range(min(2 * source.shape[1] + 20, model.shape.longest)):
        scores = model.decode(found, memory, source)[:, -1]
        scores[:, [PAD, BEGIN]] = -torch.inf
        following = scores.argmax(-1).masked_fill(ended, PAD)
        found = torch.cat((found, following[:, None]), 1)
        ended |= following == END
        if bool(ended.all()):
            break
    return [line[1:] for line in found.tolist()]
