"""The passes of stages: from a captured graph to the graph that the ranks of a plan run.

Their order, with the reason of each place: `mmcompile.passes.catalog.STAGES`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmcompile.codegen.source import LayerChoices, layer_names
from mmcompile.codegen.token_shards import first_shard
from mmcompile.errors import PlanError
from mmcompile.ir.capture import Capture
from mmcompile.ir.graph import ModelGraph
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.passes.base import AnyPass
from mmcompile.passes.capture_pipeline import GRADIENTS, run_on_capture
from mmcompile.passes.catalog import STAGES, in_order
from mmcompile.passes.cost.deferred_weights import DeferredWeights
from mmcompile.passes.cost.recompute import Recomputed
from mmcompile.passes.pipeline import Pipeline
from mmcompile.passes.tensor_parallel.sharded_parameters import ShardedParameters
from mmcompile.passes.tensor_parallel.tensor_parallel import TensorParallel
from mmcompile.passes.tensor_parallel.validation.layer_check import check_shards
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.planning_passes import context_parallel, graph_passes


def passes_for(
    plan: Plan, graph: ModelGraph, own: Sequence[AnyPass] = (), shards: Mapping[str, TensorShard] | None = None
) -> tuple[AnyPass, ...]:
    """Return the passes of `STAGES` that a plan needs, in order; gradient-flow has run at capture.

    Args:
        plan: plan that decides which passes run, and their options.
        graph: captured graph; it lacks the vision encoder if the batch has no images.
        own: passes of the user.
        shards: shardings in the first capture of the model (`ModelGraph.shards`); None where this is the first.
    """
    names = {component.name for component in graph.components}
    present = [(chain, name) for chain in plan.chains for name in chain.components if name in names]
    tensors = tuple((name, chain.tp) for chain, name in present if chain.tp > 1)
    replicas = tuple((name, chain.dp) for chain, name in present if chain.fsdp)
    tokens = plan.context_parallel
    passes: dict[str, tuple[AnyPass, ...]] = {
        **graph_passes(plan.attention, plan.autocast, own),
        "context-parallel": (context_parallel(graph, tokens, plan.head_stride),) if tokens > 1 else (),
        "tensor-parallel": (TensorParallel(degrees=tensors, tables=tuple(shards or ())),) if tensors else (),
        "sharded-parameters": (ShardedParameters(degrees=replicas),) if replicas else (),
    }
    return in_order(STAGES, passes)


def with_stage_passes(
    capture: Capture,
    plan: Plan,
    batch: Mapping[str, Any] | None = None,
    *,
    validated: set[str] | None = None,
    own: Sequence[AnyPass] = (),
    shards: Mapping[str, TensorShard] | None = None,
) -> Capture:
    """Return the capture that the ranks of a plan run: all passes of `passes_for` applied, gradient flow annotated.

    Args:
        capture: capture annotated by gradient-flow; not changed.
        plan: plan that the ranks run.
        batch: the captured batch. Given, each kind of tensor-parallel layer is checked against the whole layer
            (`mmcompile.passes.tensor_parallel.validation.layer_check`), and `ModelGraph.rewrites` lists the kinds not checked.
        validated: kinds of layers that need no check; those that pass it are added, for later captures of the model.
        own: passes of the user.
        shards: shardings in the first capture of the model (`ModelGraph.shards`), which hold for all later ones; None for the
            first.

    Raises:
        ConfigError: autocast has no effect, or a pass of the user requires what none before it ensures.
        PlanError: tokens, a chain's tensors, or its parameters over replicas cannot be sharded as the plan requires, or as in
            the first capture.
        VerifyError: ranks that share tensors compute something else than the whole layer, or a rewrite broke a rule of graphs.
    """
    found = run_on_capture(capture, passes_for(plan, capture.graph, own, shards))
    result = found.capture
    if shards is not None:
        _check_same_shards(result.graph, shards)
    for rewrite, whole, sharded in found.made:
        if batch is not None and isinstance(rewrite, TensorParallel):
            lines = _check_shards(result, whole, sharded, batch, plan.context_parallel, validated)
            result = replace(result, graph=replace(result.graph, rewrites=(*result.graph.rewrites, *lines)))
    return result


def layer_choices(graph: ModelGraph, plan: Plan) -> LayerChoices:
    """Run the last analyses of `STAGES`; return names, recomputation and deferred weight gradients of layers, for codegen."""
    recomputed, deferred = Recomputed(modes=plan.modes), DeferredWeights()
    analyses = (recomputed, deferred) if plan.schedule == "zb-h1" else (recomputed,)
    found = Pipeline(passes=analyses, given=GRADIENTS, verify=False).run(graph)
    return LayerChoices(
        names=layer_names(graph),
        recompute=found.of(recomputed),
        deferred=found.of(deferred) if deferred in analyses else {},
    )


def _check_same_shards(graph: ModelGraph, shards: Mapping[str, TensorShard]) -> None:
    """Raise PlanError if a parameter that a graph reads is sharded otherwise than in `shards`: ranks would have two of it."""
    read = {graph.specs[str(n.target)].name for n in graph.module.graph.nodes if n.target in graph.specs}
    for name in sorted(read):
        if graph.shards.get(name) != shards.get(name):
            first, this = _described(shards.get(name)), _described(graph.shards.get(name))
            raise PlanError(
                f"the first capture of the model has {name} {first}, this one {this}, and all captures share its "
                "parameters; plan with tensor_parallel=1, and please report the model and the batch"
            )


def _described(shard: TensorShard | None) -> str:
    return "whole" if shard is None else f"sharded over {shard.count} ranks in dim {shard.dim} (blocks {shard.blocks})"


def _check_shards(
    capture: Capture,
    whole: ModelGraph,
    sharded: ModelGraph,
    batch: Mapping[str, Any],
    context_parallel: int,
    validated: set[str] | None,
) -> tuple[str, ...]:
    """Compare one layer of each kind in the sharded graph with the same layer in the `whole` graph, on random values.

    Return one line for each kind of layer that was not checked.
    """
    validated = set() if validated is None else validated
    values = capture.values(batch)
    if context_parallel > 1:
        values |= first_shard(whole, values, context_parallel)
    found = check_shards(whole, sharded, values, validated)
    validated |= found.validated
    lines = tuple(f"{TensorParallel.name}: {line}" for line in found.unchecked)
    for line in lines:
        warnings.warn(line, stacklevel=3)
    return lines
