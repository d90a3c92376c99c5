"""`mmcompile check`: pre-flight."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from mmcompile.captured_model import fingerprint_of
from mmcompile.cli.console import busy, print_json, print_text
from mmcompile.cli.options import (
    AudiosOption,
    BatchSizeOption,
    ClusterOption,
    DtypeOption,
    GlobalBatchOption,
    ImageSizeOption,
    ImagesOption,
    JsonOption,
    ModelArgument,
    StatsOption,
    TextTokensOption,
    TrainOption,
)
from mmcompile.cli.planning import Example, Subject, Wanted, load_subject, make_plan, read_dataset, refuse_with_plan
from mmcompile.data.stats import DatasetStats
from mmcompile.errors import PlanError
from mmcompile.ir.sample_inputs import DEFAULT_IMAGE_SIZE, DEFAULT_TEXT_TOKENS
from mmcompile.planner.plan.plan import Plan, check_fingerprint
from mmcompile.report.check import Checked
from mmcompile.report.check import check as checked
from mmcompile.report.study import study


def check(
    model: ModelArgument,
    stats: StatsOption = None,
    plan: Annotated[
        Path | None, typer.Option(help="Check this plan instead of making one.", show_default=False)
    ] = None,
    cluster: ClusterOption = "local",
    train: TrainOption = None,
    global_batch: GlobalBatchOption = None,
    batch_size: BatchSizeOption = 2,
    text_tokens: TextTokensOption = DEFAULT_TEXT_TOKENS,
    images: ImagesOption = 1,
    image_size: ImageSizeOption = DEFAULT_IMAGE_SIZE,
    audios: AudiosOption = 1,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """Check before training: does the worst sample fit, which stage is the straggler, what trains or only seems to?

    Exit code 1 if anything found is a problem.
    """
    if plan is not None:
        refuse_with_plan(global_batch=global_batch, cluster=cluster != "local")
    example = Example(
        batch_size=batch_size, text_tokens=text_tokens, images=images, image_size=image_size, audios=audios
    )
    loaded = None if plan is None else Plan.load(plan)
    dataset = None if stats is None else read_dataset(stats)
    subject = load_subject(model, train, dtype, example)
    found = _checked(subject, dataset, loaded, cluster, global_batch)
    if json:
        print_json({"ok": found.ok, "findings": msgspec.to_builtins(found.findings)})
    else:
        print_text(str(found))
    if not found.ok:
        raise typer.Exit(1)


def _checked(
    subject: Subject, stats: DatasetStats | None, plan: Plan | None, cluster: str, global_batch: int | None
) -> Checked:
    with busy("capturing"):
        studied = study(subject.model, subject.batch, stats)
    if plan is not None:
        check_fingerprint(plan, fingerprint_of(studied.graph))
        return checked(studied, plan)
    wanted = Wanted(global_batch=global_batch, stats=stats if global_batch else None)
    try:
        return checked(studied, make_plan(subject, cluster, wanted))
    except PlanError as error:
        return checked(studied, None, str(error))
