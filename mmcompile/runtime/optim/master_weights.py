"""`MasterWeights`: float32 copies of half-precision parameters, which the optimizer updates in their place.

A bfloat16 number has 8 bits of precision, so an update of less than 1/512 of a parameter is lost when it is added to it. The
optimizer therefore adds to a float32 *master*, and the parameter that forwards read is the master rounded, after every update.
(Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.1.)
"""

# pyright: reportPrivateImportUsage=false
# torch re-exports the functions its optimizers are built on without saying so.

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import final

import torch
from torch import Tensor, nn

from mmcompile.errors import ConfigError

HALF = frozenset({torch.bfloat16, torch.float16})
"""Dtypes whose parameters have float32 masters; parameters of other dtypes are updated directly."""


@final
class MasterWeights(Mapping[str, nn.Parameter]):
    """Float32 masters by name of their half-precision parameter. Gradients are left in the masters' `.grad`, in float32."""

    def __init__(self) -> None:
        self._masters: dict[str, nn.Parameter] = {}
        self._parameters: dict[str, nn.Parameter] = {}

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._masters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masters)

    def __len__(self) -> int:
        return len(self._masters)

    def add(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Make and return the master of a half-precision parameter, with the parameter's current value."""
        self._parameters[name] = parameter
        self._masters[name] = nn.Parameter(parameter.detach().float())
        return self._masters[name]

    def remove(self, name: str) -> None:
        """Remove a parameter and its master from this mapping."""
        del self._masters[name], self._parameters[name]

    @torch.no_grad()
    def load(self, name: str, value: Tensor) -> None:
        """Set a master to the value of its parameter, or to one from another rank or a checkpoint. The parameter is unchanged."""
        self._masters[name].copy_(value)

    @torch.no_grad()
    def round(self) -> None:
        """Round the masters that have a gradient, which the optimizer updated, to their parameters."""
        changed = [name for name, master in self._masters.items() if master.grad is not None]
        if changed:
            parameters: list[Tensor] = [self._parameters[name] for name in changed]
            masters: list[Tensor] = [self._masters[name] for name in changed]
            torch._foreach_copy_(parameters, masters)  # pyright: ignore[reportPrivateUsage]


def given_masters(
    trainable: Mapping[str, Tensor], known: Collection[str], given: bool | Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the initial masters by name, from the `master_weights` argument of a user.

    Args:
        trainable: parameters by original name, tied ones once.
        known: all parameter names of the model.
        given: True for no initial values, or float32 values by name; values of parameters without masters are left out.

    Raises:
        ConfigError: no parameter would have a master; or a value is not float32, belongs to no parameter, or rounds to another
            value than its parameter has.
    """
    half = {name: tensor for name, tensor in trainable.items() if tensor.dtype in HALF}
    if not half:
        dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in trainable.values()}))
        raise ConfigError(
            f"master_weights has no effect: no parameter that trains is bfloat16 or float16 (they are {dtypes}); cast the model "
            "before it is captured (model.to(torch.bfloat16)), or leave it out"
        )
    if isinstance(given, bool):
        return {}
    if unknown := sorted(given.keys() - set(known)):
        raise ConfigError(f"master_weights has {', '.join(unknown[:5])}, which the model does not have")
    masters = {name: given[name].detach() for name in half if name in given}
    for name, value in masters.items():
        parameter = half[name]
        if value.dtype != torch.float32 or value.shape != parameter.shape:
            raise ConfigError(
                f"master_weights has {name} as {value.dtype} {tuple(value.shape)}; wanted float32 {tuple(parameter.shape)}"
            )
        if not torch.equal(value.to(parameter.device, parameter.dtype), parameter.detach()):
            raise ConfigError(
                f"the value of {name} in master_weights does not round to what the model has: take it from the model before it "
                "is cast, and change neither afterwards"
            )
    return masters
