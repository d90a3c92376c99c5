"""Clusters: text form, this machine, links, JSON."""

from __future__ import annotations

import os
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.hardware import DEVICES
from mmcompile.errors import ConfigError


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_parses_prints_and_survives_json(name: str) -> None:
    cluster = Cluster.parse(f"4x8x{name}")
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.num_devices) == (4, 8, 32)
    assert str(cluster) == f"4x8x{name}"
    assert Cluster.parse(str(cluster)) == cluster
    assert msgspec.json.decode(msgspec.json.encode(cluster), type=Cluster) == cluster


@pytest.mark.parametrize(
    ("text", "printed", "bytes_per_s"),
    [
        ("6x4xA40@6.25GB/s", "6x4xA40@6.25GB/s", 6.25e9),
        ("6x4xA40@50Gb/s", "6x4xA40@6.25GB/s", 6.25e9),
        ("2x8xH100@0.000001GB/s", "2x8xH100@0.000001GB/s", 1e3),
        ("2x8xH100@400Gb/s", "2x8xH100", 50e9),
        ("2x2xcpu@3Gb/s", "2x2xcpu@0.375GB/s", 0.375e9),
    ],
)
def test_the_network_between_nodes_can_be_given(text: str, printed: str, bytes_per_s: float) -> None:
    cluster = Cluster.parse(text)
    assert cluster.inter.bytes_per_s == cluster.inter.ring_bytes_per_s == bytes_per_s
    assert cluster.intra == Cluster.parse(text.split("@")[0]).intra
    assert str(cluster) == printed
    assert Cluster.parse(printed) == cluster
    assert msgspec.json.decode(msgspec.json.encode(cluster), type=Cluster) == cluster


@given(st.integers(1, 10**15))
def test_any_rate_prints_exactly(bytes_per_s: int) -> None:
    cluster = Cluster.parse("2x8xH100")
    cluster = replace(cluster, inter=replace(cluster.inter, bytes_per_s=float(bytes_per_s)))
    assert Cluster.parse(str(cluster)).inter.bytes_per_s == bytes_per_s


def test_case_and_a_missing_node_count_are_forgiven() -> None:
    assert Cluster.parse("8xh100") == Cluster.parse("1x8xH100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "4x8xB300",
            "unknown device 'B300'; known are A40, A100-40G, A100-80G, H100, H100-PCIe, H200, L4, MI300X, cpu",
        ),
        (
            "H100",
            "cluster 'H100' is not NODESxDEVICESxNAME (4x8xH100, 4x8xH100@25GB/s) or 'local'; names are A40",
        ),
        ("4x8xH100@25", "cluster '4x8xH100@25' is not NODESxDEVICESxNAME"),
        ("4x8xH100@0GB/s", "cluster '4x8xH100@0GB/s' has a network of 0 bytes a second"),
        ("0x8xH100", "cluster '0x8xH100' has 0 nodes of 8 devices; both must be at least 1"),
        ("", "cluster '' is not NODESxDEVICESxNAME"),
    ],
)
def test_bad_text_says_what_is_valid(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Cluster.parse(text)
    assert message in str(caught.value)


def test_local_is_this_machine() -> None:
    cluster = Cluster.local()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cluster.is_local
    assert cluster == Cluster.parse("local")
    assert cluster.num_devices >= 1
    assert cluster.device.memory_bytes == memory // cluster.num_devices
    assert Cluster.local(3).num_devices == 3
    assert not Cluster.parse("1x1xL4").is_local


def test_the_link_depends_on_the_nodes_of_both_ranks() -> None:
    cluster = Cluster.parse("2x4xH100")
    assert cluster.between(0, 3) == cluster.between(5, 4) == cluster.intra
    assert cluster.between(3, 4) == cluster.between(7, 0) == cluster.inter


@pytest.mark.parametrize(
    ("num_ranks", "stride", "together"), [(8, 1, 8), (16, 1, 8), (4, 1, 4), (4, 4, 2), (4, 8, 1), (4, 16, 1), (1, 1, 1)]
)
def test_how_many_ranks_of_a_group_share_a_node(num_ranks: int, stride: int, together: int) -> None:
    assert Cluster.parse("16x8xH100").together(num_ranks, stride) == together


def test_an_unknown_dtype_lists_the_known() -> None:
    with pytest.raises(
        ConfigError, match="device L4 has no peak for dtype 'float64'; it has bfloat16, float16, float32"
    ):
        Cluster.parse("1x1xL4").device.flops_per_s("float64")
