"""One step of a plan, balanced: figures against their definitions, text, picture, JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image
from support.oracles.balance_oracle import assignment_in
from support.plans.hand_plan import Part, hand_plan

from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.assignment import SampleCosts
from mmcompile.batching.balance.bucket_bounds import pipelined
from mmcompile.batching.balance.registry import BALANCERS
from mmcompile.data.stats import DatasetStats
from mmcompile.data.synthetic import synthetic
from mmcompile.errors import ConfigError, OutputError
from mmcompile.planner.plan.plan import Plan
from mmcompile.report.pictures.drawing import colours
from mmcompile.report.step.balanced_step import BalancedStep, Comparison, TriedBalancer, components_of, straggler_s
from mmcompile.report.step.step_balance import balanced, drawn, step_grid, step_samples, tried
from mmcompile.report.step.step_picture import MAX_BARS, draw_step
from mmcompile.report.step.step_text import bar, step_text

NAMES = ("vision", "audio", "language_model")


TRIED = (
    TriedBalancer(name="arrival", simulated_s=0.5, straggler_s=0.06, deferred=0, reason=""),
    TriedBalancer(name="joint", simulated_s=0.4, straggler_s=0.0, deferred=0, reason=""),
    TriedBalancer(name="hierarchical", simulated_s=0.375, straggler_s=0.01, deferred=12, reason=""),
    TriedBalancer(
        name="node-local", simulated_s=None, straggler_s=None, deferred=0, reason="too many microbatches; use joint"
    ),
    TriedBalancer(
        name="auto", simulated_s=0.4, straggler_s=0.0, deferred=0, reason="imbalance 60.0%; joint takes 20.0% less"
    ),
)


def plan_of(replicas: tuple[int, int, int], num_microbatches: int) -> Plan:
    """Two encoders of one stage, a language model of two."""
    stages = dict(zip(NAMES, (1, 1, 2), strict=True))
    parts = [Part(name=name, layers=4, stages=stages[name], dp=dp) for name, dp in zip(NAMES, replicas, strict=True)]
    return hand_plan(parts, cluster="4x4xA100-80G", num_microbatches=num_microbatches)


def costs_of(num_samples: int, seed: int = 0) -> SampleCosts:
    """Not every sample has every modality. Whole microseconds, so that sums do not depend on their order."""
    rng = np.random.default_rng(seed)
    costs = np.rint(rng.lognormal(0, 0.8, (3, num_samples)) * np.array([[5000], [2000], [20000]])) * 1e-6
    costs[0, rng.random(num_samples) < 0.2] = 0
    costs[1, rng.random(num_samples) < 0.6] = 0
    return SampleCosts(components=NAMES, costs=costs, lengths=np.rint(costs * 1e5).astype(np.int64))


def step_of(
    name: str,
    replicas: tuple[int, int, int] = (2, 1, 2),
    num_microbatches: int = 4,
    num_samples: int = 40,
    every: bool = False,
) -> BalancedStep:
    """Hand-made costs, balanced, timed by a formula."""
    plan, costs = plan_of(replicas, num_microbatches), costs_of(num_samples)
    choice = balanced(costs, step_grid(plan), BALANCERS[name], pipelined)
    return BalancedStep(
        plan="plan.json",
        data="a mix",
        seed=0,
        step=3,
        num_microbatches=num_microbatches,
        asked=name,
        balancer=choice.name,
        reason=choice.reason,
        components=components_of(plan, costs, choice.assignment),
        simulated_s=Comparison(before=choice.arrival_s, after=choice.step_s),
        assignment=choice.assignment,
        balancers=tuple(tried(BALANCERS, costs, step_grid(plan), pipelined)) if every else (),
    )


@pytest.mark.parametrize(
    ("file", "step", "rows"),
    [
        ("step.txt", lambda: step_of("hierarchical"), 32),
        ("step_large.txt", lambda: step_of("post-balance", (8, 2, 8), 16, 600), 5),
        ("step_alone.txt", lambda: step_of("joint", (1, 1, 1), 2, 6), 32),
        ("step_all.txt", lambda: replace(step_of("hierarchical"), balancers=TRIED), 32),
    ],
)
def test_text(file: str, step: Callable[[], BalancedStep], rows: int, golden: Callable[[str, str], None]) -> None:
    golden(file, step_text(step(), width=100, max_rows=rows))


def test_text_says_what_auto_chose() -> None:
    step = step_of("auto")
    assert step.balancer != "auto" and f"\nauto chose {step.balancer}: {step.reason}\n" in step_text(step)


@pytest.mark.parametrize("width", [40, 72, 100, 300])
def test_lines_fit_the_console(width: int) -> None:
    lines = step_text(step_of("hierarchical-all", (8, 2, 8), 16, 600), width=width, max_rows=1024).splitlines()
    bars = [line for line in lines if "█" in line]
    assert len(bars) > 100
    assert max(map(len, bars)) <= min(max(width, 72), 140)


def test_bar() -> None:
    assert bar(8, 8, 4) == "████"
    assert bar(5, 8, 4) == "██▌ "
    assert bar(1e-9, 8, 4) == "▏   ", "anything above 0 shows"
    assert bar(0, 8, 4) == bar(0, 0, 4) == "    "


def test_straggler_seconds() -> None:
    """At each microbatch, the slowest replica less the mean."""
    assert straggler_s([[4.0, 1.0], [2.0, 1.0]]) == 1.0
    assert straggler_s([[4.0, 1.0, 7.0]]) == 0.0
    step = step_of("hierarchical")
    total = 0.0
    for component in step.components:
        for slot in range(step.num_microbatches):
            loads = [replica[slot] for replica in component.loads_before]
            total += max(loads) - sum(loads) / len(loads)
    assert step.straggler_s.before == pytest.approx(total)
    assert step.straggler_s.saved == pytest.approx(total - step.straggler_s.after) and step.straggler_s.saved > 0


def test_loads_and_deferral_sample_by_sample() -> None:
    step, costs = step_of("hierarchical-all"), costs_of(40)
    arrival = Arrival().assign(costs, step.assignment.grid)
    for row, component in enumerate(step.components):
        for assignment, loads in ((arrival, component.loads_before), (step.assignment, component.loads_after)):
            wanted = np.zeros((component.replicas, step.num_microbatches))
            for sample in np.flatnonzero(costs.takes_part[row]):
                wanted[assignment.replica[row, sample], assignment.microbatch[row, sample]] += costs.costs[row, sample]
            np.testing.assert_allclose(loads, wanted)
        late = step.assignment.deferred(row)
        assert np.sum(component.deferred) == late.sum()
        assert np.sum(component.deferred_s) == pytest.approx(costs.costs[row, late].sum())
    assert np.sum(step.components[0].deferred) > 0 == np.sum(step.components[-1].deferred)


def test_traffic_sample_by_sample() -> None:
    plan, costs, step = plan_of((4, 2, 4), 4), costs_of(64), step_of("hierarchical", (4, 2, 4), 4, 64)
    target = plan.chains[-1].stages[0].ranks
    for row, component in enumerate(step.components[:-1]):
        source = plan.chains[row].stages[0].ranks
        arrival = Arrival().assign(costs, step.assignment.grid)
        assert component.traffic is not None
        found = component.traffic
        for which, assignment in (("before", arrival), ("after", step.assignment)):
            ranks = nodes = 0
            for sample in np.flatnonzero(costs.takes_part[row]):
                here, there = source[assignment.replica[row, sample]], target[assignment.replica[-1, sample]]
                tokens = costs.tokens("")[row, sample]
                ranks, nodes = ranks + tokens * (here != there), nodes + tokens * (here // 4 != there // 4)
            assert (getattr(found.other_rank, which), getattr(found.other_node, which)) == (ranks, nodes)
        assert found.tokens == costs.tokens("")[row].sum()
    assert step.components[-1].traffic is None


def test_samples_are_drawn_without_replacement() -> None:
    stats = DatasetStats.of(synthetic("cocoqa", 20), name="twenty")
    first = drawn(stats, 12, seed=0, step=0)
    assert len({shape.name for shape in first}) == 12
    assert first == drawn(stats, 12, seed=0, step=0)
    assert first != drawn(stats, 12, seed=0, step=1) != drawn(stats, 12, seed=1, step=0) != first
    many = [shape.name for shape in drawn(stats, 50, seed=0, step=0)]
    assert len(many) == 50 and {many.count(name) for name in set(many)} == {2, 3}
    with pytest.raises(ConfigError, match="empty has no samples"):
        drawn(DatasetStats.of([], name="empty"), 4, seed=0, step=0)


def test_samples_of_a_plan_that_does_not_say() -> None:
    assert step_samples(plan_of((2, 1, 3), 4)) == 12


def test_all_balancers_are_tried() -> None:
    step = step_of("auto", every=True)
    assert [each.name for each in step.balancers] == list(BALANCERS)
    seconds = {each.name: each.simulated_s for each in step.balancers}
    assert seconds["auto"] == step.simulated_s.after and seconds["arrival"] == step.simulated_s.before
    refused = {each.name: each.reason for each in step.balancers if each.simulated_s is None}
    assert refused.keys() == {"node-local"} and "one microbatch" in refused["node-local"]


def test_json() -> None:
    step = step_of("hierarchical")
    found = msgspec.json.decode(msgspec.json.encode(step.to_json()))
    assert found["samples"] == 40 and found["seed"] == 0 and found["step"] == 3 and "balancers" not in found
    assert [component["name"] for component in found["components"]] == list(NAMES)
    for component in found["components"]:
        assert np.shape(component["loads_before"]) == (component["replicas"], 4) == np.shape(component["deferred"])
    assert found["straggler_s"]["saved"] == found["straggler_s"]["before"] - found["straggler_s"]["after"]
    assert assignment_in(found["assignment"]) == step.assignment
    assert msgspec.json.encode(step_of("hierarchical").to_json()) == msgspec.json.encode(step.to_json())


def test_picture(tmp_path: Path) -> None:
    """Bars of both sides in every panel; the same bytes again."""
    path = draw_step(tmp_path / "step.png", step_of("hierarchical"))
    pixels = np.asarray(Image.open(path).convert("RGB"))
    for colour in ("#b8b8b8", *colours(f"{name}.0" for name in NAMES).values()):
        wanted = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
        assert (pixels == wanted).all(-1).sum() > 2000, colour
    assert draw_step(tmp_path / "again.png", step_of("hierarchical")).read_bytes() == path.read_bytes()
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(OutputError, match=r"cannot write .*folder\.png"):
        draw_step(tmp_path / "folder.png", step_of("hierarchical"))


def test_picture_of_more_microbatches_than_bars_fit(tmp_path: Path) -> None:
    step = step_of("auto", (8, 2, 8), 16, 600)
    assert step.components[0].replicas * step.num_microbatches > MAX_BARS
    assert draw_step(tmp_path / "step.png", step).read_bytes().startswith(b"\x89PNG")
