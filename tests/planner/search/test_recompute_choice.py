"""The modes of a rank's layers, against all of them tried."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

from mmcompile.config import Recompute
from mmcompile.planner.search.recompute_choice import LayerVariant, LayerWays, Modes, StageChoices, cheapest

MODES: tuple[Recompute, ...] = ("none", "selective", "full")


def total(ways: Sequence[LayerVariant]) -> tuple[float, int]:
    """(seconds, bytes) of a stage."""
    held = sum(way.num_bytes for way in ways) + max(way.working_bytes for way in ways)
    return sum(way.seconds for way in ways), held


def every(stage: StageChoices) -> Iterator[tuple[float, int]]:
    """(seconds, bytes) of all choices within the stage's own limit."""
    choices = [*product(*stage.mixed), tuple(own[0] for own in stage.kept)]
    yield from (each for each in map(total, choices) if each[1] <= stage.limit_bytes)


def best(stages: Sequence[StageChoices], limit: int) -> tuple[float, int] | None:
    """Least seconds, then least bytes, over everything."""
    sums = ((sum(s for s, _ in each), sum(b for _, b in each)) for each in product(*map(every, stages)))
    return min((each for each in sums if each[1] <= limit), default=None)


def chosen(stage: StageChoices, modes: Modes) -> tuple[float, int]:
    """(seconds, bytes) of the modes found."""
    if all(mode in ("none", None) for mode in modes):
        return total([own[0] for own in stage.kept])
    pairs = zip(stage.mixed, modes, strict=True)
    return total([next(way for way in ways if way.mode == mode) for ways, mode in pairs])


def layer(draw: random.Random) -> LayerWays:
    """Whole seconds, so that sums are exact. More computed again is slower and usually holds less."""
    if draw.random() < 0.2:
        return (LayerVariant(mode=None, num_bytes=draw.randint(0, 5), working_bytes=draw.randint(0, 9), seconds=3.0),)
    held = sorted((draw.randint(0, 30) for _ in MODES), reverse=True)
    if draw.random() < 0.2:
        draw.shuffle(held)
    seconds = sorted(float(draw.randint(1, 9)) for _ in MODES)
    working = draw.randint(0, 20)
    return tuple(
        LayerVariant(mode=mode, num_bytes=own, working_bytes=working // 3 if mode == "none" else working, seconds=each)
        for mode, own, each in zip(MODES, held, seconds, strict=True)
    )


def stage(draw: random.Random) -> StageChoices:
    kinds = [layer(draw) for _ in range(draw.randint(1, 3))]
    layers = [draw.choice(kinds) for _ in range(draw.randint(1, 4))]
    alone = [
        LayerVariant(
            mode=ways[0].mode,
            num_bytes=max(0, ways[0].num_bytes - 2),
            working_bytes=ways[0].working_bytes,
            seconds=ways[0].seconds,
        )
        for ways in layers
    ]
    return StageChoices(mixed=layers, kept=[(way,) for way in alone], limit_bytes=draw.randint(10, 90))


def test_no_other_choice_within_the_memory_is_faster() -> None:
    draw, found = random.Random(0), 0
    for _ in range(200):
        stages = [stage(draw) for _ in range(draw.choice((1, 1, 2)))]
        limit = draw.randint(10, 120)
        modes, wanted = cheapest(stages, limit), best(stages, limit)
        if modes is None or wanted is None:
            assert modes is wanted
            continue
        found += 1
        each = [chosen(own, mode) for own, mode in zip(stages, modes, strict=True)]
        assert (sum(seconds for seconds, _ in each), sum(held for _, held in each)) == wanted
        assert all(held <= own.limit_bytes for own, (_, held) in zip(stages, each, strict=True))
    assert 50 < found < 190, "some fit, some do not"


def test_of_layers_that_are_alike_the_first_compute_more_again() -> None:
    ways = (
        LayerVariant(mode="none", num_bytes=10, working_bytes=0, seconds=1.0),
        LayerVariant(mode="selective", num_bytes=4, working_bytes=0, seconds=1.5),
        LayerVariant(mode="full", num_bytes=1, working_bytes=0, seconds=1.9),
    )
    layers = StageChoices(mixed=[ways] * 4, kept=[(ways[0],)] * 4, limit_bytes=100)
    assert cheapest([layers], 40) == [("none",) * 4]
    assert cheapest([layers], 31) == [("full", "none", "none", "none")], "one selective would hold 34"
    assert cheapest([layers], 29) == [("selective", "selective", "none", "none")]
    assert cheapest([layers], 4) == [("full",) * 4]
    assert cheapest([layers], 3) is None


def test_what_is_computed_again_needs_room_once() -> None:
    small = (
        LayerVariant(mode="none", num_bytes=10, working_bytes=0, seconds=1.0),
        LayerVariant(mode="full", num_bytes=1, working_bytes=9, seconds=2.0),
    )
    head = (
        LayerVariant(mode="none", num_bytes=50, working_bytes=0, seconds=1.0),
        LayerVariant(mode="full", num_bytes=1, working_bytes=50, seconds=2.0),
    )
    layers = StageChoices(
        mixed=[small, small, small, head], kept=[(own[0],) for own in (small, small, small, head)], limit_bytes=1000
    )
    assert cheapest([layers], 80) == [("none",) * 4]
    assert cheapest([layers], 79) == [("full", "full", "none", "none")], "one alone, or the head alone, saves nothing"
    assert cheapest([layers], 61) == [("full", "full", "full", "full")]
