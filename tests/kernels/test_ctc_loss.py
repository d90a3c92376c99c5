"""The CTC loss of our ops against torch's: every bit of loss and gradient, and a graph that holds for other targets."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from support.oracles.eager import difference, eager_outcome, graph_outcome, holds_for
from torch import Tensor, nn

from mmcompile.ir.capture import capture
from mmcompile.kernels.ctc_loss import ctc_loss, ctc_losses

STEPS, BATCH, CLASSES = 12, 3, 6


def _given(lengths: list[int], *, padded: bool) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(1, CLASSES, (BATCH, max(lengths)), generator=draw)
    return {
        "log_probs": torch.randn(STEPS, BATCH, CLASSES, generator=draw).log_softmax(2).requires_grad_(),
        "targets": targets if padded else torch.cat([row[:n] for row, n in zip(targets, lengths, strict=True)]),
        "input_lengths": torch.tensor([12, 9, 7]),
        "target_lengths": torch.tensor(lengths),
    }


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("lengths", [[4, 2, 3], [1, 0, 12]], ids=["fits", "empty, and too long"])
@pytest.mark.parametrize("zero_infinity", [True, False])
def test_bits_are_those_of_torch(
    reduction: Literal["none", "mean", "sum"], padded: bool, lengths: list[int], zero_infinity: bool
) -> None:
    options: dict[str, Any] = {"reduction": reduction, "zero_infinity": zero_infinity}
    results: list[tuple[Tensor, Tensor | None]] = []
    for function in (ctc_loss, F.ctc_loss):
        given = _given(lengths, padded=padded)
        loss = function(**given, **options)
        loss.sum().backward()
        results.append((loss, given["log_probs"].grad))
    for got, wanted in zip(*results, strict=True):
        assert got is not None and wanted is not None and torch.equal(got.nan_to_num(), wanted.nan_to_num())


def test_the_op_is_a_custom_op() -> None:
    given = _given([4, 2, 3], padded=True)
    torch.library.opcheck(ctc_losses, (*given.values(), 0, False))


class Listener(nn.Module):
    """Frames to classes, with lengths from a mask and from labels, as speech models of transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, input_values: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        log_probs = self.layers(input_values).log_softmax(-1).transpose(0, 1)
        kept = labels >= 0
        return {"loss": F.ctc_loss(log_probs, labels.masked_select(kept), attention_mask.sum(-1), kept.sum(-1))}


def _spoken(labels: list[list[int]], seed: int) -> dict[str, Tensor]:
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 7 + seed :] = 0
    frames = torch.randn(2, 10, 4, generator=torch.Generator().manual_seed(seed))
    return {"input_values": frames, "attention_mask": mask, "labels": torch.tensor(labels)}


def test_captures_hold_for_other_lengths_of_as_many_labels() -> None:
    model = Listener()
    captured = capture(model, _spoken([[1, 2, 3], [4, -100, -100]], seed=0))
    for other in (_spoken([[1, 2, 3], [4, -100, -100]], seed=0), _spoken([[1, 2, -100], [4, 5, -100]], seed=1)):
        assert holds_for(model, captured, other)
        assert difference(graph_outcome(model, captured, other), eager_outcome(model, other)).identical
    assert not holds_for(model, captured, _spoken([[1, 2, 3], [4, 5, -100]], seed=1)), "another number of labels"
