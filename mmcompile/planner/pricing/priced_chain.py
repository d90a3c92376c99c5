"""`PricedChain`: seconds and bytes of a chain's layers in one layout, as running sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from mmcompile.costmodel.load import NO_LOAD, Load
from mmcompile.planner.pricing.chains import ChainSpec
from mmcompile.planner.pricing.pricing import LayerSharding, Pricing

OPTIMIZER_STATES = 2
"""Optimizer states a trainable element in the parameter's dtype, those of AdamW (torch.optim.AdamW)."""
OPTIMIZER_PASSES = 3 + 2 * OPTIMIZER_STATES
"""Times an optimizer step moves the bytes of the trainable parameters: reads of gradients, parameters and states, and writes."""

Loads = Mapping[str, tuple[Load | None, Load | None]]
"""Component -> its mean and its worst load; None where costs are known at one load only."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PricedChain:
    """A chain's layers on one of the ranks that share them: running sums [layers + 1] unless stated."""

    forward_s: NDArray[np.float64]
    input_grad_s: NDArray[np.float64]
    weight_grad_s: NDArray[np.float64]
    backward: NDArray[np.int64]
    """True for layers that run a backward, [layers]."""
    parameter_bytes: NDArray[np.int64]
    trainable_bytes: NDArray[np.int64]
    saved_bytes: NDArray[np.int64]
    """Bytes kept for backward by the mean microbatch."""
    worst_bytes: NDArray[np.int64]
    """Bytes kept for backward by the worst microbatch."""
    working_bytes: NDArray[np.int64]
    """Bytes while the layer runs its backward, by the worst microbatch, [layers]."""
    shared_bytes: NDArray[np.int64]
    """Further bytes for backward of a stage that begins with the layer, by the mean microbatch, [layers]."""
    worst_shared_bytes: NDArray[np.int64]
    """Further bytes for backward of a stage that begins with the layer, by the worst microbatch, [layers]."""
    output_bytes: NDArray[np.int64]
    """Output bytes of one rank, by the mean microbatch, [layers]."""
    whole_bytes: NDArray[np.int64]
    """Output bytes of the whole replica, [layers]."""
    slowest_s: float
    """Seconds of forward and backward of the slowest layer."""
    waited: float
    """Least part of a layer's time that is not weight gradient."""
    body: RepeatedLayers

    @property
    def total_s(self) -> NDArray[np.float64]:
        """Running sum of forward and backward seconds."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s

    @property
    def state_bytes(self) -> NDArray[np.int64]:
        """Running sum of parameters, gradients and optimizer state."""
        return self.parameter_bytes + (1 + OPTIMIZER_STATES) * self.trainable_bytes

    def held_bytes(self, num_stages: int, num_microbatches: int) -> float:
        """Return the bytes of all stages of a 1F1B pipeline that ends in the loss, if they have equal parts of the chain."""
        filled = min(num_stages, num_microbatches)
        in_flight = (filled * (filled + 1) / 2 + (num_stages - filled) * num_microbatches) / num_stages
        return float(self.state_bytes[-1]) + in_flight * float(self.saved_bytes[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedLayers:
    """The layers of a chain that are equal and together take the most time."""

    count: int
    seconds: float
    """Seconds of forward and backward of one layer."""
    fixed_bytes: int
    """Bytes that do not depend on the microbatches in flight, with the excess of the worst microbatch over the mean."""
    saved_bytes: int
    """Bytes kept for backward by the mean microbatch."""
    working_bytes: int


def price_chain(
    pricing: Pricing, chain: ChainSpec, sharding: LayerSharding, loads: Sequence[Loads]
) -> list[PricedChain]:
    """Price a chain at many loads at once."""
    parts: dict[tuple[str, float], tuple[NDArray[np.float64], NDArray[np.int64]]] = {}
    counts: dict[tuple[str, float], NDArray[np.int64]] = {}
    rows: list[NDArray[np.float64]] = []
    columns: list[NDArray[np.int64]] = []
    for key, layers in groupby(chain.layers, key=lambda layer: (layer.component, layer.share)):
        if key not in parts:
            parts[key] = _component_prices(pricing, *key, sharding, loads)
            counts[key] = np.zeros(len(parts[key][0]), dtype=np.int64)
        group = pricing.groups(key[0])[[layer.index for layer in layers]]
        np.add.at(counts[key], group, 1)
        rows.append(parts[key][0][group])
        columns.append(parts[key][1][group])
    seconds, sizes = np.concatenate(rows), np.concatenate(columns)  # [layers, loads, 3], [layers, loads, 10]
    totals = seconds.sum(axis=2)
    running_s = np.concatenate([np.zeros((1, *seconds.shape[1:])), np.cumsum(seconds, axis=0)])
    running = np.concatenate([np.zeros((1, *sizes.shape[1:]), dtype=np.int64), np.cumsum(sizes, axis=0)])
    late = np.divide(seconds[..., 2], totals, out=np.zeros_like(totals), where=totals > 0).max(axis=0)
    slowest = totals.max(axis=0)
    return [
        PricedChain(
            forward_s=running_s[:, index, 0],
            input_grad_s=running_s[:, index, 1],
            weight_grad_s=running_s[:, index, 2],
            backward=running[:, index, 0],
            parameter_bytes=running[:, index, 1],
            trainable_bytes=running[:, index, 2],
            saved_bytes=running[:, index, 3],
            worst_bytes=running[:, index, 4],
            working_bytes=sizes[:, index, 5],
            output_bytes=sizes[:, index, 6],
            whole_bytes=sizes[:, index, 7],
            shared_bytes=sizes[:, index, 8],
            worst_shared_bytes=sizes[:, index, 9],
            slowest_s=float(slowest[index]),
            waited=float(1.0 - late[index]),
            body=_body([(counts[key], *part) for key, part in parts.items()], index),
        )
        for index in range(len(loads))
    ]


def _component_prices(
    pricing: Pricing, component: str, share: float, sharding: LayerSharding, loads: Sequence[Loads]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return seconds and sizes of one layer of each group of a component, or of a share of it.

    Returns:
        [groups, loads, 3]; and [groups, loads, 10]: backward, parameters, trainable, saved, saved by the worst, working, output,
        output of the replica, shared, shared by the worst.
    """
    mean = _columns([each[component][0] for each in loads], share)
    heavy = _columns([each[component][1] for each in loads], share)
    whole = replace(sharding, tp=1, cp=1, fsdp=1)
    seconds, own = pricing.bulk(component, *mean, sharding)
    _, worst = pricing.bulk(component, *heavy, sharding)
    sent = own if sharding == whole else pricing.bulk(component, *mean, whole)[1]
    sizes = (
        own.backward,
        own.parameter,
        own.trainable,
        own.activation,
        np.maximum(worst.activation, own.activation),
        np.maximum(worst.working, own.working),
        own.output,
        sent.output,
        own.shared,
        np.maximum(worst.shared, own.shared),
    )
    return seconds, np.stack([column.astype(np.int64) for column in sizes], axis=-1)


def _columns(loads: Sequence[Load | None], share: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rows = np.array([(load.tokens * share, load.squares * share) for load in (each or NO_LOAD for each in loads)])
    return rows[:, 0], rows[:, 1]


def _body(
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]], index: int
) -> RepeatedLayers:
    """Return the body at the `index`-th load.

    Args:
        parts: layers of each group, seconds and sizes as of `_component_prices`.
    """
    best: tuple[float, RepeatedLayers] | None = None
    for counts, seconds, sizes in parts:
        totals = seconds[:, index].sum(axis=1).tolist()
        for total, count, row in zip(totals, counts.tolist(), sizes[:, index].tolist(), strict=True):
            if count and (best is None or total * count > best[0]):
                _, parameter, trainable, saved, worst, working, *_ = row
                fixed = parameter + (1 + OPTIMIZER_STATES) * trainable + worst - saved
                best = (
                    total * count,
                    RepeatedLayers(
                        count=count, seconds=total, fixed_bytes=fixed, saved_bytes=saved, working_bytes=working
                    ),
                )
    assert best is not None
    return best[1]
