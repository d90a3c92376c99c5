"""Ranks of stages, and what messages between differently spread stages take."""

from __future__ import annotations

from support.plans.problem import problem_of
from support.plans.toy_plan import FINGERPRINT, cost, frozen, toy_graph

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.comm import p2p_seconds
from mmcompile.ir.graph import ComponentKind
from mmcompile.planner.search.candidate import Candidate, assemble
from mmcompile.planner.search.messages import place
from mmcompile.planner.search.settings import Degrees, Setting

CLUSTER = Cluster.parse("2x8xH100")


def two_chains(encoder: Degrees, language: Degrees, cluster: Cluster = CLUSTER) -> Candidate:
    graph = toy_graph(
        {"vision": (ComponentKind.ENCODER, 2), "language_model": (ComponentKind.LANGUAGE_MODEL, 2)},
        [("vision", "language_model")],
    )
    costs = {"vision": (frozen(10),) * 2, "language_model": (cost(10, output_bytes=10**7),) * 2}
    problem = problem_of(graph, costs, cluster, dtype="bfloat16", fingerprint=FINGERPRINT, global_batch=8)
    setting = Setting(num_microbatches=1, samples=8 / language.dp, dp=language.dp)
    parts = [((0, 2),), ((0, 1), (1, 2))]
    return assemble(problem, problem.sets[0], setting, [encoder, language], parts)


def test_ranks_go_chain_by_chain_replica_by_replica_stage_by_stage() -> None:
    assert place([Degrees(), Degrees(dp=2)], [1, 2]) == [(0,), (1, 3), (2, 4)]
    # Larger tensor-parallel groups come first, so that they stay within a node.
    assert place([Degrees(), Degrees(tp=2, dp=2)], [1, 2]) == [(8,), (0, 1, 4, 5), (2, 3, 6, 7)]
    assert place([Degrees(dp=3), Degrees(tp=4, cp=2)], [1, 1]) == [(8, 9, 10), tuple(range(8))]


def test_no_rank_is_given_twice_and_none_is_left_out() -> None:
    for degrees in ([Degrees(tp=2, dp=3), Degrees(tp=4, cp=2, dp=2)], [Degrees(dp=5), Degrees(tp=8), Degrees(tp=2)]):
        counts = range(1, 1 + len(degrees))
        ranks = sorted(rank for stage in place(degrees, counts) for rank in stage)
        assert ranks == list(range(sum(own.ranks * count for own, count in zip(degrees, counts, strict=True))))


def test_equal_spread_sends_rank_to_rank() -> None:
    candidate = two_chains(Degrees(), Degrees())
    assert candidate.edges == {(0, 1): 10**5, (1, 2): 10**7}
    assert candidate.link_s[1, 2] == p2p_seconds(10**7, CLUSTER.intra)
    halves = two_chains(Degrees(tp=2), Degrees(tp=2))
    assert halves.link_s[1, 2] == p2p_seconds(10**7 // 2, CLUSTER.intra)


def test_unequal_spread_takes_longer_and_shares_bytes_between_replicas() -> None:
    equal = two_chains(Degrees(tp=2, dp=2), Degrees(tp=2, dp=2))
    fewer = two_chains(Degrees(tp=2, dp=1), Degrees(tp=2, dp=2))
    gathers = two_chains(Degrees(tp=1, dp=2), Degrees(tp=2, dp=2))
    assert fewer.edges[0, 1] == equal.edges[0, 1] // 2
    assert gathers.link_s[0, 1] > equal.link_s[0, 1]


def test_stages_on_two_nodes_send_over_the_network() -> None:
    candidate = two_chains(Degrees(), Degrees(tp=8))
    assert candidate.link_s[1, 2] == p2p_seconds(10**7 // 8, CLUSTER.inter)


def test_replicas_need_not_divide_each_other() -> None:
    equal, more = two_chains(Degrees(dp=2), Degrees(dp=2)), two_chains(Degrees(dp=3), Degrees(dp=2))
    assert more.edges[0, 1] == equal.edges[0, 1] * 3 // 2
    assert more.link_s[0, 1] > 0
