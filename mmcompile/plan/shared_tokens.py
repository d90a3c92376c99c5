"""What it costs when several ranks share the tokens of the language model.

Each rank does 1/P of all work of the layers after the first (embedding and merge stay whole), and exchanges keys and values:
it gathers those of the other ranks in the forward and again in the backward, and sends their gradients back in float32. With n
groups of heads, all exchanges but the first hide behind the attention of the group before; what does not fit is exposed:

    exposed = exchange / n + (1 - 1/n) max(0, exchange - attention)

Source: head-wise overlap, Cornstarch (Oobleck / Cornstarch / Entrain dissertation §3.4.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import LayerCost, seconds
from mmcompile.ir.graph import ModelGraph, info
from mmcompile.kernels.bitfield_attention.cp_cost import RankAttention, Rates, choose_head_stride
from mmcompile.kernels.bitfield_attention.plan import BLOCK

_GRADIENT_BYTES = 4
"""Gradients of keys and values travel in float32."""


@dataclass(frozen=True, kw_only=True)
class SharedTokens:
    """The tokens of the loss component, shared by `num_ranks` ranks.

    Args:
        graph: its attention written as `bitfield_attention`, annotated with costs.
        dtype: of the computation.
    """

    graph: ModelGraph = field(repr=False)
    num_ranks: int
    cluster: Cluster
    dtype: str

    @cached_property
    def _calls(self) -> Mapping[int, tuple[fx.Node, ...]]:
        """Layer -> its attention."""
        calls: dict[int, tuple[fx.Node, ...]] = {}
        for node in self.graph.module.graph.nodes:
            attends = node.target is torch.ops.mmcompile.bitfield_attention.default
            if attends and info(node).component == self.graph.loss_component:
                calls[info(node).layer] = (*calls.get(info(node).layer, ()), node)
        return calls

    @cached_property
    def head_stride(self) -> int:
        """Key/value heads exchanged at a time: the fastest for the first attention of the model, by `cp_cost`."""
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
        rates = Rates(
            flops_per_s=self.cluster.device.flops_per_s(self.dtype),
            bytes_per_s=self.cluster.intra.bytes_per_s,
            latency_s=self.cluster.intra.latency_s,
        )
        return choose_head_stride(call, rates)

    def costs(self, costs: Mapping[str, tuple[LayerCost, ...]]) -> dict[str, tuple[LayerCost, ...]]:
        """Costs of one rank, from those of the whole sequence; other components' are as before.

        Args:
            costs: component name -> cost of each layer.
        """
        component = self.graph.loss_component
        layers = tuple(
            cost if index == 0 else self._shared(cost, self._calls.get(index, ()))
            for index, cost in enumerate(costs[component])
        )
        return {name: layers if name == component else own for name, own in costs.items()}

    def _shared(self, cost: LayerCost, calls: Iterable[fx.Node]) -> LayerCost:
        forward_s = backward_s = 0.0
        for node in calls:
            key = node.args[1].meta["val"]  # type: ignore[union-attr]
            steps = key.shape[1] // self.head_stride
            elements = 2 * key.numel()
            gather_s = self.exchange_s(elements * key.element_size())
            forward_s += _exposed(gather_s, self._attention_s(info(node).forward_flops), steps)
            if cost.has_backward:
                both_s = gather_s + self.exchange_s(elements * _GRADIENT_BYTES)
                flops = info(node).input_grad_flops + info(node).weight_grad_flops
                backward_s += _exposed(both_s, self._attention_s(flops), steps)
        ranks = self.num_ranks
        return replace(
            cost,
            forward_flops=cost.forward_flops // ranks,
            input_grad_flops=cost.input_grad_flops // ranks,
            weight_grad_flops=cost.weight_grad_flops // ranks,
            forward_bytes=_moved(cost.forward_bytes, cost.parameter_bytes, ranks),
            backward_bytes=_moved(cost.backward_bytes, cost.parameter_bytes, ranks),
            activation_bytes=cost.activation_bytes // ranks,
            output_bytes=cost.output_bytes // ranks,
            forward_exchange_s=forward_s,
            backward_exchange_s=backward_s,
        )

    def exchange_s(self, num_bytes: int) -> float:
        """Seconds of an all-gather to, or a reduce-scatter of, `num_bytes` on every rank: a ring moves all but the own share."""
        others = self.num_ranks - 1
        link = self.cluster.intra
        return others * link.latency_s + num_bytes * others / self.num_ranks / link.bytes_per_s

    def _attention_s(self, flops: int) -> float:
        return seconds(flops // self.num_ranks, 0, 0, self.cluster.device, self.dtype)


def _exposed(exchange_s: float, attention_s: float, steps: int) -> float:
    return exchange_s / steps + (1 - 1 / steps) * max(0.0, exchange_s - attention_s)


def _moved(num_bytes: int, parameter_bytes: int, num_ranks: int) -> int:
    """Bytes moved by one rank: all of the parameters, its share of the rest."""
    return min(num_bytes, parameter_bytes) + max(0, num_bytes - parameter_bytes) // num_ranks
