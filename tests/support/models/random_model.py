"""Small multimodal models made of random operations, for comparing captures with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4
STEPS: dict[str, Callable[[RandomModel, Tensor, Tensor, int, Tensor], Tensor | None]] = {}
"""Name of an operation -> function of (model, two hidden values, number, mask) that returns a new value or writes the first."""

Step = tuple[str, int, int, int]
"""(name in `STEPS`, places of two values, a number); places count from the last value, modulo the number of values."""


def step(function: Callable[[RandomModel, Tensor, Tensor, int, Tensor], Tensor | None]) -> Any:
    """Register an operation by its name."""
    STEPS[function.__name__] = function
    return function


class RandomModel(nn.Module):
    """Runs operations on hidden values [2, 4, 4], at first those of token ids and of pixels, and returns a loss on the last ones.

    Args:
        program: the operations.
        frozen: bit i freezes parameter i.
    """

    calls: Tensor
    mean: Tensor

    def __init__(self, program: Sequence[Step], frozen: int) -> None:
        super().__init__()
        self.program = program
        self.reentrant = True
        """Checkpoint in the reentrant way too, which leaves out gradients where no input has one: never in eager mode."""
        self.words = nn.Embedding(8, WIDTH)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.double().train()
        for place, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(not frozen >> place & 1)

    def linear(self, x: Tensor, number: int) -> Tensor:
        return self.linears[number % len(self.linears)](x)

    def forward(self, input_ids: Tensor, pixels: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        values = [self.words(input_ids), self.linears[0](pixels)]
        for name, first, second, number in self.program:
            places = [-1 - place % len(values) for place in (first, second)]
            made = STEPS[name](self, values[places[0]], values[places[1]], number, mask)
            if made is not None:
                values.append(made)
        logits = self.head(values[-1] + 0.5 * values[-2] + 0.25 * values[0])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@step
def linear(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    return model.linear(a, number).tanh()


@step
def product(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    return a * b


@step
def where(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    return torch.where(mask[..., None], a, b)


@step
def tied(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    return F.linear(a, model.words.weight[number % 4 : number % 4 + WIDTH])


@step
def copied(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    return a.clone() if number % 2 else a.contiguous()


@step
def view(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    return (a.transpose(1, 2), a.flip(1), a.view(4, 2, 4).permute(1, 0, 2), a.roll(1, 1))[number % 4]


@step
def detached(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    return a.detach() if number % 2 else a.detach() + b


@step
def without_gradient(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor | None:
    with torch.no_grad():
        if number % 3 == 0:
            return a * 2 + b
        a.mul_(0.5) if number % 3 == 1 else a[:, :1].add_(b[:, 1:2])
    return None


@step
def looked_at(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    with torch.no_grad():
        same = a.to(a.dtype) if number % 2 else a.contiguous()  # the very same tensor, whose gradient stays
        positive = model.linear(same, number) > 0
    return torch.where(positive, a, b)


@step
def checkpointed(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    return checkpoint(
        lambda x, y: model.linear(x, number).tanh() + y, a, b, use_reentrant=model.reentrant and bool(number % 2)
    )


@step
def added(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> None:
    a += b * 0.5


@step
def scaled(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> None:
    a.mul_(0.5) if number % 2 else a.clamp_(-1.0, 1.0)


@step
def filled(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> None:
    a.masked_fill_(mask[..., None], 0.25)


@step
def put_by_mask(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> None:
    a[mask] = b[mask] if number % 2 else b.flatten(0, 1)[0]


@step
def put_in_slice(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> None:
    a[:, number % 3 : number % 3 + 2] = b[:, :2]


@step
def added_in_view(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> None:
    views = (a.transpose(0, 1)[number % 4], a.select(2, number % 4), a.diagonal(0, 1, 2), a.permute(2, 0, 1)[1:3])
    views[number % 4].mul_(0.5)


@step
def added_by_index(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> None:
    a.index_add_(1, torch.tensor([0, number % 4], device=a.device), b[:, :2])


def _empty(a: Tensor, number: int) -> Tensor:
    makers: list[Callable[[], Tensor]] = [
        lambda: torch.zeros(a.shape, dtype=a.dtype),
        lambda: torch.zeros_like(a),
        lambda: a.new_zeros(2, 4, 4),
        lambda: torch.full((2, 4, 4), 0.5, dtype=a.dtype),
        lambda: torch.ones_like(a),
        lambda: torch.empty_like(a).zero_(),
        lambda: torch.tensor([[[0.5] * 4] * 4] * 2, dtype=a.dtype),
        lambda: a.detach().clone(),
    ]
    return makers[number % len(makers)]()


@step
def written_into_new(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    made = _empty(a, number)
    made[mask] = b[mask]
    return made


@step
def copied_into_new(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    made = _empty(a, number)
    made[:, :2].copy_(a[:, 2:])
    made[:, 2:] += b[:, :2]
    return made


@step
def scattered(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    index = torch.tensor([3, 1, 0, 2]).view(1, 4, 1).expand(2, 4, 4)
    return (a.scatter(1, index, b), a.masked_scatter(mask[..., None], b), a.scatter_add(1, index, b))[number % 3]


@step
def normalized(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    return model.norm(a.flatten(0, 1)).view(2, 4, 4)


@step
def counted(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    model.calls.add_(1)
    return a * int(mask.sum()) / 4 if number % 2 else a + model.calls


@step
def averaged(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    model.mean.lerp_(a.detach().mean((0, 1)), 0.1)
    return a - model.mean


@step
def pooled(model: RandomModel, a: Tensor, b: Tensor, number: int, mask: Tensor) -> Tensor:
    return b + a.mean(1, keepdim=True).expand(2, 4, 4) if number % 2 else b + a[mask].sum(0)


def batch(seed: int = 0) -> dict[str, Tensor]:
    """A batch for a `RandomModel`."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, 8, (2, 4), generator=draw),
        "pixels": torch.randn(2, 4, WIDTH, generator=draw, dtype=torch.float64),
        "mask": torch.tensor([[True, False, True, False], [False, True, False, False]]),
        "labels": torch.randint(0, 8, (2, 4), generator=draw),
    }
