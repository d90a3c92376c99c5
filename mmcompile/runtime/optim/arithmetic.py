"""`Arithmetic`: number format in which gradients are added up. `arithmetic_of` returns the one of a reduction.

| reduction | sums are kept in             | bytes an element       | the sum depends on                                   |
|-----------|------------------------------|------------------------|------------------------------------------------------|
| `fast`    | the parameter's dtype        | its own                | order of microbatches on a rank, and of ranks        |
|           | float32, if it has a master  | 4                      | the same                                             |
| `fp64`    | float64, rounded once        | 8                      | the same, in the last bits of float64: almost never  |
| `fixed`   | two int64, rounded once      | 16                     | nothing but the gradients that are added             |

Sums are rounded to the parameter's dtype, or to float32 where a half-precision parameter has a float32 master
(`mmcompile.runtime.optim.master_weights`).

**Fixed point.** One int64 is not enough. At a resolution that does not show next to AdamW's epsilon of 1e-8 (2^-52 = 2e-16) it
ends at 2048, so one bad batch, which clipping would have made harmless, ends training; and optimizers with a smaller epsilon, or
none, still see gradients that it has lost. A scale of its own for each parameter would have to follow from what was committed
before, be stored and copied with it, and could still be wrong on the next step. So a gradient g is two whole numbers:

    high = round(g * 2^20),   low = round((g * 2^20 - high) * 2^44),   g = high * 2^-20 + low * 2^-64

All of it is exact in float64 but the last rounding, of at most 2^-65 = 2.7e-20. A float32 gradient of 2^-41 = 4.5e-13 or more
loses nothing, nor does a bfloat16 one of 2^-57 = 6.9e-18, nor a float64 one of 2^-12 = 2.4e-4. Gradients must be smaller than
2^23 = 8,388,608 (loss weights are global: each is a microbatch's share of the step's), so |high| and |low| are at most 2^43, and
2^20 - 1 of them can be added. The sum of n gradients is within n * 2^-65 of the exact one; it is rounded to float64 (2^-52 of
itself), then to the parameter's dtype.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from mmcompile.config import Reduction

_HIGH_BITS = 20
_LOW_BITS = 44
_PIECE = 2**16
"""Number of elements added at a time on a CPU, so that intermediate tensors stay in the processor's cache.

Three times as fast as without pieces: measured for 4 M elements on one core of an x86 server.
"""


class Arithmetic(ABC):
    """Rule by which gradients are added up.

    A sum is a tensor [elements, *width]: `width` is () for one number an element, (2,) for two.
    """

    moves: bool
    """True if gradients are taken out of the parameter's `.grad` after every backward, so that they never accumulate there."""
    width: ClassVar[tuple[int, ...]] = ()
    limit: ClassVar[float] = math.inf
    """Exclusive upper bound of gradients that can be added, which must not be NaN either; inf: any gradient can be added."""
    max_terms: ClassVar[float] = math.inf
    """Maximum number of gradients that can be added to one parameter in a step."""

    @abstractmethod
    def dtype(self, parameter: torch.dtype) -> torch.dtype:
        """Return the dtype of the sums of a parameter's gradients."""

    @abstractmethod
    def add(self, total: Tensor, gradient: Tensor) -> None:
        """Add a gradient [elements] to a sum, in place."""

    @abstractmethod
    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the total of partial sums of one gradient, added in the order given; all have the shape [elements, *width]."""

    @abstractmethod
    def rounded(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a sum rounded to a gradient [elements] of `dtype`."""


@final
class _Float(Arithmetic):
    """Adds up the gradients of a parameter in a float dtype.

    Args:
        wide: dtype of sums: float64, or float32 for a half-precision parameter with a float32 master. None: torch sums a rank's
            gradients in the parameter's dtype; sums of several ranks are added in that dtype too, half precision in float32.
    """

    def __init__(self, wide: torch.dtype | None = None) -> None:
        self._wide = wide
        self.moves = wide is not None

    def dtype(self, parameter: torch.dtype) -> torch.dtype:
        return self._wide or parameter

    def add(self, total: Tensor, gradient: Tensor) -> None:
        if self.moves:
            total += gradient
        else:  # torch has added up the gradients of all microbatches already.
            total.copy_(gradient)

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        return _sum(parts, torch.promote_types(parts[0].dtype, torch.float32))

    def rounded(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return total.to(dtype)


@final
class Fixed(Arithmetic):
    """Sums as pairs of int64 [elements, 2]: multiples of 2^-20, and of 2^-64 for the remainder."""

    moves = True
    width = (2,)
    limit = 2.0 ** (_LOW_BITS - 1 - _HIGH_BITS)
    max_terms = 2.0 ** (64 - _LOW_BITS) - 1

    def dtype(self, parameter: torch.dtype) -> torch.dtype:
        """Return int64, for parameters of any dtype."""
        return torch.int64

    def add(self, total: Tensor, gradient: Tensor) -> None:
        """Round each element to whole multiples of 2^-20 and of 2^-64 (the remainder), and add these to the sum in place."""
        for into, piece in zip(_pieces(total), _pieces(gradient), strict=True):
            # A power of two scales without rounding, and the difference to the nearest whole number is exact, too.
            rest = piece.to(torch.float64, copy=True).mul_(2.0**_HIGH_BITS)
            high = rest.round()
            rest = rest.sub_(high).mul_(2.0**_LOW_BITS).round_()
            into[:, 0] += high.to(torch.int64)
            into[:, 1] += rest.to(torch.int64)

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the exact total of partial sums, all int64 [elements, 2]: multiples of 2^-20, and of 2^-64 for the remainder."""
        return _sum(parts, torch.int64)

    def rounded(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum scaled back to floats and rounded to the parameter's dtype."""
        result = torch.empty(len(total), dtype=dtype, device=total.device)
        for into, piece in zip(_pieces(result), _pieces(total), strict=True):
            carry = piece[:, 1] >> _LOW_BITS
            high = (piece[:, 0] + carry).to(torch.float64).mul_(2.0**-_HIGH_BITS)
            low = (piece[:, 1] - (carry << _LOW_BITS)).to(torch.float64).mul_(2.0 ** -(_HIGH_BITS + _LOW_BITS))
            into.copy_(high.add_(low))
        return result


@final
class Largest:
    """Records the largest absolute gradient element of each parameter in a step; nothing if `limit` (of elements) is infinite."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._found: dict[str, Tensor] = {}

    def note(self, name: str, gradient: Tensor) -> None:
        """Record the largest absolute element of a gradient [elements]."""
        if self._limit < math.inf and len(gradient):
            # Kept on the device: to ask for it now would wait for the backward.
            size = torch.linalg.vector_norm(gradient, math.inf)
            known = self._found.get(name)
            self._found[name] = size if known is None else torch.maximum(known, size)

    def faults(self) -> dict[str, float]:
        """Return the largest absolute element of each gradient with an element that reaches the limit or is NaN, by parameter."""
        if not self._found:
            return {}
        sizes = torch.stack(list(self._found.values())).tolist()
        return {name: size for name, size in zip(self._found, sizes, strict=True) if not size < self._limit}


def arithmetic_of(reduction: Reduction, *, master: bool = False) -> Arithmetic:
    """Return the arithmetic of a reduction by name.

    Args:
        master: the gradients are of half-precision parameters with float32 masters.
    """
    match reduction:
        case "fast":
            return _Float(torch.float32 if master else None)
        case "fp64":
            return _Float(torch.float64)
        case "fixed":
            return Fixed()


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.split(_PIECE) if tensor.device.type == "cpu" else (tensor,)


def _sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total
