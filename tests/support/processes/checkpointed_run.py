"""An engine over hand-written stages whose ranks write checkpoints and may be killed meanwhile."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping

import torch

from mmcompile.data.collate import Sample
from mmcompile.planner.plan.placement import Placement
from mmcompile.runtime.engine import Engine
from mmcompile.runtime.monitoring.fail_points import VARIABLE
from support.graphs.hand_stages import HandModel, HandSource, hand_samples
from support.graphs.hand_stages import hand_plan as hand_plan

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
KINDS = ((), (1, 2), (0,))


def batch_of(step: int) -> list[Sample]:
    return hand_samples(4, images=KINDS[step % 3], seed=step)


def new_engine(plan: Placement, **options: object) -> Engine:
    torch.manual_seed(0)
    model = HandModel(tied=True)
    return Engine(plan, HandSource(model), model=model, optimizer=ADAMW, clip_norm=1.0, **options)  # type: ignore[arg-type]


def set_strike(strike: Mapping[str, object]) -> None:
    """From now on, in this process."""
    os.environ[VARIABLE] = json.dumps([strike])
