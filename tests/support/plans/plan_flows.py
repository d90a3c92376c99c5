"""Stages and flows made by hand, or drawn at random: any DAG, any map to ranks, any participation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mmcompile.planner.schedule.schedule import Flow, FlowEdge


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyStage:
    """What a schedule needs to know of a stage."""

    name: str
    ranks: tuple[int, ...]
    depth: int


def chain(count: int, *, backward: bool = True) -> tuple[list[ToyStage], Flow]:
    """Stages s0 -> s1 -> ..., each on its own rank."""
    stages = [ToyStage(name=f"s{i}", ranks=(i,), depth=count - 1 - i) for i in range(count)]
    names = tuple(stage.name for stage in stages)
    edges = tuple(
        FlowEdge(source=source, target=target, gradient=backward)
        for source, target in zip(names, names[1:], strict=False)
    )
    return stages, Flow(stages=names, edges=edges, backward=names if backward else ())


def random_case(seed: int, *, colocate: bool = True, participate: bool = True) -> tuple[list[ToyStage], list[Flow]]:
    """A random DAG of stages that ends in the loss, on random ranks; random stages take part in each microbatch."""
    rng = random.Random(seed)
    count = rng.randint(1, 7)
    pairs = {(source, rng.randint(source + 1, count - 1)) for source in range(count - 1)}
    pairs |= {(a, b) for a in range(count) for b in range(a + 1, count) if rng.random() < 0.2}
    depths = [0] * count
    for source, target in sorted(pairs, reverse=True):
        depths[source] = max(depths[source], depths[target] + 1)
    ranks = [rng.randrange(rng.randint(1, count)) if colocate else index for index in range(count)]
    used = sorted(set(ranks))
    stages = [ToyStage(name=f"s{i}", ranks=(used.index(ranks[i]),), depth=depths[i]) for i in range(count)]
    trains = [rng.random() < 0.5 for _ in range(count)]
    flows = [
        _flow(pairs, trains, [index for index in range(count) if not participate or _takes_part(rng, index, count)])
        for _ in range(rng.randint(1, 9))
    ]
    return stages, flows


def _takes_part(rng: random.Random, index: int, count: int) -> bool:
    return index == count - 1 or rng.random() < 0.7


def _flow(pairs: set[tuple[int, int]], trains: Sequence[bool], present: Sequence[int]) -> Flow:
    edges = sorted((a, b) for a, b in pairs if a in present and b in present)
    backward = {index for index in present if trains[index]}
    for source, target in edges:
        if source in backward:
            backward.add(target)
    return Flow(
        stages=tuple(f"s{index}" for index in present),
        edges=tuple(FlowEdge(source=f"s{a}", target=f"s{b}", gradient=a in backward) for a, b in edges),
        backward=tuple(f"s{index}" for index in sorted(backward)),
    )
