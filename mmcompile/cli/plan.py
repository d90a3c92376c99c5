"""`mmcompile plan`: where would every layer of a model run?"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Annotated

import typer

from mmcompile.cli.console import print_json, print_plan, print_text
from mmcompile.cli.options import (
    AttentionOption,
    AudiosOption,
    AutocastOption,
    BatchSizeOption,
    CalibrationOption,
    ClusterOption,
    ConstrainOption,
    ContextParallelOption,
    DtypeOption,
    FaultToleranceOption,
    FsdpOption,
    GlobalBatchOption,
    ImageSizeOption,
    ImagesOption,
    JsonOption,
    MicrobatchesOption,
    ModelArgument,
    PlacementOption,
    Projector,
    ProjectorOption,
    RecomputeOption,
    ReplicasOption,
    ScheduleOption,
    SolverSecondsOption,
    StagesOption,
    StatsOption,
    Strategy,
    StrategyOption,
    TensorParallelOption,
    TextTokensOption,
    TrainOption,
    parse_components,
    parse_stages,
)
from mmcompile.cli.planning import Example, Searched, Wanted, load_subject, make_plan
from mmcompile.files import write_atomic
from mmcompile.ir.sample_inputs import DEFAULT_IMAGE_SIZE, DEFAULT_TEXT_TOKENS
from mmcompile.report.summary import plan_summary


def plan(
    model: ModelArgument,
    cluster: ClusterOption = "local",
    train: TrainOption = None,
    global_batch: GlobalBatchOption = None,
    stats: StatsOption = None,
    strategy: StrategyOption = Strategy.AUTO,
    microbatches: MicrobatchesOption = None,
    schedule: ScheduleOption = None,
    recompute: RecomputeOption = None,
    placement: PlacementOption = None,
    tensor_parallel: TensorParallelOption = None,
    replicas: ReplicasOption = None,
    fsdp: FsdpOption = None,
    stages: StagesOption = None,
    projector: ProjectorOption = Projector.SEARCH,
    autocast: AutocastOption = None,
    attention: AttentionOption = None,
    context_parallel: ContextParallelOption = None,
    constrain: ConstrainOption = None,
    calibration: CalibrationOption = None,
    solver_seconds: SolverSecondsOption = None,
    fault_tolerance: FaultToleranceOption = None,
    batch_size: BatchSizeOption = 2,
    text_tokens: TextTokensOption = DEFAULT_TEXT_TOKENS,
    images: ImagesOption = 1,
    image_size: ImageSizeOption = DEFAULT_IMAGE_SIZE,
    audios: AudiosOption = 1,
    dtype: DtypeOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan here, as JSON.")] = None,
    json: JsonOption = False,
) -> None:
    """Plan the training of MODEL on a cluster: stages, devices, predicted times and memory, and why so.

    No weights are needed and none are read, so real sizes are planned on a laptop. With --fault-tolerance the plan also says what
    runs when nodes are lost or come back; `mmcompile simulate --trace` plays that over a trace of spot instances.
    """
    searched = Searched(
        global_batch=global_batch,
        stats=stats,
        strategy=strategy,
        schedule=schedule,
        recompute=recompute,
        placement=placement,
        tensor_parallel=tensor_parallel,
        replicas=replicas,
        constrain=constrain,
        calibration=calibration,
        solver_seconds=solver_seconds,
    )
    wanted = searched.read(
        Wanted(
            stages=parse_stages(stages),
            projector=projector,
            autocast=parse_components(autocast),
            fsdp=parse_components(fsdp),
            attention=attention,
            context_parallel=context_parallel,
            microbatches=microbatches,
            fault_tolerance=fault_tolerance,
        )
    )
    example = Example(
        batch_size=batch_size, text_tokens=text_tokens, images=images, image_size=image_size, audios=audios
    )
    started = time.perf_counter()
    subject = load_subject(model, train, dtype, example)
    phases = {"build": time.perf_counter() - started}
    made = make_plan(subject, cluster, wanted, phases)
    if output is not None:
        write_atomic(output, made.to_json())
    if json:
        timing = {f"{name}_s": seconds for name, seconds in phases.items()}
        timing["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print_json(plan_summary(made) | {"timing": timing})
        return
    print_plan(made)
    if output is not None:
        print_text(f"\nwritten to {output}")
