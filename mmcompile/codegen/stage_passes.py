"""A captured graph in the form in which the stages of a plan run it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mmcompile.codegen.attention_choice import AttentionChoice, with_attention
from mmcompile.codegen.token_shards import first_shard
from mmcompile.ir.capture import Capture
from mmcompile.ir.graph import ModelGraph
from mmcompile.passes.autocast import Autocast
from mmcompile.passes.base import Fact, Rewrite
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.passes.tensor_parallel.sharded_parameters import ShardedParameters
from mmcompile.passes.tensor_parallel.tensor_parallel import TensorParallel
from mmcompile.passes.tensor_parallel.validation.layer_check import check_shards
from mmcompile.planner.plan.plan import Plan


@dataclass(kw_only=True, slots=True)
class ShardsRight:
    """Layers verified in the sharded graphs of one model, so that graphs for other batches need no second check."""

    kinds: set[str] = field(default_factory=set)
    """Verified kinds of layers."""


def with_axes(
    capture: Capture, plan: Plan, batch: Mapping[str, Any] | None = None, right: ShardsRight | None = None
) -> Capture:
    """Return the capture with all rewrites of a plan, annotated by gradient-flow.

    Args:
        batch: the captured batch, for a graph that will train: then ranks that share tensors are checked against whole
            layers (`mmcompile.passes.tensor_parallel.validation.layer_check`), and a warning names the layers that are
            too large for that.
        right: layers that need no check; verified ones are added.

    Raises:
        ConfigError: autocast has no effect.
        PlanError: tokens cannot be shared; or no tensor of a chain can, by as many ranks as the plan has; or no
            parameter by its replicas.
        VerifyError: ranks that share tensors compute something else than the whole layer.
    """
    capture = with_attention(with_autocast(capture, plan.autocast), AttentionChoice.of(plan))
    # A batch without images has no vision tower.
    present = {component.name for component in capture.graph.components}
    shared = [chain for chain in plan.chains if chain.tp > 1]
    degrees = tuple((name, chain.tp) for chain in shared for name in chain.components if name in present)
    if degrees:
        whole, capture = capture, _rewritten(capture, TensorParallel(degrees=degrees))
        if batch is not None:
            capture = replace(capture, graph=_checked(whole, capture.graph, batch, plan.context_parallel, right))
    replicas = tuple(
        (name, chain.dp) for chain in plan.chains if chain.fsdp for name in chain.components if name in present
    )
    return _rewritten(capture, ShardedParameters(degrees=replicas)) if replicas else capture


def with_autocast(capture: Capture, components: Sequence[str]) -> Capture:
    """Return the capture with products of some components in bfloat16; unchanged if there are none."""
    return _rewritten(capture, Autocast(components=tuple(components))) if components else capture


def _checked(
    capture: Capture, sharded: ModelGraph, batch: Mapping[str, Any], context_parallel: int, right: ShardsRight | None
) -> ModelGraph:
    """Return the sharded graph, with a line for each unchecked kind of layer."""
    right = right or ShardsRight()
    given = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    sizes = capture.sizes.size_inputs(capture.sizes.bind(given) or {})
    values = {**given, **sizes, **capture.host.run({**given, **sizes}).values}
    if context_parallel > 1:
        values |= first_shard(capture.graph, values, context_parallel)
    found = check_shards(capture.graph, sharded, values, right.kinds)
    right.kinds |= found.right
    lines = [f"{TensorParallel.name}: {line}" for line in found.unchecked]
    for line in lines:
        warnings.warn(line, stacklevel=3)
    return replace(sharded, rewrites=(*sharded.rewrites, *lines))


def _rewritten(capture: Capture, rewrite: Rewrite) -> Capture:
    facts = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)
    graph = Pipeline(passes=(rewrite, GradientFlow()), given=facts).run(capture.graph).graph
    return replace(capture, graph=graph)
