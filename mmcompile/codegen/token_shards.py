"""Inputs of each context-parallel rank: the values of the inputs that the pass `context-parallel` adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmcompile.errors import BatchError
from mmcompile.ir.graph import ModelGraph
from mmcompile.kernels.bitfield_attention.masks.classify import Masks
from mmcompile.kernels.bitfield_attention.masks.words import PADDING
from mmcompile.kernels.bitfield_attention.parallel.token_blocks import (
    choose_block,
    distribute,
    padded_length,
    token_index,
)
from mmcompile.passes.context_parallel.context_parallel import INDEX, KV_POSITIONS, KV_WORDS, POSITIONS, WORDS
from mmcompile.planner.plan.placement import shard_name


def local_tokens(tokens: int, num_ranks: int) -> int:
    """Return how many rows each of `num_ranks` ranks holds for `tokens` tokens, padded by rows without a token (free rows)."""
    return padded_length(tokens, num_ranks) // num_ranks


def shard_inputs(words: Mapping[str, Tensor], inputs: Mapping[str, str], num_ranks: int) -> dict[str, Tensor]:
    """Return values of the context-parallel inputs by port name: `cp_index@1` is that of the second shard.

    Args:
        words, inputs: arguments of `shard_values`.
        num_ranks: number of shards. Each gets equally many tokens, chosen to balance attention work under the first mask words.
    """
    first = next(iter(words.values()))
    rows, tokens = first.shape
    block = choose_block(tokens, num_ranks)
    positions = torch.arange(tokens).expand(rows, -1)
    work = Masks(first, positions, block_q=block, block_kv=block).workload()
    order = token_index(distribute(work, tokens=tokens, ranks=num_ranks, block=block), tokens, block)
    values: dict[str, Tensor] = {}
    for rank, own in enumerate(shard_values(words, order, inputs)):
        for name, value in own.items():
            values[name if name.startswith((KV_POSITIONS, KV_WORDS)) else shard_name(name, rank)] = value
    return values


def first_shard(graph: ModelGraph, values: Mapping[str, Any], num_ranks: int) -> dict[str, Tensor]:
    """Return values of the context-parallel inputs of a graph for its first shard, by the names in the graph."""
    nodes = [node for node in graph.module.graph.nodes if node.op == "placeholder" and "words" in node.meta]
    inputs = {str(node.target): node.meta["words"] for node in nodes if "shard" in node.meta}
    found = shard_inputs({name: values[name] for name in inputs.values()}, inputs, num_ranks)
    ending = shard_name("", 0)
    return {
        name.removesuffix(ending): value for name, value in found.items() if name.endswith(ending) or "@" not in name
    }


def shard_values(
    words: Mapping[str, Tensor], index: Tensor, inputs: Mapping[str, str]
) -> tuple[dict[str, Tensor], ...]:
    """Return, for each context-parallel rank, the values of the graph inputs `cp_*`: indices, positions and mask words.

    Args:
        words: input name -> mask words of all tokens, [B, T] int64, one a token; layers with another mask have another input.
        index: [P, L] int64: tokens of every rank in order, -1 for rows without a token (`token_index`).
        inputs: name of an input with a rank's mask words -> key in `words`, such as `cp_words` -> `attention_words`.

    Returns:
        For each of P ranks, input name -> value. Values that do not differ by rank are the same tensor.

    Raises:
        BatchError: the index does not hold every token exactly once.
    """
    _check(words, index)
    rows = next(iter(words.values())).shape[0]
    gathered = index.flatten()
    common = {KV_POSITIONS: _positions(gathered, rows)}
    common |= {KV_WORDS + name.removeprefix(WORDS): _take(words[source], gathered) for name, source in inputs.items()}
    return tuple(
        {INDEX: own, POSITIONS: _positions(own, rows)}
        | {name: _take(words[source], own) for name, source in inputs.items()}
        | common
        for own in index
    )


def _take(words: Tensor, index: Tensor) -> Tensor:
    return words.index_select(1, index.clamp(min=0)).masked_fill_(index < 0, PADDING)


def _positions(index: Tensor, rows: int) -> Tensor:
    return index.clamp(min=0).to(torch.int32).expand(rows, -1).contiguous()


def _check(words: Mapping[str, Tensor], index: Tensor) -> None:
    for name, value in words.items():
        held = index[index >= 0]
        if held.numel() != value.shape[1] or not torch.equal(held.sort().values, torch.arange(value.shape[1])):
            raise BatchError(
                f"ranks must hold each of the {value.shape[1]} tokens of {name} exactly once, got {held.numel()} tokens "
                f"in {list(index.shape)} rows"
            )
