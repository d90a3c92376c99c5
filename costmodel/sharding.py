"""A layer's cost on one of several ranks that share it: its tensors, its tokens, or its parameters.

Each is a function LayerCost -> LayerCost; the seconds of collectives that no computation hides go to `forward_exchange_s` and
`backward_exchange_s`. Applied in the order recompute, tensors, tokens. With degree 1 the cost is returned as it is.
"""

from __future__ import annotations

from dataclasses import replace

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.comm import all_gather_s, reduce_scatter_s, ring_s
from mmcompile.costmodel.compute import LayerCost, Recompute, seconds
from mmcompile.errors import ConfigError

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
GRADIENT_BYTES = 4
"""Gradients of keys and values travel in float32."""
HEAD_GROUPS = 8
"""Groups of heads that are exchanged one after the other, if not said otherwise: the key/value heads of most models."""


def tensor_parallel(cost: LayerCost, degree: int, cluster: Cluster, *, recompute: Recompute = "none") -> LayerCost:
    """Cost of a layer on one of `degree` ranks that share its tensors, and its rows between products (sequence parallel).

    FLOPs, parameters and all that is saved or sent on are divided; kernels are as many as before. A block (attention, or what
    follows it) gathers its input rows and scatters the sum of its output rows, both of the size of the layer's output; a layer
    with attention has two blocks, others one. The backward does the same with the gradients, in reverse; with full recompute it
    also repeats the exchanges of the forward. None of it is hidden.

    Assumed: the ranks share a node; norms and biases, held by every rank, are nothing beside the products; the gather of a
    trained layer's input for its weight gradient hides behind the input gradient.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, §4.2.
    """
    if degree == 1:
        return cost
    blocks = 2 if cost.attention_flops else 1
    exchange_s = blocks * (
        all_gather_s(cost.output_bytes, degree, cluster) + reduce_scatter_s(cost.output_bytes, degree, cluster)
    )
    repeats = (2 if recompute == "full" else 1) if cost.has_backward else 0
    return replace(
        _divided(cost, degree),
        forward_bytes=cost.forward_bytes // degree,
        backward_bytes=cost.backward_bytes // degree,
        parameter_bytes=cost.parameter_bytes // degree,
        trainable_bytes=cost.trainable_bytes // degree,
        forward_exchange_s=cost.forward_exchange_s + exchange_s,
        backward_exchange_s=cost.backward_exchange_s + repeats * exchange_s,
    )


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
    """What every rank has its share of, whether tensors or tokens are shared."""
    return replace(
        cost,
        forward_flops=cost.forward_flops // degree,
        input_grad_flops=cost.input_grad_flops // degree,
        weight_grad_flops=cost.weight_grad_flops // degree,
        attention_flops=cost.attention_flops // degree,
        attention_backward_flops=cost.attention_backward_flops // degree,
        activation_bytes=cost.activation_bytes // degree,
        selective_bytes=cost.selective_bytes // degree,
        full_bytes=cost.full_bytes // degree,
        working_bytes=cost.working_bytes // degree,
        output_bytes=cost.output_bytes // degree,
        kv_bytes=cost.kv_bytes // degree,
        kept_forward_bytes=cost.kept_forward_bytes // degree,
    )


def _attention_s(flops: int, degree: int, cluster: Cluster, dtype: str) -> float:
    return seconds(flops // degree, 0, 0, cluster.device, dtype)


def _exposed(exchange_s: float, attention_s: float, steps: int) -> float:
    return exchange_s / steps + (1 - 1 / steps) * max(0.0, exchange_s - attention_s)


def _moved(num_bytes: int, parameter_bytes: int, degree: int) -> int:
    """Bytes moved by one rank: all of the parameters, its share of the rest."""
    return min(num_bytes, parameter_bytes) + max(0, num_bytes - parameter_bytes) // degree
