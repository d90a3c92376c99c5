"""Random histories of a cluster: what generations are told is checked against devices that really hold, copy and drop layers."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mmcompile.planner.resilience.job import LayerId, WorkerId
from mmcompile.planner.resilience.membership import MembershipChange, Planned, StateLost, Stop, Wait
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.planner.templates.generate import generate
from mmcompile.planner.templates.layer_table import ChainLayers, LayerTable, SharedLayers
from mmcompile.runtime.elastic.generation_plan import GenerationPlan
from mmcompile.runtime.elastic.template_planner import TemplatePlanner

LAYERS = {"vision": 3, "language_model": 7}
FROZEN = {LayerId(chain="vision", index=0), LayerId(chain="vision", index=1)}
MICROBATCHES = 12


def chain(name: str, feeds: str | None) -> ChainLayers:
    count = LAYERS[name]
    seconds = tuple(0.001 * (1 + index % 3) for index in range(count))
    shared = SharedLayers(
        devices=1,
        forward_s=seconds,
        backward_s=seconds,
        parameter_bytes=(40,) * count,
        activation_bytes=(1,) * count,
    )
    return ChainLayers(name=name, shared=(shared,), feeds=feeds)


def resilience(num_nodes: int, fault_tolerance: int, devices: int) -> Resilience:
    table = LayerTable(
        chains=(chain("vision", "language_model"), chain("language_model", None)),
        devices_per_node=devices,
        # Ten layers of 40 bytes need two nodes of one device.
        memory_bytes=300 if devices == 1 else 160,
    )
    found = generate(table, num_nodes, fault_tolerance)
    return Resilience(
        fault_tolerance=fault_tolerance,
        templates=tuple(found.values()),
        num_nodes=num_nodes,
        devices_per_node=devices,
        num_microbatches=MICROBATCHES,
        layer_bytes={
            name: tuple(0 if LayerId(chain=name, index=index) in FROZEN else 10 + index for index in range(count))
            for name, count in LAYERS.items()
        },
        microbatch_samples=1.0,
    )


@dataclass
class World:
    """Nodes as they are: what devices hold, at which step, and what the last active generation was told."""

    rng: random.Random
    planner: TemplatePlanner
    held: dict[WorkerId, dict[LayerId, int]] = field(default_factory=dict)
    """Device -> layer -> step of its state."""
    members: list[str] = field(default_factory=list)
    payload: str | None = None
    committed: int = 0
    born: int = 0
    gone: set[str] = field(default_factory=set)
    """Members of the last active generation whose state is gone."""

    @property
    def devices(self) -> int:
        return self.planner.resilience.devices_per_node

    def new_node(self) -> str:
        self.born += 1
        return f"n{self.born}"

    def ask(self, stay: list[str], joined: list[str], draining: list[str]) -> Planned | Wait | Stop | StateLost:
        lost = [name for name in self.members if name not in stay and name not in draining]
        members = [*[name for name in self.members if name in stay], *joined]
        return self.planner.plan(
            MembershipChange(
                members=tuple(members),
                num_workers=(self.devices,) * len(members),
                lost=tuple(lost),
                joined=tuple(joined),
                draining=tuple(sorted(draining)),
                previous=tuple(self.members),
                previous_payload=self.payload,
                committed=self.committed,
            )
        )

    def check(self, plan: GenerationPlan, members: list[str], draining: list[str]) -> None:
        """Everything but copies."""
        job = self.planner.resilience.job
        used = [node for pipeline in plan.pipelines for node in pipeline.nodes]
        idle = [one.node for one in plan.spares]
        assert sorted([*used, *idle]) == sorted(set(members) - set(draining))
        assert all(one.reason for one in plan.spares)
        assert sum(pipeline.num_microbatches for pipeline in plan.pipelines) == MICROBATCHES
        assert min(pipeline.num_microbatches for pipeline in plan.pipelines) >= 1
        assert len(plan.pipelines) >= job.min_pipelines
        assert plan.committed == self.committed

    def needed(self, plan: GenerationPlan) -> dict[WorkerId, set[LayerId]]:
        found: dict[WorkerId, set[LayerId]] = {}
        for pipeline in plan.pipelines:
            seen: Counter[LayerId] = Counter()
            for stage in self.planner.resilience.job.by_size[len(pipeline.nodes)].stages:
                (number,) = stage.devices
                device = WorkerId(node=pipeline.nodes[number // self.devices], index=number % self.devices)
                layers = [LayerId(chain=stage.chain, index=index) for index in range(stage.first, stage.last)]
                found.setdefault(device, set()).update(layers)
                seen.update(layers)
            assert seen == Counter(LayerId(chain=c, index=i) for c, count in LAYERS.items() for i in range(count))
        return found

    def run_copies(self, plan: GenerationPlan) -> None:
        for number in sorted({copy.round for copy in plan.copies}):
            now = [copy for copy in plan.copies if copy.round == number]
            assert len({copy.source for copy in now}) == len({copy.destination for copy in now}) == len(now)
            for copy in now:
                assert copy.layer not in FROZEN
                assert copy.layer not in self.held.get(copy.destination, {}), "it has that layer"
                assert self.held[copy.source][copy.layer] == self.committed, "the source's layer is old"
                self.held.setdefault(copy.destination, {})[copy.layer] = self.committed


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("fault_tolerance", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_every_generation_of_a_random_history(devices: int, fault_tolerance: int, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{devices}/{fault_tolerance}/{seed}")
    promise = resilience(9, fault_tolerance, devices)
    world = World(rng, TemplatePlanner(resilience=promise, start_nodes=9, checkpoints=tmp_path / "none"))
    least = promise.job.min_nodes
    joined = [world.new_node() for _ in range(9)]
    assert isinstance(world.ask([], joined[:8], []), Wait)
    stay: list[str] = []
    draining: list[str] = []
    kinds: Counter[str] = Counter()
    for _ in range(40):
        decision = world.ask(stay, joined, draining)
        if isinstance(decision, StateLost) and draining:
            kinds["handed over"] += 1
            stay = [*stay, *draining]
            decision = world.ask(stay, joined, draining)
        members = [*[name for name in world.members if name in stay], *joined]
        assert isinstance(decision, Planned), decision
        plan = GenerationPlan.decode(decision.payload)
        assert GenerationPlan.decode(plan.encode()) == plan
        if plan.farewell:
            assert len(set(members) - set(draining)) < least
            kinds["farewell"] += 1
            break
        world.check(plan, members, draining)
        for name in joined:
            for index in range(devices):
                world.held.pop(WorkerId(node=name, index=index), None)
        # What a generation that never becomes active copied is not counted upon.
        before = {device: dict(layers) for device, layers in world.held.items()}
        world.run_copies(plan)
        needed = world.needed(plan)
        for device, layers in needed.items():
            mine = world.held.setdefault(device, {})
            for layer in layers:
                if world.committed == 0 or layer in FROZEN:
                    mine.setdefault(layer, world.committed)
            lacking = layers - mine.keys()
            assert not lacking, f"{device} lacks {lacking}"
            assert all(mine[layer] == world.committed for layer in layers - FROZEN)
        if world.payload is None or rng.random() < 0.75:
            # It becomes active.
            world.members, world.payload, world.gone = members, decision.payload, set()
            if rng.random() < 0.6:
                world.committed += rng.randint(1, 3)
                for name in members:
                    for index in range(devices):
                        device = WorkerId(node=name, index=index)
                        kept = needed.get(device, set())
                        world.held[device] = dict.fromkeys(kept, world.committed)
                kinds["committed"] += 1
        else:
            world.held = before
            kinds["superseded"] += 1
        stay, joined, draining = next_members(world, rng, fault_tolerance, least)
        kinds["joined"] += bool(joined)
        kinds["draining"] += bool(draining)
    assert kinds["committed"] > 3, kinds


def next_members(
    world: World, rng: random.Random, fault_tolerance: int, least: int
) -> tuple[list[str], list[str], list[str]]:
    """Who stays, joins and drains. At most f nodes go at once, and enough are left."""
    alive = [name for name in world.members if name not in world.gone]
    room = max(0, len(alive) - least)
    gone = rng.sample(alive, min(room, rng.randint(0, fault_tolerance)))
    stay = [name for name in alive if name not in gone]
    draining = [name for name in gone if rng.random() < 0.3]
    world.gone |= set(gone) - set(draining)
    back = [name for name in gone if name not in draining and rng.random() < 0.3]
    fresh = [world.new_node() for _ in range(rng.randint(0, 2))] if len(stay) < 9 else []
    return stay, [*back, *fresh], draining
