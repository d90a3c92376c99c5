"""What a layer costs on one of several ranks that share it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from support.plans.toy_plan import cost, frozen

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.comm import collective_s, ring_s
from mmcompile.costmodel.compute import LayerCost, seconds
from mmcompile.costmodel.sharding import TensorShare, context_parallel, element_bytes, fully_sharded, tensor_parallel
from mmcompile.errors import ConfigError

CLUSTER = Cluster.parse("2x8xH100")
EXCHANGES = ("forward_exchange_s", "backward_exchange_s")
LAYER = replace(
    cost(4000, parameter_bytes=8 * 10**8, activation_bytes=6 * 10**8, output_bytes=10**8),
    forward_bytes=2 * 10**9,
    backward_bytes=4 * 10**9,
    attention_flops=400 * 10**9,
    attention_backward_flops=1000 * 10**9,
    kv_bytes=4 * 10**7,
    selective_bytes=2 * 10**8,
    full_bytes=10**8,
    working_bytes=8 * 10**7,
)
NO_BACKWARD = replace(
    LAYER, input_grad_flops=0, weight_grad_flops=0, attention_backward_flops=0, backward_bytes=0, backward_kernels=0
)
SHARES = ("forward_flops", "input_grad_flops", "weight_grad_flops", "activation_bytes", "selective_bytes", "full_bytes")
SHARES = (*SHARES, "working_bytes", "output_bytes", "kv_bytes", "attention_flops", "attention_backward_flops")


def test_one_rank_keeps_everything() -> None:
    assert tensor_parallel(LAYER, 1, CLUSTER) is LAYER
    assert context_parallel(LAYER, 1, CLUSTER, dtype="bfloat16") is LAYER
    assert fully_sharded(LAYER, 1, CLUSTER, dtype="bfloat16") is LAYER


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_shared_tensors_divide_all_but_kernels(degree: int) -> None:
    share = tensor_parallel(LAYER, degree, CLUSTER)
    for field in fields(LayerCost):
        got, whole = getattr(share, field.name), getattr(LAYER, field.name)
        if field.name in ("kernels", "backward_kernels"):
            assert got == whole
        elif field.name not in EXCHANGES:
            assert got == whole // degree, field.name


def test_blocks_add_up_their_output_and_the_gradient_of_their_input() -> None:
    block_s = collective_s("all_reduce", 10**8, 4, CLUSTER)
    share = tensor_parallel(LAYER, 4, CLUSTER)
    assert (share.forward_exchange_s, share.backward_exchange_s) == pytest.approx((2 * block_s, 2 * block_s))
    again = tensor_parallel(LAYER, 4, CLUSTER, recompute="full")
    assert again.backward_exchange_s == pytest.approx(4 * block_s)
    without = tensor_parallel(replace(LAYER, attention_flops=0), 4, CLUSTER)
    assert without.forward_exchange_s == pytest.approx(block_s)
    assert tensor_parallel(NO_BACKWARD, 4, CLUSTER, recompute="full").backward_exchange_s == 0


def test_what_is_shared_may_be_known() -> None:
    """Three results and one gradient are added up, and half of the parameters are whole on every rank."""
    known = TensorShare(
        sums=3, summed_bytes=6 * 10**7, copies=1, copied_bytes=10**6, parameter_bytes=4 * 10**8, trainable_bytes=10**8
    )
    share = tensor_parallel(LAYER, 4, CLUSTER, share=known)
    assert share.forward_exchange_s == pytest.approx(3 * collective_s("all_reduce", 2 * 10**7, 4, CLUSTER))
    assert share.backward_exchange_s == pytest.approx(collective_s("all_reduce", 10**6, 4, CLUSTER))
    assert share.parameter_bytes == 5 * 10**8
    assert share.trainable_bytes == LAYER.trainable_bytes - 75 * 10**6
    whole = replace(known, parts=(("full_bytes", 1.0), ("activation_bytes", 0.4), ("kernels", 1.5)))
    share = tensor_parallel(LAYER, 4, CLUSTER, share=whole)
    assert share.full_bytes == LAYER.full_bytes
    assert share.activation_bytes == round(0.4 * LAYER.activation_bytes)
    assert share.kernels == round(1.5 * LAYER.kernels)
    assert share.selective_bytes == LAYER.selective_bytes // 4
    nothing = replace(known, sums=0, summed_bytes=0, copies=0, copied_bytes=0)
    assert tensor_parallel(LAYER, 4, CLUSTER, share=nothing).forward_exchange_s == 0


def test_shared_tokens_keep_parameters_whole() -> None:
    share = context_parallel(LAYER, 4, CLUSTER, dtype="bfloat16")
    assert (share.parameter_bytes, share.trainable_bytes) == (LAYER.parameter_bytes, LAYER.trainable_bytes)
    assert share.forward_bytes == 8 * 10**8 + (2 * 10**9 - 8 * 10**8) // 4
    for name in SHARES:
        assert getattr(share, name) == getattr(LAYER, name) // 4, name


def test_all_exchanges_but_the_first_hide_behind_attention() -> None:
    gather_s = ring_s(4 * 10**7, 4, CLUSTER.intra)
    both_s = gather_s + ring_s(8 * 10**7, 4, CLUSTER.intra)
    attention_s = seconds(10**11, 0, 0, CLUSTER.device, "bfloat16")
    assert gather_s < attention_s
    share = context_parallel(LAYER, 4, CLUSTER, dtype="bfloat16", steps=8)
    assert share.forward_exchange_s == pytest.approx(gather_s / 8)
    assert share.backward_exchange_s == pytest.approx(both_s / 8)
    whole = context_parallel(LAYER, 4, CLUSTER, dtype="bfloat16", steps=1)
    assert whole.forward_exchange_s == pytest.approx(gather_s)
    # Longer than attention: what is left shows.
    light = context_parallel(replace(LAYER, attention_flops=0), 4, CLUSTER, dtype="bfloat16", steps=2)
    assert light.forward_exchange_s == pytest.approx(gather_s)
    assert context_parallel(NO_BACKWARD, 4, CLUSTER, dtype="bfloat16").backward_exchange_s == 0


def test_attending_again_gathers_again() -> None:
    once = context_parallel(LAYER, 4, CLUSTER, dtype="bfloat16")
    layer = replace(LAYER, attention_backward_flops=LAYER.attention_backward_flops + LAYER.attention_flops)
    twice = context_parallel(layer, 4, CLUSTER, dtype="bfloat16", recompute="full")
    assert twice.backward_exchange_s == pytest.approx(once.backward_exchange_s + once.forward_exchange_s)


def test_float32_gradients_are_as_large_as_float32_keys() -> None:
    narrow, wide = (context_parallel(LAYER, 4, CLUSTER, dtype=dtype, steps=1) for dtype in ("bfloat16", "float32"))
    gather_s = ring_s(4 * 10**7, 4, CLUSTER.intra)
    assert wide.backward_exchange_s == pytest.approx(2 * gather_s)
    assert narrow.backward_exchange_s == pytest.approx(gather_s + ring_s(8 * 10**7, 4, CLUSTER.intra))


def test_ranks_of_several_nodes_exchange_over_the_network() -> None:
    near = context_parallel(LAYER, 4, CLUSTER, dtype="bfloat16", steps=1, stride=2)
    far = context_parallel(LAYER, 4, CLUSTER, dtype="bfloat16", steps=1, stride=4)
    assert near.forward_exchange_s == pytest.approx(ring_s(4 * 10**7, 4, CLUSTER.intra))
    assert far.forward_exchange_s == pytest.approx(ring_s(4 * 10**7, 4, CLUSTER.inter))


def test_exchanges_of_shared_tensors_are_those_of_the_own_tokens() -> None:
    tensors = tensor_parallel(replace(LAYER, kv_bytes=0), 2, CLUSTER)
    both = context_parallel(tensors, 4, CLUSTER, dtype="bfloat16")
    assert both.forward_exchange_s == pytest.approx(tensors.forward_exchange_s / 4)
    assert both.forward_flops == LAYER.forward_flops // 8


def test_parameters_are_gathered_behind_computation() -> None:
    heavy = fully_sharded(LAYER, 8, CLUSTER, dtype="bfloat16")
    assert heavy.parameter_bytes == LAYER.parameter_bytes // 8
    assert heavy.working_bytes == LAYER.working_bytes + 2 * LAYER.parameter_bytes
    assert (heavy.forward_flops, heavy.activation_bytes) == (LAYER.forward_flops, LAYER.activation_bytes)
    assert heavy.forward_exchange_s == heavy.backward_exchange_s == 0
    light = replace(LAYER, forward_flops=0, forward_bytes=0, kernels=0)
    gather_s = collective_s("all_gather", LAYER.parameter_bytes, 16, CLUSTER)
    assert fully_sharded(light, 16, CLUSTER, dtype="bfloat16").forward_exchange_s == pytest.approx(gather_s)


def test_only_trained_parameters_are_reduced_and_a_frozen_layer_is_gathered_once() -> None:
    light = replace(LAYER, input_grad_flops=1, weight_grad_flops=0, backward_bytes=0, backward_kernels=0)
    gather_s, reduce_s = (
        collective_s(collective, LAYER.parameter_bytes, 16, CLUSTER) for collective in ("all_gather", "reduce_scatter")
    )
    trained = fully_sharded(light, 16, CLUSTER, dtype="bfloat16")
    passing = fully_sharded(replace(light, trainable_bytes=0), 16, CLUSTER, dtype="bfloat16")
    assert trained.backward_exchange_s == pytest.approx(gather_s + reduce_s, rel=1e-6)
    assert passing.backward_exchange_s == pytest.approx(gather_s, rel=1e-6)
    assert fully_sharded(frozen(1), 16, CLUSTER, dtype="bfloat16").backward_exchange_s == 0


def test_an_unknown_dtype_lists_the_known() -> None:
    assert element_bytes("bfloat16") == 2
    with pytest.raises(ConfigError, match="no computation in dtype 'int8'; known are float64, float32, bfloat16"):
        element_bytes("int8")
