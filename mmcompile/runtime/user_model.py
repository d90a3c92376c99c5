"""`UserModel`: names and weights of the user's module (without one, of the program source), before and after training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmcompile.codegen.program import ProgramSource
from mmcompile.errors import CheckpointError
from mmcompile.ir.graph import torch_dtype
from mmcompile.runtime.checkpoint.index import weight_key
from mmcompile.runtime.checkpoint.pieces import whole_piece
from mmcompile.runtime.checkpoint.trainer_state import Stored, fingerprint
from mmcompile.runtime.optim.master_weights import given_masters
from mmcompile.runtime.optim.optimizer import OptimizerSpec
from mmcompile.runtime.optim.param_groups import check_matches


@dataclass(frozen=True, kw_only=True, slots=True)
class UserModel:
    """Reads and writes the weights of the user's model by their original names. Used on rank 0 only."""

    module: nn.Module | None
    source: ProgramSource
    """Source of stage programs; if the user gave no module, also of the model's parameters."""

    def complete(self, weights: Mapping[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
        """Return the tensors of all names of the model, on the CPU: trained weights, and unchanged tensors from the model itself.

        Args:
            weights: trained weights, by the name they are held under.
            aliases: name under which a tied parameter is held, by each of its other names.
        """
        kept = self.source.parameters() if self.module is None else self.module.state_dict()
        return {name: weights.get(aliases.get(name, name), tensor).detach().cpu() for name, tensor in kept.items()}

    def trainable(self, complete: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in `complete` of all parameters that train; a tied one is under its first name only."""
        tied = self.tied()
        parameters = self.source.parameters()
        return {name: complete[name] for name, t in parameters.items() if t.requires_grad and name not in tied}

    def frozen(self) -> dict[str, str]:
        """Return the fingerprint of each parameter that does not train, by name; a tied one is under its first name only."""
        tied = self.tied()
        return {
            name: fingerprint(parameter)
            for name, parameter in self.source.parameters().items()
            if isinstance(parameter, nn.Parameter) and not parameter.requires_grad and name not in tied
        }

    def tied(self) -> dict[str, str]:
        """Return the first name of a tied parameter (the one in `trainable`), by each of its further names."""
        first: dict[int, str] = {}
        parameters = self.source.parameters()
        for name, tensor in parameters.items():
            first.setdefault(id(tensor), name)
        return {name: first[id(tensor)] for name, tensor in parameters.items() if first[id(tensor)] != name}

    def masters_for(self, optimizer: OptimizerSpec, given: bool | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the initial float32 masters by name, from `given`, the user's argument `master_weights`.

        Raises:
            ConfigError: parameter groups or masters refer to parameters that do not exist.
        """
        known, tied = self.source.parameters(), self.tied()
        once = {name: t for name, t in known.items() if isinstance(t, nn.Parameter) and name not in tied}
        trainable = {name: parameter for name, parameter in once.items() if parameter.requires_grad}
        check_matches(optimizer.groups, trainable, once.keys() - trainable.keys())
        return given_masters(trainable, known.keys(), given) if optimizer.master_weights else {}

    @torch.no_grad()
    def put(self, weights: Mapping[str, Tensor]) -> None:
        """Write trained weights into the model, in place: a write under one name of a tied parameter changes all its names."""
        parameters = self.source.parameters()
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)

    def check_weights(self, stored: Stored) -> None:
        """Check that the weights in a checkpoint have the digests in its index. Raises CheckpointError."""
        # It takes most of a second to import.
        from mmcompile.runtime.checkpoint import dcp

        dcp.check_chunks(stored.place, map(weight_key, stored.index.weights), stored.index)

    @torch.no_grad()
    def read(self, stored: Stored) -> None:
        """Read trained weights from a checkpoint into the model, one after the other. Raises CheckpointError."""
        from mmcompile.runtime.checkpoint import dcp

        parameters = self.source.parameters()
        for name in stored.index.weights:
            piece = whole_piece(weight_key(name), parameters[name].detach())
            dcp.read_piece(stored.place, stored.index, piece)

    def check(self, stored: Stored, optimizer: OptimizerSpec, folder: str | os.PathLike[str]) -> None:
        """Refuse a checkpoint of another model, or of another optimizer than this engine's.

        Args:
            folder: the checkpoint's folder, for errors.

        Raises:
            CheckpointError: names the difference between the checkpoint and the model or engine.
        """
        parameters, weights = self.source.parameters(), stored.index.weights
        saved = stored.trainer.optimizer
        if (saved.module, saved.name) != (optimizer.module, optimizer.name):
            raise CheckpointError(f"{folder} was saved with {saved.name}, this engine has {optimizer.name}")
        have, wanted = ([group.match for group in spec.groups] for spec in (optimizer, saved))
        if have != wanted:
            raise CheckpointError(
                f"{folder} was saved with parameter groups {wanted or 'none'}, this engine has {have or 'none'}: give the "
                "same ones"
            )
        if saved.master_weights and not optimizer.master_weights:
            raise CheckpointError(
                f"{folder} was saved with master_weights, which this engine has not: give master_weights=True"
            )
        for name, weight in weights.items():
            dtype, shape = torch_dtype(weight.dtype), weight.shape
            if name not in parameters:
                raise CheckpointError(
                    f"{folder} trains {name}, which this model does not have: it belongs to another model"
                )
            if (have := parameters[name]).shape != shape or have.dtype != dtype:
                raise CheckpointError(
                    f"{folder} has {name} as {dtype} {shape}; this model has {have.dtype} {tuple(have.shape)}"
                )
            if isinstance(have, nn.Parameter) and not have.requires_grad:
                raise CheckpointError(
                    f"{folder} trains {name}, which this model has frozen: train it, or export() the model"
                )
        tied = self.tied()
        saved_names = {tied.get(name, name) for name in weights}
        if missing := sorted(self.trainable(parameters).keys() - saved_names):
            raise CheckpointError(
                f"this model trains {missing[0]} and {len(missing) - 1} others that {folder} does not have: it trained another "
                "part of the model: train the same, or start anew from what engine.export() wrote"
            )
        own = self.frozen()
        other = [name for name, wanted in stored.trainer.frozen.items() if name in own and own[name] != wanted]
        if other:
            raise CheckpointError(
                f"{folder} was trained with other weights that do not train: {other[0]} and {len(other) - 1} more differ in "
                "dtype, shape or values from this model's; load the model that was trained, from the same files and in the "
                "same dtype"
            )
