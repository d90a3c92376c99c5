"""`mmcompile plan`: the ranks of every layer of a model."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Annotated

import typer

from mmcompile.cli.config_options import with_config
from mmcompile.cli.console import print_json, print_plan, print_text
from mmcompile.cli.model import load_captured
from mmcompile.cli.options import JsonOption, ModelArgument
from mmcompile.cli.planning import make_plan, read_inputs
from mmcompile.config import ExampleConfig, ModelConfig, PlanRequest
from mmcompile.files import write_atomic
from mmcompile.report.summary import plan_summary


@with_config
def plan(
    model: ModelArgument,
    request: PlanRequest,
    example: ExampleConfig,
    config: Annotated[ModelConfig, ("train", "dtype")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan here, as JSON.")] = None,
    json: JsonOption = False,
) -> None:
    """Plan the training of MODEL on a cluster: stages, devices, predicted times and memory, and the reasons.

    No weights are needed and none are read, so real sizes are planned on a laptop. With --fault-tolerance the plan also has
    templates for all numbers of nodes; `mmcompile simulate --trace` simulates them over a trace of spot instances.
    """
    inputs = read_inputs(request)
    started = time.perf_counter()
    subject = load_captured(model, config, example)
    phases = {"build": time.perf_counter() - started}
    made = make_plan(subject, request, inputs, phases)
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
