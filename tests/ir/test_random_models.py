"""Random models of views, in-place writes, masks, buffers, regions without gradient: a capture is eager, or says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, find, given, settings
from hypothesis import strategies as st
from support.models.random_model import STEPS, RandomModel, Step, batch
from support.oracles.eager import difference, eager_outcome, graph_outcome
from torch import nn

from mmcompile.errors import CaptureError
from mmcompile.ir import functional
from mmcompile.ir.capture import capture
from mmcompile.ir.host_shapes import attribute

QUICK, NIGHTLY = 100, 2_000
REFUSALS = ("cannot be made functional", "the loss does not depend on any trainable parameter")
"""Reasons for which a capture may be refused."""

PROGRAMS = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), *[st.integers(0, 7)] * 3), min_size=1, max_size=8)
FROZEN = st.integers(0, 2**11 - 1).map(lambda bits: bits & bits >> 1)
UNHURRIED = settings(
    deadline=None,
    database=None,
    suppress_health_check=(HealthCheck.filter_too_much, HealthCheck.too_slow),
    derandomize=True,
)


def wrong(program: list[Step], frozen: int) -> str | None:
    """How a capture differs from eager; empty if it does not, None if eager cannot run the program."""
    torch.manual_seed(0)
    model, given_batch = RandomModel(program, frozen), batch()
    alone = copy.deepcopy(model)
    alone.reentrant = False
    try:
        wanted = eager_outcome(alone, given_batch)
    except RuntimeError:  # a write to what the backward needs, or nothing trains
        return None
    if not wanted.gradients or not all(gradient.isfinite().all() for gradient in wanted.gradients.values()):
        return None
    try:
        captured = capture(model, given_batch)
    except CaptureError as error:
        return "" if any(reason in str(error) for reason in REFUSALS) else f"refused: {error}"
    found = difference(graph_outcome(model, captured, given_batch), wanted)
    if not found.within(1e-12):
        return str(found)
    return _other_buffers(captured.graph.module, alone)


def _other_buffers(graph: torch.fx.GraphModule, alone: nn.Module) -> str:
    read = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    unlike = [
        name
        for name, wanted in alone.named_buffers()
        if name in read and not torch.allclose(attribute(graph, name), wanted, rtol=1e-12, atol=1e-12)
    ]
    return f"other buffers: {', '.join(unlike)}" if unlike else ""


@given(program=PROGRAMS, frozen=FROZEN)
# The result's strides decide what `linear` is.
@example(program=[("view", 0, 0, 0), ("added_by_index", 0, 0, 0)], frozen=6)
# A part of what is written is read.
@example(program=[("view", 0, 0, 0), ("put_in_slice", 0, 0, 1)], frozen=0)
# Regions without gradient share a value.
@example(program=[("looked_at", 0, 0, 0), ("added", 1, 0, 0), ("looked_at", 0, 0, 0)], frozen=0)
def check(program: list[Step], frozen: int) -> None:
    found = wrong(program, frozen)
    assume(found is not None)
    assert not found


def test_captures_are_as_eager() -> None:
    settings(UNHURRIED, max_examples=QUICK)(check)()


@pytest.mark.slow
def test_many_captures_are_as_eager() -> None:
    settings(UNHURRIED, max_examples=NIGHTLY)(check)()


BREAKS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "views keep the value from before a write": (functional._Memory, "value", lambda self, node: self._original(node)),
    "a write through a view does not reach the tensor": (
        functional,
        "_write_back",
        lambda graph, near, view, source, new: source,
    ),
    "a write under no_grad takes the gradient along": (functional, "_same_gradient", lambda graph, near, old, new: new),
    "a write through a permuted view does not reach the tensor": (
        functional,
        "_scatter",
        lambda graph, near, view, source, new: source,
    ),
    "writes are left out": (functional, "_update", lambda graph, node, target: target),
}


@pytest.mark.parametrize(
    "broken", [pytest.param(name, marks=pytest.mark.slow if "permuted" in name else ()) for name in BREAKS]
)
def test_broken_functionalisation_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule of functionalisation, taken away, is missed by some random model."""
    owner, name, replacement = BREAKS[broken]
    monkeypatch.setattr(owner, name, replacement)
    quickly = settings(UNHURRIED, max_examples=500, phases=(Phase.generate,), report_multiple_bugs=False)
    program, frozen = find(st.tuples(PROGRAMS, FROZEN), lambda case: bool(wrong(*case)), settings=quickly)
    assert wrong(program, frozen)
