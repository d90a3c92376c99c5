"""`TensorParts`: parameters of which each rank holds a part, between the names they are held under and those of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from mmcompile.ir.graph import ParameterSpec


@dataclass(frozen=True, slots=True)
class TensorParts:
    """Parts by the name they are held under (`lm_head.weight@1`). Tensors known by any other name are whole."""

    _specs: dict[str, ParameterSpec] = field(default_factory=dict)

    def note(self, spec: ParameterSpec) -> None:
        """Learn of a parameter that is held."""
        if spec.shard is not None:
            self._specs[spec.name] = spec

    def whole_name(self, held: str) -> str:
        """Return the original name of a parameter that is held under a name."""
        return self._specs[held].whole_name if held in self._specs else held

    def part(self, held: str, tensor: Tensor) -> Tensor:
        """Return the part of a whole tensor that is held under a name."""
        spec = self._specs.get(held)
        return tensor if spec is None or spec.shard is None else spec.shard.part(tensor, spec.index)

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by the model's names. All parts of each must be there."""
        found = {name: tensor for name, tensor in tensors.items() if name not in self._specs}
        for name, parts in self._by_whole(tensors).items():
            found[name] = self._joined(name, parts)
        return found

    def part_of_state(self, held: str, tensor: Tensor) -> Tensor:
        """A state of the optimizer for what is held, of that for the whole; a number (a count of steps) is the same for both."""
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
