"""`CarriedSums`: gradients of a step that is computed in several calls, on one rank, until the call that updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import final

import torch
from torch import Tensor, nn

from mmcompile.config import Reduction
from mmcompile.runtime.optim.arithmetic import arithmetic_of
from mmcompile.runtime.optim.gradient_bucket import Largest
from mmcompile.runtime.optim.master_weights import HALF


@final
class CarriedSums:
    """Sums over the calls of a step so far. Nothing travels to other ranks: that is left to the call that updates.

    Where gradients add up in `.grad` they stay there; else there is a sum in the numbers of the reduction for each parameter.

    Args:
        master_weights: half-precision parameters have float32 masters.
    """

    def __init__(self, reduction: Reduction, *, master_weights: bool) -> None:
        self._arithmetics = {master: arithmetic_of(reduction, master=master) for master in {False, master_weights}}
        self._master_weights = master_weights
        self._parameters: Mapping[str, nn.Parameter] = {}
        self._num_terms: Counter[str] = Counter()
        self._sums: dict[str, Tensor] = {}
        self._largest = Largest(self._arithmetics[False].limit)

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """A call follows.

        Args:
            parameters: trainable parameters of this rank, by original name; more than in the last call, perhaps.
        """
        self._parameters = parameters

    def ran(self, names: Iterable[str]) -> None:
        """A backward has run that touches these parameters."""
        for name in names:
            parameter = self._parameters[name]
            self._num_terms[name] += 1
            arithmetic = self._arithmetics[self._master_weights and parameter.dtype in HALF]
            if parameter.grad is None or not arithmetic.moves:
                continue
            gradient = parameter.grad.flatten()
            if name not in self._sums:
                shape, dtype = (len(gradient), *arithmetic.width), arithmetic.dtype(parameter.dtype)
                self._sums[name] = torch.zeros(shape, dtype=dtype, device=gradient.device)
            arithmetic.add(self._sums[name], gradient)
            self._largest.note(name, gradient)
            parameter.grad = None

    def finish(self, step: int | None = None) -> dict[str, float]:
        """The call is over. Returns what `GradientSums.finish` does."""
        return self._largest.faults()

    def num_terms(self, name: str) -> int:
        """Backwards that touched a parameter so far."""
        return self._num_terms[name]

    def take(self, name: str) -> Tensor | None:
        """The sum [elements, *width] of a parameter, which is forgotten here; None if there is none beside `.grad`."""
        return self._sums.pop(name, None)
