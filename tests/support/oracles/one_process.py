"""Plain training of the eager model in one process: what every split over processes must reproduce.

A step's loss is the sum of cross-entropies over all its valid target tokens, divided once by their number:

    loss = 1/N * sum over microbatches, rows b and positions t with labels[b, t+1] != -100 of
           -log softmax(logits[b, t])[labels[b, t+1]]

It is computed here from the logits, in their own dtype, since the losses inside transformers models round float64 logits to
float32 and average within a microbatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmcompile.data.collate import Sample, Value, collate
from mmcompile.errors import BatchError

IGNORE = -100
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """How a model's loss is found: sums over tokens and their numbers, of one microbatch."""

    sum_of: Callable[[nn.Module, Mapping[str, Value]], Tensor]
    """Sum of the losses of all valid tokens."""
    count_of: Callable[[Mapping[str, Value]], int]
    """Number of valid tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedStep:
    """One step of training."""

    loss: float
    """Mean over the step's valid tokens, before the update."""
    num_tokens: int
    """Valid tokens."""
    norm: float
    """L2 norm of all gradients before clipping; 0 without clipping."""
    gradients: dict[str, Tensor]
    """Gradients before clipping, by original name; parameters without a gradient are absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """Some steps of training."""

    steps: tuple[TrainedStep, ...]
    parameters: dict[str, Tensor]
    """Parameters after the last step, by original name, tied names too."""

    @property
    def losses(self) -> tuple[float, ...]:
        """Loss of each step."""
        return tuple(step.loss for step in self.steps)

    @property
    def norms(self) -> tuple[float, ...]:
        """Gradient norm of each step."""
        return tuple(step.norm for step in self.steps)

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Valid tokens of each step."""
        return tuple(step.num_tokens for step in self.steps)

    @property
    def first_gradients(self) -> dict[str, Tensor]:
        """Gradients of the first step."""
        return self.steps[0].gradients


@dataclass(kw_only=True)
class OneProcess:
    """A model that one process trains in place.

    Args:
        model: trained as it is.
        optimizer: holds the parameters that train.
        scheduler: stepped after the optimizer.
        clip_norm: largest L2 norm of all gradients.
        loss: how the model's loss is found; by default from its logits.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    clip_norm: float | None = None
    loss: Loss | None = None

    def step(self, samples: Sequence[Sample], num_microbatches: int | None = None) -> TrainedStep:
        """Train one step on samples, in as many microbatches as samples unless said otherwise."""
        loss, count = accumulate(self.model, samples, num_microbatches or len(samples), self.loss or FROM_LOGITS)
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        norm = 0.0
        if self.clip_norm is not None:
            norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        return TrainedStep(loss=loss, num_tokens=count, norm=norm, gradients=gradients)


def train(
    model: nn.Module,
    steps: Iterable[Sequence[Sample]],
    *,
    num_microbatches: int | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW,
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
    clip_norm: float | None = None,
    loss: Loss | None = None,
) -> TrainingRun:
    """Train `model` in place.

    Args:
        model: unless `loss` says otherwise, returns `logits` [samples, tokens, vocabulary] that predict the next token.
        steps: the samples of each step, each a batch of one.
        num_microbatches: microbatches of a step, as the engine splits them; None: one a sample.
        optimizer: made once over all trainable parameters.
        scheduler: made once over the optimizer.
        clip_norm: largest L2 norm of all gradients.
        loss: how the model's loss is found.
    """
    chosen = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    process = OneProcess(
        model=model,
        optimizer=chosen,
        scheduler=scheduler(chosen) if scheduler is not None else None,
        clip_norm=clip_norm,
        loss=loss,
    )
    trained = tuple(process.step(samples, num_microbatches) for samples in steps)
    names = model.named_parameters(remove_duplicate=False)
    return TrainingRun(steps=trained, parameters={name: p.detach().clone() for name, p in names})


def accumulate(
    model: nn.Module, samples: Sequence[Sample], num_microbatches: int, loss: Loss | None = None
) -> tuple[float, int]:
    """Add the gradients of one step's loss to `.grad`; return the loss and the number of valid tokens."""
    loss = loss or FROM_LOGITS
    groups = split_microbatches(len(samples), num_microbatches)
    batches = [collate([samples[index] for index in group]) for group in groups]
    count = sum(map(loss.count_of, batches))
    total = 0.0
    for batch in batches:
        loss_sum = loss.sum_of(model, batch)
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


def labels_of(batch: Mapping[str, Value]) -> Tensor:
    """Labels [samples, tokens] of a batch."""
    labels = batch["labels"]
    assert isinstance(labels, Tensor)
    return labels


FROM_LOGITS = Loss(
    sum_of=lambda model, batch: token_loss_sum(model(**batch)["logits"], labels_of(batch)),
    count_of=lambda batch: int((_targets(labels_of(batch)) != IGNORE).sum()),
)
"""Loss of models that return logits; labels are shifted by one."""
RETURNED = Loss(
    sum_of=lambda model, batch: model(batch)[0], count_of=lambda batch: int((labels_of(batch) != IGNORE).sum())
)
"""Loss of models that take a batch and return its sum first; labels are not shifted."""


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
