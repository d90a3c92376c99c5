"""A captured graph against the eager model: the same loss and the same gradient of every parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from mmcompile.ir.capture import Capture
from mmcompile.ir.capture_errors import Mismatch
from mmcompile.ir.inputs import completed

NEGLIGIBLE = 1e-2
"""Share of the model's largest gradient that a parameter's own largest counts as at least: 1e-5 of this share is float32's
resolution of the largest gradient, and smaller differences are the rounding of sums that cancel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Loss and gradients of one forward and backward."""

    loss: float
    gradients: dict[str, Tensor]
    """By name; parameters without a gradient are absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How far one outcome is from another."""

    loss: float
    """|a - b| / |b|."""
    gradient: float
    """Largest over parameters of max|a - b| / max|b|, where max|b| counts as at least `NEGLIGIBLE` of the model's largest."""
    worst: str
    """Parameter with the largest difference."""
    missing: tuple[str, ...]
    """Parameters with a gradient in one outcome only."""
    identical: bool
    """Every bit of loss and gradients is the same."""

    def within(self, tolerance: float) -> bool:
        """True if losses and gradients agree to `tolerance` and exist for the same parameters."""
        return not self.missing and self.loss <= tolerance and self.gradient <= tolerance

    def __str__(self) -> str:
        if self.missing:
            return f"gradients on one side only: {', '.join(self.missing[:4])} ({len(self.missing)} in all)"
        return f"loss differs by {self.loss:.1e}, gradients by up to {self.gradient:.1e} ({self.worst})"


def eager_outcome(model: nn.Module, batch: Mapping[str, Any]) -> Outcome:
    """One forward and backward of the model as it is, on the loss it returns."""
    model.zero_grad()
    loss = model(**batch)["loss"]
    loss.backward()
    return _outcome(model, loss)


def graph_outcome(model: nn.Module, captured: Capture, batch: Mapping[str, Any]) -> Outcome:
    """One forward and backward of the captured graph, whose parameters are the model's own tensors.

    Raises:
        ValueError: the graph does not hold for the batch.
    """
    inputs = _inputs(model, captured, batch)
    if isinstance(inputs, Misfit):
        raise ValueError(f"the graph does not hold for this batch: other {inputs}")
    model.zero_grad()
    module = captured.graph.module
    names = [str(node.target) for node in module.graph.nodes if node.op == "placeholder"]
    results = module(*(inputs[name] for name in names))
    loss = results[0] / results[1] if captured.graph.loss.per_token else results[0]
    loss.backward()
    return _outcome(model, loss)


class Misfit(StrEnum):
    """Why a graph does not hold for a batch."""

    SIZES = "sizes"
    VALUES_READ = "values read"
    """The model's Python would read other values (image grids, whether the mask is all true) than during capture."""


def misfit(model: nn.Module, captured: Capture, batch: Mapping[str, Any]) -> Misfit | None:
    """Why the graph may not run `batch`; None if it may."""
    inputs = _inputs(model, captured, batch)
    return inputs if isinstance(inputs, Misfit) else None


def holds_for(model: nn.Module, captured: Capture, batch: Mapping[str, Any]) -> bool:
    """True if the graph may run `batch`."""
    return misfit(model, captured, batch) is None


def _inputs(model: nn.Module, captured: Capture, batch: Mapping[str, Any]) -> dict[str, Tensor | int] | Misfit:
    """Everything the graph takes, by name."""
    batch = completed(model, batch)
    try:
        tensors = captured.filled(batch)
    except Mismatch:
        return Misfit.VALUES_READ
    bound = captured.bound(batch, tensors)
    if bound is None:
        return Misfit.SIZES
    known = {**tensors, **captured.sizes.size_inputs(bound)}
    host = captured.host_result(known)
    return Misfit.VALUES_READ if host is None else {**known, **host.values}


def errors(got: Outcome, wanted: Outcome) -> dict[str, float]:
    """Parameter -> max|a - b| / max|b| of its gradient, as in `Difference.gradient`; infinite where it is no number."""
    largest = max((float(gradient.abs().max()) for gradient in wanted.gradients.values()), default=0.0)
    found: dict[str, float] = {}
    for name in sorted(got.gradients.keys() & wanted.gradients.keys()):
        reference = wanted.gradients[name]
        scale = max(float(reference.abs().max()), NEGLIGIBLE * largest, torch.finfo(reference.dtype).tiny)
        error = float((got.gradients[name] - reference).abs().max()) / scale
        found[name] = math.inf if math.isnan(error) else error
    return found


def difference(got: Outcome, wanted: Outcome) -> Difference:
    """Compare `got` with `wanted`, which is the reference of all relative errors."""
    found = errors(got, wanted)
    worst = max(found, key=found.__getitem__) if any(found.values()) else ""
    return Difference(
        loss=abs(got.loss - wanted.loss) / max(abs(wanted.loss), 1e-30),
        gradient=found.get(worst, 0.0),
        worst=worst,
        missing=tuple(sorted(got.gradients.keys() ^ wanted.gradients.keys())),
        identical=got.loss == wanted.loss and all(torch.equal(got.gradients[n], wanted.gradients[n]) for n in found),
    )


def _outcome(model: nn.Module, loss: Tensor) -> Outcome:
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(loss=float(loss.detach()), gradients=gradients)
