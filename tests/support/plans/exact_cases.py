"""Chains to split exactly, and the answer by trying everything."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import TypedDict

from mmcompile.planner.exact.demands import demands
from mmcompile.planner.exact.split_problem import ExactChain, ExactProblem, Splits
from mmcompile.planner.plan.constraints import parse_constraint
from mmcompile.planner.pricing.chains import ChainEdge, ChainLayer
from mmcompile.planner.search.partition import PartitionLayer, Split, StageTables


class Options(TypedDict):
    """Of `problem`."""

    counts: list[int] | None
    devices: int | None
    memory_bytes: int | None
    microbatches: int


PER_SECOND = 10**12
INFINITE = float("inf")


def random_layers(rng: random.Random, count: int) -> tuple[PartitionLayer, ...]:
    """Layers of whole milliseconds, so that ties are frequent, with sends that differ."""
    return tuple(
        PartitionLayer(
            seconds=rng.randint(0, 20) * 1e-3,
            fixed_bytes=rng.randint(0, 10),
            saved_bytes=rng.randint(0, 3),
            begin_fixed_bytes=rng.randint(0, 2),
            begin_saved_bytes=rng.randint(0, 2),
            send_s=rng.randint(0, 4) * 1e-3,
            return_s=rng.randint(0, 4) * 1e-3,
        )
        for _ in range(count)
    )


def _working(layers: Sequence[PartitionLayer], working: tuple[int, ...]) -> tuple[PartitionLayer, ...]:
    """The layers with these working bytes; as they are if () is given."""
    if not working:
        return tuple(layers)
    return tuple(replace(layer, working_bytes=own) for layer, own in zip(layers, working, strict=True))


def feed(target: int, entry: int = 0) -> ChainEdge:
    """An edge that enters before layer `entry` of a later chain."""
    return ChainEdge(source=0, source_layer=0, target=target, target_layer=entry)


def chain(
    name: str,
    layers: Sequence[PartitionLayer],
    *,
    tp: int = 1,
    low: int = 1,
    high: int | None = None,
    feeds: tuple[ChainEdge, ...] = (),
    ranks: tuple[tuple[int, ...], ...] = (),
    working: tuple[int, ...] = (),
) -> ExactChain:
    """A chain of one component, with as many devices a stage as ranks share its tensors."""
    count = len(layers)
    return ExactChain(
        name=name,
        labels=tuple(ChainLayer(component=name, index=i, name=f"model.{name}.layers.{i}") for i in range(count)),
        tables=StageTables(layers=_working(layers, working)),
        tp=tp,
        devices=tp,
        low=low,
        high=count if high is None else high,
        feeds=feeds,
        ranks=ranks,
    )


def equal_layers(count: int, seconds: float = 1.0, fixed_bytes: int = 0, saved_bytes: int = 0) -> list[PartitionLayer]:
    return [PartitionLayer(seconds=seconds, fixed_bytes=fixed_bytes, saved_bytes=saved_bytes)] * count


def problem(
    chains: Sequence[ExactChain],
    *constraints: str,
    microbatches: int = 4,
    memory_bytes: int | None = None,
    counts: Sequence[int] | None = None,
    devices: int | None = None,
) -> ExactProblem:
    """1F1B: a stage holds as many microbatches as stages are between it and the loss, and one."""
    asked = [parse_constraint(text) for text in constraints]
    return ExactProblem(
        chains=tuple(chains),
        in_flight=lambda depth: min(depth + 1, microbatches),
        demands=demands(asked, chains, memory_bytes=memory_bytes, counts=counts, devices=devices),
    )


def random_case(rng: random.Random) -> tuple[list[ExactChain], list[str], Options]:
    """An encoder and a language model, fixed (perhaps sharing ranks) or with devices to give out."""
    sizes = {"v": rng.randint(1, 4), "l": rng.randint(1, 5)}
    free = rng.random() < 0.5
    counts = {name: rng.randint(1, size) for name, size in sizes.items()}
    first = {"v": 0, "l": rng.randint(0, counts["v"])}
    feeds = {"v": (feed(1, entry=rng.choice([0, rng.randrange(sizes["l"])])),), "l": ()}
    chains = [
        chain(
            name,
            random_layers(rng, size),
            tp=rng.choice([1, 2]) if free else 1,
            low=1 if free else counts[name],
            high=size if free else counts[name],
            feeds=feeds[name],
            ranks=() if free else tuple((first[name] + stage,) for stage in range(counts[name])),
            working=tuple(rng.choice([0, 0, rng.randint(0, 15)]) for _ in range(size)),
        )
        for name, size in sizes.items()
    ]
    options = Options(
        counts=None if free else list(counts.values()),
        devices=rng.randint(2, 8) if free else None,
        memory_bytes=rng.choice([None, 70, 100]),
        microbatches=rng.randint(1, 6),
    )
    constraints = list(filter(None, (random_constraint(rng, sizes) for _ in range(rng.randint(0, 3)))))
    return chains, constraints, options


def random_constraint(rng: random.Random, sizes: dict[str, int]) -> str | None:
    name = rng.choice(list(sizes))
    one, other = rng.randrange(sizes[name]), rng.randrange(sizes[name])
    kind = rng.choice(["together", "apart", "on", "memory", "stages", "equal-tp"])
    match kind:
        case "together" | "apart":
            return None if one == other else f"{kind}:{name}.{one},{name}.{other}"
        case "on":
            return f"on:{name}.{one}={rng.randint(0, 2)}"
        case "memory":
            return f"memory:{rng.randint(10, 60)}B{rng.choice(['', '@v', '@l', '@l.0'])}"
        case "stages":
            return f"stages:{name}={rng.randint(1, 2)}..{rng.randint(2, 5)}"
        case _:
            return kind


def all_splits(chains: Sequence[ExactChain]) -> Iterator[Splits]:
    """Every way to cut every chain."""
    ways = []
    for own in chains:
        cuts = [
            c
            for n in range(own.low - 1, min(own.high, own.num_layers))
            for c in combinations(range(1, own.num_layers), n)
        ]
        ways.append([Split(boundaries=(0, *c, own.num_layers)) for c in cuts])
    return product(*ways)


def slowest(chains: Sequence[ExactChain], splits: Splits) -> float:
    """Picoseconds of the busiest ranks, from the definition."""
    busy: dict[object, float] = {}
    for own, split in zip(chains, splits, strict=True):
        layers = own.tables.layers
        for stage, (first, last) in enumerate(pairwise(split.boundaries)):
            seconds = sum(layer.seconds for layer in layers[first:last]) + layers[last - 1].send_s
            seconds += layers[first - 1].return_s if first else 0.0
            where = own.ranks[stage] if own.ranks else (own.name, stage)
            busy[where] = busy.get(where, 0) + round(seconds * PER_SECOND)
    return max(busy.values())


def memory(chains: Sequence[ExactChain], splits: Splits, microbatches: int) -> dict[tuple[str, int], int]:
    """(chain, stage) -> bytes of its ranks, from the definition."""
    depth: dict[tuple[str, int], int] = {}
    for own, split in reversed(list(zip(chains, splits, strict=True))):
        below = -1
        for edge in own.feeds:
            entry = next(s for s, end in enumerate(splits[edge.target].boundaries[1:]) if edge.target_layer < end)
            below = max(below, depth[chains[edge.target].name, entry])
        for stage in reversed(range(split.num_stages)):
            below += 1
            depth[own.name, stage] = below
    used: dict[tuple[str, int], int] = {}
    on_ranks: dict[object, int] = {}
    where: dict[tuple[str, int], object] = {}
    for own, split in zip(chains, splits, strict=True):
        for stage, (first, last) in enumerate(pairwise(split.boundaries)):
            held = min(depth[own.name, stage] + 1, microbatches)
            need = sum(layer.fixed_bytes + held * layer.saved_bytes for layer in own.tables.layers[first:last])
            begin = own.tables.layers[first]
            need += begin.begin_fixed_bytes + held * begin.begin_saved_bytes
            need += max(own.tables.working_bytes[first:last], default=0)
            key = where[own.name, stage] = own.ranks[stage] if own.ranks else (own.name, stage)
            on_ranks[key] = on_ranks.get(key, 0) + need
            used[own.name, stage] = need
    return {stage: on_ranks[where[stage]] for stage in used}
