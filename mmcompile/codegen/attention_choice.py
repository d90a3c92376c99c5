"""Attention of a plan in a captured graph: words instead of masks, tokens shared by several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mmcompile.codegen.rewritten_capture import WORDS, with_bitfield_attention
from mmcompile.codegen.token_shards import local_tokens
from mmcompile.config import Attention
from mmcompile.errors import PlanError
from mmcompile.ir.capture import Capture
from mmcompile.ir.graph import ModelGraph
from mmcompile.kernels.process_groups import CONTEXT_GROUP
from mmcompile.passes.context_parallel.context_parallel import ContextParallel
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.masks.bitfield_attention import BitfieldAttention
from mmcompile.passes.pipeline import Pipeline
from mmcompile.planner.plan.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChoice:
    """Attention options of a plan's language model."""

    attention: Attention
    context_parallel: int = 1
    """Ranks that share the tokens of the loss component."""
    head_stride: int = 0
    """Key/value heads exchanged at a time; 0 for all."""

    @classmethod
    def of(cls, plan: Plan) -> AttentionChoice:
        """Return the attention options of a plan."""
        return cls(attention=plan.attention, context_parallel=plan.context_parallel, head_stride=plan.head_stride)


def with_attention(capture: Capture, choice: AttentionChoice) -> Capture:
    """Return the capture from which stages are cut: `with_words`, then `with_shared_tokens`."""
    return with_shared_tokens(with_words(capture, choice), choice)


def with_words(capture: Capture, choice: AttentionChoice, batch: Mapping[str, Any] | None = None) -> Capture:
    """Return the capture with words for masks where chosen, annotated by gradient-flow.

    The given one is left unchanged.

    Args:
        batch: the captured batch, if costs are to count the pairs of tokens that see each other in it.

    Raises:
        MaskError: words cannot express the mask of `batch`.
    """
    if choice.attention == "model":
        return capture
    found = with_bitfield_attention(capture, BitfieldAttention(), batch)
    Pipeline(passes=(GradientFlow(),)).run(found.graph)
    return found


def with_shared_tokens(capture: Capture, choice: AttentionChoice) -> Capture:
    """Return a capture with words, its tokens shared over ranks if chosen, annotated by gradient-flow.

    Raises:
        PlanError: tokens cannot be shared, since no attention of the language model could be put into words, or a layer
            mixes tokens in another way.
    """
    if choice.context_parallel == 1:
        return capture
    shared = ContextParallel(
        component=capture.graph.loss_component,
        num_ranks=choice.context_parallel,
        local_tokens=local_tokens(_length(capture.graph), choice.context_parallel),
        head_stride=choice.head_stride,
        group=CONTEXT_GROUP,
    )
    graph = Pipeline(passes=(shared, GradientFlow())).run(capture.graph).graph
    return replace(capture, graph=graph)


def _length(graph: ModelGraph) -> int:
    """Return the tokens of a sample, as captured."""
    for node in graph.module.graph.nodes:
        if node.op == "placeholder" and node.target == WORDS:
            return int(node.meta["val"].shape[1])
    raise PlanError(
        f"{graph.name} cannot share its tokens over ranks: no attention of its language model was put into words "
        f"({'; '.join(graph.rewrites) or 'it has none'}); plan it without context_parallel"
    )
