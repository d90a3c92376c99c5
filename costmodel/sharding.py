"""A layer's cost on one of several ranks that shard its tensors (TP), its tokens (CP), or its parameters (FSDP).

A function for each of the three maps a `LayerCost` to that of one rank. Seconds of collectives that no computation hides are
added to `forward_exchange_s` and `backward_exchange_s`. TP comes first, then recomputation, then CP. Degree 1 changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mmcompile.config import Recompute
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.comm import collective_s, ring_s
from mmcompile.costmodel.compute import LayerCost, seconds
from mmcompile.errors import ConfigError

_SHARED = (
    *("forward_flops", "input_grad_flops", "weight_grad_flops", "attention_flops", "attention_backward_flops"),
    *("activation_bytes", "selective_bytes", "full_bytes", "unsaved_bytes", "working_bytes"),
    *("output_bytes", "kv_bytes", "kept_forward_bytes"),
)
"""Fields of `LayerCost` that are divided by the number of ranks, under tensor and under context parallelism."""
_ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_GRADIENT_BYTES = 4
"""Bytes per element of the gradients of attention keys and values, which ranks exchange in float32."""
_HEAD_GROUPS = 8
"""Default number of groups of attention heads that ranks exchange one after the other: key/value heads of most models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShare:
    """All-reduces of a layer's tensor-parallel ranks for one microbatch, and the fraction of each cost that a rank has."""

    sums: int
    """Number of results that are all-reduced in the forward."""
    summed_bytes: int
    """Bytes of all results that are all-reduced in the forward, together."""
    copies: int
    """Number of gradients that are all-reduced in the backward."""
    copied_bytes: int
    parameter_bytes: int
    """Bytes of the layer's parameters that are sharded; its other parameters are whole on every rank."""
    trainable_bytes: int
    parts: tuple[tuple[str, float], ...] = ()
    """(field of `LayerCost`, fraction that a rank has) for fields that are not simply divided.

    The fraction is 1 if each rank has all of it (values between matrix products, experts, heads that do not divide), and more if
    collectives add to it. Fields not named are divided by the degree.
    """

    @classmethod
    def assumed(cls, cost: LayerCost) -> TensorShare:
        """Return the all-reduces assumed for a layer of which only the cost is given; all its parameters are sharded.

        Attention and the MLP behind it are one block each; other layers are one block. A block all-reduces its output in the
        forward and the gradient of its input in the backward, both of the size of the layer's output.
        """
        blocks = 2 if cost.attention_flops else 1
        return cls(
            sums=blocks,
            summed_bytes=blocks * cost.output_bytes,
            copies=blocks,
            copied_bytes=blocks * cost.output_bytes,
            parameter_bytes=cost.parameter_bytes,
            trainable_bytes=cost.trainable_bytes,
        )

    def scaled(self, factor: float) -> TensorShare:
        """Return the same all-reduces for a microbatch with `factor` times the tokens: their bytes grow by that factor."""
        return replace(
            self, summed_bytes=round(self.summed_bytes * factor), copied_bytes=round(self.copied_bytes * factor)
        )


def tensor_parallel(
    cost: LayerCost, degree: int, cluster: Cluster, *, recompute: Recompute = "none", share: TensorShare | None = None
) -> LayerCost:
    """Return the cost of a layer on one of `degree` ranks that share its tensors.

    By default FLOPs and all bytes saved or sent on are divided; kernels are as many as before. Ranks add up results in
    the forward and gradients in the backward; with full recompute the backward also repeats the sums of the forward.
    No computation hides these collectives. Assumed: the ranks share a node.

    Args:
        cost: cost of the layer that keeps everything.
        recompute: recomputation in the backward (`mmcompile.costmodel.memory.recomputed` counts the rest of it).
        share: sharded work and all-reduces; by default `TensorShare.assumed`.

    Source: the conjugate operators f and g of Megatron-LM (arXiv 1909.08053, section 3), as `passes.tensor_parallel` puts them.
    """
    if degree == 1:
        return cost
    share = share or TensorShare.assumed(cost)
    forward_s = _added_up_s(share.sums, share.summed_bytes, degree, cluster)
    backward_s = _added_up_s(share.copies, share.copied_bytes, degree, cluster)
    if recompute == "full":
        backward_s += forward_s
    parts = dict(share.parts)
    amounts = {name: getattr(cost, name) for name in (*_SHARED, "forward_bytes", "backward_bytes", *parts)}
    return replace(
        cost,
        **{name: round(n * parts[name]) if name in parts else n // degree for name, n in amounts.items()},
        parameter_bytes=_held(cost.parameter_bytes, share.parameter_bytes, degree),
        trainable_bytes=_held(cost.trainable_bytes, share.trainable_bytes, degree),
        forward_exchange_s=cost.forward_exchange_s + forward_s,
        backward_exchange_s=cost.backward_exchange_s + (backward_s if cost.has_backward else 0.0),
    )


def _added_up_s(count: int, num_bytes: int, degree: int, cluster: Cluster) -> float:
    """Return the seconds of `count` equal all-reduces, of `num_bytes` in total, over `degree` ranks of one node."""
    return count * collective_s("all_reduce", num_bytes / count, degree, cluster) if count else 0.0


def _held(num_bytes: int, in_parts: int, degree: int) -> int:
    return num_bytes - in_parts + in_parts // degree


def context_parallel(
    cost: LayerCost,
    degree: int,
    cluster: Cluster,
    *,
    dtype: str,
    steps: int = _HEAD_GROUPS,
    recompute: Recompute = "none",
    stride: int = 1,
) -> LayerCost:
    """Return the cost of a layer on one of `degree` ranks that share its tokens.

    Each does its part of all work, with all parameters, and exchanges keys and values: it gathers those of the other
    ranks in the forward and again in the backward, and sends their gradients back in float32. With n groups of heads,
    all exchanges but the first hide behind the attention of the group before. The exposed seconds are

        exposed = exchange / n + (1 - 1/n) max(0, exchange - attention)

    The layer must do all its work by tokens: embeddings that merge other components' rows stay whole.

    Args:
        steps: number n of groups of heads.
        recompute: `"full"` attends once more in the backward, with another gather.
        stride: distance between the ranks' numbers; tensor-parallel ranks lie between.

    Source: head-wise overlap, Cornstarch (Oobleck / Cornstarch / Entrain dissertation §3.4.2).
    """
    if degree == 1:
        return cost
    link = cluster.intra if degree * stride <= cluster.devices_per_node else cluster.inter
    gather_s = ring_s(cost.kv_bytes, degree, link)
    return_s = ring_s(cost.kv_bytes * _GRADIENT_BYTES / element_bytes(dtype), degree, link)
    forward_s = _exposed(gather_s, _attention_s(cost.attention_flops, degree, cluster, dtype), steps)
    repeated = cost.attention_flops if recompute == "full" else 0
    attention_s = _attention_s(cost.attention_backward_flops - repeated, degree, cluster, dtype)
    backward_s = _exposed(gather_s + return_s, attention_s, steps) + (forward_s if repeated else 0.0)
    return replace(
        cost,
        **{name: getattr(cost, name) // degree for name in _SHARED},
        forward_bytes=_moved(cost.forward_bytes, cost.parameter_bytes, degree),
        backward_bytes=_moved(cost.backward_bytes, cost.parameter_bytes, degree),
        forward_exchange_s=cost.forward_exchange_s / degree + forward_s,
        backward_exchange_s=cost.backward_exchange_s / degree + (backward_s if cost.has_backward else 0.0),
    )


def fully_sharded(cost: LayerCost, degree: int, cluster: Cluster, *, dtype: str) -> LayerCost:
    """Return the cost of a layer whose parameters are sharded over `degree` replicas (FSDP), each with its own batch.

    Parameters are gathered before the forward and again before the backward; gradients of trained ones are reduced and scattered
    after it. These collectives run during the computation of the layer before, assumed to take as long as the layer's own; only
    their seconds beyond it count. A layer without backward is gathered once. Parameters of two layers are whole at a time.

    Assumed: the parameters that every replica holds whole, vectors and matrices whose rows do not divide, are negligible.

    Source: Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, §3.3.
    """
    if degree == 1:
        return cost
    gather_s = collective_s("all_gather", cost.parameter_bytes, degree, cluster)
    reduce_s = collective_s("reduce_scatter", cost.trainable_bytes, degree, cluster)
    forward_s = seconds(cost.forward_flops, cost.forward_bytes, cost.kernels, cluster.device, dtype)
    flops = cost.input_grad_flops + cost.weight_grad_flops
    backward_s = seconds(flops, cost.backward_bytes, cost.backward_kernels, cluster.device, dtype)
    exposed_s = max(0.0, gather_s + reduce_s - backward_s) if cost.has_backward else 0.0
    return replace(
        cost,
        parameter_bytes=cost.parameter_bytes // degree,
        trainable_bytes=cost.trainable_bytes // degree,
        working_bytes=cost.working_bytes + 2 * cost.parameter_bytes,
        forward_exchange_s=cost.forward_exchange_s + max(0.0, gather_s - forward_s),
        backward_exchange_s=cost.backward_exchange_s + exposed_s,
    )


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element. Raises ConfigError for a dtype that is not for computation."""
    if dtype not in _ELEMENT_BYTES:
        raise ConfigError(f"no computation in dtype {dtype!r}; known are {', '.join(_ELEMENT_BYTES)}")
    return _ELEMENT_BYTES[dtype]


def _attention_s(flops: int, degree: int, cluster: Cluster, dtype: str) -> float:
    return seconds(flops // degree, 0, 0, cluster.device, dtype)


def _exposed(exchange_s: float, attention_s: float, steps: int) -> float:
    return exchange_s / steps + (1 - 1 / steps) * max(0.0, exchange_s - attention_s)


def _moved(num_bytes: int, parameter_bytes: int, degree: int) -> int:
    """Return the bytes that one of `degree` ranks reads and writes in memory: all parameters, and its part of the other bytes."""
    return min(num_bytes, parameter_bytes) + max(0, num_bytes - parameter_bytes) // degree
