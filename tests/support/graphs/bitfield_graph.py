"""Captured graphs whose language model attends under mask words, made without recognising any mask: the test says the words."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from mmcompile.ir.copy import copied
from mmcompile.ir.graph import META_KEY, ModelGraph, NodeInfo, info
from mmcompile.ir.sizes import shape_of
from mmcompile.ir.tensor_spec import TensorSpec
from mmcompile.kernels.bitfield_attention.masks.words import pack
from mmcompile.kernels.bitfield_attention.ops import bitfield_attention_op as bitfield_attention_op
from mmcompile.passes.values import op_name

WORDS = "attention_words"
aten = torch.ops.aten


def causal_words(batch: Mapping[str, Any], *, documents: int = 1, image: int | None = None) -> Tensor:
    """Words [B, T]: `documents` packed one behind the other, padding where the mask is 0, images an island each."""
    ids = batch["input_ids"]
    seen = batch.get("attention_mask", torch.ones_like(ids)) != 0
    rows, tokens = ids.shape
    document = (torch.arange(tokens) * documents // tokens + 1).expand(rows, -1)
    inside = ids == image if image is not None else torch.zeros_like(seen)
    island = (inside & ~torch.cat([torch.zeros_like(inside[:, :1]), inside[:, :-1]], 1)).cumsum(1) * inside
    return pack(
        causal=torch.ones_like(seen),
        document=document * seen,
        instance=island,
        modalities=torch.ones_like(ids),
    )


def with_words(graph: ModelGraph, windows: Mapping[int, int] | None = None) -> ModelGraph:
    """Self-attention of the language model becomes bitfield attention; `windows` maps a layer to its causal reach."""
    made = widened(graph)
    found = [node for node in made.module.graph.nodes if _is_self_attention(node)]
    words = _add_words(made, found[0].args[0])
    positions = _add_positions(made, words)
    for node in found:
        query, key, value = node.args[:3]
        scale = node.kwargs.get("scale") or query.meta["val"].shape[-1] ** -0.5
        window = (windows or {}).get(info(node).layer)
        arguments = (query, key, value, words, positions, words, positions, scale, window, "eager")
        with made.module.graph.inserting_before(node):
            call = made.module.graph.call_function(torch.ops.mmcompile.bitfield_attention.default, arguments)
            out = made.module.graph.call_function(operator.getitem, (call, 0))
        call.meta = {**node.meta, "val": (node.meta["val"], node.meta["val"][..., 0])}
        out.meta = dict(node.meta)
        node.replace_all_uses_with(out)
        made.module.graph.erase_node(node)
    made.module.recompile()
    spec = TensorSpec(name=WORDS, shape=shape_of(words), dtype="int64")
    return replace(made, inputs=(*made.inputs, spec))


def widened(graph: ModelGraph) -> ModelGraph:
    """Norms of float64 models compute in float32, which would hide small errors; here they do not."""
    made = copied(graph)
    for node in made.module.graph.nodes:
        if op_name(node) == "aten.to" and not info(node).shared and node.args[0].meta["val"].dtype == torch.float64:
            node.args = tuple(torch.float64 if value is torch.float32 else value for value in node.args)
    made.module.recompile()
    return made


def _is_self_attention(node: fx.Node) -> bool:
    if op_name(node) != "aten.scaled_dot_product_attention" or info(node).component != "language_model":
        return False
    query, key, *_ = node.args
    return query.meta["val"].shape[2] == key.meta["val"].shape[2]  # type: ignore[union-attr]


def _add_words(graph: ModelGraph, query: Any) -> fx.Node:
    last = [node for node in graph.module.graph.nodes if node.op == "placeholder"][-1]
    with graph.module.graph.inserting_after(last):
        words = graph.module.graph.placeholder(WORDS)
    batch, _, tokens, _ = query.meta["val"].shape
    words.meta = {"val": torch.empty(batch, tokens, dtype=torch.int64, device="meta")}
    words.meta |= {"roots": frozenset(("input_ids",)), "from_integers": True}
    if "symbolic_shape" in query.meta:
        words.meta["symbolic_shape"] = (query.meta["symbolic_shape"][0], query.meta["symbolic_shape"][2])
    return words


def _add_positions(graph: ModelGraph, words: fx.Node) -> fx.Node:
    """0, 1, 2, ... in every row."""
    node, note = words, NodeInfo(component=None, layer=0, module_path="")
    for target, arguments in ((aten.ones_like.default, ()), (aten.cumsum.default, (1,)), (aten.sub.Scalar, (1,))):
        with graph.module.graph.inserting_after(node):
            node = graph.module.graph.call_function(target, (node, *arguments))
        node.meta = {**words.meta, META_KEY: note, "module_path": ""}
    return node
