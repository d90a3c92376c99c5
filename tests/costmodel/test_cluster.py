"""Clusters: text form, this machine, links, JSON."""

from __future__ import annotations

import os

import msgspec
import pytest

from mmcompile.costmodel.cluster import DEVICES, Cluster
from mmcompile.errors import ConfigError


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_parses_prints_and_survives_json(name: str) -> None:
    cluster = Cluster.parse(f"4x8x{name}")
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.num_devices) == (4, 8, 32)
    assert str(cluster) == f"4x8x{name}"
    assert Cluster.parse(str(cluster)) == cluster
    assert msgspec.json.decode(msgspec.json.encode(cluster), type=Cluster) == cluster


@pytest.mark.parametrize("name", DEVICES)
def test_figures_are_plausible_and_have_sources(name: str) -> None:
    device, intra, inter = DEVICES[name]
    assert device.name == name
    assert device.source and intra.source and inter.source
    assert 0 < device.efficiency <= 1
    assert device.peak_flops["bfloat16"] >= device.peak_flops["float32"] > 0
    assert intra.bytes_per_s >= inter.bytes_per_s > 0
    # A byte from memory is never dearer than a byte from another device.
    assert device.memory_bytes_per_s > intra.bytes_per_s


def test_case_and_a_missing_node_count_are_forgiven() -> None:
    assert Cluster.parse("8xh100") == Cluster.parse("1x8xH100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4x8xB300", "unknown device 'B300'; known are A40, A100-40G, A100-80G, H100, H200, L4, cpu"),
        ("H100", "cluster 'H100' is not NODESxDEVICESxNAME (4x8xH100) or 'local'; names are A40"),
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


def test_an_unknown_dtype_lists_the_known() -> None:
    with pytest.raises(
        ConfigError, match="device L4 has no peak for dtype 'float64'; it has bfloat16, float16, float32"
    ):
        Cluster.parse("1x1xL4").device.flops_per_s("float64")
