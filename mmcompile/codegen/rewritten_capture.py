"""A capture with passes applied that move work of the graph to the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from mmcompile.ir.capture import Capture
from mmcompile.ir.copy import copied
from mmcompile.ir.graph import dtype_name
from mmcompile.ir.host_shapes import hoist
from mmcompile.ir.nodes import attention_words
from mmcompile.ir.sizes import Sizes, shape_of
from mmcompile.ir.tensor_spec import TensorSpec
from mmcompile.passes.masks.bitfield_attention import BitfieldAttention
from mmcompile.passes.pipeline import Pipeline

WORDS = "attention_words"
"""Input that holds the words of a mask; further masks are `attention_words_1` and so on."""


def with_bitfield_attention(
    capture: Capture, rewrite: BitfieldAttention, batch: Mapping[str, Any] | None = None
) -> Capture:
    """Return the capture with attention under words that the host makes of each batch; the given one is left unchanged.

    Args:
        rewrite: the pass to run.
        batch: the captured batch. Given, the graph holds its words, and costs count the pairs they show; else all
            pairs.

    Raises:
        MaskError: words cannot express the mask of `batch`.
    """
    graph = copied(Pipeline(passes=(rewrite,)).run(capture.graph).graph)
    made = [node for node in graph.module.graph.nodes if node.target is attention_words]
    values = {f"{WORDS}_{index}" if index else WORDS: node for index, node in enumerate(made)}
    sizes = _with_new_sizes(capture.sizes, graph.module.graph)
    host = hoist(graph.module, capture.host, values) if values else capture.host
    inputs = [n for n in graph.module.graph.nodes if n.op == "placeholder" and "size" not in n.meta]
    specs = tuple(
        TensorSpec(name=str(n.target), shape=shape_of(n), dtype=dtype_name(n.meta["val"].dtype)) for n in inputs
    )
    found = replace(capture, graph=replace(graph, inputs=specs), host=host, sizes=sizes)
    if batch is not None and values:
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        known = found.host.run({**tensors, **sizes.size_inputs(sizes.bind(tensors) or {})}).values
        for node in inputs:
            if str(node.target) in values:
                node.meta["val"] = known[str(node.target)]
    return found


def _with_new_sizes(sizes: Sizes, graph: fx.Graph) -> Sizes:
    """Return sizes with the inputs that a pass added."""
    symbols: dict[str, Any] = {
        str(symbol): symbol
        for shape in sizes.inputs.values()
        for size in shape
        if not isinstance(size, int)
        for symbol in size.free_symbols
    }
    added = {
        str(node.target): sympy.parse_expr(node.meta["size"], local_dict=symbols)
        for node in graph.nodes
        if node.op == "placeholder" and "size" in node.meta and str(node.target) not in sizes.values
    }
    return replace(sizes, values={**sizes.values, **added})
