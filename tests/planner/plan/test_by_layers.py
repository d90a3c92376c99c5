"""What cannot be laid out layer by layer is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.plans.hand_plan import Part, hand_plan

from mmcompile.errors import PlanError
from mmcompile.planner.plan.by_layers import by_layers


def test_replicas_that_share_parameters_are_refused() -> None:
    plan = hand_plan([Part(name="vision", layers=2, stages=1), Part(name="language_model", layers=4, stages=2, dp=2)])
    assert all(chain.dp == 1 for chain in by_layers(plan).chains)
    vision, language = plan.chains
    with pytest.raises(PlanError, match=r"replicas of language_model share parameters \(fsdp\), .*: plan without fsdp"):
        by_layers(replace(plan, chains=(vision, replace(language, fsdp=True))))
