"""Time of communication: messages between two ranks, and collectives of many.

A message takes latency plus bytes over bandwidth (the alpha-beta model). A collective on GPUs takes, as in NCCL's own tuning
model, the least time of all algorithms (ring; tree for all-reduce) and protocols (LL, LL128, Simple):

    ring = base latency + near steps * near latency + far steps * far latency + bytes / (bandwidth * ranks / steps)
    tree = base latency + 2 ((ranks in a node - 1) * near latency + log2(nodes) * far latency) + bytes / (bandwidth / 2)

Near steps are within a node, far steps between nodes. A ring has ranks - 1 steps, nodes - 1 of them far; an all-reduce twice
as many. `bandwidth` is the protocol's part of the bus bandwidth, and for a tree a fraction of it by size (`TREE_CORRECTION`).
Between nodes the bus has a network port for each of the group's ranks in a node. On CPUs a step of gloo's ring is one message.

`num_bytes` is always that of the whole buffer: what every rank has after an all-gather, or before a reduce-scatter.

Source: constants and formulas of NCCL's `src/graph/tuning.cc` (`ncclTunerConstantsDefaults`, `ncclTopoTuneModel`), as
restated by `torch._inductor.comm_analysis` (torch 2.13), whose results within a node these are.
Ours: network ports by ranks in a node (torch counts one a group, with corrections fitted to one cluster); the tree's
correction for middle sizes is interpolated, so that more bytes never take less time.
"""

from __future__ import annotations

from math import floor, inf, log2
from typing import Literal

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.hardware import Generation, Interconnect

Algorithm = Literal["tree", "ring"]
Protocol = Literal["ll", "ll128", "simple"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]

ALGORITHMS: tuple[Algorithm, ...] = ("tree", "ring")
PROTOCOLS: tuple[Protocol, ...] = ("ll", "ll128", "simple")
GENERATIONS: tuple[Generation, ...] = ("volta", "ampere", "hopper", "blackwell")

BASE_LATENCY_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
"""Base latency in microseconds: algorithm -> by protocol (LL, LL128, Simple)."""
HOP_LATENCY_US = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)},
    "pcie": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    "network": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)},
}
"""Latency of a hop in microseconds: kind of link -> algorithm -> by protocol (LL, LL128, Simple)."""
LL_GB_PER_S = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0))
"""Bus bandwidth limit of protocol LL, GB/s: [GPU generation as in `GENERATIONS`, nodes (1, 2, more)]."""
RING_LL128_GB_PER_S = ((20.0,) * 3, (20.0,) * 3, (36.7,) * 3, (40.0,) * 3)
"""Bandwidth limit of one channel of a ring, protocol LL128, GB/s: [GPU generation as in `GENERATIONS`, nodes (1, 2, more)]."""
TREE_LL128_GB_PER_S = ((20.0,) * 3, (20.0,) * 3, (36.7, 36.7, 29.0), (55.6, 31.67, 20.0))
TREE_GB_PER_S = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))
CHANNELS = (2, 8, 16, 32)
"""Number of NCCL channels (rings or trees that run side by side) in a usual node, by GPU generation."""
# fmt: off
TREE_CORRECTION = (
    (1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0),
    (1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0, 1.0),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
)
# fmt: on
"""Fraction of its bandwidth that a tree reaches: [protocol, floor(log2(bytes / 64))]."""


def p2p_seconds(num_bytes: float, link: Interconnect) -> float:
    """Return the seconds until a message over an idle link has arrived; 0 for an empty message, which is never sent."""
    return link.latency_s + num_bytes / link.bytes_per_s if num_bytes else 0.0


def ring_s(num_bytes: float, num_ranks: int, link: Interconnect) -> float:
    """Return the seconds of a ring all-gather to, or reduce-scatter of, `num_bytes`: each rank sends all shares but one."""
    others = num_ranks - 1
    return others * link.latency_s + num_bytes * others / num_ranks / link.bytes_per_s if num_bytes else 0.0


def collective_s(
    collective: Collective, num_bytes: float, num_ranks: int, cluster: Cluster, *, ranks_in_a_node: int | None = None
) -> float:
    """Return the seconds of a collective of `num_ranks` ranks with a buffer of `num_bytes`.

    Args:
        ranks_in_a_node: number of the group's ranks on one node (`Cluster.together`); by default as many as a node has devices.
    """
    if num_ranks == 1 or num_bytes == 0:
        return 0.0
    if cluster.is_local:
        return ring_s(num_bytes, num_ranks, cluster.intra) * (2 if collective == "all_reduce" else 1)
    return min(
        algorithm_s(collective, algorithm, protocol, num_bytes, num_ranks, cluster, ranks_in_a_node)
        for algorithm in ALGORITHMS
        for protocol in PROTOCOLS
    )


def algorithm_s(
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    num_bytes: float,
    num_ranks: int,
    cluster: Cluster,
    ranks_in_a_node: int | None = None,
) -> float:
    """Return the seconds of a collective by one algorithm and protocol of NCCL; infinity if NCCL does not offer them."""
    near = min(num_ranks, ranks_in_a_node or cluster.devices_per_node)
    nodes = -(-num_ranks // near)
    bandwidth = _bus_bandwidth(algorithm, protocol, near, nodes, cluster)
    if bandwidth == 0 or (algorithm == "tree" and collective != "all_reduce"):
        return inf
    if algorithm == "tree":
        bandwidth *= 0.5 * _correction(protocol, num_bytes)
    else:
        bandwidth *= num_ranks / _steps(collective, num_ranks)
    return _latency_us(collective, algorithm, protocol, num_ranks, near, cluster) * 1e-6 + num_bytes / bandwidth


def _bus(link: Interconnect, num_ranks: int) -> float:
    """Return the bytes per second that a collective of `num_ranks` ranks within a node moves through each rank."""
    return link.ring_bytes_per_s * (num_ranks - 1 if link.kind == "mesh" else 1)


def _bus_bandwidth(algorithm: Algorithm, protocol: Protocol, near: int, nodes: int, cluster: Cluster) -> float:
    """Return NCCL's bus bandwidth in bytes/s over `nodes` nodes of `near` ranks each; 0 if it has no such protocol there."""
    generation = GENERATIONS.index(cluster.device.generation)
    scale = min(nodes, 3) - 1
    channels = CHANNELS[generation] * 1e9
    ports = near * cluster.inter.ring_bytes_per_s
    inside = _bus(cluster.intra, near) if near > 1 else ports
    bus = inside if nodes == 1 else min(inside, ports)
    if protocol == "ll":
        limit = LL_GB_PER_S[generation if nodes == 1 else 0][scale] * 1e9
        return min(limit, bus * 0.5) if algorithm == "ring" else min(bus / 3.8, limit)
    if protocol == "ll128":
        if nodes > 1:
            return 0.0
        limits, share = (RING_LL128_GB_PER_S, 120 / 128) if algorithm == "ring" else (TREE_LL128_GB_PER_S, 7 / 9)
        return min(bus * share, channels * limits[generation][scale])
    if algorithm == "tree":
        return min(bus * 0.92, channels * TREE_GB_PER_S[generation][scale])
    return bus


def _steps(collective: Collective, num_ranks: int) -> int:
    return (2 if collective == "all_reduce" else 1) * (num_ranks - 1)


def _latency_us(
    collective: Collective, algorithm: Algorithm, protocol: Protocol, num_ranks: int, near: int, cluster: Cluster
) -> float:
    column, nodes = PROTOCOLS.index(protocol), -(-num_ranks // near)
    overhead = 0.0 if nodes == 1 else 3.0 if protocol == "simple" else 1.0
    kind = "pcie" if cluster.intra.kind == "pcie" else "nvlink"
    inside = max(HOP_LATENCY_US[kind][algorithm][column], overhead)
    outside = HOP_LATENCY_US["network"][algorithm][column]
    base = BASE_LATENCY_US[algorithm][column]
    if algorithm == "tree":
        return base + 2 * ((near - 1) * inside + floor(log2(nodes)) * outside)
    hops = 2 * (nodes - 1) if collective == "all_reduce" else nodes - 1
    return base + (_steps(collective, num_ranks) - hops) * inside + hops * outside


def _correction(protocol: Protocol, num_bytes: float) -> float:
    """Return the fraction of its bandwidth that a tree reaches for `num_bytes`, interpolated in `TREE_CORRECTION`."""
    table = (*TREE_CORRECTION[PROTOCOLS.index(protocol)], 1.0)
    position = min(max(log2(num_bytes / 64), 0.0), len(table) - 1.0)
    index = min(floor(position), len(table) - 2)
    return table[index] + (position - index) * (table[index + 1] - table[index])
