"""`GradientFlow` against eager autograd."""

from __future__ import annotations

import itertools

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
from torch import nn

from mmcompile.errors import VerifyError
from mmcompile.ir.graph import info
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.text import graph_text

ALL_PATTERNS = [dict(zip(PARTS, bits, strict=True)) for bits in itertools.product((False, True), repeat=len(PARTS))]
ONE_LAYER = {"layer": ("language_model", 0)}


def eager_gradients(model: nn.Module, batch: dict[str, torch.Tensor]) -> set[str]:
    model.zero_grad(set_to_none=True)
    loss = model(**batch)
    if loss.requires_grad:
        loss.backward()
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_prediction_equals_eager_for_every_freeze_pattern() -> None:
    model, batch = SmallModel(), small_batch()
    graph = build_graph(model, batch)
    for pattern in ALL_PATTERNS:
        set_trainable(model, pattern)
        report = GradientFlow().run(with_flags(graph, model))
        assert report.parameters_with_gradient == eager_gradients(model, batch), pattern


def test_gradient_passes_a_frozen_language_model_behind_a_trainable_projector() -> None:
    model = SmallModel()
    set_trainable(model, {"encoder": False, "projector": True, "language_model": False, "adapter": False})
    graph = build_graph(model, small_batch())
    report = GradientFlow().run(graph)
    assert str(report) == (
        "vision: 0 of 45 nodes carry gradient, 0 of 0 trainable parameters receive one\n"
        "audio: 0 of 3 nodes carry gradient, 0 of 0 trainable parameters receive one\n"
        "projector: 1 of 1 nodes carry gradient, 2 of 2 trainable parameters receive one\n"
        "language_model: 51 of 54 nodes carry gradient, 0 of 0 trainable parameters receive one\n"
        "vision -> projector: forward only\n"
        "projector -> language_model: gradient\n"
        "audio -> language_model: forward only"
    )


def test_a_trainable_parameter_that_the_loss_does_not_see_is_unused() -> None:
    report = GradientFlow().run(small_graph())
    assert report.unused == {"head.spare.weight"}
    assert str(report).endswith("\nunused: head.spare.weight")


def test_running_again_changes_nothing() -> None:
    graph = small_graph()
    first = GradientFlow().run(graph)
    text = graph_text(graph)
    assert GradientFlow().run(graph) == first
    assert graph_text(graph) == text
    assert graph_text(small_graph()) != text, "annotations are part of the text"


class _Stops(nn.Module):
    """Ways in which gradient ends, each behind a linear of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.detached, self.chosen, self.compared, self.shaped, self.blocked, self.live = (
            nn.Linear(4, 4) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.live(x) + self.detached(x).detach()
        hidden = hidden[:, self.chosen(x).argmax(-1)[0]] + (self.compared(x) > 0).sum()
        hidden = hidden + torch.ones_like(self.shaped(x))[:, 0]
        with torch.no_grad():
            scale = self.blocked(x).mean()
        return (hidden * scale).sum()


class _Odd(nn.Module):
    """Gradient that goes where it is easily missed."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded, self.masked, self.indexed, self.viewed = (nn.Linear(4, 4) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(()))
        self.table = nn.Embedding(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.rounded(x).floor() + torch.where(x > 0, self.masked(x), 0.0)
        hidden = hidden.index_put((torch.tensor([0]),), self.indexed(x)[1:2])
        first, second = self.viewed(x).chunk(2, dim=-1)
        hidden = hidden + torch.cat([second, first], -1) + self.table(torch.tensor([1, 2, 3]))
        return F.softmax(hidden * self.scale, -1).pow(2).sum()


class _Tied(nn.Module):
    """Embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(torch.tensor([0, 1])) + x[:2]).sum()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (_Stops, {"live.weight", "live.bias"}),
        (_Odd, None),
        (_Tied, {"embed.weight"}),
    ],
)
def test_single_ops_agree_with_eager(kind: type[nn.Module], expected: set[str] | None) -> None:
    model, batch = kind(), {"x": torch.randn(3, 4)}
    graph = build_graph(model, batch, ONE_LAYER)
    report = GradientFlow().run(graph)
    names = {name for name, _ in model.named_parameters()}
    assert report.parameters_with_gradient == (names if expected is None else expected)
    assert report.parameters_with_gradient == eager_gradients(model, batch)


def test_a_loss_without_trainable_parameters_carries_nothing() -> None:
    model = SmallModel().requires_grad_(False)
    graph = build_graph(model, small_batch())
    assert GradientFlow().run(graph).parameters_with_gradient == frozenset()
    assert not any(info(node).carries_gradient for node in graph.module.graph.nodes if node.op == "call_function")


def test_a_graph_without_loss_is_an_error() -> None:
    graph = small_graph()
    graph.module.graph.output_node().args = (None,)
    with pytest.raises(VerifyError, match="the graph returns None; the first result must be the loss"):
        GradientFlow().run(graph)
