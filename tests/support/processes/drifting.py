"""An optimizer that is wrong: replicas of a layer drift apart."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


class DriftingSGD(torch.optim.SGD):
    """Adds something else in every process."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(os.getpid() % 1000, alpha=1e-3)
        return found
