"""AdamW with two parameter groups beside the rest, each with a learning-rate schedule of its own."""

from __future__ import annotations

import functools

import torch

from mmcompile.runtime.optim.param_groups import ParameterGroup

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
GROUPS = (
    ParameterGroup(match="vision", lr=1e-3, settings={"betas": (0.8, 0.9)}),
    ParameterGroup(match=("*.bias", "embed"), weight_decay=0.0),
)
RATES = (lambda step: 1 / (1 + step), lambda step: 0.5**step, lambda step: 1.0 + 0.1 * step)


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, list(RATES))
