"""Torch op `torch.ops.mmcompile.packed_attention`, with fake, autograd and FLOP formulas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F


@torch.library.custom_op("mmcompile::packed_attention", mutates_args=())
def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute attention within the segments of a packed sequence.

    Args:
        query: [1, heads, tokens, dim].
        key, value: [1, key heads, tokens, dim]; heads is a multiple of key heads.
        cu_seqlens: [segments + 1] int, ascending from 0 to tokens.
        scale: factor on the scores.

    Returns:
        [1, heads, tokens, dim] in the dtype of `query`. Segments of one length are computed together.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for index, length in _groups(cu_seqlens):
        q, k, v = (_gather(x, index, length) for x in (query, key, value))
        _scatter(out, index, F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1]))
    return out


@packed_attention.register_fake
def _(query: torch.Tensor, *options: object) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.custom_op("mmcompile::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value; the forward of each group of equal segments is computed again."""
    grad_query, grad_key, grad_value = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    for index, length in _groups(cu_seqlens):
        out, q, k, v = (_gather(x, index, length) for x in (grad, query, key, value))
        parts = _segment_gradients(out, q, k, v, scale)
        for target, part in zip((grad_query, grad_key, grad_value), parts, strict=True):
            _scatter(target, index, part)
    return grad_query, grad_key, grad_value


def _segment_gradients(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value of softmax attention, in float32 or wider.

    P = softmax(scale q k^T); dv = P^T do; dP = do v^T; dS = P * (dP - rowsum(dP * P)); dq = scale dS k; dk = scale dS^T q.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    grad, query, key, value = (x.to(wide) for x in (grad, query, key, value))
    repeats = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    weights = ((query @ keys.transpose(-1, -2)) * scale).softmax(-1)
    from_values = grad @ values.transpose(-1, -2)
    scores = weights * (from_values - (from_values * weights).sum(-1, keepdim=True)) * scale
    grad_key, grad_value = scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad
    grad_key, grad_value = (x.unflatten(1, (-1, repeats)).sum(2) for x in (grad_key, grad_value))
    return scores @ keys, grad_key, grad_value


@packed_attention_backward.register_fake
def _(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    return q, k, v


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return *torch.ops.mmcompile.packed_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


packed_attention.register_autograd(_backward, setup_context=_save)


def _groups(cu_seqlens: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield (token indices of all segments of one length, this length), for each distinct length of segments."""
    bounds = cu_seqlens.tolist()
    starts: dict[int, list[int]] = defaultdict(list)
    for start, end in zip(bounds, bounds[1:], strict=False):
        if end > start:
            starts[end - start].append(start)
    for length, firsts in starts.items():
        first = torch.tensor(firsts, device=cu_seqlens.device)
        yield (first[:, None] + torch.arange(length, device=cu_seqlens.device)).flatten(), length


def _gather(x: torch.Tensor, index: torch.Tensor, length: int) -> torch.Tensor:
    """Return the tokens at `index`, in segments of `length` tokens: [1, heads, tokens, dim] -> [segments, heads, length, dim]."""
    return x[0].index_select(1, index).unflatten(1, (-1, length)).transpose(0, 1)


def _scatter(out: torch.Tensor, index: torch.Tensor, part: torch.Tensor) -> None:
    out[0].index_copy_(1, index, part.transpose(0, 1).flatten(1, 2).to(out.dtype))
