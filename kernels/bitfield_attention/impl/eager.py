"""Bitfield attention in plain torch, forward and backward: the CPU path, and a check of Triton on any device.

    O_i = sum over visible j of exp(scale q_i . k_j - L_i) v_j    L_i = log(sum over visible j of exp(scale q_i . k_j))

Query heads that share a key head are laid into the rows of one product, [G Tq, D] x [D, Tk]. Work follows the plan's
non-empty tiles chunk by chunk; nothing of size [Tq, Tk] exists, and every sum has a fixed order, so results repeat bit
by bit.

Backward recomputes P = exp(scale Q K^T - L) of each chunk:
    dV += P^T dO     dS = P * (dO V^T - delta)     dQ = scale dS K     dK += scale dS^T Q    delta_i = O_i . dO_i - dL_i

A query that sees no key has O = 0, L = -inf and zero gradients. Values that a query does not see do not affect it, even
infinite ones.
"""

from __future__ import annotations

from math import prod

import torch

from mmcompile.kernels.bitfield_attention.impl.chunks import Chunk, KeyRange, chunks
from mmcompile.kernels.bitfield_attention.masks.block_plan import BlockPlan
from mmcompile.kernels.bitfield_attention.masks.words import MaskWords

MAX_SCORES = 1 << 20
"""Maximum number of scores held at once, over all heads: more leaves the cache, fewer makes small products. [Empirical]"""


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: MaskWords, scale: float, plan: BlockPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention output O and log-sum-exp L, chunk by chunk.

    Args:
        q: [B, H, Tq, D], any float dtype; sums are kept in float32 or wider.
        k: [B, Hkv, Tk, D], H a multiple of Hkv.
        v: [B, Hkv, Tk, Dv].
        mask: words, positions and window.
        scale: factor on the scores.
        plan: block plan of the mask.

    Returns:
        O, [B, H, Tq, Dv] in the dtype of `q`, and L, [B, H, Tq] in float32 or wider.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = _flat(k, wide), _flat(v, wide)
    finite = _finite(keys, values)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(*q.shape[:3], 1, dtype=wide)
    space = _space(q, plan, wide)
    for chunk in chunks(plan, mask, q.shape[1], MAX_SCORES):
        heads = _heads(chunk, k.shape[1])
        query = _take(q, chunk, k.shape[1]).to(wide).mul_(scale)
        top = query.new_full((*query.shape[:2], 1), -torch.inf)
        total, summed = torch.zeros_like(top), query.new_zeros(*query.shape[:2], v.shape[-1])
        for part in chunk.ranges:
            scores = _scores(query, keys[heads, part.keys], mask, chunk, part, space)
            best = torch.maximum(top, scores.amax(-1, keepdim=True))
            # A row that has seen nothing yet keeps -inf; subtracting that would be NaN.
            shift = best.masked_fill(best == -torch.inf, 0)
            weights = scores.sub_(shift).exp_()
            fade = (top - shift).exp_()
            total.mul_(fade).add_(weights.sum(-1, keepdim=True))
            _add_product(summed.mul_(fade), weights, values[heads, part.keys], finite)
            top = best
        _put(out, chunk, summed.div_(total.masked_fill(total == 0, 1)))
        _put(lse, chunk, top.masked_fill_(total == 0, 0).add_(total.log()))
    return out, lse.squeeze(-1)


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: MaskWords,
    scale: float,
    plan: BlockPlan,
    grad_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v for a call of `forward`.

    Args:
        dout: gradient of O, [B, H, Tq, Dv].
        dlse: gradient of L, [B, H, Tq]; None is zero.
        q, k, v, mask, scale, plan: arguments of `forward`.
        out, lse: results O and L of `forward`.
        grad_dtype: dtype of the gradients; None for the dtype of each input.

    Returns:
        dQ, dK, dV in the shapes of `q`, `k`, `v`.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = _flat(k, wide), _flat(v, wide)
    finite = _finite(keys, values)
    dq = torch.empty_like(q, dtype=grad_dtype, memory_format=torch.contiguous_format)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    spaces = _space(q, plan, wide), _space(q, plan, wide)
    for chunk in chunks(plan, mask, q.shape[1], MAX_SCORES):
        heads = _heads(chunk, k.shape[1])
        query, grad, level, result = (_take(x, chunk, k.shape[1]).to(wide) for x in (q, dout, lse.unsqueeze(-1), out))
        empty = level == -torch.inf
        # A row that sees nothing may hold anything, as may its gradient: 0 x inf must not reach its neighbours.
        for x in (query, grad, level):
            x.masked_fill_(empty, 0)
        query.mul_(scale)
        delta = result.mul_(grad).sum(-1, keepdim=True)
        if dlse is not None:
            delta -= _take(dlse.unsqueeze(-1), chunk, k.shape[1]).to(wide).masked_fill(empty, 0)
        summed = torch.zeros_like(query)
        for part in chunk.ranges:
            weights = _scores(query, keys[heads, part.keys], mask, chunk, part, spaces[0]).sub_(level).exp_()
            dv[heads, part.keys].baddbmm_(weights.transpose(1, 2), grad)
            scores = _product(grad, values[heads, part.keys], spaces[1]).sub_(delta).mul_(weights)
            if not finite:
                scores.masked_fill_(weights == 0, 0)
            dk[heads, part.keys].baddbmm_(scores.transpose(1, 2), query)
            _add_product(summed, scores, keys[heads, part.keys], finite)
        _put(dq, chunk, summed.mul_(scale))
    return dq, dk.view(k.shape).to(grad_dtype or k.dtype), dv.view(v.shape).to(grad_dtype or v.dtype)


def _scores(
    query: torch.Tensor, keys: torch.Tensor, mask: MaskWords, chunk: Chunk, part: KeyRange, space: torch.Tensor
) -> torch.Tensor:
    """Return the scores of a chunk's queries with one range of keys, -inf for keys that the mask hides.

    Args:
        query: [b Hkv, G Tq, D] for b batch rows, Hkv key heads, and G query heads per key head.
        keys: [b Hkv, keys, D].
        space: buffer that the scores, [b Hkv, G Tq, keys], are written into.
    """
    scores = _product(query, keys, space)
    for hidden in part.partial:
        seen = mask.tile(chunk.rows, chunk.queries, hidden)
        rows, num_queries, _ = seen.shape
        columns = slice(hidden.start - part.keys.start, hidden.stop - part.keys.start)
        by_query = scores.view(rows, -1, num_queries, scores.shape[-1])[..., columns]
        by_query.masked_fill_(seen.logical_not_()[:, None], -torch.inf)
    return scores


def _product(rows: torch.Tensor, keys: torch.Tensor, space: torch.Tensor) -> torch.Tensor:
    shape = *rows.shape[:2], keys.shape[1]
    return torch.bmm(rows, keys.transpose(1, 2), out=space[: prod(shape)].view(shape))


def _add_product(to: torch.Tensor, weights: torch.Tensor, values: torch.Tensor, finite: bool) -> None:
    """Add weights @ values to `to`. Unless `finite`, an infinite or NaN value adds 0 where its weight is 0, and NaN elsewhere."""
    if finite:
        to.baddbmm_(weights, values)
        return
    bad = values.isfinite().logical_not_().to(values.dtype)
    to.baddbmm_(weights, values.nan_to_num(0, 0, 0))
    to.masked_fill_(torch.bmm((weights != 0).to(values.dtype), bad) != 0, torch.nan)


def _space(q: torch.Tensor, plan: BlockPlan, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty buffer for the scores of the largest key range."""
    # Used for all ranges: fresh memory costs more than the arithmetic.
    tile = q.shape[1] * plan.block_q * plan.block_kv
    return q.new_empty(min(max(MAX_SCORES, tile), prod(q.shape[:3]) * plan.kv_len), dtype=dtype)


def _flat(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).contiguous().flatten(0, 1)


def _heads(chunk: Chunk, num_heads: int) -> slice:
    return slice(chunk.rows.start * num_heads, chunk.rows.stop * num_heads)


def _take(x: torch.Tensor, chunk: Chunk, num_groups: int) -> torch.Tensor:
    """Return a copy of a chunk's queries in `x` [B, H, T, D], with the heads divided into `num_groups` groups.

    Returns:
        [b G, H / G * Tq, D] for b batch rows, G groups and Tq queries.
    """
    part = x[chunk.rows][:, :, chunk.queries]
    rows, heads, tokens, dim = part.shape
    return part.clone(memory_format=torch.contiguous_format).view(rows * num_groups, heads // num_groups * tokens, dim)


def _put(to: torch.Tensor, chunk: Chunk, part: torch.Tensor) -> None:
    target = to[chunk.rows]
    target[:, :, chunk.queries] = part.view(*target.shape[:2], -1, target.shape[-1]).to(to.dtype)


def _finite(*tensors: torch.Tensor) -> bool:
    # A sum that overflows counts as not finite, which is slower but correct.
    return all(bool(x.sum().isfinite()) for x in tensors)
