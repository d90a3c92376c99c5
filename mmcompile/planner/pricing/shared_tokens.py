"""Costs of context parallelism: several ranks share the tokens of the language model.

Each rank does its part of the layers after the first (`costmodel.sharding.context_parallel`), and gathers `head_stride` key/value
heads at a time. The first layer, which embeds and merges, is done whole by every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import LayerCost
from mmcompile.costmodel.sharding import context_parallel
from mmcompile.ir.graph import ModelGraph, info
from mmcompile.kernels.bitfield_attention.masks.block_plan import BLOCK
from mmcompile.kernels.bitfield_attention.parallel.head_stride import AttentionRates, RankAttention, choose_head_stride


@dataclass(frozen=True, kw_only=True)
class SharedTokens:
    """Costs of the loss component when `num_ranks` ranks share its tokens."""

    graph: ModelGraph = field(repr=False)
    """Model annotated with costs, whose attention is written as `bitfield_attention`."""
    num_ranks: int
    cluster: Cluster
    dtype: str

    @cached_property
    def _calls(self) -> Mapping[int, tuple[fx.Node, ...]]:
        """Layer index -> attention nodes of the layer, in the loss component."""
        calls: dict[int, tuple[fx.Node, ...]] = {}
        for node in self.graph.module.graph.nodes:
            attends = node.target is torch.ops.mmcompile.bitfield_attention.default
            if attends and info(node).component == self.graph.loss_component:
                calls[info(node).layer] = (*calls.get(info(node).layer, ()), node)
        return calls

    @cached_property
    def head_stride(self) -> int:
        """Key/value heads exchanged at a time: the fastest number for the first attention of the model (`choose_head_stride`)."""
        if not self._calls:
            return 0
        first = next(iter(self._calls.values()))[0]
        query, key = (first.args[i].meta["val"] for i in (0, 1))  # type: ignore[union-attr]
        batch, num_heads, tokens, head_dim = query.shape
        blocks = -(-tokens // (BLOCK * self.num_ranks))
        # As the pairs that see each other, spread evenly over the rank's blocks of queries.
        pairs = info(first).forward_flops / (4 * num_heads * head_dim)
        tiles = max(1, round(pairs / BLOCK**2 / self.num_ranks / (batch * blocks)))
        call = RankAttention(
            num_ranks=self.num_ranks,
            batch=batch,
            local_tokens=-(-tokens // self.num_ranks),
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
            tiles=[tiles] * (batch * blocks),
            element_bytes=key.element_size(),
        )
        rates = AttentionRates(
            flops_per_s=self.cluster.device.flops_per_s(self.dtype),
            bytes_per_s=self.cluster.intra.bytes_per_s,
            latency_s=self.cluster.intra.latency_s,
        )
        return choose_head_stride(call, rates)

    def costs(self, costs: Mapping[str, tuple[LayerCost, ...]]) -> dict[str, tuple[LayerCost, ...]]:
        """Return component -> cost of each layer on one rank, given the costs of all tokens; only the loss component's differ."""
        component = self.graph.loss_component
        layers = tuple(cost if index == 0 else self._shared(index, cost) for index, cost in enumerate(costs[component]))
        return {name: layers if name == component else own for name, own in costs.items()}

    def _shared(self, index: int, cost: LayerCost) -> LayerCost:
        steps = 1
        for node in self._calls.get(index, ()):
            steps = node.args[1].meta["val"].shape[1] // self.head_stride  # type: ignore[union-attr]
        return context_parallel(cost, self.num_ranks, self.cluster, dtype=self.dtype, steps=steps)
