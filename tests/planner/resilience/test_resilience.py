"""What a plan promises for the day nodes die: true for every number of nodes, by enumeration; and how it is shown."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
from support.plans.template_jobs import even_template

from mmcompile.errors import PlanError
from mmcompile.planner.resilience.composition import compositions
from mmcompile.planner.resilience.nodes import fewest_pipelines
from mmcompile.planner.resilience.resilience import Resilience


def resilience(
    sizes: list[int], num_nodes: int, *, fault_tolerance: int = 1, num_microbatches: int = 64, layers: int = 12
) -> Resilience:
    return Resilience(
        fault_tolerance=fault_tolerance,
        templates=tuple(even_template(size, layers) for size in sizes),
        num_nodes=num_nodes,
        devices_per_node=1,
        num_microbatches=num_microbatches,
        layer_bytes={"language_model": (100,) * layers},
        microbatch_samples=2.0,
    )


def pipeline_counts(sizes: list[int], num_nodes: int, replicas: int) -> list[int]:
    """Of every way to use all of so many nodes."""
    return [sum(counts) for counts in compositions(sizes, num_nodes) if sum(counts) >= replicas]


@pytest.mark.parametrize("seed", range(20))
def test_which_node_counts_are_used_in_full_by_enumeration(seed: int) -> None:
    rng = random.Random(seed)
    least = rng.randint(1, 4)
    sizes = sorted({least, *rng.sample(range(least, 10), 2)})
    fault_tolerance, num_nodes, num_microbatches = rng.randint(0, 2), rng.randint(3 * least, 24), rng.randint(3, 12)
    value = resilience(sizes, num_nodes, fault_tolerance=fault_tolerance, num_microbatches=num_microbatches)
    replicas = fault_tolerance + 1

    counts = {nodes: pipeline_counts(sizes, nodes, replicas) for nodes in range(num_nodes + 1)}
    fewest = fewest_pipelines(sizes, num_nodes, replicas)
    assert fewest == {nodes: min(found) for nodes, found in counts.items() if found}

    expected = [
        nodes
        for nodes in range(replicas * least, num_nodes + 1)
        if not any(found <= num_microbatches for found in counts[nodes])
    ]
    assert list(value.cover.uncovered) == expected
    assert value.cover.least_nodes == replicas * least
    assert bool(value.problems) == bool(expected)


def test_the_promise_in_words() -> None:
    whole = resilience([2, 3, 4], 6)
    assert whole.promise == "fault tolerance 1: any 4..6 nodes can be used in full; below 4 training stops"
    assert whole.problems == ()
    assert str(whole).startswith(f"{whole.promise}\nnodes  stages")

    holes = resilience([4], 11)
    assert holes.promise.endswith("8..11 nodes can be used, but 9..11 not in full; below 8 training stops")
    (problem,) = holes.problems
    assert "templates of 4 nodes cannot use 9..11 nodes in full" in problem and "allow sizes 4 to 7" in problem


def test_pipelines_that_a_step_cannot_feed_are_not_promised() -> None:
    hungry = resilience([1, 2], 16, num_microbatches=5)
    assert hungry.cover.uncovered == (11, 12, 13, 14, 15, 16)
    (problem,) = hungry.problems
    assert problem.startswith("a step has 5 microbatches, one at least for each pipeline, too few")
    assert problem.endswith("; 8 would do")
    assert replace(hungry, num_microbatches=8).problems == ()
    with pytest.raises(PlanError, match="a step of 1 microbatches cannot feed the 2 pipelines"):
        _ = replace(hungry, num_microbatches=1).job


def test_few_lines_show_the_smallest_and_the_largest() -> None:
    value = resilience(list(range(2, 13)), 24)
    every = value.rows(11)
    assert len(every) == 11 and value.rows(100) == every
    assert every[0] == "2 nodes: 2 stages of 1 device, slowest 6.00 s, 6.00 s to fill"
    for most in range(2, 11):
        rows = value.rows(most)
        assert len(rows) == most and rows[:-1] == [row for row in every if row in rows[:-1]]
        assert (rows[0], rows[-1]) == (every[0], f"{every[-1]} (and {11 - most} sizes between)")
    assert value.rows(1) == ["2..12 nodes (11 sizes): 2..12 stages of 1 device, slowest 6.00 s down to 1.00 s"]
    assert value.rows(0) == []


def test_a_resilience_survives_json() -> None:
    value = resilience([2, 3], 8)
    assert msgspec.json.decode(msgspec.json.encode(value), type=Resilience) == value
