"""Work of each microbatch of a simulated step, from samples drawn at random."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mmcompile.config import Recompute
from mmcompile.costmodel.load import Load
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Chain
from mmcompile.planner.pricing.pricing import LayerSharding, Pricing
from mmcompile.planner.pricing.sample_sizes import SampleRows
from mmcompile.report.study import Study


def chain_loads(plan: Plan, study: Study, num_microbatches: int, seed: int = 0) -> dict[str, list[float]]:
    """Return chain -> seconds of each microbatch of its first replica, divided by the seconds that the plan predicts.

    The i-th microbatches of all replicas of a chain together hold the same samples in every chain.
    """
    pricing = study.pricing(plan)
    samples, replicas = slot_samples(plan, study, plan.chains[-1]), plan.chains[-1].dp
    drawn = study.workload.draw(num_microbatches * replicas, samples, seed)
    found: dict[str, list[float]] = {}
    for chain in plan.chains:
        expected = _expected(plan, study, chain)
        one = {name: (np.array([load.tokens]), np.array([load.squares])) for name, load in expected.items()}
        base = _seconds(pricing, chain, one)[0]
        own = _seconds(pricing, chain, _served(drawn, chain, num_microbatches, replicas))
        found[chain.name] = [float(seconds / base) if base else 1.0 for seconds in own]
    return found


def slot_samples(plan: Plan, study: Study, chain: Chain) -> float:
    """Return the number of samples in a microbatch of one replica of a chain; below 1 if replicas share too few samples."""
    return (plan.microbatch_samples or float(study.graph.num_samples)) * plan.chains[-1].dp / chain.dp


def _expected(plan: Plan, study: Study, chain: Chain) -> Mapping[str, Load]:
    """Return component -> rows and squared lengths of the microbatch that a plan is priced for: mean of its data, or captured."""
    samples = slot_samples(plan, study, chain)
    if not plan.data:
        return {name: load * (samples / study.graph.num_samples) for name, load in study.table.loads.items()}
    if samples >= 1:
        return study.workload.mean(samples)
    return {name: load * samples for name, load in study.workload.mean(1).items()}


_Arrays = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Tokens, and sums of squared sequence lengths, of each microbatch: float64 [microbatches] both."""


def _served(drawn: Mapping[str, SampleRows], chain: Chain, count: int, replicas: int) -> dict[str, _Arrays]:
    served = np.clip(replicas / chain.dp - np.arange(replicas), 0.0, 1.0)  # part of each replica's microbatch

    def own(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        return rows.reshape(count, replicas) @ served

    return {name: (own(table.rows), own(table.squares)) for name, table in drawn.items()}


def _seconds(pricing: Pricing, chain: Chain, loads: Mapping[str, _Arrays]) -> NDArray[np.float64]:
    """Return seconds of a chain's forward plus backward, [microbatches]; `loads`: component -> rows, squared lengths of each."""
    layers: dict[tuple[str, Recompute], list[int]] = {}
    for stage in chain.stages:
        modes = stage.modes
        for component, layer in stage.layers:
            layers.setdefault((component, modes.get((component, layer), "none")), []).append(layer)
    each = [
        pricing.group_durations(name, *loads[name], LayerSharding(tp=chain.tp, cp=chain.cp, recompute=mode))[
            pricing.groups(name)[own]
        ].sum(axis=(0, 2))
        for (name, mode), own in layers.items()
    ]
    return np.sum(each, axis=0)
