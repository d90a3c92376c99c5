"""Costs of samples in each balance group of a plan, from their sizes alone, for the balancers.

A plan has a rate for every component (`mmcompile.planner.plan.plan.SampleRate`): seconds of forward and backward on one replica,
as a function of a sample's rows (tokens, patches). The sum over a balance group's components is the sample's cost in this group.
The constant cost of a microbatch (launches, reading parameters) belongs to no sample and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mmcompile.batching.balance.assignment import SampleCosts
from mmcompile.data.collate import Sample
from mmcompile.data.sample import SampleShape
from mmcompile.errors import PlanError
from mmcompile.planner.plan.balance_groups import towers
from mmcompile.planner.plan.geometry import Geometry
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Chain, SampleRate
from mmcompile.planner.pricing.sample_sizes import SampleRows, SampleSizes

_LEAST_ROW_S = 1e-15
"""Least cost of a row (a token or patch), in seconds. It is above 0, as a cost of 0 means that a sample has no row."""


def costs_of_shapes(plan: Plan, shapes: Sequence[SampleShape]) -> SampleCosts:
    """Return the predicted costs of samples given by their shapes.

    Returns:
        Costs by balance group (stages that compute the same samples together), the language model's last. `lengths` are numbers
        of tokens or patches in a group's first component; in the last group, of the language model's whole interleaved sequence.

    Raises:
        PlanError: the plan has no rates (predicted costs per token or patch), or stages of one balance group differ in replicas.
    """
    return _costs(plan, SampleSizes.of_shapes(shapes))


def costs_of_samples(plan: Plan, samples: Sequence[Sample]) -> SampleCosts:
    """Return the predicted costs of samples as a processor returns them, with rows counted as in the plan's example batch.

    The length of a text is the number of ones in `attention_mask`, else that of `input_ids`; images and audio clips are sized by
    their grids, else by the shapes of their inputs. A microbatch pads to its longest text; a sample's cost is that of its own
    length.

    Returns, Raises:
        Like `costs_of_shapes`.
    """
    return _costs(plan, SampleSizes.of_samples(samples, (rate.geometry for rate in plan.sample_rates)))


def _costs(plan: Plan, sizes: SampleSizes) -> SampleCosts:
    if not plan.sample_rates:
        raise PlanError("the plan has no rates to price samples with; make it anew with `mmcompile plan`")
    rows: dict[Geometry, SampleRows] = {}
    seconds: list[NDArray[np.float64]] = []
    lengths: list[NDArray[np.float64]] = []
    members = towers(plan)
    for number, chains in enumerate(members.values(), 1):
        rates = _rates(plan, chains)
        for rate in rates:
            if rate.geometry not in rows:
                rows[rate.geometry] = sizes.rows(rate.geometry)
        brought = [rows[rate.geometry] for rate in rates]
        seconds.append(np.sum([_seconds(rate, own) for rate, own in zip(rates, brought, strict=True)], axis=0))
        lengths.append(brought[-1 if number == len(members) else 0].rows)
    return SampleCosts(
        components=tuple(members), costs=np.array(seconds), lengths=np.rint(np.array(lengths)).astype(np.int64)
    )


def _rates(plan: Plan, chains: Sequence[Chain]) -> list[SampleRate]:
    found: list[SampleRate] = []
    for name in (chain.name for chain in chains):
        own = [rate for rate in plan.sample_rates if rate.chain == name]
        found += own
        if not own:
            raise PlanError(
                f"the plan has no rate for {name} to price samples with; make it anew with `mmcompile plan`"
            )
    return found


def _seconds(rate: SampleRate, brought: SampleRows) -> NDArray[np.float64]:
    # The constant term is the fixed cost of a microbatch.
    predicted = rate.seconds.per_token * brought.rows + rate.seconds.per_square * brought.squares
    return np.maximum(predicted, _LEAST_ROW_S * brought.rows)
