"""Projectors: from the hidden size of an encoder to the embedding size of the language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmcompile.errors import ConfigError

DEFAULT_QUERIES = 32
_HEAD_SIZE = 64


def make_projector(kind: str, features: int, hidden: int, num_queries: int) -> nn.Module:
    """Return a projector of the given kind with new weights.

    Args:
        features: hidden size of the encoder.
        hidden: embedding size of the language model.
        num_queries: number of tokens that a `"qformer"` makes of an image or audio clip.

    Raises:
        ConfigError: no such kind.
    """
    if kind not in PROJECTORS:
        raise ConfigError(f"projector is {kind!r}; choose one of {', '.join(map(repr, PROJECTORS))}, or give a module")
    return PROJECTORS[kind](features, hidden, **({"num_queries": num_queries} if kind == "qformer" else {}))


class MLP(nn.Module):
    """Two linear maps with a GELU between them, as in LLaVA-1.5 (arXiv 2310.03744)."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(features, hidden)
        self.linear_2 = nn.Linear(hidden, hidden)

    def forward(self, features: Tensor) -> Tensor:
        """Map [..., features] to [..., hidden]."""
        return self.linear_2(F.gelu(self.linear_1(features)))


class QFormer(nn.Module):
    """Projector with learned queries that attend to features, in the manner of BLIP-2 (arXiv 2301.12597).

    The number of output tokens is the number of queries, regardless of the image's size.
    """

    def __init__(self, features: int, hidden: int, num_queries: int = DEFAULT_QUERIES, depth: int = 2) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.empty(num_queries, hidden))
        nn.init.normal_(self.queries, std=0.02)
        self.features_norm = nn.LayerNorm(features)
        self.blocks = nn.ModuleList(_QFormerBlock(features, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, features: Tensor, valid: Tensor | None = None) -> Tensor:
        """Map [images, tokens, features] to [images, queries, hidden]; tokens where `valid` is False are not read."""
        features = self.features_norm(features)
        hidden = self.queries.to(features.dtype).expand(features.shape[0], -1, -1)
        for block in self.blocks:
            hidden = block(hidden, features, valid)
        return self.norm(hidden)


class _QFormerBlock(nn.Module):
    """Pre-norm transformer block: self-attention of queries, cross-attention to features, feed-forward."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.self_norm = nn.LayerNorm(hidden)
        self.self_attention = _Attention(hidden, hidden)
        self.cross_norm = nn.LayerNorm(hidden)
        self.cross_attention = _Attention(hidden, features)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: Tensor, features: Tensor, valid: Tensor | None) -> Tensor:
        normed = self.self_norm(hidden)
        hidden = hidden + self.self_attention(normed, normed, None)
        hidden = hidden + self.cross_attention(self.cross_norm(hidden), features, valid)
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


class _Attention(nn.Module):
    """Multi-head attention of one sequence to another, with a mask of valid keys."""

    def __init__(self, hidden: int, read: int) -> None:
        super().__init__()
        self.num_heads = max(n for n in range(1, max(1, hidden // _HEAD_SIZE) + 1) if hidden % n == 0)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(read, hidden)
        self.value = nn.Linear(read, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, hidden: Tensor, read: Tensor, valid: Tensor | None) -> Tensor:
        query, key, value = (self._heads(x) for x in (self.query(hidden), self.key(read), self.value(read)))
        mask = None if valid is None else valid[:, None, None, :]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


PROJECTORS: Mapping[str, Callable[..., nn.Module]] = {
    "linear": lambda features, hidden: nn.Linear(features, hidden),
    "mlp": MLP,
    "qformer": QFormer,
}
"""Kind of a projector -> function that makes it from the sizes that `make_projector` describes, `features` and `hidden` first."""
