"""`check_shards`: right graphs pass, and every way to shard wrongly that we thought of is found, layer and value named."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.graphs.split import captured, root_values, with_present_flags
from support.models.tensor_blocks import SHARDED, Block, Ways, batch, gated
from torch import Tensor, fx, nn
from torch.nn import functional as F
from zoo import ALL

from mmcompile.errors import VerifyError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.compat import FakeTensorMode
from mmcompile.ir.graph import ModelGraph, info
from mmcompile.ir.inputs import completed
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.passes.tensor_parallel.tensor_axes import tensor_axes
from mmcompile.passes.tensor_parallel.tensor_parallel import TensorParallel
from mmcompile.passes.tensor_parallel.validation.layer_check import ShardCheck, check_shards
from mmcompile.passes.values import op_name

Degrees = Mapping[str, int]
LLAVA: Degrees = {"vision_tower": 2, "multi_modal_projector": 4, "language_model": 4}
"""Its language model has two key/value heads."""


def sharded(graph: ModelGraph, degrees: Degrees) -> ModelGraph:
    pass_ = TensorParallel(degrees=tuple(degrees.items()))
    return Pipeline(passes=(GradientFlow(), pass_, GradientFlow())).run(graph).graph


def checked(found: Capture, given: Mapping[str, Any], degrees: Degrees) -> ShardCheck:
    GradientFlow().run(found.graph)
    return check_shards(found.graph, sharded(found.graph, degrees), root_values(found, given))


def legal(graph: ModelGraph, degree: int) -> Degrees:
    GradientFlow().run(graph)
    return {part: degree for part, axes in tensor_axes(graph, degree).items() if degree in axes.degrees}


def test_a_layer_of_every_kind_is_found_right() -> None:
    """Five layers of the tower, whose last two differ in what others read, four of the language model, all alike."""
    _, given, found = captured("llava")
    check = checked(found, given, LLAVA)
    assert check.unchecked == ()
    labels = sorted(kind.split("-")[0] for kind in check.validated)
    assert labels == [
        *("encoder.layers", "encoder.outputs", "language_model.embed_tokens", "language_model.layers"),
        *("language_model.norm", "projector.linear_1"),
    ]


def test_windows_and_full_attention_are_kinds_of_their_own() -> None:
    """And queries, keys and values in one weight are checked like others."""
    _, given, found = captured("qwen2_5_vl")
    check = checked(found, given, {"visual": 4, "language_model": 2})
    assert check.unchecked == ()
    assert len([kind for kind in check.validated if kind.startswith("encoder.blocks")]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_families(name: str) -> None:
    """In float32, as they may train."""
    model = ALL[name].build(torch.float32)
    given = completed(model, ALL[name].batch(torch.float32))
    found = capture(model, given)
    for degree in (2, 4):
        degrees = legal(found.graph, degree)
        if degrees:
            check = checked(found, given, degrees)
            assert check.validated and check.unchecked == ()


Breaks = Callable[[ModelGraph], ModelGraph | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """Something wrong in a graph that is right otherwise."""

    model: str
    """A family of the zoo, or ways to write a layer."""
    degrees: Degrees
    breaks: Breaks
    told: str

    def __str__(self) -> str:
        return self.told


def first(graph: ModelGraph, op: str, component: str = "language_model", layer: int = 1) -> fx.Node:
    calls = (node for node in graph.module.graph.nodes if node.op == "call_function" and op_name(node) == op)
    return next(node for node in calls if (info(node).component, info(node).layer) == (component, layer))


def without(op: str, component: str = "language_model", layer: int = 1) -> Breaks:
    def breaks(graph: ModelGraph) -> None:
        node = first(graph, f"mmcompile.{op}", component, layer)
        node.replace_all_uses_with(node.all_input_nodes[0])

    return breaks


def resharded(parameter: str, **changes: Any) -> Breaks:
    def breaks(graph: ModelGraph) -> ModelGraph:
        (name,) = (name for name in graph.shards if name.endswith(parameter))
        return replace(graph, shards={**graph.shards, name: replace(graph.shards[name], **changes)})

    return breaks


def other_heads(graph: ModelGraph) -> None:
    node = first(graph, "mmcompile.tp_heads")
    node.args = (*node.args[:2], list(reversed(node.args[2])), *node.args[3:])  # type: ignore[arg-type]


def bias_on_every_rank(graph: ModelGraph) -> None:
    total = first(graph, "mmcompile.tp_sum")
    (added,) = total.users
    part, bias = total.all_input_nodes[0], added.all_input_nodes[1]
    part.args = (*part.args, bias)
    added.replace_all_uses_with(total)


def another_part(graph: ModelGraph) -> None:
    """The first half twice: 8 of a rank's 16 columns."""
    for node in graph.module.graph.nodes:
        if node.op == "call_function" and op_name(node) == "aten.slice" and 8 in node.args[2:]:
            node.args = (*node.args[:2], 0, 8)


MISTAKES = [
    Mistake(
        model="gated",
        degrees={"language_model": 2},
        breaks=without("tp_sum"),
        told="layer 1 .*: value add on rank 0 has",
    ),
    Mistake(
        model="gated",
        degrees={"language_model": 2},
        breaks=without("tp_copy"),
        told="layer 1 .*: gradient of input embedding on rank 0 has",
    ),
    Mistake(
        model="gated",
        degrees={"language_model": 2},
        breaks=bias_on_every_rank,
        told="layer 1 .*: value add on rank 0 has",
    ),
    Mistake(
        model="split_uneven",
        degrees={"language_model": 2},
        breaks=resharded(".pair.weight", blocks=(32,)),
        told="layer 1 .*: value add on rank 0 has",
    ),
    Mistake(
        model="gated",
        degrees={"language_model": 2},
        breaks=resharded("other.weight", dim=1, blocks=(8,)),
        told="layer 1 .*: linear_1 = aten.linear in module layers.0.other fails: ",
    ),
    Mistake(model="sliced", degrees={"language_model": 2}, breaks=another_part, told="layer 1 .*: value "),
    Mistake(
        model="gated",
        degrees={"language_model": 2},
        breaks=without("tp_sum", layer=0),
        told="layer 0 .*: value embedding on",
    ),
    Mistake(
        model="llava",
        degrees=LLAVA,
        breaks=resharded("language_model.layers.0.self_attn.q_proj.weight", dim=1),
        told=r"layer 1 of language_model \(model.language_model.layers.0\) .*: linear_\d+ = aten.linear in .*q_proj fails: ",
    ),
    Mistake(model="llava", degrees=LLAVA, breaks=other_heads, told="layer 1 of language_model .*: value "),
    Mistake(
        model="llava",
        degrees=LLAVA,
        breaks=without("tp_enter", "multi_modal_projector", 0),
        told="layer 0 of multi_modal_projector .*: gradient of input ",
    ),
    Mistake(
        model="llava",
        degrees=LLAVA,
        breaks=without("tp_exit", "multi_modal_projector", 0),
        told="layer 0 of multi_modal_projector .*: gradient of ",
    ),
]


def ways_of(name: str) -> Capture:
    torch.manual_seed(0)
    return capture(Ways({name: SHARDED[name]}).double().train(), batch())


def setting(model: str) -> tuple[Capture, Mapping[str, Any]]:
    if model in ALL:
        _, given, found = captured(model)
        return found, given
    return ways_of(model), batch()


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_found(mistake: Mistake) -> None:
    found, given = setting(mistake.model)
    GradientFlow().run(found.graph)
    right = sharded(found.graph, mistake.degrees)
    roots = root_values(found, given)
    known = check_shards(found.graph, right, roots).validated
    wrong = mistake.breaks(right) or right
    with pytest.raises(VerifyError, match=mistake.told) as error:
        # That layers like it were right before hides nothing.
        check_shards(found.graph, wrong, roots, known)
    assert re.search("run .* with another degree of tensor parallelism, or 1", str(error.value))


def test_other_sizes_are_no_other_kinds() -> None:
    """A graph for longer rows needs no second check."""
    family = ALL["llava"]
    model, given, found = captured("llava")
    model.requires_grad_(True)  # Other tests freeze parts of it.
    known = checked(with_present_flags(model, found), given, LLAVA).validated
    longer = completed(
        model, family.draw(replace(family.first, length=family.first.length + 7), seed=2, dtype=torch.float64)
    )
    other = capture(model, longer)
    GradientFlow().run(other.graph)
    again = check_shards(other.graph, sharded(other.graph, LLAVA), root_values(other, longer), known)
    assert again == ShardCheck(validated=set(), unchecked=())
    assert checked(other, longer, LLAVA).validated == known


def test_other_degrees_are_other_kinds() -> None:
    found = ways_of("gated")
    kinds = [checked(found, batch(), {"language_model": degree}).validated for degree in (2, 4)]
    assert kinds[0].isdisjoint(kinds[1])


def test_dropout_is_off_and_no_random_number_of_the_run_is_drawn() -> None:
    def dropped(block: Block, x: Tensor) -> Tensor:
        return block.down(F.dropout(block.up(x).relu(), 0.5))

    found = capture(Ways({"dropped": dropped}).double().train(), batch())
    before = torch.get_rng_state()
    check = checked(found, batch(), {"language_model": 2})
    assert torch.equal(before, torch.get_rng_state())
    assert check.unchecked == () and torch.get_default_dtype() == torch.float32


def test_what_draws_random_numbers_is_told() -> None:
    def noisy(block: Block, x: Tensor) -> Tensor:
        up = block.up(x)
        return block.down(up * torch.rand_like(up))

    model = Ways({"noisy": noisy, "again": noisy, "gated": gated}).double().train()
    check = checked(capture(model, batch()), batch(), {"language_model": 2})
    (line,) = check.unchecked
    assert line == (
        "layer 1 of language_model (layers.0) and 1 like it not checked: rand_like = aten.rand_like draws random numbers"
    )


class Large(nn.Module):
    """A language model of one layer, wider than any computer of a test."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))])
        self.head = nn.Linear(width, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("width", "inner", "length", "told"),
    [
        (1 << 14, 1 << 15, 8, "1.1 G elements, at most 1.0 G"),
        (1 << 11, 1 << 17, 1024, "2.2 TFLOP in its forward, at most 2.0"),
    ],
)
def test_layers_that_are_too_large_are_told(width: int, inner: int, length: int, told: str) -> None:
    with FakeTensorMode():
        model = Large(width, inner)
    ids = torch.zeros(2, length, dtype=torch.int64)
    given = {"input_ids": ids, "labels": ids}
    check = checked(capture(model, given), given, {"language_model": 2})
    assert f"layer 1 of language_model (layers.0) not checked: {told}" in check.unchecked
