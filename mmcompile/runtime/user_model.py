"""`UserModel`: the module a user gave, or what stands for it: its names, and its weights before and after training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmcompile.errors import CheckpointError
from mmcompile.runtime.checkpoint import Checkpoint
from mmcompile.runtime.optimizer import OptimizerSpec
from mmcompile.runtime.source import PatternSource


@dataclass(frozen=True, kw_only=True, slots=True)
class UserModel:
    """Weights under the names that the model has for them (rank 0)."""

    module: nn.Module | None
    source: PatternSource
    """Holds the parameters, of the module or without one."""

    def complete(self, weights: Mapping[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
        """All names of the model: trained weights, and what never changes from the model itself, on the CPU.

        Args:
            weights: trained, by the name they are held under.
            aliases: other name of a tied parameter -> that name.
        """
        kept = self.source.parameters() if self.module is None else self.module.state_dict()
        return {name: weights.get(aliases.get(name, name), tensor).detach().cpu() for name, tensor in kept.items()}

    def trainable(self, complete: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters that train, each under one name; also those no step has reached yet."""
        tied = self.tied()
        parameters = self.source.parameters()
        return {name: complete[name] for name, t in parameters.items() if t.requires_grad and name not in tied}

    def tied(self) -> dict[str, str]:
        """Further name of a parameter -> its first one, under which `trainable` has it."""
        first: dict[int, str] = {}
        parameters = self.source.parameters()
        for name, tensor in parameters.items():
            first.setdefault(id(tensor), name)
        return {name: first[id(tensor)] for name, tensor in parameters.items() if first[id(tensor)] != name}

    @torch.no_grad()
    def put(self, weights: Mapping[str, Tensor]) -> None:
        """Write trained weights into the model; tied names share storage."""
        parameters = self.source.parameters()
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)

    def check(self, content: Checkpoint, optimizer: OptimizerSpec, folder: str | os.PathLike[str]) -> None:
        """Refuse a checkpoint of another model or optimizer.

        Raises:
            CheckpointError: naming what the checkpoint has and what the model or engine has.
        """
        parameters = self.source.parameters()
        saved = content.trainer.optimizer
        if (saved.module, saved.name) != (optimizer.module, optimizer.name):
            raise CheckpointError(f"{folder} was saved with {saved.name}, this engine has {optimizer.name}")
        for name, tensor in content.weights.items():
            if name not in parameters:
                raise CheckpointError(
                    f"{folder} trains {name}, which this model does not have: it belongs to another model"
                )
            if (have := parameters[name]).shape != tensor.shape or have.dtype != tensor.dtype:
                raise CheckpointError(
                    f"{folder} has {name} as {tensor.dtype} {tuple(tensor.shape)}; "
                    f"this model has {have.dtype} {tuple(have.shape)}"
                )
