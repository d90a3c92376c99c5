"""The optimizer of one rank, and how it travels: as a class name and keyword arguments."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mmcompile.errors import CheckpointError, ConfigError
from mmcompile.runtime.optim.master_weights import HALF, MasterWeights
from mmcompile.runtime.optim.param_groups import ParameterGroup, Settings, check_settings, group_of

Hyper: TypeAlias = list[Settings]
"""Settings of each parameter group: the user's groups in their order, then the group of all other parameters."""
SchedulerFactory: TypeAlias = Callable[[torch.optim.Optimizer], LRScheduler]
MASTER = "master"
"""Key under which the optimizer state of a parameter holds its float32 master."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """Import name and keyword arguments of an optimizer class, with parameter groups and use of master weights."""

    module: str
    name: str
    arguments: Settings = field(default_factory=dict)
    groups: tuple[ParameterGroup, ...] = ()
    """Parameter groups with settings of their own; all other parameters have the settings in `arguments`."""
    master_weights: bool = False
    """True if half-precision parameters are updated through float32 masters."""

    @classmethod
    def of(
        cls,
        optimizer: Callable[..., torch.optim.Optimizer],
        groups: Iterable[ParameterGroup] = (),
        *,
        master_weights: bool = False,
    ) -> OptimizerSpec:
        """Return the description of a `torch.optim` class, or of a `functools.partial` of one.

        Raises:
            ConfigError: `optimizer` is neither, has positional or unserialisable arguments, or workers could not import it; or
                groups have settings that the optimizer does not have.
        """
        keywords: Settings = {}
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
        groups = tuple(groups)
        try:
            msgspec.msgpack.encode([keywords, groups])
        except TypeError as error:
            own = f", groups {groups}" if groups else ""
            raise ConfigError(
                f"optimizer arguments {keywords}{own} must be plain numbers, flags and text: {error}"
            ) from error
        spec = cls(
            module=target.__module__,
            name=target.__qualname__,
            arguments=dict(keywords),
            groups=groups,
            master_weights=master_weights,
        )
        if groups:
            check_settings(groups, spec.build().defaults, spec.name)
        return spec

    def build(self) -> torch.optim.Optimizer:
        """Build the optimizer, with an empty anchor parameter in each group: torch requires one, and it never has a gradient."""
        optimizer = getattr(importlib.import_module(self.module), self.name)
        # Two dims, since some optimizers take matrices only.
        groups = [{"params": [nn.Parameter(torch.empty(0, 0))], **_tuples(group.own)} for group in self.groups]
        return optimizer([*groups, {"params": [nn.Parameter(torch.empty(0, 0))]}], **_tuples(self.arguments))


class RankOptimizer:
    """The optimizer over those trainable parameters of one rank that this rank updates.

    Ranks gain parameters while training (those of an image encoder with the first batch with images), and some ranks hold none.
    So the optimizer starts without parameters; `add` adds them. It updates float32 masters of half-precision parameters, if any.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self.optimizer = spec.build()
        self.masters = MasterWeights() if spec.master_weights else None
        self._spec = spec
        self._parameters: dict[str, nn.Parameter] = {}
        self.updated: dict[str, nn.Parameter] = {}
        """Tensors that the optimizer updates, by name of the parameter: its master, or itself. Gradients are in their `.grad`."""

    def add(self, name: str, parameter: nn.Parameter) -> None:
        """Add a parameter, in the group that matches its name."""
        self._parameters[name] = self.updated[name] = parameter
        if self.masters is not None and parameter.dtype in HALF:
            self.updated[name] = self.masters.add(name, parameter)
        self.optimizer.param_groups[group_of(name, self._spec.groups)]["params"].append(self.updated[name])

    def remove(self, names: Iterable[str]) -> None:
        """Remove parameters and their optimizer state; other parameters are unchanged."""
        gone: dict[int, nn.Parameter] = {}
        for name in names:
            del self._parameters[name]
            updated = self.updated.pop(name)
            gone[id(updated)] = updated
            if self.masters is not None and name in self.masters:
                self.masters.remove(name)
        for group in self.optimizer.param_groups:
            group["params"][:] = [one for one in group["params"] if id(one) not in gone]
        for updated in gone.values():
            self.optimizer.state.pop(updated, None)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the optimizer state of parameters, as if they were never updated, and reset their masters to the parameters."""
        for name in names:
            self.optimizer.state.pop(self.updated[name], None)
            if self.masters is not None and name in self.masters:
                self.masters.load(name, self._parameters[name])

    def step(self) -> None:
        """Update all parameters that have a gradient, then drop all gradients."""
        self.optimizer.step()
        if self.masters is not None:
            self.masters.round()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Set `.grad` of all parameters and masters to None."""
        for tensor in (*self._parameters.values(), *self.updated.values()):
            tensor.grad = None

    @property
    def hyper(self) -> Hyper:
        """Settings of the optimizer's parameter groups, in order."""
        return _hyper_of(self.optimizer)

    @hyper.setter
    def hyper(self, values: Hyper) -> None:
        """Set the settings of all parameter groups, in order."""
        for group, own in zip(self.optimizer.param_groups, values, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(_tuples(own), params=parameters)

    def state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the optimizer state of parameters by `<key>/<parameter>` (as `exp_avg`), and masters by `master/<parameter>`.

        A parameter that was never updated has no state but its master.

        Raises:
            CheckpointError: the optimizer keeps a state that is not a tensor.
        """
        found: dict[str, Tensor] = {}
        for name in names:
            if self.masters is not None and name in self.masters:
                found[f"{MASTER}/{name}"] = self.masters[name].detach()
            for key, value in self.optimizer.state.get(self.updated[name], {}).items():
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
        """Overwrite the optimizer state and masters of parameters that were added; `state` has them by `<key>/<parameter>`."""
        for path, value in state.items():
            key, name = path.split("/", 1)
            if key == MASTER:
                assert self.masters is not None, f"a master of {name} came to a rank without masters"
                self.masters.load(name, value)
                continue
            updated = self.updated[name]
            group = self.optimizer.param_groups[group_of(name, self._spec.groups)]
            # Step counters stay on the CPU, as torch keeps them, unless a fused or capturable optimizer wants them near.
            near = key != "step" or bool(group.get("fused")) or bool(group.get("capturable"))
            self.optimizer.state[updated][key] = value.to(updated.device if near else "cpu", copy=True)


@dataclass(kw_only=True, slots=True)
class RankState:
    """Parameters, buffers and optimizer of one rank. They stay when stages move between ranks and a new `Worker` is made."""

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    optimizer: RankOptimizer

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters of this rank that train, by original name."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank, by original name."""
        return {**self.parameters, **self.buffers}


def parameter_of(path: str) -> str:
    """Return the parameter in a path of optimizer state: `exp_avg/model.norm.weight` -> `model.norm.weight`."""
    return path.split("/", 1)[1]


def _hyper_of(optimizer: torch.optim.Optimizer) -> Hyper:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def scheduler_after(num_steps: int, factory: SchedulerFactory, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return a scheduler after `num_steps` steps. These are run again here, since a scheduler's state may not be serialisable.

    Raises:
        ConfigError: the scheduler needs a measured value at each step.
    """
    scheduler = factory(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a measured value at each step; set engine.learning_rate yourself instead"
        )
    _advance(scheduler, num_steps)
    return scheduler


def _advance(scheduler: LRScheduler, num_steps: int) -> None:
    with warnings.catch_warnings():
        # No optimizer step comes between; there is none to lose.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(num_steps):
            scheduler.step()


class HyperSchedule:
    """Learning rate schedule on an optimizer without parameters, so that every worker can compute the settings of any step.

    Asking for steps in order costs one scheduler step each; asking for an earlier step starts the scheduler anew.

    Raises:
        ConfigError: the scheduler needs a measured value at each step.
    """

    def __init__(self, spec: OptimizerSpec, factory: SchedulerFactory | None) -> None:
        self._spec = spec
        self._factory = factory
        self._num_steps = 0
        self._optimizer, self._scheduler = self._start(0)

    def of(self, step: int) -> Hyper:
        """Return the settings of all parameter groups in a step (the first step is 1)."""
        done = step - 1
        if self._scheduler is not None and done == self._num_steps + 1:
            _advance(self._scheduler, 1)
        elif self._scheduler is not None and done != self._num_steps:
            self._optimizer, self._scheduler = self._start(done)
        self._num_steps = done
        return _hyper_of(self._optimizer)

    def _start(self, num_steps: int) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
        optimizer = self._spec.build()
        return optimizer, None if self._factory is None else scheduler_after(num_steps, self._factory, optimizer)


def _tuples(values: Settings) -> Settings:
    # Optimizers keep betas as a tuple, which JSON turns into a list.
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
