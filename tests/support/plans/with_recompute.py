"""`with_recompute`: a plan with another recomputation, its predictions as they were."""

from __future__ import annotations

from dataclasses import replace

from mmcompile.config import Recompute
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Stage


def with_recompute(plan: Plan, mode: Recompute) -> Plan:
    """The plan with one mode for all layers that have something to win. Its predictions are left as they are."""
    chains = tuple(
        replace(chain, stages=tuple(replace(stage, recompute=_all(stage, mode)) for stage in chain.stages))
        for chain in plan.chains
    )
    return replace(plan, chains=chains)


def _all(stage: Stage, mode: Recompute) -> tuple[Recompute | None, ...]:
    known = stage.recompute or ("none" if stage.has_backward else None,) * len(stage.layer_names)
    return tuple(None if own is None else mode for own in known)
