"""A layer's cost on one of several ranks that share it: its tensors, its tokens, or its parameters.

Each is a function LayerCost -> LayerCost; the seconds of collectives that no computation hides go to `forward_exchange_s` and
`backward_exchange_s`. Applied in the order tensors, recompute, tokens. With degree 1 the cost is returned as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mmcompile.config import Recompute
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.comm import all_gather_s, all_reduce_s, reduce_scatter_s, ring_s
from mmcompile.costmodel.compute import LayerCost, seconds
from mmcompile.errors import ConfigError

_SHARED = (
    *("forward_flops", "input_grad_flops", "weight_grad_flops", "attention_flops", "attention_backward_flops"),
    *(
        "activation_bytes",
        "selective_bytes",
        "full_bytes",
        "unsaved_bytes",
        "working_bytes",
        "output_bytes",
        "kv_bytes",
    ),
    "kept_forward_bytes",
)
"""Fields of `LayerCost` of which every rank has its share, whether tensors or tokens are shared."""
ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
GRADIENT_BYTES = 4
"""Gradients of keys and values travel in float32."""
HEAD_GROUPS = 8
"""Groups of heads that are exchanged one after the other, if not said otherwise: the key/value heads of most models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShare:
    """What ranks that share a layer's tensors add up for one microbatch, and what they hold a part of each."""

    sums: int
    """Results that are added up in the forward."""
    summed_bytes: int
    """Of all of them together."""
    copies: int
    """Gradients that are added up in the backward."""
    copied_bytes: int
    parameter_bytes: int
    """Of the layer's parameters of which each rank holds a part; the others are whole on every rank."""
    trainable_bytes: int
    parts: tuple[tuple[str, float], ...] = ()
    """(Field of `LayerCost`, what a rank has of it): 1 where each has all of it (values between products, experts, heads that do
    not divide), more where exchanges add to it. Fields not named are divided."""

    @classmethod
    def assumed(cls, cost: LayerCost) -> TensorShare:
        """Of a layer of which only the cost is known: two blocks (attention, and what follows it), or one without attention.

        A block adds up its output in the forward and the gradient of its input in the backward, both of the size of what the
        layer hands on; all parameters are in parts.
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
        """For a microbatch with so many times the rows."""
        return replace(
            self, summed_bytes=round(self.summed_bytes * factor), copied_bytes=round(self.copied_bytes * factor)
        )


def tensor_parallel(
    cost: LayerCost,
    degree: int,
    cluster: Cluster,
    *,
    recompute: Recompute = "none",
    share: TensorShare | None = None,
) -> LayerCost:
    """Cost of a layer on one of `degree` ranks that share its tensors.

    FLOPs and all that is saved or sent on are divided, if not known better; kernels are as many as before. Ranks add up results
    in the forward and gradients in the backward; with full recompute the backward also repeats the sums of the forward. None of
    it is hidden.

    Assumed: the ranks share a node.

    Args:
        cost: of the layer that keeps everything.
        recompute: what the backward is going to compute again (`mmcompile.costmodel.memory.recomputed` counts the rest of it).
        share: what is computed and held in parts, and what is added up; by default `TensorShare.assumed`.

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
    """Seconds of so many all-reduces of equal size."""
    return count * all_reduce_s(num_bytes / count, degree, cluster) if count else 0.0


def _held(num_bytes: int, in_parts: int, degree: int) -> int:
    return num_bytes - in_parts + in_parts // degree


def context_parallel(
    cost: LayerCost,
    degree: int,
    cluster: Cluster,
    *,
    dtype: str,
    steps: int = HEAD_GROUPS,
    recompute: Recompute = "none",
    stride: int = 1,
) -> LayerCost:
    """Cost of a layer on one of `degree` ranks that share its tokens.

    Each does its part of all work, with all parameters, and exchanges keys and values: it gathers those of the other ranks in
    the forward and again in the backward, and sends their gradients back in float32. With n groups of heads, all exchanges but
    the first hide behind the attention of the group before; what does not fit is exposed:

        exposed = exchange / n + (1 - 1/n) max(0, exchange - attention)

    The layer must do all its work by tokens: embeddings that merge other components' rows stay whole.

    Args:
        dtype: of the computation.
        steps: n.
        recompute: `"full"` attends once more in the backward, with another gather.
        stride: how far apart the ranks are; those of tensor parallelism lie between.

    Source: head-wise overlap, Cornstarch (Oobleck / Cornstarch / Entrain dissertation §3.4.2).
    """
    if degree == 1:
        return cost
    link = cluster.intra if degree * stride <= cluster.devices_per_node else cluster.inter
    gather_s = ring_s(cost.kv_bytes, degree, link)
    return_s = ring_s(cost.kv_bytes * GRADIENT_BYTES / element_bytes(dtype), degree, link)
    forward_s = _exposed(gather_s, _attention_s(cost.attention_flops, degree, cluster, dtype), steps)
    repeated = cost.attention_flops if recompute == "full" else 0
    attention_s = _attention_s(cost.attention_backward_flops - repeated, degree, cluster, dtype)
    backward_s = _exposed(gather_s + return_s, attention_s, steps) + (forward_s if repeated else 0.0)
    return replace(
        _divided(cost, degree),
        forward_bytes=_moved(cost.forward_bytes, cost.parameter_bytes, degree),
        backward_bytes=_moved(cost.backward_bytes, cost.parameter_bytes, degree),
        forward_exchange_s=cost.forward_exchange_s / degree + forward_s,
        backward_exchange_s=cost.backward_exchange_s / degree + (backward_s if cost.has_backward else 0.0),
    )


def fully_sharded(cost: LayerCost, degree: int, cluster: Cluster, *, dtype: str) -> LayerCost:
    """Cost of a layer whose parameters are spread over `degree` replicas (FSDP), each with a batch of its own.

    Parameters are gathered before the forward and again before the backward; gradients of trained ones are reduced and
    scattered after it. The exchange of one layer hides behind the computation of the layer before, taken to be as long as its
    own; what does not fit is exposed. A layer without backward is gathered once. Two layers are whole at a time.

    Assumed: what every replica holds whole, vectors and matrices whose rows do not divide, is nothing beside the rest.

    Source: Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, §3.3.
    """
    if degree == 1:
        return cost
    gather_s = all_gather_s(cost.parameter_bytes, degree, cluster)
    reduce_s = reduce_scatter_s(cost.trainable_bytes, degree, cluster)
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
    """Bytes of one element. Raises ConfigError for a dtype nothing is computed in."""
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"no computation in dtype {dtype!r}; known are {', '.join(ELEMENT_BYTES)}")
    return ELEMENT_BYTES[dtype]


def _divided(cost: LayerCost, degree: int) -> LayerCost:
    return replace(cost, **{name: getattr(cost, name) // degree for name in _SHARED})


def _attention_s(flops: int, degree: int, cluster: Cluster, dtype: str) -> float:
    return seconds(flops // degree, 0, 0, cluster.device, dtype)


def _exposed(exchange_s: float, attention_s: float, steps: int) -> float:
    return exchange_s / steps + (1 - 1 / steps) * max(0.0, exchange_s - attention_s)


def _moved(num_bytes: int, parameter_bytes: int, degree: int) -> int:
    """Bytes moved by one rank: all of the parameters, its share of the rest."""
    return min(num_bytes, parameter_bytes) + max(0, num_bytes - parameter_bytes) // degree
