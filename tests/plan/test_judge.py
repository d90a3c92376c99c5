"""The bound never exceeds the simulator, and the quick makespan is the simulator's."""

from __future__ import annotations

import random

import pytest
from toy_plan import cost, frozen, toy_graph

from mmcompile.costmodel.cluster import Cluster
from mmcompile.ir.graph import ComponentKind
from mmcompile.plan.candidate import Candidate, Splitter, draft
from mmcompile.plan.chains import chain_sets
from mmcompile.plan.judge import fast_makespan_s, lower_bound_s

CLUSTER = Cluster.parse("3x4xL4")


def random_candidate(seed: int, *, ranks: bool = False) -> Candidate:
    """One to three encoders of random sizes, frozen or not, into a language model; random counts."""
    rng = random.Random(seed)
    kinds: dict[str, tuple[ComponentKind, int]] = {}
    edges: list[tuple[str, str]] = []
    for index in range(rng.randint(0, 3)):
        kinds[f"encoder{index}"] = (ComponentKind.ENCODER, rng.randint(1, 4))
        edges.append((f"encoder{index}", "language_model"))
        if index and rng.random() < 0.3:
            edges.append((f"encoder{index - 1}", f"encoder{index}"))
    kinds["language_model"] = (ComponentKind.LANGUAGE_MODEL, rng.randint(1, 6))
    trains = {name: rng.random() < 0.5 for name in kinds}
    costs = {
        name: tuple(
            (cost if trains[name] or name == "language_model" else frozen)(rng.randint(1, 50)) for _ in range(count)
        )
        for name, (_, count) in kinds.items()
    }
    (chains,) = chain_sets(toy_graph(kinds, edges), costs, CLUSTER.device, "bfloat16")
    splitter = Splitter(
        chains=chains,
        cluster=CLUSTER,
        num_microbatches=rng.choice([1, 2, 5, 16]),
        max_stages=tuple(len(chain.layers) for chain in chains.chains),
    )
    counts = [rng.randint(1, min(3, len(chain.layers))) for chain in chains.chains]
    placed = [rng.randrange(2) for _ in range(sum(counts))] if ranks else None
    candidate = draft(splitter, counts, 10**12, placed)
    assert candidate is not None
    return candidate


@pytest.mark.parametrize("seed", range(60))
def test_the_quick_makespan_is_the_simulators_and_the_bound_is_below(seed: int) -> None:
    candidate = random_candidate(seed)
    simulated = candidate.simulate(CLUSTER).makespan_s
    assert fast_makespan_s(candidate, CLUSTER) == pytest.approx(simulated, rel=1e-12)
    assert lower_bound_s(candidate) <= simulated * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds_when_stages_share_ranks(seed: int) -> None:
    candidate = random_candidate(seed, ranks=True)
    assert lower_bound_s(candidate) <= candidate.simulate(CLUSTER).makespan_s * (1 + 1e-12)


def test_the_bound_is_reached_by_equal_stages_without_link_time() -> None:
    graph = toy_graph({"language_model": (ComponentKind.LANGUAGE_MODEL, 4)}, [])
    costs = {"language_model": (cost(10, output_bytes=0),) * 4}
    (chains,) = chain_sets(graph, costs, CLUSTER.device, "bfloat16")
    splitter = Splitter(chains=chains, cluster=CLUSTER, num_microbatches=9, max_stages=(4,))
    candidate = draft(splitter, [4], 10**12)
    assert candidate is not None
    assert lower_bound_s(candidate) == pytest.approx(candidate.simulate(CLUSTER).makespan_s)
