"""`bitfield_attention`: attention under a mask given as words, with checks of its arguments."""

from __future__ import annotations

from typing import Literal, overload

import torch

from mmcompile.errors import ConfigError, MaskError
from mmcompile.kernels.bitfield_attention.impl.backends import Impl, resolve_impl
from mmcompile.kernels.bitfield_attention.masks.convert import check_words
from mmcompile.kernels.bitfield_attention.ops import bitfield_attention_op


@overload
def bitfield_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    words: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    kv_words: torch.Tensor | None = None,
    kv_positions: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    impl: Impl = "auto",
    check: bool = False,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def bitfield_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    words: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    kv_words: torch.Tensor | None = None,
    kv_positions: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    impl: Impl = "auto",
    check: bool = False,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def bitfield_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    words: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    kv_words: torch.Tensor | None = None,
    kv_positions: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    impl: Impl = "auto",
    check: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend each query to the keys its word sees; differentiable, and one op in a compiled graph.

        O_i = sum over visible j of exp(scale q_i . k_j - L_i) v_j
        L_i = log(sum over visible j of exp(scale q_i . k_j))

    Args:
        q: [B, H, Tq, D].
        k: [B, Hkv, Tk, D], H a multiple of Hkv.
        v: [B, Hkv, Tk, Dv].
        words: [B, Tq] int64, of `build_mask` or `words_from_ids`; see `words`.
        positions: [B, Tq] int32 or int64, indices of tokens before any permutation; None for 0, 1, 2, ...
        kv_words, kv_positions: words and positions of the keys, [B, Tk]; None for those of the queries.
        scale: factor on the scores; None is 1 / sqrt(D).
        window: reach of the causal term in tokens; None is no window.
        impl: implementation: "triton", "eager" (plain torch), or "auto": Triton on CUDA, eager elsewhere.
            `resolve_impl` returns which one a call runs on.
        check: also read words and positions, which waits for the device, and raise unless positions increase inside
            documents. Not for tokens that were permuted.
        return_lse: also return the log-sum-exp L.

    Returns:
        O, [B, H, Tq, Dv] in the dtype of `q`; a query that sees nothing gets 0. With `return_lse` also L, [B, H, Tq],
        in float32 or wider; -inf for a query that sees nothing.

    Raises:
        MaskError: words, positions or window of a wrong dtype, shape or value.
        ConfigError: tensors that do not fit each other, or an implementation that cannot run them.
    """
    _check_tensors(q, k, v)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if kv_words is None:
        if kv_positions is not None:
            raise MaskError(
                "kv_positions are given without kv_words; give both, or neither to use those of the queries"
            )
        if k.shape[2] != q.shape[2]:
            raise MaskError(
                f"{k.shape[2]} keys and {q.shape[2]} queries cannot share words; give kv_words and kv_positions"
            )
    elif (positions is None) != (kv_positions is None):
        raise MaskError("positions are given for one side only; give both positions and kv_positions, or neither")
    _check_mask("words", words, "positions", positions, q)
    if kv_words is None:
        kv_words, kv_positions = words, positions
    else:
        _check_mask("kv_words", kv_words, "kv_positions", kv_positions, k)
    if window is not None and window < 1:
        raise MaskError(f"a window of {window} tokens hides every key; wanted 1 or more, or None for no window")
    if check:
        for given, at in ((words, positions), (kv_words, kv_positions)):
            natural = torch.arange(given.shape[1], dtype=torch.int32, device=given.device).expand_as(given)
            check_words(given, natural if at is None else at.int())
    resolve_impl(impl, q, v)
    out, lse = bitfield_attention_op(q, k, v, words, positions, kv_words, kv_positions, scale, window, impl)
    return (out, lse) if return_lse else out


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ConfigError(f"got {shapes}; wanted [batch, heads, tokens, dim] each")
    if not (q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]):
        raise ConfigError(
            f"got {shapes}; wanted one batch size, as many heads and tokens in k as in v, and one head dim in q and k"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ConfigError(f"got {q.shape[1]} query heads and {k.shape[1]} key heads; wanted a multiple")
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        raise ConfigError(f"got q {q.dtype}, k {k.dtype}, v {v.dtype}; wanted one floating dtype: cast them alike")
    if not q.device == k.device == v.device:
        raise ConfigError(f"got q on {q.device}, k on {k.device}, v on {v.device}; wanted one device")


def _check_mask(
    words_name: str, words: torch.Tensor, name: str, positions: torch.Tensor | None, x: torch.Tensor
) -> None:
    """Raise MaskError unless words and positions are [B, T] for the B sequences of T tokens in `x`, [B, heads, T, dim]."""
    wanted = x.shape[0], x.shape[2]
    if words.dtype != torch.int64 or words.shape != wanted:
        raise MaskError(
            f"{words_name} are {words.dtype} {list(words.shape)}; wanted int64 {list(wanted)}, one word a token: "
            "build them with build_mask or words_from_ids"
        )
    if positions is not None and (positions.dtype not in (torch.int32, torch.int64) or positions.shape != wanted):
        raise MaskError(
            f"{name} are {positions.dtype} {list(positions.shape)}; wanted int32 {list(wanted)}, one a token"
        )
    for what, given in ((words_name, words), (name, positions)):
        if given is not None and given.device != x.device:
            raise MaskError(
                f"{what} are on {given.device} and the tokens on {x.device}; move them before the model runs"
            )
