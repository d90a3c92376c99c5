"""Roofline seconds and the split of a backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.plans.toy_plan import cost, frozen

from mmcompile.costmodel.cluster import Cluster, Interconnect
from mmcompile.costmodel.comm import p2p_seconds
from mmcompile.costmodel.compute import layer_times, seconds

DEVICE = replace(
    Cluster.parse("1x1xH100").device,
    peak_flops={"float32": 2e12},
    efficiency=0.5,
    memory_bytes_per_s=1e9,
    launch_s=1e-6,
)


@pytest.mark.parametrize(
    ("flops", "num_bytes", "kernels", "expected"),
    [
        (10**12, 10**6, 0, 1.0),  # bound by compute: 1e12 / (0.5 * 2e12)
        (10**6, 10**9, 0, 1.0),  # bound by memory
        (0, 0, 5, 5e-6),  # nothing but launches
        (10**12, 10**9, 10, 1.0 + 1e-5),
    ],
)
def test_seconds_are_the_roofline_plus_launches(flops: int, num_bytes: int, kernels: int, expected: float) -> None:
    assert seconds(flops, num_bytes, kernels, DEVICE, "float32") == pytest.approx(expected)


def test_a_backward_is_shared_by_flops() -> None:
    times = layer_times(replace(cost(1000), input_grad_flops=3 * 10**12, weight_grad_flops=10**12), DEVICE, "float32")
    assert times.forward_s == pytest.approx(1.0 + 1e-5)
    assert times.backward_s == pytest.approx(4.0 + 2e-5)
    assert times.input_grad_s == pytest.approx(3 * times.weight_grad_s)
    assert times.total_s == times.forward_s + times.backward_s


def test_a_frozen_layer_before_anything_trained_has_no_backward() -> None:
    times = layer_times(frozen(1000), DEVICE, "float32")
    assert times.forward_s > 0
    assert times.backward_s == 0


def test_a_message_costs_latency_and_bytes_and_an_empty_one_nothing() -> None:
    link = Interconnect(bytes_per_s=1e9, latency_s=1e-3, source="test")
    assert p2p_seconds(10**9, link) == pytest.approx(1.001)
    assert p2p_seconds(0, link) == 0
