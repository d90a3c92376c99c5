"""Attention over a sequence whose tokens are spread over ranks: `torch.ops.mmcompile.context_parallel_attention`.

Every rank has the queries, keys and values of its own tokens, equally many on each rank, any tokens in any order. Keys
and values of all ranks are gathered, a few heads at a time; the gather of the next heads overlaps with attention:

    forward     gather(i + 1)  ||  attention(i)
    backward    gather(i + 1)  ||  gradients(i)  ||  scatter_sum(i - 1)

Gathered keys are in the order of ranks. Attention reads the place of every token from its position, so nothing is put
back in order. Gradients of keys and values are added over ranks in float32 or wider.

Source: all-gather context parallelism by heads, Llama 3 (arXiv 2407.21783, section 3.3.2) and Cornstarch (arXiv
2503.11367).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from mmcompile.errors import ConfigError, MaskError
from mmcompile.kernels.bitfield_attention.ops import (
    attention_shapes,
    bitfield_attention_backward_flops,
    bitfield_attention_backward_op,
    bitfield_attention_flops,
    bitfield_attention_op,
    save_call,
)
from mmcompile.kernels.bitfield_attention.parallel.head_exchange import KeySums, gathered_heads
from mmcompile.kernels.process_groups import Channel, registered_group


@torch.library.custom_op("mmcompile::context_parallel_attention", mutates_args=())
def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    words: torch.Tensor,
    positions: torch.Tensor,
    kv_words: torch.Tensor,
    kv_positions: torch.Tensor,
    scale: float,
    window: int | None,
    head_stride: int,
    group_name: str,
    num_ranks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention from this rank's tokens to the tokens of all ranks.

    All ranks of the group must call the op with equal options.

    Args:
        q: [B, H, T, D] of this rank's T tokens.
        k: [B, Hkv, T, D], H a multiple of Hkv.
        v: [B, Hkv, T, Dv].
        words, positions: [B, T] int64 words and integer positions of this rank's tokens; word 0 for rows without a token.
        kv_words, kv_positions: [B, P * T], words and positions of the tokens of all P ranks in order (`gather_words`).
        scale: factor on the scores.
        window: causal reach in tokens, or None.
        head_stride: number of key/value heads gathered at a time; 0 for all at once (`head_stride.choose_head_stride`).
        group_name: name of a group given to `register_group`; not looked up for one rank.
        num_ranks: number of ranks P in the group.

    Returns:
        O, [B, H, T, Dv] in the dtype of `q`, and the log-sum-exp of each row, [B, H, T] in float32 or wider.

    Raises:
        ConfigError: the group is not registered or has another size; a head stride below 0 or above Hkv.
        MaskError: `kv_words` is not of P * T tokens.
    """
    _check(k, kv_words, head_stride, num_ranks)
    call = words, positions, kv_words, kv_positions, scale, window, "auto"
    if num_ranks == 1:
        return bitfield_attention_op(q, k, v, *call)
    channel = Channel(registered_group(group_name, num_ranks), q.device)
    out, lse = attention_shapes(q, k, v)
    for heads, keys, values in gathered_heads(channel, k, v, head_stride or k.shape[1], num_ranks):
        queries = _query_heads(heads, q, k)
        out[:, queries], lse[:, queries] = bitfield_attention_op(q[:, queries], keys, values, *call)
    return out, lse


context_parallel_attention.register_fake(attention_shapes)


@torch.library.custom_op("mmcompile::context_parallel_attention_backward", mutates_args=())
def context_parallel_attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    words: torch.Tensor,
    positions: torch.Tensor,
    kv_words: torch.Tensor,
    kv_positions: torch.Tensor,
    scale: float,
    window: int | None,
    head_stride: int,
    group_name: str,
    num_ranks: int,
    need_keys: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of this rank's queries, keys and values; key and value gradients sum over the queries of all ranks.

    Args:
        dout, dlse: gradients of the outputs of the forward op; `dlse` None is zero.
        out, lse: outputs of the forward op.
        need_keys: whether keys or values need a gradient, the same on all ranks. If not, ranks exchange no
            gradients, and dK and dV are empty.
    """
    call = words, positions, kv_words, kv_positions, scale, window, "auto"
    if num_ranks == 1:
        dq, dk, dv = bitfield_attention_backward_op(dout, dlse, q, k, v, out, lse, *call)
        return (dq, dk, dv) if need_keys else (dq, k.new_empty(0), v.new_empty(0))
    channel = Channel(registered_group(group_name, num_ranks), q.device)
    wide = torch.promote_types(k.dtype, torch.float32)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    sums = KeySums(channel, k, v, head_stride or k.shape[1], num_ranks, wide)
    for heads, keys, values in gathered_heads(channel, k, v, head_stride or k.shape[1], num_ranks):
        queries = _query_heads(heads, q, k)
        of_out = dout[:, queries], None if dlse is None else dlse[:, queries]
        part = q[:, queries], keys, values, out[:, queries], lse[:, queries]
        dq[:, queries], dk, dv = bitfield_attention_backward_op(*of_out, *part, *call, wide)
        if need_keys:
            sums.add(heads, dk, dv)
    return (dq, *sums.result()) if need_keys else (dq, k.new_empty(0), v.new_empty(0))


@context_parallel_attention_backward.register_fake
def _(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *_, need_keys = options
    dq = q.new_empty(q.shape)
    return (dq, k.new_empty(k.shape), v.new_empty(v.shape)) if need_keys else (dq, k.new_empty(0), v.new_empty(0))


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(saved[3])
    need_keys = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    backward = torch.ops.mmcompile.context_parallel_attention_backward
    dq, dk, dv = backward(dout, dlse, *saved, *ctx.options, need_keys)
    return dq, *((dk, dv) if need_keys else (None, None)), *[None] * 9


context_parallel_attention.register_autograd(_backward, setup_context=save_call)


@torch.library.custom_op("mmcompile::gather_words", mutates_args=())
def gather_words(
    words: torch.Tensor, positions: torch.Tensor, group_name: str, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather words and positions of the tokens of all ranks, once per microbatch, if the host does not compute them.

    Args:
        words: [B, T] int64 of this rank's tokens.
        positions: [B, T] integer of this rank's tokens.

    Returns:
        kv_words [B, P * T] int64 and kv_positions [B, P * T] in the dtype of `positions`, in the order of ranks.
    """
    if num_ranks == 1:
        return words.clone(), positions.clone()
    channel = Channel(registered_group(group_name, num_ranks), words.device)
    message = torch.stack((words, positions.to(torch.int64))).permute(2, 0, 1).contiguous()
    target = message.new_empty(num_ranks * message.shape[0], *message.shape[1:])
    kv_words, kv_positions = channel.gather(target, message).wait().permute(1, 2, 0).unbind()
    return kv_words.clone(memory_format=torch.contiguous_format), kv_positions.to(
        positions.dtype, copy=True
    ).contiguous()


@gather_words.register_fake
def _(
    words: torch.Tensor, positions: torch.Tensor, group_name: str, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = words.shape[0], num_ranks * words.shape[1]
    return words.new_empty(shape), positions.new_empty(shape)


register_flop_formula(torch.ops.mmcompile.context_parallel_attention, get_raw=True)(bitfield_attention_flops)
register_flop_formula(torch.ops.mmcompile.context_parallel_attention_backward, get_raw=True)(
    bitfield_attention_backward_flops
)


def _check(k: torch.Tensor, kv_words: torch.Tensor, head_stride: int, num_ranks: int) -> None:
    if not 0 <= head_stride <= k.shape[1]:
        raise ConfigError(
            f"head_stride is {head_stride}, and there are {k.shape[1]} key/value heads; wanted 1 to {k.shape[1]}, or 0 for all"
        )
    if kv_words.shape[1] != num_ranks * k.shape[2]:
        raise MaskError(
            f"kv_words are {list(kv_words.shape)}, wanted [{k.shape[0]}, {num_ranks * k.shape[2]}]: those of the "
            f"{k.shape[2]} tokens of each of {num_ranks} ranks, free rows included"
        )


def _query_heads(heads: slice, q: torch.Tensor, k: torch.Tensor) -> slice:
    """Return the slice of query heads that use the given key heads."""
    share = q.shape[1] // k.shape[1]
    return slice(heads.start * share, heads.stop * share)
