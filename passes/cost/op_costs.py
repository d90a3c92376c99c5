"""`OpCosts`: FLOPs rules for ops that mmcompile has no rule for, or that need another rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from mmcompile.errors import ConfigError
from mmcompile.ir.graph import ModelGraph, annotate
from mmcompile.passes.base import Analysis
from mmcompile.passes.cost.op_flops import FlopsRule
from mmcompile.passes.values import op_name


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCosts(Analysis[int]):
    """Pass that sets `NodeInfo.flops_rule` of the nodes of some ops; every later cost follows these rules.

    Raises:
        ConfigError: an op is not registered with torch.
    """

    name: ClassVar[str] = "op-costs"

    rules: Mapping[str, FlopsRule] = field(hash=False)
    """Name of an op, such as `"acme.fused_mlp"` -> the rule that counts the op's FLOPs."""

    def __post_init__(self) -> None:
        for op in self.rules:
            namespace, _, name = op.partition(".")
            if not hasattr(getattr(torch.ops, namespace), name or "default"):
                raise ConfigError(
                    f"a cost rule is given for {op!r}, which is no op of torch's; name it as graphs do, 'namespace.op'"
                )

    def run(self, graph: ModelGraph) -> int:
        """Annotate each node whose op is in `rules` with its rule; return the number of these nodes."""
        found = [node for node in graph.calls if op_name(node) in self.rules]
        for node in found:
            annotate(node, flops_rule=self.rules[op_name(node)])
        return len(found)
