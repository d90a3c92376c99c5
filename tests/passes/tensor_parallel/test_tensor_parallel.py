"""The pass tensor-parallel: ranks with parts of the weights compute what one rank computes with all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.graphs.bitfield_graph import causal_words, widened, with_words
from support.graphs.hand_graph import with_flags
from support.graphs.split import captured, root_values
from support.models.freezing import add_adapter, freeze
from support.models.tensor_blocks import SHARDED, WHOLE, Block, Ways, batch, experts, gated
from support.oracles.tensor_parity import TensorParity, tensor_parity
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from zoo import ALL

from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import ModelGraph, info
from mmcompile.ir.inputs import completed
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.passes.tensor_parallel.tensor_axes import tensor_axes
from mmcompile.passes.tensor_parallel.tensor_parallel import TensorParallel
from mmcompile.passes.text import graph_text
from mmcompile.passes.values import op_name

CLOSE = 1e-10
Degrees = Mapping[str, int]


def sharded(graph: ModelGraph, degrees: Degrees) -> ModelGraph:
    """The graph after the pass, verified."""
    pass_ = TensorParallel(degrees=tuple(degrees.items()))
    return Pipeline(passes=(GradientFlow(), pass_, GradientFlow())).run(graph).graph


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def compared(model: nn.Module, found: Capture, given: Mapping[str, Any], degrees: Degrees) -> TensorParity:
    """Ranks against the whole, in float64 throughout."""
    graph = widened(found.graph)
    return tensor_parity(graph, sharded(graph, degrees), tensors_of(model), root_values(found, given))


ZOO: dict[str, Degrees] = {
    "llava": {"vision_tower": 2, "multi_modal_projector": 4, "language_model": 4},
    "qwen2_5_vl": {"visual": 4, "language_model": 2},
    "gemma3": {"language_model": 4},
    "mllama": {"vision_model": 2, "language_model": 4},
    "qwen2_audio": {"audio_tower": 2, "language_model": 2},
}
"""Towers before Llama with fewer key/value heads than ranks; queries, keys and values in one weight; one key/value head and norms
of queries and keys; cross-attention; logits of chosen tokens."""
IN_CORE = ("llava", "qwen2_5_vl")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in IN_CORE else pytest.mark.slow) for n in ZOO])
def test_models_of_the_zoo(name: str) -> None:
    model, given, found = captured(name)
    assert compared(model, found, given, ZOO[name]).worst[1] < CLOSE


@pytest.fixture(scope="module")
def ways() -> tuple[Ways, Capture]:
    torch.manual_seed(0)
    model = Ways({**SHARDED, **{way.__name__: way for way in WHOLE}, "experts": experts}).double().train()
    return model, capture(model, batch())


def _layers_with(graph: ModelGraph, name: str) -> set[int]:
    calls = [node for node in graph.module.graph.nodes if node.op == "call_function"]
    return {info(node).layer for node in calls if op_name(node) == name}


@pytest.mark.parametrize("degree", [2, 4])
def test_ways_to_write_a_layer(ways: tuple[Ways, Capture], degree: int) -> None:
    model, found = ways
    parity = compared(model, found, batch(), {"language_model": degree})
    assert parity.worst[1] < CLOSE
    assert len(parity.gradients) > 100


def test_every_way_that_can_be_sharded_is(ways: tuple[Ways, Capture]) -> None:
    """Layer 0 is the embedding, the last the head; between them the ways in order."""
    graph = sharded(ways[1].graph, {"language_model": 2})
    assert _layers_with(graph, "mmcompile.tp_sum") == {0, *range(1, len(SHARDED) + 1)}
    assert _layers_with(graph, "mmcompile.tp_token_loss") == {len(SHARDED) + len(WHOLE) + 2}
    (line,) = graph.rewrites
    assert "embedding, head and loss" in line


def test_what_stays_whole_says_why(ways: tuple[Ways, Capture]) -> None:
    graph = ways[1].graph
    GradientFlow().run(graph)
    axes = tensor_axes(graph, 4)["language_model"]
    assert axes.degrees == (1, 2, 4)
    told = "\n".join(axes.kept[2])
    for reason in WHOLE.values():
        assert reason in told
    assert "experts: read by aten.matmul" in told


def test_parts_of_fused_weights(ways: tuple[Ways, Capture]) -> None:
    """Blocks follow from what is done with the outputs."""
    shards = sharded(ways[1].graph, {"language_model": 2}).shards
    names = list(SHARDED)

    def blocks(way: str, weight: str) -> tuple[int, ...]:
        return shards[f"layers.{names.index(way)}.{weight}.weight"].blocks

    assert blocks("chunked", "pair") == (16, 16)
    assert blocks("split_uneven", "pair") == (16, 8, 8)
    assert blocks("sliced", "pair") == (16, 16)
    assert blocks("interleaved", "triad") == (48,)
    assert blocks("gated", "down") == (16,)
    assert shards[f"layers.{names.index('gated')}.down.weight"].dim == 1
    assert not any(name.startswith(f"layers.{names.index('adapted')}.low") for name in shards)


def ways_of(*names: str, **options: Any) -> tuple[Ways, Capture]:
    torch.manual_seed(0)
    model = Ways({name: SHARDED[name] for name in names}, **options).double().train()
    return model, capture(model, batch())


def test_tied_weights_are_sharded_alike() -> None:
    """A table that is also the head, and a projection in two layers."""
    torch.manual_seed(0)
    model = Ways({name: SHARDED[name] for name in ("gated", "adapted")}, tied=True).double().train()
    model.layers[1].up = model.layers[0].up
    found = capture(model, batch())
    assert {"embed.weight", "layers.0.up.weight"} <= sharded(found.graph, {"language_model": 4}).shards.keys()
    assert compared(model, found, batch(), {"language_model": 4}).worst[1] < CLOSE


def test_a_weight_that_is_read_whole_stays_whole() -> None:
    def peeking(block: Block, x: torch.Tensor) -> torch.Tensor:
        return gated(block, x) * block.up.weight.sum()

    torch.manual_seed(0)
    model = Ways({"peeking": peeking, "gated": gated}).double().train()
    found = capture(model, batch())
    graph = sharded(found.graph, {"language_model": 2})
    assert "layers.0.up.weight is also read by sum_1 = aten.sum in layer 1 of language_model" in graph.rewrites[0]
    assert not any(name.startswith("layers.0") for name in graph.shards)
    assert "layers.1.up.weight" in graph.shards
    assert compared(model, found, batch(), {"language_model": 2}).worst[1] < CLOSE


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    model, found = ways_of("gated", classes=13)
    graph = sharded(found.graph, {"language_model": 2})
    assert not {"embed.weight", "head.weight"} & graph.shards.keys()
    assert "a vocabulary of 13 does not divide by 2" in graph.rewrites[0]
    assert "head: 13 outputs do not divide by 2" in graph.rewrites[0]
    assert compared(model, found, batch(), {"language_model": 2}).worst[1] < CLOSE


TEXT: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
LANGUAGE_MODELS: dict[str, tuple[dict[str, Any], int, str]] = {
    "qwen2_moe": (
        {
            "num_key_value_heads": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
        },
        2,
        "mlp.experts.",
    ),
    "phi3": ({"num_key_value_heads": 2}, 2, "embedding, head and loss"),
    "gpt2": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
        4,
        "embedding",
    ),
}
"""Fields, degree, and a part of what is reported: experts and a shared one; queries, keys and values, and gate and up, in one
weight each; weights with inputs first, table and head tied."""


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_language_models(kind: str) -> None:
    fields, degree, told = LANGUAGE_MODELS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**TEXT | fields)).double().train()
    ids = torch.randint(3, 64, (2, 9))
    given = {"input_ids": ids, "labels": ids}
    found = capture(model, given)
    assert compared(model, found, given, {"language_model": degree}).worst[1] < CLOSE
    assert told in sharded(found.graph, {"language_model": degree}).rewrites[0]


FROZEN: list[tuple[dict[str, bool], int]] = [
    ({"encoder": False, "projector": True, "language_model": False, "adapter": False}, 4),
    ({"encoder": True, "projector": False, "language_model": False, "adapter": False}, 53),
    ({"encoder": False, "projector": False, "language_model": False, "adapter": True}, 8),
]


@pytest.fixture(scope="module")
def adapted_llava() -> tuple[nn.Module, Mapping[str, Any], Capture]:
    model = ALL["llava"].build(torch.float64)
    add_adapter(model)
    model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # starts at zero, which would hide the gradient of lora_A
                parameter.normal_()
    given = completed(model, ALL["llava"].batch(torch.float64))
    return model, given, capture(model, given)


@pytest.mark.parametrize(("pattern", "receiving"), FROZEN)
def test_frozen_parts(
    adapted_llava: tuple[nn.Module, Mapping[str, Any], Capture], pattern: dict[str, bool], receiving: int
) -> None:
    """Nothing is exchanged for gradients that nobody asks for."""
    model, given, found = adapted_llava
    freeze(model, pattern)
    found = replace(found, graph=with_flags(found.graph, model))
    degrees = {"vision_tower": 4, "multi_modal_projector": 2, "language_model": 2}
    parity = compared(model, found, given, degrees)
    assert parity.worst[1] < CLOSE
    assert len(parity.gradients) == receiving
    graph = sharded(found.graph, degrees)
    calls = [node for node in graph.module.graph.nodes if node.op == "call_function"]
    needless = [node for node in calls if op_name(node) in _FOR_GRADIENTS and not info(node).carries_gradient]
    assert not needless


_FOR_GRADIENTS = ("mmcompile.tp_copy", "mmcompile.tp_exit", "mmcompile.tp_enter")


def test_borders_stand_in_the_layers_they_belong_to() -> None:
    _, _, found = captured("llava")
    graph = sharded(found.graph, {"vision_tower": 2, "multi_modal_projector": 4})
    calls = [node for node in graph.module.graph.nodes if node.op == "call_function"]
    places = {
        (op_name(node).removeprefix("mmcompile."), info(node).component, info(node).layer)
        for node in calls
        if op_name(node) in ("mmcompile.tp_exit", "mmcompile.tp_enter")
    }
    last = max(info(node).layer for node in calls if info(node).component == "vision_tower" and node.users)
    assert places == {
        ("tp_exit", "vision_tower", last),
        ("tp_enter", "multi_modal_projector", 0),
        ("tp_exit", "multi_modal_projector", 0),
    }
    assert {edge[:2] for edge in graph.edges} == {edge[:2] for edge in found.graph.edges}


def test_a_graph_for_varying_sizes() -> None:
    """Captured on one batch, run on another with longer rows."""
    family = ALL["llava"]
    model = family.build(torch.float64)
    longer = replace(family.first, length=family.first.length + 11)
    first, second = family.batch(torch.float64), family.draw(longer, seed=2, dtype=torch.float64)
    found = capture(model, first, dynamic=second)
    assert compared(model, found, completed(model, second), {"language_model": 4}).worst[1] < CLOSE


def test_bitfield_attention() -> None:
    model, given, found = captured("llava")
    graph = with_words(found.graph)
    roots = {**root_values(found, given), "attention_words": causal_words(given)}
    after = sharded(graph, {"language_model": 4})
    assert (
        len(_layers_with(after, "mmcompile.bitfield_attention")) == len(_layers_with(after, "mmcompile.tp_heads")) == 4
    )
    assert tensor_parity(graph, after, tensors_of(model), roots).worst[1] < CLOSE


def test_a_wrong_graph_is_found() -> None:
    """The oracle sees a missing sum of gradients, and a missing sum of results."""
    model, found = ways_of("gated")
    graph = found.graph
    for op in ("mmcompile.tp_copy", "mmcompile.tp_sum"):
        made = sharded(graph, {"language_model": 2})
        wrong = next(
            n for n in made.module.graph.nodes if n.op == "call_function" and op_name(n) == op and info(n).layer == 1
        )
        wrong.replace_all_uses_with(wrong.args[0])
        assert tensor_parity(graph, made, tensors_of(model), root_values(found, batch())).worst[1] > 1e-3


def test_the_given_graph_is_left_alone_and_text_repeats(ways: tuple[Ways, Capture]) -> None:
    graph = ways[1].graph
    GradientFlow().run(graph)
    before = graph_text(graph)
    texts = {graph_text(sharded(graph, {"language_model": 2})) for _ in range(2)}
    assert len(texts) == 1
    assert graph_text(graph) == before and not graph.shards


ERRORS: list[tuple[tuple[tuple[str, int], ...], type[ValueError], str]] = [
    ((("language_model", 1),), ConfigError, "tensor parallelism of degree 1 has no effect"),
    ((), ConfigError, "tensor parallelism of degree 1 has no effect"),
    ((("language_model", 0),), ConfigError, "degree of tensor parallelism of language_model must be at least 1, got 0"),
    ((("language_model", 2), ("language_model", 4)), ConfigError, "language_model is given several degrees"),
    ((("tower", 2),), ConfigError, "no component 'tower' to shard; components are language_model"),
    (
        (("language_model", 64),),
        PlanError,
        "degree 64 has no effect on language_model, of which nothing can be sharded: .*aten.linear in module layers.0.up: "
        "16 outputs do not divide by 64.*leave language_model at degree 1",
    ),
]


@pytest.mark.parametrize(("degrees", "kind", "text"), ERRORS)
def test_errors(
    ways: tuple[Ways, Capture], degrees: tuple[tuple[str, int], ...], kind: type[ValueError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        TensorParallel(degrees=degrees).run(ways[1].graph)


def test_a_sharded_graph_is_not_sharded_again(ways: tuple[Ways, Capture]) -> None:
    graph = sharded(ways[1].graph, {"language_model": 2})
    with pytest.raises(ConfigError, match="this graph is sharded already; give all degrees to one pass"):
        TensorParallel(degrees=(("language_model", 2),)).run(graph)


def test_random_numbers_for_a_whole_value_are_refused() -> None:
    def dropped(block: Block, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(gated(block, x), 0.1)

    torch.manual_seed(0)
    model = Ways({"dropped": dropped}).double().train()
    graph = capture(model, batch()).graph
    with pytest.raises(
        PlanError, match=r"layer 1 of language_model \(layers.0\): dropout = aten.dropout .* all ranks must agree"
    ):
        sharded(graph, {"language_model": 2})


def test_degrees_of_components() -> None:
    _, _, found = captured("llava")
    GradientFlow().run(found.graph)
    axes = tensor_axes(found.graph, 8)
    assert {name: each.degrees for name, each in axes.items()} == {
        "vision_tower": (1, 2, 4),
        "multi_modal_projector": (1, 2, 4, 8),
        "language_model": (1, 2, 4),
    }
    language = axes["language_model"]
    assert language.reasons == {8: "4 heads do not divide by 8"}
    assert language.shares[1] == 0 and 0.9 < language.shares[4] < language.shares[2] < 1
    assert language.kept[2] == ()
    assert "self_attn.k_proj (4): 2 heads do not divide by 4" in language.kept[4][0]


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", ALL)
def test_all_families(name: str, degree: int) -> None:
    """Every component at the degree where it is legal, in float64 where norms and rotary tables allow."""
    model, given, found = captured(name)
    GradientFlow().run(found.graph)
    legal = {part: degree for part, axes in tensor_axes(found.graph, degree).items() if degree in axes.degrees}
    if not legal:
        pytest.skip(f"nothing of {name} can be run at degree {degree}")
    graph = found.graph
    parity = tensor_parity(graph, sharded(graph, legal), tensors_of(model), root_values(found, given))
    assert parity.worst[1] < 1e-4
