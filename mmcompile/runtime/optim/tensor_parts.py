"""`TensorParts`: maps the names of parameter parts held by ranks to the original names of whole parameters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from mmcompile.ir.graph import ParameterSpec


@dataclass(frozen=True, slots=True)
class TensorParts:
    """Translates names and tensors between parameters' parts, held under names such as `lm_head.weight@1`, and whole parameters.

    Tensors of any other name are whole.
    """

    _specs: dict[str, ParameterSpec] = field(default_factory=dict)

    def note(self, spec: ParameterSpec) -> None:
        """Record a parameter that a rank holds, if it is a part."""
        if spec.shard is not None:
            self._specs[spec.name] = spec

    def whole_name(self, held: str) -> str:
        """Return the original name of the parameter that is held, whole or in part, under the name `held`."""
        return self._specs[held].whole_name if held in self._specs else held

    def part(self, held: str, tensor: Tensor) -> Tensor:
        """Return the part of the whole tensor that is held under the name `held`; the whole tensor if it is not split."""
        spec = self._specs.get(held)
        return tensor if spec is None or spec.shard is None else spec.shard.part(tensor, spec.index)

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole parameters by original name, joined from all their parts, which must all be given."""
        found = {name: tensor for name, tensor in tensors.items() if name not in self._specs}
        specs = [spec for name, spec in self._specs.items() if name in tensors]
        specs.sort(key=lambda spec: (spec.whole_name, spec.index))
        for whole, same in itertools.groupby(specs, lambda spec: spec.whole_name):
            parts = list(same)
            shard = parts[0].shard
            assert shard is not None and len(parts) == shard.count, f"{whole} needs all its parts, got {len(parts)}"
            found[whole] = shard.joined([tensors[spec.name] for spec in parts])
        return found

    def part_of_state(self, held: str, tensor: Tensor) -> Tensor:
        """Return the optimizer state of a part, from the state of the whole parameter.

        A state of another shape than the parameter (a step count) is the same for both.
        """
        spec = self._specs.get(held)
        if spec is None or (shard := spec.shard) is None:
            return tensor
        whole = (*spec.shape[: shard.dim], shard.size, *spec.shape[shard.dim + 1 :])
        return self.part(held, tensor) if tensor.shape == whole else tensor
