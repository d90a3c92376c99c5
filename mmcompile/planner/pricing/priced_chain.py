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
"""Number of optimizer states for each trainable element, in the parameter's dtype, as in AdamW (torch.optim.AdamW)."""
OPTIMIZER_PASSES = 3 + 2 * OPTIMIZER_STATES
"""Passes of an optimizer step over the bytes of trainable parameters: reads of gradients, parameters and states, and writes."""

Loads = Mapping[str, tuple[Load | None, Load | None]]
"""Component -> (mean, heaviest) load of a microbatch (rows, squared lengths), each None if costs do not depend on it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PricedChain:
    """Prices of a chain's layers on one of the ranks that share them.

    A running sum [layers + 1] has at entry i the sum over the first i layers; fields are running sums unless stated otherwise.
    """

    forward_s: NDArray[np.float64]
    input_grad_s: NDArray[np.float64]
    weight_grad_s: NDArray[np.float64]
    backward: NDArray[np.int64]
    """Number of layers that run a backward, running sum [layers + 1]."""
    parameter_bytes: NDArray[np.int64]
    trainable_bytes: NDArray[np.int64]
    saved_bytes: NDArray[np.int64]
    """Bytes of activations kept for the backward of the mean microbatch, running sum [layers + 1]."""
    worst_bytes: NDArray[np.int64]
    """Bytes of activations kept for the backward of the worst microbatch, running sum [layers + 1]."""
    working_bytes: NDArray[np.int64]
    """Bytes held only while the layer runs its backward, for the worst microbatch, [layers]."""
    shared_bytes: NDArray[np.int64]
    """Entry i: bytes of earlier layers' values (masks) that a stage from layer i on keeps for the mean microbatch, [layers]."""
    worst_shared_bytes: NDArray[np.int64]
    """Entry i: bytes of earlier layers' values (masks) that a stage from layer i on keeps for the worst microbatch, [layers]."""
    output_bytes: NDArray[np.int64]
    """Bytes of the layer's output on one rank, for the mean microbatch, [layers]."""
    whole_bytes: NDArray[np.int64]
    """Bytes of the layer's output in the whole replica, for the mean microbatch, [layers]."""
    slowest_s: float
    """Seconds of forward and backward of the slowest layer, for the mean microbatch."""
    waited: float
    """Least share, 0..1, of a layer's time that is not weight gradient."""
    body: RepeatedLayers

    @property
    def total_s(self) -> NDArray[np.float64]:
        """Seconds of forward and backward of the first i layers, running sum [layers + 1]."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s

    @property
    def state_bytes(self) -> NDArray[np.int64]:
        """Bytes of parameters, gradients and optimizer state of the first i layers, running sum [layers + 1]."""
        return self.parameter_bytes + (1 + OPTIMIZER_STATES) * self.trainable_bytes

    def held_bytes(self, num_stages: int, num_microbatches: int) -> float:
        """Return bytes of parameters, gradients, optimizer state and activations, summed over one rank of each stage, under 1F1B.

        The chain ends in the loss and is split into stages of equal bytes.
        """
        filled = min(num_stages, num_microbatches)
        in_flight = (filled * (filled + 1) / 2 + (num_stages - filled) * num_microbatches) / num_stages
        return float(self.state_bytes[-1]) + in_flight * float(self.saved_bytes[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedLayers:
    """Body of a chain: the equal layers that together take the most time."""

    count: int
    seconds: float
    """Seconds of forward and backward of one such layer for a mean microbatch."""
    fixed_bytes: int
    """Bytes of one layer's parameters, gradients, optimizer state, and of the worst microbatch's activations less the mean's."""
    saved_bytes: int
    """Bytes of activations kept for the backward of a mean microbatch by one layer."""
    working_bytes: int


def price_chain(
    pricing: Pricing, chain: ChainSpec, sharding: LayerSharding, loads: Sequence[Loads]
) -> list[PricedChain]:
    """Return the seconds and bytes of a chain's layers, one result for each entry of `loads` (sizes of microbatches)."""
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
    """Return seconds and bytes of a component's layers, one of each group of equal cost, for the part `share` of each microbatch.

    Returns:
        [groups, loads, 3]: seconds of forward, input and weight gradient. [groups, loads, 10]: 1 if a backward runs, else 0; then
        bytes of parameters, trainable parameters, activations (mean, worst microbatch), working memory, output (rank, replica),
        and earlier layers' values that a stage beginning with the layer keeps (mean, worst microbatch).
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
    """Return a chain's body, the equal layers that together take the most time, at the load with the given index.

    `parts` has (number of layers in each group, seconds, sizes) of each component, as from `_component_prices`.
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
