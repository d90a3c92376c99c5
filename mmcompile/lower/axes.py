"""A captured graph as the stages of a plan run it: half precision, attention by words, shared tokens, tensors and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmcompile.ir.capture import Capture
from mmcompile.lower.attention import AttentionChoice, with_attention
from mmcompile.passes.autocast import Autocast
from mmcompile.passes.base import Fact, Rewrite
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.passes.sharded_parameters import ShardedParameters
from mmcompile.passes.tensor_parallel import TensorParallel
from mmcompile.plan.plan import Plan


def with_axes(capture: Capture, plan: Plan) -> Capture:
    """The capture with everything that a plan says of how to compute it, annotated by gradient-flow.

    Raises:
        ConfigError: autocast has no effect.
        PlanError: tokens cannot be shared; or no tensor of a chain can, by as many ranks as the plan says; or no parameter by its
            replicas.
    """
    capture = with_attention(with_autocast(capture, plan.autocast), AttentionChoice.of(plan))
    # A batch without images has no vision tower.
    present = {component.name for component in capture.graph.components}
    shared = [chain for chain in plan.chains if chain.tp > 1]
    degrees = tuple((name, chain.tp) for chain in shared for name in chain.components if name in present)
    capture = _rewritten(capture, TensorParallel(degrees=degrees)) if degrees else capture
    replicas = tuple(
        (name, chain.dp) for chain in plan.chains if chain.fsdp for name in chain.components if name in present
    )
    return _rewritten(capture, ShardedParameters(degrees=replicas)) if replicas else capture


def with_autocast(capture: Capture, components: Sequence[str]) -> Capture:
    """The capture with products of some components in bfloat16; as it is, if there are none."""
    return _rewritten(capture, Autocast(components=tuple(components))) if components else capture


def _rewritten(capture: Capture, rewrite: Rewrite) -> Capture:
    facts = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)
    graph = Pipeline(passes=(rewrite, GradientFlow()), given=facts).run(capture.graph).graph
    return replace(capture, graph=graph)
