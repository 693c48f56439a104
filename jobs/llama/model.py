"""Llama in plain PyTorch: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Config:
    width: int
    layers: int
    heads: int
    kv_heads: int  # heads of keys and values, each shared by heads / kv_heads heads
    hidden: int  # width of the feed-forward part
    sequence: int  # tokens of a training sequence
    vocabulary: int = 32_000
    theta: float = 10_000.0  # base of the rotary positions
    recompute: bool = False  # compute activations again in the backward pass, to save memory

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def parameters(self) -> int:
        """Count the weights."""
        attention = 2 * self.width * (self.width + self.kv_heads * self.head_width)
        layer = attention + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * layer + (2 * self.vocabulary + 1) * self.width

    def flops_per_token(self) -> float:
        """Count the operations of a forward and a backward pass, for each token.

        As in PaLM (Chowdhery et al. 2022, appendix B): 6 for each weight of a product, and those of
        the attention. The embedding is no product. Recomputed activations do not count.
        """
        multiplied = self.parameters() - self.vocabulary * self.width
        return 6 * multiplied + 12 * self.layers * self.width * self.sequence


SIZES = {
    "tiny": Config(64, 2, 4, 2, 192, 64, vocabulary=256),
    "60m": Config(512, 8, 8, 4, 1536, 512),
    "1b": Config(2048, 16, 32, 8, 8192, 2048),
    "7b": Config(4096, 32, 32, 32, 11_008, 4096),
}


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width = config.head_width
        shared = config.kv_heads * config.head_width
        self.wq = nn.Linear(config.width, config.width, bias=False)
        self.wk = nn.Linear(config.width, shared, bias=False)
        self.wv = nn.Linear(config.width, shared, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(projection: nn.Module) -> Tensor:
            """Project to (batch, heads, length, head width); only own heads of a tensor group."""
            y: Tensor = projection(x)
            return y.view(batch, length, -1, self.head_width).transpose(1, 2)

        q, k, v = rotate(heads(self.wq), rotary), rotate(heads(self.wk), rotary), heads(self.wv)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        found: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))
        return found


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return found


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.recompute = config.recompute
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        if self.recompute:
            again: Tensor = checkpoint(self._forward, x, rotary, use_reentrant=False)
            return again
        return self._forward(x, rotary)

    def _forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        found: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return found


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean loss in nats. `wanted` are the tokens after each of `tokens` (batch,
        length).
        """
        # Computed in each pass, at little cost: a buffer would have to be filled after a start on
        # the meta device.
        rotary = angles(self.config, tokens.shape[1], tokens.device)
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotary)
        scores = self.output(self.norm(x)).flatten(0, 1).float()
        return functional.cross_entropy(scores, wanted.flatten())


def angles(config: Config, length: int, device: torch.device) -> Tensor:
    """Compute cosines and sines of rotary positions (2, length, head width / 2), in 32 bits."""
    half = torch.arange(0, config.head_width, 2, device=device, dtype=torch.float32)
    speeds = config.theta ** (-half / config.head_width)
    turns = torch.outer(torch.arange(length, device=device, dtype=torch.float32), speeds)
    return torch.stack([turns.cos(), turns.sin()])


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Apply rotary positions (Su et al. 2021); halves of the last axis are the coordinates."""
    cosine, sine = rotary[0], rotary[1]
    one, other = x.float().chunk(2, dim=-1)
    turned = torch.cat([one * cosine - other * sine, one * sine + other * cosine], dim=-1)
    return turned.to(x.dtype)


def first_weights(config: Config, seed: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yield the initial weights by name, a part of the model at a time, not sharded.

    Each weight has its own seed, so weights do not depend on the number of processes. Layers that
    write into the residual stream start smaller, as in GPT-2.
    """
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Llama(config).named_parameters()}
    rng = torch.Generator(device)
    part: dict[str, Tensor] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        if "norm" in name:
            part[name] = torch.ones(shape, device=device)
        else:
            residual = name.endswith(("wo.weight", "w2.weight"))
            deviation = 0.02 / math.sqrt(2 * config.layers) if residual else 0.02
            rng.manual_seed((seed << 20) + number)
            part[name] = torch.randn(shape, device=device, generator=rng) * deviation
        if sum(tensor.numel() for tensor in part.values()) > 1 << 27:
            yield part
            part = {}
    yield part
