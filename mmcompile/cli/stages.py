"""`mmcompile stages`: the programs of a plan's stages, as source and as graphs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mmcompile import api
from mmcompile.cli.console import busy, print_json, print_text
from mmcompile.cli.options import (
    MODEL_HELP,
    AttentionOption,
    AudiosOption,
    BatchSizeOption,
    ClusterOption,
    ContextParallelOption,
    DtypeOption,
    ImageSizeOption,
    ImagesOption,
    JsonOption,
    MicrobatchesOption,
    Projector,
    ProjectorOption,
    StagesOption,
    TextTokensOption,
    TrainOption,
    parse_stages,
)
from mmcompile.cli.planning import Example, Wanted, load_subject, make_plan, refuse_with_plan
from mmcompile.codegen.program import StageProgram
from mmcompile.errors import ConfigError
from mmcompile.files import write_atomic
from mmcompile.ir.sample_inputs import DEFAULT_IMAGE_SIZE, DEFAULT_TEXT_TOKENS
from mmcompile.planner.plan.plan import Plan
from mmcompile.report.pictures.program_graph import program_dot, program_svg, program_text
from mmcompile.report.pictures.stage_graph import stage_graph_dot, stage_graph_svg, stage_graph_text


class Emit(StrEnum):
    """What to print."""

    SOURCE = "source"
    TEXT = "text"
    DOT = "dot"
    SVG = "svg"


_PLAN_GRAPH = {Emit.TEXT: stage_graph_text, Emit.DOT: stage_graph_dot, Emit.SVG: stage_graph_svg}


def stages(
    target: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|MODEL",
            help=f"A plan file, for its graph of stages; or a model. {MODEL_HELP}",
            show_default=False,
        ),
    ],
    plan: Annotated[
        Path | None, typer.Option(help="Cut MODEL by this plan instead of making one.", show_default=False)
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            help="Only this stage, for example language_model.0; its graph is the one inside.", show_default="all"
        ),
    ] = None,
    emit: Annotated[Emit, typer.Option(help="Python source, or the graph as text, DOT or SVG.")] = Emit.TEXT,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write here instead; for the source of all stages, a folder.", show_default=False
        ),
    ] = None,
    cluster: ClusterOption = "local",
    train: TrainOption = None,
    microbatches: MicrobatchesOption = None,
    stages: StagesOption = None,
    projector: ProjectorOption = Projector.SEARCH,
    attention: AttentionOption = None,
    context_parallel: ContextParallelOption = None,
    batch_size: BatchSizeOption = 2,
    text_tokens: TextTokensOption = DEFAULT_TEXT_TOKENS,
    images: ImagesOption = 1,
    image_size: ImageSizeOption = DEFAULT_IMAGE_SIZE,
    audios: AudiosOption = 1,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """Print the stages of a plan: their graph, or (with MODEL) the source each one runs and the graph inside it."""
    if _is_plan(target):
        if stage is not None or emit is Emit.SOURCE:
            raise ConfigError(
                f"{target} is a plan; what is inside a stage needs the model: mmcompile stages MODEL --plan {target}"
            )
        _deliver({"plan": _PLAN_GRAPH[emit](Plan.load(target))}, output, json)
        return
    wanted = Wanted(
        stages=parse_stages(stages),
        projector=projector,
        attention=attention,
        context_parallel=context_parallel,
        microbatches=microbatches,
    )
    if plan is not None:
        refuse_with_plan(
            stages=wanted.stages,
            microbatches=microbatches,
            attention=attention,
            context_parallel=context_parallel,
        )
    example = Example(
        batch_size=batch_size, text_tokens=text_tokens, images=images, image_size=image_size, audios=audios
    )
    subject = load_subject(target, train, dtype, example)
    made = make_plan(subject, cluster, wanted) if plan is None else Plan.load(plan)
    if stage is None and emit is not Emit.SOURCE:
        _deliver({"plan": _PLAN_GRAPH[emit](made)}, output, json)
        return
    with busy("writing stage programs"):
        programs = api.stage_programs(subject.model, subject.batch, made)
    _deliver({name: _emitted(programs[name], emit) for name in _chosen(programs, stage)}, output, json)


def _is_plan(target: str) -> bool:
    """A JSON file that says so; a model's config has a `model_type` instead."""
    path = Path(target)
    return path.is_file() and '"fingerprint"' in path.read_text(errors="replace")


def _chosen(programs: Mapping[str, StageProgram], stage: str | None) -> list[str]:
    if stage is None:
        return list(programs)
    if stage not in programs:
        raise ConfigError(f"no stage {stage!r} with work for this batch; stages are {', '.join(programs)}")
    return [stage]


def _emitted(program: StageProgram, emit: Emit) -> str:
    match emit:
        case Emit.SOURCE:
            return program.source
        case Emit.TEXT:
            return program_text(program.source)
        case Emit.DOT:
            return program_dot(program.source, program.stage)
        case Emit.SVG:
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
