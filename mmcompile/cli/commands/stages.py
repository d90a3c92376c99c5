"""`mmcompile stages`: the programs of a plan's stages, as source and as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from mmcompile import api
from mmcompile.cli.config_options import refuse_typed, with_config
from mmcompile.cli.console import busy, print_json, print_text
from mmcompile.cli.model import load_captured
from mmcompile.cli.options import MODEL_HELP, STAGES_FIELDS, JsonOption
from mmcompile.cli.planning import WITH_PLAN, make_plan, read_inputs
from mmcompile.codegen.program import StageProgram
from mmcompile.config import ExampleConfig, ModelConfig, PlanRequest
from mmcompile.errors import ConfigError
from mmcompile.files import write_atomic
from mmcompile.planner.plan.plan import Plan
from mmcompile.report.pictures.program_graph import program_dot, program_svg, program_text
from mmcompile.report.pictures.stage_graph import stage_graph_dot, stage_graph_svg, stage_graph_text

Form = Literal["source", "text", "dot", "svg"]
_PLAN_GRAPH: Mapping[Form, Callable[[Plan], str]] = {
    "text": stage_graph_text,
    "dot": stage_graph_dot,
    "svg": stage_graph_svg,
}


@with_config
def stages(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|MODEL",
            help=f"A plan file, for its graph of stages; or a model. {MODEL_HELP}",
            show_default=False,
        ),
    ],
    request: Annotated[PlanRequest, STAGES_FIELDS],
    example: ExampleConfig,
    config: Annotated[ModelConfig, ("train", "dtype")],
    plan: Annotated[
        Path | None, typer.Option(help="Cut MODEL by this plan instead of making one.", show_default=False)
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            help="Only this stage, for example language_model.0; its graph is the one inside.", show_default="all"
        ),
    ] = None,
    emit: Annotated[Form, typer.Option(help="Python source, or the graph as text, DOT or SVG.")] = "text",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write here instead; for the source of all stages, a folder.", show_default=False
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print the stages of a plan: their graph, or (with MODEL) the source each one runs and the graph inside it."""
    if _is_plan(target):
        if stage is not None or emit == "source":
            raise ConfigError(
                f"{target} is a plan; what is inside a stage needs the model: mmcompile stages MODEL --plan {target}"
            )
        _deliver({"plan": _PLAN_GRAPH[emit](Plan.load(target))}, output, json)
        return
    if plan is not None:
        refuse_typed(context, STAGES_FIELDS, WITH_PLAN)
    subject = load_captured(target, config, example)
    made = make_plan(subject, request, read_inputs(request)) if plan is None else Plan.load(plan)
    if stage is None and emit != "source":
        _deliver({"plan": _PLAN_GRAPH[emit](made)}, output, json)
        return
    with busy("writing stage programs"):
        programs = api.stage_programs(subject.model, subject.batch, made)
    _deliver({name: _emitted(programs[name], emit) for name in _chosen(programs, stage)}, output, json)


def _is_plan(target: str) -> bool:
    path = Path(target)
    # Every plan has a fingerprint; a model's config has none.
    return path.is_file() and '"fingerprint"' in path.read_text(errors="replace")


def _chosen(programs: Mapping[str, StageProgram], stage: str | None) -> list[str]:
    if stage is None:
        return list(programs)
    if stage not in programs:
        raise ConfigError(f"no stage {stage!r} with work for this batch; stages are {', '.join(programs)}")
    return [stage]


def _emitted(program: StageProgram, emit: Form) -> str:
    match emit:
        case "source":
            return program.source
        case "text":
            return program_text(program.source)
        case "dot":
            return program_dot(program.source, program.stage)
        case "svg":
            return program_svg(program.source)


def _deliver(texts: Mapping[str, str], output: Path | None, json: bool) -> None:
    if output is None:
        if json:
            print_json(texts)
        else:
            print_text("\n\n".join(text.rstrip("\n") for text in texts.values()))
        return
    paths = {name: output if len(texts) == 1 else output / f"{name}.py" for name in texts}
    for name, text in texts.items():
        write_atomic(paths[name], text.rstrip("\n") + "\n")
    if json:
        print_json({name: str(path) for name, path in paths.items()})
    else:
        print_text("\n".join(f"written to {path}" for path in paths.values()))
