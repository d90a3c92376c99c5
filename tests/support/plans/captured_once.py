"""Plans and stage programs of a model that is captured once, made as `mmcompile.plan` and `stage_programs` make theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from mmcompile.api import planned
from mmcompile.captured_model import CapturedModel, captured_step
from mmcompile.codegen.pipeline import with_stage_passes
from mmcompile.codegen.program import StageProgram
from mmcompile.codegen.stage_programs import lower
from mmcompile.config import PlanRequest
from mmcompile.ir.capture import Capture
from mmcompile.ir.copy import copied
from mmcompile.planner.plan.plan import Plan
from mmcompile.planning import PlanInputs


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedOnce(CapturedModel):
    """A model with a batch and its capture, of which every plan and every set of stage programs gets a copy."""

    found: Capture = field(repr=False)

    @classmethod
    def on(cls, model: nn.Module, batch: Mapping[str, Any]) -> CapturedOnce:
        """Capture the model, as it trains now, on a batch."""
        return cls(model=model, batch=batch, found=captured_step(model, batch))

    def capture(self) -> Capture:
        """Return a copy of the capture."""
        return replace(self.found, graph=copied(self.found.graph))

    def plan(self, cluster: str = "local", **options: Any) -> Plan:
        """Return the plan that `mmcompile.plan` makes with the same options; raises what it raises."""
        on_phase = options.pop("on_phase", None)
        return planned(self, PlanRequest(cluster=cluster, **options), PlanInputs.read(cluster=cluster), on_phase)

    def programs(self, plan: Plan) -> Mapping[str, StageProgram]:
        """Return the programs of a plan's stages by name."""
        return lower(with_stage_passes(self.capture(), plan), plan).programs
