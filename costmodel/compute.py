"""Time of compute: roofline over FLOPs and bytes, per layer."""

from __future__ import annotations

from dataclasses import dataclass

from mmcompile.costmodel.cluster import Device


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
    """Bytes read and written by the backward; 0 if the layer runs no backward."""
    kernels: int
    """Number of forward kernels launched (views excluded)."""
    backward_kernels: int
    activation_bytes: int
    """Bytes saved for backward; 0 if no parameter trains in the layer or before it."""
    parameter_bytes: int
    trainable_bytes: int
    output_bytes: int
    """Bytes sent to the next layer if a stage boundary follows this layer."""
    forward_exchange_s: float = 0.0
    """Seconds of collectives inside the layer that no computation hides, in the forward."""
    backward_exchange_s: float = 0.0
    """Seconds of collectives inside the layer that no computation hides, in the backward; counted with the input gradient."""
    selective_bytes: int = 0
    """Bytes saved for backward under selective recomputation, which keeps products, convolutions and attention only."""
    full_bytes: int = 0
    """Bytes saved for backward under full recomputation: the layer's inputs from outside."""
    attention_flops: int = 0
    """Part of `forward_flops` that is attention, which selective recomputation does not repeat."""
    attention_backward_flops: int = 0
    """Part of the backward's FLOPs that is attention."""
    kv_bytes: int = 0
    """Bytes of keys and values that context-parallel ranks must exchange; 0 without attention."""
    working_bytes: int = 0
    """Bytes held only while the layer runs its backward: recomputed activations."""
    shared_bytes: int = 0
    """Further bytes kept if a stage begins with this layer: values, such as masks, that are counted for an earlier layer."""
    unsaved_bytes: int = 0
    """Further bytes kept if other layers recompute: values that several layers read, counted for the first of these."""
    kept_forward_bytes: int = 0
    """Part of `forward_bytes` moved by products, convolutions and attention, which selective mode does not repeat."""
    kept_kernels: int = 0
    """Part of `kernels` that are products, convolutions and attention."""

    @property
    def has_backward(self) -> bool:
        """True if the layer computes input or weight gradients."""
        return self.input_grad_flops + self.weight_grad_flops > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimes:
    """Seconds of one microbatch in one layer, or in the layers of one stage."""

    forward_s: float
    input_grad_s: float
    """Part of the backward that earlier stages wait for."""
    weight_grad_s: float = 0.0
    """Part of the backward that no other action waits for."""

    def __mul__(self, factor: float) -> LayerTimes:
        return LayerTimes(
            forward_s=factor * self.forward_s,
            input_grad_s=factor * self.input_grad_s,
            weight_grad_s=factor * self.weight_grad_s,
        )

    @property
    def backward_s(self) -> float:
        """Seconds of input and weight gradient."""
        return self.input_grad_s + self.weight_grad_s

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s


def seconds(flops: int, num_bytes: int, kernels: int, device: Device, dtype: str) -> float:
    """Return seconds by the roofline model: `max(flops / reachable peak, bytes / bandwidth) + kernels * launch`.

    Raises:
        ConfigError: the device has no peak for the dtype.
    """
    busy_s = max(flops / device.flops_per_s(dtype), num_bytes / device.memory_bytes_per_s)
    return busy_s + kernels * device.launch_s


def layer_times(cost: LayerCost, device: Device, dtype: str) -> LayerTimes:
    """Return the seconds of a layer's forward, input gradient and weight gradient.

    The backward's bytes and kernels are known as a whole; the two gradients share them in proportion to their FLOPs.
    """
    forward_s = seconds(cost.forward_flops, cost.forward_bytes, cost.kernels, device, dtype) + cost.forward_exchange_s
    if not cost.has_backward:
        return LayerTimes(forward_s=forward_s, input_grad_s=0.0, weight_grad_s=0.0)
    backward_flops = cost.input_grad_flops + cost.weight_grad_flops
    backward_s = seconds(backward_flops, cost.backward_bytes, cost.backward_kernels, device, dtype)
    input_grad_s = backward_s * cost.input_grad_flops / backward_flops
    return LayerTimes(
        forward_s=forward_s,
        input_grad_s=input_grad_s + cost.backward_exchange_s,
        weight_grad_s=backward_s - input_grad_s,
    )
