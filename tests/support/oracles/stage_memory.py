"""Bytes that a stage keeps for the backward, from the costs of its layers."""

from __future__ import annotations

from collections.abc import Sequence

from mmcompile.config import Recompute
from mmcompile.costmodel.compute import LayerCost
from mmcompile.costmodel.memory import recomputed


def recomputed_layers(costs: Sequence[LayerCost], modes: Sequence[Recompute | None]) -> list[LayerCost]:
    """Return `recomputed` of the layers of one stage, each in its own mode; None recomputes nothing."""
    mixed = len({mode for mode in modes if mode is not None}) > 1
    return [recomputed(cost, mode or "none", mixed=mixed) for cost, mode in zip(costs, modes, strict=True)]


def stage_activation_bytes(costs: Sequence[LayerCost]) -> int:
    """Return the bytes that a stage keeps for the backward of one microbatch.

    Args:
        costs: costs of its layers of one component, in order, after `recomputed`.
    """
    return sum(cost.activation_bytes for cost in costs) + sum(cost.shared_bytes for cost in costs[:1])
