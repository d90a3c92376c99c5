"""`mmcompile check`: problems of a training run, found before it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mmcompile.captured_model import CapturedModel, fingerprint_of
from mmcompile.cli.config_options import refuse_typed, with_config
from mmcompile.cli.console import busy, print_result
from mmcompile.cli.model import load_captured
from mmcompile.cli.options import STATS_HELP, JsonOption, ModelArgument
from mmcompile.cli.planning import WITH_PLAN, make_plan, read_dataset
from mmcompile.config import ExampleConfig, ModelConfig, PlanRequest
from mmcompile.costmodel.cluster import Cluster
from mmcompile.data.stats import DatasetStats
from mmcompile.errors import PlanError
from mmcompile.ir.capture import verified
from mmcompile.planner.plan.plan import Plan, check_fingerprint
from mmcompile.planning import PlanInputs
from mmcompile.report.check import CheckReport, Finding
from mmcompile.report.check import check as checked
from mmcompile.report.study import study

_FIELDS = ("cluster", "global_batch")


@with_config
def check(
    context: typer.Context,
    model: ModelArgument,
    request: Annotated[PlanRequest, _FIELDS],
    example: ExampleConfig,
    config: Annotated[ModelConfig, ("train", "dtype")],
    stats: Annotated[
        str | None, typer.Option(metavar="SOURCE", help=STATS_HELP, show_default="the example batch")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Check this plan instead of making one.", show_default=False)
    ] = None,
    numeric: Annotated[
        bool,
        typer.Option("--numeric", help="Compare loss and all gradients with eager mode; needs a model with weights."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check before training: does the worst sample fit, which stage is the straggler, what trains or only seems to?

    Exit code 1 if anything found is a problem.
    """
    if plan is not None:
        refuse_typed(context, _FIELDS, WITH_PLAN)
    loaded = None if plan is None else Plan.load(plan)
    dataset = None if stats is None else read_dataset(stats)
    subject = load_captured(model, config, example)
    found = _checked(subject, dataset, loaded, request)
    if numeric:
        with busy("comparing gradients"):
            difference = verified(subject.model, subject.batch, subject.capture())
        found = replace(found, findings=(*found.findings, Finding(severity="note", what=str(difference))))
    print_result(json, {"ok": found.ok, "findings": found.findings}, str(found))
    if not found.ok:
        raise typer.Exit(1)


def _checked(
    subject: CapturedModel, stats: DatasetStats | None, plan: Plan | None, request: PlanRequest
) -> CheckReport:
    with busy("capturing"):
        studied = study(subject.model, subject.batch, stats)
    if plan is not None:
        check_fingerprint(plan, fingerprint_of(studied.graph))
        return checked(studied, plan)
    inputs = PlanInputs(cluster=Cluster.parse(request.cluster), stats=stats if request.global_batch else None)
    try:
        return checked(studied, make_plan(subject, request, inputs))
    except PlanError as error:
        return checked(studied, None, str(error))
