"""`RandomValues`: random weights and activations for the check of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mmcompile.ir.graph import ParameterSpec

_PERIOD = 1_000_003
"""Number of random numbers drawn for a weight, a prime; a larger weight repeats them, since drawing more is slow."""


@dataclass(slots=True)
class RandomValues:
    """Reproducible random weights and activations, from a generator with seed 0, on which two runs of a layer are compared."""

    dtype: torch.dtype
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def like(self, value: torch.Tensor) -> torch.Tensor:
        """Return normally distributed numbers in the shape of a recorded value."""
        return torch.randn(tuple(value.shape), generator=self.generator, dtype=self.dtype)

    def weight(self, spec: ParameterSpec) -> torch.Tensor:
        """Return a random weight, uniform in a range that keeps the magnitude of activations.

        The range is 0.5 to 1.5 for vectors, and about +-1.7/sqrt(inputs) for matrices. Numbers repeat after `_PERIOD`, a prime,
        so that no two rows of a matrix are equal.
        """
        low, high = 0.5, 1.5
        if len(spec.shape) > 1:
            high = (3 / max(spec.num_elements // max(spec.shape[0], 1), 1)) ** 0.5
            low = -high
        drawn = torch.empty(min(spec.num_elements, _PERIOD), dtype=self.dtype)
        drawn.uniform_(low, high, generator=self.generator)
        if spec.num_elements <= _PERIOD:
            return drawn.view(spec.shape)
        made = torch.empty(spec.shape, dtype=self.dtype)
        for part in made.view(-1).split(_PERIOD):
            part.copy_(drawn[: len(part)])
        return made
