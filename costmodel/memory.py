"""Memory against time: what a layer keeps for its backward when it computes activations again instead.

Recomputation runs a layer's forward a second time, just before the layer's backward. A layer without a backward (in a frozen
encoder with nothing trainable before it) keeps nothing and repeats nothing. Layers whose backward has no matrix product (an
embedding, a slice) keep everything, as recomputation would save almost nothing. The time of the second forward counts with the
input gradient, which waits for it.

Schedule zb-h1 computes weight gradients after the backward. In between, a stage holds the inputs of its matrix products and the
gradients of their results, of one microbatch: 0.7 to 1.2 times the bytes that it would keep without recomputation (measured on
stages of LLaVA, Qwen2-Audio and BLIP-2). These bytes are not modelled: under zb-h1 too,
`working_bytes` (what a layer needs while it computes) count one layer, not all layers of the stage.
"""

from __future__ import annotations

from dataclasses import replace

from mmcompile.config import Recompute
from mmcompile.costmodel.compute import LayerCost


def recomputed(cost: LayerCost, recompute: Recompute, *, mixed: bool = False) -> LayerCost:
    """Return a layer's cost when its backward recomputes activations in the mode `recompute`.

    Args:
        cost: cost of the layer as captured, which keeps everything.
        recompute: "none" returns `cost`. "selective" keeps what the layer reads from outside and the results of its
            products, convolutions and attention, and repeats the rest: bytes and kernels, no FLOPs. "full" keeps what
            it reads from outside and repeats all of its forward. (torch stops repeating once all that backward needs is
            there, so that the last product of a layer is not run again; not modelled.)
        mixed: True if other layers of the stage recompute. A layer that keeps everything then also counts `unsaved_bytes`:
            values that it is the first to read and that are kept for the others.

    Returns:
        The cost with `activation_bytes` of what is kept, a dearer backward, and the repeated activations, alive while
        the layer runs its backward, as `working_bytes`.
    """
    if not cost.has_backward:
        return cost
    if recompute == "none":
        return replace(cost, activation_bytes=cost.activation_bytes + cost.unsaved_bytes) if mixed else cost
    if recompute == "selective":
        return replace(
            cost,
            activation_bytes=cost.selective_bytes,
            working_bytes=cost.activation_bytes,
            backward_bytes=cost.backward_bytes + cost.forward_bytes - cost.kept_forward_bytes,
            backward_kernels=cost.backward_kernels + cost.kernels - cost.kept_kernels,
        )
    return replace(
        cost,
        activation_bytes=cost.full_bytes,
        working_bytes=cost.activation_bytes,
        input_grad_flops=cost.input_grad_flops + cost.forward_flops,
        attention_backward_flops=cost.attention_backward_flops + cost.attention_flops,
        backward_bytes=cost.backward_bytes + cost.forward_bytes,
        backward_kernels=cost.backward_kernels + cost.kernels,
    )
