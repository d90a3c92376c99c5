"""A plan as one plain JSON object: what `--json` prints, flat enough for scripts and dashboards."""

from __future__ import annotations

from typing import Any

import msgspec

from mmcompile.plan.plan import Plan, Stage


def plan_summary(plan: Plan) -> dict[str, Any]:
    """`components`, `stages`, `links`, `predicted`, `rejected`, and what the plan was made for. Times [s], sizes [bytes].

    `templates` is empty: a plan has one layout, for one set of nodes.
    """
    chains = [(chain, stage) for chain in plan.chains for stage in chain.stages]
    return {
        "model": plan.fingerprint.model,
        "cluster": str(plan.cluster),
        "processes": plan.num_ranks,
        "strategy": plan.strategy,
        "schedule": plan.schedule,
        "recompute": plan.recompute,
        "attention": plan.attention,
        "num_microbatches": plan.num_microbatches,
        "microbatch_samples": plan.microbatch_samples,
        "global_batch": plan.global_batch,
        "data": plan.data,
        "costs": plan.costs,
        "components": [name for chain in plan.chains for name in chain.components],
        "stages": [_stage(stage) | {"tp": chain.tp, "cp": chain.cp, "dp": chain.dp} for chain, stage in chains],
        "links": [
            {
                "source": link.source,
                "target": link.target,
                "tensors": [tensor.name for tensor in link.tensors],
                "gradient": list(link.gradient),
                "bytes": link.num_bytes,
            }
            for link in plan.links
        ],
        "predicted": msgspec.to_builtins(plan.predicted),
        "templates": [],
        "rejected": msgspec.to_builtins(plan.rejected),
        "notes": list(plan.notes),
        "cuts": msgspec.to_builtins(plan.cuts),
    }


def _stage(stage: Stage) -> dict[str, Any]:
    predicted = stage.prediction
    return {
        "name": stage.name,
        "component": "+".join(segment.component for segment in stage.segments),
        "layers": [
            {"component": segment.component, "first": segment.first, "last": segment.last} for segment in stage.segments
        ],
        "devices": list(stage.ranks),
        "forward_s": predicted.forward_s,
        "input_grad_s": predicted.input_grad_s,
        "weight_grad_s": predicted.weight_grad_s,
        "memory_bytes": {
            "parameters": predicted.parameter_bytes,
            "gradients": predicted.gradient_bytes,
            "optimizer": predicted.optimizer_bytes,
            "activations": predicted.activation_bytes,
            "total": predicted.total_bytes,
        },
    }
