"""`mmcompile explain`: everything about one stage or layer of a plan."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from mmcompile import api
from mmcompile.captured_model import fingerprint_of
from mmcompile.cli.console import busy, print_json, print_text
from mmcompile.cli.options import (
    MODEL_HELP,
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
from mmcompile.cli.planning import Example, Subject, load_subject
from mmcompile.errors import ConfigError
from mmcompile.ir.sample_inputs import DEFAULT_IMAGE_SIZE, DEFAULT_TEXT_TOKENS
from mmcompile.passes.cost.cost import Cost
from mmcompile.planner.plan.plan import Plan, check_fingerprint
from mmcompile.report.explain import Explanation
from mmcompile.report.explain import explain as explained
from mmcompile.report.layer_work import layer_shares, layer_work


def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="STAGE|LAYER",
            help="A stage (language_model.0); or a layer: its module path, component.index, or a pattern matching one.",
            show_default=False,
        ),
    ],
    plan: PlanOption,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help=f"Captured again for what each layer does; without it the plan file alone is read. {MODEL_HELP}",
            show_default=False,
        ),
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
    """Explain a stage or layer of a plan: what it does, why it is there, what it waits for, and what a move would change."""
    loaded = Plan.load(plan)
    if model is None:
        if train or dtype:
            raise ConfigError("--train and --dtype have no effect without MODEL: the plan file alone is read")
        found = explained(loaded, what)
    else:
        example = Example(
            batch_size=batch_size, text_tokens=text_tokens, images=images, image_size=image_size, audios=audios
        )
        found = _with_model(loaded, what, load_subject(model, train, dtype, example))
    if json:
        print_json(msgspec.to_builtins(found))
    else:
        print_text(str(found))


def _with_model(plan: Plan, what: str, subject: Subject) -> Explanation:
    with busy("capturing"):
        graph = api.capture(subject.model, subject.batch)
    check_fingerprint(plan, fingerprint_of(graph))
    table, dtype = Cost().run(graph), graph.main_dtype
    shares, work = layer_shares(plan, table, dtype), layer_work(graph, table, plan.cluster, dtype)
    return explained(plan, what, shares, work)
