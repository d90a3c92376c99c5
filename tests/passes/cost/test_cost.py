"""`Cost` against what `FlopCounterMode` and autograd's saved tensors say of the eager model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.graphs.hand_graph import (
    PARTS,
    SmallModel,
    build_graph,
    set_trainable,
    small_batch,
    small_graph,
    with_flags,
)
from support.oracles.flop_oracle import counted_flops, saved_bytes
from torch import nn

from mmcompile.costmodel.compute import LayerCost
from mmcompile.ir.graph import ModelGraph, info
from mmcompile.kernels.packed_attention.packed_ops import packed_attention
from mmcompile.passes.cost.cost import Cost, CostTable
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline

ONE_LAYER = {"layer": ("language_model", 0)}
FROZEN_PATTERNS = [
    (True, True, True, True),
    (False, True, True, False),
    (False, True, False, False),
    (False, False, False, True),
    (True, False, False, False),
]


def cost_of(graph: ModelGraph) -> CostTable:
    cost = Cost()
    return Pipeline(passes=(GradientFlow(), cost)).run(graph).of(cost)


def flops(cost: LayerCost) -> tuple[int, int]:
    """(forward, backward)."""
    return cost.forward_flops, cost.input_grad_flops + cost.weight_grad_flops


@pytest.mark.parametrize("bits", FROZEN_PATTERNS)
def test_flops_and_saved_bytes_equal_the_eager_model(bits: tuple[bool, ...]) -> None:
    model, batch = SmallModel(), small_batch()
    set_trainable(model, dict(zip(PARTS, bits, strict=True)))
    total = cost_of(build_graph(model, batch)).total()
    assert flops(total) == counted_flops(lambda: model(**batch))
    assert total.activation_bytes == saved_bytes(lambda: model(**batch), model.parameters())


class _Products(nn.Module):
    """Matrix products of every form; `left` and `right` are parameters, so that either can be frozen."""

    def __init__(self, compute: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.operands = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x, *(operand + 0.0 for operand in self.operands)).pow(2).sum()


@pytest.mark.parametrize(
    ("compute", "shapes"),
    [
        (lambda x, a, b: torch.matmul(a, b), [(2, 3, 4, 5), (5, 6)]),
        (lambda x, a, b: torch.matmul(a, b), [(2, 1, 4, 5), (3, 5, 6)]),
        (lambda x, a, b: torch.bmm(a, b), [(3, 4, 5), (3, 5, 6)]),
        (lambda x, a, b, c: torch.addmm(a, b, c), [(6,), (4, 5), (5, 6)]),
        (lambda x, a, b, c: torch.baddbmm(a, b, c), [(2, 4, 6), (2, 4, 5), (2, 5, 6)]),
        (lambda x, a, b: torch.einsum("bij,bkj->bik", a, b), [(2, 3, 4), (2, 5, 4)]),
        (lambda x, a, b: torch.einsum("i,j->ij", a, b), [(3,), (4,)]),
        (lambda x, a, b: torch.einsum("...ij,jk", a, b), [(2, 3, 4), (4, 5)]),
        (lambda x, a: torch.matmul(a, a.mT), [(2, 3, 4)]),
        (lambda x, a, b: F.linear(a, b), [(7, 3, 4), (5, 4)]),
        (lambda x, a, b, c: F.conv1d(a, b, c, stride=2, padding=1), [(2, 2, 9), (6, 2, 3), (6,)]),
        (lambda x, a, b: F.conv1d(a, b, padding="same"), [(2, 2, 9), (6, 2, 3)]),
        (lambda x, a, b: F.conv2d(a, b), [(3, 8, 9), (5, 3, 2, 3)]),
        (lambda x, a, b: F.conv3d(a, b, stride=(2, 2, 2)), [(2, 3, 4, 4, 4), (5, 3, 2, 2, 2)]),
        (lambda x, a, b: F.conv_transpose2d(a, b, stride=2), [(2, 3, 4, 4), (3, 5, 2, 2)]),
        (
            lambda x, a, b: torch.linalg.solve_triangular(a.tril() + torch.eye(4), b, upper=False),
            [(3, 4, 4), (3, 4, 5)],
        ),
        (lambda x, a, b, c: F.scaled_dot_product_attention(a, b, c), [(2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)]),
    ],
)
def test_every_operand_subset_equals_the_flop_counter(
    compute: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]]
) -> None:
    model, batch = _Products(compute, *shapes), {"x": torch.randn(1)}
    graph = build_graph(model, batch, ONE_LAYER)
    for trained in range(len(shapes)):
        for index, operand in enumerate(model.operands):
            operand.requires_grad_(index == trained)
        total = cost_of(with_flags(graph, model)).total()
        assert flops(total) == counted_flops(lambda: model(**batch))
    model.requires_grad_(True)
    total = cost_of(with_flags(graph, model)).total()
    assert flops(total) == counted_flops(lambda: model(**batch))


def test_groups_of_a_convolution_do_not_mix_in_the_weight_gradient() -> None:
    model = _Products(lambda x, a, b: F.conv1d(a, b, padding=1, groups=4), (2, 4, 9), (4, 1, 3))
    total = cost_of(build_graph(model, {"x": torch.randn(1)}, ONE_LAYER)).total()
    assert total.forward_flops == 2 * (2 * 4 * 9 * 3)
    assert total.input_grad_flops + total.weight_grad_flops == 2 * total.forward_flops


@pytest.mark.parametrize(("constant", "squares"), [(True, 1 + 4 + 25), (False, 9 + 9 + 4)])
def test_packed_attention_pays_for_each_segment(constant: bool, squares: int) -> None:
    # Eight tokens in segments of 1, 2 and 5; where only their number is known, 3, 3 and 2 are assumed.
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.Parameter(torch.randn(1, 2, 8, 4))
            self.bounds = nn.Buffer(torch.tensor([0, 1, 3, 8], dtype=torch.int32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bounds = self.bounds if constant else self.bounds + x.int().sum() * 0
            return packed_attention(self.heads, self.heads, self.heads, bounds, 0.5).sum()

    cost = cost_of(build_graph(Packed(), {"x": torch.randn(1)}, ONE_LAYER)).total()
    product = 2 * 2 * 4 * squares
    assert flops(cost) == (2 * product, 5 * product)


def test_a_no_grad_region_costs_its_forward_only() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = self.inside(x)
            return (self.outside(x) * scale).sum()

    model, batch = Region(), {"x": torch.randn(3, 4)}
    total = cost_of(build_graph(model, batch, ONE_LAYER)).total()
    assert flops(total) == counted_flops(lambda: model(**batch))


def test_gradient_of_a_frozen_layer_is_input_gradient_only() -> None:
    model = SmallModel()
    set_trainable(model, {"encoder": True, "projector": False, "language_model": False, "adapter": False})
    table = cost_of(build_graph(model, small_batch()))
    assert table["vision"][0].input_grad_flops == 0 < table["vision"][0].weight_grad_flops
    (projector,) = table["projector"]
    assert (projector.input_grad_flops, projector.weight_grad_flops) == (projector.forward_flops, 0)
    assert projector.trainable_bytes == 0 < projector.parameter_bytes


def test_a_frozen_encoder_has_no_backward_and_saves_nothing() -> None:
    model = SmallModel()
    set_trainable(model, {"encoder": False, "projector": True, "language_model": True, "adapter": True})
    for cost in cost_of(build_graph(model, small_batch()))["vision"]:
        assert cost.forward_flops > 0
        backward = (cost.input_grad_flops, cost.weight_grad_flops, cost.backward_bytes, cost.backward_kernels)
        assert backward == (0, 0, 0, 0)
        assert cost.activation_bytes == 0


def test_output_bytes_are_what_the_next_layer_and_other_components_read() -> None:
    table = cost_of(small_graph())
    hidden, features, sound = 2 * 9 * 16 * 4, 2 * 4 * 16 * 4, 2 * 3 * 16 * 4
    assert [cost.output_bytes for cost in table["language_model"]] == [hidden, hidden, hidden, 0]
    assert [cost.output_bytes for cost in table["vision"]] == [features, features, features]
    assert [cost.output_bytes for cost in table["audio"]] == [sound]


def test_node_annotations_add_up_to_the_table() -> None:
    graph = small_graph()
    total = cost_of(graph).total()
    notes = [info(node) for node in graph.module.graph.nodes if node.op == "call_function"]
    assert sum(note.forward_flops for note in notes) == total.forward_flops
    assert sum(note.input_grad_flops for note in notes) == total.input_grad_flops
    assert sum(note.weight_grad_flops for note in notes) == total.weight_grad_flops
    assert sum(note.bytes_moved for note in notes) == total.forward_bytes


def test_table_prints_and_does_not_depend_on_earlier_runs() -> None:
    graph = small_graph()
    first = cost_of(graph)
    assert cost_of(graph) == first == cost_of(small_graph())
    rows = str(first).splitlines()
    assert rows[0].split() == [
        "layer", "forward", "input", "grad", "weight", "grad", "[MFLOP]", "saved", "parameters", "output", "[KiB]"
    ]  # fmt: skip
    assert rows[4] == (
        "audio.0                            0.002       0.000        0.002                 0.56        0.81        0.38"
    )


def test_total_of_an_empty_table_is_zero() -> None:
    assert CostTable(layers={}).total() == LayerCost(
        forward_flops=0,
        input_grad_flops=0,
        weight_grad_flops=0,
        forward_bytes=0,
        backward_bytes=0,
        kernels=0,
        backward_kernels=0,
        activation_bytes=0,
        parameter_bytes=0,
        trainable_bytes=0,
        output_bytes=0,
    )
