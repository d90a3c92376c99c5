"""`mmcompile explain`: everything about one stage or layer of a plan."""

from __future__ import annotations

from typing import Annotated

import typer

from mmcompile import api
from mmcompile.captured_model import CapturedModel, fingerprint_of
from mmcompile.cli.config_options import typed_options, with_config
from mmcompile.cli.console import busy, print_result
from mmcompile.cli.model import load_captured
from mmcompile.cli.options import MODEL_HELP, OF_MODEL, JsonOption, PlanOption
from mmcompile.config import ExampleConfig, ModelConfig
from mmcompile.errors import ConfigError
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.pipeline import analyse
from mmcompile.planner.plan.plan import Plan, check_fingerprint
from mmcompile.report.explain import Explanation
from mmcompile.report.explain import explain as explained
from mmcompile.report.layer_work import layer_shares, layer_work


@with_config
def explain(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="STAGE|LAYER",
            help="A stage (language_model.0); or a layer: its module path, component.index, or a pattern matching one.",
            show_default=False,
        ),
    ],
    plan: PlanOption,
    example: ExampleConfig,
    config: Annotated[ModelConfig, ("train", "dtype")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help=f"Captured again for what each layer does; without it the plan file alone is read. {MODEL_HELP}",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Explain a stage or layer of a plan: what it does, why it is there, what it waits for, and what a move would change."""
    loaded = Plan.load(plan)
    if model is None:
        for name, option in typed_options(context).items():
            if name in OF_MODEL:
                raise ConfigError(f"{option} has no effect without MODEL: the plan file alone is read")
        found = explained(loaded, what)
    else:
        found = _with_model(loaded, what, load_captured(model, config, example))
    print_result(json, found, str(found))


def _with_model(plan: Plan, what: str, subject: CapturedModel) -> Explanation:
    with busy("capturing"):
        graph = api.capture(subject.model, subject.batch)
    check_fingerprint(plan, fingerprint_of(graph))
    table, dtype = analyse(Cost(), graph), graph.main_dtype
    shares, work = layer_shares(plan, table, dtype), layer_work(graph, table, plan.cluster, dtype)
    return explained(plan, what, shares, work)
