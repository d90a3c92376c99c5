"""`TensorParts`: maps the names of parameter parts held by ranks to the original names of whole parameters."""

from __future__ import annotations

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
        """Return whole tensors by original name, joined from all their parts, which must all be given."""
        found = {name: tensor for name, tensor in tensors.items() if name not in self._specs}
        for name, parts in self._by_whole(tensors).items():
            found[name] = self._joined(name, parts)
        return found

    def part_of_state(self, held: str, tensor: Tensor) -> Tensor:
        """Return the optimizer state of a part, from the state of the whole parameter.

        A state of another shape than the parameter (a step count) is the same for both.
        """
        spec = self._specs.get(held)
        return self.part(held, tensor) if spec is not None and tensor.shape == self._whole_shape(spec) else tensor

    def _by_whole(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[int, tuple[str, Tensor]]]:
        found: dict[str, dict[int, tuple[str, Tensor]]] = {}
        for name, tensor in tensors.items():
            if name in self._specs:
                spec = self._specs[name]
                found.setdefault(spec.whole_name, {})[spec.index] = (name, tensor)
        return found

    def _joined(self, whole: str, parts: Mapping[int, tuple[str, Tensor]]) -> Tensor:
        name, first = parts[min(parts)]
        spec = self._specs[name]
        assert spec.shard is not None
        if first.shape != spec.shape:
            return first
        assert len(parts) == spec.shard.count, f"{whole} is held in {spec.shard.count} parts, got {sorted(parts)}"
        return spec.shard.joined([tensor for _, (_, tensor) in sorted(parts.items())])

    @staticmethod
    def _whole_shape(spec: ParameterSpec) -> tuple[int, ...]:
        assert spec.shard is not None
        return (*spec.shape[: spec.shard.dim], spec.shard.size, *spec.shape[spec.shard.dim + 1 :])
