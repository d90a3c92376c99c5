"""`layer_table`: the costs of a planning problem as template planning reads them, priced for each number of devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mmcompile.errors import PlanError
from mmcompile.planner.pricing.chains import ChainSet, ChainSpec
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Degrees, Setting
from mmcompile.planner.search.splitter import Splitter
from mmcompile.planner.templates.layer_table import ChainLayers, LayerTable, SharedLayers


def layer_table(
    problem: Problem, chains: ChainSet, setting: Setting, *, devices: Sequence[int] | None = None
) -> LayerTable:
    """Price the layers of chains, with tensor parallelism inside a node.

    Args:
        chains: each feeds one other chain, or none if it ends in the loss.
        setting: samples of a microbatch, and what the backward computes again; 1F1B is taken for the schedule.
        devices: that one stage may have; by default the degrees of tensor parallelism that the search may choose, up to a
            node.

    Raises:
        PlanError: a chain feeds several others, or no `devices` fit a node.
    """
    cluster = problem.cluster
    counts = devices if devices is not None else [tp for tp in problem.space.tp if tp <= cluster.devices_per_node]
    if not counts:
        least = min(problem.space.tp)
        raise PlanError(
            f"no templates: stages share tensors inside a node, tensor_parallel is {least} and a node has "
            f"{cluster.devices_per_node} devices; plan with tensor_parallel={cluster.devices_per_node} or less"
        )
    splitter = Splitter(problem=problem)
    return LayerTable(
        chains=tuple(_chain(splitter, chains, index, setting, sorted(counts)) for index in range(len(chains.chains))),
        devices_per_node=cluster.devices_per_node,
        memory_bytes=problem.memory_bytes(cluster.num_devices),
    )


def _chain(splitter: Splitter, chains: ChainSet, index: int, setting: Setting, counts: Sequence[int]) -> ChainLayers:
    spec = chains.chains[index]
    entries: dict[int, int] = {}
    for edge in chains.edges:
        if edge.source == index != edge.target:
            entries[edge.target] = min(edge.target_layer, entries.get(edge.target, edge.target_layer))
    if len(entries) > 1:
        names = " and ".join(chains.chains[target].name for target in sorted(entries))
        raise PlanError(
            f"no templates: chain {spec.name} feeds {names}, and a template's chain feeds one; "
            "plan its projector with it (projector='with_encoder')"
        )
    return ChainLayers(
        name=spec.name,
        shared=tuple(_shared(splitter, spec, setting, count) for count in counts),
        feeds=next((chains.chains[target].name for target in entries), None),
        entry=next(iter(entries.values()), 0),
    )


def _shared(splitter: Splitter, chain: ChainSpec, setting: Setting, devices: int) -> SharedLayers:
    degrees = Degrees(tp=devices, dp=setting.dp)
    priced = splitter.problem.prices.priced(chain, degrees, setting)
    layers = splitter.layers(priced, degrees)
    working = priced.working_bytes.tolist()
    # Activations computed again are alive one layer at a time: most layers' are set aside once, the rest of a larger one
    # counts with its layer.
    usual = Counter(working).most_common(1)[0][0]
    return SharedLayers(
        devices=devices,
        forward_s=tuple(np.diff(priced.forward_s).tolist()),
        backward_s=tuple(np.diff(priced.input_grad_s + priced.weight_grad_s).tolist()),
        parameter_bytes=tuple(
            layer.fixed_bytes + max(0, own - usual) for layer, own in zip(layers, working, strict=True)
        ),
        activation_bytes=tuple(layer.saved_bytes for layer in layers),
        send_s=tuple(layer.send_s for layer in layers),
        return_s=tuple(layer.return_s for layer in layers),
        working_bytes=usual,
    )
