"""What a zoo family is: a tiny random model and the batches it takes.

A family has one `inputs` function that draws a batch of any `Size`; every batch of the zoo comes from it. Numbers are
drawn from a seeded generator, so the same family gives the same batch in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Batch = dict[str, Any]
"""Inputs by the name `forward` gives them: tensors, lists and dicts of labels, the `return_loss` flag of contrastive models."""

IGNORE = -100
"""Label of a token that carries no loss."""

# `nn.Module.to(dtype)` would make complex buffers (Llama 4's rotary table) real; these leave them alone.
_CAST: dict[torch.dtype, Callable[[nn.Module], nn.Module]] = {
    torch.float64: nn.Module.double,
    torch.float32: nn.Module.float,
    torch.bfloat16: nn.Module.bfloat16,
}

_TOKEN_INPUTS = (
    "input_ids",
    "attention_mask",
    "labels",
    "token_type_ids",
    "mm_token_type_ids",
    "image_embeds_position_mask",
    "cross_attention_mask",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How large a batch is: `samples` rows of `length` tokens, `media` images or audio clips in each row."""

    samples: int
    length: int
    media: int = 1


class Draw:
    """A seeded source of float features and of text tokens."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal floats of `shape`."""
        return torch.randn(*shape, generator=self._generator)

    def tokens(self, samples: int, length: int) -> Tensor:
        """Ids of plain text tokens [samples, length]; no special token among them."""
        return torch.randint(5, 900, (samples, length), generator=self._generator)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A kind of model, as one tiny random instance and the batches it takes."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[Draw, Size], Batch]
    first: Size
    second: Size
    """Differs from `first` in samples, text length and number of media."""
    text_only: bool = False
    """`inputs` accepts a `Size` without media."""
    aligned_media: bool = False
    """Images have a sample dim, so samples with and without images cannot be in one batch."""

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """The model with random weights, in training mode, without dropout."""
        torch.manual_seed(seed)
        model = _CAST[dtype](self.model()).train()
        with torch.no_grad():
            for parameter in model.parameters():
                # Biases start at zero, norms at one and gates closed, and would hide a wrong or missing gradient.
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        return model

    def batch(self, dtype: torch.dtype = torch.float32) -> Batch:
        """The batch to capture."""
        return self.draw(self.first, seed=1, dtype=dtype)

    def second_batch(self, dtype: torch.dtype = torch.float32) -> Batch:
        """A batch of other sizes: more samples, longer text and, where the family takes it, more media a sample."""
        return self.draw(self.second, seed=2, dtype=dtype)

    def text_only_batch(self, dtype: torch.dtype = torch.float32) -> Batch:
        """A batch without media. Raises ValueError for a family that cannot do without."""
        if not self.text_only:
            raise ValueError(f"{self.name} takes no batch without media")
        return self.draw(Size(samples=self.first.samples, length=self.first.length, media=0), seed=3, dtype=dtype)

    def padded_batch(self, side: Literal["left", "right"], count: int = 5, dtype: torch.dtype = torch.float32) -> Batch:
        """`batch` with a last row that is `count` tokens shorter, padded on `side`."""
        return pad_last_row(self.batch(dtype), side=side, count=count)

    def draw(self, size: Size, *, seed: int, dtype: torch.dtype = torch.float32) -> Batch:
        """A batch of any size."""
        return cast_floats(self.inputs(Draw(seed), size), dtype)


def pad_last_row(batch: Batch, *, side: Literal["left", "right"], count: int) -> Batch:
    """Replace `count` tokens of the last row by padding: its text ends (right) or begins (left) `count` tokens later.

    The tokens that fall off must hold no placeholder.
    """
    padded = dict(batch)
    for name in _TOKEN_INPUTS:
        value = batch.get(name)
        if not isinstance(value, Tensor):
            continue
        row, filler = value[-1], torch.full_like(value[-1, :count], IGNORE if name == "labels" else 0)
        kept = row[:-count]
        new_row = torch.cat([filler, kept] if side == "left" else [kept, filler])
        padded[name] = torch.cat([value[:-1], new_row[None]])
    return padded


def cast_floats(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with every floating-point tensor in `dtype`, also those in lists and dicts."""
    return {name: _cast_value(value, dtype) for name, value in batch.items()}


def _cast_value(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {name: _cast_value(item, dtype) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cast_value(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
