"""`LayerStore`: parameters that a worker holds, by layer; trainable ones with their optimizer state.

Trainable parameters and their state are copied between workers, as one bundle per layer. Frozen parameters are never copied: they
are in the memory from which all workers were forked, and on the CPU they are used from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from mmcompile.errors import CheckpointError, VerifyError
from mmcompile.ir.graph import ParameterSpec, dtype_name
from mmcompile.planner.resilience.job import LayerId
from mmcompile.runtime.comm import wire
from mmcompile.runtime.optim.optimizer import OptimizerSpec, RankOptimizer, RankState, parameter_of

_VALUE, _STATE = "value/", "state/"


class LayerStore:
    """Keeps the parameters and optimizer state of one worker by layer, and copies them in and out.

    Args:
        layers: parameters of each layer. A tied parameter is in several layers, under one name. Absent layers have no
            parameters.
        values: initial values of all parameters, by name. The store holds no parameters yet.

    Attributes:
        state: parameters and optimizer of the worker.
    """

    def __init__(
        self, layers: Mapping[LayerId, Sequence[ParameterSpec]], values: Mapping[str, Tensor], optimizer: OptimizerSpec
    ) -> None:
        self.state = RankState(optimizer=RankOptimizer(optimizer))
        self._specs: dict[LayerId, dict[str, ParameterSpec]] = {}
        self._values = values
        self.learn(layers)

    def learn(self, layers: Mapping[LayerId, Iterable[ParameterSpec]]) -> None:
        """Add parameters that newly captured stage programs read to the lists of each layer's parameters.

        A layer whose parameters were all in the store gets the new ones too: with initial values, as they were never trained.
        """
        held = [layer for layer in self.held if self._specs[layer]]
        for layer, specs in layers.items():
            self._specs.setdefault(layer, {}).update({spec.name: spec for spec in specs})
        self.hold(held)

    @property
    def held(self) -> frozenset[LayerId]:
        """Layers all of whose parameters are in the store, including layers without parameters."""
        here = self.state.parameters.keys()
        return frozenset(layer for layer, specs in self._specs.items() if specs.keys() <= here)

    def trains(self, layer: LayerId) -> bool:
        """Return whether a layer has trainable parameters, whose state can be lost."""
        return bool(self._trainable(layer))

    def hold(self, layers: Iterable[LayerId]) -> None:
        """Add the parameters that layers lack, with their initial values: trainable ones copied, frozen ones shared.

        Parameters in the store are unchanged. So trainable layers are added by this at the start of a run only; later they arrive
        through `put`.
        """
        for layer in layers:
            for name in self._trainable(layer):
                if name not in self.state.parameters:
                    self._add(name, self._values[name])
            self._share_frozen(layer)

    def bundle(self, layer: LayerId) -> dict[str, Tensor]:
        """Return a layer's trainable parameters (`value/<name>`) and optimizer state (`state/<key>/<name>`), without copying.

        Parameters that were never updated have no state.

        Raises:
            VerifyError: the layer is not held.
            CheckpointError: the optimizer keeps a state that is not a tensor.
        """
        names = self._trainable(layer)
        if missing := [name for name in names if name not in self.state.parameters]:
            raise VerifyError(f"layer {layer} is asked for and is not held here: {missing} are missing")
        values = {f"{_VALUE}{name}": self.state.parameters[name].detach() for name in names}
        return values | {f"{_STATE}{path}": tensor for path, tensor in self.state.optimizer.state(names).items()}

    def put(self, layer: LayerId, tensors: Mapping[str, Tensor]) -> None:
        """Store a layer's tensors, named as by `bundle`: overwrite parameters in the store, add others, replace optimizer state.

        Raises:
            VerifyError: `tensors` are not those of this layer. The store is unchanged then.
        """
        values, state = wire.under(_VALUE, tensors), wire.under(_STATE, tensors)
        names = self._trainable(layer).keys()
        got = values.keys() | {parameter_of(path) for path in state}
        if values.keys() != names or got != names:
            raise VerifyError(
                f"a bundle of {sorted(got)} came for layer {layer}; wanted parameters {sorted(names)} and their state"
            )
        for name, value in values.items():
            wanted = self._values[name]
            if value.shape != wanted.shape or value.dtype != wanted.dtype:
                raise VerifyError(
                    f"{name} of layer {layer} came as {value.dtype} {tuple(value.shape)}; "
                    f"wanted {wanted.dtype} {tuple(wanted.shape)}"
                )
        for name, value in values.items():
            if name in self.state.parameters:
                with torch.no_grad():
                    self.state.parameters[name].copy_(value)
            else:
                self._add(name, value)
        self._share_frozen(layer)
        self.state.optimizer.forget(values)
        self.state.optimizer.load_state(state)

    def part_of(self, layer: LayerId, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer's trainable parameters (`value/<name>`) and optimizer state (`state/<key>/<name>`) from a checkpoint.

        Args:
            weights: weights of the checkpoint by name; a tied parameter under any of its names.
            state: optimizer state of the checkpoint by `<key>/<name>`, such as `exp_avg/<name>`.

        Raises:
            CheckpointError: a parameter is missing.
        """
        found: dict[str, Tensor] = {}
        for name, spec in self._trainable(layer).items():
            known = next((one for one in (name, *spec.aliases) if one in weights), None)
            if known is None:
                raise CheckpointError(f"the checkpoint has no {name} of layer {layer}; it is of another model")
            found[f"{_VALUE}{name}"] = weights[known]
        names = self._trainable(layer).keys()
        return found | {f"{_STATE}{path}": t for path, t in state.items() if parameter_of(path) in names}

    def keep(self, layers: Iterable[LayerId]) -> None:
        """Drop parameters that belong only to layers not in `layers`, and their optimizer state. Other parameters are unchanged.

        Raises:
            VerifyError: a layer to keep is not held.
        """
        kept = frozenset(layers)
        if lost := sorted((kept & self._specs.keys()) - self.held):
            raise VerifyError(f"layers {', '.join(map(str, lost))} are to be kept and are not held here")
        names = {name for layer in kept for name in self._specs.get(layer, ())}
        self._drop({name for specs in self._specs.values() for name in specs} - names)

    def clear(self) -> None:
        """Drop all parameters and their optimizer state."""
        self._drop(self.state.parameters.keys())

    def digest(self, layer: LayerId) -> str:
        """Return a digest of the bits of a layer's parameters and optimizer state. Raises VerifyError if it is not held."""
        return digest_of(self.bundle(layer))

    def _trainable(self, layer: LayerId) -> dict[str, ParameterSpec]:
        return {name: spec for name, spec in self._specs.get(layer, {}).items() if spec.trainable}

    def _add(self, name: str, value: Tensor) -> None:
        self.state.parameters[name] = nn.Parameter(value.detach().to("cpu", copy=True))
        self.state.optimizer.add(name, self.state.parameters[name])

    def _share_frozen(self, layer: LayerId) -> None:
        for name, spec in self._specs.get(layer, {}).items():
            if not spec.trainable and name not in self.state.parameters:
                value = self._values[name].detach().cpu()
                self.state.parameters[name] = nn.Parameter(value, requires_grad=False)

    def _drop(self, names: Iterable[str]) -> None:
        gone = {name: self.state.parameters[name] for name in names if name in self.state.parameters}
        self.state.optimizer.remove([name for name, parameter in gone.items() if parameter.requires_grad])
        for name in gone:
            del self.state.parameters[name]


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a BLAKE2b digest of names, shapes, dtypes and bytes, independent of the mapping's order and of memory layouts."""
    table = [(name, tuple(tensors[name].shape), dtype_name(tensors[name].dtype)) for name in sorted(tensors)]
    digest = hashlib.blake2b(wire.encode(table), digest_size=32)
    for name in sorted(tensors):
        digest.update(bytes_of(tensors[name]).numpy().data)
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor (uint8 [bytes], CPU), elements in index order; shares memory with a contiguous CPU tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
