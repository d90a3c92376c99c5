"""`tensor_parity`: check of a whole sharded graph against the whole graph, gradients included.

All ranks run in one process (`tensor_lockstep`). For whole graphs of small models; `tensor_layer_check` does it layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mmcompile.ir.graph import ModelGraph, results_of
from mmcompile.passes.tensor_parallel.validation.lockstep_ranks import Lockstep

_NOISE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParity:
    """Largest differences, each relative to the largest element of what is compared.

    Gradients below `_NOISE` of the largest one are compared on its scale: that of a bias of keys is 0 but for rounding.
    """

    loss: float
    gradients: Mapping[str, float]
    """Parameter -> difference of its gradient, over all ranks."""

    @property
    def worst(self) -> tuple[str, float]:
        """Name and size of the largest difference."""
        return max({"loss": self.loss, **self.gradients}.items(), key=lambda pair: pair[1])


def tensor_parity(
    whole: ModelGraph, sharded: ModelGraph, tensors: Mapping[str, torch.Tensor], inputs: Mapping[str, Any]
) -> TensorParity:
    """Run forward and backward of both graphs and compare.

    Args:
        whole: before the pass tensor-parallel.
        sharded: after it.
        tensors: parameters and buffers by name, on CPU.
        inputs: values of the graph's inputs, sizes and host values included.

    Raises:
        AssertionError: a parameter has a gradient in one graph and not in the other.
    """
    ours, theirs = Lockstep(sharded, tensors, inputs), Lockstep(whole, tensors, inputs)
    losses, (wanted, *_) = _trained(ours, sharded), _trained(theirs, whole)
    found, gradients = ours.gradients(), theirs.gradients()
    assert found.keys() == gradients.keys(), (
        f"only one of the graphs makes a gradient of {sorted(found.keys() ^ gradients.keys())}"
    )
    least = _NOISE * max((float(grads[0].abs().max()) for grads in gradients.values()), default=0.0)
    return TensorParity(
        loss=max(_difference(loss, wanted, 0.0) for loss in losses),
        gradients={
            name: max(_difference(each, gradients[name][0], least) for each in found[name])
            for name in sorted(gradients)
        },
    )


def _trained(lockstep: Lockstep, graph: ModelGraph) -> list[torch.Tensor]:
    """Return the loss on every rank, after the backward."""
    lockstep.run(graph.module.graph.nodes)
    losses = lockstep.values[results_of(graph.module.graph)[0]]
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    return [loss.detach() for loss in losses]


def _difference(found: torch.Tensor, wanted: torch.Tensor, least: float) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    scale = max(float(wanted.abs().max()), least, torch.finfo(wanted.dtype).tiny)
    return float((found - wanted).abs().max()) / scale
