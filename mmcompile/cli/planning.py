"""Plans and datasets of commands, with a spinner while they are made."""

from __future__ import annotations

from mmcompile import api
from mmcompile.captured_model import CapturedModel
from mmcompile.cli.console import busy, counting
from mmcompile.config import PlanRequest
from mmcompile.data.readers import read_stats
from mmcompile.data.stats import DatasetStats
from mmcompile.planner.plan.plan import Plan
from mmcompile.planning import PlanInputs

WITH_PLAN = "together with --plan: the plan decides it"
"""Part of an error message: the reason why options of a `PlanRequest` are refused if a plan is given."""


def read_dataset(source: str) -> DatasetStats:
    """Return the statistics of a dataset, while a spinner shows the number of samples read."""
    with counting(f"reading {source}") as progress:
        return read_stats(source, progress=progress)


def read_inputs(request: PlanRequest) -> PlanInputs:
    """Return the inputs that a request names as text or as file paths: cluster, statistics, calibration, constraints."""
    return PlanInputs.read(
        cluster=request.cluster,
        stats=None if request.stats is None else read_dataset(request.stats),
        calibration=request.calibration,
        constraints=request.constraints,
    )


def make_plan(
    subject: CapturedModel, request: PlanRequest, inputs: PlanInputs, timing: dict[str, float] | None = None
) -> Plan:
    """Capture `subject`, a model with a batch, and return the plan that the search finds; show a spinner meanwhile.

    Args:
        timing: dict to which each phase of planning adds its name -> its seconds; None if not needed.
    """
    seconds = {} if timing is None else timing
    with busy("capturing and planning"):
        return api.planned(subject, request, inputs, seconds.__setitem__)
