"""Passes run over a `Capture`: a graph with the host program that prepares its inputs.

A rewrite can add nodes for the words of attention masks, which the host computes from each batch. They move to the
host program (`mmcompile.ir.host_shapes`), and the graph gets an input for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import sympy
import torch
from torch import fx

from mmcompile.ir.capture import Capture
from mmcompile.ir.graph import ModelGraph
from mmcompile.ir.host_shapes import hoist
from mmcompile.ir.nodes import attention_words
from mmcompile.ir.sizes import Sizes, spec_of
from mmcompile.passes.base import Analysis, AnyPass, Fact, Rewrite
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline, PipelineResult

ResultT = TypeVar("ResultT")
WORDS = "attention_words"
"""Name of the graph input with a mask as one int64 word a token; further masks are `attention_words_1` and so on."""
GRADIENTS = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)
"""Facts that hold of a capture's graph after `annotated`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureResult:
    """Result of `run_on_capture`: the capture after the last pass, with the analyses' results."""

    capture: Capture
    result: PipelineResult = field(repr=False)
    made: tuple[tuple[Rewrite, ModelGraph, ModelGraph], ...] = field(repr=False)
    """Rewrites in the order in which they ran: (rewrite, the graph before it, the graph that it made)."""

    def of(self, analysis: Analysis[ResultT]) -> ResultT:
        """Return the result of `analysis`. Raises KeyError if it was not among the passes."""
        return self.result.of(analysis)


def annotated(capture: Capture) -> Capture:
    """Return a new capture annotated by gradient-flow, the pass that runs first on every capture."""
    Pipeline(passes=(GradientFlow(),)).run(capture.graph)
    return capture


def run_on_capture(
    capture: Capture, passes: Iterable[AnyPass], batch: Mapping[str, Any] | None = None
) -> CaptureResult:
    """Run passes over a capture; gradient-flow runs again after each rewrite, because the rewritten graph is not annotated.

    Args:
        capture: annotated by gradient-flow; left as it is.
        passes: in the order in which they run.
        batch: the captured batch. If given, the graph has the words of its masks, and costs count only the pairs of
            tokens that see each other; if None, costs count all pairs.

    Raises:
        ConfigError: a pass requires a fact that no earlier pass ensures.
        VerifyError: a rewrite broke a rule of graphs.
        MaskError: words cannot express the mask of `batch`.
    """
    current = capture
    made: list[tuple[Rewrite, ModelGraph, ModelGraph]] = []

    def finish(rewrite: Rewrite, graph: ModelGraph) -> ModelGraph:
        nonlocal current
        before, current = current.graph, with_hoisted_words(replace(current, graph=graph), batch)
        made.append((rewrite, before, current.graph))
        return current.graph

    pipeline = Pipeline(passes=tuple(_with_gradients(passes)), given=GRADIENTS)
    result = pipeline.run(capture.graph, finish)
    return CaptureResult(capture=current, result=result, made=tuple(made))


def _with_gradients(passes: Iterable[AnyPass]) -> Iterable[AnyPass]:
    for pass_ in passes:
        yield pass_
        if isinstance(pass_, Rewrite):
            yield GradientFlow()


def with_hoisted_words(capture: Capture, batch: Mapping[str, Any] | None = None) -> Capture:
    """Return the capture with its `attention_words` nodes moved to the host program; its module is changed in place."""
    graph = capture.graph
    words = [node for node in graph.module.graph.nodes if node.target is attention_words]
    if not words:
        return capture
    values = {f"{WORDS}_{index}" if index else WORDS: node for index, node in enumerate(words)}
    sizes = _with_new_sizes(capture.sizes, graph.module.graph)
    host = hoist(graph.module, capture.host, values)
    inputs = [n for n in graph.module.graph.nodes if n.op == "placeholder" and "size" not in n.meta]
    found = replace(capture, graph=replace(graph, inputs=tuple(map(spec_of, inputs))), host=host, sizes=sizes)
    if batch is not None:
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        known = found.host.run({**tensors, **sizes.size_inputs(sizes.bind(tensors) or {})}).values
        for node in inputs:
            if str(node.target) in values:
                node.meta["val"] = known[str(node.target)]
    return found


def _with_new_sizes(sizes: Sizes, graph: fx.Graph) -> Sizes:
    varying = [size for shape in sizes.inputs.values() for size in shape if not isinstance(size, int)]
    symbols: dict[str, Any] = {str(symbol): symbol for size in varying for symbol in size.free_symbols}
    added = {
        str(node.target): sympy.parse_expr(node.meta["size"], local_dict=symbols)
        for node in graph.nodes
        if node.op == "placeholder" and "size" in node.meta and str(node.target) not in sizes.values
    }
    return replace(sizes, values={**sizes.values, **added})
