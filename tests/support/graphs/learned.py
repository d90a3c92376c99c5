"""Captures learned from several batches, and their comparison with the model itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from mmcompile.ir.capture import Capture
from mmcompile.ir.graph import Component
from mmcompile.ir.inputs import completed
from mmcompile.ir.replay.learned_capture import capture_learned
from mmcompile.ir.replay.learning import Learner
from support.oracles.eager import difference, eager_outcome, graph_outcome


def learned(
    model: nn.Module, batches: Sequence[Mapping[str, Tensor]], reference: Sequence[Component] | None = None
) -> Capture:
    """Capture a model from some batches; `reference`: components of an earlier capture."""
    learner = Learner(model)
    examples = [learner.see(completed(model, batch)) for batch in batches]
    return capture_learned(learner, learner.learned(examples[-1]), reference)


def check(model: nn.Module, found: Capture, batch: Mapping[str, Tensor]) -> None:
    """Compare the captured graph with the model itself on a batch for which it holds."""
    flat = completed(model, batch)
    assert found.bound(flat, found.filled(flat)) is not None
    outcome = graph_outcome(model, found, flat)
    assert (gap := difference(outcome, eager_outcome(model, batch))).within(1e-5), str(gap)
