"""Torch op `torch.ops.mmcompile.bitfield_attention` and its backward, with fakes, autograd and FLOP formulas.

Both outputs are differentiable, as partial results of one attention are merged by their log-sum-exp.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from mmcompile.kernels.bitfield_attention.impl import eager
from mmcompile.kernels.bitfield_attention.impl import triton_launch as triton
from mmcompile.kernels.bitfield_attention.impl.backends import resolve_impl
from mmcompile.kernels.bitfield_attention.masks.plan_cache import PlanCache
from mmcompile.kernels.bitfield_attention.masks.visible_pairs import visible_pairs
from mmcompile.kernels.bitfield_attention.masks.words import MaskWords

_PLANS = PlanCache()  # One for the process: an op has nowhere else to keep what its calls share.


@torch.library.custom_op("mmcompile::bitfield_attention", mutates_args=())
def bitfield_attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    words: torch.Tensor,
    positions: torch.Tensor | None,
    kv_words: torch.Tensor,
    kv_positions: torch.Tensor | None,
    scale: float,
    window: int | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention under mask words.

    Args and returns are those of `kernels.bitfield_attention.bitfield_attention`, which checks them; the words of the
    keys are given, and the log-sum-exp of each row, [B, H, Tq] in float32 or wider, is always returned.
    """
    mask = MaskWords(words, _or_natural(positions, words), kv_words, _or_natural(kv_positions, kv_words), window)
    if resolve_impl(impl, q, v) == "eager":
        return eager.forward(q, k, v, mask, scale, _PLANS.plan(mask.tensors, window))
    return triton.forward(q, k, v, mask, scale, _PLANS.plan(mask.tensors, window, "auto", prod(q.shape[:2])))


@bitfield_attention_op.register_fake
def attention_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors in the shapes and dtypes of the results of `bitfield_attention_op`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=wide)


@torch.library.custom_op("mmcompile::bitfield_attention_backward", mutates_args=())
def bitfield_attention_backward_op(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    words: torch.Tensor,
    positions: torch.Tensor | None,
    kv_words: torch.Tensor,
    kv_positions: torch.Tensor | None,
    scale: float,
    window: int | None,
    impl: str,
    grad_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value.

    Args:
        dout, dlse: gradients of the outputs of the forward op; `dlse` None is zero.
        out, lse: outputs of the forward op.
        grad_dtype: dtype of the gradients; None for the dtype of each input. float32 is for gradients summed over ranks.

    Returns:
        dQ, dK, dV, contiguous, in the shapes of `q`, `k`, `v`.
    """
    mask = MaskWords(words, _or_natural(positions, words), kv_words, _or_natural(kv_positions, kv_words), window)
    if resolve_impl(impl, q, v) == "eager":
        plan = _PLANS.plan(mask.tensors, window)
        return eager.backward(dout, dlse, q, k, v, out, lse, mask, scale, plan, grad_dtype)
    plan = _PLANS.plan(mask.tensors, window, "auto", prod(q.shape[:2]))
    return triton.backward(dout, dlse, q, k, v, out, lse, mask, scale, plan, grad_dtype)


@bitfield_attention_backward_op.register_fake
def _(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_dtype = options[-1] if isinstance(options[-1], torch.dtype) else None
    dq, dk, dv = (x.new_empty(x.shape, dtype=grad_dtype) for x in (q, k, v))
    return dq, dk, dv


def _or_natural(positions: torch.Tensor | None, words: torch.Tensor) -> torch.Tensor:
    return _natural(words.shape[1], words.device).expand_as(words) if positions is None else positions


@lru_cache(maxsize=16)
def _natural(tokens: int, device: torch.device) -> torch.Tensor:
    # The same tensor for every layer: on an accelerator plans are found by the identity of what they were made from.
    return torch.arange(tokens, dtype=torch.int32, device=device)


def save_call(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Save the tensors and options of an attention op for its backward op, in the order of that op's arguments."""
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:7])
    ctx.options = inputs[7:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(saved[3])
    backward = torch.ops.mmcompile.bitfield_attention_backward
    return *backward(dout, dlse, *saved, *ctx.options), *[None] * 7


bitfield_attention_op.register_autograd(_backward, setup_context=save_call)


@register_flop_formula(torch.ops.mmcompile.bitfield_attention, get_raw=True)
def bitfield_attention_flops(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *call: Any, out_val: Any = None, **options: Any
) -> int:
    """Return the FLOPs of a forward op: two products over the pairs that its queries see."""
    return 2 * (q.shape[-1] + v.shape[-1]) * q.shape[1] * _pairs(*call)


@register_flop_formula(torch.ops.mmcompile.bitfield_attention_backward, get_raw=True)
def bitfield_attention_backward_flops(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *call: Any,
    out_val: Any = None,
    **options: Any,
) -> int:
    """Return the FLOPs of a backward op: five products over the visible pairs, as scores are computed again."""
    return 2 * (3 * q.shape[-1] + 2 * v.shape[-1]) * q.shape[1] * _pairs(*call)


def _pairs(
    words: torch.Tensor,
    positions: torch.Tensor | None,
    kv_words: torch.Tensor,
    kv_positions: torch.Tensor | None,
    scale: float,
    window: int | None,
    *options: object,
) -> int:
    """Return the number of (query, key) pairs with attention in a batch, for one head; all pairs if words are fake tensors."""
    if isinstance(words, FakeTensor) or words.device.type == "meta":
        return prod((*words.shape, kv_words.shape[1]))
    return visible_pairs(words, positions, kv_words, kv_positions, window=window)
