"""Size symbols: which batches a symbolic graph holds for, and what every size is in one of them."""

from __future__ import annotations

import pytest
import sympy
import torch
import torch.nn.functional as F
from support.oracles.eager import difference, eager_outcome, graph_outcome, holds_for
from torch import Tensor, nn

from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import CaptureMode
from mmcompile.ir.sizes import Sizes, evaluate, solved

s, t = sympy.symbols("s t", integer=True, positive=True)


def _shapes(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.empty(shape) for name, shape in shapes.items()}


def test_without_symbols_only_equal_shapes_hold() -> None:
    sizes = Sizes(inputs={"x": (2, 3)})
    assert sizes.bind(_shapes(x=(2, 3))) == {}
    assert sizes.bind(_shapes(x=(2, 4))) is None
    assert sizes.bind(_shapes(x=(2, 3, 1))) is None
    assert sizes.dynamic() == {}


def test_symbols_are_bound_and_must_agree() -> None:
    sizes = Sizes(inputs={"x": (s, 3), "y": (s, t)})
    assert sizes.bind(_shapes(x=(5, 3), y=(5, 7))) == {s: 5, t: 7}
    assert sizes.bind(_shapes(x=(5, 3), y=(6, 7))) is None
    assert sizes.bind(_shapes(x=(5, 4), y=(5, 7))) is None
    assert sizes.dynamic() == {"x": (0,), "y": (0, 1)}


@pytest.mark.parametrize(
    ("size", "number", "value"),
    [(s, 3, 3), (4 * s, 12, 3), (4 * s, 13, None), (2 * s - 2, 6, 4), (s * s, 4, None), (s * t, 6, None)],
)
def test_the_symbol_of_a_linear_size_follows_from_its_value(size: sympy.Expr, number: int, value: int | None) -> None:
    assert solved(size, number) == value


@pytest.mark.parametrize("size", [0, 1])
def test_sizes_of_zero_and_one_are_refused(size: int) -> None:
    """They broadcast, or vanish: a graph of larger sizes says nothing about them."""
    sizes = Sizes(inputs={"x": (s,)})
    assert sizes.bind(_shapes(x=(2,))) == {s: 2}
    assert sizes.bind(_shapes(x=(size,))) is None


def test_expressions_are_checked_wherever_their_symbol_stands() -> None:
    sizes = Sizes(inputs={"pixels": (s * 16, 3), "images": (s,)})
    assert sizes.bind(_shapes(pixels=(64, 3), images=(4,))) == {s: 4}
    assert sizes.bind(_shapes(pixels=(65, 3), images=(4,))) is None
    alone = Sizes(inputs={"pixels": (s * 16, 3)})
    assert alone.bind(_shapes(pixels=(64, 3))) == {s: 4}, "it follows"
    assert alone.bind(_shapes(pixels=(65, 3))) is None


def test_guards_decide() -> None:
    sizes = Sizes(inputs={"x": (s,), "y": (t,)}, guards=(sympy.Le(s + t, 10), sympy.Eq(sympy.Mod(s, 4), 0)))
    assert sizes.bind(_shapes(x=(4,), y=(6,))) == {s: 4, t: 6}
    assert sizes.bind(_shapes(x=(4,), y=(7,))) is None
    assert sizes.bind(_shapes(x=(5,), y=(2,))) is None


def test_a_guard_that_cannot_be_decided_does_not_hold() -> None:
    assert Sizes(inputs={"x": (s,)}, guards=(sympy.Le(t, 10),)).bind(_shapes(x=(4,))) is None


def test_size_inputs_are_evaluated() -> None:
    sizes = Sizes(inputs={"x": (s, t)}, values={"size_0": s * t, "size_1": sympy.floor(s / 2) + 1})
    assert sizes.size_inputs({s: 5, t: 3}) == {"size_0": 15, "size_1": 3}
    assert sizes.size_inputs({s: 5}) == {"size_1": 3}


def test_evaluate() -> None:
    assert evaluate(7, {}) == 7
    assert evaluate(s * 2 + 1, {s: 3}) == 7
    assert evaluate(s + t, {s: 3}) is None


class Windows(nn.Module):
    """Pads to windows of four, so that sizes are computed; and an optional limit on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        samples, length, width = hidden.shape
        if length > 20:
            hidden = hidden * 2
        windows = F.pad(hidden, (0, 0, 0, -length % 4)).reshape(samples, -1, 4 * width)
        hidden = self.mix(windows).reshape(samples, -1, width)[:, :length]
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def _batch(samples: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 16, (samples, length))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def symbolic() -> tuple[nn.Module, Capture]:
    model = Windows().double()
    return model, capture(model, _batch(2, 11), dynamic=_batch(3, 14))


def test_a_captured_graph_holds_for_other_sizes(symbolic: tuple[nn.Module, Capture]) -> None:
    model, found = symbolic
    assert found.graph.mode is CaptureMode.SYMBOLIC
    assert found.graph.dynamic["input_ids"] == (0, 1)
    assert any(spec.shape != (2, 11) for spec in found.graph.inputs)
    for samples, length in [(2, 11), (3, 14), (5, 9), (2, 19)]:
        batch = _batch(samples, length)
        outcome = difference(graph_outcome(model, found, batch), eager_outcome(model, batch))
        assert outcome.within(1e-12), f"{samples, length}: {outcome}"


@pytest.mark.parametrize("shape", [(1, 11), (2, 1), (2, 24)])
def test_it_does_not_hold_where_the_model_would_take_another_way(
    symbolic: tuple[nn.Module, Capture], shape: tuple[int, int]
) -> None:
    model, found = symbolic
    assert not holds_for(model, found, _batch(*shape))


def test_nodes_have_concrete_example_values_and_symbolic_shapes(symbolic: tuple[nn.Module, Capture]) -> None:
    _, found = symbolic
    nodes = found.graph.module.graph.nodes
    tensors = [n for n in nodes if n.op == "call_function" and isinstance(n.meta["val"], Tensor)]
    assert all(isinstance(size, int) for node in tensors for size in node.meta["val"].shape)
    bound = found.sizes.bind(_batch(2, 11))
    assert bound is not None
    for node in tensors:
        if "symbolic_shape" in node.meta:
            assert tuple(evaluate(size, bound) for size in node.meta["symbolic_shape"]) == tuple(node.meta["val"].shape)
    assert not [n for n in nodes if n.op == "call_function" and isinstance(n.meta["val"], torch.SymInt)]


def test_guards_that_keep_sizes_from_0_and_1_hold_where_small_sizes_may() -> None:
    guards = (sympy.Ge(4 * s - 8, 2), sympy.Ne(2 * t, 2))
    sizes = Sizes(inputs={"x": (s, t)}, guards=guards)
    assert sizes.bind(_shapes(x=(3, 4))) is not None and sizes.small({s: 3, t: 4}) == []
    assert sizes.bind(_shapes(x=(2, 4))) is None
    assert sizes.bind(_shapes(x=(2, 4)), small=True) == {s: 2, t: 4} and sizes.small({s: 2, t: 4}) == ["4*s - 8"]
    assert sizes.bind(_shapes(x=(3, 1)), small=True) == {s: 3, t: 1} and sizes.small({s: 3, t: 1}) == ["t"]


def test_a_guard_with_another_reason_is_never_left_out() -> None:
    sizes = Sizes(inputs={"x": (s, t)}, guards=(sympy.Eq(s, t), sympy.Le(s, 8)))
    assert sizes.bind(_shapes(x=(1, 2)), small=True) is None
    assert sizes.bind(_shapes(x=(9, 9)), small=True) is None
    assert sizes.bind(_shapes(x=(1, 1)), small=True) == {s: 1, t: 1}
