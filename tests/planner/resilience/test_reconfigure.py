"""What runs after nodes were lost, leave or join."""

from __future__ import annotations

import itertools
import random

import msgspec
import numpy as np
import pytest
from support.plans.template_jobs import even_job, timed_job, timed_template, two_chain_job

from mmcompile.errors import PlanError
from mmcompile.planner.resilience.instantiate import held_by, instantiate
from mmcompile.planner.resilience.job import Job
from mmcompile.planner.resilience.membership import MembershipPlan, NodePipeline, StateLost, Stop
from mmcompile.planner.resilience.reconfigure import reconfigure
from mmcompile.planner.resilience.regroup import RegroupRule


def started(job: Job, num_nodes: int) -> MembershipPlan[int]:
    found = instantiate(job, range(num_nodes))
    assert isinstance(found, MembershipPlan)
    return found


def bound(*groups: tuple[int, ...]) -> tuple[NodePipeline[int], ...]:
    return tuple(NodePipeline(nodes=group, num_microbatches=1) for group in groups)


def nodes_of(found: MembershipPlan[int]) -> list[list[int]]:
    return sorted(sorted(pipeline.nodes) for pipeline in found.pipelines)


def check(job: Job, found: MembershipPlan[int], alive: set[int], sources: dict[int, np.ndarray]) -> None:
    """What every plan promises."""
    used = [node for pipeline in found.pipelines for node in pipeline.nodes]
    spare = [one.node for one in found.spares]
    assert sorted([*used, *spare]) == sorted(alive)
    assert all(one.reason for one in found.spares) and found.reason
    assert len(found.pipelines) >= job.min_pipelines
    assert sum(pipeline.num_microbatches for pipeline in found.pipelines) == job.num_microbatches
    assert all(pipeline.num_microbatches >= 1 for pipeline in found.pipelines)
    number = {layer: index for index, layer in enumerate(job.layers)}
    stateless = set(np.flatnonzero(job.bytes_of == 0).tolist())
    has = {node: set(np.flatnonzero(held).tolist()) for node, held in sources.items()}
    for copy in found.copies:
        assert copy.source in sources and number[copy.layer] in has[copy.source]
    for copy in found.copies:
        has.setdefault(copy.destination, set()).add(number[copy.layer])
    for pipeline in found.pipelines:
        covered = set()
        for node, mask in zip(pipeline.nodes, job.needs(len(pipeline.nodes)), strict=True):
            runs = set(np.flatnonzero(mask).tolist())
            assert runs - stateless <= has.get(node, set())
            covered |= runs
        assert covered == set(range(len(job.layers)))


@pytest.mark.parametrize(("fault_tolerance", "minimum"), [(f, n) for f in range(4) for n in range(1, 5)])
def test_every_subset_of_at_most_f_failures(fault_tolerance: int, minimum: int) -> None:
    """Clusters of up to 12 nodes: a plan that uses or explains every survivor and covers every layer, or a declared stop."""
    for num_nodes in range((fault_tolerance + 1) * minimum, 13):
        sizes = range(minimum, num_nodes - fault_tolerance * minimum + 1)
        job = even_job(sizes, fault_tolerance=fault_tolerance, num_microbatches=16)
        before = started(job, num_nodes)
        held = held_by(job, before.pipelines)
        for count in range(fault_tolerance + 1):
            for lost in itertools.combinations(range(num_nodes), count):
                found = reconfigure(job, before.pipelines, lost=lost, spares=[one.node for one in before.spares])
                if num_nodes - count < job.min_nodes:
                    assert isinstance(found, Stop) and str(job.min_nodes) in found.reason
                    continue
                assert isinstance(found, MembershipPlan), (num_nodes, lost, found)
                sources = {node: mask for node, mask in held.items() if node not in lost}
                check(job, found, set(range(num_nodes)) - set(lost), sources)
                assert not found.spares


@pytest.mark.parametrize("seed", range(25))
def test_a_long_life(seed: int) -> None:
    """Losses, notices and joins one after another, in a model of two chains on nodes of two devices."""
    rng = random.Random(seed)
    fault_tolerance = rng.randint(0, 2)
    minimum = rng.randint(1, 3)
    job = two_chain_job(range(minimum, 2 * minimum + rng.randint(0, 4)), fault_tolerance=fault_tolerance)
    total = job.min_nodes + rng.randint(1, 8)
    now = started(job, total)
    for _ in range(12):
        alive = {node for pipeline in now.pipelines for node in pipeline.nodes} | {one.node for one in now.spares}
        lost = rng.sample(sorted(alive), rng.randint(0, min(fault_tolerance, len(alive))))
        draining = [node for node in rng.sample(sorted(alive), rng.randint(0, 1)) if node not in lost]
        joined = [*range(total, total + rng.randint(0, 2))]
        total += len(joined)
        held = held_by(job, now.pipelines)
        found = reconfigure(
            job,
            now.pipelines,
            lost=lost,
            draining=draining,
            joined=joined,
            spares=[one.node for one in now.spares],
        )
        left = (alive | set(joined)) - set(lost) - set(draining)
        assert not isinstance(found, StateLost), "more replicas than losses: every layer has a holder"
        if isinstance(found, Stop):
            assert len(left) < job.min_nodes
            return
        check(job, found, left, {node: mask for node, mask in held.items() if node not in lost})
        now = found


def test_the_rules_win_where_recomposing_is_no_better() -> None:
    job = even_job((2, 3, 4), fault_tolerance=1)
    before = bound((0, 1, 2), (3, 4, 5))
    found = reconfigure(job, before, lost=[2])
    assert isinstance(found, MembershipPlan)
    check(job, found, {0, 1, 3, 4, 5}, {node: held for node, held in held_by(job, before).items() if node != 2})
    assert nodes_of(found) == [[0, 1], [3, 4, 5]]
    assert found.rule is RegroupRule.REINSTANTIATE
    assert found.reason.startswith("recomposing all nodes is no better")
    assert {copy.destination for copy in found.copies} <= {0, 1}


def test_recomposing_wins_where_a_step_gets_shorter() -> None:
    """Eight pipelines of three lose a node: the rules join two nodes with three, others divide 23 nodes more evenly."""
    job = timed_job([timed_template(size, 2.0, 12.0 / size) for size in (3, 4, 5)], num_microbatches=64)
    eight = [tuple(range(3 * index, 3 * index + 3)) for index in range(8)]
    found = reconfigure(job, bound(*eight), lost=[0])
    assert isinstance(found, MembershipPlan)
    assert sum(len(pipeline.nodes) for pipeline in found.pipelines) == 23
    assert found.rule is RegroupRule.RECOMPOSE
    assert found.reason == f"a step takes {found.iteration_s:.1f} s, after merge 38.0 s"


def test_state_that_nobody_holds_is_named() -> None:
    job = even_job((2, 3), num_layers=6)
    before = bound((0, 1), (2, 3))
    found = reconfigure(job, before, lost=[0, 2], joined=[4, 5, 6])
    assert isinstance(found, StateLost)
    assert "no node holds language_model[0:3]" in str(found)


def test_a_former_owner_is_a_source() -> None:
    job = even_job((2, 3), num_layers=6)
    before = bound((0, 1), (2, 3))
    holdings = held_by(job, before) | {9: np.ones(6, dtype=bool)}
    found = reconfigure(job, before, lost=[0, 2], spares=[9], joined=[4], holdings=holdings)
    assert isinstance(found, MembershipPlan)
    check(job, found, {1, 3, 4, 9}, {node: held for node, held in holdings.items() if node not in (0, 2)})
    assert {copy.source for copy in found.copies if copy.layer.index < 3} == {9}


def test_too_few_nodes_stop() -> None:
    job = even_job((2, 3, 4), fault_tolerance=1)
    found = reconfigure(job, bound((0, 1), (2, 3)), lost=[1])
    assert isinstance(found, Stop)
    assert str(found) == "stop: 3 nodes are left and 4 are needed: 2 pipelines (fault tolerance 1) of at least 2 nodes"
    start = instantiate(job, range(3))
    assert isinstance(start, Stop) and "and 4 are needed" in start.reason


def test_a_draining_node_sends_what_only_it_holds() -> None:
    job = even_job((2, 3), num_layers=6)
    before = bound((0, 1), (2, 3))
    found = reconfigure(job, before, lost=[0], draining=[2])
    assert isinstance(found, MembershipPlan)
    check(job, found, {1, 3}, {node: held for node, held in held_by(job, before).items() if node != 0})
    assert {copy.source for copy in found.copies if copy.layer.index < 3} == {2}
    assert 2 not in [node for pipeline in found.pipelines for node in pipeline.nodes]


def test_nodes_that_join_are_used() -> None:
    job = even_job((2, 3, 4), fault_tolerance=1)
    before = started(job, 6)
    found = reconfigure(job, before.pipelines, joined=[6, 7])
    assert isinstance(found, MembershipPlan)
    check(job, found, set(range(8)), held_by(job, before.pipelines))
    assert found.rule is RegroupRule.RECOMPOSE and "2 nodes join" in found.reason
    assert found.iteration_s < before.iteration_s


def test_a_join_moves_nothing_that_can_stay() -> None:
    """Two new nodes beside three pipelines of two, of two layers each: they make a fourth, and only they receive."""
    job = even_job((2, 3), num_layers=2, num_microbatches=16)
    before = bound((0, 1), (2, 3), (4, 5))
    found = reconfigure(job, before, joined=[6, 7])
    assert isinstance(found, MembershipPlan)
    assert {copy.destination for copy in found.copies} == {6, 7}
    assert found.kept_bytes == 600 and found.copied_bytes == 200


def test_a_node_cannot_join_twice() -> None:
    job = even_job((2, 3))
    with pytest.raises(PlanError, match=r"nodes \[3\] join and are there already"):
        reconfigure(job, bound((0, 1), (2, 3)), joined=[3])


def test_a_membership_prints_and_is_json() -> None:
    job = even_job((2, 4), num_layers=4)
    found = reconfigure(job, bound((0, 1, 2, 3), (4, 5, 6, 7)), lost=[3])
    assert isinstance(found, MembershipPlan)
    text = str(found)
    assert "because" in text and "spare node" in text and "x" in text
    assert msgspec.json.decode(msgspec.json.encode(found), type=MembershipPlan[int]) == found
