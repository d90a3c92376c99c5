"""`plan_resilience`: templates for the layout that a search has chosen, and the bytes to copy for each layer.

`layer_table` prices the layers of the layout for each number of devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from mmcompile.errors import PlanError
from mmcompile.ir.graph import ModelGraph
from mmcompile.planner.pricing.chains import ChainSet, ChainSpec
from mmcompile.planner.pricing.priced_chain import OPTIMIZER_STATES
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.planner.resilience.template import Template
from mmcompile.planner.search.candidate import Candidate
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Degrees, Setting
from mmcompile.planner.search.splitter import Splitter
from mmcompile.planner.templates.generate import generate
from mmcompile.planner.templates.layer_table import ChainLayers, LayerTable, SharedLayers

_STEP_BYTES = 4
"""Bytes of AdamW's step count, one float32 for each parameter tensor (torch.optim.AdamW)."""


def plan_resilience(problem: Problem, candidate: Candidate, fault_tolerance: int) -> Resilience:
    """Return templates for every number of nodes that failures may leave.

    A template is a pipeline that runs one replica of the model on the devices of its nodes, with the chains, samples per
    microbatch and recomputation of `candidate`.

    Args:
        candidate: layout of the whole cluster.
        fault_tolerance: number of nodes that may fail at once, 0 or more.

    Raises:
        PlanError: `fault_tolerance` + 1 replicas do not fit the cluster, or a step has too few microbatches for them; the layout
            copies layers to several stages, shares tokens between ranks, or has a chain that feeds several others.
    """
    setting, chains = candidate.setting, candidate.chains
    num_microbatches = setting.num_microbatches * candidate.degrees[-1].dp
    _check(problem, candidate, fault_tolerance, num_microbatches)
    try:
        templates = _templates(problem, chains, setting, fault_tolerance)
    except PlanError as error:
        raise PlanError(f"{error}{_other_placement(problem, chains, setting, fault_tolerance)}") from None
    return Resilience(
        fault_tolerance=fault_tolerance,
        templates=tuple(templates.values()),
        num_nodes=problem.cluster.num_nodes,
        devices_per_node=problem.cluster.devices_per_node,
        num_microbatches=num_microbatches,
        layer_bytes={chain.name: _layer_bytes(problem.graph, chain) for chain in chains.chains},
        microbatch_samples=float(setting.samples),
    )


def _layer_bytes(graph: ModelGraph, chain: ChainSpec) -> tuple[int, ...]:
    """Return for each layer of a chain the bytes to copy to a new node: trainable parameters and their AdamW state.

    Gradients are computed anew, and every node has the frozen parameters. A parameter that several layers use (tied embeddings)
    counts in each: a node that runs one of these layers holds its own copy with optimizer state.
    """
    specs = {name: spec for spec in graph.parameters for name in (spec.name, *spec.aliases)}
    found = []
    for layer in chain.layers:
        names = graph.component(layer.component).layers[layer.index].parameters
        own = {specs[name].name: specs[name] for name in names if specs[name].trainable}
        found.append(sum((1 + OPTIMIZER_STATES) * spec.num_bytes + _STEP_BYTES for spec in own.values()))
    return tuple(found)


def notes_of(resilience: Resilience, candidate: Candidate, *, constrained: bool) -> Iterator[str]:
    """Yield notes on the templates for the reader of a plan; `constrained` if stage counts or constraints were requested."""
    yield from (f"templates: {problem}" for problem in resilience.problems)
    other = [
        *([candidate.setting.schedule] if candidate.setting.schedule != "1f1b" else []),
        *(["shared tokens"] if candidate.degrees[-1].cp > 1 else []),
        *(["parameters shared between replicas"] if any(degrees.fsdp for degrees in candidate.degrees) else []),
    ]
    if other:
        yield (
            f"templates run 1f1b, their stages whole or with tensors shared inside a node; the layout above has "
            f"{' and '.join(other)}"
        )
    if constrained:
        yield "templates have stages of their own: constraints and numbers of stages hold for the layout above"


def layer_table(problem: Problem, chains: ChainSet, setting: Setting) -> LayerTable:
    """Return the costs of the layers of chains on each number of devices of a node, by tensor parallelism within the node.

    Args:
        chains: chains, each of which feeds one other chain, except the last.
        setting: samples of a microbatch and recomputation; the schedule is taken to be 1F1B.

    Raises:
        PlanError: a chain feeds several others, or no degree of tensor parallelism fits a node.
    """
    cluster = problem.cluster
    counts = [tp for tp in problem.space.tp if tp <= cluster.devices_per_node]
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


def _templates(problem: Problem, chains: ChainSet, setting: Setting, fault_tolerance: int) -> dict[int, Template]:
    return generate(layer_table(problem, chains, setting), problem.cluster.num_nodes, fault_tolerance)


def _check(problem: Problem, candidate: Candidate, fault_tolerance: int, num_microbatches: int) -> None:
    layers = [(layer.component, layer.index) for chain in candidate.chains.chains for layer in chain.layers]
    if len(set(layers)) < len(layers):
        raise PlanError(
            "no templates: this layout runs a layer in several stages at once, and a template has each layer once; plan "
            "without fault_tolerance, or with another strategy"
        )
    if problem.pricing.given_cp > 1:
        raise PlanError(
            f"no templates: their stages do not share tokens, and context_parallel is {problem.pricing.given_cp}; plan with "
            "context_parallel=1, or without fault_tolerance"
        )
    pipelines = fault_tolerance + 1
    if num_microbatches < pipelines:
        raise PlanError(
            f"a fault tolerance of {fault_tolerance} needs {pipelines} pipelines with at least one microbatch each, and a step "
            f"has {num_microbatches}; use {pipelines} microbatches or more, or a fault tolerance of {num_microbatches - 1}"
        )


def _other_placement(problem: Problem, chains: ChainSet, setting: Setting, fault_tolerance: int) -> str:
    """Return the end of an error message: another placement of projectors for which templates exist; "" if none."""
    for other in problem.sets:
        if other.placement is None or other is chains or other.colocated:
            continue
        try:
            _templates(problem, other, setting, fault_tolerance)
        except PlanError:
            continue
        return f"; projector {other.placement!r} instead of {chains.placement!r} has templates"
    return ""
