"""What the layers of a plan compute again in their backward, put in words and changed as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from mmcompile.config import Recompute
from mmcompile.errors import PlanError

if TYPE_CHECKING:
    from mmcompile.planner.plan.plan import Plan, Stage


def uniform_mode(stages: Iterable[Stage]) -> Recompute | Literal["mixed"]:
    """The mode of all layers that have something to win; `"none"` if there are none."""
    modes: set[Recompute] = {mode for stage in stages for mode in stage.modes.values()}
    if len(modes) > 1:
        return "mixed"
    return modes.pop() if modes else "none"


def recompute_text(stages: Iterable[Stage]) -> str:
    """`"full"`, or of how many layers: `"selective 2, full 3 of 8 layers"`. Those with nothing to win are not counted."""
    stages = tuple(stages)
    mode = uniform_mode(stages)
    if mode != "mixed":
        return mode
    counts = Counter(mode for stage in stages for mode in stage.modes.values())
    kinds: tuple[Recompute, ...] = ("selective", "full")
    each = ", ".join(f"{kind} {counts[kind]}" for kind in kinds if counts[kind])
    return f"{each} of {counts.total()} layers"


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


def check_modes(plan: Plan) -> None:
    """Raise PlanError where a stage says it for more or fewer layers than it has."""
    for stage in plan.stages:
        if stage.recompute and len(stage.recompute) != len(stage.layer_names):
            raise PlanError(
                f"stage {stage.name} says for {len(stage.recompute)} layers what they compute again, and has "
                f"{len(stage.layer_names)}"
            )
