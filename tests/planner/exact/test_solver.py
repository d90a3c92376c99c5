"""The exact splitter against the DP, brute force, a parametric search; certificates; the time it may take."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
from support.plans.exact_cases import (
    INFINITE,
    PER_SECOND,
    Options,
    all_splits,
    chain,
    equal_layers,
    feed,
    memory,
    problem,
    random_case,
    random_layers,
    slowest,
)

from mmcompile.errors import PlanError
from mmcompile.planner.exact.conflict import Conflict
from mmcompile.planner.exact.seed import seed
from mmcompile.planner.exact.solver import Exact, solve
from mmcompile.planner.exact.split_problem import (
    ExactChain,
    ExactProblem,
    Splits,
    broken,
    slowest_ps,
    stage_bytes,
)
from mmcompile.planner.plan.constraints import parse_constraint
from mmcompile.planner.search.partition import PartitionLayer, Split, partition


@pytest.mark.parametrize("number", range(50))
def test_equals_the_interval_dp(number: int) -> None:
    rng = random.Random(number)
    layers = random_layers(rng, rng.randint(1, 12))
    count, microbatches = rng.randint(1, len(layers)), rng.randint(1, 6)
    memory_bytes = rng.choice([10**6, 20, 40, 80])
    own = [chain("lm", layers, low=count, high=count)]
    wanted = partition(layers, count, memory_bytes=memory_bytes, num_microbatches=microbatches)[-1]
    found = solve(problem(own, microbatches=microbatches, memory_bytes=memory_bytes), seeded=False, budget_s=60)
    if wanted is None:
        assert isinstance(found, Conflict)
    else:
        assert isinstance(found, Exact) and found.proved and found.gap == 0
        assert found.slowest_s == found.bound_s == wanted.bottleneck_s


def meets(text: str, chains: list[ExactChain], splits: Splits, used: dict[tuple[str, int], int]) -> bool:
    """A constraint on layers named `chain.index`, from its definition."""
    numbers = {own.name: index for index, own in enumerate(chains)}

    def stage_of(layer: str) -> tuple[str, int]:
        name, index = layer.split(".")
        ranges = pairwise(splits[numbers[name]].boundaries)
        return name, next(stage for stage, (first, last) in enumerate(ranges) if first <= int(index) < last)

    constraint = parse_constraint(text)
    kind, _, rest = text.partition(":")
    match kind:
        case "together":
            return len({stage_of(layer) for layer in rest.split(",")}) == 1
        case "apart":
            return len({stage_of(layer) for layer in rest.split(",")}) == 2
        case "on":
            layer, stage = rest.split("=")
            return stage_of(layer)[1] == int(stage)
        case "memory":
            size, _, where = rest.partition("@")
            return all(n <= int(size[:-1]) for (name, s), n in used.items() if where in ("", name, f"{name}.{s}"))
        case "stages":
            name, ends = rest.split("=")
            low, high = map(int, ends.split(".."))
            return low <= splits[numbers[name]].num_stages <= high
    assert str(constraint) == "equal-tp"
    return len({own.tp for own in chains}) == 1


def by_brute_force(chains: list[ExactChain], constraints: list[str], options: Options) -> float:
    best = INFINITE
    for splits in all_splits(chains):
        used = memory(chains, splits, options["microbatches"])
        limit = options["memory_bytes"] or INFINITE
        # A limit for every stage that the user gives takes the place of that of the device.
        limit = INFINITE if any(text.startswith("memory") and "@" not in text for text in constraints) else limit
        devices = sum(split.num_stages * own.devices for own, split in zip(chains, splits, strict=True))
        fits = max(used.values()) <= limit and devices <= (options["devices"] or INFINITE)
        value = slowest(chains, splits)
        if fits and value < best and all(meets(text, chains, splits, used) for text in constraints):
            best = value
    return best


@pytest.mark.parametrize("number", range(60))
def test_equals_brute_force_under_constraints(number: int) -> None:
    chains, constraints, options = random_case(random.Random(number))
    asked = problem(chains, *constraints, **options)
    wanted = by_brute_force(chains, constraints, options)
    for seeded in (True, False):
        found = solve(asked, seeded=seeded, budget_s=60)
        if wanted == INFINITE:
            assert isinstance(found, Conflict)
            continue
        assert isinstance(found, Exact) and found.proved and not broken(asked, found.splits)
        assert round(found.slowest_s * PER_SECOND) == round(found.bound_s * PER_SECOND) == wanted
        assert slowest(chains, found.splits) == wanted


@pytest.mark.parametrize("count", [2, 4])
def test_a_parametric_search_agrees_on_a_thousand_layers(count: int) -> None:
    rng = random.Random(count)
    times = [rng.randint(1, 10**6) for _ in range(1000)]
    layers = [PartitionLayer(seconds=duration / PER_SECOND) for duration in times]
    found = solve(problem([chain("lm", layers, low=count, high=count)]), budget_s=60)
    assert isinstance(found, Exact) and found.proved
    low, high = max(times), sum(times)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fewest_stages(times, middle) <= count else (middle + 1, high)
    assert round(found.slowest_s * PER_SECOND) == low


def fewest_stages(times: list[int], limit: int) -> int:
    """Greedy: stages needed if none may take longer than `limit`."""
    stages, current = 1, 0
    for duration in times:
        if current + duration > limit:
            stages, current = stages + 1, 0
        current += duration
    return stages


def test_every_chain_is_split_well_not_only_the_slowest() -> None:
    chains = [
        chain("v", equal_layers(6), low=2, high=2, feeds=(feed(1),)),
        chain("l", equal_layers(8, 5.0), low=4, high=4),
    ]
    start = (Split(boundaries=(0, 1, 6)), Split(boundaries=(0, 2, 4, 6, 8)))
    for seeded in (True, False):
        found = solve(problem(chains), start=start, seeded=seeded)
        assert isinstance(found, Exact)
        assert [split.boundaries for split in found.splits] == [(0, 3, 6), (0, 2, 4, 6, 8)]


def test_stages_that_share_ranks_are_cut_to_fit_each_other() -> None:
    # Alone, each chain is best cut in the middle; together they are better cut against each other.
    chains = [
        chain("v", equal_layers(4), low=2, high=2, feeds=(feed(1),), ranks=((0,), (1,))),
        chain("l", equal_layers(3, 3.0), low=2, high=2, ranks=((0,), (1,))),
    ]
    asked = problem(chains)
    dp, _ = seed(asked)
    assert dp is not None
    found = solve(asked)
    assert isinstance(found, Exact) and found.proved
    assert found.slowest_s == 7.0 < slowest_ps(asked, dp) / PER_SECOND


def test_memory_grows_with_the_distance_to_the_loss_across_chains() -> None:
    # Three bytes a stage: with n stages in the language model the encoder's stage holds n + 1 microbatches of a byte.
    chains = [
        chain("v", equal_layers(1, saved_bytes=1), feeds=(feed(1),)),
        chain("l", equal_layers(6, 1.0), high=6),
    ]
    found = solve(problem(chains, "memory:3B", microbatches=100, devices=7))
    assert isinstance(found, Exact)
    assert [split.num_stages for split in found.splits] == [1, 2]
    # Entering before the last layer, it is near the loss whatever the count.
    chains[0] = chain("v", equal_layers(1, saved_bytes=1), feeds=(feed(1, entry=5),))
    asked = problem(chains, "memory:3B", microbatches=100, devices=7)
    found = solve(asked)
    assert isinstance(found, Exact)
    assert [split.num_stages for split in found.splits] == [1, 6]
    assert stage_bytes(asked, found.splits)[0] == [2]


def large(seed_number: int = 0) -> ExactProblem:
    rng = random.Random(seed_number)
    layers = [
        PartitionLayer(
            seconds=rng.randint(1, 10**9) / PER_SECOND, fixed_bytes=rng.randint(1, 9), send_s=rng.randint(0, 9) * 1e-6
        )
        for _ in range(126)
    ]
    return problem([chain("l", layers, low=8, high=8)], "together:l.0,l.9", "apart:l.60,l.62", "memory:100B")


def test_a_large_chain_is_proved() -> None:
    found = solve(large(), budget_s=60)
    assert isinstance(found, Exact) and found.proved
    assert "no split is better" in found.text and "proved by Z3" in found.text


@pytest.mark.parametrize("budget_s", [0.0, 0.02])
def test_when_the_time_is_up_there_is_an_answer_and_a_bound(budget_s: float) -> None:
    # Stages that share ranks: the DP's bound leaves a gap that only Z3 can close.
    rng = random.Random(5)
    ranks = tuple((rank,) for rank in range(6))
    chains = [
        chain("v", random_layers(rng, 40), low=6, high=6, feeds=(feed(1),), ranks=ranks),
        chain("l", random_layers(rng, 60), low=6, high=6, ranks=ranks),
    ]
    asked = problem(chains)
    (dp, _), began = seed(asked), time.monotonic()
    found = solve(asked, budget_s=budget_s)
    assert time.monotonic() - began < 5.0
    assert isinstance(found, Exact) and not found.proved
    assert dp is not None and slowest_ps(asked, found.splits) <= slowest_ps(asked, dp)
    assert 0 < found.bound_s < found.slowest_s and found.gap > 0
    assert "none can be under" in found.text and "gap" in found.text


def test_without_a_seed_and_without_time_there_is_an_error() -> None:
    with pytest.raises(PlanError, match="0 s were up before a split that meets every demand was found, or excluded"):
        solve(large(), seeded=False, budget_s=0)


def test_the_same_question_gets_the_same_answer() -> None:
    first, second = solve(large(3), budget_s=60), solve(large(3), budget_s=60)
    assert isinstance(first, Exact) and isinstance(second, Exact)
    assert (first.splits, first.slowest_s) == (second.splits, second.slowest_s)
