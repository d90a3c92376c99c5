"""Random steps of towers whose replicas compute samples in microbatches of their own, some of them deferred."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mmcompile.planner.schedule.schedule import CrossEdge, Flow, FlowEdge, Unit
from support.plans.plan_flows import ToyStage


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerCase:
    """What `schedule_units` takes."""

    stages: list[ToyStage]
    units: list[Unit]
    edges: list[CrossEdge]
    num_slots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tower:
    name: str
    count: int
    replicas: int
    depth: int
    """Of its last stage."""
    backward: tuple[int, ...]
    """Stages that run one, by index."""

    def stage(self, index: int, replica: int) -> str:
        return f"{self.name}.{index}#{replica}"

    def flow(self, replica: int) -> Flow:
        edges = tuple(
            FlowEdge(source=self.stage(a, replica), target=self.stage(b, replica), gradient=a in self.backward)
            for a, b in pairwise(range(self.count))
        )
        return Flow(
            stages=tuple(self.stage(index, replica) for index in range(self.count)),
            edges=edges,
            backward=tuple(self.stage(index, replica) for index in self.backward),
        )


_Place = tuple[int, int, int]
"""Replica, slot, lag."""


def random_towers(seed: int, *, most_lag: int = 1) -> TowerCase:
    """One to three encoders that feed a language model; any replicas, ranks, participation; lags of 0 to `most_lag`."""
    rng = random.Random(seed)
    encoders, language = _random_towers(rng)
    num_slots = rng.randint(1, 5)
    places = [_random_sample(rng, encoders, language, num_slots, most_lag) for _ in range(rng.randint(1, 14))]
    units = [
        _unit(tower, place, num_slots)
        for column, tower in enumerate([*encoders, language])
        for place in _distinct(sample[column] for sample in places)
    ]
    edges: set[CrossEdge] = set()
    for column, tower in enumerate(encoders):
        entries = _entries(rng, tower, language)
        for sample in places:
            source, target = sample[column], sample[-1]
            if source is not None and target is not None:
                edges |= {_edge(tower, source, language, target, entry, num_slots) for entry in entries}
    order = sorted(edges, key=lambda edge: (edge.source, edge.target))
    rng.shuffle(order)
    rng.shuffle(units)
    return TowerCase(stages=_stages(rng, encoders, language), units=units, edges=order, num_slots=num_slots)


def _random_towers(rng: random.Random) -> tuple[list[_Tower], _Tower]:
    count = rng.randint(1, 4)
    encoders: list[_Tower] = []
    for index in range(rng.randint(1, 3)):
        own = rng.randint(1, 3)
        encoders.append(
            _Tower(
                name=f"encoder{index}",
                count=own,
                replicas=rng.randint(1, 3),
                depth=count,
                # Frozen, all of it, or from some stage on.
                backward=tuple(range(rng.choice([own, 0, rng.randrange(own)]), own)),
            )
        )
    first = 0 if any(tower.backward for tower in encoders) else rng.choice([0, 0, rng.randrange(count)])
    language = _Tower(
        name="language_model", count=count, replicas=rng.randint(1, 3), depth=0, backward=tuple(range(first, count))
    )
    return encoders, language


def _random_sample(
    rng: random.Random, encoders: Sequence[_Tower], language: _Tower, num_slots: int, most_lag: int
) -> list[_Place | None]:
    """Where each tower computes it; None where it takes no part."""
    slot = rng.randrange(num_slots)
    found: list[_Place | None] = []
    last = (rng.randrange(language.replicas), slot, 0) if rng.random() < 0.9 else None
    for tower in encoders:
        early = max(0, slot - rng.randint(0, most_lag))
        place = (rng.randrange(tower.replicas), early, slot - early if last else 0)
        found.append(place if rng.random() < 0.6 else None)
    return [*found, last]


def _distinct(places: Iterable[_Place | None]) -> list[_Place]:
    return sorted({place for place in places if place is not None})


def _number(place: _Place, num_slots: int) -> int:
    _, slot, lag = place
    return slot + lag * num_slots


def _unit(tower: _Tower, place: _Place, num_slots: int) -> Unit:
    replica, slot, lag = place
    return Unit(number=_number(place, num_slots), slot=slot, backward_slot=slot + lag, flow=tower.flow(replica))


def _entries(rng: random.Random, tower: _Tower, language: _Tower) -> list[tuple[int, int]]:
    """(stage of the encoder, stage of the language model): the first, often, and others that layers in the middle feed."""
    pairs = {(tower.count - 1, 0)} if rng.random() < 0.8 else set()
    pairs |= {(a, b) for a in range(tower.count) for b in range(language.count) if rng.random() < 0.2}
    return sorted(pairs)


def _edge(
    tower: _Tower, source: _Place, language: _Tower, target: _Place, entry: tuple[int, int], num_slots: int
) -> CrossEdge:
    return CrossEdge(
        source=(tower.stage(entry[0], source[0]), _number(source, num_slots)),
        target=(language.stage(entry[1], target[0]), _number(target, num_slots)),
        gradient=entry[0] in tower.backward,
    )


def _stages(rng: random.Random, encoders: Sequence[_Tower], language: _Tower) -> list[ToyStage]:
    """Every replica of a stage on a rank of its own, or an encoder on the ranks of the language model's replicas."""
    stages: list[ToyStage] = []
    for tower in [language, *encoders]:
        shares = tower is not language and tower.replicas == language.replicas and rng.random() < 0.5
        first = len({stage.ranks for stage in stages})
        for replica in range(tower.replicas):
            for index in range(tower.count):
                own = first + replica * tower.count + index
                stages.append(
                    ToyStage(
                        name=tower.stage(index, replica),
                        ranks=(replica * language.count + index % language.count if shares else own,),
                        depth=tower.depth + tower.count - 1 - index,
                    )
                )
    return stages
