"""Dense float64 reference of packed attention, written from the definition."""

from __future__ import annotations

import torch


def packed_attention_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return packed attention by a dense [tokens, tokens] mask, in float64; the arguments are those of `packed_attention`."""
    tokens = query.shape[2]
    segment = torch.bucketize(torch.arange(tokens), cu_seqlens[1:].to(torch.int64), right=True)
    same = segment[:, None] == segment[None, :]
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (query.double() @ key.transpose(-1, -2)) * scale
    return scores.masked_fill(~same, float("-inf")).softmax(-1) @ value
