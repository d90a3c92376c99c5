"""Plain training of the eager model in one process: what every split over processes must reproduce.

A step's loss is the sum of cross-entropies over all its valid target tokens, divided once by their number:

    loss = 1/N * sum over microbatches, rows b and positions t with labels[b, t+1] != -100 of
           -log softmax(logits[b, t])[labels[b, t+1]]

It is computed here from the logits, in their own dtype, since the losses inside transformers models round float64 logits to
float32 and average within a microbatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmcompile.data.collate import Sample, collate
from mmcompile.errors import BatchError

IGNORE = -100
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """What a few steps of training produced."""

    losses: tuple[float, ...]
    """Of each step: mean over its valid tokens, before the update."""
    num_tokens: tuple[int, ...]
    parameters: dict[str, Tensor]
    """After the last step, by original name, tied names too."""
    first_gradients: dict[str, Tensor]
    """Of the first step; parameters without a gradient are absent."""


def train(
    model: nn.Module,
    steps: Iterable[Sequence[Sample]],
    *,
    num_microbatches: int,
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW,
) -> TrainingRun:
    """Train `model` in place.

    Args:
        model: returns `logits` [samples, tokens, vocabulary] that predict the next token.
        steps: the samples of each step, each a batch of one.
        num_microbatches: microbatches of a step, as the engine splits them.
        optimizer: made once over all trainable parameters.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chosen = optimizer(trained)
    losses: list[float] = []
    counts: list[int] = []
    first: dict[str, Tensor] = {}
    for samples in steps:
        loss, count = accumulate(model, samples, num_microbatches)
        losses.append(loss)
        counts.append(count)
        if not first:
            first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        chosen.step()
        chosen.zero_grad()
    return TrainingRun(
        losses=tuple(losses),
        num_tokens=tuple(counts),
        parameters={name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)},
        first_gradients=first,
    )


def accumulate(model: nn.Module, samples: Sequence[Sample], num_microbatches: int) -> tuple[float, int]:
    """Add the gradients of one step's loss to `.grad`; return the loss and the number of valid tokens."""
    groups = split_microbatches(len(samples), num_microbatches)
    batches = [collate([samples[index] for index in group]) for group in groups]
    labels = [batch["labels"] for batch in batches if isinstance(batch["labels"], Tensor)]
    count = sum(int((_targets(label) != IGNORE).sum()) for label in labels)
    total = 0.0
    for batch, label in zip(batches, labels, strict=True):
        loss_sum = token_loss_sum(model(**batch)["logits"], label)
        if loss_sum.requires_grad:  # not where everything that trains sits behind media this microbatch lacks
            (loss_sum / count).backward()
        total += float(loss_sum.detach())
    return total / count, count


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of cross-entropy over valid targets, in float32 or wider; `labels` [samples, tokens] are not shifted yet."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide[:, :-1].flatten(0, 1), _targets(labels), ignore_index=IGNORE, reduction="sum")


def _targets(labels: Tensor) -> Tensor:
    """Labels of the next tokens, [samples * (tokens - 1)]."""
    return labels[:, 1:].flatten()


def split_microbatches(num_samples: int, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous, near-equal groups of sample positions; the first ones are larger by one.

    With fewer samples than microbatches there are as many microbatches as samples.
    """
    if num_samples < 1:
        raise BatchError("a step needs at least one sample, got an empty list")
    count = min(num_samples, num_microbatches)
    size, larger = divmod(num_samples, count)
    bounds = [i * size + min(i, larger) for i in range(count + 1)]
    return tuple(tuple(range(first, last)) for first, last in zip(bounds, bounds[1:], strict=False))
