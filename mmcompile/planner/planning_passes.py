"""The passes of planning: from a captured graph to the costs of its layers.

Their order, with the reason of each place: `mmcompile.passes.catalog.PLANNING`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmcompile.config import Attention
from mmcompile.ir.capture import Capture
from mmcompile.ir.graph import ModelGraph
from mmcompile.kernels.process_groups import CONTEXT_GROUP
from mmcompile.passes.autocast import Autocast
from mmcompile.passes.base import AnyPass
from mmcompile.passes.capture_pipeline import run_on_capture
from mmcompile.passes.catalog import OWN, PLANNING, in_order
from mmcompile.passes.context_parallel.context_parallel import ContextParallel
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.passes.masks.bitfield_attention import BitfieldAttention
from mmcompile.passes.modality_dag import ModalityDag

_COST = Cost()


def graph_passes(
    attention: Attention, autocast: Sequence[str], own: Sequence[AnyPass]
) -> dict[str, tuple[AnyPass, ...]]:
    """Return pass name -> passes to run on the graph before it is sharded, in planning and for stage programs; () for none.

    Args:
        attention: kind of attention of the language model.
        autocast: components that compute in bfloat16.
        own: passes of the user.
    """
    return {
        "autocast": (Autocast(components=tuple(autocast)),) if autocast else (),
        "bitfield-attention": (BitfieldAttention(),) if attention == "bitfield" else (),
        OWN: tuple(own),
    }


def _planning_passes(attention: Attention, autocast: Sequence[str], own: Sequence[AnyPass] = ()) -> tuple[AnyPass, ...]:
    passes = graph_passes(attention, autocast, own)
    # Without gradient-flow, which runs at capture.
    return in_order(PLANNING, {**passes, "modality-dag": (ModalityDag(),), "cost": (_COST,)})


def run_planning_passes(
    capture: Capture,
    batch: Mapping[str, Any],
    *,
    attention: Attention,
    autocast: Sequence[str],
    own: Sequence[AnyPass] = (),
) -> tuple[Capture, CostTable]:
    """Return the capture after the passes, as one device would compute it, and the costs of its layers.

    Args:
        capture: capture annotated by the pass gradient-flow; it is not changed.
        batch: batch of the capture; costs of attention count its pairs of tokens that see each other.
        attention, autocast, own: as for `graph_passes`.

    Raises:
        ConfigError: autocast has no effect, or a pass of the user requires a property that no pass before it ensures.
        MaskError: mask words (one int64 a token) cannot express the mask of `batch`.
        VerifyError: a pass of the user broke a rule of graphs.
    """
    found = run_on_capture(capture, _planning_passes(attention, autocast, own), batch)
    return found.capture, found.of(_COST)


def context_parallel(graph: ModelGraph, num_ranks: int, head_stride: int) -> ContextParallel:
    """Return the pass that splits the tokens of the component that ends in the loss.

    Args:
        num_ranks: ranks that share the tokens, 2 or more.
        head_stride: number of key/value heads that ranks gather at a time; 0 for all.
    """
    return ContextParallel(
        component=graph.loss_component, num_ranks=num_ranks, head_stride=head_stride, group=CONTEXT_GROUP
    )


def with_context_parallel(capture: Capture, num_ranks: int, head_stride: int) -> Capture:
    """Return a capture with the tokens of its language model split over ranks, annotated with the nodes that gradients pass.

    Args:
        capture: capture after the pass `bitfield-attention`, whose masks are words: one int64 a token, from which the visibility
            of every pair of tokens follows.
        num_ranks: ranks that share the tokens; 1 leaves the capture as it is.
        head_stride: number of key/value heads that ranks gather at a time; 0 for all.

    Raises:
        PlanError: the language model has no attention with such words, or a layer mixes tokens in another way.
    """
    if num_ranks == 1:
        return capture
    return run_on_capture(capture, (context_parallel(capture.graph, num_ranks, head_stride),)).capture
