"""`relaxed`: a candidate whose layers recompute only as much as memory requires; `by_layer`: the fastest relaxed candidate.

A search gives all layers of a candidate one recomputation mode, the cheapest with which every stage fits. Stages near the loss
hold fewer microbatches, so that most stages could recompute less. With cuts and ranks as they are, each rank gets the modes of
its layers that take the least time within its memory (`mmcompile.planner.search.recompute_choice`). The mode of the search is
among the choices, so that no stage gets slower for the mean microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmcompile.config import Recompute
from mmcompile.planner.plan.constraints import Constraint, MemoryCap
from mmcompile.planner.pricing.priced_chain import PricedChain, price_chain
from mmcompile.planner.search.branch_and_bound import FINALISTS, TOLERANCE, BranchAndBound
from mmcompile.planner.search.candidate import Candidate, CandidateStage
from mmcompile.planner.search.recompute_choice import LayerVariant, LayerWays, Modes, StageChoices, cheapest
from mmcompile.planner.search.settings import RECOMPUTES


def by_layer(engine: BranchAndBound, best: Candidate, constraints: Sequence[Constraint] = ()) -> Candidate:
    """Return the fastest candidate of a search with recomputation chosen layer by layer; `best` if no such candidate is faster.

    Args:
        engine: search that has finished.
        best: fastest candidate of the search, all layers in one mode.
        constraints: constraints of the plan. With any, only variants of `best` are tried, as other candidates may break them.
    """
    close = engine.fastest(FINALISTS)
    own = _judged(engine, best, constraints)
    if own.iteration_s <= best.iteration_s:
        best = own
    for other in [] if constraints else close:
        rival = _judged(engine, other)
        if rival.iteration_s < best.iteration_s * (1 - TOLERANCE / 2):
            best = rival
    return best


def _judged(engine: BranchAndBound, judged: Candidate, constraints: Sequence[Constraint] = ()) -> Candidate:
    candidate = relaxed(judged, constraints)
    if candidate is judged:
        return judged
    engine.judge([candidate], judged.strategy)
    return engine.judged[-1]


def relaxed(candidate: Candidate, constraints: Sequence[Constraint] = ()) -> Candidate:
    """Return the candidate with the recomputation of each layer chosen to take the least time within the memory.

    Args:
        candidate: candidate with all layers in the mode of its setting. A rank without a choice that fits keeps its modes.
        constraints: constraints of the plan, whose memory caps are respected.
    """
    if candidate.setting.recompute == "none":
        return candidate
    limit = candidate.problem.memory_bytes(candidate.num_ranks)
    chains = [_PricedModes.of(candidate, chain) for chain in range(len(candidate.degrees))]
    groups: dict[int, list[int]] = {}
    for index, stage in enumerate(candidate.stages):
        groups.setdefault(stage.ranks[0], []).append(index)
    known: dict[tuple[object, ...], list[Modes] | None] = {}
    stages = list(candidate.stages)
    for members in groups.values():
        own = [candidate.stages[index] for index in members]
        free = limit - sum(chains[stage.chain].fixed_bytes(stage) for stage in own)
        caps = [_cap(candidate, index, constraints, limit) for index in members]
        key = (*((stage.chain, stage.first, stage.last, stage.in_flight) for stage in own), *caps)
        if key not in known:
            choices = [chains[stage.chain].choices(stage, cap) for stage, cap in zip(own, caps, strict=True)]
            known[key] = cheapest(choices, free)
        for index, stage, each in zip(members, own, known[key] or [], strict=known[key] is not None):
            stages[index] = chains[stage.chain].run(stage, each)
    return replace(candidate, stages=tuple(stages))


def _cap(candidate: Candidate, index: int, constraints: Sequence[Constraint], limit_bytes: int) -> int:
    """Return the most bytes that the stage with the given index may hold under all memory constraints, at most `limit_bytes`."""
    stage = candidate.stages[index]
    places = {"", candidate.chains.chains[stage.chain].name, candidate.names[index], *(f"rank{r}" for r in stage.ranks)}
    caps = [each.num_bytes for each in constraints if isinstance(each, MemoryCap) and each.where in places]
    return min([limit_bytes, *caps])


@dataclass(frozen=True, kw_only=True, slots=True)
class _PricedModes:
    """Calculator of a stage's seconds and bytes for any recomputation modes of its layers, from prices in every mode."""

    backward: NDArray[np.bool_]
    """True for layers where recomputation frees memory, [layers]."""
    kept: PricedChain
    """Prices of the chain if no layer of a stage recomputes. Its `shared_bytes` hold for every mode."""
    mixed: dict[Recompute, PricedChain]
    """Recomputation mode -> prices of the chain's layers in that mode, valid in stages where at least one layer recomputes."""

    @classmethod
    def of(cls, candidate: Candidate, chain: int) -> _PricedModes:
        problem, spec, degrees = candidate.problem, candidate.chains.chains[chain], candidate.degrees[chain]
        setting = candidate.setting
        loads = problem.prices.loads_of(spec, degrees, setting)

        def priced(mode: Recompute) -> PricedChain:
            sharding = replace(degrees.sharding(mode), mixed=True)
            return price_chain(problem.pricing, spec, sharding, [loads])[0]

        kept = problem.prices.priced(spec, degrees, replace(setting, recompute="none"))
        return cls(backward=np.diff(kept.backward) > 0, kept=kept, mixed={mode: priced(mode) for mode in RECOMPUTES})

    def fixed_bytes(self, stage: CandidateStage) -> int:
        """Return the bytes of a stage that no mode changes: parameters, optimizer states and shared activations."""
        held = stage.total_bytes - stage.activation_bytes
        if not stage.in_flight:
            return held
        shared, worst = self.kept.shared_bytes[stage.first], self.kept.worst_shared_bytes[stage.first]
        return held + int(worst + (stage.in_flight - 1) * shared)

    def choices(self, stage: CandidateStage, limit_bytes: int) -> StageChoices:
        layers = range(stage.first, stage.last)
        return StageChoices(
            mixed=[self._ways(layer, stage.in_flight) for layer in layers],
            kept=[(self._way(self.kept, layer, "none", stage.in_flight),) for layer in layers],
            limit_bytes=limit_bytes - self.fixed_bytes(stage),
        )

    def _ways(self, layer: int, in_flight: int) -> LayerWays:
        modes = RECOMPUTES if self.backward[layer] else ("none",)
        return tuple(self._way(self.mixed[mode], layer, mode, in_flight) for mode in modes)

    def _way(self, priced: PricedChain, layer: int, mode: Recompute, in_flight: int) -> LayerVariant:
        held = _one(priced.worst_bytes, layer) + (in_flight - 1) * _one(priced.saved_bytes, layer) if in_flight else 0
        return LayerVariant(
            mode=mode if self.backward[layer] else None,
            num_bytes=int(held),
            working_bytes=int(priced.working_bytes[layer]) if in_flight else 0,
            seconds=float(_one(priced.total_s, layer)),
        )

    def run(self, stage: CandidateStage, modes: Modes) -> CandidateStage:
        """Return the stage with new recomputation modes of its layers, and the seconds and bytes that follow from them."""
        again = any(mode not in ("none", None) for mode in modes)
        own = [
            (self.mixed[mode or "none"] if again else self.kept, stage.first + index)
            for index, mode in enumerate(modes)
        ]
        return replace(
            stage,
            input_grad_s=float(sum(_one(priced.input_grad_s, layer) for priced, layer in own)),
            weight_grad_s=float(sum(_one(priced.weight_grad_s, layer) for priced, layer in own)),
            saved_bytes=int(
                sum(_one(priced.saved_bytes, layer) for priced, layer in own) + self.kept.shared_bytes[stage.first]
            ),
            worst_bytes=int(
                sum(_one(priced.worst_bytes, layer) for priced, layer in own)
                + self.kept.worst_shared_bytes[stage.first]
            ),
            working_bytes=int(max(priced.working_bytes[layer] for priced, layer in own)),
            modes=modes,
        )


def _one(running: NDArray[Any], layer: int) -> Any:
    """Return the value of one layer from running sums over layers; `running[i]` is the sum over the first i layers."""
    return running[layer + 1] - running[layer]
