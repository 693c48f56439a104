"""A small vision transformer in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIDE = 8  # patches of a side


class Vit(nn.Module):
    """A ViT with 8 x 8 patches for images of any size, learned positions and a class token."""

    def __init__(
        self,
        size: int,
        classes: int,
        width: int = 64,
        depth: int = 4,
        heads: int = 4,
    ) -> None:
        super().__init__()
        patch = size // SIDE
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, SIDE**2 + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.answer = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, size, size), as bytes, to scores (N, classes)."""
        x = self.patches(images.float().div(127.5).sub(1)).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return torch.as_tensor(self.answer(self.norm(self.layers(x)[:, 0])))
