"""Jobs for context-parallel ranks, from captures. Apart from `shard_ranks`, which processes load that know no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from mmcompile.codegen.stage_programs import lower
from mmcompile.ir.capture import Capture
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from support.graphs.split import even_plan
from support.processes.shard_ranks import Job


def job_of(
    found: Capture,
    model: nn.Module,
    roots: Mapping[str, Any],
    *,
    own: tuple[Mapping[str, Tensor], ...] = (),
    stages: Mapping[str, int] | None = None,
) -> Job:
    """Cut a capture into stages; those of the language model are on as many ranks as have their `own` inputs."""
    Pipeline(passes=(GradientFlow(),)).run(found.graph)
    plan = even_plan(found.graph, stages or {})
    if own:
        *others, language = plan.chains
        sharded = tuple(replace(stage, ranks=tuple(range(len(own)))) for stage in language.stages)
        plan = replace(plan, chains=(*others, replace(language, stages=sharded, cp=len(own))))
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return Job(programs=lower(found, plan), tensors=tensors, roots=dict(roots), own=own)
