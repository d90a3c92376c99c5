"""`mmcompile simulate`: a step of a plan, played by the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, get_args

import typer

from mmcompile import api
from mmcompile.cli.console import busy, print_json, print_text
from mmcompile.cli.options import (
    MODEL_HELP,
    STATS_HELP,
    AudiosOption,
    BatchSizeOption,
    DtypeOption,
    ImageSizeOption,
    ImagesOption,
    JsonOption,
    PlanOption,
    TextTokensOption,
    TrainOption,
)
from mmcompile.cli.planning import Example, load_subject, read_dataset
from mmcompile.errors import ConfigError
from mmcompile.ir.sample_inputs import DEFAULT_IMAGE_SIZE, DEFAULT_TEXT_TOKENS
from mmcompile.plan.plan import Plan, ScheduleKind, check_fingerprint
from mmcompile.report.perfetto import write_chrome_trace
from mmcompile.report.replay import Replay, replay
from mmcompile.report.sample_loads import chain_loads
from mmcompile.report.simulation import compare, summarize, timeline_text
from mmcompile.report.study import study
from mmcompile.report.timeline import draw_timeline


class Order(StrEnum):
    """Of forwards and backwards; `all` compares them."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    EAGER = "eager-1f1b"
    ZERO_BUBBLE = "zb-h1"
    ALL = "all"


class Emit(StrEnum):
    """How to show the step."""

    TEXT = "text"
    PNG = "png"
    CHROME = "chrome"


def simulate(
    plan: PlanOption,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=f"For --stats: captured for its costs. {MODEL_HELP}", show_default=False),
    ] = None,
    schedule: Annotated[
        Order | None, typer.Option(help="Another order; 'all' compares them.", show_default="the plan's")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Microbatches of one replica.", show_default="the plan's")
    ] = None,
    stats: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help=f"Microbatches that differ, drawn from a dataset; needs MODEL. {STATS_HELP}",
            show_default="equal microbatches",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the samples drawn.")] = 0,
    emit: Annotated[
        Emit, typer.Option(help="Figures and a timeline in characters, a picture, or a trace for Chrome and Perfetto.")
    ] = Emit.TEXT,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the picture or trace.", show_default=False)
    ] = None,
    train: TrainOption = None,
    batch_size: BatchSizeOption = 2,
    text_tokens: TextTokensOption = DEFAULT_TEXT_TOKENS,
    images: ImagesOption = 1,
    image_size: ImageSizeOption = DEFAULT_IMAGE_SIZE,
    audios: AudiosOption = 1,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """Simulate a step of a plan: iteration, idle time by cause, memory of each rank."""
    _check(model, stats, emit, output, schedule)
    loaded = Plan.load(plan)
    count = microbatches or loaded.num_microbatches
    loads: Mapping[str, Sequence[float]] | None = None
    if model is not None and stats is not None:
        example = Example(
            batch_size=batch_size, text_tokens=text_tokens, images=images, image_size=image_size, audios=audios
        )
        subject = load_subject(model, train, dtype, example)
        dataset = read_dataset(stats)
        with busy("capturing"):
            studied = study(subject.model, subject.batch, dataset)
        check_fingerprint(loaded, api.fingerprint_of(studied.graph))
        loads = chain_loads(loaded, studied, count, seed)
    kinds = get_args(ScheduleKind) if schedule is Order.ALL else (schedule.value if schedule else loaded.schedule,)
    steps = [replay(loaded, schedule=kind, num_microbatches=count, loads=loads) for kind in kinds]
    _show(steps, emit, output, json)


def _check(model: str | None, stats: str | None, emit: Emit, output: Path | None, schedule: Order | None) -> None:
    if (model is None) != (stats is None):
        raise ConfigError("MODEL and --stats go together: the model says what the samples cost; give both or neither")
    if (emit is Emit.TEXT) != (output is None):
        what = (
            "--output is for --emit png or chrome" if emit is Emit.TEXT else f"--emit {emit.value} needs --output FILE"
        )
        raise ConfigError(f"{what}; text goes to standard output")
    if schedule is Order.ALL and emit is not Emit.TEXT:
        raise ConfigError(f"--schedule all compares figures; name one schedule for --emit {emit.value}")


def _show(steps: Sequence[Replay], emit: Emit, output: Path | None, json: bool) -> None:
    figures = [summarize(step) for step in steps]
    if output is not None:
        write = draw_timeline if emit is Emit.PNG else write_chrome_trace
        write(output, (), steps[0].timeline.events)
    if json:
        found = [one.to_json() for one in figures]
        print_json({"schedules": found} if len(found) > 1 else found[0] | _written(output))
    elif len(figures) > 1:
        print_text(compare(figures))
    elif output is not None:
        print_text(f"{figures[0]}\n\nwritten to {output}")
    else:
        print_text(f"{figures[0]}\n\n{timeline_text(steps[0])}")


def _written(output: Path | None) -> dict[str, str]:
    return {} if output is None else {"output": str(output)}
