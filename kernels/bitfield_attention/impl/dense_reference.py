"""Dense float64 reference of bitfield attention, written from the definition of the mask."""

from __future__ import annotations

import torch


def bitfield_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    words: torch.Tensor,
    positions: torch.Tensor | None = None,
    kv_words: torch.Tensor | None = None,
    kv_positions: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention densely in float64, with [Tq, Tk] scores in memory; autograd gives the gradients.

    Args:
        query: [B, Hq, Tq, D].
        key, value: [B, Hkv, Tk, D]; Hq is a multiple of Hkv.
        words, positions: [B, Tq] of queries; positions None for 0, 1, 2, ...
        kv_words, kv_positions: [B, Tk] of keys; None for those of queries.
        scale: factor on the scores, 1/sqrt(D) if None.
        window: reach of the causal term in tokens, or None.

    Returns:
        output [B, Hq, Tq, D] and natural log-sum-exp [B, Hq, Tq], both float64. A query that sees no key has output 0
        and log-sum-exp -inf. The gradients of this query, and of a key that no query sees, are exactly 0, even if their
        values are not finite.
    """
    if kv_words is None:
        kv_words, kv_positions = words, positions if kv_positions is None else kv_positions
    mask = reference_mask(words, positions, kv_words, kv_positions, window)[:, None]
    group = query.shape[1] // key.shape[1]
    # What no pair uses is taken out first: 0 * inf would be nan, forward or backward.
    q = query.double().masked_fill(~mask.any(-1)[..., None], 0.0)
    k, v = (x.double().masked_fill(~mask.any(-2)[..., None], 0.0).repeat_interleave(group, dim=1) for x in (key, value))
    scores = (q @ k.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, -torch.inf)
    most = scores.detach().amax(-1, keepdim=True)
    most = torch.where(most == -torch.inf, 0.0, most)
    weights = (scores - most).exp()
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    out = torch.where(empty, 0.0, weights @ v / total)
    lse = torch.where(empty, -torch.inf, most + total.log())
    return out, lse[..., 0]


def reference_mask(
    words: torch.Tensor,
    positions: torch.Tensor | None,
    kv_words: torch.Tensor,
    kv_positions: torch.Tensor | None,
    window: int | None = None,
) -> torch.Tensor:
    """Return the mask by the definition of mask words: bool [B, Tq, Tk], True where the query sees the key."""
    query, key = _fields(words, positions), _fields(kv_words, kv_positions)
    shape = (*words.shape, kv_words.shape[1])
    ask, give = ([x[:, :, None].expand(shape) for x in query], [x[:, None, :].expand(shape) for x in key])
    sign, document, island, bits, place = ask
    _, kv_document, kv_island, kv_bits, kv_place = give
    distance = place - kv_place
    causal = sign.eq(1) & distance.ge(0) & torch.bitwise_and(bits, kv_bits).gt(0)
    if window is not None:
        causal = causal & distance.lt(window)
    together = island.eq(kv_island) & island.gt(0)
    return document.eq(kv_document) & document.gt(0) & (causal | together)


def _fields(words: torch.Tensor, positions: torch.Tensor | None) -> list[torch.Tensor]:
    """Return [1 if causal else 0, document, island, modality bits, position], each int64 [B, T], read from mask words."""
    if positions is None:
        positions = torch.arange(words.shape[1], device=words.device).expand_as(words)
    bits, rest = words.remainder(1 << 32), words.div(1 << 32, rounding_mode="floor")
    island, rest = rest.remainder(1 << 16), rest.div(1 << 16, rounding_mode="floor")
    document, rest = rest.remainder(1 << 15), rest.div(1 << 15, rounding_mode="floor")
    return [-rest, document, island, bits, positions.long()]
