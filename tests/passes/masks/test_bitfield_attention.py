"""`BitfieldAttention` on captured models: same loss and gradients, words equal to the mask they replace, reasons, costs, text."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.oracles.eager import difference, graph_outcome, holds_for
from support.oracles.flop_oracle import counted_flops, saved_bytes
from torch import nn
from zoo import ALL, Size

from mmcompile.costmodel.compute import LayerCost
from mmcompile.errors import ConfigError, MaskError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.copy import copied
from mmcompile.ir.graph import CaptureMode, ModelGraph
from mmcompile.ir.host_shapes import hoist
from mmcompile.ir.inputs import with_positions
from mmcompile.kernels.bitfield_attention.masks.visible_pairs import visible_pairs
from mmcompile.kernels.bitfield_attention.masks.words import PADDING, visible
from mmcompile.passes.capture_pipeline import run_on_capture, with_hoisted_words
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.masks.bitfield_attention import BitfieldAttention
from mmcompile.passes.pipeline import Pipeline
from mmcompile.passes.text import graph_text
from mmcompile.passes.values import op_name

NAMES = ("llava", "gemma3", "qwen2_5_vl", "paligemma", "mllama")
PASS = BitfieldAttention(impl="eager")
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")


@cache
def captured(name: str, kind: str = "right") -> tuple[nn.Module, dict[str, Any], Capture]:
    """A float64 model, a batch of it, and its capture on that batch.

    Args:
        kind: "right" or "left" padding, "text" for a batch without images, or "symbolic": padded on the right, the sizes of a
            second batch open.
    """
    family = ALL[name]
    if kind == "left":
        model, _, found = captured(name)
        values = family.padded_batch("left", dtype=torch.float64)
        # The last token of padding would predict the first real one: words give it no row of its own.
        values["labels"][-1, :6] = -100
        return model, values, found if holds_for(model, found, values) else capture(model, values)
    model = family.build(torch.float64)
    text = kind == "text"
    values = family.text_only_batch(torch.float64) if text else family.padded_batch("right", dtype=torch.float64)
    second = family.second_batch(torch.float64) if kind == "symbolic" else None
    return model, values, capture(model, values, dynamic=second)


def rewritten(found: Capture) -> Capture:
    return with_hoisted_words(replace(found, graph=Pipeline(passes=(PASS,)).run(found.graph).graph))


def attention_of(graph: ModelGraph, component: str = "language_model") -> list[torch.fx.Node]:
    return [
        node
        for node in graph.module.graph.nodes
        if node.op == "call_function"
        and op_name(node) in ("aten.scaled_dot_product_attention", "mmcompile.bitfield_attention")
        and node.meta["mmcompile"].component == component
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in NAMES for kind in ("right", "left")),
        ("llava", "symbolic"),
        pytest.param("gemma3", "symbolic", marks=pytest.mark.slow),
    ],
)
def test_loss_and_all_gradients_stay(name: str, kind: str) -> None:
    model, values, found = captured(name, kind)
    made = rewritten(found)
    left = [node for node in attention_of(made.graph) if op_name(node) != "mmcompile.bitfield_attention"]
    assert len(left) == (2 if name == "mllama" else 0)
    agreement = difference(graph_outcome(model, made, values), graph_outcome(model, found, values))
    assert agreement.within(1e-11), agreement


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_batches_without_images(name: str) -> None:
    model, values, found = captured(name, "text")
    made = rewritten(found)
    assert {op_name(node) for node in attention_of(made.graph)} == {"mmcompile.bitfield_attention"}
    agreement = difference(graph_outcome(model, made, values), graph_outcome(model, found, values))
    assert agreement.within(1e-11), agreement


def test_a_symbolic_capture_runs_other_sizes() -> None:
    """Length and number of samples are free: words follow both."""
    family = ALL["text_chain"]
    model, _, found = captured("text_chain", "symbolic")
    assert found.graph.mode is CaptureMode.SYMBOLIC
    made = rewritten(found)
    for size in (Size(samples=3, length=41), Size(samples=5, length=20)):
        other = family.draw(size, seed=7, dtype=torch.float64)
        other["attention_mask"][-1, -4:] = 0
        other["labels"][-1, -4:] = -100
        assert holds_for(model, made, other)
        agreement = difference(graph_outcome(model, made, other), graph_outcome(model, found, other))
        assert agreement.within(1e-11), agreement


def test_a_pattern_holds_for_other_values_of_the_same_sizes() -> None:
    """The host program computes words of a batch it was not captured on: other padding, images elsewhere."""
    family = ALL["gemma3"]
    model, _, found = captured("gemma3")
    made = rewritten(found)
    for seed in (11, 12):
        other = family.draw(family.first, seed=seed, dtype=torch.float64)
        other["attention_mask"][0, -7:] = 0
        other["labels"][0, -7:] = -100
        assert holds_for(model, made, other)
        agreement = difference(graph_outcome(model, made, other), graph_outcome(model, found, other))
        assert agreement.within(1e-11), agreement


def masks_of(found: Capture, batch: dict[str, Any], model: nn.Module) -> list[torch.Tensor | None]:
    """The dense mask [B, 1, T, T] of every attention of the language model, computed by the captured graph."""
    graph = copied(found.graph)
    masks = [node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask") for node in attention_of(graph)]
    names = {f"mask_{index}": mask for index, mask in enumerate(dict.fromkeys(m for m in masks if m is not None))}
    host = hoist(graph.module, found.host, names)  # type: ignore[arg-type]
    values = host.run(tensors_of(found, batch, model)).values
    name_of = {mask: name for name, mask in names.items()}
    return [None if mask is None else values[name_of[mask]] for mask in masks]


def tensors_of(found: Capture, batch: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    tensors = {n: v for n, v in with_positions(model, batch).items() if isinstance(v, torch.Tensor)}
    return {**tensors, **found.sizes.size_inputs(found.sizes.bind(tensors) or {})}


def assert_words_say_the_mask(found: Capture, model: nn.Module, batch: dict[str, Any]) -> int:
    """Compare on rows of real tokens; returns how many attentions were compared."""
    made = rewritten(found)
    words_of = made.host.run(tensors_of(made, batch, model)).values
    compared = 0
    for call, mask in zip(attention_of(made.graph), masks_of(found, batch, model), strict=True):
        if op_name(call) != "mmcompile.bitfield_attention":
            continue
        words = words_of[str(call.args[3].target)]  # type: ignore[union-attr]
        place = torch.arange(words.shape[1]).expand_as(words)
        seen = visible(words, place, words, place, call.args[8])  # type: ignore[arg-type]
        dense = seen if mask is None else mask.broadcast_to(words.shape[0], 1, *seen.shape[1:])[:, 0]
        dense = dense if dense.dtype == torch.bool else dense == 0
        real = words != PADDING
        assert torch.equal(seen[real], dense[real])
        compared += 1
    return compared


@pytest.mark.parametrize("kind", ["right", "left"])
@pytest.mark.parametrize(
    ("name", "calls"), [("llava", 4), ("gemma3", 6), ("qwen2_5_vl", 4), ("paligemma", 4), ("mllama", 2)]
)
def test_words_show_what_the_mask_showed(name: str, calls: int, kind: str) -> None:
    model, values, found = captured(name, kind)
    assert assert_words_say_the_mask(found, model, values) == calls


def test_text_is_the_same_again_and_a_second_run_changes_nothing() -> None:
    _, _, found = captured("gemma3")
    before = graph_text(found.graph)
    first = Pipeline(passes=(PASS,)).run(found.graph).graph
    assert graph_text(found.graph) == before, "the pass changed what it was given"
    assert graph_text(Pipeline(passes=(PASS,)).run(found.graph).graph) == graph_text(first)
    again = Pipeline(passes=(PASS,)).run(first).graph
    assert graph_text(again) == graph_text(first)
    assert again.rewrites == first.rewrites


def test_golden(golden: Callable[[str, str], None]) -> None:
    """What changes in the text of a graph, and what moves to the host."""
    _, _, found = captured("gemma3")
    after = Pipeline(passes=(PASS,)).run(found.graph).graph
    texts = [graph_text(graph).splitlines() for graph in (found.graph, after, rewritten(found).graph)]
    parts = [
        *after.rewrites,
        *difflib.unified_diff(texts[0], texts[1], "captured", "rewritten", n=1, lineterm=""),
        *difflib.unified_diff(texts[1], texts[2], "rewritten", "hoisted", n=1, lineterm=""),
    ]
    golden("bitfield_attention_gemma3.txt", "\n".join(line.rstrip() for line in parts))


def test_no_mask_is_left_and_repeated_heads_are_not_made() -> None:
    _, _, found = captured("gemma3")
    graph = rewritten(found).graph
    shapes = [
        tuple(value.shape)
        for node in graph.module.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.dtype == torch.bool
    ]
    assert all(shape[-2:] != (48, 48) for shape in shapes)
    for call in attention_of(graph):
        assert [x.meta["val"].shape[1] for x in call.args[:3]] == [4, 2, 2]  # type: ignore[union-attr]
    assert "attention_mask" not in {spec.name for spec in graph.inputs}
    assert "attention_words" in {spec.name for spec in graph.inputs}
    positions = [node for node in graph.module.graph.nodes if "token_positions" in node.name]
    assert len(positions) == 1, "layers of one formula share words and positions"


def test_cross_attention_is_left_with_the_reason() -> None:
    _, _, found = captured("mllama")
    assert rewritten(found).graph.rewrites == (
        "bitfield-attention: language_model layers 1, 3 under words",
        "bitfield-attention: model.language_model.layers.1.cross_attn left as it is: "
        "2 x 24 queries see 2 x 68 keys of something else (cross-attention)",
        "bitfield-attention: model.language_model.layers.3.cross_attn left as it is: "
        "2 x 24 queries see 2 x 68 keys of something else (cross-attention)",
    )


def test_cross_attention_to_as_many_keys_is_seen() -> None:
    """Florence-2's encoder has as many tokens here as its decoder."""
    model, values, found = captured("florence2")
    made = rewritten(found)
    assert sum("made of different values (cross-attention)" in line for line in made.graph.rewrites) == 2
    assert assert_words_say_the_mask(found, model, values) == 4


def test_an_island_longer_than_a_window_that_cuts_it_is_an_error() -> None:
    model, values, found = captured("gemma3")
    made = rewritten(found)
    longer = {**values, "token_type_ids": values["token_type_ids"].clone()}
    longer["token_type_ids"][0, 4:24] = 1
    with pytest.raises(MaskError, match=r"row 0: an island reaches from token 3 to 23, 21 tokens, .* window of 16"):
        made.host.run(tensors_of(made, longer, model))


def total(graph: ModelGraph) -> LayerCost:
    cost = Cost()
    return Pipeline(passes=(GradientFlow(), cost)).run(graph).of(cost).total()


def test_without_a_batch_costs_count_all_pairs() -> None:
    """As of the attention under a mask; the mask, and what was saved for it, are gone."""
    _, _, found = captured("gemma3")
    got, dense = total(rewritten(found).graph), total(found.graph)
    assert got.forward_flops == dense.forward_flops
    assert got.activation_bytes < dense.activation_bytes


def test_with_a_batch_costs_count_visible_pairs() -> None:
    """As torch counts a real run, forward and backward. In float32: cost knows row statistics in that alone."""
    family = ALL["gemma3"]
    model, values = family.build(), family.padded_batch("right")
    found = capture(model, values)
    made = run_on_capture(found, (PASS,), with_positions(model, values)).capture
    got = total(made.graph)
    inputs = tensors_of(made, values, model)
    inputs |= made.host.run(inputs).values
    arguments = [inputs[str(n.target)] for n in made.graph.module.graph.nodes if n.op == "placeholder"]
    forward, backward = counted_flops(lambda: made.graph.module(*arguments)[0])
    assert (got.forward_flops, got.input_grad_flops + got.weight_grad_flops) == (forward, backward)
    permanent = [*model.parameters(), *model.buffers()]
    saved = saved_bytes(lambda: made.graph.module(*arguments)[0], permanent)
    assert got.activation_bytes == pytest.approx(saved, rel=0.01)
    full, sliding = (visible_pairs(inputs["attention_words"], window=window) for window in (None, 16))
    assert sliding < full < 2 * 48 * 48


def test_options() -> None:
    _, _, found = captured("llava")
    with pytest.raises(
        ConfigError, match="no component 'text' whose attention could be rewritten; components are vision"
    ):
        BitfieldAttention(components=("text",)).run(found.graph)
    with pytest.raises(
        ConfigError, match="impl='flash' is no implementation of bitfield attention; choose auto, eager, triton"
    ):
        BitfieldAttention(impl="flash")
    only = BitfieldAttention(components=("vision_tower",)).run(found.graph)
    assert {op_name(n) for n in attention_of(only, "vision_tower")} == {"mmcompile.bitfield_attention"}
    assert {op_name(n) for n in attention_of(only)} == {"aten.scaled_dot_product_attention"}
