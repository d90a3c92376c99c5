"""`Rates`: the optimizer's settings of any step, from its number alone."""

from __future__ import annotations

import warnings

import torch
from torch.optim.lr_scheduler import LRScheduler

from mmcompile.runtime.optim.optimizer import Hyper, OptimizerSpec, SchedulerFactory, hyper_of, scheduler_after


class Rates:
    """A scheduler on an optimizer without parameters, so that every worker can lead any step.

    Steps are usually asked for in order, which costs one step of the scheduler each; going back starts it anew.

    Raises:
        ConfigError: the scheduler needs a measured value at each step.
    """

    def __init__(self, spec: OptimizerSpec, factory: SchedulerFactory | None) -> None:
        self._spec = spec
        self._factory = factory
        self._num_steps = 0
        self._optimizer, self._scheduler = self._start(0)

    def of(self, step: int) -> Hyper:
        """Settings of a step, the first being 1."""
        done = step - 1
        if done != self._num_steps:
            if done == self._num_steps + 1 and self._scheduler is not None:
                with warnings.catch_warnings():
                    # No optimizer step comes between; there is none to lose.
                    warnings.simplefilter("ignore", UserWarning)
                    self._scheduler.step()
            elif self._scheduler is not None:
                self._optimizer, self._scheduler = self._start(done)
            self._num_steps = done
        return hyper_of(self._optimizer)

    def _start(self, num_steps: int) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
        optimizer = self._spec.build()
        return optimizer, None if self._factory is None else scheduler_after(num_steps, self._factory, optimizer)
