"""`Recomputed`: which layers compute their activations again in the backward instead of keeping them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from mmcompile.config import Recompute
from mmcompile.ir.functional import changed_buffers
from mmcompile.ir.graph import ModelGraph, Place
from mmcompile.passes.base import Analysis, Fact
from mmcompile.passes.cost.op_flops import op_flops
from mmcompile.passes.gradient_flow import makes_gradient, trainable_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputed(Analysis[Mapping[Place, Recompute]]):
    """Pass that returns the recomputation mode of each layer; layers that recompute nothing are absent.

    Only layers whose backward has a product, a convolution or attention recompute: other layers (an embedding, a slice)
    would save next to no memory, and a layer without gradient keeps no activations. The memory model assumes the same
    (`mmcompile.costmodel.memory`). Layers that change a buffer (running statistics) must not run twice.
    """

    name: ClassVar[str] = "recomputed"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)

    modes: Mapping[Place, Recompute] = field(default_factory=dict)
    """Requested mode of each layer; absent layers recompute nothing."""

    def run(self, graph: ModelGraph) -> Mapping[Place, Recompute]:
        """Return the mode of each layer that recomputes, by (component, layer)."""
        if all(mode == "none" for mode in self.modes.values()):
            return {}
        trainable = trainable_names(graph)

        def has_work(node: fx.Node) -> bool:
            work = op_flops(node)
            operands = (*(operand for operand, _ in work.operands), *work.joint_operands)
            return any(makes_gradient(node, operand, trainable) for operand in operands)

        found = graph.layer_nodes()
        may = {place for place, own in found.items() if any(map(has_work, own)) and not changed_buffers(own)}
        return {place: mode for place, mode in sorted(self.modes.items()) if mode != "none" and place in may}
