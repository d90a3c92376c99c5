"""Context-parallel attention in real gloo processes: what each rank computes of a case, and the same case in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmcompile.kernels.bitfield_attention import bitfield_attention_reference
from mmcompile.kernels.bitfield_attention.masks.classify import Masks
from mmcompile.kernels.bitfield_attention.parallel.attention import (
    context_parallel_attention,
    context_parallel_attention_backward,
    gather_words,
)
from mmcompile.kernels.bitfield_attention.parallel.token_ops import shard_tokens
from support.oracles.masks_oracle import random_words
from support.oracles.token_policies import BlockPolicy, TokenBlocks, token_blocks
from support.processes.spawn_ranks import RankContext, spawn_ranks

BLOCK = 16
GROUP = "ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One attention call over ranks."""

    kinds: tuple[str, ...]
    """Of the masks, a row each."""
    tokens: int = 150
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    value_dim: int = 8
    window: int | None = None
    head_stride: int = 1
    policy: BlockPolicy = BlockPolicy.LPT
    dtype: torch.dtype = torch.float64
    trains: str = "qkv"
    compiled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Of one rank, its own tokens; of one process, all."""

    out: Tensor
    lse: Tensor
    gradients: dict[str, Tensor]
    """Of whole q, k, v: of a rank, its share."""


def words_of(case: Case) -> tuple[Tensor, Tensor]:
    """[rows, tokens] words and positions."""
    rows = [random_words(seed, case.tokens, kind) for seed, kind in enumerate(case.kinds)]
    words, positions = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return words, positions


def blocks_of(case: Case, num_ranks: int) -> TokenBlocks:
    work = Masks(*words_of(case), window=case.window, block_q=BLOCK, block_kv=BLOCK).workload()
    return token_blocks(work, tokens=case.tokens, ranks=num_ranks, block=BLOCK, policy=case.policy)


def tensors_of(case: Case) -> dict[str, Tensor]:
    """q, k, v, and weights of out and lse in the loss, all whole."""
    generator = torch.Generator().manual_seed(case.tokens)
    shapes = {
        "q": (case.heads, case.dim),
        "k": (case.kv_heads, case.dim),
        "v": (case.kv_heads, case.value_dim),
        "out": (case.heads, case.value_dim),
        "lse": (case.heads, 1),
    }
    made = {
        name: torch.randn(len(case.kinds), heads, case.tokens, dim, generator=generator, dtype=torch.float64)
        for name, (heads, dim) in shapes.items()
    }
    return {name: x.to(case.dtype).requires_grad_(name in case.trains) for name, x in made.items()}


def in_one_process(case: Case) -> Result:
    """The definition, in float64, whatever the dtype of the case."""
    tensors = tensors_of(case)
    words, positions = words_of(case)
    wide = {name: x.detach().double().requires_grad_(x.requires_grad) for name, x in tensors.items()}
    q, k, v = (wide[name] for name in "qkv")
    out, lse = bitfield_attention_reference(q, k, v, words, positions=positions, scale=0.4, window=case.window)
    return _result(case, out, lse, wide, wide)


def on_ranks(cases: Sequence[Case], num_ranks: int) -> list[list[Result]]:
    """Run all cases in one set of processes; per case, return the results of the ranks."""
    return spawn_ranks(_on_rank, [(case, case is cases[0]) for case in cases], num_ranks)


def _on_rank(context: RankContext, job: tuple[Case, bool]) -> Result:
    """Run one rank's part of a case; of the first, check the ops too."""
    case, is_first = job
    context.register(GROUP)
    if is_first and context.num_ranks == 2:
        _check_ops(case, context.rank, context.num_ranks)
    return _share(case, context.rank, context.num_ranks)


def _share(case: Case, rank: int, num_ranks: int) -> Result:
    blocks = blocks_of(case, num_ranks)
    index = blocks.order[rank]
    tensors = tensors_of(case)
    attention = _attention(case, num_ranks)
    if case.compiled:
        attention = torch.compile(attention, fullgraph=True, backend="aot_eager")
    out, lse = attention(*(tensors[name] for name in "qkv"), *_masks(case, blocks, rank), index)
    weights = {name: shard_tokens(tensors[name], index, 2, 0) for name in ("out", "lse")}
    return _result(case, out, lse, weights, tensors)


def _attention(case: Case, num_ranks: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def attention(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> tuple[Tensor, Tensor]:
        *own, index = masks
        q, k, v = (shard_tokens(x, index, 2, 0) for x in (q, k, v))
        return context_parallel_attention(q, k, v, *own, 0.4, case.window, case.head_stride, GROUP, num_ranks)

    return attention


def _masks(case: Case, blocks: TokenBlocks, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Words and positions of a rank's tokens and of all; gathering them gives the same as knowing them."""
    words, positions = (shard_tokens(x, blocks.order[rank], 1, 0) for x in words_of(case))
    gathered = blocks.order.flatten()
    kv_words, kv_positions = (shard_tokens(x, gathered, 1, 0) for x in words_of(case))
    found = gather_words(words, positions, GROUP, len(blocks.order))
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(found, (kv_words, kv_positions), strict=True))
    return words, positions, kv_words, kv_positions


def _result(case: Case, out: Tensor, lse: Tensor, weights: dict[str, Tensor], tensors: dict[str, Tensor]) -> Result:
    total = (out * weights["out"]).sum() + torch.where(lse == -torch.inf, 0, lse * weights["lse"][..., 0]).sum()
    gradients = torch.autograd.grad(total, [tensors[name] for name in case.trains])
    return Result(out=out.detach(), lse=lse.detach(), gradients=dict(zip(case.trains, gradients, strict=True)))


def _check_ops(case: Case, rank: int, num_ranks: int) -> None:
    """torch's own checks of the ops; all ranks run them alike, so their collectives meet."""
    case = replace(case, tokens=40)
    blocks = blocks_of(case, num_ranks)
    q, k, v = (shard_tokens(tensors_of(case)[name].detach(), blocks.order[rank], 2, 0) for name in "qkv")
    masks = _masks(case, blocks, rank)
    call = *masks, 0.4, case.window, case.head_stride, GROUP, num_ranks
    torch.library.opcheck(gather_words, (*masks[:2], GROUP, num_ranks))
    torch.library.opcheck(context_parallel_attention, (*(x.requires_grad_() for x in (q, k, v)), *call))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = context_parallel_attention(q, k, v, *call)
    for need_keys in (True, False):
        saved = out, None, q, k, v, out, lse, *call, need_keys
        torch.library.opcheck(context_parallel_attention_backward, saved)
