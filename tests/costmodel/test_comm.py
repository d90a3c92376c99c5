"""Collectives: NCCL's model as torch has it, and what must hold of any."""

from __future__ import annotations

from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import comm_analysis

from mmcompile.costmodel import comm
from mmcompile.costmodel.cluster import Cluster

ALL: tuple[comm.Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")
# Not MI300X: there each rank more is a link more, so that more ranks may take less time.
CLUSTERS = ["8x4xA40", "8x8xA100-80G", "8x8xH100", "8x8xH200", "8x8xH100@6.25GB/s", "8x8xL4", "1x64xcpu"]

all_collectives = pytest.mark.parametrize("collective", ALL)
torch_has_protocols = pytest.mark.skipif(
    not hasattr(comm_analysis, "_nccl_algo_time"), reason="this torch knows one protocol only"
)


@all_collectives
@pytest.mark.parametrize("text", [*CLUSTERS, "8x8xMI300X"])
def test_nothing_takes_no_time(collective: comm.Collective, text: str) -> None:
    cluster = Cluster.parse(text)
    assert comm.collective_s(collective, 10**9, 1, cluster) == 0
    assert comm.collective_s(collective, 0, 8, cluster) == 0
    assert 0 < comm.collective_s(collective, 1, 2, cluster) < comm.collective_s(collective, 10**9, 2, cluster) < 10


@all_collectives
@given(st.sampled_from(CLUSTERS), st.integers(1, 10**11), st.integers(0, 10**10), st.integers(2, 64))
def test_more_bytes_take_longer(
    collective: comm.Collective, text: str, num_bytes: int, more: int, num_ranks: int
) -> None:
    cluster = Cluster.parse(text)
    less_s, more_s = (comm.collective_s(collective, size, num_ranks, cluster) for size in (num_bytes, num_bytes + more))
    assert less_s <= more_s * (1 + 1e-9)


@all_collectives
@given(st.sampled_from(CLUSTERS), st.integers(1, 10**11), st.integers(1, 63), st.integers(1, 63))
def test_more_ranks_take_longer(
    collective: comm.Collective, text: str, num_bytes: int, num_ranks: int, more: int
) -> None:
    cluster = Cluster.parse(text)
    few_s, many_s = (
        comm.collective_s(collective, num_bytes, count, cluster) for count in (num_ranks, min(64, num_ranks + more))
    )
    assert few_s <= many_s * (1 + 1e-9)


@all_collectives
def test_more_ranks_in_a_node_are_faster(collective: comm.Collective) -> None:
    cluster = Cluster.parse("16x8xH100")
    times = [comm.collective_s(collective, 10**9, 16, cluster, ranks_in_a_node=near) for near in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_a_mesh_is_as_fast_as_its_links() -> None:
    mesh = Cluster.parse("1x8xMI300X")
    pair_s, all_s = (comm.collective_s("all_gather", 10**10, count, mesh) for count in (2, 8))
    assert pair_s == pytest.approx(10**10 / 2 / 48e9, rel=1e-3)
    assert all_s == pytest.approx(10**10 * 7 / 8 / (7 * 48e9), rel=1e-2)


def test_large_messages_reach_the_ring_and_small_ones_pay_latency() -> None:
    cluster = Cluster.parse("1x8xH100")
    assert comm.collective_s("all_reduce", 10**10, 8, cluster) == pytest.approx(2 * 7 / 8 * 10**10 / 370e9, rel=0.05)
    # LL by a ring: base, and seven hops twice.
    assert comm.collective_s("all_reduce", 8, 8, cluster) == pytest.approx((6.6 + 2 * 7 * 0.6) * 1e-6, rel=1e-3)
    # Simple by a ring over a port a rank of two nodes.
    nodes = Cluster.parse("2x8xH100@10GB/s")
    assert comm.collective_s("all_gather", 10**10, 16, nodes) == pytest.approx(15 / 16 * 10**10 / 80e9, rel=1e-2)
    assert comm.collective_s("all_gather", 10**10, 2, nodes, ranks_in_a_node=1) == pytest.approx(
        10**10 / 2 / 10e9, rel=1e-2
    )


def test_gloo_sends_to_the_neighbour() -> None:
    cluster = Cluster.local(4)
    link = cluster.intra
    once_s = 3 * (link.latency_s + 10**8 / link.bytes_per_s)
    assert comm.collective_s("all_gather", 4 * 10**8, 4, cluster) == pytest.approx(once_s)
    assert comm.collective_s("all_reduce", 4 * 10**8, 4, cluster) == pytest.approx(2 * once_s)


def test_only_an_all_reduce_has_a_tree_and_ll128_stays_in_a_node() -> None:
    cluster = Cluster.parse("2x8xH100")
    assert comm.algorithm_s("all_gather", "tree", "simple", 10**6, 8, cluster) == inf
    assert comm.algorithm_s("all_reduce", "ring", "ll128", 10**6, 8, cluster) < inf
    assert comm.algorithm_s("all_reduce", "ring", "ll128", 10**6, 16, cluster) == inf


@torch_has_protocols
def test_the_tables_are_those_of_torch() -> None:
    tables = {
        "baseLat": [list(comm.BASE_LATENCY_US[algorithm]) for algorithm in comm.ALGORITHMS],
        "hwLat": [
            [list(comm.HOP_LATENCY_US[kind][algorithm]) for algorithm in comm.ALGORITHMS]
            for kind in ("nvlink", "pcie", "network")
        ],
        "llMaxBws": [list(row) for row in comm.LL_GB_PER_S],
        "perChMaxRingLL128Bws": [list(row) for row in comm.RING_LL128_GB_PER_S],
        "perChMaxTreeLL128Bws": [list(row) for row in comm.TREE_LL128_GB_PER_S],
        "perChMaxTreeBws": [list(row) for row in comm.TREE_GB_PER_S],
        "treeCorrectionFactor": [list(row) for row in comm.TREE_CORRECTION],
    }
    for name, table in tables.items():
        assert getattr(comm_analysis, name) == table, name
    assert tuple(comm_analysis._GPU_NCHANNELS.values()) == comm.CHANNELS


@torch_has_protocols
@all_collectives
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("text", ["1x8xA100-80G", "1x8xH100", "1x8xA40"])
def test_times_within_a_node_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, text: str, num_ranks: int, collective: comm.Collective
) -> None:
    cluster = Cluster.parse(text)
    as_if_here(monkeypatch, cluster)
    for num_bytes in (2**exponent for exponent in (3, 6, 10, 16, 20, 24, 27, 33)):
        for i, algorithm in enumerate(comm.ALGORITHMS):
            for j, protocol in enumerate(comm.PROTOCOLS):
                if algorithm == "tree" and collective != "all_reduce":
                    continue
                kind = comm_analysis.NCCL_COLL[collective.upper()]
                wanted_us = comm_analysis._nccl_algo_time(num_bytes, num_ranks, kind, i, j)
                got_s = comm.algorithm_s(collective, algorithm, protocol, num_bytes, num_ranks, cluster)
                assert got_s * 1e6 == pytest.approx(wanted_us), (algorithm, protocol, num_bytes)


@torch_has_protocols
@all_collectives
@pytest.mark.parametrize("num_nodes", [2, 4])
def test_latency_over_nodes_is_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, collective: comm.Collective
) -> None:
    cluster = Cluster.parse(f"{num_nodes}x8xH100")
    as_if_here(monkeypatch, cluster)
    kind = comm_analysis.NCCL_COLL[collective.upper()]
    wanted_us, _, _ = comm_analysis._nccl_best_algo_time(8, 8 * num_nodes, kind)
    got_s = comm.collective_s(collective, 8, 8 * num_nodes, cluster)
    assert got_s * 1e6 == pytest.approx(wanted_us, rel=1e-3)


def as_if_here(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    """torch's model for the devices of `cluster`, which it would otherwise look for on this machine."""
    row = comm.GENERATIONS.index(cluster.device.generation)
    monkeypatch.setattr(comm_analysis, "get_gpu_type", lambda: comm_analysis.NVIDIA_GPU_TYPE(row))
    monkeypatch.setattr(comm_analysis, "_has_nvlink", lambda: cluster.intra.kind == "nvlink")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
