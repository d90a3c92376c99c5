"""A language model of one or two blocks into which a test puts an op of its choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, CLASSES = 8, 2, 11
Mix = Callable[["Block", Tensor], Tensor]
"""What a block does after attention: (the block, hidden [B, T, WIDTH]) -> the same shape."""


class Block(nn.Module):
    """Causal attention, then the op under test."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.3)
        self.mix = mix

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.out(mixed)
        return hidden + self.mix(self, hidden)


class TinyLanguage(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, mix: Mix, *, num_blocks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Block(mix) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def tiny_batch(length: int = 40) -> dict[str, Any]:
    """Two rows; labels of the next token, none for the last."""
    ids = torch.randint(0, CLASSES, (2, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": F.pad(ids[:, 1:], (0, 1), value=-100)}
