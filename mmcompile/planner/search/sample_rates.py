"""`SampleRate`s of a candidate: cost of samples of any size in each component of its chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mmcompile.costmodel.load import Load, Polynomial
from mmcompile.planner.plan.geometry import Geometry
from mmcompile.planner.plan.plan_record import SampleRate
from mmcompile.planner.pricing.chains import ChainSpec
from mmcompile.planner.pricing.pricing import LayerSharding, Pricing
from mmcompile.planner.search.candidate import Candidate


def sample_rates(
    candidate: Candidate, geometries: Mapping[str, Geometry], pricing: Pricing | None = None
) -> tuple[SampleRate, ...]:
    """Return rates around the mean load of a slot of each chain's replica.

    Args:
        geometries: of every component.
        pricing: with costs at every load, where those of the candidate's problem hold at one load only.
    """
    problem, setting = candidate.problem, candidate.setting
    pricing = pricing or problem.pricing
    found: list[SampleRate] = []
    for number, (chain, degrees) in enumerate(zip(candidate.chains.chains, candidate.degrees, strict=True)):
        last = problem.loss_component in chain.components
        shardings = [degrees.sharding(mode) for mode in candidate.modes_of(number)]
        for component in chain.components:
            load = problem.prices.mean_load(component, setting, degrees, last=last)
            if load is None:
                load = pricing.table.loads[component] * (setting.samples_of(degrees) / problem.graph.num_samples)
            if load.tokens <= 0:
                load = pricing.table.captured_loads[component]
            seconds, activation_bytes = _values(pricing, chain, component, load, shardings)
            found.append(
                SampleRate(
                    chain=chain.name,
                    geometry=geometries[component],
                    seconds=_polynomial(seconds, load),
                    activation_bytes=_polynomial(activation_bytes, load),
                )
            )
    return tuple(found)


def _values(
    pricing: Pricing, chain: ChainSpec, component: str, at: Load, shardings: Sequence[LayerSharding]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return seconds [3] and activation bytes [3] of a component's layers: at a load, at twice its tokens, at twice its squares.

    Args:
        shardings: sharding of each layer of the chain.
    """
    tokens, squares = at.tokens * np.array([1.0, 2.0, 1.0]), at.squares * np.array([1.0, 1.0, 2.0])
    seconds, saved = np.zeros(3), np.zeros(3)
    layers = zip(chain.layers, shardings, strict=True)
    own = [(layer.index, layer.share, sharding) for layer, sharding in layers if layer.component == component]
    for share, sharding in dict.fromkeys((share, sharding) for _, share, sharding in own):
        each, sizes = pricing.bulk(component, tokens * share, squares * share, sharding)
        group = pricing.groups(component)[[index for index, *kind in own if tuple(kind) == (share, sharding)]]
        seconds += each[group].sum(axis=(0, 2))
        saved += sizes.activation[group].sum(axis=0)
    return seconds, saved


def _polynomial(values: NDArray[np.float64], at: Load) -> Polynomial:
    """Return the polynomial through the values of `_values`. More rows never cost less; rounding errors below 0 are dropped."""
    by_tokens, by_squares = (max(float(value - values[0]), 0.0) for value in values[1:])
    return Polynomial(
        fixed=float(values[0]) - by_tokens - by_squares,
        per_token=by_tokens / at.tokens,
        per_square=by_squares / at.squares if at.squares else 0.0,
    )
