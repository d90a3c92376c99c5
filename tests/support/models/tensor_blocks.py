"""A language model whose blocks each hold one way to write a projection, an op between, and a projection back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER, HEADS, CLASSES = 8, 16, 4, 12
Way = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """A norm, the way under test, and a residual."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.other = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.pair, self.triad = nn.Linear(WIDTH, 2 * INNER), nn.Linear(WIDTH, 3 * INNER)
        self.few, self.odd = nn.Linear(WIDTH, INNER // 2), nn.Linear(WIDTH, 15)
        self.down, self.down_odd = nn.Linear(INNER, WIDTH), nn.Linear(15, WIDTH)
        self.down_pair = nn.Linear(2 * INNER, WIDTH)
        self.low, self.high = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, INNER, bias=False)
        self.inner_norm, self.head_norm = nn.LayerNorm(INNER), nn.LayerNorm(INNER // HEADS)
        self.scale, self.temperature = nn.Parameter(torch.rand(INNER)), nn.Parameter(torch.rand(HEADS, 1, 1))
        self.conv = nn.Conv1d(INNER, INNER, 1)
        self.experts = nn.Parameter(torch.rand(3, WIDTH, WIDTH))
        self.down_matrix = nn.Parameter(torch.rand(INNER, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.way(self, self.norm(hidden))


class Ways(nn.Module):
    """Embedding, a block for each way, head."""

    def __init__(self, ways: Mapping[str, Way], *, classes: int = CLASSES, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, WIDTH)
        self.layers = nn.ModuleList(Block(way) for way in ways.values())
        self.head = nn.Linear(WIDTH, classes)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def batch(length: int = 6) -> dict[str, Any]:
    """Two rows; labels of the next token, none for the last."""
    ids = torch.randint(0, CLASSES, (2, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": F.pad(ids[:, 1:], (0, 1), value=-100)}


def heads(x: Tensor) -> Tensor:
    """[B, T, inner] -> [B, heads, T, width of a head]."""
    return x.unflatten(-1, (-1, INNER // HEADS)).transpose(1, 2)


def together(x: Tensor) -> Tensor:
    """[B, heads, T, width] -> [B, T, inner]."""
    return x.transpose(1, 2).flatten(2)


def gated(block: Block, x: Tensor) -> Tensor:
    return block.down(F.silu(block.up(x)) * block.other(x))


def chunked(block: Block, x: Tensor) -> Tensor:
    gate, up = block.pair(x).chunk(2, dim=-1)
    return block.down(F.silu(gate) * up)


def split_uneven(block: Block, x: Tensor) -> Tensor:
    query, key, value = block.pair(x).split([INNER, INNER // 2, INNER // 2], dim=-1)
    return block.down_pair(torch.cat([query.tanh(), key * value, value], -1))


def sliced(block: Block, x: Tensor) -> Tensor:
    projected = block.pair(x)
    return block.down(projected[..., :INNER].relu() * projected[..., INNER:])


def glu(block: Block, x: Tensor) -> Tensor:
    return block.down(F.glu(block.pair(x)))


def unbound(block: Block, x: Tensor) -> Tensor:
    first, second = block.pair(x).view(2, -1, 2, INNER).unbind(-2)
    return block.down(first * second.tanh())


def selected(block: Block, x: Tensor) -> Tensor:
    both = block.pair(x).unflatten(-1, (2, INNER))
    return block.down(both[..., 0, :] + both.select(2, 1).sin())


def interleaved(block: Block, x: Tensor) -> Tensor:
    """Heads outside, queries, keys and values inside; scores written out."""
    q, k, v = block.triad(x).view(2, -1, HEADS, 3, INNER // HEADS).permute(3, 0, 2, 1, 4)
    scores = q @ k.transpose(-1, -2) * block.temperature
    return block.down(together(scores.softmax(-1) @ v))


def merged(block: Block, x: Tensor) -> Tensor:
    """Heads in the batch, as with bmm."""
    q, k, v = (heads(part(x)).reshape(2 * HEADS, -1, INNER // HEADS) for part in (block.up, block.other, block.up))
    mixed = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
    return block.down(together(mixed.view(2, HEADS, -1, INNER // HEADS)))


def grouped(block: Block, x: Tensor) -> Tensor:
    """Two key/value heads for four query heads, left to the op."""
    q, k, v = heads(block.up(x)), heads(block.few(x)), heads(block.few(x).tanh())
    return block.down(together(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))


def repeated(block: Block, x: Tensor) -> Tensor:
    """The same, repeated by the model; a mask for each head."""
    q, k = block.head_norm(heads(block.up(x))), heads(block.few(x)).repeat_interleave(2, dim=1)
    mask = torch.arange(HEADS)[:, None, None] * torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
    return block.down(together(F.scaled_dot_product_attention(q, k, k, attn_mask=mask)))


def scaled(block: Block, x: Tensor) -> Tensor:
    return block.down(torch.where(block.up(x) > 0, block.other(x) * block.scale, 0.5))


def stacked(block: Block, x: Tensor) -> Tensor:
    return block.down(torch.stack([block.up(x), block.other(x)]).amax(0).flip(1).cumsum(1))


def rearranged(block: Block, x: Tensor) -> Tensor:
    """Tokens picked, padded and rolled; nothing touches the inner dim."""
    inner = F.pad(block.up(x)[:, [3, 1, 0]], (0, 0, 2, 1)).roll(1, 1)
    return block.down(inner.index_select(1, torch.tensor([5, 4, 3, 2, 1, 0])).expand(2, -1, -1))


def adapted(block: Block, x: Tensor) -> Tensor:
    """A low-rank adapter beside a projection."""
    return block.down((block.up(x) + 2.0 * block.high(block.low(x))).relu())


def chained(block: Block, x: Tensor) -> Tensor:
    """Two pairs of projections, no residual between."""
    return block.down(F.gelu(block.up(block.down(F.gelu(block.other(x))))))


def matrix(block: Block, x: Tensor) -> Tensor:
    """A weight with inputs first and a bias, as in GPT-2."""
    return torch.addmm(block.norm.bias, block.up(x).relu().flatten(0, 1), block.down_matrix).view(x.shape)


def half_whole(block: Block, x: Tensor) -> Tensor:
    """What meets the gate comes from no projection: each rank takes its part of it."""
    return block.down(block.up(x) * torch.cat([x, x.sin()], -1))


SHARDED: Mapping[str, Way] = {
    way.__name__: way
    for way in (
        *(gated, chunked, split_uneven, sliced, glu, unbound, selected, interleaved, merged, grouped, repeated, scaled),
        *(stacked, rearranged, adapted, chained, matrix, half_whole),
    )
}
"""Ways that two ranks can share."""


def normalized(block: Block, x: Tensor) -> Tensor:
    return block.down(block.inner_norm(block.up(x)))


def routed(block: Block, x: Tensor) -> Tensor:
    weights, chosen = block.up(x).softmax(-1).topk(2)
    return block.down(F.one_hot(chosen, INNER).mul(weights[..., None]).sum(-2))


def convolved(block: Block, x: Tensor) -> Tensor:
    return block.down(block.conv(block.up(x).transpose(1, 2)).transpose(1, 2))


def uneven(block: Block, x: Tensor) -> Tensor:
    return block.down_odd(block.odd(x).relu())


def across_tokens(block: Block, x: Tensor) -> Tensor:
    """Attention over the inner dim."""
    inner = block.up(x)
    return block.down(inner @ (inner.transpose(1, 2) @ inner).softmax(-1))


def experts(block: Block, x: Tensor) -> Tensor:
    return torch.matmul(x[:, None], block.experts).sum(1)


WHOLE: Mapping[Way, str] = {
    normalized: "aten.layer_norm normalizes over the sharded dim",
    routed: "aten.softmax works along the sharded dim",
    convolved: "no rule says what aten.conv1d does to a sharded dim",
    uneven: "15 outputs do not divide by 2",
    across_tokens: "it sums over the sharded dim, which is no dim of a weight",
}
"""Ways that ranks compute alike -> the reason given."""
