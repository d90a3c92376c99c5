"""Bitfield attention on the GPU: launches of the Triton kernels over a block plan.

Needs CUDA tensors, or TRITON_INTERPRET=1 set before Triton is first imported, which runs the same kernels in NumPy.
There 16-bit inputs are computed in float32, as NumPy has no bfloat16. Triton is imported when a kernel is first used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from mmcompile.errors import ConfigError
from mmcompile.kernels.bitfield_attention.impl.triton_configs import (
    DTYPES,
    HEAD_DIMS,
    Config,
    Kernel,
    block_d,
    config,
    precision,
)
from mmcompile.kernels.bitfield_attention.masks.block_plan import BlockPlan, TileLists
from mmcompile.kernels.bitfield_attention.masks.words import MaskWords

_SIDE = 64
"""Number of rows of one head that a Triton program handles in kernels that compute no scores, such as `prepare`."""


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskWords,
    scale: float,
    plan: BlockPlan,
    *,
    tiles: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention output O and log-sum-exp L on the GPU; arguments and results are those of `eager.forward`.

    Args:
        q, k, v: float32, float16 or bfloat16, all of one head dim: 64, 96, 128 or 256.
        scale: factor on the scores, positive.
        tiles: compile options, instead of the shipped ones.

    Raises:
        ConfigError: Triton is missing, or arguments that the kernels do not support.
    """
    call = _call(q, k, v, mask, scale, plan)
    tiles = _fit(tiles or _tiles("forward", call), plan)
    lists, heads = plan.queries, call.heads
    out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
    lse = out.new_empty(q.shape[:3], dtype=torch.float32)
    partial_out = out.new_empty((lists.num_slots, heads, plan.block_q, q.shape[-1]), dtype=torch.float32)
    partial_lse = partial_out.new_empty(partial_out.shape[:3])
    kernels, blocks = _forward_kernels(), -(-plan.q_len // plan.block_q)
    with torch.cuda.device_of(q):
        kernels.attend[_grid(lists.items, plan.block_q // tiles.block_m, heads)](
            *_descriptors(tiles.block_m, call.q), *_descriptors(tiles.block_n, call.k, call.v),
            *_descriptors(tiles.block_g, call.k, call.v), out, lse, partial_out, partial_lse, *call.mask,
            lists.items, lists.other, plan.q_len, plan.kv_len, blocks, heads, call.group, scale, plan.window or 0,
            **call.constants, **_constants(tiles),
        )  # fmt: skip
        if len(lists.splits):
            side = min(_SIDE, plan.block_q)
            kernels.merge[_grid(lists.splits, plan.block_q // side, heads)](
                partial_out, partial_lse, lists.splits, out, lse, plan.q_len, blocks, heads,
                BLOCK_M=side, BLOCK_Q=plan.block_q, **_columns(q),
            )  # fmt: skip
    return out.to(q.dtype), lse


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
    *,
    query_tiles: Config | None = None,
    key_tiles: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dQ, dK and dV, contiguous, for the arguments of `eager.backward`.

    Sums have a fixed order, so that results repeat bit by bit.

    Args:
        query_tiles, key_tiles: compile options of the two kernels, instead of the shipped ones.

    Raises:
        ConfigError: Triton is missing, or arguments that the kernels do not support.
    """
    call = _call(q, k, v, mask, scale, plan)
    grad_dtype = grad_dtype or q.dtype
    with torch.cuda.device_of(q):
        dout = _rows(dout, call.q.dtype)
        shift, delta = _prepare(_rows(out, call.q.dtype), dout, lse, dlse, plan.block_q)
        query_tiles = _fit(query_tiles or _tiles("query_gradients", call), plan)
        key_tiles = _fit(key_tiles or _tiles("key_gradients", call), plan)
        dq = _query_gradients(call, dout, shift, delta, grad_dtype, query_tiles)
        dk, dv = _key_gradients(call, dout, shift, delta, grad_dtype, key_tiles)
    return dq, dk, dv


def _prepare(
    out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-sum-exp in base 2, row sums of dO * O minus `dlse`) of queries, float32 [B, H, Tq padded to whole blocks]."""
    batch, heads, length = lse.shape
    side, padded = min(_SIDE, block), -(-length // block) * block
    shift, delta = lse.new_empty((2, batch, heads, padded))
    _backward_kernels().prepare[(padded // side * batch * heads,)](
        out, dout, lse.contiguous(), None if dlse is None else dlse.float().contiguous(), shift, delta,
        *_strides(out), *_strides(dout), length, padded, batch * heads, heads, BLOCK_M=side, **_columns(out),
    )  # fmt: skip
    return shift, delta


def _query_gradients(
    call: _KernelCall, dout: torch.Tensor, shift: torch.Tensor, delta: torch.Tensor, dtype: torch.dtype, tiles: Config
) -> torch.Tensor:
    plan, lists, heads, q = call.plan, call.plan.queries, call.heads, call.q
    dq = q.new_empty(q.shape, dtype=_stored(dtype))
    partial = q.new_empty((lists.num_slots, heads, plan.block_q, q.shape[-1]), dtype=torch.float32)
    blocks = -(-plan.q_len // plan.block_q)
    _backward_kernels().query_gradients[_grid(lists.items, plan.block_q // tiles.block_m, heads)](
        *_descriptors(tiles.block_m, q, dout), *_descriptors(tiles.block_n, call.k, call.v),
        *_descriptors(tiles.block_g, call.k, call.v), shift, delta, dq, partial, *call.mask, lists.items, lists.other,
        plan.q_len, plan.kv_len, blocks, heads, call.group, call.scale, plan.window or 0,
        **call.constants, **_constants(tiles),
    )  # fmt: skip
    _add_parts(lists, plan.block_q, partial, dq)
    return dq.to(dtype)


def _key_gradients(
    call: _KernelCall, dout: torch.Tensor, shift: torch.Tensor, delta: torch.Tensor, dtype: torch.dtype, tiles: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    plan, lists, heads, k = call.plan, call.plan.keys, call.k.shape[1], call.k
    dk, dv = (k.new_empty(k.shape, dtype=_stored(dtype)) for _ in range(2))
    partial_dk, partial_dv = k.new_empty((2, lists.num_slots, heads, plan.block_kv, k.shape[-1]), dtype=torch.float32)
    blocks = -(-plan.kv_len // plan.block_kv)
    for wanted in ("DK", "DV") if tiles.passes == 2 else (None,):
        _backward_kernels().key_gradients[_grid(lists.items, plan.block_kv // tiles.block_n, heads)](
            *_descriptors(tiles.block_m, call.q, dout), *_descriptors(tiles.block_g, call.q, dout),
            *_descriptors(tiles.block_n, k, call.v), shift, delta, dk, dv, partial_dk, partial_dv, *call.mask,
            lists.items, lists.other, plan.q_len, plan.kv_len, shift.shape[-1], blocks, heads, call.scale, plan.window or 0,
            DK=wanted != "DV", DV=wanted != "DK", GROUP=call.group, **call.constants, **_constants(tiles),
        )  # fmt: skip
    _add_parts(lists, plan.block_kv, partial_dk, dk)
    _add_parts(lists, plan.block_kv, partial_dv, dv)
    return dk.to(dtype), dv.to(dtype)


def _add_parts(lists: TileLists, block: int, partial: torch.Tensor, total: torch.Tensor) -> None:
    """Sum the partial gradients of blocks whose tiles were split over several work items, and write the sums into `total`."""
    if not len(lists.splits):
        return
    side, (_, heads, length, _) = min(_SIDE, block), total.shape
    _backward_kernels().add_parts[_grid(lists.splits, block // side, heads)](
        partial, lists.splits, total, length, -(-length // block), heads, BLOCK_M=side, BLOCK=block, **_columns(total)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _KernelCall:
    """Arguments of one attention call, in the memory layout that the kernels read."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    """Words of queries as pairs of int32, their positions, words of keys, their positions."""
    scale: float
    plan: BlockPlan

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def constants(self) -> dict[str, Any]:
        sides = {"BLOCK_Q": self.plan.block_q, "BLOCK_KV": self.plan.block_kv}
        return {**sides, **_columns(self.q), "WINDOW": self.plan.window is not None, "PRECISION": precision()}


def _call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: MaskWords, scale: float, plan: BlockPlan
) -> _KernelCall:
    dtype = torch.float32 if _interpreted() else q.dtype
    _check(q, k, v, scale, mask.window, plan)
    q, k, v = (_rows(x, dtype) for x in (q, k, v))
    words, kv_words = (x.contiguous().view(torch.int32) for x in (mask.words, mask.kv_words))
    tensors = words, mask.positions.contiguous(), kv_words, mask.kv_positions.contiguous()
    return _KernelCall(q=q, k=k, v=v, mask=tensors, scale=scale, plan=plan)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, plan: BlockPlan
) -> None:
    if not (q.is_cuda or _interpreted()):
        raise ConfigError(
            f"the Triton kernels of bitfield attention got tensors on {q.device}; wanted CUDA tensors, or TRITON_INTERPRET=1 "
            'in the environment before Triton is imported; on a CPU use impl="eager"'
        )
    if q.shape[-1] not in HEAD_DIMS or v.shape != k.shape or k.shape[-1] != q.shape[-1] or q.shape[1] % k.shape[1]:
        raise ConfigError(
            f"the Triton kernels of bitfield attention got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; wanted equal "
            f'head dims out of {", ".join(map(str, HEAD_DIMS))} and heads that are a multiple of key heads; or use impl="eager"'
        )
    if q.dtype not in DTYPES or {k.dtype, v.dtype} != {q.dtype}:
        raise ConfigError(
            f"the Triton kernels of bitfield attention got {q.dtype}, {k.dtype} and {v.dtype}; wanted one of "
            f'{", ".join(map(str, DTYPES))} for all three; or use impl="eager"'
        )
    if q.dtype == torch.float32 and q.shape[-1] == 256 and not _interpreted():
        raise ConfigError(
            "the Triton kernels of bitfield attention do not fit float32 with a head dim of 256 into registers; "
            'use bfloat16, or impl="eager"'
        )
    if scale <= 0:
        raise ConfigError(
            f'the Triton kernels of bitfield attention got a scale of {scale}; wanted more than 0; or use impl="eager"'
        )
    if (plan.batch, plan.q_len, plan.kv_len, plan.window) != (q.shape[0], q.shape[2], k.shape[2], window):
        raise ConfigError(
            f"a plan of batch {plan.batch}, {plan.q_len} queries, {plan.kv_len} keys and window {plan.window} was given for q "
            f"{list(q.shape)}, k {list(k.shape)} and window {window}; make it with plan_blocks from the same words"
        )


def _tiles(kernel: Kernel, call: _KernelCall) -> Config:
    # The interpreter computes in float32, but with the configuration of 16-bit inputs.
    dtype = torch.bfloat16 if _interpreted() else call.q.dtype
    return config(kernel, call.q.shape[-1], dtype)


def _fit(tiles: Config, plan: BlockPlan) -> Config:
    """Return compile options with tile sides reduced to the block sizes of the plan where they are larger."""
    block_m, block_n = min(tiles.block_m, plan.block_q), min(tiles.block_n, plan.block_kv)
    tiles = replace(tiles, block_m=block_m, block_n=block_n, block_g=min(tiles.block_g, plan.block_q, plan.block_kv))
    sides = block_m, block_n, tiles.block_g
    if min(sides) < 16 or any(
        (plan.block_q % block_m, plan.block_kv % block_n, plan.block_q % sides[2], plan.block_kv % sides[2])
    ):
        raise ConfigError(
            f"tiles with sides {sides} do not divide blocks of {plan.block_q} queries and {plan.block_kv} keys; "
            "wanted powers of two, 16 or more, for both"
        )
    return tiles


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `x` in `dtype` with every row at a multiple of 16 bytes, as tensor descriptors require; copied only if needed."""
    x = x.to(dtype)
    aligned = x.data_ptr() % 16 == 0 and all(stride % 16 == 0 and stride for stride in _strides(x))
    return x if aligned and x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _strides(x: torch.Tensor) -> list[int]:
    # The stride of a dim of size 1 does not matter: 16 passes as aligned.
    return [stride if size > 1 else 16 for size, stride in zip(x.shape[:3], x.stride(), strict=False)]


def _descriptors(rows: int, *tensors: torch.Tensor) -> list[Any]:
    """Return Triton descriptors of tensors [B, heads, T, D], which load tiles [rows, BLOCK_D] of a head, zeros outside."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    block = [1, 1, rows, block_d(tensors[0].shape[-1])]
    return [TensorDescriptor(x, list(x.shape), [*_strides(x), 1], block) for x in tensors]


def _constants(tiles: Config) -> dict[str, int]:
    return {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_G": tiles.block_g,
        "STAGES": tiles.num_stages,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _columns(x: torch.Tensor) -> dict[str, int]:
    return {"HEAD_DIM": x.shape[-1], "BLOCK_D": block_d(x.shape[-1])}


def _grid(work: torch.Tensor, parts: int, heads: int) -> tuple[int]:
    return (len(work) * parts * heads,)


def _stored(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if _interpreted() else dtype  # the interpreter rounds wrongly to 16 bits


def _interpreted() -> bool:
    kernel = _forward_kernels().attend
    from triton.runtime import JITFunction

    return not isinstance(kernel, JITFunction)


def _forward_kernels() -> ModuleType:
    try:
        from mmcompile.kernels.bitfield_attention.impl import triton_forward
    except ImportError as error:
        raise ConfigError(
            'the Triton kernels of bitfield attention need the package triton, 3.6 or later, which is missing; use impl="eager"'
        ) from error
    return triton_forward


def _backward_kernels() -> ModuleType:
    from mmcompile.kernels.bitfield_attention.impl import triton_backward

    return triton_backward
