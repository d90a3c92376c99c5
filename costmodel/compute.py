"""Time of compute: roofline over FLOPs and bytes, per layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """Work of one layer for one microbatch at the captured sizes, under the model's real `requires_grad` flags.

    Zero input- and weight-gradient FLOPs mean that the layer runs no backward at all.
    """

    forward_flops: int
    input_grad_flops: int
    weight_grad_flops: int
    forward_bytes: int
    """Bytes read and written by the forward."""
    backward_bytes: int
    """Bytes read and written by the backward; 0 without one."""
    kernels: int
    """Forward kernels launched (views excluded)."""
    backward_kernels: int
    activation_bytes: int
    """Bytes saved for backward; 0 if nothing upstream or inside trains."""
    parameter_bytes: int
    trainable_bytes: int
    output_bytes: int
    """Bytes that cross to the next layer, if a stage is cut here."""
