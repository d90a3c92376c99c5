"""`mmcompile plan`: where would every layer of a model run?"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Annotated

import typer

from mmcompile.cli.console import print_json, print_text
from mmcompile.cli.options import (
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
    ModelArgument,
    Projector,
    ProjectorOption,
    StagesOption,
    TextTokensOption,
    TrainOption,
    parse_stages,
)
from mmcompile.cli.planning import Example, Wanted, load_subject, make_plan
from mmcompile.files import write_atomic
from mmcompile.ir.sample_inputs import DEFAULT_IMAGE_SIZE, DEFAULT_TEXT_TOKENS
from mmcompile.report.summary import plan_summary


def plan(
    model: ModelArgument,
    cluster: ClusterOption = "local",
    train: TrainOption = None,
    microbatches: MicrobatchesOption = 8,
    stages: StagesOption = None,
    projector: ProjectorOption = Projector.SEARCH,
    attention: AttentionOption = None,
    context_parallel: ContextParallelOption = 1,
    batch_size: BatchSizeOption = 2,
    text_tokens: TextTokensOption = DEFAULT_TEXT_TOKENS,
    images: ImagesOption = 1,
    image_size: ImageSizeOption = DEFAULT_IMAGE_SIZE,
    audios: AudiosOption = 1,
    dtype: DtypeOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan here, as JSON.")] = None,
    json: JsonOption = False,
) -> None:
    """Plan the training of MODEL on a cluster: stages, devices, predicted times and memory.

    No weights are needed and none are read, so real sizes are planned on a laptop.
    """
    started = time.perf_counter()
    wanted = Wanted(
        stages=parse_stages(stages), projector=projector, attention=attention, context_parallel=context_parallel
    )
    example = Example(
        batch_size=batch_size, text_tokens=text_tokens, images=images, image_size=image_size, audios=audios
    )
    subject = load_subject(model, train, dtype, example)
    built = time.perf_counter()
    made = make_plan(subject, cluster, microbatches, wanted)
    planned = time.perf_counter()
    if output is not None:
        write_atomic(output, made.to_json())
    if json:
        timing = {
            "build_s": built - started,
            "capture_and_search_s": planned - built,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        print_json(plan_summary(made) | {"timing": timing})
        return
    print_text(str(made))
    if output is not None:
        print_text(f"\nwritten to {output}")
