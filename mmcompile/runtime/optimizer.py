"""The optimizer of one rank, and how it travels: as a class name and keyword arguments."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mmcompile.errors import CheckpointError, ConfigError

Hyper: TypeAlias = dict[str, Any]
"""What an optimizer's parameter group holds besides its parameters: learning rate, betas, ... (all plain JSON)."""
SchedulerFactory: TypeAlias = Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """An optimizer class by name, with keyword arguments."""

    module: str
    name: str
    arguments: Hyper = field(default_factory=dict)

    @classmethod
    def of(cls, optimizer: Callable[..., torch.optim.Optimizer]) -> OptimizerSpec:
        """Describe a `torch.optim` class, or a `functools.partial` of one.

        Raises:
            ConfigError: it is neither, has positional or unserialisable arguments, or workers could not import it.
        """
        keywords: Hyper = {}
        target: object = optimizer
        if isinstance(optimizer, functools.partial):
            if optimizer.args:
                raise ConfigError(f"optimizer has positional arguments {optimizer.args}; pass them by keyword")
            target, keywords = optimizer.func, optimizer.keywords
        if not (isinstance(target, type) and issubclass(target, torch.optim.Optimizer)):
            raise ConfigError(
                f"optimizer is {optimizer!r}; wanted a torch.optim class, or functools.partial(torch.optim.AdamW, lr=1e-4)"
            )
        if target.__module__ == "__main__" or target is torch.optim.LBFGS:
            raise ConfigError(
                f"optimizer {target.__qualname__} cannot run in other processes: use one from an importable module"
            )
        try:
            msgspec.msgpack.encode(keywords)
        except TypeError as error:
            raise ConfigError(
                f"optimizer arguments {keywords} must be plain numbers, flags and text: {error}"
            ) from error
        return cls(module=target.__module__, name=target.__qualname__, arguments=dict(keywords))

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = getattr(importlib.import_module(self.module), self.name)
        return optimizer(list(parameters), **_tuples(self.arguments))


class RankOptimizer:
    """The optimizer over the trainable parameters that one rank holds.

    Ranks gain parameters while training (a pattern with images arrives late), and some hold none. So the optimizer
    starts with an empty anchor parameter, which never has a gradient, and parameters join its only group.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        # Two dims, since some optimizers take matrices only.
        self.optimizer = spec.build([nn.Parameter(torch.empty(0, 0))])
        self._names: dict[str, nn.Parameter] = {}

    def add(self, name: str, parameter: nn.Parameter) -> None:
        self._names[name] = parameter
        self._group["params"].append(parameter)

    def remove(self, names: Iterable[str]) -> None:
        """Let go of parameters and their state; the others are left as they are."""
        gone = {id(parameter): parameter for parameter in (self._names.pop(name) for name in names)}
        self._group["params"][:] = [one for one in self._group["params"] if id(one) not in gone]
        for parameter in gone.values():
            self.optimizer.state.pop(parameter, None)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the state of parameters, as if they were never updated."""
        for name in names:
            self.optimizer.state.pop(self._names[name], None)

    def step(self) -> None:
        """Update, then drop the gradients. Parameters without a gradient are left alone, as torch does."""
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in self._names.values():
            parameter.grad = None

    @property
    def hyper(self) -> Hyper:
        return {key: value for key, value in self._group.items() if key != "params"}

    @hyper.setter
    def hyper(self, values: Hyper) -> None:
        parameters = self._group["params"]
        self._group.clear()
        self._group.update(_tuples(values), params=parameters)

    def state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """State tensors of parameters as `<key>/<parameter>`; those never updated have none.

        Raises:
            CheckpointError: the optimizer keeps something that is not a tensor.
        """
        found: dict[str, Tensor] = {}
        for name in names:
            for key, value in self.optimizer.state.get(self._names[name], {}).items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise CheckpointError(
                        f"{type(self.optimizer).__name__} keeps {key} of {name} as {type(value).__name__}; "
                        "only tensors can be saved"
                    )
                found[f"{key}/{name}"] = value
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of `state`, for parameters already added."""
        for path, value in state.items():
            key, name = path.split("/", 1)
            parameter = self._names[name]
            # Step counters stay on the CPU, as torch keeps them, unless a fused or capturable optimizer wants them near.
            near = key != "step" or bool(self._group.get("fused")) or bool(self._group.get("capturable"))
            self.optimizer.state[parameter][key] = value.to(parameter.device if near else "cpu", copy=True)

    @property
    def _group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]


def scheduler_after(num_steps: int, factory: SchedulerFactory, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """A scheduler as it stands after so many steps, replayed rather than stored: its state need not be plain.

    Raises:
        ConfigError: it needs a measured value at each step.
    """
    scheduler = factory(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a measured value at each step; set engine.learning_rate yourself instead"
        )
    with warnings.catch_warnings():
        # No optimizer step comes between; there is none to lose.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(num_steps):
            scheduler.step()
    return scheduler


def _tuples(values: Hyper) -> Hyper:
    """msgpack and JSON know lists only; optimizers keep betas as a tuple."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
